"""Evaluation mode for the duration of a block."""

import pytest
from torch import nn

from embens.modes import evaluating


def network() -> nn.Sequential:
    """Return a network of which one part is in evaluation mode."""
    return nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout().eval()))


def modes(module: nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


def test_every_module_is_in_evaluation_mode_inside_the_block():
    net = network()
    with evaluating(net):
        assert modes(net) == [False, False, False, False]


def test_the_mode_of_every_module_is_restored():
    net = network()
    with evaluating(net):
        pass
    assert modes(net) == [True, True, True, False]


def test_modes_are_restored_after_an_error():
    net = network()
    with pytest.raises(RuntimeError, match="inside"), evaluating(net):
        raise RuntimeError("inside")
    assert modes(net) == [True, True, True, False]


def test_marking_a_function_does_not_change_it():
    from embens.modes import constant_when_compiled

    @constant_when_compiled
    def answer() -> int:
        return 42

    assert answer() == 42
