"""Kernels of common networks under several families, against drawn wide networks."""

from __future__ import annotations

import pytest
import torch
from theory.measured import assert_gradients_agree, long_except
from theory.reference_networks import NETWORKS, inputs_of
from torch import nn

import embens
from embens import laws, theory

pytestmark = pytest.mark.usefixtures("double")

_NOT_LOW_RANK = ("stem", "left", "right", "depthwise", "head")


def low_rank(net: nn.Module, generator=None):
    """Embed low-rank members at the hidden layers."""
    hidden = []
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and name not in _NOT_LOW_RANK:
            hidden.append(name)
    return embens.low_rank(net, 2, 2, scale=0.7, sites=hidden, generator=generator)


FAMILIES = {
    "batch": lambda net, g=None: embens.batch_ensemble(net, 2, generator=g),
    "coupled": lambda net, g=None: embens.embed(
        net, 2, pre=laws.Signs(0.5), post=laws.Signs(0.5), generator=g
    ),
    "masks": lambda net, g=None: embens.masksembles(net, 4, generator=g),
    "dropout": lambda net, g=None: embens.mc_dropout(net, 2, fresh=False, generator=g),
    "last layer": lambda net, g=None: embens.last_layer_dropout(net, 2, generator=g),
    "low rank": low_rank,
}
NO_HIDDEN_LAYER = ("siamese", "low rank")
CASES = [(network, family) for network in NETWORKS for family in FAMILIES]
CASES.remove(NO_HIDDEN_LAYER)
QUICK = [("residual images", "batch"), ("gated perceptron", "coupled"), ("U-net", "masks")]


@pytest.mark.parametrize("name", NETWORKS)
def test_members_of_the_default_family_are_independent(name):
    k = theory.kernels(FAMILIES["batch"](NETWORKS[name](4)), inputs_of(name))

    assert torch.linalg.eigvalsh(k.nngp.same).min() > 0
    assert torch.linalg.eigvalsh(k.ntk_individual.same).min() > 0
    assert not k.nngp.cross.any()
    assert not k.ntk_shared.cross.any()


@pytest.mark.parametrize("case", long_except(CASES, QUICK))
def test_wide_networks_have_these_kernels(case):
    network, family = case
    x = inputs_of(network)
    width = 64 if x.dim() == 4 else 192

    def draw(generator, width=width):
        net = NETWORKS[network](width, generator=generator)
        return FAMILIES[family](net, generator)

    assert_gradients_agree(draw, x, seeds=12, bias=0.06)
