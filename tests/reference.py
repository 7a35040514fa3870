"""Members written by hand, which the tests compare ensembles with."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from embens import EmbeddedEnsemble


@dataclass
class Modulation:
    """Values of a site, ``(member, size)``, and the number of features per value."""

    values: Tensor
    repeat: int


def modulations(ensemble: EmbeddedEnsemble) -> dict[tuple[str, str], Modulation]:
    """Return every modulation by (layer, kind)."""
    by_site = {}
    for site in ensemble.spec.sites:
        values = ensemble.site_values(site)
        by_site[site.layer, site.kind] = Modulation(values, site.repeat)
    return by_site


def member_by_hand(reference: nn.Module, ensemble: EmbeddedEnsemble, a: int) -> nn.Module:
    """Return the reference with hooks that multiply inputs of layers by u and outputs by v.

    The weights of attention are scaled by rows and columns instead.
    """
    network = copy.deepcopy(reference)
    modules = dict(network.named_modules())
    for site in ensemble.spec.sites:
        values = ensemble.site_values(site).detach()[a].repeat_interleave(site.repeat)
        owner, _, projection = site.layer.rpartition(".")
        if isinstance(modules.get(owner), nn.MultiheadAttention):
            _scale_projection(modules[owner], projection, site.kind, values)
            continue
        layer = modules[site.layer]
        if isinstance(layer, _ConvNd):
            values = values.reshape(-1, *(1,) * len(layer.kernel_size))
        if site.kind == "post":
            layer.register_forward_pre_hook(
                lambda m, args, values=values: (args[0] * values, *args[1:])
            )
        else:
            layer.register_forward_hook(lambda m, args, output, values=values: output * values)
    return network


def _scale_projection(
    attention: nn.MultiheadAttention, projection: str, kind: str, values: Tensor
) -> None:
    with torch.no_grad():
        if projection == "out_proj":
            weight, bias = attention.out_proj.weight, attention.out_proj.bias
        else:
            index = ("q_proj", "k_proj", "v_proj").index(projection)
            rows = slice(index * attention.embed_dim, (index + 1) * attention.embed_dim)
            if attention.in_proj_weight is None:
                weight = getattr(attention, f"{projection}_weight")
            else:
                weight = attention.in_proj_weight[rows]
            bias = attention.in_proj_bias[rows]
        if kind == "post":
            weight.mul_(values)
        else:
            weight.mul_(values[:, None])
            bias.mul_(values)


def randomise_statistics(module: nn.Module, generator: torch.Generator) -> None:
    """Fill running statistics with random values."""
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        elif name.endswith("running_var"):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
