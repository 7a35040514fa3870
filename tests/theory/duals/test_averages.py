"""Expectations at fixed modulations, and their averages over a law."""

import pytest
import torch

from embens.laws import Bernoulli, Normal, Shifted
from embens.theory.duals import Dual
from embens.theory.duals.averages import Formula, Nodes
from embens.theory.duals.closed import Erf
from embens.theory.duals.smooth import Smooth


@pytest.mark.parametrize("law", [Normal(), Shifted(0.6), Normal(2.0, 0.1)])
def test_nodes_for_singular_functions_integrate_moments(law):
    nodes = Nodes.of_normal(law.mean, law.std, width=0.3)
    assert float(nodes.both.sum()) == pytest.approx(1, abs=1e-13)
    assert float(nodes.steep.sum()) == pytest.approx(law.second_moment, rel=1e-13)
    assert float((nodes.plus - nodes.minus) @ nodes.size) == pytest.approx(law.mean, abs=1e-13)


def test_nodes_of_a_law_with_few_values_are_these():
    nodes = Nodes.of(Bernoulli(0.6, scale=-2.0), 61)
    assert nodes.size.tolist() == [0.0, 2.0]
    assert nodes.minus.tolist() == pytest.approx([0.0, 0.6])


def test_a_formula_is_interpolated_in_the_scales():
    formula = Formula(Erf().fixed, 3.0)
    basis = formula.basis(torch.tensor([0.5, 1.7], dtype=torch.float64))
    f, g, h = basis @ formula.at((0.8,))[:, 0] @ basis.T
    q = torch.tensor([0.5, 1.7], dtype=torch.float64) ** 2
    size = (q[:, None] * q).sqrt()
    expected = Erf().fixed(q[:, None], q, 0.8 * size, with_h=True)
    for found, value in zip((f * size, g, h * size), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("law", [Normal(), Shifted(0.5)])
def test_a_formula_and_a_series_have_the_same_averages(law):
    q = torch.tensor([0.2, 1.0, 2.5], dtype=torch.float64)
    c = 0.6 * (q[:, None] * q).sqrt()
    duals: list[Dual] = [d.prepare(0.2, 2.5, law) for d in (Erf(), Smooth(torch.erf, "erf"))]
    for first, second in zip(*(d.same(q[:, None], q, c, law) for d in duals), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-11)
    for first, second in zip(*(d.cross(q[:, None], q, c, law) for d in duals), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-11)
