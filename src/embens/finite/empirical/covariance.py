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
from embens.finite.checks import check_ensemble
from embens.finite.empirical.recording import Inputs, as_inputs, check_modes, check_output

if TYPE_CHECKING:
    from jaxtyping import Float

KNOWN = (nn.Linear.forward, networks.Linear.forward)


def nngp(ensemble: EmbeddedEnsemble, x: Tensor | Inputs) -> Float[Tensor, "m m n n"]:
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

    Batch statistics and random layers need ``ensemble.eval()``. ``x`` is a tensor, or a tuple of
    them for a reference of several arguments.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> network = networks.mlp(inputs=4, width=8, depth=2)
        >>> ensemble = batch_ensemble(network, members=3, p=1.0)  # all modulations are 1
        >>> covariance = nngp(ensemble, torch.ones(5, 4))
        >>> covariance.shape, bool((covariance[0, 0] == covariance[0, 1]).all())
        (torch.Size([3, 3, 5, 5]), True)
    """
    check_ensemble(ensemble)
    check_modes(ensemble)
    outputs, heads = _passes(ensemble, as_inputs(x))
    known = [head for head in heads if head is not None]
    if len(known) == ensemble.members:
        return _from_heads(ensemble, known)
    flat = torch.stack(outputs).flatten(2)
    return torch.einsum("aik,bjk->abij", flat, flat) / flat.shape[2]


class _Head(NamedTuple):
    """The last layer in one member's pass."""

    layer: nn.Module
    features: Tensor  # its inputs, times the standard deviation of its weights
    bias_std: float
    pre: Tensor | None


def _passes(ensemble: EmbeddedEnsemble, inputs: Inputs) -> tuple[list[Tensor], list[_Head | None]]:
    """Return the output of each member, and the Linear layer that it comes from, if it does."""
    outputs, heads, calls = [], [], []

    def keep(layer: nn.Module, now: nn.Module, args: tuple, output: Any) -> None:
        # ``now`` is the layer itself, or its copy with a member's weights.
        stds = (0.0, 0.0) if isinstance(now, Modulated) else _stds(now)
        calls[:] = [*calls[-1:], (layer, args[0] if args else output, output, stds)]

    with torch.no_grad(), ExitStack() as stack:
        modules = list(ensemble.network.modules())
        built = {id(m.inner()) for m in modules if isinstance(m, LowRank)}
        for module in (m for m in modules if id(m) not in built):
            linear = isinstance(module, nn.Linear) and type(module).forward in KNOWN
            if linear or isinstance(module, Modulated):
                stack.callback(module.register_forward_hook(partial(keep, module)).remove)
        run = stack.enter_context(ensemble.run(inputs, chunk=1))
        for a in range(ensemble.members):
            calls.clear()
            numbers = [stacked[a] for stacked in run.numbers]
            output = check_output(run.member(a, numbers=numbers), len(inputs[0]))
            outputs.append(output)
            heads.append(_head(calls, output, numbers))
    return outputs, heads


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


def _stds(layer: Any) -> tuple[float, float]:
    if not isinstance(layer, networks.Linear):
        tensors = (layer.weight, layer.bias)
        return tuple(0.0 if t is None else float(t.square().mean().sqrt()) for t in tensors)  # type: ignore[return-value]
    inputs, outputs = layer.in_features, layer.out_features
    fan = (inputs + outputs) / 2 if layer.parametrization == "xavier" else inputs
    return layer.weight_std / math.sqrt(fan), layer.bias_std


def _from_heads(ensemble: EmbeddedEnsemble, heads: list[_Head]) -> Tensor:
    features = torch.stack([head.features for head in heads])
    result = torch.einsum("aif,bjf->abij", features, features)
    biases = torch.tensor([head.bias_std for head in heads]).to(result)
    result += torch.outer(biases, biases)[:, :, None, None]
    if heads[0].pre is not None:
        pre = torch.stack([head.pre for head in heads])  # type: ignore[arg-type]
        result *= (pre @ pre.mT / pre.shape[1])[:, :, None, None]
    drawn = [m for m in ensemble.individuals.values() if isinstance(m, Own) and m.drawn]
    if any(own.module is heads[0].layer for own in drawn):
        result *= torch.eye(len(heads)).to(result)[:, :, None, None]
    return result
