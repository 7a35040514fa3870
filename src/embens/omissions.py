"""Warnings about parts of a reference in which members may not differ as intended."""

from collections.abc import Iterable, Mapping

from torch import nn

from embens.checks import warn
from embens.patterns import list_names


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
