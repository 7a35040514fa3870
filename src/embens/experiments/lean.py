r"""A training step with little but its arithmetic, for perceptrons.

The networks of the quick preset are so small that the time of :func:`embens.fit` is mostly
book-keeping. A perceptron's ensemble is a short list of products, so it can be run as one: the
members are an axis, a modulation is a leaf of shape ``(member, 1, unit)`` that shares its memory
with the ensemble's parameter, and an update is a few fused operations on lists of tensors. The
same steps as :func:`embens.fit`'s, to rounding, which the tests check.

What is not a perceptron has no lean form: :func:`lean` returns None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.layers import Modulated, Modulation, Once, Own
from embens.networks import Linear as ParametrizedLinear

_ELEMENTWISE = (nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Identity)
_MOMENTUM = 0.9
_multiply_, _add_ = torch._foreach_mul_, torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]


@dataclass
class Lean:
    """The products of an ensemble of perceptrons, and their leaves.

    Attributes:
        members: how many.
        steps: functions of the activations, ``(batch, unit)`` as long as members share them, then
            ``(member, batch, unit)``.
        shared: leaves of the shared weights.
        individual: leaves of the members' own.
    """

    members: int
    steps: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    shared: list[Tensor] = field(default_factory=list)
    individual: list[Tensor] = field(default_factory=list)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the outputs, ``(member, batch, class)``."""
        for step in self.steps:
            inputs = step(inputs)
        return inputs if inputs.dim() == 3 else inputs.expand(self.members, *inputs.shape)

    def leaf(self, parameter: Tensor, *, individual: bool, shape: tuple[int, ...]) -> Tensor:
        """Return a view of a parameter that is a leaf; a frozen mask stays out of the lists."""
        view = parameter.detach().view(shape)
        if parameter.requires_grad:
            view.requires_grad_()
            (self.individual if individual else self.shared).append(view)
        return view


def lean(ensemble: EmbeddedEnsemble) -> Lean | None:
    """Return the lean form of an ensemble, None if it has none."""
    network, own = ensemble.network, False
    if isinstance(network, Own):
        network, own = network.module, True
    if not isinstance(network, nn.Sequential):
        return None
    form = Lean(ensemble.members)
    for module in network:
        step = _step(form, module, own)
        if step is None:
            return None
        form.steps.append(step)
    return form


def _step(form: Lean, module: nn.Module, own: bool) -> Callable[[Tensor], Tensor] | None:
    pre = post = None
    if isinstance(module, Modulated):
        pre, post, module = module.pre, module.post, module.layer
    if isinstance(module, Once):
        module = module.module
    if isinstance(module, nn.ReLU):
        return torch.relu
    if isinstance(module, _ELEMENTWISE):
        return module
    if type(module) not in (nn.Linear, ParametrizedLinear):
        return None
    assert isinstance(module, nn.Linear)
    weight = form.leaf(module.weight, individual=own, shape=module.weight.shape)
    bias = None
    if module.bias is not None:
        shape = (form.members, 1, -1) if own else (-1,)
        bias = form.leaf(module.bias, individual=own, shape=shape)
    scale, bias_scale = _scales(module)
    product = _product(weight, bias, scale, bias_scale, own)
    before, after = _factor(form, post), _factor(form, pre)
    if before is None and after is None:
        return product
    if after is None:
        return lambda x: product(x * before())  # type: ignore[misc]
    if before is None:
        return lambda x: product(x) * after()
    return lambda x: product(x * before()) * after()


def _product(
    weight: Tensor, bias: Tensor | None, scale: float, bias_scale: float, own: bool
) -> Callable[[Tensor], Tensor]:
    def effective() -> Tensor:
        return weight if scale == 1.0 else weight * scale

    if own:
        shift = None if bias is None else lambda: bias * bias_scale

        def separate(x: Tensor) -> Tensor:
            out = torch.matmul(x, effective().mT)
            return out if shift is None else out + shift()

        return separate
    if bias is None:
        return lambda x: F.linear(x, effective())
    return lambda x: F.linear(x, effective(), bias * bias_scale)


def _scales(layer: nn.Linear) -> tuple[float, float]:
    if isinstance(layer, ParametrizedLinear) and layer.parametrization == "ntk":
        return layer.weight_std / math.sqrt(layer.in_features), layer.bias_std
    return 1.0, 1.0


def _factor(form: Lean, modulation: Modulation | None) -> Callable[[], Tensor] | None:
    if modulation is None:
        return None
    if modulation.fresh:
        return lambda: modulation.stacks()[0].unsqueeze(1)
    shape = (form.members, 1, modulation.size)
    leaf = form.leaf(modulation.values, individual=True, shape=shape)
    return lambda: leaf


class Steps:
    r"""Momentum steps on a lean form, with the paper's gradients.

    Args:
        form: what to train.
        factor: :math:`\gamma(M)/M`.
        weight_decay: of the shared weights (of separate networks: of all).
        separate: whether members are separate networks.
    """

    def __init__(self, form: Lean, *, factor: float, weight_decay: float, separate: bool = False):
        self.form, self.factor, self.decay = form, factor, weight_decay
        self.leaves = [*form.shared, *form.individual]
        self.values = [leaf.detach() for leaf in self.leaves]
        count = len(form.shared)
        self.decayed = len(self.leaves) if separate else count
        self.count = count
        self.momenta = [torch.zeros_like(value) for value in self.values]

    def take(self, inputs: Tensor, target: Tensor, *, lr: float, modulation_lr: float) -> Tensor:
        """Make one step; return the mean of the members' losses before it."""
        members, rows = self.form.members, len(target)
        outputs = self.form(inputs)
        loss = F.cross_entropy(
            outputs.reshape(members * rows, -1), target.repeat(members), reduction="sum"
        )
        gradients: Any = list(torch.autograd.grad(loss / rows, self.leaves))
        count = self.count
        if self.factor != 1.0 and count:
            _multiply_(gradients[:count], self.factor)
        if self.decay and self.decayed:
            _add_(gradients[: self.decayed], self.values[: self.decayed], alpha=self.decay)
        _multiply_(self.momenta, _MOMENTUM)
        _add_(self.momenta, gradients)
        if lr == modulation_lr:
            _add_(self.values, self.momenta, alpha=-lr)
        else:
            for part, rate in ((slice(count), lr), (slice(count, None), modulation_lr)):
                if self.values[part]:
                    _add_(self.values[part], self.momenta[part], alpha=-rate)
        return loss.detach() / (rows * members)
