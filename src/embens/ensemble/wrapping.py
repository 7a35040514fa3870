"""What the modules have in common that an ensemble puts into a network, and the way out again.

:func:`plain` is one member, or the mean of all; :func:`without_members` the network without them.
"""

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from embens.ensemble.run import Current
from embens.reading.attention import Attention
from embens.reading.flow import copy_structure, left_over


class Individual(nn.Module):
    """A module with numbers of its own for every member."""

    current: Current  # the ensemble's; where the running pass is found
    slot: int  # the place of its first tensor among all individual tensors of the ensemble
    redrawn: bool = False  # whether every pass draws the last of its tensors anew

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by name, members first; "" is the name of an only one."""
        raise NotImplementedError

    def draw(self) -> Tensor:
        raise NotImplementedError


class Wrapper(nn.Module):
    """A module around another, whose attributes it has where it has none itself."""

    current: Current  # the ensemble's

    def inner(self) -> nn.Module:
        raise NotImplementedError

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """In a pass that of the module inside: ``isinstance`` holds for both, as code may ask."""
        current = self.__dict__.get("current")
        running = current is not None and current.run is not None
        return type(self.inner()) if running else type(self)

    def plain(self, member: int | None, memo: dict[int, Any]) -> nn.Module:
        """Return what a plain network has in its place, of one member; None: the mean of all.

        ``memo`` is that of a deep copy of the whole network under way.
        """
        return copy.deepcopy(self.inner(), memo)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or not self.__dict__.get("_modules"):
                raise
            return self._inner_attribute(name)

    def _inner_attribute(self, name: str) -> Any:
        return getattr(self.inner(), name)


class Sealed:
    """The weight of a modulated layer, seen from outside: what it is, but not its values."""

    _ANSWERS = frozenset(
        "dtype device shape ndim size dim numel nelement element_size itemsize nbytes layout "
        "stride is_contiguous requires_grad is_floating_point is_complex is_cuda is_cpu is_meta "
        "is_sparse is_quantized".split()
    )

    def __init__(self, tensor: Tensor, error: Exception):
        self._tensor, self._error = tensor, error

    def __getattr__(self, name: str) -> Any:
        if name in Sealed._ANSWERS:
            return getattr(self._tensor, name)
        raise self._error

    def _refuse(self, *arguments: Any, **options: Any) -> Any:
        raise self._error

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __iter__ = __len__ = __float__ = _refuse
    __array__ = __call__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise next(v for v in tree_leaves((args, kwargs)) if isinstance(v, Sealed))._error

    def __repr__(self) -> str:
        return f"Sealed({tuple(self.shape)}, {self.dtype})"


def walk(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules of an ensemble's network by the names that they have in the reference."""
    yield name, module
    for place, (key, child) in enumerate(module.named_children()):
        inside = isinstance(module, Wrapper) and not place  # has the name of what is around it
        yield from walk(child, name if inside else f"{name}.{key}".strip("."))


def plain(network: nn.Module, member: int | None) -> nn.Module:
    """Return a plain network with the weights of one member; None: the mean of all members'."""
    memo: dict[int, Any] = left_over(network)
    for module in reversed(list(network.modules())):
        if isinstance(module, Wrapper):
            memo[id(module)] = module.plain(member, memo)
        elif isinstance(module, Attention):
            attention = copy.deepcopy(module, memo)
            linear = all(isinstance(part, nn.Linear) for part in attention.children())
            memo[id(module)] = attention.plain() if linear else attention
    return copy.deepcopy(network, memo)


def without_members(network: nn.Module) -> nn.Module:
    """Return the network without its modulations, in which layers have the reference's names.

    Parameters are not copied; where members have tensors of their own, these stay stacked.
    """
    replaced: dict[int, Any] = {}
    for module in reversed(list(network.modules())):
        if isinstance(module, Wrapper):
            replaced[id(module)] = copy_structure(module.inner(), replaced)
    return copy_structure(network, replaced)
