"""State outside of the modules that a forward changes."""

import types
import warnings

import pytest
import torch
from torch import nn

import embens

STEPS = 0
COUNTS = {"steps": 0}
BIAS = torch.zeros(3)
SETTINGS = types.SimpleNamespace(scale=1.0)
MASKS = {}


class Net(nn.Module):
    """Layers a and out, and code that may change state."""

    calls = 0

    def __init__(self, run):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.run = run

    def forward(self, x):
        return self.out(self.run(torch.tanh(self.b(torch.tanh(self.a(x))))))


def global_variable(h):
    global STEPS
    STEPS += 1
    return h * STEPS


def class_attribute(h):
    Net.calls += 1
    return h * Net.calls


def entry_of_a_dictionary(h):
    COUNTS["steps"] += 1
    return h * COUNTS["steps"]


def default_argument(h, calls=[0]):  # noqa: B006
    calls[0] += 1
    return h * calls[0]


def global_tensor(h):
    BIAS.add_(1)
    return h + BIAS


def after_a_branch(h):
    if float(h.detach().sum()) > -1e9:
        SETTINGS.scale += 1.0
    return h * SETTINGS.scale


def make_closure():
    calls = 0

    def closure(h):
        nonlocal calls
        calls += 1
        return h * calls

    return closure


def cache(h):
    if h.shape not in MASKS:
        MASKS[h.shape] = torch.ones(h.shape)
    return h * MASKS[h.shape]


def setting(h):
    return h * SETTINGS.scale


CHANGES = {
    global_variable: "changes 'STEPS'",
    class_attribute: "changes 'calls'",
    entry_of_a_dictionary: "entry 'steps' of a dictionary",
    default_argument: "changes 'a list'",
    global_tensor: "changes 'BIAS'",
    after_a_branch: r"changes 'SimpleNamespace\.scale'",
    make_closure(): r"changes 'cell\.cell_contents'",
}


@pytest.mark.filterwarnings("ignore:the data flow of")
@pytest.mark.parametrize("run", CHANGES, ids=lambda run: run.__name__)
def test_a_change_is_a_warning_with_its_name(run):
    with pytest.warns(UserWarning, match=CHANGES[run]):
        embens.batch_ensemble(Net(run), 3)(torch.ones(2, 2))


@pytest.mark.filterwarnings("ignore:the data flow of")
def test_a_change_that_begins_later_is_a_warning():
    class Later(Net):
        def __init__(self, run):
            super().__init__(run)
            self.passes = 0

        def forward(self, x):
            self.passes += 1
            return super().forward(x) if self.passes > 2 else self.out(self.a(x))

    ensemble = embens.batch_ensemble(Later(entry_of_a_dictionary), 3)
    x = torch.ones(2, 2)
    ensemble(x)
    ensemble(x)
    with pytest.warns(UserWarning, match="entry 'steps' of a dictionary"):
        ensemble(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ensemble(x)  # once is enough


@pytest.mark.filterwarnings("ignore:the data flow of")
def test_caches_and_changes_between_passes_are_no_warnings(monkeypatch):
    x = torch.ones(2, 2)
    embens.batch_ensemble(Net(cache), 3)(x)
    ensemble = embens.batch_ensemble(Net(setting), 3)
    before = ensemble(x)
    monkeypatch.setattr(SETTINGS, "scale", 0.5)

    assert not torch.equal(ensemble(x), before)


class Meter(nn.Module):
    """Layers a and out, and a counter in an object that an attribute holds."""

    def __init__(self):
        super().__init__()
        self.a, self.out = nn.Linear(2, 3), nn.Linear(3, 2)
        self.meter = types.SimpleNamespace(seen=0)

    def forward(self, x):
        self.meter.seen += 1
        return self.out(torch.tanh(self.a(x)) * self.meter.seen)


def test_an_object_of_a_module_belongs_to_the_member_and_gives_no_warning():
    ensemble = embens.batch_ensemble(Meter(), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "merged" in ensemble.executor
        ensemble(torch.ones(1, 2))
        ensemble(torch.ones(1, 2))

    assert [copied.module.meter.seen for copied in ensemble.merged.copies] == [2, 2]
