"""Errors of operations without a rule: they name the operation, the line of code and the fix."""

from __future__ import annotations

import operator
import traceback
from pathlib import Path

import torch
import torch.fx
from torch import nn
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

_PACKAGE = str(Path(__file__).parents[1])

_LINE = " It is at"

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
    if node.target is getattr:
        name = node.args[1]
    return TypeError(
        f"the infinite-width limit of the operation {name!r} is not known.{line_of(node)} "
        + _WRITE_A_RULE
        + MEASURE
    )


def require_no_parameters(node: torch.fx.Node, network: nn.Module) -> None:
    """Raise if an operation of the forward uses a trainable parameter directly.

    Args:
        node: Node of the operation.
        network: The network that was traced.

    Raises:
        TypeError: If the tangents of a parameter would be missing.
    """
    if node.target is getattr:
        return  # a dtype or a device
    for source in node.all_input_nodes:
        if source.op != "get_attr":
            continue
        value = operator.attrgetter(str(source.target))(network)
        if isinstance(value, nn.Parameter) and value.requires_grad:
            raise TypeError(
                f"the forward uses the parameter {source.target!r} outside of a layer, so its "
                f"tangents have no rule.{line_of(node)} Freeze it with requires_grad_(False) if "
                f"it is not trained. {_WRITE_A_RULE}{MEASURE}"
            )


def with_line(error: Exception, node: torch.fx.Node) -> Exception:
    """Return an error with the line of the user's code that made a node.

    Args:
        error: The error of a rule.
        node: The node to which the rule was applied.
    """
    line = line_of(node)
    if not line or _LINE in str(error):
        return error
    return type(error)(f"{error}{line}")


def line_of(node: torch.fx.Node) -> str:
    """Return the line of the user's code that made a node, as the end of a sentence."""
    lines = (node.stack_trace or "").splitlines()
    for index in range(len(lines) - 2, -1, -1):
        is_frame = lines[index].lstrip().startswith("File ")
        if is_frame and "/torch/" not in lines[index]:
            return f"{_LINE} {lines[index].strip()}: {lines[index + 1].strip()}."
    return ""


def line_of_error(error: Exception) -> str:
    """Return the line of the user's code that raised an error, as the end of a sentence."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        is_library = "/torch/" in frame.filename or frame.filename.startswith(_PACKAGE)
        if not is_library:
            return f'{_LINE} File "{frame.filename}", line {frame.lineno}: {frame.line}.'
    return ""
