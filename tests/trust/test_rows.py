"""Layers that work along the batch, or on inputs without one: they are not taken as row-wise."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trust.story import follow, grow_up, quiet

import embens


class Net(nn.Module):
    """Two layers, something between them, and an output layer."""

    def __init__(self, middle):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.middle = middle
        self.has_output_layer = keeps_width(middle)  # a branch on a shape would not be folded

    def forward(self, x):
        h = self.middle(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return self.out(h) if self.has_output_layer else h


def keeps_width(middle):
    """Return whether a module returns as many features as it gets."""
    try:
        rows = torch.rand(4, 6, dtype=torch.float64)
        return copy.deepcopy(middle).double()(rows).shape[-1:] == (6,)
    except (RuntimeError, ValueError, IndexError):  # the module does not take four rows
        return False


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


MODULES = {
    "GLU over the rows": nn.GLU(dim=0),
    "GLU over the rows from the end": nn.GLU(dim=-2),
    "GLU of features": nn.GLU(dim=-1),
    "softmax over the rows": nn.Softmax(dim=0),
    "log softmax over the rows": nn.LogSoftmax(dim=-2),
    "softmax without an axis": nn.Softmax(dim=None),
    "softmin over the rows": nn.Softmin(dim=0),
    "flatten everything": nn.Flatten(0),
    "flatten from the end": nn.Flatten(-2),
    "unflatten rows": nn.Unflatten(0, (2, 2)),
    "unflatten rows from the end": nn.Unflatten(-2, (2, 2)),
    "unflatten features": nn.Unflatten(1, (2, 3)),
    "layer norm over rows": nn.LayerNorm([4, 6]),
    "rms norm over rows": nn.RMSNorm([4, 6]),
    "layer norm": nn.LayerNorm(6),
    "padding of the rows": nn.ConstantPad2d((0, 0, 1, 1), 0.5),
    "padding in one dimension": nn.ConstantPad1d((1, -1), 0.5),
    "zero padding of unbatched": nn.ZeroPad2d((0, 0, 2, 0)),
    "reflection of unbatched": nn.ReflectionPad1d((1, 1)),
    "pooling without a batch": nn.MaxPool1d(2),
    "average pooling without a batch": nn.AvgPool1d(2),
    "adaptive pooling without a batch": nn.AdaptiveAvgPool1d(3),
    "unfold without a batch": Function(lambda x: nn.Unfold(2)(x[None, None])[0].T),
    "softmax of two dimensions": Function(lambda x: nn.Softmax2d()(x[None, None])[0, 0]),
    "fold": Function(lambda x: nn.Fold((2, 3), (1, 1))(x.T[None])[0].flatten(1)),
    "channel shuffle without a batch": Function(lambda x: nn.ChannelShuffle(2)(x[None])[0]),
    "upsampling without a batch": Function(lambda x: nn.Upsample(scale_factor=2)(x[None])[0]),
    "interpolation over rows": Function(lambda x: F.interpolate(x[None, None], scale_factor=2)[0]),
    "pixel shuffle without a batch": Function(lambda x: F.pixel_shuffle(x[:, None, :6], 2)),
    "functional pad of the rows": Function(lambda x: F.pad(x, (0, 0, 1, 0))),
    "functional pad": Function(lambda x: F.pad(x, (0, 1))),
    "functional GLU": Function(lambda x: F.glu(x, 0)),
    "functional softmax": Function(lambda x: F.softmax(x, -2)),
    "normalised rows": Function(lambda x: F.normalize(x, dim=0)),
    "sum of rows": Function(lambda x: x - x.sum(0, keepdim=True)),
    "cumulative sum of rows": Function(lambda x: x.cumsum(0)),
    "sorted rows": Function(lambda x: x.sort(0).values),
    "rolled rows": Function(lambda x: x.roll(1, 0)),
    "flipped rows": Function(lambda x: x.flip(0)),
    "roll of everything": Function(lambda x: x.roll(1)),
    "standard deviation over rows": Function(lambda x: x / x.std(0)),
    "largest entry": Function(lambda x: x / x.max()),
    "norm of everything": Function(lambda x: x / x.norm()),
    "number of rows": Function(lambda x: x * len(x)),
    "number of rows by size": Function(lambda x: x / x.size(-2)),
    "shape": Function(lambda x: x * x.shape[0]),
    "product with itself": Function(lambda x: x @ x.mT @ x),
    "every second row": Function(lambda x: x[::2]),
    "first row": Function(lambda x: x + x[0]),
    "stacked rows": Function(lambda x: torch.stack([x, x]).mean(0)),
    "joined rows": Function(lambda x: torch.cat([x, x])),
    "pairs": Function(lambda x: (x[:, None] - x[None]).square().sum(1)),
    "distances": Function(lambda x: torch.cdist(x, x)),
    "covariance": Function(lambda x: torch.cov(x)),
    "bilinear rows": Function(lambda x: torch.einsum("ij,kj->ik", x, x)),
    "squeezed": Function(lambda x: x.squeeze()),
    "squeezed rows": Function(lambda x: x.squeeze(0)),
    "batch norm": nn.BatchNorm1d(6),
    "batch norm without statistics": nn.BatchNorm1d(6, track_running_stats=False),
    "batch norm without affine": nn.BatchNorm1d(6, affine=False),
    "cumulative batch norm": nn.BatchNorm1d(6, momentum=None),
    "local response over rows": Function(lambda x: nn.LocalResponseNorm(2)(x[None, ..., None])[0]),
    "sum over no axis": Function(lambda x: x - x.sum(dim=())),
    "mean over no axis": Function(lambda x: x - x.mean(dim=[])),
    "maximum over no axis": Function(lambda x: x - torch.amax(x, ())),
    "variance over no axis": Function(lambda x: x / (1 + torch.var(x, dim=(), correction=0))),
    "softmax by name": Function(lambda x: torch.softmax(input=x, dim=0)),
    "softmax of features by name": Function(lambda x: torch.softmax(input=x, dim=1)),
    "sum by name": Function(lambda x: x - torch.sum(input=x, dim=0, keepdim=True)),
    "parts by name": Function(lambda x: torch.cat(tensors=[x[:, :3], x[:, 3:]], dim=1)),
    "shape by name": Function(lambda x: torch.reshape(input=x, shape=(-1, 6))),
    "axes by name": Function(lambda x: torch.squeeze(input=x.unsqueeze(dim=1), dim=1)),
    "pairs of indices": Function(
        lambda x: x + x.view(-1, 2, 3)[:, (0, 1), (1, 2)].softmax(-2).repeat(1, 3)
    ),
    "square of a size": Function(lambda x: x + torch.eye(x.shape[1], dtype=x.dtype)[0]),
}


@pytest.mark.parametrize("rows", [4, 1])
@pytest.mark.parametrize("case", MODULES)
@pytest.mark.filterwarnings(
    "ignore:Implicit dimension choice", "ignore:std\\(\\)", "ignore:cov\\(\\)"
)
@quiet
def test_rows_of_members_do_not_meet(case, rows):
    reference = Net(MODULES[case])
    x = torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        reference.double()(x)
    except (RuntimeError, ValueError, IndexError):
        pytest.skip("the reference does not take this many rows")
    for training in (False, True):
        ensemble = grow_up(reference, "batch ensemble").train(training)
        if training and rows == 1 and "norm" in case:
            return
        follow(ensemble, [x, x])


IMAGES = {
    "instance norm": nn.InstanceNorm2d(4),
    "instance norm with statistics": nn.InstanceNorm2d(4, track_running_stats=True, affine=True),
    "group norm": nn.GroupNorm(2, 4),
    "layer norm of images": nn.LayerNorm([4, 6, 6]),
    "batch norm": nn.BatchNorm2d(4),
    "upsampling": nn.Upsample(scale_factor=2),
    "pixel shuffle": nn.PixelShuffle(2),
    "pixel unshuffle": nn.PixelUnshuffle(2),
    "channel shuffle": nn.ChannelShuffle(2),
    "unfold": nn.Unfold(2),
    "fold": nn.Sequential(nn.Unfold(2), nn.Fold((6, 6), 2)),
    "max pooling": nn.MaxPool2d(2),
    "pooling in one dimension": nn.Sequential(nn.Flatten(-2), nn.MaxPool1d(2)),
    "padding in one dimension": nn.Sequential(nn.Flatten(-2), nn.ConstantPad1d(1, 0.5)),
    "padding in three dimensions": nn.ConstantPad3d(1, 0.5),
    "padding": nn.ZeroPad2d(1),
    "circular padding": nn.CircularPad2d(1),
    "softmax of two dimensions": nn.Softmax2d(),
    "GLU of channels": nn.GLU(dim=-3),
    "softmax over rows or channels": nn.Softmax(dim=-3),
    "softmax over rows": nn.Softmax(dim=-4),
    "flatten": nn.Flatten(),
    "flatten from the channels": nn.Flatten(-3),
    "dropout of channels": nn.Dropout2d(0.0),
    "alpha dropout": nn.FeatureAlphaDropout(0.0),
    "adaptive pooling": nn.AdaptiveMaxPool2d(2),
    "local response": nn.LocalResponseNorm(2),
    "power pooling": nn.LPPool2d(2, 2),
    "cosine similarity": Function(lambda x: nn.CosineSimilarity(dim=0)(x, x * 2)),
    "interpolation": Function(lambda x: F.interpolate(x, size=3)),
    "rotation": Function(lambda x: torch.rot90(x, 1, (-2, -1))),
    "reflection": Function(lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")),
}


@pytest.mark.parametrize("shape", [(3, 2, 6, 6), (2, 6, 6)], ids=["batched", "unbatched"])
@pytest.mark.parametrize("case", IMAGES)
@pytest.mark.filterwarnings("ignore:dropout2d")
@quiet
def test_images_with_and_without_a_batch_are_right(case, shape):
    reference = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Tanh(), nn.Conv2d(4, 4, 1), IMAGES[case])
    reference.double()
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        reference(x)
    except (RuntimeError, ValueError, IndexError):
        pytest.skip("the reference does not take this shape")
    for training in (False, True):
        torch.manual_seed(0)
        ensemble = embens.batch_ensemble(reference, 3).train(training)
        follow(ensemble, [x, x], chunk=(None, 2)[training])


@pytest.mark.parametrize("norm_affine", ["shared", "member"])
@pytest.mark.parametrize("chunk", [None, 1, 2])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_before_the_first_modulation_are_updated_once(norm_affine, chunk, momentum):
    norm = nn.BatchNorm1d(6, momentum=momentum)
    reference = nn.Sequential(norm, nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    ensemble = embens.embed(reference, 3, norm_affine=norm_affine).train()
    x = torch.randn(8, 6, dtype=torch.float64)
    for _ in range(2):
        ensemble(x, chunk=chunk)
        reference.train()(x)
    for a in range(3):
        copied = ensemble.member(a)[0]
        torch.testing.assert_close(copied.running_mean, norm.running_mean)
        torch.testing.assert_close(copied.running_var, norm.running_var)
        assert int(copied.num_batches_tracked) == 2


@quiet
def test_vectors_without_a_batch_are_right():
    for build in (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)),
        lambda: nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)),
    ):
        torch.manual_seed(0)
        reference = build().double()
        ensemble = embens.batch_ensemble(reference, 3)
        is_text = isinstance(reference[0], nn.Embedding)
        inputs = [torch.tensor(3), torch.tensor([1, 2])] if is_text else [torch.randn(6).double()]
        for x in inputs:
            follow(ensemble, [x, x])


@quiet
def test_code_that_asks_for_types_sees_those_of_the_user():
    class Picky(Net):
        def forward(self, x):
            for layer in (self.a, self.b, self.out):
                if type(layer) is not nn.Linear or layer.__class__ is not nn.Linear:
                    raise TypeError("not a Linear")
                if not isinstance(layer.weight, torch.Tensor) or layer.weight.dim() != 2:
                    raise TypeError("not a weight")
            return super().forward(x)

    ensemble = grow_up(Picky(nn.Identity()), "batch ensemble")
    follow(ensemble, [torch.randn(4, 6).double()])
    member = ensemble.member(0)
    assert type(member) is Picky
    assert type(member.a) is nn.Linear


@quiet
def test_every_member_draws_numbers_whose_shape_depends_on_the_input():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            h = torch.tanh(self.b(torch.tanh(self.a(x))))
            return torch.randn(h.shape[1], dtype=h.dtype) + 0 * h

    outputs = grow_up(Noisy(), "batch ensemble")(torch.zeros(4, 6, dtype=torch.float64))
    assert not torch.equal(outputs[0], outputs[1])
