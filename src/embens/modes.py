"""Training and evaluation mode of a module."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Switch a module to evaluation mode; restore the mode of every submodule on exit.

    Args:
        network: any module.

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
