r"""Duals of activation modules.

Closed forms exist for piecewise linear activations, erf, sine, cosine and GELU. Other smooth
activations use quadrature (:mod:`embens.theory.quadrature`), and so do ELU, SELU and CELU, which
have a kink at 0 (:mod:`embens.theory.kinks`). A user's smooth activation needs one line,
``register_activation(MyActivation)``; for a kink at 0, ``register_activation(MyActivation,
with_kink_at_zero)``. For other kinks, write a :class:`~embens.theory.Dual`.
"""

import copy
from collections.abc import Callable
from functools import cache, singledispatch

import torch
from torch import Tensor, nn

from embens import networks
from embens.theory.closed_forms import Erf, Gelu, Homogeneous, Wave
from embens.theory.expectations import Dual
from embens.theory.kinks import Kinked
from embens.theory.quadrature import Smooth


@singledispatch
def dual(module: nn.Module) -> Dual:
    """Return the dual of an activation module with its settings.

    Args:
        module: The activation.

    Raises:
        TypeError: If no dual is registered for the class of the module.

    Example:
        >>> dual(nn.LeakyReLU(0.1))
        Homogeneous(right=1.0, left=0.1, at_zero=0.1)
    """
    name = type(module).__name__
    raise TypeError(
        f"the expectations of {name} under a normal law are not known. If it acts elementwise and "
        f"is smooth, call embens.theory.register_activation({name}); else decorate a function that "
        f"returns its Dual with @embens.theory.register_activation({name})."
    )


def register(
    kind: type[nn.Module], function: Callable[..., Dual] | None = None
) -> Callable[[Callable[..., Dual]], Callable[..., Dual]]:
    """Register an activation class.

    Args:
        kind: Class of the activation, which must act elementwise. Without a function it must also
            be smooth; its expectations then use quadrature.
        function: Takes an instance and returns its :class:`~embens.theory.Dual`.

    Returns:
        A decorator that registers another function for the same class.

    Raises:
        TypeError: If ``kind`` is not a subclass of ``nn.Module``.

    Example:
        >>> class Square(nn.Module):
        ...     def forward(self, x):
        ...         return x**2
        >>> decorate = register(Square)
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> round(dual(Square()).same(one, one, one, None)[0].item(), 9)  # E z⁴
        3.0
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(
            f"register takes a class of modules, such as MyActivation; got {kind!r}. "
            "Give the class and not an instance, or wrap a function in a module."
        )

    def decorate(function: Callable[..., Dual]) -> Callable[..., Dual]:
        return dual.register(kind, function)

    decorate(by_quadrature if function is None else function)
    return decorate


def by_quadrature(module: nn.Module) -> Dual:
    """Return the dual of a smooth activation.

    Args:
        module: The activation; it is copied to float64 on the CPU.

    Raises:
        ValueError: If the module is random, or does not act elementwise.
    """
    module = copy.deepcopy(module).to("cpu", torch.float64).requires_grad_(False)
    name = type(module).__name__
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    with torch.no_grad():
        whole = module(x)
        repeated = module(x)
        if whole.shape != x.shape or not torch.equal(whole, repeated):
            raise ValueError(
                f"{name} must act elementwise and not be random: its outputs have another shape, "
                "or differ between two calls. For random layers use embens.mc_dropout."
            )
        elementwise = torch.stack([module(value) for value in x])
    if not torch.allclose(whole, elementwise, rtol=1e-12, atol=1e-12, equal_nan=True):
        raise ValueError(
            f"{name} does not act elementwise: an output depends on several inputs. Register a "
            "rule for it with embens.theory.propagate.register instead."
        )
    return Smooth(module, name)


def with_kink_at_zero(module: nn.Module) -> Dual:
    """Return the dual of an activation that is smooth on both sides of 0.

    Args:
        module: The activation, which must act elementwise; it is copied to float64 on the CPU.

    Raises:
        ValueError: If the module is random, or does not act elementwise.

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> f, g, _ = with_kink_at_zero(nn.ReLU()).same(one, one, 0 * one, None)
        >>> round(f.item(), 9), round(g.item(), 9)  # 1/2π, 1/4
        (0.159154943, 0.25)
    """
    by_quadrature(module)  # raises unless the module acts elementwise
    module = copy.deepcopy(module).to("cpu", torch.float64).requires_grad_(False)

    def slope(x: Tensor) -> Tensor:
        pull_back = torch.func.vjp(module, x)[1]
        return pull_back(torch.ones_like(x))[0]

    return Kinked(module, slope, str(module))


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


@dual.register
def _(module: nn.Identity) -> Dual:
    return Homogeneous(1.0, 1.0, 1.0)


@dual.register
def _(module: nn.ReLU) -> Dual:
    return Homogeneous()


@dual.register
def _(module: nn.LeakyReLU) -> Dual:
    slope = float(module.negative_slope)
    return Homogeneous(1.0, slope, slope)


@dual.register
def _(module: networks.Abs) -> Dual:
    return Homogeneous(1.0, -1.0)


@dual.register
def _(module: networks.Erf) -> Dual:
    return Erf()


@dual.register
def _(module: networks.Sin) -> Dual:
    return Wave(parity=-1)


@dual.register
def _(module: networks.Cos) -> Dual:
    return Wave(parity=1)


@dual.register
def _(module: nn.GELU) -> Dual:
    if module.approximate == "none":
        return Gelu()
    return by_quadrature(module)


@dual.register
def _(module: nn.Softplus) -> Dual:
    # The function of torch is linear beyond a threshold, so it is not smooth there.
    return _softplus_dual(float(module.beta))


@cache
def _softplus_dual(beta: float) -> Dual:
    return Smooth(lambda x: _softplus(beta * x) / beta, f"Softplus({beta:g})")


@dual.register
def _(module: nn.Mish) -> Dual:
    return _mish_dual()


@cache
def _mish_dual() -> Dual:
    return Smooth(lambda x: x * _softplus(x).tanh(), "Mish")


for _kind in (nn.ELU, nn.SELU, nn.CELU):
    register(_kind, with_kink_at_zero)


_STATELESS = (nn.Tanh, nn.Sigmoid, nn.SiLU, nn.LogSigmoid, nn.Tanhshrink)


@cache
def _of_kind(kind: type[nn.Module]) -> Dual:
    """Return the dual of a stateless activation; it is cached, because it holds tables."""
    return by_quadrature(kind())


def _stateless(module: nn.Module) -> Dual:
    if type(module) in _STATELESS:
        return _of_kind(type(module))
    return by_quadrature(module)  # a subclass may have another forward


for _kind in _STATELESS:
    register(_kind, _stateless)
