"""The folded form: shared values are computed once, and unsafe code is not folded."""

import pytest
import torch
from cases import ARCHITECTURES
from torch import nn

import embens
from embens.graph.domains import Unfoldable
from embens.graph.folding import (
    ModuleState,
    rank_after,
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
    folded = ensemble.foldings.kept[0].folded
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
