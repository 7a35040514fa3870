"""Random networks: an ensemble gives what plain members give, or refuses with an error of ours.

Members are made by hand (:mod:`handmade`), so nothing of the library decides what is right. A
failure prints the seed, the family and the source of the network.
"""

import pytest
import torch
from random_network_check import (
    FAMILIES,
    Mistake,
    check_derivative,
    check_network,
    is_refusal,
    loss_of,
)
from random_networks import (
    ENTRIES,
    EXITS,
    KINDS,
    PLAIN,
    Network,
    Pattern,
    make_network,
    with_pattern,
)

from embens.ensemble import crosscheck
from embens.graph import folding, members

NAMES = list(FAMILIES)


@pytest.mark.parametrize("seed", range(60))
def test_members_of_a_random_network_are_right_or_refused(seed):
    check_network(make_network(seed), NAMES[seed % len(NAMES)])


@pytest.mark.long
@pytest.mark.parametrize("block", range(100))
def test_members_of_thousands_of_random_networks_are_right_or_refused(block):
    for seed in range(60 + 20 * block, 80 + 20 * block):
        network = make_network(seed)
        for shift in (0, 4, 9):
            check_network(network, NAMES[(seed + shift) % len(NAMES)])


@pytest.mark.long
@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_members_of_every_pattern_are_right_or_refused(kind, family):
    for pattern in KINDS[kind]:
        check_network(with_pattern(pattern), family)


@pytest.mark.parametrize("block", range(4))
def test_gradients_are_those_of_finite_differences(block):
    checked = 0
    for seed in range(40 * block, 40 * block + 40):
        network = make_network(seed)
        if network.is_smooth and not network.is_random and checked < 3:
            checked += check_derivative(network, NAMES[seed % len(NAMES)])

    assert checked == 3


# The suite itself


@pytest.mark.filterwarnings("ignore")  # some patterns use what torch discourages
@pytest.mark.parametrize("kind", KINDS)
def test_every_pattern_runs_and_trains_as_a_plain_network(kind):
    for pattern in KINDS[kind]:
        network = with_pattern(pattern)
        module = network.build()
        for training in (True, False):
            args, kwargs = network.inputs(7)
            loss_of(module.train(training)(*args, **kwargs)).backward()


def test_a_seed_determines_a_network():
    first, again = make_network(5), make_network(5)
    assert first.source == again.source
    for left, right in zip(first.build().parameters(), again.build().parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_wrong_ensemble_is_reported_with_its_source(monkeypatch):
    def wrong(values, *args):
        return 1.01 * original(values, *args)

    original = members.scale_members
    monkeypatch.setattr(members, "scale_members", wrong)  # within modulated layers
    monkeypatch.setattr(folding, "scale_members", wrong)
    # Otherwise the ensemble notices on its first call that its folded form is wrong.
    monkeypatch.setattr(crosscheck, "find_difference", lambda *args, **kwargs: "")
    with pytest.raises(Mistake, match=r"network 0, family 'post'(.|\n)*class Network"):
        check_network(with_pattern(PLAIN[0]), "post")


def test_an_error_of_torch_is_no_refusal():
    with pytest.raises(RuntimeError) as error:
        torch.ones(2) @ torch.ones(3)
    assert not is_refusal(error.value)


def test_an_error_of_ours_is_a_refusal():
    pattern = Pattern("lazy", "h = self.layer$(h)", "self.layer$ = nn.LazyLinear(6)")
    network = with_pattern(pattern)
    network = Network(0, network.source, ENTRIES[0], (pattern,), is_called_first=False)
    assert check_network(network, "both") == "refused"


def test_all_ways_in_and_out_occur():
    sources = [make_network(seed).source for seed in range(400)]
    for entry in ENTRIES:
        assert any(f"forward(self, {entry.arguments}):" in source for source in sources)
    for way_out in EXITS:
        assert any(way_out.run in source for source in sources)
