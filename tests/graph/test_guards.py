"""What a traced graph depends on besides its inputs."""

import itertools
import logging
import operator
import os
import threading
import time
import types

import numpy as np
import pytest
import torch
from torch import nn

from embens.graph.guards import Guard, Unwatchable

SCALE = 1.0
LOCAL = threading.local()


def count_calls(x):
    global SCALE
    SCALE += 1
    return x * SCALE


GLOBALS, READ = globals, getattr
COUNT, NUMBERS = itertools.count(), iter([1.0, 2.0])
ARRAY, BYTES = np.ones(1), bytearray(1)
OBJECT, NAMES = types.SimpleNamespace(hidden=1.0), ["hid" + "den"]


class Scaled(nn.Module):
    offset = 0.0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.factors = [1.0, 2.0]
        self.factor = 1.0
        self.options = types.SimpleNamespace(scale=1.0, inner=types.SimpleNamespace(scale=1.0))
        self.run = torch.tanh

    def forward(self, x):
        x = self.run(x) * self.options.scale * self.options.inner.scale
        x = x * (self.options.late if hasattr(self.options, "late") else 1.0)
        self.result = x
        return self.layer(x) * self.factor * self.factors[0] * SCALE + self.offset


def test_a_guard_holds_while_nothing_changes():
    assert Guard(Scaled()).holds()


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.factors.append(3.0),
        lambda module: setattr(module.options, "scale", 2.0),
        lambda module: setattr(module.options.inner, "scale", 2.0),
        lambda module: setattr(module.options, "late", 2.0),
    ],
)
def test_a_guard_notices_changes_of_objects_in_attributes(change):
    module = Scaled()
    guard = Guard(module)
    change(module)
    assert not guard.holds()


def test_a_guard_ignores_what_the_code_never_names():
    module = Scaled()
    module.unused = [1.0]
    module.handle = open  # a function that the code does not call
    guard = Guard(module)
    module.unused.append(2.0)
    assert guard.holds()


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda x: x * float(os.environ.get("SCALE", 1)), "uses the module 'os'"),
        (lambda x: x * time.time(), "uses the module 'time'"),
        (lambda x: x * globals()["SCALE"], "calls 'globals'"),
        (count_calls, "changes the global variable 'SCALE'"),
        (lambda x: x * LOCAL.value, "uses the module '_thread'"),
        (lambda x: x * GLOBALS()["SCALE"], "calls 'globals'"),
        (lambda x: x * next(COUNT), "an object of type 'count'"),
        (lambda x: x * next(NUMBERS), "an object of type 'list_iterator'"),
        (lambda x: x * ARRAY[0], "an object of type 'ndarray'"),
        (lambda x: x * BYTES[0], "an object of type 'bytearray'"),
        (lambda x: x * torch.initial_seed(), "calls 'initial_seed'"),
        (lambda x: x * torch.random.initial_seed(), "calls 'initial_seed'"),
    ],
)
def test_code_that_depends_on_the_world_is_unwatchable(run, reason):
    module = Scaled()
    module.run = run
    with pytest.raises(Unwatchable, match=reason):
        Guard(module)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x * READ(OBJECT, NAMES[0]),
        lambda x: x * OBJECT.__dict__[NAMES[0]],
        lambda x: x * operator.attrgetter(NAMES[0])(OBJECT),
    ],
)
def test_a_guard_notices_attributes_whose_names_are_made_by_the_code(run, monkeypatch):
    module = Scaled()
    module.run = run
    guard = Guard(module)
    monkeypatch.setattr(OBJECT, "hidden", 2.0)
    assert not guard.holds()


def test_a_guard_knows_which_attributes_are_read():
    guard = Guard(Scaled())
    guard.refuse_reading(["result"])
    with pytest.raises(Unwatchable, match="has changed 'factor'"):
        guard.refuse_reading(["result", "factor"])


def test_a_guard_notices_global_and_class_variables(monkeypatch):
    guard = Guard(Scaled())
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert not guard.holds()
    guard = Guard(Scaled())
    monkeypatch.setattr(Scaled, "offset", 1.0)
    assert not guard.holds()


LOGGER = logging.getLogger("embens.test_guards")


class Meta(type):
    scale = 1.0

    @property
    def factor(cls):
        return cls.scale


class WithMeta(Scaled, metaclass=Meta):
    def forward(self, x):
        return super().forward(x) * type(self).factor


def test_a_guard_notices_the_level_of_a_logger():
    module = Scaled()
    module.run = lambda x: x if LOGGER.isEnabledFor(logging.DEBUG) else -x
    guard = Guard(module)
    assert guard.holds()
    level = LOGGER.parent.level
    LOGGER.parent.setLevel(logging.DEBUG)
    try:
        assert "the logger 'embens.test_guards'" in guard.change()
    finally:
        LOGGER.parent.setLevel(level)


def test_a_guard_notices_what_a_property_of_a_metaclass_reads(monkeypatch):
    guard = Guard(WithMeta())
    assert guard.holds()
    monkeypatch.setattr(Meta, "scale", 2.0)
    assert not guard.holds()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("set_float32_matmul_precision", "high"), ("set_default_device", "meta")],
)
def test_a_guard_notices_settings_of_torch(setting, value):
    before = getattr(torch, setting.replace("set_", "get_"))()
    guard = Guard(Scaled())
    getattr(torch, setting)(value)
    try:
        assert not guard.holds()
    finally:
        getattr(torch, setting)(before if setting != "set_default_device" else None)
