r"""The empirical covariance of outputs at initialisation, of one network.

A covariance is over draws of the weights, and one network is a single draw. But its last layer
averages over many units, so that drawing this layer alone, given everything before it, has the
covariance of drawing everything, up to fluctuations that vanish with the width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embens import networks
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble import run as execution
from embens.ensemble.layers import Modulated
from embens.finite.checks import check_ensemble, check_inputs
from embens.finite.empirical.recording import Inputs, as_inputs, check_modes

if TYPE_CHECKING:
    from jaxtyping import Float


def nngp(
    ensemble: EmbeddedEnsemble, x: Tensor | Inputs, x2: Tensor | Inputs | None = None
) -> Float[Tensor, "m m n1 n2"]:
    r"""Return the empirical covariance of outputs that this one network stands for.

    Where the network ends in a Linear layer, it is the covariance over draws of that layer alone,
    averaged over outputs:

    .. math::
        \hat\Sigma_{ab}(x, x') = \Big(\frac{\sigma_w^2}{N} \sum_i h_{ai}(x) h_{bi}(x')
            + \sigma_b^2\Big) \frac{1}{K} \sum_k v_{ak} v_{bk}

    with the layer's inputs :math:`h_a`, modulations included, and output modulations :math:`v`
    where there are any. Layers of :mod:`embens.networks` know the law of their weights; for any
    other Linear layer the mean squares of its weights and of its biases take its place. Members
    with a last layer of their own have no covariance with others.

    Any other network: the mean over outputs of :math:`f_{ak}(x) f_{bk}(x')`, noisy where outputs
    are few.

    Args:
        ensemble: of any family; batch statistics and random layers need ``ensemble.eval()``.
        x: samples along the first axis; a tuple of tensors for a reference of several arguments.
        x2: other samples; None: the same.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> network = networks.mlp(inputs=4, width=8, depth=2)
        >>> ensemble = batch_ensemble(network, members=3, p=1.0)  # all modulations are 1
        >>> covariance = nngp(ensemble, torch.ones(5, 4))
        >>> covariance.shape, bool((covariance[0, 0] == covariance[0, 1]).all())
        (torch.Size([3, 3, 5, 5]), True)
    """
    check_ensemble(ensemble)
    for name, samples in (("x", x), ("x2", x2)):
        if samples is not None:
            check_inputs(samples, name, ensemble=ensemble)
    check_modes(ensemble)
    stacks = ensemble._stacks()
    with torch.no_grad(), _Watch(ensemble.network).watching() as watch:
        left = _run(ensemble, stacks, as_inputs(x, "x"), watch)
        right = left if x2 is None else _run(ensemble, stacks, as_inputs(x2, "x2"), watch)
    if all(head is not None for head in (*left.heads, *right.heads)):
        return _from_heads(left.heads, right.heads)  # type: ignore[arg-type]
    rows, columns = (torch.stack(side.outputs).flatten(2) for side in (left, right))
    return torch.einsum("aik,bjk->abij", rows, columns) / rows.shape[2]


@dataclass(frozen=True)
class _Head:
    """The last layer in one member's pass."""

    inputs: Tensor
    weight_variance: float
    bias_variance: float
    pre: Tensor | None
    own: bool


@dataclass
class _Side:
    outputs: list[Tensor]
    heads: list[_Head | None]


class _Watch:
    """Keeps the latest calls of Linear layers, to find the one that the network ends in."""

    def __init__(self, network: nn.Module):
        self.network = network
        self.calls: list[tuple[Any, ...]] = []

    @contextmanager
    def watching(self) -> Iterator[_Watch]:
        known = (nn.Linear.forward, networks.Linear.forward)
        handles = [
            module.register_forward_hook(self._keep)
            for module in self.network.modules()
            if (isinstance(module, nn.Linear) and type(module).forward in known)
            or isinstance(module, Modulated)
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, module: nn.Module, args: tuple, output: Any) -> None:
        variances = (0.0, 0.0) if isinstance(module, Modulated) else _variances(module)
        self.calls = [*self.calls[-1:], (module, args, output, variances)]

    def head(self, output: Tensor, values: list[Tensor], own: set[int]) -> _Head | None:
        """Return the layer whose output this is, if it is a Linear layer's."""
        calls, pre = list(self.calls), None
        if calls and isinstance(calls[-1][0], Modulated) and calls[-1][2] is output:
            module, _, _, _ = calls.pop()
            if module.slots[0] is not None:
                pre = values[module.slots[0]]
                output = calls[-1][2] if calls else output
        if not calls or calls[-1][2] is not output or not isinstance(calls[-1][0], nn.Linear):
            return None
        layer, args, _, (weight, bias) = calls[-1]
        if not args or args[0].dim() != 2:
            return None
        return _Head(args[0], weight, bias, pre, id(layer.weight) in own)


def _run(ensemble: EmbeddedEnsemble, stacks: list[Tensor], inputs: Inputs, watch: _Watch) -> _Side:
    own = {id(p) for p in ensemble.individual_parameters()}
    side = _Side([], [])
    with execution.Pass(ensemble._cursor, ensemble._new_store("same", 1)):
        for a in range(ensemble.members):
            values = [stack[a] for stack in stacks]
            watch.calls.clear()
            output = execution.run_member(ensemble.network, ensemble._cursor, values, inputs, {})
            if not isinstance(output, Tensor):
                raise TypeError(
                    "a covariance needs a network whose output is one tensor; got "
                    f"{type(output).__name__}. Wrap the reference in a module that returns it."
                )
            side.outputs.append(output)
            side.heads.append(watch.head(output, values, own))
    return side


def _variances(layer: nn.Module) -> tuple[float, float]:
    """Return the variances of a Linear layer's weights and biases."""
    assert isinstance(layer, nn.Linear)
    if not isinstance(layer, networks.Linear):
        bias = 0.0 if layer.bias is None else float(layer.bias.square().mean())
        return float(layer.weight.square().mean()), bias
    inputs, outputs = layer.in_features, layer.out_features
    fan = (inputs + outputs) / 2 if layer.parametrization == "xavier" else inputs
    return layer.weight_std**2 / fan, layer.bias_std**2


def _from_heads(left: list[_Head], right: list[_Head]) -> Tensor:
    members, first = len(left), left[0]
    # Members with a last layer of their own have its numbers in their inputs' scale.
    scales = [math.sqrt(head.weight_variance) for head in left]
    rows, columns = (
        torch.stack([h.inputs * s for h, s in zip(heads, scales, strict=True)])
        for heads in (left, right)
    )
    result = torch.einsum("aif,bjf->abij", rows, columns)
    biases = torch.tensor([math.sqrt(head.bias_variance) for head in left]).to(result)
    result += torch.outer(biases, biases)[:, :, None, None]
    if first.pre is not None:
        pre = torch.stack([head.pre for head in left])  # type: ignore[arg-type]
        result *= (pre @ pre.mT / pre.shape[1])[:, :, None, None]
    if first.own:
        result *= torch.eye(members).to(result)[:, :, None, None]
    return result
