"""References that do unusual things: members are right, or the reference is refused by name."""

import pytest
import torch
import torch.nn.functional as F
from agreement import check_agreement
from torch import nn
from torch.utils.checkpoint import checkpoint

import embens


class Meter:
    """An object with state that is not a module."""

    def __init__(self):
        self.calls = 0

    def observe(self, x):
        self.calls += 1


class Teacher(nn.Module):
    """A module that others write to."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("usage", torch.zeros(6))
        self.scale = 1.0

    def forward(self, x):
        return self.layer(x) * self.scale + self.usage


class Net(nn.Module):
    """Layers a, b, c and out, some state, and a forward that is passed as a function."""

    def __init__(self, run):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.relu = nn.ReLU(inplace=True)
        self.teacher = Teacher()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.scale = nn.Parameter(torch.ones(6))
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.calls, self.history, self.table, self.meter = 0, [], {"scale": 2.0}, Meter()
        self.constant = torch.arange(6.0, dtype=torch.float64)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def hidden(s, x):
    return torch.tanh(s.b(torch.tanh(s.a(x))))


# In-place operations


def input_changed_in_place(s, x):
    x.mul_(2)
    return s.out(hidden(s, x))


def input_changed_through_a_view(s, x):
    x[:, :2].zero_()
    return s.out(hidden(s, x))


def input_changed_through_dropout(s, x):
    y = F.dropout(x, 0.5, False)
    y.mul_(2)
    return s.out(hidden(s, y))


def input_changed_through_a_cast(s, x):
    y = x.to(torch.float64)
    y.add_(1)
    return s.out(hidden(s, y))


def input_changed_by_a_module(s, x):
    return s.out(hidden(s, s.relu(x)))


def item_assigned(s, x):
    x[:, 0] = 0
    return s.out(hidden(s, x))


def shared_value_changed_by_members(s, x):
    h = s.a(x)
    h += s.c(torch.tanh(s.b(x)))
    return s.out(h)


def shared_value_changed_after_use(s, x):
    h = s.a(x)
    y = 2 * h
    h.add_(1)
    return s.out(s.b(y) + h)


def identity_changed_in_place(s, x):
    h = s.a(x)
    y = s.drop(h) if not s.training else h.clone()
    y.mul_(2)
    return s.out(s.b(y) + h)


def module_in_place_on_a_value_used_twice(s, x):
    z = s.a(x)
    y = s.relu(z)
    return s.out(y + s.b(z))


def keyword_in_place(s, x):
    return s.out(s.b(F.relu(s.a(x), inplace=True)))


def view_of_everything_changed(s, x):
    h = s.a(x)
    h.view(-1).add_(1.0)
    return s.out(s.b(h))


# Operations that mix rows, or may


def similarities(s, x):
    h = hidden(s, x)
    return s.out((h @ h.T).softmax(-1) @ h)


def batch_statistics_by_hand(s, x):
    h = hidden(s, x)
    return s.out(h - h.mean(0))


def size_of_the_batch(s, x):
    return s.out(hidden(s, x) / x.shape[0])


def positions_in_the_batch(s, x):
    return s.out(hidden(s, x) + torch.arange(len(x), dtype=x.dtype)[:, None])


def einsum_over_the_batch(s, x):
    h = hidden(s, x)
    return s.out(torch.einsum("bi,cj->bj", h, h))


def einsum_of_rows(s, x):
    h = hidden(s, x)
    return s.out(torch.einsum("bi,bi->bi", h, h))


def padded_batch(s, x):
    h = F.pad(hidden(s, x), (0, 0, 0, 1))
    return s.out(h)


def gated_along_the_batch(s, x):
    h = hidden(s, torch.cat([x, x]))
    return s.out(nn.GLU(dim=-2)(h))


def rows_as_samples(s, x):
    return s.out(hidden(s, x).reshape(-1, 3).tanh().reshape(-1, 6))


def transposed_twice(s, x):
    return s.out(hidden(s, x).T.T)


def constant_with_rows(s, x):
    return s.out(hidden(s, x) + s.weight[: len(x)])


def looks_at_values(s, x):
    h = hidden(s, x)
    return s.out(h * 2 if bool(h.sum() > 0) else s.c(h))


def shared_module_in_a_branch(s, x):
    h = s.a(x)
    for _ in range(1 + int(x.sum() > 0)):
        h = torch.tanh(s.b(h))
    return s.out(h)


def complex_numbers(s, x):
    h = hidden(s, x)
    return s.out(torch.fft.ifft(torch.fft.fft(h) * 1j).imag)


def looks_at_a_type(s, x):
    assert type(s.b) is nn.Linear
    assert isinstance(s.b.weight, torch.Tensor)
    return s.out(F.linear(torch.tanh(s.a(x)), s.b.weight, s.b.bias))


def all_parameters(s, x):
    penalty = sum(p.square().sum() for p in s.parameters())
    return s.out(hidden(s, x)) + penalty


def functional_call_inside(s, x):
    weights = {name: 2 * p for name, p in s.b.named_parameters()}
    return s.out(torch.func.functional_call(s.b, weights, (torch.tanh(s.a(x)),)))


def energy(s, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = s.out(hidden(s, x)).sum()
        (force,) = torch.autograd.grad(value, x, create_graph=True)
    return force


def checkpointed(s, x):
    h = checkpoint(s.b, torch.tanh(s.a(x)), use_reentrant=False)
    return s.out(torch.tanh(h))


def several_outputs(s, x):
    h = hidden(s, x)
    return {"logits": s.out(h), "rest": [h, (h.mean(1), x)]}


def a_loss_among_the_outputs(s, x):
    h = s.out(hidden(s, x))
    return h, h.square().mean()


def called_by_keyword(s, x):
    return s.out(input=torch.tanh(s.b(input=s.a(input=x))))


def norm_before_the_first_layer(s, x):
    return s.out(hidden(s, s.norm(x)))


def norm_used_twice(s, x):
    return s.out(s.norm(torch.tanh(s.b(s.norm(torch.tanh(s.a(x)))))))


# State


def buffer_assigned(s, x):
    h = hidden(s, x)
    if s.training:
        s.mean = 0.9 * s.mean + 0.1 * h.detach().mean(0)
    return s.out(h - s.mean)


def buffer_changed_in_place(s, x):
    h = hidden(s, x)
    s.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    s.steps += 1
    return s.out(h - s.mean / s.steps)


def buffer_changed_by_an_alias(s, x):
    buffer = s.mean
    buffer.add_(1)
    return s.out(hidden(s, x) + s.mean)


def buffer_changed_by_data(s, x):
    s.mean.data.add_(1)
    return s.out(hidden(s, x) + s.mean)


def buffer_changed_by_a_helper(s, x):
    torch._foreach_add_([s.mean], 1.0)
    return s.out(hidden(s, x) + s.mean)


def buffer_set_by_name(s, x):
    setattr(s, "me" + "an", s.mean + 1)
    return s.out(hidden(s, x) + s.mean)


def buffer_of_a_child(s, x):
    s.teacher.usage = s.teacher.usage + 1
    return s.out(s.teacher(torch.tanh(s.a(x))))


def attribute_of_a_child(s, x):
    s.teacher.scale = s.teacher.scale + 1
    return s.out(s.teacher(torch.tanh(s.a(x))))


def functional_batch_norm(s, x):
    h = hidden(s, x)
    return s.out(F.batch_norm(h, s.mean, torch.ones_like(s.mean), training=True) + s.mean)


def calls_counted(s, x):
    s.calls += 1
    return s.out(hidden(s, x) * s.calls)


def calls_counted_in_a_list(s, x):
    s.history.append(1)
    return s.out(hidden(s, x) * len(s.history))


def calls_counted_in_a_dictionary(s, x):
    s.table["scale"] += 1
    return s.out(hidden(s, x) * s.table["scale"])


def calls_counted_by_an_object(s, x):
    s.meter.observe(x)
    return s.out(hidden(s, x) * s.meter.calls)


def last_result_kept(s, x):
    h = hidden(s, x)
    s.last = h.detach()
    return s.out(h)


def last_result_used(s, x):
    h = hidden(s, x)
    h = h + s.last if hasattr(s, "last") else h
    s.last = h.detach()
    return s.out(h)


def constant_tensor(s, x):
    return s.out(hidden(s, x) + s.constant)


def constant_tensor_read(s, x):
    return s.out(hidden(s, x) * float(s.constant[3]))


RIGHT = [
    *(input_changed_in_place, input_changed_through_a_view, input_changed_through_dropout),
    *(input_changed_through_a_cast, input_changed_by_a_module, item_assigned),
    *(shared_value_changed_by_members, shared_value_changed_after_use, identity_changed_in_place),
    *(module_in_place_on_a_value_used_twice, keyword_in_place, view_of_everything_changed),
    *(similarities, batch_statistics_by_hand, size_of_the_batch, positions_in_the_batch),
    *(einsum_over_the_batch, einsum_of_rows, padded_batch, gated_along_the_batch),
    *(rows_as_samples, transposed_twice, constant_with_rows, looks_at_values),
    *(shared_module_in_a_branch, complex_numbers, looks_at_a_type, all_parameters),
    *(functional_call_inside, energy, checkpointed, several_outputs, a_loss_among_the_outputs),
    *(called_by_keyword, norm_before_the_first_layer, norm_used_twice),
    *(buffer_assigned, buffer_changed_in_place, buffer_changed_by_an_alias),
    *(buffer_changed_by_data, buffer_changed_by_a_helper, buffer_set_by_name, buffer_of_a_child),
    *(attribute_of_a_child, functional_batch_norm, calls_counted, calls_counted_in_a_list),
    *(calls_counted_in_a_dictionary, calls_counted_by_an_object, last_result_kept),
    *(last_result_used, constant_tensor, constant_tensor_read),
]
FAMILIES = {
    "batch ensemble": embens.batch_ensemble,
    "last layer": embens.last_layer_dropout,
    "separate": lambda r, m, **o: embens.embed(r, m, own="out", **o),
}


USUAL = {("batch ensemble", True), ("last layer", False), ("separate", True)}


def modes() -> list:
    """Return families and modes; each occurs in short runs, all pairs in long ones."""
    combinations = []
    for family in FAMILIES:
        for training in (False, True):
            mode = "training" if training else "evaluation"
            marks = () if (family, training) in USUAL else pytest.mark.long
            combinations.append(pytest.param(family, training, id=f"{family}-{mode}", marks=marks))
    return combinations


@pytest.mark.parametrize(("family", "training"), modes())
@pytest.mark.parametrize("run", RIGHT, ids=lambda run: run.__name__)
@pytest.mark.filterwarnings(
    "ignore:the data flow of",
    "ignore:members do not differ in",
    "ignore:the forward of the reference changes",
)
def test_members_are_right_whatever_the_code_does(run, family, training):
    torch.manual_seed(0)
    reference = Net(run).double()
    ensemble = FAMILIES[family](reference, 3).train(training)
    for rows in (2, 6):
        check_agreement(ensemble, torch.randn(rows, 6, dtype=torch.float64), chunks=(1, 3))
