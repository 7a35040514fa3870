"""Nodes of modulations with their numbers of terms."""

from __future__ import annotations

import pytest
import torch

from embens import laws
from embens.theory.law_nodes import LawNodes
from embens.theory.quadrature import Smooth
from embens.theory.resolution import MAX_ENTRIES, Evaluation


@pytest.mark.parametrize("law", [None, laws.Rademacher(), laws.Shifted(0.6), laws.Bernoulli(0.7)])
def test_nodes_have_the_second_moment_of_the_law(law):
    resolution = Smooth(torch.tanh, "tanh").resolve(1.0, law)
    expected = 1.0 if law is None else law.second_moment**0.5
    assert resolution.deviation == pytest.approx(expected, rel=1e-9)
    assert resolution.is_constant == (law is None)


def test_parts_keep_all_nodes_and_bound_the_memory():
    resolution = Smooth(torch.tanh, "tanh").resolve(1.0, laws.Normal())
    roots = 2**14
    parts = list(resolution.parts(roots, torch.device("cpu")))

    assert torch.equal(torch.cat([nodes.sizes for nodes, _ in parts]), resolution.sizes)
    for nodes, terms in parts:
        assert isinstance(nodes, LawNodes)
        assert len(nodes.sizes) * terms * roots <= MAX_ENTRIES or len(nodes.sizes) == 1


def test_gram_of_slopes_sums_both_halves_of_the_line():
    slopes = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    weights = torch.rand(5, generator=torch.Generator().manual_seed(1))
    gram = Evaluation(slopes, slopes, 2 * slopes).slope_gram(weights)
    torch.testing.assert_close(gram, 5 * torch.einsum("ip,p,jp->ij", slopes, weights, slopes))
