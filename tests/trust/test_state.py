"""Forwards that change state: each member has its own, or the error names what is changed."""

import copy
import itertools
import re
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trust.story import follow, grow_up, quiet, x_of


class Teacher(nn.Module):
    """A module that its parent writes to."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("usage", torch.zeros(6))
        self.scale = 1.0

    def forward(self, x):
        return self.layer(x) * self.scale + self.usage


class Net(nn.Module):
    """Layers a, b and out with state of several kinds; ``change`` may alter it."""

    def __init__(self, change, starts=0, training_only=False):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.teacher = Teacher()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("table", torch.ones(4, 6), persistent=False)
        self.register_buffer("empty", None)
        self.register_buffer("spare", torch.zeros(2))
        self.scale = nn.Parameter(torch.ones(6))
        self.loose, self.loose_list = torch.zeros(6), [torch.zeros(6)]
        self.counts = {"calls": 0}
        self.holder = types.SimpleNamespace(inner=types.SimpleNamespace(total=1.0))
        self.change, self.starts, self.training_only, self.passes = change, starts, training_only, 0

    def forward(self, x):
        h = torch.tanh(self.b(torch.tanh(self.a(x)))) * self.scale
        self.passes += 1
        if self.passes > self.starts and (self.training or not self.training_only):
            h = self.change(self, h)
        h = h + self.teacher(h) + self.mean + self.loose + self.loose_list[0] + self.table.sum(0)
        return self.out(h * self.holder.inner.total + self.counts["calls"])


def helper(tensor, value):
    tensor.lerp_(value, 0.5)


def by_alias(s, h):
    alias = s.mean
    alias.add_(h.detach().mean(0))
    return h


def by_view(s, h):
    s.table[0].copy_(h.detach().mean(0))
    return h


def by_helper(s, h):
    helper(s.mean, h.detach().mean(0))
    return h


def by_data(s, h):
    s.mean.data.add_(1)
    return h


def by_data_assigned(s, h):
    s.mean.data = s.mean.data + 1
    return h


def by_foreach(s, h):
    torch._foreach_add_([s.mean, s.table], 1.0)
    return h


def by_setattr(s, h):
    setattr(s, "me" + "an", h.detach().mean(0))
    return h


def by_dictionary(s, h):
    s._buffers["mean"] = s._buffers["mean"] + 1
    return h


def by_a_loop(s, h):
    for buffer in s.buffers():
        buffer += 1
    return h


def by_out(s, h):
    torch.add(s.mean, 1.0, out=s.mean)
    return h


def by_numpy(s, h):
    s.mean.numpy()[:] += 1
    return h


def by_batch_norm(s, h):
    return F.batch_norm(h, s.mean, s.table[0], training=True)


def in_a_child(s, h):
    s.teacher.usage += h.detach().mean(0)
    return h


def attribute_of_a_child(s, h):
    s.teacher.scale = s.teacher.scale * 2
    return h


def loose_tensor(s, h):
    s.loose += h.detach().mean(0)
    return h


def loose_tensor_assigned(s, h):
    s.loose = h.detach().mean(0)
    return h


def tensor_in_a_list(s, h):
    s.loose_list[0].add_(h.detach().mean(0))
    return h


def counter(s, h):
    s.counts["calls"] += 1
    return h


def nested_object(s, h):
    s.holder.inner.total += 1
    return h


RIGHT = [
    *(by_alias, by_view, by_helper, by_data, by_data_assigned, by_foreach, by_setattr),
    *(by_dictionary, by_a_loop, by_out, by_numpy, by_batch_norm, in_a_child, attribute_of_a_child),
    *(loose_tensor, loose_tensor_assigned, tensor_in_a_list, counter, nested_object),
]
STARTS = {"always": (0, False), "later": (2, False), "in training": (0, True)}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("change", RIGHT, ids=lambda change: change.__name__)
@quiet
def test_state_belongs_to_the_member(change, start):
    ensemble = grow_up(Net(change, *STARTS[start]), "batch ensemble")
    x = x_of()
    follow(ensemble.eval(), [x, x, lambda m: m.train(), x, x, lambda m: m.eval(), x])


def parameter_in_place(s, h):
    with torch.no_grad():
        s.scale.mul_(2)
    return h


def parameter_by_data(s, h):
    s.scale.data.mul_(2)
    return h


def parameter_data_assigned(s, h):
    s.scale.data = s.scale.data * 2
    return h


def parameter_assigned(s, h):
    s.scale = nn.Parameter(s.scale.detach() * 2)
    return h


def momentum_encoder(s, h):
    for target, source in zip(s.teacher.layer.parameters(), s.b.parameters(), strict=True):
        target.data = 0.9 * target.data + 0.1 * source.data
    return h


def mean_teacher(s, h):
    with torch.no_grad():
        for target, source in zip(s.teacher.layer.parameters(), s.b.parameters(), strict=True):
            target.lerp_(source, 0.1)
    return h


def teacher_by_state(s, h):
    s.teacher.layer.load_state_dict(s.b.state_dict())
    return h


def clipped(s, h):
    for parameter in s.parameters():
        parameter.data.clamp_(-0.01, 0.01)
    return h


def modulated_weight_clipped(s, h):
    s.b.weight.data.clamp_(-0.01, 0.01)
    return h


def late_parameter(s, h):
    s.late = nn.Parameter(torch.ones(6, dtype=h.dtype))
    return h * s.late


def late_buffer(s, h):
    s.register_buffer("late", h.detach().mean(0))
    return h + s.late


def late_buffer_once(s, h):
    if not hasattr(s, "late"):
        s.register_buffer("late", torch.ones(6, dtype=h.dtype))
    return h + s.late


def late_module(s, h):
    s.late = nn.Linear(6, 6).double()
    return s.late(h)


def late_module_in_a_child(s, h):
    s.teacher.add_module("late", nn.Identity())
    return h


def empty_buffer_filled(s, h):
    s.empty = h.detach().mean(0)
    return h + s.empty


def buffer_of_another_shape(s, h):
    s.table = torch.cat([s.table, h.detach()])
    return h


def buffer_of_another_type(s, h):
    s.table = s.table.float()
    return h


def buffer_removed(s, h):
    s.spare = None
    return h


def parameter_rolled(s, h):
    s.scale.data.copy_(s.scale.data.roll(1))
    return h


REFUSED = {
    parameter_in_place: "changes its parameter 'scale'",
    parameter_by_data: "changes its parameter 'scale'",
    parameter_data_assigned: "changes its parameter 'scale'",
    parameter_assigned: "changes its parameter 'scale'",
    momentum_encoder: "changes its parameter 'teacher.layer.weight'",
    mean_teacher: "changes its parameter 'teacher.layer.weight'",
    teacher_by_state: "changes its parameter 'teacher.layer.weight'",
    clipped: "changes its parameter 'scale'",
    modulated_weight_clipped: "changes its parameter 'b.weight'",
    late_parameter: "registers the parameter 'late'",
    late_buffer: "registers the buffer 'late'",
    late_buffer_once: "registers the buffer 'late'",
    late_module: "changes the modules of 'the reference'",
    late_module_in_a_child: "changes the modules of 'teacher'",
    empty_buffer_filled: "changes the buffer 'empty'",
    buffer_of_another_shape: "changes the buffer 'table' from shape",
    buffer_of_another_type: "changes the buffer 'table' from shape",
    buffer_removed: "changes the buffer 'spare' to None",
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
@quiet
def test_other_changes_are_refused_by_name(change, start):
    ensemble = grow_up(Net(change, *STARTS[start]), "batch ensemble")
    x = x_of()
    steps = [x, x, lambda m: m.train(), x, x]
    error = follow(ensemble.eval(), steps, may_refuse=re.escape(REFUSED[change]))
    assert error, "the change was not noticed"


@quiet
def test_rows_of_a_parameter_that_change_places_are_noticed():
    reference = Net(parameter_rolled)
    reference.scale.data.copy_(torch.arange(6.0))
    ensemble = grow_up(reference, "batch ensemble")
    with pytest.raises(RuntimeError, match="changes its parameter 'scale'"):
        ensemble(x_of())


@quiet
def test_a_buffer_with_two_names_is_refused_once_it_changes():
    def change(s, h):
        s.mean.add_(1)
        return h

    reference = Net(change)
    reference.double()
    reference.spare = reference.mean
    ensemble = grow_up(reference, "batch ensemble")
    with pytest.raises(RuntimeError, match="'spare', which is also registered as 'mean'"):
        ensemble(x_of())


class Counting(nn.Module):
    """Counts its calls with an object that has no attributes."""

    def __init__(self, counter, count):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.counter, self.count = counter, count

    def forward(self, x):
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.out(h * self.count(self.counter))


def count_by_item(array):
    array[0] += 1
    return float(array[0])


COUNTERS = {
    "count": (lambda: itertools.count(1), next),
    "cycle": (lambda: itertools.cycle([1.0, 2.0]), next),
    "list iterator": (lambda: iter([1.0, 2.0, 3.0, 4.0, 5.0]), next),
    "array": (lambda: np.zeros(1), count_by_item),
    "bytes": (lambda: bytearray(1), count_by_item),
}


@pytest.mark.parametrize("case", COUNTERS)
@quiet
def test_counters_without_attributes_belong_to_the_member(case):
    make, count = COUNTERS[case]
    ensemble = grow_up(Counting(make(), count), "batch ensemble")
    x = x_of()
    follow(ensemble, [x, x])
    follow(ensemble, [x])  # members that are made after some passes have their counts
    follow(copy.deepcopy(ensemble), [x])


class Switching(nn.Module):
    """Sets the mode of its norm in the first call."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm, self.is_set = nn.BatchNorm1d(6), False

    def forward(self, x):
        if not self.is_set:
            self.norm.eval()
            self.is_set = True
        return self.out(self.norm(torch.tanh(self.b(torch.tanh(self.a(x))))))


@quiet
def test_modes_that_the_forward_sets_last_until_the_next_call_of_train():
    ensemble = grow_up(Switching(), "batch ensemble").train()
    members = [ensemble.member(a).train() for a in range(3)]
    for switches in (False, False, True, False):
        if switches:
            for network in (ensemble, *members):
                network.train()
        outputs = ensemble(x_of())
        for a, member in enumerate(members):
            torch.testing.assert_close(outputs[a], member(x_of()))
