"""Count the floating-point operations of a computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


def count_flops(computation: Callable[[], object]) -> int:
    """Return the floating-point operations of the products and convolutions of a computation.

    Torch's ``FlopCounterMode`` adds hooks to all modules. An ensemble runs merged if there are such
    hooks, so that layers that the members share would be counted once per member.

    Args:
        computation: The computation, including backward passes.

    Returns:
        The number of operations; other operations, such as activations, do not count.

    Example:
        >>> import torch
        >>> count_flops(lambda: torch.ones(2, 3) @ torch.ones(3, 5))
        60
    """
    with _Counter() as counter:
        computation()
    return counter.total


class _Counter(TorchDispatchMode):
    """Adds up the operations of all kernels that torch calls."""

    total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result
