r"""The empirical covariance of outputs at initialisation, of one network.

A covariance is over draws of the weights, and one network is a single draw. But its last layer
averages over many units, so that drawing this layer alone, given everything before it, has the
covariance of drawing everything, up to fluctuations that vanish with the width.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from embens import networks
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.layers import Modulated, Modulation
from embens.ensemble.lowrank import LowRank
from embens.ensemble.own import Own
from embens.finite.checks import check_ensemble, check_inputs
from embens.finite.empirical.recording import Inputs, as_inputs, check_modes

if TYPE_CHECKING:
    from jaxtyping import Float

KNOWN = (nn.Linear.forward, networks.Linear.forward)


def nngp(
    ensemble: EmbeddedEnsemble, x: Tensor | Inputs, x2: Tensor | Inputs | None = None
) -> Float[Tensor, "m m n1 n2"]:
    r"""Return the empirical covariance of outputs that this one network stands for.

    Where the network ends in a Linear layer, it is the covariance over draws of that layer alone,
    averaged over outputs:

    .. math::
        \hat\Sigma_{ab}(x, x') = \Big(\frac{\sigma_w^2}{N} \sum_i h_{ai}(x) h_{bi}(x')
            + \sigma_b^2\Big) \frac{1}{K} \sum_k v_{ak} v_{bk}

    with the layer's inputs :math:`h_a`, modulations included, and output modulations :math:`v`.
    Layers of :mod:`embens.networks` know the law of their weights; for any other Linear layer the
    mean squares of its weights and of its biases take its place. Members with a last layer that
    was drawn for each have no covariance with others. Any other network: the mean over outputs of
    :math:`f_{ak}(x) f_{bk}(x')`, noisy where outputs are few.

    Batch statistics and random layers need ``ensemble.eval()``. ``x`` and ``x2`` (None: the same)
    are tensors, or tuples of them for a reference of several arguments.

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
            check_inputs(samples, name)
    check_modes(ensemble)
    numbers: list[Tensor] = []
    rows = _passes(ensemble, as_inputs(x, "x"), numbers)
    columns = rows if x2 is None else _passes(ensemble, as_inputs(x2, "x2"), numbers)
    heads = [[head for _, head in side if head is not None] for side in (rows, columns)]
    if all(len(found) == ensemble.members for found in heads):
        return _from_heads(ensemble, *heads)
    left, right = (torch.stack([o for o, _ in side]).flatten(2) for side in (rows, columns))
    return torch.einsum("aik,bjk->abij", left, right) / left.shape[2]


class _Head(NamedTuple):
    """The last layer in one member's pass."""

    layer: nn.Module
    features: Tensor  # its inputs, times the standard deviation of its weights
    bias_std: float
    pre: Tensor | None


def _passes(
    ensemble: EmbeddedEnsemble, inputs: Inputs, numbers: list[Tensor]
) -> list[tuple[Tensor, _Head | None]]:
    """Return the output of each member, and the Linear layer that it comes from, if it does."""
    found, calls = [], []

    def keep(layer: nn.Module, now: nn.Module, args: tuple, output: Any) -> None:
        # ``now`` is the layer itself, or its copy with a member's weights.
        stds = _stds(now) if isinstance(now, nn.Linear) else (0.0, 0.0)
        calls[:] = [*calls[-1:], (layer, args[0] if args else output, output, stds)]

    with torch.no_grad(), ExitStack() as stack:
        modules = list(ensemble.network.modules())
        built = {id(m.inner()) for m in modules if isinstance(m, LowRank)}
        for module in (m for m in modules if id(m) not in built):
            linear = isinstance(module, nn.Linear) and type(module).forward in KNOWN
            if linear or isinstance(module, Modulated):
                stack.callback(module.register_forward_hook(partial(keep, module)).remove)
        run = stack.enter_context(ensemble.run(inputs, chunk=1))
        numbers[:] = numbers or run.numbers  # fresh ones are drawn once
        for a in range(ensemble.members):
            calls.clear()
            mine = [stacked[a] for stacked in numbers]
            output = run.member(a, numbers=mine)
            if not isinstance(output, Tensor):
                raise TypeError(
                    "a covariance needs a network whose output is one tensor; got "
                    f"{type(output).__name__}. Wrap the reference in a module that returns it."
                )
            found.append((output, _head(calls, output, mine)))
    return found


def _head(calls: list[tuple], output: Tensor, numbers: list[Tensor]) -> _Head | None:
    """Return the last layer, from the latest two calls."""
    pre = None
    if calls and isinstance(calls[-1][0], Modulated) and calls[-1][2] is output:
        site = calls.pop()[0].pre
        if isinstance(site, Modulation) and calls:
            pre, output = numbers[site.slot], calls[-1][2]
    if not calls or calls[-1][2] is not output or not isinstance(calls[-1][0], nn.Linear):
        return None
    layer, features, _, (weight_std, bias_std) = calls[-1]
    return _Head(layer, features * weight_std, bias_std, pre) if features.dim() == 2 else None


def _stds(layer: nn.Linear) -> tuple[float, float]:
    if not isinstance(layer, networks.Linear):
        tensors = (layer.weight, layer.bias)
        return tuple(0.0 if t is None else float(t.square().mean().sqrt()) for t in tensors)  # type: ignore[return-value]
    inputs, outputs = layer.in_features, layer.out_features
    fan = (inputs + outputs) / 2 if layer.parametrization == "xavier" else inputs
    return layer.weight_std / math.sqrt(fan), layer.bias_std


def _from_heads(ensemble: EmbeddedEnsemble, left: list[_Head], right: list[_Head]) -> Tensor:
    rows, columns = (torch.stack([head.features for head in heads]) for heads in (left, right))
    result = torch.einsum("aif,bjf->abij", rows, columns)
    biases = torch.tensor([head.bias_std for head in left]).to(result)
    result += torch.outer(biases, biases)[:, :, None, None]
    if left[0].pre is not None:
        pre = torch.stack([head.pre for head in left])  # type: ignore[arg-type]
        result *= (pre @ pre.mT / pre.shape[1])[:, :, None, None]
    drawn = [m for m in ensemble.individuals.values() if isinstance(m, Own) and m.drawn]
    if any(own.module is left[0].layer for own in drawn):
        result *= torch.eye(len(left)).to(result)[:, :, None, None]
    return result
