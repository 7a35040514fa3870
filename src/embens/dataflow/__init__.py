"""How data flows through a reference network: which parameter layers come before which.

Sites are defined by the data flow (a *first* layer has no parameter layer before it, a *last* one
none after it), and so is what members can share (whatever no modulation lies before). Two readers
find it: :func:`read_symbolically` traces the module with torch.fx and needs no input;
:func:`read_from_run` watches one real call and takes any Python code. Both only *read*: the module
that runs is always the user's own code, so that nothing decided while reading (``self.training``,
a branch) is baked in. Where neither works, :func:`read_registration` takes the order in which
layers were registered, and says so.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from embens.dataflow.flow import (
    NORMS,
    PROJECTIONS,
    Flow,
    Reader,
    Trail,
    disable_fast_paths,
    is_layer,
    parameter_layers,
)
from embens.dataflow.symbolic import read_symbolically
from embens.dataflow.watched import read_from_run

__all__ = [
    "NORMS",
    "PROJECTIONS",
    "Flow",
    "disable_fast_paths",
    "parameter_layers",
    "read",
]


def read_registration(reference: nn.Module) -> Flow:
    """Take the layers in the order of their registration, as one chain."""
    reader = Reader(reference)
    reader.pass_leaf(reference, "", [Trail()])
    return reader.flow


def read(reference: nn.Module, example_input: Any = None) -> Flow:
    """Read the data flow by the best means there is."""
    if is_layer(reference) or isinstance(reference, nn.MultiheadAttention):
        return read_registration(reference)
    if example_input is not None:
        return read_from_run(reference, example_input)
    return read_symbolically(reference) or read_registration(reference)
