"""Errors of operations without a rule: they name the operation, the line of code and the fix."""

from __future__ import annotations

import torch
import torch.fx
from torch.nn import functional as F

from embens.theory.moments import MEASURE

_MAXIMUM = {
    F.max_pool1d,
    F.max_pool2d,
    F.max_pool3d,
    torch.max,
    torch.amax,
    torch.maximum,
    "max",
    "amax",
}

_WRITE_A_RULE = (
    "Write it as an nn.Module and give that a rule with embens.theory.propagate.register. "
)


def no_rule(node: torch.fx.Node) -> TypeError:
    """Return the error for an operation without a rule.

    Args:
        node: Node of the operation in the traced graph.
    """
    if node.target in _MAXIMUM:
        return TypeError(
            "max pooling has no limit here: the maximum of correlated units is not Gaussian and "
            f"has no kernel in closed form.{line_of(node)} Use average pooling. {_WRITE_A_RULE}"
            + MEASURE
        )
    name = getattr(node.target, "__name__", node.target)
    return TypeError(
        f"the infinite-width limit of the operation {name!r} is not known.{line_of(node)} "
        + _WRITE_A_RULE
        + MEASURE
    )


def with_line(error: Exception, node: torch.fx.Node) -> Exception:
    """Return an error with the line of the user's code that made a node.

    Args:
        error: The error of a rule.
        node: The node to which the rule was applied.
    """
    line = line_of(node)
    if line in str(error):
        return error
    return type(error)(f"{error}{line}")


def line_of(node: torch.fx.Node) -> str:
    """Return the line of the user's code that made a node, as the end of a sentence."""
    lines = (node.stack_trace or "").splitlines()
    for index in range(len(lines) - 2, -1, -1):
        is_frame = lines[index].lstrip().startswith("File ")
        if is_frame and "/torch/" not in lines[index]:
            return f" It is at {lines[index].strip()}: {lines[index + 1].strip()}."
    return ""
