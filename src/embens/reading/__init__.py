"""How data flows through a reference network: which parameter layers come before which.

Sites are defined by the data flow (a *first* layer has no parameter layer before it, a *last* one
none after it), and so is what members can share (whatever no modulation lies before). Two readers
find it: :func:`read_symbolically` traces the module with torch.fx and needs no input;
:func:`read_from_run` watches one real call and takes any Python code. Both only *read*: the module
that runs is the user's own code, and no branch is baked in. Where neither works,
:func:`read_registration` takes the order in which layers were registered, and says so.
"""

from typing import Any

from torch import nn

from embens.reading.attention import Attention
from embens.reading.flow import Flow, Reader, Step, Trail, opened
from embens.reading.layers import is_layer, parameter_layers, register_layer
from embens.reading.readers import read_from_run, read_symbolically

__all__ = ["Flow", "opened", "parameter_layers", "read", "register_layer"]


def read_registration(reference: nn.Module) -> Flow:
    """Take the layers in the order of their registration, as one chain."""
    reader = Reader(reference)
    reader.pass_leaf(reference, "", [Trail(rows="input")])
    return reader.flow


def read(reference: nn.Module, example_input: Any = None) -> Flow:
    """Read the data flow by the best means there is."""
    if is_layer(reference) or isinstance(reference, Attention):
        return read_registration(reference)
    if example_input is None:
        return read_symbolically(reference) or read_registration(reference)
    if any(getattr(m, "inplace", False) for m in reference.modules()):
        symbolic = read_symbolically(reference)  # tells an output in place from the input
        if symbolic and not symbolic.opaque and not symbolic.guesses:
            return symbolic
    flow = read_from_run(reference, example_input)
    flow.steps.add(Step("code that was read from an example", clear=False))  # of other branches
    return flow
