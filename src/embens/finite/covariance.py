r"""Empirical covariance of the outputs of one network at initialisation.

A covariance is an average over draws of the weights, and one network is a single draw. Its last
layer averages over many units, however. Drawing this layer again, given all layers before it, has
the covariance of drawing everything, up to fluctuations that vanish with the width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embens import networks
from embens.ensemble import EmbeddedEnsemble
from embens.finite.arguments import (
    Inputs,
    as_inputs,
    check_ensemble,
    check_modes,
    check_output,
)
from embens.finite.values import site_values, with_fixed_masks

if TYPE_CHECKING:
    from jaxtyping import Float

PLAIN_FORWARDS = (nn.Linear.forward, networks.Linear.forward)


@dataclass(frozen=True)
class LastLayer:
    """The Linear layer that a member's output comes from.

    Attributes:
        name: The name of the layer.
        layer: The plain member's layer.
        value: The layer's input, ``(batch, feature)``.
    """

    name: str
    layer: nn.Module
    value: Tensor


def nngp(ensemble: EmbeddedEnsemble, x: Tensor | Inputs) -> Float[Tensor, "m m n n"]:
    r"""Return the empirical covariance of outputs between members and samples.

    If the network ends in a Linear layer, this is the covariance over draws of that layer alone,
    averaged over the :math:`K` outputs:

    .. math::
        \hat\Sigma_{ab}(x, x') = \Big(\frac{\sigma_w^2}{N} \sum_i u_{ai} h_{ai}(x)\,
            u_{bi} h_{bi}(x') + \sigma_b^2\Big) \frac{1}{K} \sum_k v_{ak} v_{bk}

    with the inputs :math:`h_a` of the layer and its modulations :math:`u` and :math:`v`. Layers of
    :mod:`embens.networks` know the distribution of their weights; for other Linear layers the mean
    squares of weights and biases are used. The covariance of members with separately drawn last
    layers is 0. For any other network the result is the mean over outputs of
    :math:`f_{ak}(x) f_{bk}(x')`, which is noisy for few outputs.

    Args:
        ensemble: Any ensemble, used in its current mode. Batch statistics and random layers need
            ``ensemble.eval()``. Fresh masks are drawn once.
        x: Samples along the first axis, or a tuple of such tensors for several arguments.

    Returns:
        The covariance ``(member, member, batch, batch)``.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> network = networks.mlp(inputs=4, width=8, depth=2)
        >>> ensemble = batch_ensemble(network, members=3, p=1.0)  # all modulations are 1
        >>> covariance = nngp(ensemble, torch.ones(5, 4))
        >>> covariance.shape, bool((covariance[0, 0] == covariance[0, 1]).all())
        (torch.Size([3, 3, 5, 5]), True)
    """
    check_ensemble(ensemble)
    inputs = as_inputs(x)
    ensemble = with_fixed_masks(ensemble)
    outputs = []
    last_layers = []
    with torch.no_grad():
        for a in range(ensemble.members):
            network = ensemble.member(a)
            check_modes(network)
            output, last_layer = _run(network, inputs)
            outputs.append(output)
            if last_layer is not None:
                last_layers.append(last_layer)
        if len(last_layers) == ensemble.members:
            return _redrawing_covariance(ensemble, last_layers)
        values = torch.stack(outputs).flatten(2)
        return torch.einsum("aik,bjk->abij", values, values) / values.shape[2]


def _run(network: nn.Module, inputs: Inputs) -> tuple[Tensor, LastLayer | None]:
    """Return the output of a plain member, and the Linear layer it comes from if there is one."""
    latest: list[tuple[str, nn.Module, tuple, Any]] = []
    handles = []
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and type(module).forward in PLAIN_FORWARDS:

            def keep(layer: nn.Module, args: tuple, output: Any, name: str = name) -> None:
                latest[:] = [(name, layer, args, output)]

            handles.append(module.register_forward_hook(keep))
    try:
        output = check_output(network(*inputs), len(inputs[0]))
    finally:
        for handle in handles:
            handle.remove()
    if not latest:
        return output, None
    name, layer, args, layer_output = latest[0]
    if layer_output is not output or not args or args[0].dim() != 2:
        return output, None
    return output, LastLayer(name, layer, args[0])


def _redrawing_covariance(ensemble: EmbeddedEnsemble, members: list[LastLayer]) -> Tensor:
    """Return the covariance over draws of the last layer."""
    name = members[0].name
    sites = {site.kind: site for site in ensemble.spec.sites if site.layer == name}
    features = []
    bias_stds = []
    reference_layer = ensemble.reference.get_submodule(name)
    for a, member in enumerate(members):
        value = member.value
        layer = member.layer
        if sites:
            layer = reference_layer  # the member's weights contain the modulations
        if "post" in sites:
            u = site_values(ensemble, sites["post"])[a]
            value = value * u.repeat_interleave(sites["post"].repeat)
        weight_std, bias_std = _standard_deviations(layer)
        features.append(value * weight_std)
        bias_stds.append(bias_std)
    stacked = torch.stack(features)
    covariance = torch.einsum("aif,bjf->abij", stacked, stacked)
    biases = torch.tensor(bias_stds).to(covariance)
    covariance += torch.outer(biases, biases)[:, :, None, None]
    if "pre" in sites:
        v = site_values(ensemble, sites["pre"])
        covariance *= (v @ v.mT / v.shape[1])[:, :, None, None]
    if any(item.drawn and item.module == name for item in ensemble.spec.per_member):
        covariance *= torch.eye(len(members)).to(covariance)[:, :, None, None]
    return covariance


def _standard_deviations(layer: Any) -> tuple[float, float]:
    """Return the standard deviations of a Linear layer's effective weights and biases."""
    if not isinstance(layer, networks.Linear):
        bias_std = 0.0
        if layer.bias is not None:
            bias_std = float(layer.bias.square().mean().sqrt())
        return float(layer.weight.square().mean().sqrt()), bias_std
    fan = layer.in_features
    if layer.parametrization == "xavier":
        fan = (layer.in_features + layer.out_features) / 2
    return layer.weight_std / math.sqrt(fan), layer.bias_std
