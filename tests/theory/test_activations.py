"""Duals of activation modules, and their registration."""

import copy

import torch
from torch import nn

from embens.theory.activations import dual, register
from embens.theory.closed_forms import Homogeneous


def number(x):
    return torch.tensor(x, dtype=torch.float64)


class Steep(nn.Module):
    def __init__(self, slope):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(slope))

    def forward(self, x):
        return torch.tanh(self.slope * x)


class TestRegister:
    def test_makes_a_users_activation_known_by_its_class(self):
        register(Steep)
        module = Steep(2.0)
        before = copy.deepcopy(module.state_dict())
        q = number([0.7])
        computed = dual(module).same(q, q, q / 3, None)
        expected = dual(nn.Tanh()).same(4 * q, 4 * q, 4 * q / 3, None)
        factors = (1, 4, 1)  # φ(2z) has variances 4q; G is by c, H has z and not 2z

        for x, y, factor in zip(computed, expected, factors, strict=True):
            torch.testing.assert_close(x, factor * y, rtol=1e-10, atol=1e-11)
        assert module.state_dict() == before
        assert module.slope.dtype == torch.float32

    def test_takes_a_function_that_returns_a_dual_as_argument_or_decorator(self):
        class Bent(nn.Module):
            forward = staticmethod(torch.relu)

        register(Bent, lambda module: Homogeneous())
        assert dual(Bent()) == Homogeneous()

        @register(Bent)
        def bent(module):
            return Homogeneous(2.0)

        assert dual(Bent()) == bent(Bent()) == Homogeneous(2.0)

    def test_serves_subclasses(self):
        class Mine(nn.Tanh):
            pass

        q = number([0.7])
        computed, expected = (dual(m).same(q, q, q / 3, None)[0] for m in (Mine(), nn.Tanh()))
        assert torch.equal(computed, expected)

    def test_respects_the_settings_of_an_instance(self):
        q = number([0.7])
        one, two = (dual(m).same(q, q, q / 3, None)[0] for m in (nn.Softplus(1), nn.Softplus(3)))
        assert abs(one - two) > 0.01
        exact, approximate = (
            dual(nn.GELU(approximate=a)).same(q, q, q / 3, None)[0] for a in ("none", "tanh")
        )
        assert 1e-6 < abs(exact - approximate) < 1e-2
