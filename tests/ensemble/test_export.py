"""ONNX files, checked with onnxruntime, and torch.export."""

import copy

import pytest
import torch
from cases import ARCHITECTURES, Residual
from torch import Tensor, nn
from torch.export import Dim

import embens
from embens.ensemble import export
from embens.ensemble.export import to_onnx

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

BUILD = {case.name: case for case in ARCHITECTURES}
FAMILIES = {
    "batch_ensemble": lambda reference: embens.batch_ensemble(reference, 3),
    "all sites": lambda reference: embens.embed(reference, 3, sites="all"),
    "mc_dropout": lambda reference: embens.mc_dropout(reference, 3, fresh=False),
    "last_layer_dropout": lambda reference: embens.last_layer_dropout(reference, 3),
    "independent": lambda reference: embens.independent(reference, 3),
}


def run(path, *inputs: Tensor) -> list[Tensor]:
    """Return the outputs of a file."""
    session = onnxruntime.InferenceSession(path)
    names = [node.name for node in session.get_inputs()]
    feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return [torch.from_numpy(output) for output in session.run(None, feed)]


def rows_of(x: Tensor, count: int) -> Tensor:
    """Return other rows of the same kind."""
    if x.is_floating_point():
        return torch.randn(count, *x.shape[1:], dtype=x.dtype)
    return x.flatten()[torch.randint(x.numel(), (count, *x.shape[1:]))]


def close(actual, expected, tolerance=1e-4):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


class TwoInputs(nn.Module):
    """Has several inputs, one of them integers, and returns a dictionary with a tuple."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 6), nn.Embedding(9, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head, self.scale = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x: Tensor, token: Tensor, *, mask: Tensor | None = None, steps: int = 1):
        hidden = self.norm(torch.tanh(self.left(x) + self.right(token)))
        if mask is not None:
            hidden = hidden * mask
        for _ in range(steps):
            hidden = torch.tanh(hidden)
        return {"logits": self.head(hidden), "rest": (self.scale(hidden), hidden), "steps": steps}


# ONNX


LONG = pytest.mark.long
BATCHED = [n for n in BUILD if n not in ("unbatched conv", "encoder layer, time first")]


@pytest.mark.parametrize(
    ("name", "family"),
    [("attention by hand", "batch_ensemble"), ("conv1d", "independent")]
    + [pytest.param(n, f, marks=LONG) for n in BATCHED for f in FAMILIES],
)
def test_an_ensemble_is_one_file_for_any_number_of_rows(name, family, tmp_path):
    case = BUILD[name]
    x = case.inputs(torch.Generator().manual_seed(0))
    ensemble = FAMILIES[family](case.build())
    assert ensemble.to_onnx(tmp_path / "all.onnx", x) == tmp_path / "all.onnx"
    ensemble.eval()
    for count in (1, 2, 17):
        other = rows_of(x, count)
        (outputs,) = run(tmp_path / "all.onnx", other)
        with torch.no_grad():
            close(outputs, ensemble(other))


@pytest.mark.parametrize("name", ["mlp", pytest.param("transformer", marks=LONG)])
@pytest.mark.parametrize("what", ["member", "collapsed", "mc_dropout"])
def test_members_collapsed_networks_and_fixed_masks_can_be_exported(name, what, tmp_path):
    case = BUILD[name]
    x = case.inputs(torch.Generator().manual_seed(0))
    if what == "collapsed":
        network = embens.last_layer_dropout(case.build(), 4).collapse()
    else:
        network = embens.mc_dropout(case.build(), 3, fresh=False)
        network = network.member(1) if what == "member" else network
    embens.to_onnx(network, tmp_path / "one.onnx", x)
    other = rows_of(x, 7)
    with torch.no_grad():
        close(run(tmp_path / "one.onnx", other)[0], network.eval()(other))


def test_several_inputs_and_outputs_keep_their_names(tmp_path):
    ensemble = embens.batch_ensemble(TwoInputs(), 3)
    x, token, mask = torch.randn(5, 4), torch.randint(9, (5,)), torch.rand(5, 6)
    path = tmp_path / "two.onnx"
    ensemble.to_onnx(path, {"x": x, "token": token, "mask": mask, "steps": 2})
    session = onnxruntime.InferenceSession(path)
    assert [node.name for node in session.get_inputs()] == ["x", "token", "mask"]
    assert [node.name for node in session.get_outputs()] == ["logits", "rest_0", "rest_1"]
    assert session.get_inputs()[0].shape == ["batch", 4]
    assert session.get_outputs()[0].shape == [3, "batch", 3]
    more = torch.randn(9, 4), torch.randint(9, (9,)), torch.rand(9, 6)
    expected = ensemble.eval()(*more[:2], mask=more[2], steps=2)
    outputs = run(path, *more)
    close(outputs, [expected["logits"], *expected["rest"]])
    ensemble.to_onnx(path, (x, token))
    close(run(path, *more[:2])[0], ensemble(*more[:2])["logits"])


def test_an_input_with_another_number_of_rows_keeps_its_size(tmp_path):
    class Prototypes(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.two(torch.tanh(self.one(x)))
            return hidden, hidden @ prototypes.T

    network, table = Prototypes(), torch.randn(3, 6)
    to_onnx(network, tmp_path / "p.onnx", (torch.randn(5, 4), table))
    x = torch.randn(8, 4)
    close(run(tmp_path / "p.onnx", x, table), list(network(x, table)))
    session = onnxruntime.InferenceSession(tmp_path / "p.onnx")
    assert session.get_inputs()[1].shape == [3, 6]
    assert [node.name for node in session.get_outputs()] == ["output_0", "output_1"]


def test_double_precision_stays_double(tmp_path):
    ensemble = embens.batch_ensemble(
        nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double(), 3
    )
    ensemble.to_onnx(tmp_path / "d.onnx", torch.randn(4, 5, dtype=torch.float64))
    x = torch.randn(6, 5, dtype=torch.float64)
    (outputs,) = run(tmp_path / "d.onnx", x)
    assert outputs.dtype == torch.float64
    close(outputs, ensemble(x), 1e-9)


def test_an_example_has_at_least_one_row(tmp_path):
    network = BUILD["mlp"].build()
    to_onnx(network, tmp_path / "m.onnx", torch.randn(1, 5))
    x = torch.randn(6, 5)
    close(run(tmp_path / "m.onnx", x)[0], network(x))
    with pytest.raises(ValueError, match=r"at least one row, got .*\(0, 5\)"):
        to_onnx(network, tmp_path / "m.onnx", torch.randn(0, 5))
    with pytest.raises(TypeError, match="too many positional"):
        to_onnx(network, tmp_path / "m.onnx", (torch.randn(2, 5), 1, 2))


def test_a_network_is_left_as_it_was(tmp_path):
    ensemble = embens.batch_ensemble(Residual(0.5), 2)
    ensemble.reference.blocks[0].eval()
    ensemble.chunk = 2
    before = copy.deepcopy(ensemble)
    ensemble.to_onnx(tmp_path / "r.onnx", torch.randn(3, 3, 6, 6))
    assert [m.training for m in ensemble.modules()] == [m.training for m in before.modules()]
    assert ensemble.chunk == 2
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, ensemble.state_dict()[name]), name


def test_fresh_masks_cannot_be_exported(tmp_path):
    ensemble = embens.mc_dropout(BUILD["mlp"].build(), 3)
    with pytest.raises(ValueError, match=r"drawn at each pass.*fresh=False"):
        ensemble.to_onnx(tmp_path / "m.onnx", torch.randn(4, 5))


class Constant(nn.Module):
    """Code that depends on the number of rows."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x))) + (1.0 if x.shape[0] == 4 else 0.0)


def test_code_that_depends_on_the_number_of_rows_raises_and_leaves_nothing(tmp_path):
    path = tmp_path / "c.onnx"
    path.write_text("old")
    x = torch.randn(4, 5)
    for network in (Constant(), embens.batch_ensemble(Constant(), 2, example_input=x)):
        with pytest.raises(ValueError, match="any number of rows"):
            to_onnx(network, path, x)
    assert [p.name for p in tmp_path.iterdir()] == ["c.onnx"]
    assert path.read_text() == "old"


def test_a_file_with_other_outputs_is_not_kept(tmp_path, monkeypatch):
    convert = export._TensorFunction.convert

    def wrong(self, *arguments):
        model = convert(self, *arguments)
        weight = next(t for t in model.graph.initializer if t.data_type == 1)
        weight.raw_data = bytes(len(weight.raw_data))
        return model

    monkeypatch.setattr(export._TensorFunction, "convert", wrong)
    with pytest.raises(ValueError, match="not close"):
        to_onnx(BUILD["mlp"].build(), tmp_path / "m.onnx", torch.randn(4, 5))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_or_library_raises_first(tmp_path, monkeypatch):
    network = BUILD["mlp"].build()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        to_onnx(network, tmp_path / "nowhere" / "m.onnx", torch.randn(4, 5))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'embens\[onnx\]'"):
        to_onnx(network, tmp_path / "m.onnx", torch.randn(4, 5))


# torch.export


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "family"),
    [("mlp", family) for family in FAMILIES]
    + [("paper's cnn", "independent"), ("transformer", "all sites")]
    + [pytest.param(n, f, marks=LONG) for n in BATCHED for f in FAMILIES],
)
def test_an_export_takes_any_number_of_rows(name, family):
    case = BUILD[name]
    x = case.inputs(torch.Generator().manual_seed(0))
    ensemble = FAMILIES[family](case.build()).eval()
    exported = torch.export.export(ensemble, (x,), dynamic_shapes=({0: Dim.AUTO},)).module()
    for count in (1, 3, 300):
        other = rows_of(x, count)
        with torch.no_grad():
            close(exported(other), ensemble(other))


class Recurrent(nn.Module):
    """Holds its weights in a list as well, as recurrent layers do."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.core = nn.GRU(4, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        _, state = self.core(self.embedding(tokens))
        return self.head(state[-1])


@pytest.mark.filterwarnings("ignore")
def test_a_recurrent_network_is_exported_and_trained_on(tmp_path):
    ensemble, tokens = embens.batch_ensemble(Recurrent(), 3).eval(), torch.randint(9, (4, 5))
    expected = ensemble(tokens).detach()
    torch.export.export(ensemble, (tokens,))
    close(run(ensemble.to_onnx(tmp_path / "net.onnx", tokens), tokens)[0], expected)
    close(ensemble(tokens).detach(), expected)
    embens.fit(ensemble, (tokens, torch.tensor([0, 1, 2, 0])), epochs=2, progress=False)
    trained = ensemble.eval()(tokens).detach()
    assert not torch.equal(trained, expected)
    close(run(ensemble.to_onnx(tmp_path / "net.onnx", tokens), tokens)[0], trained)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [Dim("rows"), Dim.AUTO, Dim.DYNAMIC])
def test_dynamic_shapes_can_have_every_form(rows):
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    ensemble, more = embens.batch_ensemble(net, 3).eval(), torch.randn(8, 4)
    for form in (({0: rows},), [{0: rows}], {"x": {0: rows}}):
        program = torch.export.export(ensemble, (torch.randn(5, 4),), dynamic_shapes=form)
        close(program.module()(more), ensemble(more))
    ensemble = embens.batch_ensemble(TwoInputs(), 3).eval()
    args, more = ((torch.randn(n, 4), torch.randint(9, (n,))) for n in (5, 8))
    shapes = {"x": {0: rows}, "inputs": ({0: rows},)}
    program = torch.export.export(ensemble, args, dynamic_shapes=shapes)
    close(program.module()(*more)["logits"], ensemble(*more)["logits"])


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_an_export_with_chunks_takes_any_number_of_rows(chunk):
    ensemble = embens.batch_ensemble(BUILD["paper's cnn"].build(), 3).eval()
    ensemble.chunk = chunk
    x = torch.randn(4, 3, 8, 8)
    exported = torch.export.export(ensemble, (x,), dynamic_shapes=({0: Dim.AUTO},)).module()
    for count in (1, 400):
        other = rows_of(x, count)
        close(exported(other), ensemble(other))
