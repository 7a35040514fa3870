"""The folded form: shared values are computed once, and unsafe code is not folded."""

import pytest
import torch
import torch.nn.functional as F
from cases import ARCHITECTURES
from torch import nn

import embens
from embens.graph import folding
from embens.graph.domains import Unfoldable
from embens.graph.folding import (
    ModuleState,
    modulated_linear,
    rank_after,
    repeat_rows,
    scale_members,
    unfold_members,
)

FOLDED = "mlp", "paper's cnn", "residual", "grouped", "transposed", "attention by hand"
FOLDED += "transformer", "cross attention", "reused", "held", "tied"


def layers_in(graph) -> list[str]:
    return [node.target for node in graph.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize("name", FOLDED)
def test_ordinary_architectures_are_folded(name):
    case = next(case for case in ARCHITECTURES if case.name == name)
    ensemble = embens.batch_ensemble(case.build(), 3)
    ensemble(case.inputs(torch.Generator().manual_seed(0)))
    assert ensemble.executor == "folded"


def test_values_before_the_first_modulation_are_computed_once():
    reference = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    ensemble = embens.last_layer_dropout(nn.Sequential(*reference, nn.Linear(8, 2)), 5)
    ensemble(torch.randn(4, 3))
    folded = ensemble.foldings[0].folded
    assert layers_in(folded.prefix) == ["0", "1", "2", "3"]
    assert layers_in(folded.suffix) == ["4"]


def test_dropout_is_drawn_for_each_member_in_training():
    reference = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    one = embens.laws.Constant(1)
    ensemble = embens.embed(reference, 3, pre=None, post=one)
    x = torch.ones(64, 3)
    for chunk in (1, 2, 3):
        first, second, third = ensemble.train()(x, chunk=chunk)
        assert not torch.equal(first, second)
        assert not torch.equal(second, third)
        first, second, third = ensemble.eval()(x, chunk=chunk)
        torch.testing.assert_close(first, second)


def test_a_norm_before_the_first_modulation_is_updated_once_per_pass():
    reference = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    ensemble = embens.batch_ensemble(reference, 4).train()
    ensemble(torch.randn(6, 3), chunk=1)
    assert ensemble.executor == "folded"
    assert ensemble.member(2)[0].num_batches_tracked == 1


class Reshaping(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.b(self.a(x).view(-1, 6).view(-1, 3))


def test_reshaping_does_not_join_rows_of_two_members():
    ensemble = embens.batch_ensemble(Reshaping(), 4)
    assert ensemble(torch.randn(2, 3)).shape == (4, 2, 2)
    assert ensemble.executor == "folded"
    with pytest.raises(RuntimeError, match="not divisible"):
        ensemble(torch.randn(1, 3))


REFUSED = [
    (nn.GLU(dim=-2), 2),
    (nn.Softmax(0), 3),
    (nn.Softmax(), 3),
    (nn.Flatten(0), 3),
    (nn.LSTM(2, 3), 3),
    (nn.ReLU(), 1),
    (nn.Conv2d(2, 2, 1), 3),
    (nn.LayerNorm((4, 6)), 2),
    (nn.ConstantPad2d(1, 0.0), 3),
    (nn.InstanceNorm1d(3, track_running_stats=True), 3),
    (nn.Softmax2d(), 3),
    (nn.PixelShuffle(2), 3),
    (nn.Embedding(3, 4, scale_grad_by_freq=True), 2),
]


@pytest.mark.parametrize(("module", "rank"), REFUSED, ids=str)
def test_modules_that_may_mix_rows_are_refused(module, rank):
    with pytest.raises(Unfoldable):
        rank_after(module, "module", rank)


def test_the_rank_after_a_module_is_known():
    assert rank_after(nn.Flatten(), "", 4) == 2
    assert rank_after(nn.Embedding(3, 4), "", 2) == 3
    assert rank_after(nn.Unflatten(1, (2, 3)), "", 2) == 3
    assert rank_after(nn.GLU(dim=-2), "", 3) == 3


class ChangedByPosition(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        F.elu(x, 1.0, True)
        return self.b(torch.tanh(self.a(x)))


def test_a_positional_inplace_argument_is_seen():
    ensemble = embens.batch_ensemble(ChangedByPosition(), 2)
    x = torch.full((2, 3), -1.0)
    outputs = ensemble(x)
    assert torch.equal(x, torch.full((2, 3), -1.0))
    torch.testing.assert_close(outputs[0], ensemble.member(0)(x))


@pytest.mark.parametrize("batch", ["own", "split"])
def test_batches_of_members_are_folded(batch):
    reference = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2))
    ensemble = embens.batch_ensemble(reference, 3)
    x = torch.randn(3, 5, 4) if batch == "own" else torch.randn(15, 4)
    outputs = ensemble(x, batch=batch)
    assert ensemble.executor == "folded"
    for a in range(3):
        part, rows = (x[a], outputs[a]) if batch == "own" else (x[a::3], outputs[a::3])
        torch.testing.assert_close(rows, ensemble.member(a)(part))


MEMBERS, ROWS = 3, 5


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def by_hand(x, weight, bias, pre, post):
    """Return the outputs of all members, one after another."""
    outputs = []
    for a, rows in enumerate(x.unflatten(0, (MEMBERS, -1))):
        member_weight, member_bias = weight, bias
        if post is not None:
            member_weight = member_weight * post[a].repeat_interleave(2)
        if pre is not None:
            member_weight = pre[a][:, None] * member_weight
            member_bias = None if bias is None else pre[a] * bias
        outputs.append(F.linear(rows, member_weight, member_bias))
    return torch.cat(outputs)


@pytest.mark.parametrize("ratio", [0.0, 1e9], ids=["weights", "activations"])
@pytest.mark.parametrize("axes", [(), (4,)], ids=["rows", "tokens"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("sides", ["both", "pre", "post"])
def test_a_modulated_layer_has_the_weights_of_its_member(monkeypatch, ratio, axes, has_bias, sides):
    monkeypatch.setattr(folding, "MERGING_RATIO", ratio)
    x, weight = random(MEMBERS * ROWS, *axes, 6), random(4, 6)
    bias = random(4) if has_bias else None
    pre = random(MEMBERS, 4) if sides != "post" else None
    post = random(MEMBERS, 3) if sides != "pre" else None
    leaves = [leaf for leaf in (x, weight, bias, pre, post) if leaf is not None]

    outputs = modulated_linear(x, weight, bias, pre, post, 2, MEMBERS, False)
    expected = by_hand(x, weight, bias, pre, post)
    torch.testing.assert_close(outputs, expected)
    direction = torch.randn_like(outputs)
    torch.testing.assert_close(
        torch.autograd.grad(outputs, leaves, direction),
        torch.autograd.grad(expected, leaves, direction),
    )


def test_weights_of_one_member_are_merged(monkeypatch):
    monkeypatch.setattr(folding, "MERGING_RATIO", 0.0)
    x, weight, bias = random(ROWS, 6), random(4, 6), random(4)
    pre, post = random(1, 4), random(1, 6)
    outputs = modulated_linear(x, weight, bias, pre, post, 1, 1, False)
    torch.testing.assert_close(outputs, pre * F.linear(x * post, weight, bias))


def test_a_shared_input_is_repeated_for_each_member():
    x, weight, pre = random(ROWS, 6), random(4, 6), random(MEMBERS, 4)
    outputs = modulated_linear(x, weight, None, pre, None, 1, MEMBERS, True)
    repeated = modulated_linear(repeat_rows(x, MEMBERS), weight, None, pre, None, 1, MEMBERS, False)
    torch.testing.assert_close(outputs, repeated)
    assert unfold_members(outputs, MEMBERS).shape == (MEMBERS, ROWS, 4)


def test_channels_before_positions_are_scaled():
    x, values = random(MEMBERS * ROWS, 4, 2, 3), random(MEMBERS, 4)
    scaled = scale_members(x, values, MEMBERS, 2, 1, False).unflatten(0, (MEMBERS, -1))
    for a in range(MEMBERS):
        expected = x.unflatten(0, (MEMBERS, -1))[a] * values[a][:, None, None]
        torch.testing.assert_close(scaled[a], expected)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.factor = 1
        self.register_buffer("mean", torch.zeros(2))


def test_a_changed_attribute_has_a_name():
    module = nn.Sequential(Scaled())
    state = ModuleState(module)
    assert state.change() == ""
    module[0].factor = 2
    assert state.change() == "0.factor"


def test_equal_values_of_other_types_are_changes():
    module = Scaled()
    state = ModuleState(module)
    module.factor = True
    assert state.change()


def test_replaced_children_and_added_hooks_are_changes():
    module = Scaled()
    state = ModuleState(module)
    module.layer.register_forward_hook(lambda *_: None)
    assert state.change() == "layer"
    state = ModuleState(module)
    module.layer = nn.Linear(2, 2)
    assert state.change()


def test_other_tensors_are_changes_on_request():
    module = Scaled()
    state, strict_state = ModuleState(module), ModuleState(module, tensors=True)
    module.mean = torch.ones(2)
    assert state.change() == ""
    assert strict_state.change()
