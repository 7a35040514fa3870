"""Tables are made once, and serve whoever asks."""

import pytest
import torch
from torch import nn

from embens.laws import Normal, Rademacher
from embens.networks import Erf
from embens.theory.duals import dual


def number(x):
    return torch.tensor(x, dtype=torch.float64)


def all_five_of(of, law, q1, q2, c):
    return torch.stack([*of.same(q1, q2, c, law), *of.cross(q1, q2, c, law)], dim=-1)


class TestTables:
    def test_are_shared_by_instances_with_the_same_values(self):
        one, other = dual(nn.Softplus(1.5)), dual(nn.Softplus(1.5))
        assert one is not other
        assert one.prepare(1.0, 1.1, None) is other.prepare(1.0, 1.1, None)
        assert one.prepare(1.0, 1.1, None) is not dual(nn.Softplus(1.6)).prepare(1.0, 1.1, None)

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
        assert of.prepare(1.0, 1.1, None) is of.prepare(1.02, 1.3, None)
        assert of.prepare(1.0, 1.1, None) is not of.prepare(1.0, 1.1, Rademacher())

    def test_serve_other_laws_and_variances_too(self):
        of = dual(nn.Tanh()).prepare(1.0, 1.1, None)
        q = number([7.0])
        expected = all_five_of(dual(nn.Tanh()), Rademacher(), q, q, q / 2)
        torch.testing.assert_close(all_five_of(of, Rademacher(), q, q, q / 2), expected)
        torch.testing.assert_close(of.same(q, q, q / 2, None)[0], expected[..., 0])

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
