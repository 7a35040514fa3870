"""Tables are made once, and serve whoever asks; their series are numpy's."""

import numpy as np
import pytest
import torch
from torch import nn

from embens.laws import Normal, Rademacher
from embens.networks import Erf
from embens.theory.duals import dual, tables
from embens.theory.duals.tables import Axis


def number(x):
    return torch.tensor(x, dtype=torch.float64)


def table_of(of, q_max, law=None):
    return of.prepare(1.0, q_max, law)._prepared


class TestTables:
    def test_are_shared_by_instances_with_the_same_values(self):
        one, other = dual(nn.Softplus(1.5)), dual(nn.Softplus(1.5))
        assert one is not other
        assert table_of(one, 1.1) is table_of(other, 1.1)
        assert table_of(one, 1.1) is not table_of(dual(nn.Softplus(1.6)), 1.1)

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own
    def test_can_be_made_while_derivatives_are_taken_and_used_afterwards(self):
        q, one = number([1.7]), number([1.0])
        for module, law in ((nn.Softplus(0.9), None), (nn.GELU(), Normal(0.4, 1.1))):
            of = dual(module)

            def first(c, of=of, law=law):
                return torch.func.jvp(lambda x: of.cross(q, q, x, law)[0], (c,), (one,))[1]

            slope, _ = torch.func.jvp(first, (number([0.5]),), (one,))
            expected = of.cross(q, q, number([0.5]), law)[1]
            torch.testing.assert_close(slope, expected, rtol=1e-8, atol=1e-9)

    def test_are_used_again_for_nearby_variances(self):
        of = dual(nn.Tanh())
        assert table_of(of, 1.1) is table_of(of, 1.3)
        assert table_of(of, 1.1) is not table_of(of, 1.1, Rademacher())

    def test_are_not_made_where_a_closed_form_will_do(self):
        for module, law in ((nn.ReLU(), Normal()), (Erf(), None), (nn.GELU(), Rademacher())):
            of = dual(module)
            assert of.prepare(0.5, 1.0, law) is of

    def test_can_be_made_within_inference_mode_and_used_outside(self):
        of = dual(nn.Tanh())
        with torch.inference_mode():
            prepared = of.prepare(1.0, 1.1, None)
        c = number([0.5]).requires_grad_()
        f, g, _ = prepared.same(number([1.0]), number([1.0]), c, None)
        f.backward()
        torch.testing.assert_close(c.grad, g.detach(), rtol=1e-8, atol=1e-9)


class TestSeries:
    @pytest.mark.parametrize("count", [2, 5, 16])
    def test_basis_and_sums_are_numpys(self, count):
        x = torch.linspace(-1, 1, 7, dtype=torch.float64)
        expected = np.polynomial.chebyshev.chebvander(x.numpy(), count - 1)
        np.testing.assert_allclose(tables.chebyshev_basis(x, count), expected, atol=1e-14)
        random = torch.randn(count, generator=torch.Generator().manual_seed(0)).double()
        summed = tables.clenshaw(random[:, None].expand(count, 7), x)
        np.testing.assert_allclose(summed, expected @ random.numpy(), atol=1e-13)

    def test_values_at_the_nodes_and_coefficients_are_a_matrix_apart(self):
        nodes = tables.chebyshev_nodes(9)
        values = nodes**3 - nodes / 2  # (T_3 + T_1) / 4
        coefficients = tables.to_chebyshev(9) @ values
        expected = number([0, 0.25, 0, 0.25, 0, 0, 0, 0, 0])
        torch.testing.assert_close(coefficients, expected, rtol=0, atol=1e-15)

    def test_an_axis_is_refined_until_it_interpolates(self):
        axis = Axis(0.0, 5.0, 1.0).refine(lambda roots: torch.tanh(roots)[:, None])
        roots = torch.linspace(0, 5, 50, dtype=torch.float64)
        coefficients = tables.to_chebyshev(axis.count) @ torch.tanh(axis.nodes())
        torch.testing.assert_close(
            axis.basis(roots) @ coefficients, roots.tanh(), rtol=0, atol=1e-12
        )
        assert 8 < axis.count < 192

    @pytest.mark.parametrize("integrated", [False, True])
    def test_powers_of_the_correlation_become_a_series(self, integrated):
        axis, edge, rho = Axis(0.5, 2.0, 1.0, count=12), 0.3, number([[-1.0, -0.3, 0.0, 0.8, 1.0]])
        nodes = axis.nodes()
        powers = torch.stack([0.8**n * nodes[:, None] * nodes for n in range(200)])
        found = tables.expand_powers(powers, edge, integrated=integrated)
        roots = number([[0.7], [1.9]])
        basis = axis.basis(roots), axis.basis(roots[:1])
        value = -torch.log(1 - 0.8 * rho) / 0.8 if integrated else 1 / (1 - 0.8 * rho)
        expected = roots * 0.7 * value
        torch.testing.assert_close(
            tables.evaluate(found, *basis, tables.spread(rho, edge).expand(2, 5)),
            expected,
            rtol=1e-11,
            atol=1e-12,
        )
