r"""Rule of ``nn.Embedding``: a lookup of vectors for tokens.

An embedding is a layer on one-hot inputs, with independent vectors for different tokens. So
:math:`\Sigma(x, i; x', j)` is the variance of an entry where the tokens are equal, and 0 elsewhere,
within and between members. The gain of a trainable entry is 1.
"""

import math

import torch
from torch import Tensor, nn

from embens.theory.moments import DIAGONAL, MEASURE, PAIRS, Moments, State, describe
from embens.theory.recursion import propagate


@propagate.register
def look_up(module: nn.Embedding, state: State) -> State:
    """Return the kernels of embedded tokens.

    Args:
        module: The embedding.
        state: State that holds tokens, ``(n, token)``.

    Raises:
        TypeError: If the law of the embedding is not known, or members have copies of it.
        ValueError: If inputs are not tokens.
    """
    name = describe(module, state.path)
    _require_torch_initialisation(module, name)
    placement = state.placement(module)
    if placement.copies or placement.low_rank:
        raise TypeError(f"{name} differs between members, which has no rule. {MEASURE}")
    if state.inputs is None or state.inputs[0].dim() != 2:
        raise ValueError(f"{name} needs tokens of shape (n, token), the inputs of the network.")
    first, second = (tokens.round().long() for tokens in state.inputs)
    layout = PAIRS if state.poolings else DIAGONAL
    equal = _equal_tokens(first, second, layout, paired=state.facts.recording is not None)
    nngp = equal.to(state.inputs[0].dtype)
    ntk = nngp.clone() if module.weight.requires_grad and state.facts.tracked else None
    return state.replace(
        same=Moments(nngp, ntk),
        cross=None,
        individual=None,
        layout=layout,
        spatial=1,
        features_last=True,
        gaussian=True,
        centred=True,
        sources=frozenset([state.path]),
        pre=placement.pre,
        inputs=None,
    )


def _equal_tokens(first: Tensor, second: Tensor, layout: str, *, paired: bool) -> Tensor:
    if not paired:
        first, second = first[:, None], second[None]
    if layout == PAIRS:
        return first.unsqueeze(-1) == second.unsqueeze(-2)
    return first == second


def _require_torch_initialisation(module: nn.Embedding, name: str) -> None:
    """Raise unless entries can be standard normal, as torch draws them."""
    weight = module.weight.detach().double()
    mean_square = weight.square().mean().item()
    # The logarithm also separates laws of few entries.
    deviation = abs(math.log(mean_square)) if mean_square > 0 else math.inf
    standard_error = math.sqrt(2 / weight.numel())
    if module.padding_idx is not None or module.max_norm is not None:
        raise TypeError(f"{name} has padding_idx or max_norm, which have no rule. {MEASURE}")
    if deviation > 6 * standard_error or not torch.isfinite(weight).all():
        raise TypeError(
            f"the law of {name} is not known: its entries are not standard normal, as torch draws "
            f"them. The limit belongs to an initialisation. {MEASURE}"
        )
