"""Agreement of an ensemble's members with hand-written networks, on every architecture."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import ARCHITECTURES, Architecture, Held, Tied
from reference import member_by_hand, modulations, randomise_statistics
from torch import nn

import embens
from embens import laws

MEMBERS = 3
SITES = ("hidden", "all")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=ARCHITECTURES, ids=str)
def case(request) -> Architecture:
    return request.param


def build(case: Architecture) -> tuple[nn.Module, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        reference = case.build().double()
    randomise_statistics(reference, generator(1))
    inputs = case.inputs(generator(2))
    return reference, inputs.double() if inputs.is_floating_point() else inputs


def assert_close(actual, expected, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("read_from", ["code", "example"])
def test_first_and_last_layers_are_those_of_the_data_flow(case, read_from):
    reference, x = build(case)
    flow = embens.reading.read(
        embens.reading.opened(reference), x if read_from == "example" else None
    )
    assert flow.first == case.first
    assert flow.last == case.last
    assert not flow.guesses


@pytest.mark.parametrize("sites", SITES)
@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_every_member_equals_a_network_modulated_by_hand(case, sites, chunk):
    reference, x = build(case)
    reference.eval()
    ensemble = embens.embed(reference, MEMBERS, sites=sites, generator=generator(3))
    outputs = ensemble(x, chunk=chunk)
    for a in range(MEMBERS):
        assert_close(outputs[a], member_by_hand(reference, ensemble, a)(x))
        assert_close(outputs[a], ensemble.member(a)(x))


@pytest.mark.parametrize("sites", SITES)
def test_training_mode_evaluation_and_evaluation_without_gradients_agree(case, sites):
    reference, x = build(case)
    norms = [m for m in reference.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    ensemble = embens.embed(reference, MEMBERS, sites=sites, generator=generator(3))
    ensemble.eval()
    evaluated = ensemble(x)
    with torch.no_grad():
        assert_close(ensemble(x), evaluated.detach())
    with torch.inference_mode():
        assert_close(ensemble(x).clone(), evaluated.detach())
    if not norms:
        assert_close(ensemble.train()(x), evaluated)


@pytest.mark.parametrize("sites", SITES)
def test_every_single_modulation_changes_its_member_and_no_other(case, sites):
    reference, x = build(case)
    ensemble = embens.embed(reference, MEMBERS, sites=sites, generator=generator(3)).eval()
    with torch.no_grad():
        before = ensemble(x)
        found = modulations(ensemble)
        assert len(found) == len(ensemble.plan.sites)
        for modulation in found.values():
            for i in range(modulation.size):
                saved = modulation.values[1, i].item()
                modulation.values[1, i] += 0.5
                change = (ensemble(x) - before).abs().flatten(1).amax(1)
                modulation.values[1, i] = saved
                assert change[1] > 1e-9
                assert change[0] == change[2] == 0


def attends(reference: nn.Module) -> bool:
    return any(isinstance(m, nn.MultiheadAttention) for m in reference.modules())


def test_with_constant_one_every_member_is_the_reference_to_the_last_bit(case):
    reference, x = build(case)
    one = laws.Constant(1)
    for mode in (True, False):
        ensemble = embens.embed(reference, MEMBERS, pre=one, post=one, sites="all").train(mode)
        expected = copy.deepcopy(reference).train(mode)(x)
        for chunk in (1, None):
            for output in copy.deepcopy(ensemble)(x, chunk=chunk):
                if chunk == 1 and not attends(reference):  # whose products are taken apart
                    assert torch.equal(output, expected)
                assert_close(output, expected, 1e-14)


def test_weights_are_kept_and_the_reference_is_untouched(case):
    reference, x = build(case)
    before = copy.deepcopy(reference.state_dict())
    kinds = [type(m) for m in reference.modules()]
    ensemble = embens.batch_ensemble(reference, MEMBERS)
    loss = ensemble(x).square().sum()
    loss.backward()
    assert [type(m) for m in reference.modules()] == kinds
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(p.grad is None for p in reference.parameters())
    shared = list(ensemble.shared_parameters())
    assert len(shared) == len(list(embens.reading.opened(reference).parameters()))
    for mine, theirs in zip(shared, embens.reading.opened(reference).parameters(), strict=False):
        assert mine is not theirs
    sums = sorted(p.sum().item() for p in shared)
    assert sums == sorted(p.sum().item() for p in embens.reading.opened(reference).parameters())


def test_gradients_equal_those_of_the_members_by_hand(case):
    reference, x = build(case)
    if attends(reference):
        pytest.skip("the hand-made attention scales weights, so its gradients are scaled too")
    reference.eval()
    ensemble = embens.embed(reference, MEMBERS, generator=generator(3))
    ensemble(x).square().sum().backward()
    total = [torch.zeros_like(p) for p in reference.parameters()]
    for a in range(MEMBERS):
        by_hand = member_by_hand(reference, ensemble, a)
        by_hand(x).square().sum().backward()
        for sum_, p in zip(total, by_hand.parameters(), strict=True):
            sum_ += p.grad
    for mine, sum_ in zip(ensemble.shared_parameters(), total, strict=True):
        assert_close(mine.grad, sum_, 1e-10)


def test_a_linear_after_a_flatten_has_one_number_per_channel():
    reference = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 4, 2))
    for example in (None, torch.zeros(1, 3, 4, 4)):
        ensemble = embens.embed(reference, 2, example_input=example)
        found = modulations(ensemble)
        assert (found["3", "post"].size, found["3", "post"].repeat) == (5, 4)
        with torch.no_grad():
            found["3", "post"].values.copy_(torch.arange(10.0).view(2, 5))
        x = torch.randn(2, 3, 4, 4)
        hidden = torch.relu(reference[0](x) * found["0", "pre"].values[1].view(-1, 1, 1))
        u = torch.arange(5.0, 10.0).view(-1, 1, 1)
        expected = reference[3]((hidden * u).flatten(1))
        torch.testing.assert_close(ensemble(x)[1], expected)


@pytest.mark.parametrize(
    ("flatten", "size"),
    [
        (lambda x: x.flatten(1), 4),
        (lambda x: torch.flatten(x, 1), 4),
        (lambda x: x.view(x.size(0), -1), 4),
        (lambda x: x.reshape(len(x) if not isinstance(x, torch.fx.Proxy) else x.shape[0], -1), 4),
        (lambda x: torch.cat([x, x], 1).flatten(1), 8),
    ],
)
def test_any_way_to_flatten_gives_one_number_per_channel(flatten, size):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.head = nn.LazyLinear(2)

        def forward(self, x):
            return self.head(flatten(torch.relu(self.conv(x))))

    reference, x = Net(), torch.randn(2, 3, 4, 4)
    reference(x)
    for example in (None, x):
        ensemble = embens.embed(reference, 2, example_input=example)
        assert modulations(ensemble)["head", "post"].size == size
        torch.testing.assert_close(ensemble(x)[1], ensemble.member(1)(x))


def test_a_flatten_that_mixes_channels_up_is_said_to_be_a_guess():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(16, 2)

        def forward(self, x):
            return self.head(torch.relu(self.conv(x)).permute(0, 2, 3, 1).flatten(1))

    with pytest.warns(UserWarning, match="16 input features of 'head'"):
        ensemble = embens.embed(Net(), 2)
    assert modulations(ensemble)["head", "post"].size == 16


def test_code_that_cannot_be_traced_is_read_from_an_example_or_guessed_with_a_warning():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(4, 2), nn.Linear(3, 4)

        def forward(self, x):
            h = self.first(x)
            if h.sum() > 0:
                h = h * 2
            return self.last(torch.tanh(h))

    x = torch.randn(5, 3)
    with pytest.warns(UserWarning, match="pass example_input"):
        guessed = embens.embed(Net(), 2)
    assert modulations(guessed).keys() == {("last", "pre"), ("first", "post")}
    read = embens.embed(Net(), 2, example_input=x)
    assert modulations(read).keys() == {("first", "pre"), ("last", "post")}
    for a, output in enumerate(read(x)):
        torch.testing.assert_close(output, read.member(a)(x))


def test_modules_that_cannot_be_traced_inside_are_black_boxes_of_one_layer():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) if bool((x > 0).any()) else self.layer(-x)

    reference = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Odd(), nn.Tanh(), nn.Linear(4, 2))
    ensemble = embens.embed(reference, 3)
    assert len(ensemble.plan.sites) == 4
    x = torch.randn(5, 3)
    torch.testing.assert_close(ensemble(x)[2], ensemble.member(2)(x))


def test_tied_weights_stay_tied_and_each_use_has_its_own_modulation():
    ensemble = embens.embed(Tied(), 2)
    assert len(list(ensemble.shared_parameters())) == 3
    tokens = torch.randint(7, (2, 3))
    torch.testing.assert_close(ensemble(tokens)[1], ensemble.member(1)(tokens))


def test_a_weight_that_is_read_without_calling_its_layer_is_refused():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.core = nn.Embedding(7, 6), nn.Linear(6, 6)

        def forward(self, tokens):
            hidden = torch.tanh(self.core(self.embedding(tokens)))
            return nn.functional.linear(hidden, self.embedding.weight)

    for example in (None, torch.zeros(1, 2, dtype=torch.long)):
        with pytest.raises(ValueError, match="reads the weight of 'embedding' without calling"):
            embens.embed(Net(), 2, sites=["embedding"], example_input=example)
    ensemble = embens.embed(Net(), 2, sites=["core"])
    tokens = torch.randint(7, (2, 3))
    torch.testing.assert_close(ensemble(tokens)[1], ensemble.member(1)(tokens))


def test_layers_held_in_plain_lists_are_modulated_too():
    ensemble = embens.embed(Held(), 2)
    x = torch.randn(3, 4)
    assert (ensemble(x)[0] - ensemble(x)[1]).abs().max() > 1e-3


def test_layers_with_hooks_or_parametrizations_keep_a_wrapper_in_the_member():
    reference = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    nn.utils.parametrizations.weight_norm(reference[0])
    reference[2].register_forward_hook(lambda module, args, output: output + args[0].sum())
    ensemble = embens.embed(reference, 2)
    x = torch.randn(5, 3)
    with pytest.warns(UserWarning, match="can't run several members at once .*a hook of '2'"):
        outputs = ensemble(x)
    torch.testing.assert_close(outputs[1], ensemble.member(1)(x))


def test_an_unused_layer_is_no_site():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.head, self.unused = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(torch.tanh(self.used(x)))

    assert {s.layer for s in embens.embed(Net(), 2).plan.sites} == {"used", "head"}
    with pytest.raises(ValueError, match="'unused' names a layer that is never called"):
        embens.embed(Net(), 2, sites="unused")


def test_several_inputs_keywords_and_structured_outputs_go_through():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 2)

        def forward(self, x, y, scale=None):
            hidden = torch.tanh(self.a(x) + self.b(y))
            if scale is not None:
                hidden = hidden * scale
            return {"logits": self.head(hidden), "hidden": hidden, "extra": None}

    x, y = torch.randn(5, 3), torch.randn(5, 2)
    ensemble = embens.embed(Net(), 3, example_input=(x, y))
    for chunk in (1, 3):
        outputs = ensemble(x, y, scale=2.0, chunk=chunk)
        assert outputs["logits"].shape == (3, 5, 2)
        assert outputs["hidden"].shape == (3, 5, 4)
        assert outputs["extra"] is None
        expected = ensemble.member(2)(x, y, scale=2.0)["logits"]
        torch.testing.assert_close(outputs["logits"][2], expected)
