"""Text about an ensemble for ``print``: family, sizes, and how its members run."""

import inspect
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble


def describe_ensemble(ensemble: "EmbeddedEnsemble") -> str:
    """Return family, number of members and of parameters, and executor of an ensemble.

    Args:
        ensemble: The ensemble.
    """
    shared = sum(parameter.numel() for parameter in ensemble.shared_parameters())
    individual = sum(parameter.numel() for parameter in ensemble.individual_parameters())
    return (
        f"{ensemble.spec.family}, members={ensemble.members}, shared parameters={shared:,}, "
        f"individual parameters={individual:,}, runs {ensemble.executor}"
    )


def describe_executor(ensemble: "EmbeddedEnsemble") -> str:
    """Return "folded", or "merged" with the reason.

    Before the first call it is determined for an input with two axes.

    Args:
        ensemble: The ensemble.
    """
    foldings = ensemble.foldings
    if foldings.reason:
        return f"merged: {foldings.reason}"
    if foldings.kept:
        folding = foldings.kept[-1]
    else:
        names = _required_names(ensemble.reference)
        if not names:
            return "merged: its arguments are not fixed"
        folding = foldings.preview(dict.fromkeys(names, 2))
        if folding.folded is None and "cannot trace" not in folding.reason:
            return "folded or merged, depending on the input"
    if folding.folded is not None:
        return "folded"
    return f"merged: {folding.reason}"


def _required_names(reference: nn.Module) -> list[str]:
    """Return the names of the arguments without a default; none if their number is open."""
    parameters = inspect.signature(reference.forward).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return []
    return [p.name for p in parameters if p.default is p.empty]
