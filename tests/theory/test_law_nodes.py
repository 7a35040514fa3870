"""Tests of the quadrature nodes of a law."""

import pytest

from embens.laws import Bernoulli, Normal, Shifted
from embens.theory.law_nodes import law_nodes


@pytest.mark.parametrize("law", [Normal(), Shifted(0.6), Normal(2.0, 0.1)], ids=repr)
def test_nodes_of_normal_laws_integrate_moments(law):
    nodes = law_nodes(law, width=0.3)
    assert float(nodes.both.sum()) == pytest.approx(1, abs=1e-13)
    assert float(nodes.both @ nodes.sizes**2) == pytest.approx(law.second_moment, rel=1e-13)
    assert float((nodes.plus - nodes.minus) @ nodes.sizes) == pytest.approx(law.mean, abs=1e-13)


def test_nodes_of_a_discrete_law_are_its_values():
    nodes = law_nodes(Bernoulli(0.6, scale=-2.0), width=1.0)
    assert nodes.sizes.tolist() == [0.0, 2.0]
    assert nodes.minus.tolist() == pytest.approx([0.0, 0.6])
