"""Which layers are modulated, by which law: from a user's words to a :class:`Plan`.

A *site* is the output (``pre``) or the input (``post``) of a parameter layer and is named by the
layer. A plan is all that ``embed`` decides before it changes anything, and all that a saved
ensemble needs besides its tensors.
"""

from __future__ import annotations

import difflib
import fnmatch
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from embens import dataflow
from embens.dataflow import PROJECTIONS, Flow, parameter_layers
from embens.laws import Law
from embens.modulation import channels

Kind = Literal["pre", "post"]
Laws = Law | Mapping[str, Law | None] | None
Sites = str | Iterable[str] | Callable[[str, nn.Module], bool]
Trainable = bool | Mapping[str, "bool | Mapping[str, bool]"]
UNFOLDABLE = frozenset(
    "scaled_dot_product_attention multi_head_attention_forward nonzero unique item tolist numpy "
    "__bool__ __int__ __float__ __index__".split()
)
"""Functions that ``torch.func.vmap`` can't take, or has no fast rule for."""
SELECTIONS = ("hidden", "last", "all")


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
        shared: modules computed once for all members: name to (random, keep), see ``Shared``.
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
    not_collapsible: str = ""
    foldable: bool = True
    recompute: bool = False
    widths: tuple[int, int] = (0, 0)
    input_channels: int = 1


def check_members(members: Any) -> int:
    """Return ``members`` if it is a whole number of at least one."""
    if isinstance(members, bool) or not isinstance(members, int):
        raise TypeError(f"members must be a whole number; got {members!r}")
    if members < 1:
        raise ValueError(f"members must be at least 1; got {members}")
    return members


def check_reference(reference: Any) -> dict[str, nn.Module]:
    """Return the parameter layers of a reference, or say why it can't be embedded."""
    if not isinstance(reference, nn.Module):
        raise TypeError(
            f"the reference must be a torch.nn.Module; got {type(reference).__name__}"
            + (". Pass an instance, not the class." if isinstance(reference, type) else "")
        )
    kind = type(reference).__name__
    if kind in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
        raise TypeError(f"embed the module inside {kind} (its .module), then wrap the ensemble")
    if kind == "OptimizedModule":
        raise TypeError("embed the module before torch.compile, then compile the ensemble")
    if any(type(m).__name__.endswith("ScriptModule") for m in reference.modules()):
        raise TypeError("a TorchScript module can't be embedded; pass the nn.Module it came from")
    if any(hasattr(m, "shared_parameters") for m in reference.modules()):
        raise TypeError("the reference is, or contains, an ensemble; pass a plain network")
    lazy = [n for n, p in reference.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise ValueError(
            f"the reference has parameters without a shape yet ({lazy[0]!r}); call it once on a "
            "batch before embed"
        )
    layers = parameter_layers(reference)
    if not layers:
        raise ValueError(
            "the reference has no parameter layer (Linear, Conv*, ConvTranspose*, Embedding or "
            "attention), so there is nothing to modulate"
        )
    return layers


def closest(name: str, candidates: Iterable[str]) -> str:
    """Return "; did you mean …?" and the candidates, for an error message."""
    candidates = list(candidates)
    near = difflib.get_close_matches(str(name), candidates, n=1, cutoff=0.5)
    shown = ", ".join(map(repr, candidates[:20])) + (", …" if len(candidates) > 20 else "")
    return (f"; did you mean {near[0]!r}?" if near else ".") + f" Candidates: {shown}"


def _match(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a name or wildcard stands for; a module's name is not enough."""
    names = list(names)
    return [pattern] if pattern in names else fnmatch.filter(names, pattern)


def _select(
    sites: Sites, layers: dict[str, nn.Module], flow: Flow
) -> tuple[set[tuple[str, Kind]], set[tuple[str, Kind]]]:
    """Return the selected sites, and the hidden ones."""
    called = [n for n in layers if n in flow.upstream]
    first, last = flow.first, flow.last
    hidden: set[tuple[str, Kind]] = {(n, "pre") for n in called if n not in last}
    hidden |= {(n, "post") for n in called if n not in first}
    every: set[tuple[str, Kind]] = {(n, k) for n in called for k in ("pre", "post")}
    if isinstance(sites, str) and sites in SELECTIONS:
        if sites == "hidden":
            return hidden, hidden
        final = {s for s in hidden if s[0] in last and s[1] == "post"}
        return (every if sites == "all" else final), hidden
    if callable(sites):
        chosen = {n for n in called if sites(n, _module_of(n, layers))}
        if not chosen:
            raise ValueError(
                "the predicate for sites is true of no parameter layer" + closest("", called)
            )
    else:
        patterns = [sites] if isinstance(sites, str) else list(sites)
        chosen = set()
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise TypeError(
                    "sites must be 'hidden', 'last', 'all', names or wildcards of layers, or a "
                    f"function of (name, module); got {pattern!r}"
                )
            found = _match(pattern, called)
            if not found:
                unused = _match(pattern, layers)
                why = "names a layer that is never called" if unused else "matches no layer"
                options = called + (list(SELECTIONS) if isinstance(sites, str) else [])
                raise ValueError(f"sites: {pattern!r} {why}{closest(pattern, options)}")
            chosen.update(found)
        if not chosen:
            raise ValueError("sites is empty: name at least one layer" + closest("", called))
    return {s for s in every if s[0] in chosen}, hidden


def _module_of(name: str, layers: dict[str, nn.Module]) -> nn.Module:
    module = layers[name]
    if isinstance(module, nn.MultiheadAttention) and name.endswith("out_proj"):
        return module.out_proj
    return module


def _per_site(given: Any, kind: Kind, names: list[str], what: str, valid: Callable) -> dict:
    """Spread one value, or a mapping from names and wildcards to values, over sites."""
    if not isinstance(given, Mapping):
        if not valid(given):
            hint = " (a law: for example laws.Normal())" if what == kind else ""
            raise TypeError(
                f"{what} must be {valid.__doc__}, or a mapping to it{hint}; got {given!r}"
            )
        return dict.fromkeys(names, given)
    spread = {}
    for pattern, value in given.items():
        if not valid(value):
            raise TypeError(f"{what}[{pattern!r}] must be {valid.__doc__}; got {value!r}")
        found = _match(pattern, names) if isinstance(pattern, str) else []
        if not found:
            raise ValueError(
                f"{what}: {pattern!r} matches none of the selected {kind} sites"
                f"{closest(pattern, names)}. (Inputs of first layers and outputs of last ones "
                "are only among sites='all'.)"
            )
        for name in found:
            if name == pattern or name not in spread:
                spread[name] = value
    return spread


def _is_law(value: Any) -> bool:
    """a law or None"""  # noqa: D403, D415 - part of a message
    return value is None or isinstance(value, Law)


def _is_bool(value: Any) -> bool:
    """True or False"""  # noqa: D415 - part of a message
    return isinstance(value, bool)


def choose_sites(
    layers: dict[str, nn.Module],
    flow: Flow,
    pre: Laws,
    post: Laws,
    sites: Sites,
    trainable: Trainable,
    fresh: bool,
) -> tuple[Site, ...]:
    """Return the sites with their laws, in the order of the layers."""
    selected, hidden = _select(sites, layers, flow)
    if isinstance(trainable, Mapping):
        unknown = set(trainable) - {"pre", "post"}
        if unknown:
            key = sorted(map(str, unknown))[0]
            raise ValueError(f"trainable: unknown key {key!r}{closest(key, ('pre', 'post'))}")
        trains = {"pre": trainable.get("pre", True), "post": trainable.get("post", True)}
    else:
        trains = {"pre": trainable, "post": trainable}
    result = []
    kinds: tuple[tuple[Kind, Laws], ...] = (("pre", pre), ("post", post))
    for kind, law in kinds:
        possible = [
            n
            for n in layers
            if (n, kind) in selected and (kind == "pre" or _sizes(n, layers)[0] is not None)
        ]
        laws = _per_site(law, kind, possible, kind, _is_law)
        named = [n for n in possible if laws.get(n) is not None]
        spread: dict[str, bool] = {}
        if isinstance(trains[kind], Mapping) or named:
            spread = _per_site(trains[kind], kind, named, f"trainable[{kind!r}]", _is_bool)
        for name in named:
            takes, gives = _sizes(name, layers)
            size, repeat = gives, 1
            if kind == "post":
                repeat = flow.repeat.get(name, 1)
                size = takes // repeat  # type: ignore[operator]
            site_hidden = (name, kind) in hidden
            trains_here = spread.get(name, True) and not fresh
            result.append(
                Site(name, kind, laws[name], size, repeat, trains_here, fresh, site_hidden)
            )
    if not result:
        raise ValueError(
            "no site is modulated: "
            + (
                "pre and post are both None"
                if pre is None and post is None
                else f"sites={sites!r} leaves none for the given laws. The layers are "
                + ", ".join(map(repr, layers))
                + "; a network of one layer has no hidden site"
            )
        )
    bypassed = sorted({s.layer for s in result} & flow.bypassed)
    if bypassed:
        raise ValueError(
            f"the reference reads the weight of {bypassed[0]!r} without calling the layer (tied "
            "weights?), which would leave its modulations out. Choose sites without it"
            f"{closest('', [n for n in layers if n not in flow.bypassed])}"
        )
    order = {name: i for i, name in enumerate(layers)}
    return tuple(sorted(result, key=lambda s: (order[s.layer], s.kind)))


def _sizes(name: str, layers: dict[str, nn.Module]) -> tuple[int | None, int]:
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
        for call in flow.calls:
            inside = [n for n in carriers | set(own) if inside_any(n, [call.name])]
            differs = [n for n in inside if not (n == call.name and n not in within and n in pre)]
            if not call.name or call.upstream & apart or differs:
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
        width = max(s or 1 for s in _sizes(name, layers))
        if name in flow.repeat:
            rows = max(rows, width)
        else:
            positions = max(positions, width)
    takes = [_sizes(n, layers)[0] or 1 for n in flow.first]
    return (rows, positions), min(takes, default=1)


def check_plan(plan: Plan, reference: nn.Module) -> None:
    """Check a plan from outside against a reference, before anything is built from it."""
    check_members(plan.members)
    layers = parameter_layers(reference)
    modules = dict(reference.named_modules())

    def known(name: str, names: Iterable[str]) -> None:
        if name not in names:
            raise ValueError(
                f"the reference has no module {name!r}, which the plan names"
                f"{closest(name, [n for n in names if n])}"
            )

    for site in plan.sites:
        known(site.layer, layers)
        takes, gives = _sizes(site.layer, layers)
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


def warn_guesses(flow: Flow) -> None:
    """Say what had to be guessed about the data flow."""
    if flow.guesses:
        warnings.warn(
            "the data flow of the reference could not be read in full; guessed: "
            + "; ".join(dict.fromkeys(flow.guesses))
            + ". To be sure, pass example_input=x (a batch, or a tuple of arguments).",
            stacklevel=4,
        )
