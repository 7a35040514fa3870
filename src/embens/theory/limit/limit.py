r"""The infinite-width limit of an ensemble, read off the module that ``embed`` made.

A :class:`Limit` prepares a network and inputs once (the pass of every input with itself, which
gives the variances) and then computes any block of the kernels; ``blocks`` puts them together.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.layers import Modulated
from embens.ensemble.ntkgp import NTKGP, load_rules_of_jvp
from embens.ensemble.own import Own
from embens.ensemble.wrapping import walk
from embens.theory.kernel import Kernels, MemberKernel, zero_cross
from embens.theory.limit.rules import (
    count_poolings,
    has_rule,
    is_trainable,
    propagate,
    steps,
    unknown,
)
from embens.theory.limit.state import (
    DIAGONAL,
    MEASURE,
    Moments,
    Recorded,
    State,
    constant,
    describe,
    plus,
)

_RECORD_NUMBERS = 2**22  # in one kernel, in the pass of every input with itself


class Limit:
    """An infinitely wide network or ensemble on some inputs; see :func:`embens.theory.kernels`."""

    def __init__(
        self,
        ensemble: EmbeddedEnsemble | nn.Module,
        x1: Tensor,
        x2: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float64,
    ):
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"dtype must be torch.float64 or torch.float32; got {dtype}.")
        _check_inputs("x1", x1)
        if x2 is not None:
            _check_inputs("x2", x2)
        self.dtype, network = dtype, ensemble
        self.separate = False  # whether members are networks of their own, which share nothing
        if isinstance(ensemble, EmbeddedEnsemble):
            self.separate = ensemble.plan.separate
            ensemble.plan.require_embedded("the limit")
            if ensemble.plan.repeats:
                raise ValueError(
                    "some members of this ensemble are the same, so that pairs of members are not "
                    "alike; take the ensemble that they were chosen from"
                )
            if self.separate and not all(own.drawn for own in ensemble.plan.own if own.tensors):
                raise ValueError(
                    "the limit is that of members which begin as draws of their own; these are "
                    "networks that there were before. Take embens.independent(reference, members)."
                )
            network = ensemble.member(0) if self.separate else ensemble.network
        self._whole = isinstance(network, NTKGP)  # outputs have the whole tangent kernel
        network = network.held[0] if isinstance(network, NTKGP) else network
        self._before, self.steps = _split(network)  # the first layer and all that follows
        self._poolings = count_poolings(nn.ModuleList([m for _, m in self.steps]))
        self.symmetric = x2 is None or x2 is x1 or (x2.shape == x1.shape and torch.equal(x1, x2))
        self.x1 = self._prepare(x1, "x1")
        self._x2 = self.x1 if self.symmetric else self._prepare(x2, "x2")  # type: ignore[arg-type]
        if self.x1.shape[1:] != self._x2.shape[1:]:
            raise ValueError(
                f"x1 and x2 must have the same features; got {tuple(x1.shape[1:])} and "
                f"{tuple(x2.shape[1:])}."  # type: ignore[union-attr]
            )
        self.shape = len(self.x1), len(self._x2)
        first, last = self.steps[0][1], self.steps[-1][1]
        self._input_post = first.post if isinstance(first, Modulated) else None
        self._output_pre = last.pre if isinstance(last, Modulated) else None
        self.conditional = self._input_post is not None or self._output_pre is not None  # on draws
        self._members = int(self._input_post is not None)  # member axes while propagating
        with torch.no_grad():
            record1 = self._record(self._modulated(self.x1))
            record2 = record1 if self.symmetric else self._record(self._modulated(self._x2))
        self._duals = []
        for (dual, law, first), (*_, second) in zip(record1, record2, strict=True):
            ends = torch.stack([*first.aminmax(), *second.aminmax()])
            self._duals.append(dual.prepare(ends.min().item(), ends.max().item(), law))
        self._variances = [r.variances for r in record1], [r.variances for r in record2]

    @property
    def device(self) -> torch.device:
        return self.x1.device

    @property
    def numbers(self) -> int:
        """How many numbers one pair of inputs has in the largest kernel on the way."""
        spatial = _pixel_axes(_layer_of(self.steps[0][1]))
        members = self._input_post.members if self._input_post is not None else 1
        pixels = self.x1.shape[2 : 2 + spatial].numel()
        return members**2 * pixels ** (2 if self._poolings else 1)

    def fingerprint(self, *more: Any) -> str:
        """Return a hash of all that determines the kernels, and of something more."""
        frozen = [
            (path, name)
            for path, module in self.steps
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad
        ]
        drawn = [m.of(None) for m in (self._input_post, self._output_pre) if m is not None]
        digest = hashlib.sha256(
            str((self.steps, frozen, self.separate, self._whole, more)).encode()
        )
        for tensor in (self.x1, self._x2, *drawn):
            digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def block(self, rows: slice = slice(None), columns: slice = slice(None)) -> Kernels:
        """Return the kernels of some ``x1`` and some ``x2``."""
        x1, x2 = self.x1[rows], self._x2[columns]
        spans = rows.indices(self.shape[0]), columns.indices(self.shape[1])
        aligned = self.symmetric and spans[0] == spans[1]
        members = (slice(None),) * self._members
        variances = [
            [all_of_them[(*members, part)] for all_of_them in found]
            for found, part in zip(self._variances, (rows, columns), strict=True)
        ]
        inputs = self._modulated(x1), self._modulated(x2)
        state = self._run(*inputs, variances=variances, duals=self._duals, aligned=aligned)
        if self._input_post is not None and is_trainable(self._input_post):
            tangents = self._input_tangents(x1, x2)
            state = state.replace(individual=plus(tangents, state.individual))
        return self._kernels(state, symmetric=aligned)

    def _prepare(self, x: Tensor, name: str) -> Tensor:
        x = x.detach().to(self.dtype)
        for module in self._before:
            x = module(x)
        path, module = self.steps[0]
        layer = _layer_of(module)
        if layer is not module and not isinstance(module, (Modulated, Own)):
            return x  # a module with a rule of its own knows what it takes
        spatial = _pixel_axes(layer)
        expected = layer.in_channels if spatial else layer.in_features
        if x.dim() != 2 + spatial or x.shape[1] != expected:
            raise ValueError(
                f"{name} does not fit {describe(layer, path)}, which takes "
                f"(n, {expected}{', pixels' * spatial}); got {tuple(x.shape)}."
                + ("" if spatial or x.dim() == 2 else " Put nn.Flatten() before it.")
            )
        return x

    def _modulated(self, x: Tensor, u: Tensor | None = None) -> Tensor:
        """Return inputs times the drawn input modulations, members first, if there are any."""
        if self._input_post is None:
            return x
        u = self._input_post.of(None).to(x) if u is None else u
        return x * u.reshape(len(u), 1, u.shape[1], *(1,) * (x.dim() - 2))

    def _run(self, x1: Tensor, x2: Tensor, **options) -> State:
        drawn = self._input_post is not None
        state = State(
            Moments(None), inputs=(x1, x2), drawn=drawn, poolings=self._poolings, **options
        )
        for path, module in self.steps:
            state = propagate(module, state.replace(path=path))
        path, module = self.steps[-1]
        if not state.gaussian:
            raise TypeError(
                f"the network ends in {describe(module, path)}; in the limit it must end in a "
                f"Linear or a convolution, whose outputs are Gaussian. {MEASURE}"
            )
        if state.layout is None:
            return state
        if any(size != 1 for size in state.pixels):
            raise TypeError(
                f"the network ends in {describe(module, path)} with pixels {state.pixels} left; "
                "end it in nn.Flatten() and a Linear, after nn.AdaptiveAvgPool2d(1) if pixels are "
                "to be averaged."
            )
        axes = tuple(range(-state.spatial * (1 if state.layout == DIAGONAL else 2), 0))
        return state.map(lambda kernel: kernel.mean(axes))

    def _record(self, x: Tensor) -> list[Recorded]:
        """Return the variances of inputs at each activation, a few inputs at a time."""
        size = max(1, _RECORD_NUMBERS // self.numbers)
        records = []
        for rows in x.split(size, dim=self._members):
            records.append([])
            self._run(rows, rows, recording=records[-1], tracked=False)
        return [
            same[0]._replace(variances=torch.cat([r.variances for r in same], dim=self._members))
            for same in zip(*records, strict=True)
        ]

    def _input_tangents(self, x1: Tensor, x2: Tensor) -> Tensor:
        r"""Return the tangents of trainable input modulations.

        .. math:: \sum_c \partial_{u_c} \partial_{u'_c} \Sigma_{aa}(u \circ x, u' \circ x')

        is their mean over initialisations; with a finite number of inputs they don't concentrate.
        """
        assert self._input_post is not None
        load_rules_of_jvp()
        u = self._input_post.of(None).to(x1)

        def covariance(first: Tensor, second: Tensor) -> Tensor:
            inputs = self._modulated(x1, first), self._modulated(x2, second)
            variances = [[r.variances for r in self._record(x)] for x in inputs]
            found = self._run(*inputs, variances=variances, duals=self._duals, tracked=False)
            return found.covariance

        def slope(function: Callable[[Tensor], Tensor], direction: Tensor) -> Tensor:
            return torch.func.jvp(function, (u,), (direction,))[1]

        channels = torch.eye(self._input_post.size, dtype=u.dtype, device=u.device)
        channels = channels.repeat_interleave(self._input_post.repeat, dim=1)
        directions = [channel.expand_as(u) for channel in channels]
        return sum(slope(lambda a, d=d: slope(partial(covariance, a), d), d) for d in directions)  # type: ignore[return-value]

    def _kernels(self, state: State, *, symmetric: bool) -> Kernels:
        """Return what a state has come to; ``symmetric`` to the last bit where inputs are equal."""
        same, cross = state.same, state.crossed
        pairs = [(same.nngp, cross.nngp), (same.ntk, cross.ntk), (state.individual, None)]
        if self.separate:  # all that members have is their own
            pairs = [(same.ntk if self._whole else same.nngp, None), (None, None), (same.ntk, None)]
        result = []
        for within, between in pairs:
            within = constant(0.0, state.covariance) if within is None else within
            result.append(MemberKernel(within, zero_cross(within) if between is None else between))
        if self.conditional:
            result = self._conditional(result)
        if symmetric:
            result = [_symmetric(kernel) for kernel in result]
        return Kernels(*result)

    def _conditional(self, kernels: list[MemberKernel]) -> list[MemberKernel]:
        """Give kernels their member axes, multiply by drawn output modulations."""
        pre = self._output_pre
        members = (self._output_pre or self._input_post).members  # type: ignore[union-attr]
        weights = torch.ones(members, members, dtype=self.dtype, device=self.device)
        if pre is not None:
            v = pre.of(None).to(weights)
            weights = v @ v.mT / v.shape[1]  # the mean over outputs
        diagonal = torch.eye(members, dtype=torch.bool, device=self.device)[:, :, None, None]
        result = []
        for index, kernel in enumerate(kernels):
            same = weights.diagonal()[:, None, None] * kernel.same
            if index == 2 and pre is not None and is_trainable(pre):
                same = same + kernels[0].same
            cross = weights[:, :, None, None] * kernel.cross
            result.append(MemberKernel(same, torch.where(diagonal, same[:, None], cross)))
        return result


def _split(network: nn.Module) -> tuple[list[nn.Module], list[tuple[str, nn.Module]]]:
    """Return what works on the inputs alone, and the first layer with all that follows."""
    found = list(steps(network))
    layers = (i for i, (_, m) in enumerate(found) if has_rule(m) and _layer_of(m) is not None)
    first = next(layers, len(found))
    for i, (path, module) in enumerate(found):
        parameters = any(True for _ in module.parameters())
        if not has_rule(module) if i >= first else isinstance(module, _NormBase) or parameters:
            raise unknown(module, path)
    if first == len(found):
        raise TypeError(
            f"the network has no Linear or convolution: {network}. In the limit it must have one."
        )
    return [module for _, module in found[:first]], found[first:]


def _layer_of(module: nn.Module) -> Any:
    """Return the first Linear or convolution that a module is or holds."""
    return next((m for _, m in walk(module) if isinstance(m, nn.Linear | _ConvNd)), None)


def _pixel_axes(layer: nn.Module) -> int:
    return len(layer.kernel_size) if isinstance(layer, _ConvNd) else 0


def _check_inputs(name: str, x: Any) -> None:
    if not isinstance(x, Tensor) or x.is_complex():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a real tensor; got {got}. Use torch.as_tensor({name}).")
    if x.dim() < 2 or not x.numel():
        hint = f" For one input pass {name}[None]." if x.dim() == 1 and x.numel() else ""
        raise ValueError(
            f"{name} must hold at least one input, (n, features…); got {tuple(x.shape)}.{hint}"
        )
    if not torch.isfinite(x).all():
        raise ValueError(f"{name} holds values that are not finite; remove or replace them first.")


def _symmetric(kernel: MemberKernel) -> MemberKernel:
    """Return the kernel without the rounding that tells its two halves apart."""

    def mean(block: Tensor, mirrored: Tensor) -> Tensor:
        return (block + mirrored) / 2 if any(block.stride()) else block  # else one number for all

    same = mean(kernel.same, kernel.mT.same)
    alike = kernel.cross is kernel.same
    return MemberKernel(same, same if alike else mean(kernel.cross, kernel.mT.cross))
