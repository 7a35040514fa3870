"""Code that depends on modes, attributes, globals and closures: every call follows their values."""

import collections
import functools
import os
import random
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trust.story import follow, grow_up, quiet, x_of

SCALE = 1.0
TABLE = {"scale": 1.0, "nested": {"scale": [1.0]}}
LEVELS = [1.0, 2.0]
VIEW, PROXY = TABLE.values(), types.MappingProxyType(TABLE)
CHAIN, WRAPPED = collections.ChainMap({}, TABLE), collections.UserDict(scale=1.0)
OBJECT = types.SimpleNamespace(scale=1.0, inner=types.SimpleNamespace(scale=1.0))
MODULE = types.ModuleType("settings")
MODULE.SCALE = 1.0
MODULE.inner = types.ModuleType("settings.inner")
MODULE.inner.SCALE = 1.0


class Options:
    """Settings in a class of the user's."""

    scale = 1.0
    levels = [1.0]  # noqa: RUF012


def scaled(x):
    return x * SCALE


def scaled_twice(x):
    def inner(y):
        return y * SCALE

    return inner(x)


class Scaler:
    """An object whose method reads a global variable."""

    def __call__(self, x):
        return x * SCALE

    def scale(self, x):
        return x * TABLE["scale"]


SCALER = Scaler()
FUNCTION = scaled
APPLY = functools.partial(torch.mul, other=2.0)


class Net(nn.Module):
    """Layers a, b and out; the hidden units go through a function."""

    def __init__(self, change):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.0)
        self.part = Part()
        self.flag = False
        self.levels, self.settings = [1.0], {"scale": 1.0, "deep": {"scale": [1.0]}}
        self.config = types.SimpleNamespace(scale=1.0, model=types.SimpleNamespace(scale=1.0))
        self.operations = [lambda x: x * SCALE]
        self.scaler = Scaler()
        self.partial = functools.partial(multiply, factor=1.0)
        self.method = self.part.apply
        self.choice = torch.tanh
        self.dtype = torch.float64
        self.extent = slice(0, 6)
        self.constant = torch.ones(6, dtype=torch.float64)
        self.change = change

    @property
    def scale(self):
        return SCALE

    def forward(self, x):
        return self.out(torch.tanh(self.b(self.change(self, torch.tanh(self.a(x))))))


class Part(nn.Module):
    """A part with a mode and a factor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.factor = 1.0

    def apply(self, x):  # shadows nn.Module.apply on purpose, as users do
        return x * self.factor

    def forward(self, x):
        return self.layer(x) if self.training else 2 * self.layer(x)


def multiply(x, factor):
    return x * factor


# Each case is a forward, and what happens to every module between its calls.

MODES = {
    "training in the parent": lambda s, h: h if s.training else 2 * h,
    "training in a child": lambda s, h: s.part(h),
    "mode of a child in the parent": lambda s, h: h if s.part.training else 3 * h,
    "mode of a layer": lambda s, h: h if s.b.training else 3 * h,
    "more iterations at test time": lambda s, h: functools.reduce(
        lambda y, _: torch.tanh(s.b(y)), range(1 if s.training else 3), h
    ),
    "mode passed to a function": lambda s, h: F.dropout(h, 0.0, s.training) * (1 + s.training),
    "batch statistics": lambda s, h: s.norm(h),
    "number of the mode": lambda s, h: h * [2.0, 3.0][s.training],
    "gradients enabled": lambda s, h: h if torch.is_grad_enabled() else 2 * h,
}
CHANGES = [
    lambda m: m.train(),
    lambda m: m.eval(),
    lambda m: m.part.train(),
    lambda m: m.b.train(),
    lambda m: m.norm.train(),
    lambda m: m.train(),
    lambda m: m.part.eval(),
    lambda m: m.norm.eval(),
    lambda m: m.eval(),
]


@pytest.mark.parametrize("case", MODES)
@quiet
def test_every_mode_has_its_own_graph(case):
    x = x_of(seed=len(case))
    steps = [x]
    for change in (*CHANGES, *CHANGES[:2]):
        steps += [change, x]
    follow(grow_up(Net(MODES[case]), "batch ensemble"), steps)


@quiet
def test_a_graph_without_gradients_serves_no_pass_with_gradients():
    ensemble = grow_up(Net(MODES["gradients enabled"]), "batch ensemble")
    x = x_of()
    for _ in range(2):
        follow(ensemble, [x])
        with torch.no_grad():
            follow(ensemble, [x])
        with torch.inference_mode():
            follow(ensemble, [x])


def assign(path, value):
    def change(module):
        *owners, name = path.split(".")
        for owner in owners:
            module = getattr(module, owner)
        setattr(module, name, value)

    return change


ATTRIBUTES = {
    "flag": (lambda s, h: 2 * h if s.flag else h, assign("flag", True)),
    "flag of a child": (lambda s, h: s.part.apply(h), assign("part.factor", 2.0)),
    "bound method of a child": (lambda s, h: s.method(h), assign("part.factor", 2.0)),
    "new attribute": (lambda s, h: h * getattr(s, "late", 1.0), assign("late", 2.0)),
    "list": (lambda s, h: h * s.levels[0], lambda m: m.levels.insert(0, 2.0)),
    "list item": (lambda s, h: h * s.levels[0], lambda m: m.levels.__setitem__(0, 2.0)),
    "dictionary": (
        lambda s, h: h * s.settings["scale"],
        lambda m: m.settings.update(scale=2.0),
    ),
    "nested dictionary": (
        lambda s, h: h * s.settings["deep"]["scale"][0],
        lambda m: m.settings["deep"]["scale"].__setitem__(0, 2.0),
    ),
    "object": (lambda s, h: h * s.config.scale, assign("config.scale", 2.0)),
    "nested object": (lambda s, h: h * s.config.model.scale, assign("config.model.scale", 2.0)),
    "new attribute of an object": (
        lambda s, h: h * getattr(s.config, "late", 1.0),
        assign("config.late", 2.0),
    ),
    "function": (lambda s, h: s.choice(h), assign("choice", torch.relu)),
    "partial": (
        lambda s, h: s.partial(h),
        assign("partial", functools.partial(multiply, factor=2.0)),
    ),
    "keywords of a partial": (
        lambda s, h: s.partial(h),
        lambda m: m.partial.keywords.update(factor=2.0),
    ),
    "slice": (lambda s, h: h[:, s.extent].sum(1, True) + h, assign("extent", slice(0, 2))),
    "tensor": (lambda s, h: h * s.constant, lambda m: m.constant.mul_(2)),
    "number in a tensor": (
        lambda s, h: h * float(s.constant[0]),
        lambda m: m.constant.mul_(2),
    ),
    "data of a tensor": (
        lambda s, h: h * float(s.constant[0]),
        lambda m: m.constant.data.mul_(2),
    ),
    "another module": (lambda s, h: s.part(h), lambda m: m.part.layer.bias.data.zero_()),
    "activation": (lambda s, h: s.drop(h), lambda m: setattr(m, "drop", nn.Tanh())),
    "probability": (
        lambda s, h: h * (1 - s.drop.p),
        assign("drop.p", 0.5),
    ),
    "momentum": (lambda s, h: s.norm(h), assign("norm.eps", 0.5)),
}


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("case", ATTRIBUTES)
@quiet
def test_changed_attributes_are_followed(case, training):
    run, change = ATTRIBUTES[case]
    ensemble = grow_up(Net(run), "batch ensemble").train(training)
    x = x_of()
    follow(ensemble, [x, change, x])


def closure():
    """Return a forward with a variable of its own, and a function that changes it."""
    factor = 1.0

    def run(s, h):
        return h * factor

    def change(module):
        nonlocal factor
        factor = 2.0

    return run, change


def closure_of_a_closure():
    factor = 1.0

    def run(s, h):
        def inner(y):
            return y * factor

        return inner(h)

    def change(module):
        nonlocal factor
        factor = 2.0

    return run, change


def closure_with_an_object():
    holder = types.SimpleNamespace(inner=types.SimpleNamespace(factor=1.0))

    def run(s, h):
        return h * holder.inner.factor

    def change(module):
        holder.inner.factor = 2.0

    return run, change


def set_global(name, value):
    def change(module):
        globals()[name] = value

    return change


GLOBALS = {
    "number": (lambda s, h: h * SCALE, set_global("SCALE", 2.0)),
    "number in a helper": (lambda s, h: scaled(h), set_global("SCALE", 2.0)),
    "number in a nested function": (lambda s, h: scaled_twice(h), set_global("SCALE", 2.0)),
    "number in a comprehension": (
        lambda s, h: sum([h * SCALE for _ in range(2)]),
        set_global("SCALE", 2.0),
    ),
    "number in a lambda": (
        lambda s, h: (lambda y: y * SCALE)(h),
        set_global("SCALE", 2.0),
    ),
    "number in a generator": (
        lambda s, h: sum(h * SCALE for _ in range(2)),
        set_global("SCALE", 2.0),
    ),
    "number in a local class": (
        lambda s, h: type("Local", (), {"f": lambda self, y: y * SCALE})().f(h),
        set_global("SCALE", 2.0),
    ),
    "number in a property": (lambda s, h: h * s.scale, set_global("SCALE", 2.0)),
    "number in a listed function": (
        lambda s, h: s.operations[0](h),
        set_global("SCALE", 2.0),
    ),
    "number in an object": (lambda s, h: s.scaler(h), set_global("SCALE", 2.0)),
    "dictionary in an object": (
        lambda s, h: s.scaler.scale(h),
        lambda m: TABLE.update(scale=2.0),
    ),
    "number in a global object": (lambda s, h: SCALER(h), set_global("SCALE", 2.0)),
    "number in a global function": (lambda s, h: FUNCTION(h), set_global("SCALE", 2.0)),
    "another function": (lambda s, h: FUNCTION(h), set_global("FUNCTION", torch.relu)),
    "keywords of a global partial": (
        lambda s, h: APPLY(h),
        lambda m: APPLY.keywords.update(other=3.0),
    ),
    "dictionary": (lambda s, h: h * TABLE["scale"], lambda m: TABLE.update(scale=2.0)),
    "nested dictionary": (
        lambda s, h: h * TABLE["nested"]["scale"][0],
        lambda m: TABLE["nested"]["scale"].__setitem__(0, 2.0),
    ),
    "values of a dictionary": (
        lambda s, h: h * next(iter(VIEW)),
        lambda m: TABLE.update(scale=2.0),
    ),
    "proxy of a dictionary": (
        lambda s, h: h * PROXY["scale"],
        lambda m: TABLE.update(scale=2.0),
    ),
    "chain of dictionaries": (
        lambda s, h: h * CHAIN["scale"],
        lambda m: TABLE.update(scale=2.0),
    ),
    "dictionary of another class": (
        lambda s, h: h * WRAPPED["scale"],
        lambda m: WRAPPED.update(scale=2.0),
    ),
    "list": (lambda s, h: h * LEVELS[0], lambda m: LEVELS.__setitem__(0, 2.0)),
    "length of a list": (lambda s, h: h * len(LEVELS), lambda m: LEVELS.append(2.0)),
    "object": (lambda s, h: h * OBJECT.scale, lambda m: setattr(OBJECT, "scale", 2.0)),
    "nested object": (
        lambda s, h: h * OBJECT.inner.scale,
        lambda m: setattr(OBJECT.inner, "scale", 2.0),
    ),
    "class": (lambda s, h: h * Options.scale, lambda m: setattr(Options, "scale", 2.0)),
    "list in a class": (
        lambda s, h: h * Options.levels[0],
        lambda m: Options.levels.__setitem__(0, 2.0),
    ),
    "module": (lambda s, h: h * MODULE.SCALE, lambda m: setattr(MODULE, "SCALE", 2.0)),
    "inner module": (
        lambda s, h: h * MODULE.inner.SCALE,
        lambda m: setattr(MODULE.inner, "SCALE", 2.0),
    ),
    "globals()": (lambda s, h: h * globals()["SCALE"], set_global("SCALE", 2.0)),
    "environment": (
        lambda s, h: h * float(os.environ.get("EMBENS_TEST_SCALE", "1")),
        lambda m: os.environ.__setitem__("EMBENS_TEST_SCALE", "2"),
    ),
    "environment by getenv": (
        lambda s, h: h * float(os.getenv("EMBENS_TEST_SCALE", "1")),
        lambda m: os.environ.__setitem__("EMBENS_TEST_SCALE", "2"),
    ),
    "default dtype": (
        lambda s, h: h * (2.0 if torch.get_default_dtype() is torch.float64 else 1.0),
        lambda m: torch.set_default_dtype(torch.float64),
    ),
    "deterministic algorithms": (
        lambda s, h: h * (2.0 if torch.are_deterministic_algorithms_enabled() else 1.0),
        lambda m: torch.use_deterministic_algorithms(True),
    ),
    "default argument": (
        lambda s, h, table=TABLE: h * table["scale"],
        lambda m: TABLE.update(scale=2.0),
    ),
    "variable of a closure": closure(),
    "variable of a closure's closure": closure_of_a_closure(),
    "object of a closure": closure_with_an_object(),
    "code of a function": (
        lambda s, h: scaled(h),
        lambda m: setattr(scaled, "__code__", (lambda x: x * 2).__code__),
    ),
    "attribute of a function": (
        lambda s, h: h * getattr(scaled, "factor", 1.0),
        lambda m: setattr(scaled, "factor", 2.0),
    ),
}


@pytest.fixture
def restored():
    """Undo what the cases change."""
    table = {"scale": 1.0, "nested": {"scale": [1.0]}}
    code = scaled.__code__
    yield
    TABLE.clear()
    TABLE.update(table)
    WRAPPED["scale"] = 1.0
    LEVELS[:] = [1.0, 2.0]
    OBJECT.scale = OBJECT.inner.scale = Options.scale = MODULE.SCALE = MODULE.inner.SCALE = 1.0
    Options.levels[:] = [1.0]
    globals().update(SCALE=1.0, FUNCTION=scaled)
    APPLY.keywords.update(other=2.0)
    os.environ.pop("EMBENS_TEST_SCALE", None)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    scaled.__code__ = code
    vars(scaled).clear()


@pytest.mark.parametrize("case", GLOBALS)
@pytest.mark.usefixtures("restored")
@quiet
def test_changed_variables_are_followed(case):
    run, change = GLOBALS[case]
    ensemble = grow_up(Net(run), "batch ensemble")
    x = x_of()
    follow(ensemble, [x, change, x])


default_rng = np.random.default_rng
GENERATORS = {
    "numpy": lambda s, h: h * np.random.default_rng().random(),
    "numpy by name": lambda s, h: h * default_rng().random(),
    "numpy of old": lambda s, h: h * np.random.RandomState().rand(),
    "python": lambda s, h: h * random.Random().random(),
    "system": lambda s, h: h * random.SystemRandom().random(),
}


@pytest.mark.parametrize("case", GENERATORS)
@quiet
def test_code_that_makes_random_generators_runs_merged(case):
    """The comparison of the first call would not see a branch that is taken in few passes."""
    ensemble = grow_up(Net(GENERATORS[case]), "batch ensemble")
    ensemble(x_of())
    assert "its code calls" in ensemble.executor
