r"""What an ensemble puts into a network: modulations, and modules that differ between members.

.. math:: x = u \cdot \phi(v \cdot z), \qquad v \circ W (u \circ x) = (v u^\top \circ W)\, x

A :class:`Modulation` holds one site's numbers for all members, ``(member, channel)``. A
:class:`Modulated` layer multiplies its input by ``post`` (the paper's :math:`u` of the layer
before) and its output, bias included, by ``pre`` (:math:`v`). Activations are modulated, not
weights, save where the weights are much the smaller. :class:`Once` is a module that is computed
once for all members. Attention and modules of the members' own have files of their own.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only

from embens.ensemble.plan import SharedModule, Site
from embens.ensemble.run import Run, repeat_rows, together
from embens.ensemble.wrapping import Individual, Sealed, Wrapper
from embens.reading.attention import Unfoldable
from embens.reading.flow import left_over
from embens.reading.layers import kind_of, modulate_weight, spatial_axes


class Modulation(Individual):
    """The numbers of one site: a parameter, a fixed mask, or drawn anew at every pass.

    ``repeat`` consecutive features make one channel (a Linear after a Flatten).
    """

    def __init__(
        self, site: Site, members: int, like: Tensor, generator: torch.Generator | None = None
    ):
        super().__init__()
        self.law, self.members, self.size = site.law, members, site.size
        self.drawn = members  # how many the law was asked for; of some of them there are fewer
        self.repeat = site.repeat
        self.fresh = self.redrawn = site.fresh
        try:  # of fresh ones, to see whether they can be drawn
            source = torch.Generator() if site.fresh else generator
            shape = (members, site.size)
            values = site.law.sample(shape, source, dtype=like.dtype, device=like.device)
        except ValueError as error:
            raise ValueError(f"the {site.kind} modulations of {site.layer!r}: {error}") from None
        values = values.flatten()[:0] if site.fresh else values
        if site.trainable and not site.fresh:
            self.values = nn.Parameter(values)
        else:
            self.register_buffer("values", values)

    def draw(self) -> Tensor:
        shape, like = (self.members, self.size), self.values
        return self.law.sample(shape, dtype=like.dtype, device=like.device)

    def tensors(self) -> dict[str, Tensor]:
        return {"": self.values}

    def now(self, run: Run) -> Tensor:
        """Return the numbers of the members that run now, ``(member, feature)``."""
        if self.fresh or run.given is not None:
            numbers = run.of(self)[""]
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


class Stochastic(Modulation):
    r"""Numbers that every pass draws around trainable means, :math:`N(\mu, \sigma^2)`.

    The prior is :math:`N(1, s^2)`, of which the means are draws at the start; the standard
    deviations begin as :math:`s`.
    """

    noise: Tensor

    def __init__(
        self, site: Site, members: int, like: Tensor, generator: torch.Generator | None = None
    ):
        super().__init__(site, members, like, generator)
        assert site.prior_std is not None
        self.prior_std, self.redrawn = site.prior_std, True
        self.log_std = nn.Parameter(torch.full_like(self.values, math.log(self.prior_std)))
        self.register_buffer("noise", self.values.detach()[:0], persistent=False)

    def draw(self) -> Tensor:
        return torch.randn_like(self.values.detach())

    def tensors(self) -> dict[str, Tensor]:
        return {"": self.values, "log_std": self.log_std, "noise": self.noise}

    def now(self, run: Run) -> Tensor:
        mean, log_std, noise = run.of(self).values()
        numbers = torch.addcmul(mean, log_std.exp(), noise)
        return numbers if self.repeat == 1 else numbers.repeat_interleave(self.repeat, dim=-1)

    def kl(self) -> Tensor:
        """Return the divergence of all members' numbers from the prior, summed."""
        log_ratio = self.log_std - math.log(self.prior_std)
        distance = ((self.values - 1) / self.prior_std).square()
        return ((log_ratio.exp().square() + distance - 1) / 2 - log_ratio).sum()


def is_linear_in_parameters(layer: nn.Module) -> bool:
    """Return whether scaling the weight and bias of a layer scales its output and input.

    True for torch's own layers as they are, for registered ones that say so, and for a subclass
    that says so by an attribute ``linear_in_parameters``; not where a hook or a parametrization
    does something with the weight.
    """
    known = kind_of(layer)
    registered = not isinstance(layer, _STOCK_LAYERS) and known is not None and bool(known.weight)
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    renormalised = isinstance(layer, nn.Embedding) and layer.max_norm is not None
    return (
        (is_stock(layer) or registered or getattr(layer, "linear_in_parameters", False))
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


def is_stock(layer: nn.Module) -> bool:
    """Return whether a layer computes what torch's layer of its kind does, perhaps rescaled."""
    kind = type(layer)
    stock = kind.forward in _STOCK or hasattr(kind, "effective_parameters")
    return stock and getattr(kind, "_conv_forward", nn.Linear.forward) in _STOCK


def _like(numbers: Tensor, x: Tensor) -> Tensor:
    return numbers if numbers.dtype is x.dtype else numbers.to(x.dtype)


class Modulated(Wrapper):
    r"""A shared layer between two modulations: :math:`v \circ \mathrm{layer}(u \circ x)`.

    The layer is perhaps computed :class:`Once`. At the ``border`` its input is still the same for
    all members.
    """

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
        plain = self.inner()
        self._spatial = spatial_axes(plain)
        self._effective = getattr(plain, "effective_parameters", None) is not None
        known = is_stock(plain)
        self._convolution = isinstance(plain, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and known
        self._linear = isinstance(plain, nn.Linear) and known
        self.train(layer.training)

    def inner(self) -> nn.Module:
        """Return the layer itself, without what computes it once for all members."""
        return self.layer.module if isinstance(self.layer, Once) else self.layer

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of the running members; input is the name in torch's own layers."""
        run = self.current.run or self.current.get()
        parts = self._modules  # looked up directly: attributes of modules are slow
        pre, post, layer = parts.get("pre"), parts.get("post"), parts["layer"]
        x, common = input, self.border and run.common
        if post is not None:
            if self._convolution or (common and self._linear):
                if self._weights_are_cheaper(run, x):
                    return self._through_weights(run, x)
            elif self._linear and run.count > 1 and x.dim() == 2 and not is_compiling():
                return self._stacked(run, x)
            if isinstance(x, PackedSequence):
                if run.count > 1:
                    raise Unfoldable("a packed sequence has no batch axis")
                x = x._replace(data=run.scale(x.data, post.now(run), 0, common=False))  # type: ignore[operator]
            else:
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
        return together(x)

    def _weights_are_cheaper(self, run: Run, x: Tensor) -> bool:
        """Return whether the members that run have larger activations than weights."""
        weight = self.layer._parameters.get("weight")  # to read a computed one may change it
        if weight is None or is_compiling():  # a graph is for any number of rows
            return False
        if self._convolution:
            cheaper = run.count == 1 and 2 * weight.numel() < x.numel()
        else:
            cheaper = run.count > 1 and x.dim() == 2 and len(x) > len(weight)
        return cheaper and x.dtype == weight.dtype and is_linear_in_parameters(self.layer)

    def _through_weights(self, run: Run, x: Tensor) -> Tensor:
        layer: Any = self.layer
        own = (layer.weight, layer.bias)
        weight, bias = layer.effective_parameters() if self._effective else own
        pre, post = (None if m is None else m.now(run) for m in (self.pre, self.post))
        weights = modulate_weight(layer, weight, pre, post)  # members first
        bias = bias if bias is None or pre is None else bias * pre
        if self._convolution:
            return layer._conv_forward(x, weights[0], None if bias is None else bias.flatten())
        outputs = F.linear(x, weights.flatten(0, 1)).unflatten(1, weights.shape[:2])
        if bias is not None:
            outputs = outputs + bias
        return together(outputs.transpose(0, 1))

    def _inner_attribute(self, name: str) -> Any:
        layer = self.inner()
        if name in layer._parameters and layer._parameters[name] is not None:
            error = AttributeError(
                f"the code reads the {name} of a modulated {type(layer).__name__} without "
                "calling the layer, which would leave its modulations out. Leave this layer "
                "out of embed's sites, or call it."
            )
            return Sealed(getattr(layer, name), error)
        return getattr(layer, name)

    def plain(self, member: int | None, memo: dict[int, Any]) -> nn.Module:
        """Return a plain layer with one member's weights; None: the mean of all members'."""
        layer = copy.deepcopy(self.inner(), left_over(self.inner()))
        pre = None if self.pre is None else self.pre.of(member)
        post = None if self.post is None else self.post.of(member)
        if not is_linear_in_parameters(layer):
            if member is None:
                raise ValueError(
                    f"a {type(layer).__name__} with hooks, a parametrization or a forward of its "
                    "own, or a recurrent one, has no mean weight"
                )
            if not isinstance(layer, nn.RNNBase):
                return Scaled(layer, pre, post)
            for name, weight in layer.named_parameters():
                if name.startswith("weight_ih_l0"):
                    weight.data.mul_(post)
            return layer
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


class Once(Wrapper):
    """A module whose output is the same for all members, computed once in a pass.

    For ``random``, ``keep`` and ``repeat`` see :class:`embens.ensemble.plan.SharedModule`.
    """

    def __init__(self, module: nn.Module, how: SharedModule):
        super().__init__()
        self.module = module
        self.random, self.keep, self.repeat = how.random, how.keep, how.repeat
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
        return tree_map_only(Tensor, lambda x: repeat_rows(x, run.count) if x.dim() else x, result)

    def __iter__(self) -> Iterator:
        return iter(self.module)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.module)  # most modules have no length

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]  # type: ignore[index]
