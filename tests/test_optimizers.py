"""Kinds of optimizers: measured ones, and those that are known without a measurement."""

from functools import partial

import pytest
from torch import optim

from embens.optim import kind_of_optimizer
from embens.optimizers import OptimizerKind, measure_kind

SCALE_FREE = {
    "Adam": (optim.Adam, False),
    "AdamW": (optim.AdamW, True),
    "Adam, decoupled": (partial(optim.Adam, decoupled_weight_decay=True), True),
    "Adam, amsgrad": (partial(optim.Adam, amsgrad=True), False),
    "AdamW, by a function": (lambda groups: optim.AdamW(groups, fused=False), True),
    "NAdam": (optim.NAdam, False),
    "NAdam, decoupled": (partial(optim.NAdam, decoupled_weight_decay=True), True),
    "RAdam": (optim.RAdam, False),
    "Adamax": (optim.Adamax, False),
    "Adagrad": (optim.Adagrad, False),
    "RMSprop": (optim.RMSprop, False),
    "Rprop": (optim.Rprop, False),
    "Adadelta": (optim.Adadelta, False),
    "Adafactor": (optim.Adafactor, True),
}


@pytest.mark.parametrize(("optimizer", "decoupled"), SCALE_FREE.values(), ids=SCALE_FREE)
def test_scale_free_optimizers_are_recognised(optimizer, decoupled):
    assert measure_kind(optimizer) == OptimizerKind(True, decoupled)
    assert kind_of_optimizer(optimizer) == OptimizerKind(True, decoupled)


@pytest.mark.parametrize(
    "optimizer",
    [optim.SGD, partial(optim.SGD, momentum=0.9), lambda g: optim.SGD(g, momentum=0.9), optim.ASGD],
)
def test_other_optimizers_are_recognised(optimizer):
    assert measure_kind(optimizer) == OptimizerKind(False, False)
    assert kind_of_optimizer(optimizer) == OptimizerKind(False, False)
