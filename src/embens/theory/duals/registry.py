r"""Dual activations: which expectations belong to which module.

Closed forms exist for what is linear on each half-line, and for erf, sine, cosine and GELU; other
smooth activations go by quadrature to 1e-10. Your own needs one line, ``register(MyActivation)``,
if it is smooth; else write a dual and register a function that makes it.
"""

import copy
from collections.abc import Callable
from functools import singledispatch

import torch
from torch import Tensor, nn

from embens import networks
from embens.theory.duals.closed import Erf, Gelu, Homogeneous, Wave
from embens.theory.duals.expectations import Dual
from embens.theory.duals.smooth import Smooth


@singledispatch
def dual(module: nn.Module) -> Dual:
    """Return the expectations of an activation with its settings.

    Example:
        >>> dual(nn.LeakyReLU(0.1))
        Homogeneous(right=1.0, left=0.1, at_zero=0.1)
    """
    name = type(module).__name__
    raise TypeError(
        f"the expectations of {name} under a normal law are not known. If it acts on each number "
        f"alone and is smooth, call embens.theory.register_activation({name}); else decorate a "
        f"function that returns its Dual with @embens.theory.register_activation({name})."
    )


def register(
    kind: type[nn.Module], function: Callable[..., Dual] | None = None
) -> Callable[[Callable[..., Dual]], Callable[..., Dual]]:
    """Make an activation known; return a decorator for a function that makes its dual.

    Args:
        kind: class of the activation. It must act on each number alone; unless a function is
            given, it must be smooth, and its expectations go by quadrature.
        function: takes an instance and returns its :class:`Dual`.

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
    """Return the dual of a smooth activation, or say why it is none."""
    module = copy.deepcopy(module).to("cpu", torch.float64).requires_grad_(False)
    name = type(module).__name__
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    with torch.no_grad():
        whole, again = module(x), module(x)
        parts = torch.stack([module(number) for number in x]) if whole.shape == x.shape else x
    if not (torch.equal(whole, again) and whole.shape == parts.shape == x.shape):
        raise ValueError(
            f"{name} does not return one number for each number, always the same. Its expectations "
            "under a normal law exist only if it does; for random layers use embens.mc_dropout."
        )
    if not torch.allclose(whole, parts, rtol=1e-12, atol=1e-12, equal_nan=True):
        raise ValueError(
            f"{name} does not act on each number alone: what it returns for one depends on the "
            "others. Register a rule for it with embens.theory.propagate.register instead."
        )
    return Smooth(module, name)


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def _of_softplus(module: nn.Softplus) -> Dual:
    beta = float(module.beta)  # its threshold, which saves time, makes a jump
    return Smooth(lambda x: _softplus(beta * x) / beta, f"Softplus({beta:g})")


_KNOWN: dict[type[nn.Module], Callable[..., Dual]] = {
    nn.Identity: lambda _: Homogeneous(1.0, 1.0, 1.0),
    nn.ReLU: lambda _: Homogeneous(),
    nn.LeakyReLU: lambda m: Homogeneous(1.0, float(m.negative_slope), float(m.negative_slope)),
    networks.Abs: lambda _: Homogeneous(1.0, -1.0),
    networks.Erf: lambda _: Erf(),
    networks.Sin: lambda _: Wave(-1),
    networks.Cos: lambda _: Wave(1),
    nn.GELU: lambda module: Gelu() if module.approximate == "none" else by_quadrature(module),
    nn.Softplus: _of_softplus,
    nn.Mish: lambda _: Smooth(lambda x: x * _softplus(x).tanh(), "Mish"),
    **dict.fromkeys((nn.Tanh, nn.Sigmoid, nn.SiLU, nn.LogSigmoid, nn.Tanhshrink), by_quadrature),
}
for _kind, _make in _KNOWN.items():
    register(_kind, _make)
