r"""Recurrent layers (RNN, LSTM, GRU) between two modulations.

.. math:: h = v \circ \mathrm{layer}(u \circ x)

A layer is modulated as a whole: :math:`u` multiplies what its first layer takes at every step,
:math:`v` the output of its last, and the end of that output once more where it is returned as the
state. What goes from one step to the next, the states of lower layers and cells are not modulated.
So a state that is given back to the layer has :math:`v` in it; ``pre=None`` at the layer keeps a
sequence in pieces the same as a whole one. The batch is the second axis of states: members run one
after another.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from embens.ensemble.layers import Modulated, Scaled
from embens.ensemble.run import Unfoldable


class ModulatedRecurrent(Modulated):
    """A shared recurrent layer, for the one member that runs."""

    def forward(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output and the state."""
        run = self.current.get()
        if run.count > 1 or run.index is not None:
            raise Unfoldable("the batch is not the first axis of a recurrent layer's states")
        pre, post = (None if m is None else m.now(run)[0] for m in (self.pre, self.post))
        result = self.layer(input if post is None else _times(input, post), *args, **kwargs)
        return result if pre is None else _scaled(result, pre, self.plain_layer.bidirectional)

    def plain(self, member: int | None, memo: dict[int, Any]) -> nn.Module:
        """Return torch's own layer; with a wrapper where its output is modulated."""
        layer = copy.deepcopy(self.plain_layer)
        pre = None if self.pre is None else self.pre.of(member)
        if self.post is not None:
            if member is None:
                raise ValueError("a recurrent layer has no mean weight: it is not linear")
            with torch.no_grad():
                for name, weight in layer.named_parameters():
                    if name.startswith("weight_ih_l0"):
                        weight.mul_(self.post.of(member))
        if pre is None:
            return layer
        return ScaledRecurrent(layer, pre if member is not None else pre.mean(0), None)


class ScaledRecurrent(Scaled):
    """One member of a recurrent layer whose output is modulated."""

    def forward(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the member's output and state."""
        assert self.pre is not None
        return _scaled(self.layer(input, *args, **kwargs), self.pre, self.layer.bidirectional)


def _times(x: Any, numbers: Tensor) -> Any:
    if isinstance(x, PackedSequence):
        return x._replace(data=x.data * numbers.to(x.data.dtype))
    return x * numbers.to(x.dtype)


def _scaled(result: tuple[Any, Any], pre: Tensor, bidirectional: Any) -> tuple[Any, Any]:
    output, state = result
    hidden, *cells = state if isinstance(state, tuple) else (state,)
    by_direction = pre.unflatten(0, (1 + bidirectional, -1))  # as the features of the output
    if hidden.dim() == 3:
        by_direction = by_direction.unsqueeze(1)
    lower, last = hidden[: -len(by_direction)], hidden[-len(by_direction) :]
    hidden = torch.cat([lower, _times(last, by_direction)])
    return _times(output, pre), (hidden, *cells) if cells else hidden
