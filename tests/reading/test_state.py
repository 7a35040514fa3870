"""What the code of a reference keeps from one call to the next."""

from __future__ import annotations

import collections

import pytest
import torch
import torch.nn.functional as F
from embens.reading.state import find_state
from torch import nn


class Meter:
    def __init__(self):
        self.seen = 0

    def observe(self, x):
        self.seen += len(x)

    def half(self):
        return self.seen / 2


def blend(buffer, x):
    buffer.mul_(0.9).add_(x.mean(0), alpha=0.1)


class Quantiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("usage", torch.zeros(3))

    def forward(self, x):
        return x

    def follow(self, x):
        self.usage += x.detach().mean(0)


class Keeper(nn.Module):
    """Holds one of everything; its forward is given as a function."""

    def __init__(self):
        super().__init__()
        for name in ("mean", "var", "mask"):
            self.register_buffer(name, torch.zeros(3))
        self.register_buffer("none", None)
        self.weight = nn.Parameter(torch.ones(3))
        self.size, self.history, self.table = 3, [], {}
        self.queue, self.meter, self.plain = collections.deque(), Meter(), torch.zeros(3)
        self.inner = Quantiser()


CASES = {  # what a forward does: the buffers, what is kept, what is left
    "self.mean = 0.9 * self.mean + x.mean(0)": ({"mean"}, set(), set()),
    "self.mean.mul_(0.9).add_(x.mean(0))": ({"mean"}, set(), set()),
    "self.mean.data.copy_(x[0])": ({"mean"}, set(), set()),
    "self.mean[:] = x[0]": ({"mean"}, set(), set()),
    "m = self.mean\nm.lerp_(x[0], 0.1)": ({"mean"}, set(), set()),
    "torch.add(self.mean, 1, out=self.mean)": ({"mean"}, set(), set()),
    "x = F.batch_norm(x, self.mean, self.var, self.weight)": ({"mean", "var"}, set(), set()),
    "x = F.batch_norm(x, running_mean=self.mean, running_var=None)": ({"mean"}, set(), set()),
    "blend(self.mean, x)": ({"mean"}, set(), set()),
    "self.inner.follow(x)": ({"inner.usage"}, set(), set()),
    "self.inner.usage = x[0]": ({"inner.usage"}, set(), set()),
    "x = x.masked_fill_(self.mask > 0, 0) + self.mean.add(1)": (set(), set(), set()),
    "self.none = x[0] if self.none is None else self.none + x[0]": (set(), {"none"}, set()),
    "self.last = x": (set(), set(), {"last"}),
    "self.calls += 1": (set(), set(), {"calls"}),
    "self.calls += 1\nx = x / self.calls": (set(), {"calls"}, set()),
    "self.table[0] = x\nx = self.table[0]": (set(), {"table"}, set()),
    "self.table.setdefault(self.size, x)": (set(), set(), {"table"}),
    "self.history.append(x)\nx = sum(self.history)": (set(), {"history"}, set()),
    "self.queue.appendleft(x)": (set(), set(), {"queue"}),
    "self.meter.observe(x)\nx = x * self.meter.half()": (set(), {"meter"}, set()),
    "x = x * self.meter.half()": (set(), set(), set()),
    "self.plain.add_(1)\nx = x + self.plain": (set(), {"plain"}, set()),
    "size = self.size\nsize += 1\nself.weight.requires_grad_()": (set(), set(), set()),
    "self.inner.flag = x\nx = self.inner.flag": (set(), {"inner.flag"}, set()),
    "self.meter.kind = 'sum'\nx = x * self.meter.half()": (set(), set(), set()),
    "self.meter.kind = x\nx = self.meter.kind": (set(), {"meter"}, set()),
    "self.kind = 'sum'\nx = x * len(self.kind)": (set(), {"kind"}, set()),
    "self.inner.kind = 'sum'\nx = x * len(self.inner.kind)": (set(), {"inner.kind"}, set()),
    "a, self.last = x, x": (set(), set(), {"last"}),
    "self.training = True\nself.inner = nn.Identity()": (set(), set(), set()),
}


@pytest.mark.parametrize("code", CASES)
def test_what_a_forward_changes_is_found_and_nothing_else(code, tmp_path, monkeypatch):
    lines = "\n".join("        " + line for line in code.splitlines())
    text = "class Written(Keeper):\n    def forward(self, x):\n" + lines + "\n        return x\n"
    (tmp_path / "written.py").write_text(text)
    space = {"Keeper": Keeper, "F": F, "torch": torch, "nn": nn, "blend": blend}
    space["__name__"] = "written"
    exec(compile(text, str(tmp_path / "written.py"), "exec"), space)
    state = find_state(space["Written"]())
    named = [{".".join(p).lstrip(".") for p in s} for s in (state.buffers, state.kept, state.left)]
    assert tuple(named) == CASES[code]


def test_methods_that_forward_calls_and_those_they_override_are_read():
    class Above(nn.Module):
        def forward(self, x):
            self.above = x
            return self.step(x)

        def step(self, x):
            self.stepped = x
            return x

        def never(self, x):
            self.other = x

    class Below(Above):
        def forward(self, x):
            return super().forward(x) + self.above

    state = find_state(nn.Sequential(nn.Linear(2, 2), Below()))
    assert state.kept == {("1", "above")}
    assert state.left == {("1", "stepped")}


def test_code_of_torch_and_code_without_a_source_is_not_read():
    space = {"nn": nn}
    exec("class Hidden(nn.Module):\n    def forward(self, x):\n        self.x = x", space)
    assert not find_state(nn.Sequential(nn.BatchNorm1d(3), space["Hidden"]())).left


def test_a_module_that_is_held_twice_has_one_name():
    class Last(nn.Module):
        def forward(self, x):
            self.last = x
            return x

    last = Last()
    assert find_state(nn.Sequential(last, nn.Sequential(last))).left == {("0", "last")}
