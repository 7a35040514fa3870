"""Norm layers of which every member has separate statistics."""

from collections.abc import Collection, Set
from typing import TYPE_CHECKING

from embens.sites import NORMS, is_within, tensor_names
from embens.spec import PerMember

if TYPE_CHECKING:
    from embens.embed import Source


def separate_norms(
    source: "Source", differing: Set[str], separate_layers: Collection[str], has_affine: bool
) -> tuple[PerMember, ...]:
    """Return the per-member tensors of norm layers.

    Members share the statistics of a norm layer if all of them have the same input to it: no
    random operation and no layer with different weights comes before.

    Args:
        source: The reference.
        differing: Layers with different weights in different members.
        separate_layers: Modules of which every member has a separate copy, which are left out.
        has_affine: Whether members have separate scales and shifts. If so, the statistics of all
            these layers are separate too.
    """
    flow = source.flow
    items = []
    for name, module in source.modules.items():
        if not isinstance(module, NORMS) or is_within(name, separate_layers):
            continue
        tensors = list(tensor_names(module)) if has_affine else []
        has_same_input = (
            name in flow.norms and name not in flow.random and not flow.norms[name] & differing
        )
        if not has_same_input:
            tensors += [key for key, buffer in module._buffers.items() if buffer is not None]
        if tensors:
            items.append(PerMember(name, tuple(dict.fromkeys(tensors))))
    return tuple(items)
