"""Networks with an input for each member, against the same networks written by hand."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from cases import ARCHITECTURES, Residual
from embens.ensemble.heads import InputHeads, draw_shares, weigh
from torch import nn

import embens

REFUSED = ("attention by hand", "encoder layer, time first", "cross attention", "tied")
TAKEN = [case for case in ARCHITECTURES if case.name not in REFUSED]
everywhere = pytest.mark.parametrize("case", TAKEN, ids=str)


def build(case, members=3, **options):
    torch.manual_seed(0)
    reference = case.build()
    generator = torch.Generator().manual_seed(1)
    ensemble = embens.mimo(reference, members, generator=generator, **options)
    inputs = [case.inputs(torch.Generator().manual_seed(a)) for a in range(members)]
    return reference, ensemble, torch.stack(inputs)


class Summed(nn.Module):
    """First layers by hand: one plain copy for each member, whose outputs are added."""

    def __init__(self, heads: InputHeads, inputs):
        super().__init__()
        self.inputs, self.copies = inputs, nn.ModuleList()
        for a, block in enumerate(heads.module.weight.detach()):
            layer = copy.deepcopy(heads.module)
            layer.weight = nn.Parameter(block.clone())
            if a and getattr(layer, "bias", None) is not None:
                nn.init.zeros_(layer.bias)
            self.copies.append(layer)

    def forward(self, x):
        return sum(layer(x) for layer, x in zip(self.copies, self.inputs, strict=True))


def by_hand(case, ensemble, xs) -> torch.Tensor:
    """Return the outputs of plain networks, one for each member, that share what they should."""
    outputs = []
    for a in range(ensemble.members):
        network = ensemble.member(a)
        for name, heads in ensemble.individuals.items():
            if isinstance(heads, InputHeads):
                owner, _, key = name.rpartition(".")
                summed = Summed(heads, xs)
                setattr(network.get_submodule(owner), key, summed)
                for held in (m for m in network.modules() if hasattr(m, "order")):
                    held.order[0] = summed
        outputs.append(network(xs[0]))
    return torch.stack(outputs)


@everywhere
def test_outputs_of_members_inputs_are_those_of_layers_that_are_added(case):
    _, ensemble, xs = build(case)
    ensemble.eval()
    torch.testing.assert_close(ensemble(xs, batch="own"), by_hand(case, ensemble, xs))
    same = xs[:1].expand(xs.shape)
    torch.testing.assert_close(ensemble(same, batch="own"), ensemble(xs[0]))


@everywhere
@pytest.mark.filterwarnings("ignore:this network can't run several")  # the one without a batch
def test_members_and_their_mean_are_plain_networks(case):
    _, ensemble, xs = build(case)
    ensemble.eval()
    outputs = ensemble(xs[0])
    for a in range(3):
        torch.testing.assert_close(ensemble.member(a)(xs[0]), outputs[a])
        plain = ensemble.member(a).modules()
        assert not any(type(m).__module__.startswith("embens.ensemble") for m in plain)
    torch.testing.assert_close(ensemble.collapse()(xs[0]), outputs.mean(0))
    some = ensemble.subset([2, 0, 0])
    torch.testing.assert_close(some(xs[0]), outputs[[2, 0, 0]])
    torch.testing.assert_close(some(xs, batch="own")[1], some.member(1)(xs[1]))


@everywhere
def test_one_member_is_the_reference(case):
    reference, ensemble, xs = build(case, 1)
    attends = any(isinstance(module, nn.MultiheadAttention) for module in reference.modules())
    close = {} if attends else {"rtol": 0, "atol": 0}  # torch fuses its own
    torch.testing.assert_close(ensemble.eval()(xs[0])[0], reference.eval()(xs[0]), **close)
    torch.testing.assert_close(ensemble(xs, batch="own")[0], reference(xs[0]), **close)


@everywhere
def test_files_pickles_and_copies_hold_everything(case, tmp_path):
    _, ensemble, xs = build(case, mix="linear", repetition=0.25)
    with torch.no_grad():
        for parameter in ensemble.parameters():
            parameter.add_(0.1)
    ensemble.save(tmp_path / "file")
    loaded = embens.load(tmp_path / "file", case.build())
    for other in (loaded, pickle.loads(pickle.dumps(ensemble)), copy.deepcopy(ensemble)):
        assert other.plan == ensemble.plan
        for batch, x in (("same", xs[0]), ("own", xs)):
            assert torch.equal(other.eval()(x, batch=batch), ensemble.eval()(x, batch=batch))


@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_an_onnx_file_gives_the_same_outputs(tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    _, ensemble, xs = build(next(case for case in TAKEN if case.name == "paper's cnn"))
    path = tmp_path / "net.onnx"
    ensemble.eval().to_onnx(path, xs[0])
    x = torch.cat([xs[0], xs[1], xs[2]])
    session = onnxruntime.InferenceSession(path)
    outputs = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    torch.testing.assert_close(torch.tensor(outputs), ensemble(x).detach(), rtol=1e-4, atol=1e-5)


def test_blocks_are_drawn_at_the_scale_that_keeps_the_sum():
    reference = nn.Sequential(nn.Linear(400, 300), nn.ReLU(), nn.Linear(300, 2))
    ensemble = embens.mimo(reference, 4)
    blocks = ensemble.individuals["0"].tensors()["weight"]
    scale = reference[0].weight.std()
    torch.testing.assert_close(blocks.std((1, 2)), (scale / 2).expand(4), rtol=0.02, atol=0)
    correlations = torch.corrcoef(blocks.flatten(1).detach()) - torch.eye(4)
    assert correlations.abs().max() < 5 / (400 * 300) ** 0.5
    assert torch.equal(ensemble.network[0].module.bias, reference[0].bias)
    torch.testing.assert_close(blocks.sum(0).std(), scale, rtol=0.02, atol=0)


def test_parameters_are_counted_as_blocks_heads_and_the_trunk():
    reference = nn.Sequential(
        nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2)
    )
    ensemble = embens.mimo(reference, 4)
    assert sum(p.numel() for p in ensemble.individual_parameters()) == 4 * (15 + 10 + 2)
    assert sum(p.numel() for p in ensemble.shared_parameters()) == 5 + 30
    assert ensemble.natural_gamma == 4.0
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        groups = ensemble.parameter_groups(lr=0.3, weight_decay=0.1, optimizer=optimizer)
        assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.3, 0.1), (0.3, 0.1)]


class Trunk(nn.Module):
    """Counts its calls and rows, with dropout and BatchNorm behind functional code."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x):
        x = F.relu(self.first(x))
        x = F.dropout(self.norm(self.drop(x)), 0.5, self.training)
        return self.last(torch.tanh(self.middle(x))).tanh()


@pytest.mark.parametrize("batch", ["same", "own"])
def test_the_trunk_runs_once_whatever_is_random_in_it(batch):
    reference = Trunk()
    ensemble = embens.mimo(reference, 4)
    seen = []
    for module in ensemble.network.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.Dropout)):
            module.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    x = torch.randn(4, 6, 3) if batch == "own" else torch.randn(6, 3)
    assert ensemble(x, batch=batch).shape == (4, 6, 2)  # and a trial on copies
    seen.clear()
    before = ensemble.network.norm.num_batches_tracked.clone()
    ensemble(x, batch=batch)
    assert seen == [(6, 8)] * 2
    assert ensemble.network.norm.num_batches_tracked == before + 1


class Keeping(nn.Module):
    """Keeps a running mean in a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        z = torch.tanh(self.first(x))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * z.detach().mean(0)
        return self.last(z - self.mean)


class KeepingAnAttribute(Keeping):
    kept = 0.0

    def forward(self, x):
        z = torch.tanh(self.first(x))
        self.kept = 0.9 * self.kept + 0.1 * z.detach().mean(0)
        return self.last(z - self.kept)


def test_what_the_trunk_keeps_is_common_to_all_members():
    ensemble = embens.mimo(Keeping(), 3)
    x = torch.randn(3, 6, 3)
    assert ensemble(x, batch="own").shape == (3, 6, 2)
    weight, bias = ensemble.individuals["first"].tensors()["weight"], ensemble.network.first.bias
    z = torch.tanh(torch.einsum("aoi,abi->bo", weight, x) + bias)
    torch.testing.assert_close(ensemble.network.mean, 0.1 * z.mean(0))
    ensemble.eval()
    expected = torch.stack([ensemble.member(a)(x[0]) for a in range(3)])
    torch.testing.assert_close(ensemble(x[0]), expected)


@pytest.mark.filterwarnings("ignore")
def test_what_code_keeps_in_attributes_is_refused():
    with pytest.raises(ValueError, match="keep them in a buffer"):
        embens.mimo(KeepingAnAttribute(), 3)


def test_gradients_are_those_of_the_sum_of_the_losses_by_hand():
    torch.manual_seed(0)
    reference = nn.Sequential(
        nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)
    )
    ensemble = embens.mimo(reference, 3).double()
    x, y = torch.randn(3, 7, 3, dtype=torch.float64), torch.randint(2, (3, 7))
    loss = embens.objective(ensemble(x, batch="own"), y, batch="own")
    loss.backward()
    blocks, heads, biases = (
        t.detach().clone().requires_grad_()
        for t in (
            *ensemble.individuals["0"].tensors().values(),
            *ensemble.individuals["4"].tensors().values(),
        )
    )
    bias, middle = ensemble.network[0].module.bias, copy.deepcopy(ensemble.network[2])
    middle.zero_grad()
    z = torch.einsum("aoi,abi->bo", blocks, x) + bias.detach()
    z = torch.tanh(middle(torch.tanh(z)))
    outputs = torch.einsum("aoi,bi->abo", heads, z) + biases[:, None]
    expected = sum(F.cross_entropy(o, t) for o, t in zip(outputs, y, strict=True))
    expected.backward()
    torch.testing.assert_close(loss, expected)
    ours = [p.grad for m in ensemble.individuals.values() for p in m.tensors().values()]
    for a, b in zip(ours, (blocks.grad, heads.grad, biases.grad), strict=True):
        torch.testing.assert_close(a, b)
    weight = middle.module.weight if hasattr(middle, "module") else middle.weight
    shared = next(p for p in ensemble.shared_parameters() if p.shape == (5, 5))
    torch.testing.assert_close(shared.grad, weight.grad)


def test_shares_are_dirichlet_of_mean_one():
    torch.manual_seed(0)
    shares = torch.stack([draw_shares(2, 2.0, torch.zeros(1)) for _ in range(2000)]) / 2
    torch.testing.assert_close(shares.sum(1), torch.ones(2000))
    error = 0.05**0.5 / 2000**0.5  # Beta(2, 2) has the variance 1/20
    assert (shares[:, 0].mean() - 0.5).abs() < 4 * error
    assert shares[:, 0].var() == pytest.approx(0.05, rel=0.12)


def test_members_are_mixed_by_shares_in_training_and_evenly_in_evaluation():
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    ensemble = embens.mimo(reference, 2, mix="linear")
    x, y = torch.randn(2, 6, 3), torch.randint(2, (2, 6))
    torch.manual_seed(3)
    shares = draw_shares(2, 2.0, x)
    torch.manual_seed(3)
    outputs = ensemble(x, batch="own")
    blocks = ensemble.individuals["0"].tensors()["weight"].detach()
    heads = ensemble.individuals["2"].tensors().values()
    z = sum(s * F.linear(v, w) for s, v, w in zip(shares, x, blocks, strict=True))
    z = torch.tanh(z + reference[0].bias)
    expected = torch.stack([F.linear(z, w, b) for w, b in zip(*heads, strict=True)])
    torch.testing.assert_close(outputs, expected)
    roots = shares ** (1 / 3)
    weights = 2 * roots / roots.sum()
    losses = [F.cross_entropy(o, t) for o, t in zip(expected, y, strict=True)]
    (weights[0] * losses[0] + weights[1] * losses[1]).backward()
    by_hand = [h.grad.clone() for h in heads]
    ensemble.zero_grad()
    loss = embens.objective(outputs, y, batch="own")
    torch.testing.assert_close(loss, sum(losses))
    loss.backward()
    for head, expected in zip(heads, by_hand, strict=True):
        torch.testing.assert_close(head.grad, expected)
    ensemble.eval()
    torch.testing.assert_close(ensemble(x[:1].expand(2, 6, 3), batch="own"), ensemble(x[0]))
    torch.testing.assert_close(ensemble.member(1)(x[0]), ensemble(x[0])[1])


def test_outputs_keep_their_values_when_gradients_are_weighed():
    outputs = torch.randn(2, 3, 4, requires_grad=True)
    weighed = weigh(outputs, torch.tensor([1.8, 0.2]))
    assert torch.equal(weighed, outputs)
    weighed.sum().backward()
    ratio = (outputs.grad[0] / outputs.grad[1]).mean()
    assert ratio.item() == pytest.approx(9 ** (1 / 3), rel=1e-5)


class Several(nn.Module):
    """Two layers that the input enters by, of which one reads its own sizes before."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(12, 6), nn.Linear(12, 6, bias=False)
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        rows = x.shape[0]
        x = x.reshape(rows, -1)
        return self.last((self.left(x) * torch.sigmoid(self.right(x))).view(rows, 6))


def test_the_input_may_enter_by_several_layers_and_sizes_may_be_read_before():
    ensemble = embens.mimo(Several(), 3)
    assert ensemble.plan.heads.first == ("left", "right")
    x = torch.randn(3, 5, 3, 4)
    left, right = (ensemble.individuals[n].tensors()["weight"] for n in ("left", "right"))
    flat = x.flatten(2)
    left = torch.einsum("aoi,abi->bo", left, flat) + ensemble.network.left.bias
    right = torch.einsum("aoi,abi->bo", right, flat)
    weight, bias = ensemble.individuals["last"].tensors().values()
    expected = torch.einsum("aoi,bi->abo", weight, left * right.sigmoid()) + bias[:, None]
    torch.testing.assert_close(ensemble(x, batch="own"), expected)


@pytest.mark.parametrize("batch", ["same", "own"])
def test_networks_with_an_input_for_each_member_compile_whole(batch):
    torch._dynamo.reset()
    ensemble = embens.mimo(Residual(), 3, mix=None).eval()
    x = torch.randn(3, 4, 3, 6, 6) if batch == "own" else torch.randn(4, 3, 6, 6)
    compiled = torch.compile(ensemble, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, batch=batch), ensemble(x, batch=batch))


def test_activations_may_be_recomputed():
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)

        def front(self, x):
            return torch.tanh(self.b(torch.tanh(self.a(x))))

        def forward(self, x):
            if self.training:
                return self.c(checkpoint(self.front, x, use_reentrant=False))
            return self.c(self.front(x))

    torch.manual_seed(0)
    reference = Recomputed()
    x = torch.randn(3, 5, 3)
    ensemble = embens.mimo(reference, 3, example_input=x[0])
    gradients = []
    for mode in (True, False):
        ensemble.train(mode).zero_grad()
        ensemble(x, batch="own").square().sum().backward()
        gradients.append([p.grad.clone() for p in ensemble.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_what_has_no_meaning_is_refused():
    ensemble = embens.mimo(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), 3)
    with pytest.raises(ValueError, match="'split' has no meaning"):
        ensemble(torch.randn(6, 3), batch="split")
    with pytest.raises(ValueError, match="batch='own' expects inputs of shape"):
        ensemble(torch.randn(6, 3), batch="own")
    x, instead = torch.randn(6, 3), r"an input for each member.*ensemble\.subset\(range"
    for measure in (embens.theory.kernels, embens.finite.ntk, embens.finite.nngp):
        with pytest.raises(ValueError, match=instead):
            measure(ensemble, x)
    with pytest.raises(ValueError, match=instead):
        embens.theory.regime(ensemble)
    at_test = ensemble.subset(range(3))
    assert embens.theory.regime(at_test) == embens.theory.Regime.INDEPENDENT
    assert embens.finite.ntk(at_test, x, outputs="trace").shared.shape == (3, 3, 6, 6)


def test_gradients_and_diagnosis_are_those_of_the_network_at_test():
    torch.manual_seed(0)
    reference = nn.Sequential(
        nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
    )
    ensemble, x, y = embens.mimo(reference, 3).double(), torch.randn(20, 3), torch.arange(20) % 2
    x = x.double()
    before = [p.detach().clone() for p in ensemble.parameters()]
    trunk = [*ensemble.network[2].parameters(), ensemble.network[0].module.bias]
    rows = []
    for loss in (F.cross_entropy(outputs, y) for outputs in ensemble(x)):
        blocks = ensemble.individuals["0"].tensors()["weight"]
        of_trunk = torch.autograd.grad(loss, trunk, retain_graph=True)
        (of_blocks,) = torch.autograd.grad(loss, blocks, retain_graph=True)
        torch.testing.assert_close(of_blocks[0], of_blocks[2])  # one layer at test
        rows.append(torch.cat([g.flatten() for g in (*of_trunk, of_blocks[0])]))
    flat = torch.stack(rows)
    norms = embens.finite.gradient_norms(ensemble, x, y)
    torch.testing.assert_close(norms.total, flat.norm(dim=1))
    assert list(norms) == ["0", "2"]
    flat = F.normalize(flat)
    torch.testing.assert_close(embens.finite.gradient_cosines(ensemble, x, y), flat @ flat.T)
    report = embens.diagnose(ensemble, x, y)
    assert report.regime == embens.theory.Regime.INDEPENDENT
    assert (report.family, report.members, report.gamma) == ("mimo", 3, 3.0)
    torch.testing.assert_close(report.cosines, flat @ flat.T)
    assert any("the network at test" in note for note in report.notes)
    assert "every member has last layers of its own" in str(report)
    assert all(map(torch.equal, before, ensemble.parameters()))
    assert embens.diagnose(embens.mimo(reference, 1), x.float(), y).members == 1
