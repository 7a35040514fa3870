"""Slow reference implementations for tests."""

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
    """Return the reference with hooks that multiply layers' inputs by u and outputs by v.

    Attention gets its weights scaled row by row and column by column instead.
    """
    network = copy.deepcopy(reference)
    modules = dict(network.named_modules())
    for (name, kind), modulation in modulations(ensemble).items():
        values = modulation.values.detach()[a].to(next(reference.parameters()).dtype)
        if name in modules and not name.endswith(".out_proj"):
            layer = modules[name]
            features = values.repeat_interleave(modulation.repeat)
            shape = (-1, *(1,) * (len(layer.kernel_size) if isinstance(layer, _ConvNd) else 0))
            factor = features.reshape(shape)
            if kind == "post":
                layer.register_forward_pre_hook(lambda m, args, f=factor: (args[0] * f,))
            else:
                layer.register_forward_hook(lambda m, args, out, f=factor: out * f)
        else:
            owner, _, projection = name.rpartition(".")
            _scale_projection(modules[owner], projection, kind, values)
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
    """Give every running statistic (stacked or not) some value of its own."""
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        elif name.endswith("running_var"):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
