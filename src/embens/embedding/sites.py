"""Which sites a user means, and by which law each is modulated.

A *site* is the output (``pre``) or the input (``post``) of a parameter layer and is named by the
layer.
"""

import fnmatch
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from embens.checks import check_choice, closest
from embens.ensemble.layers import is_linear_in_parameters
from embens.ensemble.plan import LowRankSite, Side, Site
from embens.laws import Law
from embens.reading.attention import Attention
from embens.reading.flow import Flow, opened
from embens.reading.layers import NORMS, channels, parameter_layers

Laws = Law | Mapping[str, Law | None] | None
Sites = str | Iterable[str] | Callable[[str, nn.Module], bool]
SIDES: tuple[Side, Side] = ("pre", "post")
Trainable = bool | Mapping[str, "bool | Mapping[str, bool]"]


def check_reference(reference: Any) -> tuple[nn.Module, dict[str, nn.Module]]:
    """Return a reference with attentions opened and its layers, or why it can't be embedded."""
    if not isinstance(reference, nn.Module):
        raise TypeError(
            f"the reference must be a torch.nn.Module; got {type(reference).__name__}"
            + (". Pass an instance, not the class." if isinstance(reference, type) else "")
        )
    ends = ("DataParallel", "OptimizedModule", "ScriptModule")
    for kind in (k for m in reference.modules() if (k := type(m).__name__).endswith(ends)):
        raise TypeError(f"embed the module inside the {kind}, then wrap or compile the ensemble")
    if any(hasattr(m, "shared_parameters") for m in reference.modules()):
        raise TypeError("the reference is, or contains, an ensemble; pass a plain network")
    lazy = [n for n, p in reference.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise ValueError(
            f"the reference has parameters without a shape yet ({lazy[0]!r}); call it once on a "
            "batch before embed"
        )
    reference = opened(reference)
    layers = parameter_layers(reference)
    if not layers:
        raise ValueError(
            "the reference has no parameter layer (Linear, Conv*, ConvTranspose*, Embedding or "
            "attention), so there is nothing to modulate"
        )
    return reference, layers


def is_within(name: str, outer: Iterable[str]) -> bool:
    """Return whether a module is one of these, or lies inside one."""
    return any(name == o or not o or name.startswith(o + ".") for o in outer)


def _match(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a name or wildcard stands for."""
    return [pattern] if pattern in (names := list(names)) else fnmatch.filter(names, pattern)


def _select(
    sites: Sites, layers: dict[str, nn.Module], flow: Flow
) -> tuple[set[tuple[str, Side]], set[tuple[str, Side]]]:
    """Return the selected sites, and the hidden ones."""
    called = [n for n in layers if n in flow.upstream]
    first, last = flow.first, flow.last
    hidden: set[tuple[str, Side]] = {(n, "pre") for n in called if n not in last}
    hidden |= {(n, "post") for n in called if n not in first}
    every: set[tuple[str, Side]] = {(n, k) for n in called for k in SIDES}
    final = {(n, k) for n, k in hidden if n in last and k == "post"}
    selections = {"hidden": hidden, "last": final, "all": every}
    if isinstance(sites, str) and sites in selections:
        return selections[sites], hidden
    if callable(sites):
        chosen = {n for n in called if sites(n, layers[n])}
        empty = "the predicate for sites is true of no parameter layer"
    else:
        chosen, empty = set(), "sites is empty: name at least one layer"
        for pattern in _listed(sites):
            if not isinstance(pattern, str):
                raise TypeError(
                    "sites must be 'hidden', 'last', 'all', names or wildcards of layers, or a "
                    f"function of (name, module); got {pattern!r}"
                )
            found = _match(pattern, called)
            if not found:
                unused = _match(pattern, layers)
                why = "names a layer that is never called" if unused else "matches no layer"
                options = [*called, *selections] if isinstance(sites, str) else called
                raise ValueError(f"sites: {pattern!r} {why}{closest(pattern, options)}")
            chosen.update(found)
    if not chosen:
        raise ValueError(empty + closest("", called))
    return {s for s in every if s[0] in chosen}, hidden


def _listed(given: Any) -> list[Any]:
    """Return one thing, or several, as a list."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def _per_site(given: Any, kind: Side, names: list[str], what: str, expected: str) -> dict:
    """Spread one value, or a mapping from names and wildcards to values, over sites."""
    types = (bool,) if expected == "True or False" else (Law, type(None))
    if not isinstance(given, Mapping):
        if not isinstance(given, types):
            hint = " (a law: for example laws.Normal())" if what == kind else ""
            raise TypeError(f"{what} must be {expected}, or a mapping to it{hint}; got {given!r}")
        return dict.fromkeys(names, given)
    spread = {}
    for pattern, value in given.items():
        if not isinstance(value, types):
            raise TypeError(f"{what}[{pattern!r}] must be {expected}; got {value!r}")
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


def choose_sites(
    layers: dict[str, nn.Module],
    flow: Flow,
    pre: Laws,
    post: Laws,
    sites: Sites,
    trainable: Trainable,
    fresh: bool,
    own: Collection[str] = (),
) -> tuple[Site, ...]:
    """Return the sites with their laws, in the order of the layers.

    Layers inside the modules of members' own have none; to ask for one there is an error.
    """
    selected, hidden = _select(sites, layers, flow)
    mine = {n for n in layers if is_within(n, own)}
    selected = {site for site in selected if site[0] not in mine}
    named = [name for given in (pre, post) if isinstance(given, Mapping) for name in given]
    for name in (*_listed(sites), *named):
        if name in mine:
            raise ValueError(
                f"{name!r} is a layer of each member's own, which needs no modulation: take it out "
                "of sites, pre and post, or out of own"
            )
    trains = trainable if isinstance(trainable, Mapping) else dict.fromkeys(SIDES, trainable)
    for key in trains:
        check_choice("trainable", key, SIDES)
    result = []
    for kind, law in zip(SIDES, (pre, post), strict=True):
        every = {n: channels(layers[n])[kind == "pre"] for n in layers if (n, kind) in selected}
        sizes = {n: size for n, size in every.items() if size is not None}  # else none
        possible = list(sizes)
        laws = _per_site(law, kind, possible, kind, "a law or None")
        named = [n for n in possible if laws.get(n) is not None]
        what = f"trainable[{kind!r}]"
        spread = _per_site(trains.get(kind, True), kind, named, what, "True or False")
        for name in named:
            repeat = flow.repeat.get(name, 1) if kind == "post" else 1
            trained, inner = spread.get(name, True) and not fresh, (name, kind) in hidden
            size = sizes[name] // repeat
            result.append(Site(name, kind, laws[name], size, repeat, trained, fresh, inner))
    if not result and not own:
        why = "pre and post are both None"
        if pre is not None or post is not None:
            why = f"sites={sites!r} leaves none. A network of one layer has no hidden site"
        raise ValueError(f"no site is modulated: {why}")
    _refuse_bypassed({s.layer for s in result} | mine, layers, flow)
    order = {name: i for i, name in enumerate(layers)}
    return tuple(sorted(result, key=lambda s: (order[s.layer], s.kind)))


def _refuse_bypassed(names: Iterable[str], layers: Iterable[str], flow: Flow) -> None:
    bypassed = sorted(set(names) & flow.bypassed)
    if bypassed:
        raise ValueError(
            f"the reference reads the weight of {bypassed[0]!r} without calling the layer (tied "
            "weights?), which would leave its members out. Choose sites and own without it"
            f"{closest('', [n for n in layers if n not in flow.bypassed])}"
        )


def choose_low_rank(
    layers: dict[str, nn.Module],
    flow: Flow,
    sites: Sites,
    rank: int | None,
    like: LowRankSite,
    own: tuple[str, ...] = (),
) -> tuple[LowRankSite, ...]:
    """Return the layers that ``sites`` stands for, all with matrices of one kind.

    A rank of None is that of ``like``, or the full one of layers that are smaller.
    """
    names = {name for name, _ in _select(sites, layers, flow)[0] if not is_within(name, own)}
    _refuse_bypassed(names, layers, flow)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in (n for n in layers if n in names):
        layer = layers[name]
        weight = layer._parameters.get("weight")
        if weight is None or getattr(layer, "max_norm", None) is not None:
            raise ValueError(
                f"{name!r} ({type(layer).__name__}) has no weight that a matrix of low rank could "
                "change (a parametrization? max_norm?); choose sites without it"
            )
        shapes[name] = tuple(weight.flatten(1).shape)
        if rank is not None and rank > min(shapes[name]):
            raise ValueError(
                f"rank: {rank} is above the size of {name!r}, a weight of {shapes[name]}. Take a "
                "smaller rank, or choose sites without it."
            )
    wanted = like.rank if rank is None else rank
    return tuple(replace(like, layer=n, rank=min(wanted, *shape)) for n, shape in shapes.items())


def choose_own(
    own: str | Iterable[str], reference: nn.Module, layers: dict[str, nn.Module], flow: Flow
) -> tuple[str, ...]:
    """Return the layers and norm layers that ``own`` stands for, by the names of their modules."""
    modules = dict(reference.named_modules())
    attentions = [n for n, m in modules.items() if isinstance(m, Attention)]
    called = {n for n in layers if n in flow.upstream}
    called |= {n for n in attentions if f"{n}.out_proj".lstrip(".") in called}
    known = [n for n, m in modules.items() if n in called or isinstance(m, NORMS)]
    holders = [n for n in modules if n and any(is_within(k, [n]) for k in known)]
    chosen: set[str] = set()
    for pattern in _listed(own):
        if not isinstance(pattern, str):
            raise TypeError(f"own must be 'last', or names or wildcards of layers; got {pattern!r}")
        if pattern == "last" and pattern not in modules:
            chosen.update(flow.last)
            continue
        named = pattern in holders or pattern in known
        held = [n for n in modules if named and is_within(n, [pattern])]
        found = [n for n in known if n in held] or fnmatch.filter(known, pattern)
        if not found:
            unused = fnmatch.filter(layers, pattern)
            why = "names a layer that is never called" if unused else "matches no layer"
            raise ValueError(f"own: {pattern!r} {why}{closest(pattern, [*holders, 'last'])}")
        for name in (n for n in held if not is_within(n, known)):
            tensors = [*modules[name]._parameters.values(), *modules[name]._buffers.values()]
            if any(t is not None for t in tensors):
                kind = type(modules[name]).__name__
                raise ValueError(
                    f"own: {pattern!r} holds {name!r} ({kind}), which is no known layer. "
                    "Name the layers, or make it known with embens.register_layer."
                )
        chosen.update(found)
    for name in chosen:
        inside = [m for m in modules[name].modules() if m is not modules[name]]
        if inside and name not in attentions:
            raise ValueError(
                f"own: {name!r} has a parametrization, so that a member can't have its own; take "
                "it off with torch.nn.utils.parametrize.remove_parametrizations"
            )
        tied = {id(p) for p in modules[name].parameters()}
        for other, module in modules.items():
            if not is_within(other, chosen) and tied & {id(p) for p in module._parameters.values()}:
                raise ValueError(
                    f"own: {name!r} has a weight in common with {other!r}; name both or neither "
                    "(of adapt: head='shared')"
                )
    return tuple(n for n in modules if n in chosen)


def choose_first(
    reference: nn.Module, layers: dict[str, nn.Module], flow: Flow, example_input: Any
) -> tuple[str, ...]:
    """Return the layers that the input enters by, or say why it can't be one of several."""
    fed = {c.name for c in flow.calls if c.loose & {"input", "result"} or c.parents}
    first = tuple(n for n in layers if n in flow.first & fed)
    calls = [c.name for c in flow.calls]
    parameters = inspect.signature(reference.forward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    several = isinstance(example_input, (tuple, list)) and len(example_input) > 1
    skipping = sorted({s.operation for s in flow.steps if len(set(map(bool, s.before))) > 1})
    holders: dict[int, list[str]] = {}
    for name, module in reference.named_modules():
        for parameter in module._parameters.values():
            holders.setdefault(id(parameter), []).append(name)

    def objections() -> Iterator[str]:
        if not flow.calls or flow.guesses or flow.opaque:
            yield "its data flow could not be read in full; pass example_input"
        if several or len(needed) > 1:
            yield "it takes several inputs"
        if len(flow.outputs) != 1:
            yield f"it has {len(flow.outputs)} outputs"
        if skipping:
            yield f"its input skips the first layers: {skipping[0]!r} takes it as it is"
        if not first or flow.first & flow.last:
            yield "its first layers should come before other layers"
        for name in first:
            if calls.count(name) > 1:
                yield f"its first layer {name!r} is called several times"
            if not is_linear_in_parameters(layers[name]):
                kind = type(layers[name]).__name__
                yield f"the weights of its first layer {name!r} ({kind}) have no plain sum"
        for name in (*first, *flow.last):
            tied = [h for p in layers[name].parameters() for h in holders[id(p)] if h != name]
            if tied or name in flow.bypassed:
                yield f"{name!r} has its weight in common with {(tied or ['other code'])[0]!r}"

    for why in objections():
        raise ValueError(f"this reference can't have an input for every member: {why}")
    return first
