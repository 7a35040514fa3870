r"""The empirical covariance of outputs at initialisation, of one network.

A covariance is over draws of the weights, and one network is a single draw. But its last layer
averages over many units, so that drawing this layer alone, given everything before it, has the
covariance of drawing everything, up to fluctuations that vanish with the width.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embens import networks
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.layers import Modulated, Modulation
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

    with the layer's inputs :math:`h_a`, modulations included, and output modulations :math:`v`
    where there are any. Layers of :mod:`embens.networks` know the law of their weights; for any
    other Linear layer the mean squares of its weights and of its biases take its place. Members
    with a last layer of their own have no covariance with others.

    Any other network: the mean over outputs of :math:`f_{ak}(x) f_{bk}(x')`, noisy where outputs
    are few.

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
            check_inputs(samples, name, ensemble=ensemble)
    check_modes(ensemble)
    ending = _Ending(ensemble)
    rows = ending.run(as_inputs(x, "x"))
    columns = rows if x2 is None else ending.run(as_inputs(x2, "x2"))
    heads = [[head for _, head in side if head is not None] for side in (rows, columns)]
    if all(len(found) == ensemble.members for found in heads):
        return _from_heads(*heads)
    left, right = (torch.stack([o for o, _ in side]).flatten(2) for side in (rows, columns))
    return torch.einsum("aik,bjk->abij", left, right) / left.shape[2]


@dataclass(frozen=True)
class _Head:
    """The last layer in one member's pass."""

    features: Tensor  # its inputs, times the standard deviation of its weights
    bias_std: float
    pre: Tensor | None
    own: bool  # whether it is the member's own


class _Ending:
    """Runs an ensemble, and finds the Linear layer that it ends in by its latest calls."""

    def __init__(self, ensemble: EmbeddedEnsemble):
        self.ensemble = ensemble
        self.numbers: list[Tensor] = []
        self.own = {id(p) for p in ensemble.individual_parameters()}
        self.calls: list[tuple[nn.Module, Tensor, Tensor, tuple[float, float]]] = []

    def run(self, inputs: Inputs) -> list[tuple[Tensor, _Head | None]]:
        found = []
        with torch.no_grad(), ExitStack() as stack:
            for module in self.ensemble.network.modules():
                linear = isinstance(module, nn.Linear) and type(module).forward in KNOWN
                if linear or isinstance(module, Modulated):
                    hook = partial(self._keep, module)
                    stack.callback(module.register_forward_hook(hook).remove)
            run = stack.enter_context(self.ensemble.run(inputs, chunk=1))
            self.numbers = self.numbers or run.numbers  # fresh ones are drawn once
            for a in range(self.ensemble.members):
                output = run.member(a, numbers=[numbers[a] for numbers in self.numbers])
                if not isinstance(output, Tensor):
                    raise TypeError(
                        "a covariance needs a network whose output is one tensor; got "
                        f"{type(output).__name__}. Wrap the reference in a module that returns it."
                    )
                found.append((output, self._head(output, a)))
                self.calls.clear()
        return found

    def _keep(self, layer: nn.Module, now: nn.Module, args: tuple, output: Any) -> None:
        # ``now`` is the layer itself, or its copy with a member's weights.
        stds = _stds(now) if isinstance(now, nn.Linear) else (0.0, 0.0)
        self.calls = [*self.calls[-1:], (layer, args[0] if args else output, output, stds)]

    def _head(self, output: Tensor, a: int) -> _Head | None:
        """Return the layer whose output this is, if it is a Linear layer's."""
        calls, pre = list(self.calls), None
        if calls and isinstance(calls[-1][0], Modulated) and calls[-1][2] is output:
            site = calls.pop()[0].pre
            if isinstance(site, Modulation) and calls:
                pre, output = self.numbers[site.slot][a], calls[-1][2]
        if not calls or calls[-1][2] is not output or not isinstance(calls[-1][0], nn.Linear):
            return None
        layer, features, _, (weight_std, bias_std) = calls[-1]
        if features.dim() != 2:
            return None
        return _Head(features * weight_std, bias_std, pre, id(layer.weight) in self.own)


def _stds(layer: nn.Linear) -> tuple[float, float]:
    if not isinstance(layer, networks.Linear):
        tensors = (layer.weight, layer.bias)
        return tuple(0.0 if t is None else float(t.square().mean().sqrt()) for t in tensors)  # type: ignore[return-value]
    inputs, outputs = layer.in_features, layer.out_features
    fan = (inputs + outputs) / 2 if layer.parametrization == "xavier" else inputs
    return layer.weight_std / math.sqrt(fan), layer.bias_std


def _from_heads(left: list[_Head], right: list[_Head]) -> Tensor:
    rows, columns = (torch.stack([head.features for head in heads]) for heads in (left, right))
    result = torch.einsum("aif,bjf->abij", rows, columns)
    biases = torch.tensor([head.bias_std for head in left]).to(result)
    result += torch.outer(biases, biases)[:, :, None, None]
    if left[0].pre is not None:
        pre = torch.stack([head.pre for head in left])  # type: ignore[arg-type]
        result *= (pre @ pre.mT / pre.shape[1])[:, :, None, None]
    if left[0].own:
        result *= torch.eye(len(left)).to(result)[:, :, None, None]
    return result
