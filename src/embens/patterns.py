"""Layers and modules that names, wildcards or a predicate select."""

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from embens.checks import closest
from embens.sites import NORMS, is_within, match

if TYPE_CHECKING:
    from embens.embed import Source


def select_layers(source: "Source", sites: Any) -> set[str]:
    """Return the layers that names, wildcards or a predicate select.

    Args:
        source: The reference with its layers.
        sites: A name or wildcard, several of them, or a function of (name, module).

    Raises:
        TypeError: If ``sites`` is something else.
        ValueError: If it selects no layer, or a layer that is never called.
    """
    used = source.used
    if callable(sites):
        names = {n for n in used if sites(n, source.modules.get(n, source.reference))}
        if not names:
            raise ValueError(
                f"the predicate for sites selects no layer. Layers: {list_names(used)}."
            )
        return names
    is_single = isinstance(sites, str) or not isinstance(sites, Iterable)
    names = set()
    for pattern in [sites] if is_single else sites:
        if not isinstance(pattern, str):
            raise TypeError(
                "sites must be 'hidden', 'last', 'all', names or wildcards of layers, or a "
                f"function of (name, module), got {pattern!r}."
            )
        matches = match(pattern, used)
        if not matches:
            problem = "matches no layer"
            if match(pattern, source.layers):
                problem = "names a layer that is never called"
            names_and_words = [*used, "hidden", "last", "all"]
            raise ValueError(f"sites: {pattern!r} {problem}{closest(pattern, names_and_words)}")
        names.update(matches)
    if not names:
        raise ValueError(f"sites is empty. Name at least one of {list_names(used)}.")
    return names


def select_modules(source: "Source", own: Any) -> set[str]:
    """Return the modules that names or wildcards select, for separate copies in every member.

    Args:
        source: The reference with its modules.
        own: A module, which stands for the layers inside it, a wildcard, "last", or several of
            them.

    Raises:
        TypeError: If ``own`` is something else.
        ValueError: If a pattern matches no module, or one with tensors outside of known layers.
    """
    attentions = []
    for name, module in source.modules.items():
        if isinstance(module, nn.MultiheadAttention):
            attentions.append(name)
    candidates = []
    for name, module in source.modules.items():
        is_used = name in source.flow.upstream
        if name in attentions:
            # The data flow contains the projections of an attention, not its module.
            is_used = f"{name}.out_proj".lstrip(".") in source.flow.upstream
        is_inside = any(name != outer and is_within(name, [outer]) for outer in attentions)
        if (is_used and not is_inside) or isinstance(module, NORMS):
            candidates.append(name)
    is_single = isinstance(own, str) or not isinstance(own, Iterable)
    names: set[str] = set()
    for pattern in [own] if is_single else own:
        if not isinstance(pattern, str):
            raise TypeError(
                f"own must be 'last', or names or wildcards of layers, got {pattern!r}."
            )
        if pattern == "last" and pattern not in source.modules:
            names.update(source.last_modules())
        else:
            names.update(_match_modules(source, pattern, candidates))
    return names


def _match_modules(source: "Source", pattern: str, candidates: Sequence[str]) -> list[str]:
    """Return the candidates that a wildcard matches, or that are inside a module."""
    if pattern in source.modules:
        inside = [name for name in source.modules if is_within(name, [pattern])]
        matches = [name for name in candidates if name in inside]
        if matches:
            _refuse_unknown_parts(source, pattern, inside, candidates)
    else:
        matches = fnmatch.filter(candidates, pattern)
    if not matches:
        problem = "matches no layer"
        if fnmatch.filter(source.layers, pattern):
            problem = "names a layer that is never called"
        raise ValueError(f"own: {pattern!r} {problem}{closest(pattern, [*candidates, 'last'])}")
    return matches


def _refuse_unknown_parts(
    source: "Source", pattern: str, inside: Sequence[str], candidates: Sequence[str]
) -> None:
    for name in inside:
        module = source.modules[name]
        tensors = [*module._parameters.values(), *module._buffers.values()]
        has_tensors = any(tensor is not None for tensor in tensors)
        if has_tensors and not is_within(name, candidates):
            raise ValueError(
                f"own: {pattern!r} contains {name!r} ({type(module).__name__}), which is not a "
                "known layer. Name the layers, or add the class with embens.register_layer."
            )


def refuse_modulated(
    source: "Source", names: Collection[str], sites: Any, laws: Iterable[Any]
) -> None:
    """Raise ValueError if the user names a separate layer among the modulated ones.

    Args:
        source: The reference.
        names: Modules of which every member has a separate copy.
        sites: See :func:`embens.embed`.
        laws: The arguments ``pre`` and ``post``, which may be mappings from layers to laws.
    """
    modulated: list[Any] = []
    if isinstance(sites, str):
        modulated.append(sites)
    elif isinstance(sites, Iterable):
        modulated += sites
    for law in laws:
        if isinstance(law, Mapping):
            modulated += law
    for name in modulated:
        if name in source.layers and is_within(name, names):
            raise ValueError(
                f"{name!r} is a per-member layer, which needs no modulation. Remove it from sites, "
                "pre and post, or from own."
            )


def list_names(names: Iterable[str], limit: int = 8) -> str:
    """Return some names for a message, such as ``'a', 'b', …``.

    Args:
        names: The names.
        limit: Largest number of names in the text.
    """
    texts = [repr(name) for name in names]
    more = ", …" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more
