r"""What an ensemble puts into a network: modulations, and modules that differ between members.

.. math:: x = u \cdot \phi(v \cdot z), \qquad v \circ W (u \circ x) = (v u^\top \circ W)\, x

A :class:`Modulation` holds one site's numbers for all members, ``(member, channel)``. A
:class:`Modulated` layer multiplies its input by ``post`` (the paper's :math:`u` of the layer
before) and its output, bias included, by ``pre`` (:math:`v`). Activations are modulated, not
weights, save where the weights are much the smaller. :class:`Own` is a module of which every
member has its own tensors, :class:`Once` one that is computed once for all of them. Attention is in
:mod:`embens.ensemble.attention`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map

from embens.ensemble.plan import Site
from embens.ensemble.run import Current, Run, Unfoldable, gather, interleave, repeat_rows
from embens.reading.layers import kind_of, modulate_weight, spatial_axes


class Individual(nn.Module):
    """A module with numbers of its own for every member.

    Attributes:
        current: the ensemble's; where the running pass is found.
        slot: the place of its first tensor among all individual tensors of the ensemble.
        draw: draws its numbers anew, where every pass has new ones.
    """

    current: Current
    slot: int
    draw: Callable[[], Tensor] | None = None

    def tensors(self) -> list[Tensor]:
        raise NotImplementedError

    def tensor_names(self) -> tuple[str, ...]:
        raise NotImplementedError


class Modulation(Individual):
    """The numbers of one site: a parameter, a fixed mask, or drawn anew at every pass.

    Args:
        site: says their law, how many there are, and how many consecutive features make one
            channel (a Linear after a Flatten).
        members: how many members.
        like: gives the dtype and device.
        generator: draws the numbers.
    """

    def __init__(
        self, site: Site, members: int, like: Tensor, generator: torch.Generator | None = None
    ):
        super().__init__()
        self.law, self.members, self.size = site.law, members, site.size
        self.repeat, self.fresh = site.repeat, site.fresh
        values = torch.empty(0, dtype=like.dtype, device=like.device)
        if not site.fresh:
            shape = (members, site.size)
            values = site.law.sample(shape, generator, dtype=like.dtype, device=like.device)
        if site.trainable and not site.fresh:
            self.values = nn.Parameter(values)
        else:
            self.register_buffer("values", values)

    @property
    def draw(self) -> Callable[[], Tensor] | None:  # type: ignore[override]
        return self._draw if self.fresh else None

    def _draw(self) -> Tensor:
        shape, like = (self.members, self.size), self.values
        return self.law.sample(shape, dtype=like.dtype, device=like.device)

    def tensors(self) -> list[Tensor]:
        return [self.values]

    def tensor_names(self) -> tuple[str, ...]:
        return ("",)

    def now(self, run: Run) -> Tensor:
        """Return the numbers of the members that run now, ``(member, feature)``."""
        if self.fresh or run.given is not None or run.index is not None:
            numbers = run.of(self)
        else:  # the usual case, made short
            values = self._parameters.get("values")
            numbers = self._buffers["values"] if values is None else values
            assert numbers is not None
            if run.count != run.members:
                numbers = numbers.narrow(0, run.start, run.count)
        return numbers if self.repeat == 1 else numbers.repeat_interleave(self.repeat, dim=-1)

    def of(self, member: int | None) -> Tensor:
        """Return one member's numbers, ``(feature,)``; None: of all members."""
        if self.fresh:
            raise ValueError("fresh masks are drawn anew at each pass: no member has its own")
        values = self.values.detach().repeat_interleave(self.repeat, dim=1)
        return values if member is None else values[member]

    def extra_repr(self) -> str:
        kind = "fresh" if self.fresh else "trainable" if self._parameters else "frozen"
        repeat = f", repeat={self.repeat}" if self.repeat > 1 else ""
        return f"{self.law!r}, members={self.members}, size={self.size}{repeat}, {kind}"


class Wrapper(nn.Module):
    """A module around another that looks like it from outside.

    Attributes that it does not have itself are those of the module inside.
    """

    def inner(self) -> nn.Module:
        raise NotImplementedError

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
    __array__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise next(v for v in tree_leaves((args, kwargs)) if isinstance(v, Sealed))._error

    def __repr__(self) -> str:
        return f"Sealed({tuple(self.shape)}, {self.dtype})"


def is_linear_in_parameters(layer: nn.Module) -> bool:
    """Return whether scaling the weight and bias of a layer scales its output and input.

    True for torch's own layers as they are, for registered ones that say so, and for a subclass
    that says so by an attribute ``linear_in_parameters``; not where a hook or a parametrization
    does something with the weight.
    """
    kind = type(layer)
    stock = kind.forward in _STOCK and getattr(kind, "_conv_forward", kind.forward) in _STOCK
    known = kind_of(layer)
    registered = not isinstance(layer, _STOCK_LAYERS) and known is not None and bool(known.weight)
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    renormalised = isinstance(layer, nn.Embedding) and layer.max_norm is not None
    return (
        (stock or registered or getattr(layer, "linear_in_parameters", False))
        and "weight" in layer._parameters
        and not hooked
        and not renormalised
    )


_STOCK_LAYERS = (
    *(nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_STOCK = {cls.forward for cls in _STOCK_LAYERS} | {
    cls._conv_forward for cls in (_ConvNd, nn.Conv1d, nn.Conv2d, nn.Conv3d)
}


def _like(numbers: Tensor, x: Tensor) -> Tensor:
    return numbers if numbers.dtype is x.dtype else numbers.to(x.dtype)


class Modulated(Wrapper):
    r"""A shared layer between two modulations: :math:`v \circ \mathrm{layer}(u \circ x)`.

    Args:
        layer: the layer, perhaps computed once for all members.
        pre: :math:`v`.
        post: :math:`u`.
        border: whether its input is still the same for all members.
    """

    current: Current

    def __init__(
        self,
        layer: nn.Module,
        pre: Modulation | None,
        post: Modulation | None,
        *,
        border: bool = False,
    ):
        super().__init__()
        self.layer, self.pre, self.post, self.border = layer, pre, post, border
        plain = self.plain_layer
        self._spatial = spatial_axes(plain)
        self._effective = getattr(plain, "effective_parameters", None) is not None
        known = type(plain).forward in _STOCK or self._effective
        self._convolution = isinstance(plain, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and known
        self._linear = isinstance(plain, nn.Linear) and known
        self.train(layer.training)

    @property
    def plain_layer(self) -> nn.Module:
        """The layer itself, without what computes it once for all members."""
        return self.layer.module if isinstance(self.layer, Once) else self.layer

    def inner(self) -> nn.Module:
        return self.plain_layer

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of the running members; input is the name in torch's own layers."""
        run = self.current.run or self.current.get()
        parts = self._modules  # looked up directly: attributes of modules are slow
        pre, post, layer = parts.get("pre"), parts.get("post"), parts["layer"]
        x, common = input, self.border and run.common
        if post is not None:
            if self._convolution and self._weights_are_cheaper(run, x):
                return self._through_weights(run, x)
            if self._linear and run.count > 1 and run.index is None and x.dim() == 2:
                if not common and not torch.compiler.is_compiling():
                    return self._stacked(run, x)
                if common and self._heads_are_cheaper(x):
                    return self._through_heads(run, x)
            x = run.scale(x, post.now(run), self._spatial, common=common)  # type: ignore[operator]
            common = False
        x = layer(x, *args, **kwargs)  # type: ignore[misc]
        if pre is None:
            return x
        return run.scale(x, pre.now(run), self._spatial, common=common)  # type: ignore[operator]

    def _stacked(self, run: Run, x: Tensor) -> Tensor:
        """Return a Linear's output for several members, ``(member, row, feature)`` throughout."""
        parts = self._modules
        pre, post, layer = parts.get("pre"), parts["post"], parts["layer"]
        x = run.apart(x)
        x = layer(x * _like(post.now(run), x).unsqueeze(1))  # type: ignore[operator,misc,union-attr]
        if pre is not None:
            x = x * _like(pre.now(run), x).unsqueeze(1)  # type: ignore[operator]
        return x.flatten(0, 1)

    def _parameters_of(self, layer: nn.Module) -> tuple[Tensor, Tensor | None]:
        return layer.effective_parameters() if self._effective else (layer.weight, layer.bias)  # type: ignore[return-value,operator]

    def _weights_are_cheaper(self, run: Run, x: Tensor) -> bool:
        layer = self.layer
        return (
            run.count == 1
            and run.index is None
            and 2 * layer.weight.numel() < x.numel()  # type: ignore[operator]
            and x.dtype == layer.weight.dtype
            and is_linear_in_parameters(layer)
        )

    def _through_weights(self, run: Run, x: Tensor) -> Tensor:
        layer = self.layer
        kernel, bias = self._parameters_of(layer)
        pre, post = (None if m is None else m.now(run)[0] for m in (self.pre, self.post))
        weight = modulate_weight(layer, kernel, pre, post)
        if bias is not None and pre is not None:
            bias = bias * pre
        return layer._conv_forward(x, weight, bias)  # type: ignore[operator]

    def _heads_are_cheaper(self, x: Tensor) -> bool:
        """Return whether common inputs are better multiplied by every member's weight."""
        layer = self.layer
        return (
            not torch.compiler.is_compiling()  # a graph should be right for any number of rows
            and x.shape[0] > layer.out_features  # type: ignore[operator]
            and x.dtype == layer.weight.dtype
            and is_linear_in_parameters(layer)
        )

    def _through_heads(self, run: Run, x: Tensor) -> Tensor:
        assert self.post is not None
        weight, bias = self._parameters_of(self.layer)
        heads = weight * self.post.now(run).unsqueeze(1)  # (member, out, in)
        outputs = F.linear(x, heads.flatten(0, 1)).view(len(x), *heads.shape[:2]).transpose(0, 1)
        if bias is not None:
            outputs = outputs + bias
        if self.pre is not None:
            outputs = outputs * self.pre.now(run).unsqueeze(1)
        return outputs.flatten(0, 1)

    def _inner_attribute(self, name: str) -> Any:
        layer = self.plain_layer
        if name in layer._parameters and layer._parameters[name] is not None:
            error = AttributeError(
                f"the code reads the {name} of a modulated {type(layer).__name__} without "
                "calling the layer, which would leave its modulations out. Leave this layer "
                "out of embed's sites, or call it."
            )
            return Sealed(getattr(layer, name), error)
        return getattr(layer, name)

    def plain(self, member: int | None) -> nn.Module:
        """Return a plain layer with one member's weights; None: the mean of all members'."""
        layer = copy.deepcopy(self.plain_layer)
        pre = None if self.pre is None else self.pre.of(member)
        post = None if self.post is None else self.post.of(member)
        if not is_linear_in_parameters(layer):
            if member is None:
                raise ValueError(
                    f"a {type(layer).__name__} with hooks, a parametrization or a forward of its "
                    "own has no mean weight"
                )
            return Scaled(layer, pre, post)
        with torch.no_grad():
            weight: Any = modulate_weight(layer, layer.weight, pre, post)  # type: ignore[arg-type]
            bias = getattr(layer, "bias", None)
            if bias is not None and pre is not None:
                bias.copy_((bias * pre).mean(0) if member is None else bias * pre)
            layer.weight.copy_(weight.mean(0) if member is None else weight)  # type: ignore[operator]
        return layer


class Scaled(nn.Module):
    """One member of a layer whose weights can't hold its modulations."""

    pre: Tensor | None
    post: Tensor | None

    def __init__(self, layer: nn.Module, pre: Tensor | None, post: Tensor | None):
        super().__init__()
        self.layer = layer
        shape = (-1, *(1,) * spatial_axes(layer))
        self.register_buffer("pre", None if pre is None else pre.reshape(shape))
        self.register_buffer("post", None if post is None else post.reshape(shape))
        self.train(layer.training)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the member's output."""
        x = input if self.post is None else input * self.post.to(input.dtype)
        x = self.layer(x, *args, **kwargs)
        return x if self.pre is None else x * self.pre.to(x.dtype)


class OverwritingReLU(nn.ReLU):
    """A ReLU of what a modulation just made for it, and nothing else uses.

    One member's is overwritten, which saves memory; that of several is a view, which autograd
    overwrites slowly.
    """

    current: Current

    def forward(self, input: Tensor) -> Tensor:
        """Return the positive part."""
        run = self.current.run
        return F.relu(input, inplace=run is not None and run.count == 1)


class Once(Wrapper):
    """A module whose output is the same for all members, computed once in a pass.

    Args:
        module: the module.
        random: see :class:`embens.ensemble.plan.SharedModule`.
        keep: likewise.
        repeat: likewise.
    """

    current: Current

    def __init__(self, module: nn.Module, *, random: bool, keep: bool, repeat: bool):
        super().__init__()
        self.module = module
        self.random, self.keep, self.repeat = random, keep, repeat
        self.train(module.training)

    def inner(self) -> nn.Module:
        return self.module

    def extra_repr(self) -> str:
        return "computed once for all members"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output."""
        run = self.current.run
        if run is None or run.results is None or (self.random and self.training):
            return self.module(*args, **kwargs)
        result = run.results.once(self, args, kwargs)
        if not self.repeat or run.count == 1:
            return result
        return tree_map(
            lambda x: repeat_rows(x, run.count) if isinstance(x, Tensor) and x.dim() else x, result
        )

    def __iter__(self) -> Iterator:
        return iter(self.module)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.module)  # most modules have no length

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]  # type: ignore[index]


class Own(Wrapper, Individual):
    """A module some of whose tensors have one value for every member.

    The module's own tensors of these names are stacks with the members first; a call uses the
    running members'. In-place updates (running statistics) reach the stacks. A Linear runs all
    members as one batched product, anything else one member after another.

    Args:
        module: the module; its tensors are replaced by stacks.
        names: of its own tensors, not of those of modules inside it.
        members: how many.
        border: whether its input is still the same for all members.
        stacks: stacks that were made before, by the id of the tensor: tied ones stay tied.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        members: int,
        *,
        border: bool = False,
        stacks: dict[int, Tensor] | None = None,
    ):
        super().__init__()
        self.module = module
        self.names = tuple(names)
        self.border = border
        stacks = {} if stacks is None else stacks
        for name in self.names:
            tensor = getattr(module, name)
            if id(tensor) not in stacks:
                stack = tensor.detach().expand(members, *tensor.shape).clone()
                if isinstance(tensor, nn.Parameter):
                    stack = nn.Parameter(stack, tensor.requires_grad)
                stacks[id(tensor)] = stack
            setattr(module, name, stacks[id(tensor)])
        linear = isinstance(module, nn.Linear) and {"weight"} <= set(self.names)
        stock = type(module).forward in _STOCK or hasattr(module, "effective_parameters")
        hooked = module._forward_hooks or module._forward_pre_hooks
        self._batched = linear and stock and not hooked
        self.train(module.training)

    def inner(self) -> nn.Module:
        return self.module

    def tensors(self) -> list[Tensor]:
        return [getattr(self.module, name) for name in self.names]

    def tensor_names(self) -> tuple[str, ...]:
        return self.names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with the running members' tensors."""
        run = self.current.run or self.current.get()
        if run.index is None:
            if run.count == 1:
                return self._alone(run, args, kwargs)
            if self._batched and not kwargs and args[0].dim() > 1:
                return self._together(run, args[0])
        common = self.border and run.common
        present = range(run.count)
        if run.index is not None:
            present = range(min(run.members, len(run.index)))
        outputs = []
        for a in present:
            mine = tree_map(lambda x, a=a: run.rows_of(x, a, common=common), (args, kwargs))
            with run.only(a):
                outputs.append(self._alone(run, *mine))
        if run.index is None:
            return gather(outputs, torch.cat)
        return gather(outputs, lambda parts: interleave(parts, run.index))  # type: ignore[arg-type]

    def _alone(self, run: Run, args: tuple, kwargs: dict) -> Any:
        """Call the module for the one member that runs."""
        if not self.names:
            return self.module(*args, **kwargs)
        mine = {name: run.of(self, i)[0] for i, name in enumerate(self.names)}
        return call_with(self.module, mine, args, kwargs)

    def _together(self, run: Run, x: Tensor) -> Tensor:
        """Return a Linear layer's output for all members that run, as one product."""
        module, stacks = self.module, {n: run.of(self, i) for i, n in enumerate(self.names)}
        weight, bias = stacks["weight"], stacks.get("bias", module.bias)
        effective = getattr(module, "effective_parameters", None)
        if effective is not None:
            weight, bias = effective(weight, bias)
        axes = x.shape[1:-1]
        common = self.border and run.common
        x = x.flatten(0, -2).expand(run.count, -1, -1) if common else run.apart(x).flatten(1, -2)
        products = torch.bmm(x, weight.mT)  # (member, row, out)
        if bias is not None:
            assert isinstance(bias, Tensor)
            products = products + bias.reshape(-1, 1, bias.shape[-1]).to(products.dtype)
        products = products.flatten(0, 1)
        return products.unflatten(0, (-1, *axes)) if axes else products

    def _inner_attribute(self, name: str) -> Any:
        run = self.current.run
        if name not in self.names or run is None or not run.open:
            return getattr(self.module, name)
        if run.count > 1 or run.index is not None:
            why = f"the code reads {name!r}, of which every member has its own"
            return Sealed(getattr(self.module, name)[0], Unfoldable(why))
        return run.of(self, self.names.index(name))[0]

    def plain(self, member: int, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the module with the tensors of one member.

        ``memo`` is that of a deep copy of the whole network under way.
        """
        for stack in self.tensors():
            tensor = stack.detach()[member].clone()
            if id(stack) not in memo:
                parameter = isinstance(stack, nn.Parameter)
                memo[id(stack)] = nn.Parameter(tensor, stack.requires_grad) if parameter else tensor
        return copy.deepcopy(self.module, memo)


def call_with(module: nn.Module, tensors: dict[str, Tensor], args: tuple, kwargs: dict) -> Any:
    """Call a module with other tensors in place of some of its own.

    Unlike ``torch.func.functional_call`` it does not touch the module, which other threads may be
    running; names may lead into modules inside it.
    """
    if torch.compiler.is_compiling():
        return torch.func.functional_call(module, tensors, args, kwargs)
    twin = _twin(module, tensors)
    result = twin(*args, **kwargs)
    for name, given in tensors.items():
        left = twin._buffers.get(name)
        if left is not None and left is not given:  # a buffer that was assigned anew
            with torch.no_grad():
                given.copy_(left)
    return result


def _twin(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """Return a module that is another but for some tensors."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    inside: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        child, _, rest = name.partition(".")
        if rest:
            inside.setdefault(child, {})[rest] = tensor
        else:
            (parameters if name in parameters else buffers)[name] = tensor  # type: ignore[assignment]
    children = {n: _twin(module.get_submodule(n), inside[n]) for n in inside}
    modules = {**module._modules, **children}
    twin.__dict__.update(_parameters=parameters, _buffers=buffers, _modules=modules)
    return twin
