"""The plan of an ensemble: everything that makes it out of a reference network.

A plan is all that ``embed`` decides before it changes anything, and all that a saved ensemble needs
besides its tensors. Here: what it holds, what members share, and its check against a reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from embens import reading as dataflow
from embens.checks import check_members, closest
from embens.ensemble.layers import channels
from embens.laws import Law
from embens.reading import PROJECTIONS, Flow, parameter_layers

Kind = Literal["pre", "post"]
UNFOLDABLE = frozenset(
    "scaled_dot_product_attention multi_head_attention_forward nonzero unique item tolist numpy "
    "__bool__ __int__ __float__ __index__".split()
)
"""Functions that ``torch.func.vmap`` can't take, or has no fast rule for."""


@dataclass(frozen=True)
class Site:
    """One site: where, and what multiplies there.

    ``hidden`` says whether it is one of the paper's hidden sites.
    """

    layer: str
    kind: Kind
    law: Law
    size: int
    repeat: int = 1
    trainable: bool = True
    fresh: bool = False
    hidden: bool = True


@dataclass(frozen=True)
class Plan:
    """Everything that makes an ensemble out of a reference network.

    Attributes:
        family: the function that made it.
        members: how many.
        sites: where they differ.
        own: modules with some tensors of their own for each member: name to tensor names.
        shared: modules computed once for all members: name to (random, keep), see ``Once``.
        copies: whether code may change what members share in place, so that each gets a copy.
        overwriting: ReLU modules that may work in place, because nothing else uses what a
            modulation just made for them.
        not_collapsible: why the ensemble mean is not one plain network; empty where it is.
        foldable: whether several members may run at once; only code that was read in full.
        recompute: whether the reference recomputes activations in the backward pass.
        widths: the widest modulated input or output that has one row for each sample, and the
            widest that has one for each position (pixel, time) of the input.
        input_channels: numbers at one position of the input.
    """

    family: str
    members: int
    sites: tuple[Site, ...] = ()
    own: tuple[tuple[str, tuple[str, ...]], ...] = ()
    shared: tuple[tuple[str, bool, bool], ...] = ()
    copies: bool = False
    overwriting: tuple[str, ...] = ()
    not_collapsible: str = ""
    foldable: bool = True
    recompute: bool = False
    widths: tuple[int, int] = (0, 0)
    input_channels: int = 1

    @property
    def separate(self) -> bool:
        """Whether members share nothing: they are networks of their own."""
        return self.family == "independent"


def layer_sizes(name: str, layers: dict[str, nn.Module]) -> tuple[int | None, int]:
    """Return the channels that a layer, or a projection of attention, takes and gives."""
    return channels(layers[name], name.rpartition(".")[2])


def site_module(name: str, layers: dict[str, nn.Module]) -> str:
    """Return the name of the module that carries a site: an attention for its projections."""
    owner, _, projection = name.rpartition(".")
    if isinstance(layers[name], nn.MultiheadAttention) and projection in PROJECTIONS:
        return owner
    return name


def plan_sharing(
    reference: nn.Module,
    layers: dict[str, nn.Module],
    flow: Flow,
    sites: tuple[Site, ...],
    statistics: str,
    affine: str,
) -> tuple[tuple, tuple]:
    """Return what members own besides modulations, and what is computed once for all of them."""
    modules = dict(reference.named_modules())
    post = {site_module(s.layer, layers) for s in sites if s.kind == "post"}
    pre = {site_module(s.layer, layers) for s in sites if s.kind == "pre"}
    attentions = {n for n, m in modules.items() if isinstance(m, nn.MultiheadAttention)}
    within = post | (pre & attentions)  # what differs inside the module itself
    carriers = post | pre
    tokens = {s.layer for s in sites}

    def inside_any(name: str, outer: Iterable[str]) -> bool:
        return any(name == o or name.startswith(o + ".") for o in outer)

    def shareable(own: Iterable[str]) -> dict[str, bool]:
        """Modules that are the same for all members: name to whether randomness reaches them."""
        apart = tokens | set(own)
        found: dict[str, bool] = {}
        spoiled: set[str] = set()
        for index, call in enumerate(flow.calls):
            inside = [n for n in carriers | set(own) if inside_any(n, [call.name])]
            differs = [n for n in inside if not (n == call.name and n not in within and n in pre)]
            unsafe = not call.visible or call.aliases or _overwrites_others(index, flow, modules)
            if not call.name or call.upstream & apart or differs or unsafe:
                spoiled.add(call.name)
            random = any(t.startswith("random") for t in call.upstream | call.result)
            found[call.name] = found.get(call.name, False) or random
        return {n: r for n, r in found.items() if n not in spoiled}

    own: dict[str, tuple[str, ...]] = {}
    plain = [n for n, random in shareable(()).items() if not random and n not in carriers]
    for name, module in modules.items():
        if not isinstance(module, dataflow.NORMS):
            continue
        names = ["weight", "bias"] if affine == "member" else []
        if statistics == "member" and not inside_any(name, plain):
            names += ["running_mean", "running_var", "num_batches_tracked"]
        present = tuple(n for n in names if getattr(module, n, None) is not None)
        if present:
            own[name] = present
    shared = shareable(own)
    maximal = {n: r for n, r in shared.items() if not inside_any(n.rpartition(".")[0], shared)}
    keep = {n: n in carriers for n in maximal}
    for call in flow.calls:
        if call.name in maximal:
            for chain in call.consumers:
                users = [flow.calls[i].name for i in chain]
                if not any(maximal.get(u) == maximal[call.name] for u in users):
                    keep[call.name] = True
    return tuple(own.items()), tuple((n, r, keep[n]) for n, r in maximal.items())


def _overwrites_others(index: int, flow: Flow, modules: dict[str, nn.Module]) -> bool:
    """Return whether a call works in place on what anyone else uses as well."""
    call = flow.calls[index]
    if not any(getattr(m, "inplace", False) for m in modules[call.name].modules()):
        return False
    return any(
        index not in chain for parent in call.parents for chain in flow.calls[parent].consumers
    )


def plan_overwriting(
    flow: Flow, sites: tuple[Site, ...], modules: dict[str, nn.Module]
) -> tuple[str, ...]:
    """Return the ReLU modules that only ever get the output of a ``pre`` modulation."""
    modulated = {s.layer for s in sites if s.kind == "pre"}
    allowed: dict[str, bool] = {}
    for index, call in enumerate(flow.calls):
        if type(modules.get(call.name)) is nn.ReLU:
            fresh = bool(call.parents) and all(
                flow.calls[parent].name in modulated
                and all(index in chain for chain in flow.calls[parent].consumers)
                for parent in call.parents
            )
            allowed[call.name] = allowed.get(call.name, True) and fresh
    relus = {name for name, fresh in allowed.items() if fresh}
    return tuple(n for n in modules if n in relus and not modules[n].inplace)


def may_overwrite(flow: Flow, modules: dict[str, nn.Module]) -> bool:
    """Return whether any code may change a value in place."""
    inplace = any(getattr(m, "inplace", False) for m in modules.values())
    named = any(dataflow.is_in_place(operation) for operation in flow.operations)
    return inplace or named or bool(flow.opaque)


def is_foldable(flow: Flow, shared: tuple[tuple[str, bool, bool], ...]) -> bool:
    """Return whether all code that runs for each member is known to run for several at once."""
    once = [name for name, random, _ in shared if not random]
    hidden = [o for o in flow.opaque if not any(o == n or o.startswith(n + ".") for n in once)]
    return bool(flow.calls) and not hidden and not flow.operations & UNFOLDABLE


def measure_widths(
    layers: dict[str, nn.Module], flow: Flow, names: Iterable[str]
) -> tuple[tuple[int, int], int]:
    """Return ``Plan.widths`` and ``Plan.input_channels`` where these layers differ by member."""
    rows = positions = 1
    for name in names:
        width = max(s or 1 for s in layer_sizes(name, layers))
        if name in flow.repeat:
            rows = max(rows, width)
        else:
            positions = max(positions, width)
    takes = [layer_sizes(n, layers)[0] or 1 for n in flow.first]
    return (rows, positions), min(takes, default=1)


def check_plan(plan: Plan, reference: nn.Module) -> None:
    """Check a plan from outside against a reference, before anything is built from it."""
    check_members(plan.members)
    layers = parameter_layers(reference)
    modules = dict(reference.named_modules())

    def known(name: str, names: Iterable[str]) -> None:
        if name not in names:
            raise ValueError(
                f"the reference has no module {name!r}, which the saved ensemble has; pass a "
                f"reference of the architecture that was saved"
                f"{closest(name, [n for n in names if n])}"
            )

    for site in plan.sites:
        known(site.layer, layers)
        takes, gives = layer_sizes(site.layer, layers)
        expected = {"pre": gives, "post": takes}.get(site.kind)
        if not isinstance(site.law, Law) or site.size * site.repeat != expected:
            raise ValueError(
                f"the header's {site.kind!r} site of {site.layer!r} has {site.size} × "
                f"{site.repeat} numbers; the reference's layer needs {expected}, which is another "
                "shape"
            )
    for name, tensors in plan.own:
        known(name, modules)
        module = modules[name]
        present = {n for n, _ in (*module.named_parameters(), *module.named_buffers())}
        for tensor in tensors:
            if tensor not in present:
                raise ValueError(f"{name!r} in the reference has no tensor {tensor!r}")
    for name, *_ in plan.shared:
        known(name, modules)
    for name in plan.overwriting:
        known(name, modules)


def why_not_collapsible(flow: Flow, sites: tuple[Site, ...], own: tuple) -> str:
    """Return why the mean of the members' outputs is not one network's; empty where it is."""
    if any(s.fresh for s in sites):
        return "its masks are drawn anew at each pass"
    if own:
        return f"members have tensors of their own in {own[0][0]!r}"
    layers = {s.layer for s in sites}
    for layer in layers:
        chained = flow.upstream.get(layer, set()) & layers
        if chained:
            return f"the modulations of {sorted(chained)[0]!r} and {layer!r} multiply each other"
    if not flow.outputs:
        return "the data flow after the modulated layers could not be read; pass example_input"
    for trail in flow.outputs:
        bent = (trail.upstream & layers) - trail.affine
        if bent:
            return f"the output is not linear in the output of {sorted(bent)[0]!r}"
    return ""
