r"""Low-rank members: layers of which each member changes the weight by a product of two factors.

The change is :math:`W \circ (1 + B_a A_a)` or :math:`W + B_a A_a`, with :math:`B_a` of shape
``(row, rank)`` and :math:`A_a` of shape ``(rank, column)``.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embens.laws import Normal
from embens.sites import is_within
from embens.spec import LowRankSite

if TYPE_CHECKING:
    from embens.embed import Sites, Source


def choose_low_rank(
    source: "Source",
    sites: "Sites",
    template: LowRankSite,
    separate_layers: Collection[str] = (),
) -> tuple[LowRankSite, ...]:
    """Return low-rank sites for the selected layers.

    A layer whose weight has a smaller full rank than the template gets that rank.

    Args:
        source: The reference.
        sites: As for :func:`embens.embed`.
        template: Rank, kind and scale of all sites.
        separate_layers: Modules that every member has separately, which are left out.
    """
    selected_layers = {name for name, _ in source.select(sites)[0]}
    low_rank_sites = []
    for name in source.used:
        if name not in selected_layers or is_within(name, separate_layers):
            continue
        rows, columns = _matrix_shape(source, name)
        rank = min(template.rank, rows, columns)
        low_rank_sites.append(replace(template, layer=name, rank=rank))
    return tuple(low_rank_sites)


def _matrix_shape(source: "Source", name: str) -> tuple[int, int]:
    """Return rows and columns of a layer's weight; raise if it has none."""
    layer = source.layers[name]
    module = source.modules[layer.module]
    if not layer.mergeable or layer.outputs is None:
        raise ValueError(
            f"{name!r} ({type(module).__name__}) has no weight matrix that low-rank members could "
            "change (a hook or max_norm). Choose sites without it (in adapt: by='modulations' or "
            "'head')."
        )
    rows, columns = layer.matrix(module).shape
    return rows, columns


def sample_factors(
    site: LowRankSite, members: int, weight: Tensor, generator: torch.Generator | None
) -> dict[str, Tensor]:
    r"""Draw the factors :math:`B_a`, ``(member, row, rank)``, and :math:`A_a` of a site.

    The product has the standard deviation ``site.scale``, for the additive kind relative to the
    root mean square of the weight.

    Args:
        site: The site.
        members: Number of members.
        weight: Weight of the layer as a matrix, ``(row, column)``.
        generator: Random generator.

    Returns:
        The factors by name.
    """
    rows, columns = weight.shape
    right_std = 1.0
    product_std: Any = site.scale
    if site.kind == "additive":
        right_std = columns**-0.5
        product_std = site.scale * weight.detach().square().mean().sqrt()
    left_std = product_std / (right_std * site.rank**0.5)
    options = {"generator": generator, "dtype": weight.dtype, "device": weight.device}
    left = Normal().sample((members, rows, site.rank), **options) * left_std
    right = Normal().sample((members, site.rank, columns), **options) * right_std
    return {f"{site.layer}.left": left, f"{site.layer}.right": right}
