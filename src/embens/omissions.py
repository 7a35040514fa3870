"""Warnings about parts of a reference in which members may not differ as intended."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from embens.checks import warn
from embens.patterns import list_names
from embens.sites import NORMS, Layer, Site
from embens.spec import LowRankSite

if TYPE_CHECKING:
    from embens.embed import Source


def warn_about_guesses(guesses: Iterable[str], *, is_watched: bool = False) -> None:
    """Warn that the order of the layers was guessed.

    Args:
        guesses: Each as a clause, such as "that 'head' is never called".
        is_watched: Whether the data flow was read from a call on ``example_input``.
    """
    text = "; ".join(dict.fromkeys(guesses))
    fix = "pass example_input=x (a batch, a tuple of arguments, or a dict of them by name)"
    if is_watched:
        fix = "name the layers in sites"
    warn(
        f"the data flow of the reference could not be read completely; guessed: {text}. "
        f"To be sure, {fix}."
    )


def warn_about_unknown_layers(unknown: Mapping[str, str]) -> None:
    """Warn about layers of classes that are not registered.

    Args:
        unknown: Names of their classes by name of the layer.
    """
    kinds = ", ".join(sorted(set(unknown.values())))
    warn(
        f"members do not differ in {list_names(unknown)}: layers of type {kinds} are "
        "unknown. Add them with embens.register_layer(kind, channels), where "
        "channels(layer) returns the numbers of input and output channels."
    )


def warn_about_shared_weights(sizes: Mapping[str, int], modules: Mapping[str, nn.Module]) -> None:
    """Warn that members differ in less than half of the weights.

    Args:
        sizes: Numbers of elements of the weights that all members share, by name.
        modules: Modules of the reference by name.
    """
    largest_first = sorted(sizes, key=lambda name: -sizes[name])
    fix = (
        "Keep weights in layers such as nn.Linear that the code calls, or add the module's "
        "class with embens.register_layer."
    )
    owner = modules[largest_first[0].rpartition(".")[0]]
    if isinstance(owner, nn.RNNBase):
        fix = "Recurrent weights have no masks; batch_ensemble modulates their gates."
    warn(
        "members do not differ in most of the weights: all have the same "
        f"{list_names(largest_first)}. {fix} To leave them out on purpose, name layers in "
        "sites=."
    )


def warn_about_cancelling_members(source: "Source", sites: Sequence[Site]) -> None:
    """Warn if fixed modulations make the ensemble mean identically zero.

    Args:
        source: The reference.
        sites: Its modulated sites, none of which is trained.
    """
    for site in sites:
        if 1 + (source.members - 1) * site.law.overlap > 1e-9:
            return
    for name in source.flow.last:
        if source.layers[name].biases:
            return
    if all(site.layer in source.flow.last for site in sites):
        warn(
            "the ensemble mean is identically zero: the fixed modulations of the last layer sum to "
            "zero, and no bias follows. Use rho above -1/(M - 1), or trainable=True.",
        )


def warn_about_equal_weights(
    source: "Source",
    sites: Sequence[Site],
    low_rank: Sequence[LowRankSite],
    separate_layers: Sequence[str],
) -> None:
    """Warn about layers of unknown kinds; otherwise warn if members share most weights.

    Args:
        source: The reference.
        sites: Modulated sites.
        low_rank: Layers with low-rank members.
        separate_layers: Modules of which every member has a separate copy.
    """
    unknown = {}
    for name, module in source.modules.items():
        if name in source.layers or isinstance(module, (*NORMS, nn.MultiheadAttention)):
            continue
        if any(tensor_name.startswith("weight") for tensor_name in _matrices(module)):
            unknown[name] = type(module).__name__
    if unknown:
        warn_about_unknown_layers(unknown)
        return
    differing = _differing_weights(source, sites, low_rank, separate_layers)
    equal: dict[str, int] = {}
    differing_count = 0
    for name, parameter in source.reference.named_parameters():
        if parameter.dim() < 2:
            continue
        if id(parameter) in differing:
            differing_count += parameter.numel()
        else:
            equal[name] = parameter.numel()
    if sum(equal.values()) > differing_count:
        warn_about_shared_weights(equal, source.modules)


def _differing_weights(
    source: "Source",
    sites: Sequence[Site],
    low_rank: Sequence[LowRankSite],
    separate_layers: Sequence[str],
) -> set[int]:
    """Return the ``id`` of the parameters that count as differing between members.

    Without ``pre`` no hidden site modulates the first layers, and without ``post`` none the
    last layers. Their weights count as differing all the same, because the modulations of the
    neighbouring layers act on their outputs or inputs.
    """
    # Pairs of a layer and the names of its weights that are equal in all members: modulated inputs
    # leave recurrent weights as they are.
    layers: list[tuple[Layer, Collection[str]]] = []
    for site in sites:
        layer = source.layers[site.layer]
        layers.append((layer, layer.recurrent if site.kind == "post" else ()))
    for low_rank_site in low_rank:
        layers.append((source.layers[low_rank_site.layer], ()))
    sides = {site.kind for site in sites}
    excused = set()
    if sides == {"post"}:
        excused = source.flow.first
    elif sides == {"pre"}:
        excused = source.flow.last
    for name in excused:
        layer = source.layers[name]
        if not layer.recurrent:
            layers.append((layer, ()))
    parameters: set[int] = set()
    for layer, equal in layers:
        module = source.modules[layer.module]
        for weight in set(layer.weights).difference(equal):
            parameter = module._parameters.get(weight)
            # A computed weight stands for all parameters of its module.
            parts = module.parameters() if parameter is None else [parameter]
            parameters |= {id(part) for part in parts}
    for name in separate_layers:
        parameters |= {id(parameter) for parameter in source.modules[name].parameters()}
    return parameters


def _matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters with two or more axes that a module holds itself."""
    return {n: p for n, p in module._parameters.items() if p is not None and p.dim() > 1}
