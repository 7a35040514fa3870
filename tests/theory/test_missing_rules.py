"""Errors of operations without a rule."""

from __future__ import annotations

import pytest
import torch
import torch.fx
from torch import nn

from embens.theory.missing_rules import line_of, no_rule, with_line


class Sorted(nn.Module):
    """Sorts its inputs, and takes their maximum."""

    def forward(self, x):
        y = torch.sort(x)
        return torch.amax(y)


def nodes() -> dict[str, torch.fx.Node]:
    tracer = torch.fx.Tracer()
    tracer.record_stack_traces = True
    return {node.name: node for node in tracer.trace(Sorted()).nodes}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("sort", ["operation 'sort'", "y = torch.sort(x)", "propagate.register"]),
        ("amax", ["max pooling has no limit", "torch.amax(y)", "propagate.register"]),
    ],
)
def test_errors_name_the_operation_the_line_and_the_rule_to_write(name, parts):
    message = str(no_rule(nodes()[name]))
    for part in [*parts, "test_missing_rules.py"]:
        assert part in message


def test_a_line_is_added_once():
    node = nodes()["sort"]
    error = with_line(ValueError("two streams are correlated."), node)
    assert isinstance(error, ValueError)
    assert str(error) == f"two streams are correlated.{line_of(node)}"
    assert with_line(error, node) is error


def test_nodes_without_a_line_leave_errors_as_they_are():
    error = TypeError("no rule.")
    assert with_line(error, nodes()["x"]) is error
