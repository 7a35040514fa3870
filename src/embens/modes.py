"""Training and evaluation mode of a module, and marks for torch.compile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

Function = TypeVar("Function", bound=Callable)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Switch a module to evaluation mode; restore the mode of every submodule on exit.

    Args:
        network: Any module.

    Example:
        >>> dropout = nn.Dropout()
        >>> with evaluating(dropout):
        ...     dropout.training
        False
        >>> dropout.training
        True
    """
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def constant_when_compiled(function: Function) -> Function:
    """Mark a function with a result that torch.compile takes as a constant.

    It does the same as ``torch.compiler.assume_constant_result`` without importing the compiler,
    which takes longer than importing torch.

    Args:
        function: A function or method.

    Returns:
        The function.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
