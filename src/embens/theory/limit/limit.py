r"""The infinite-width limit of an ensemble, read off the module that ``embed`` made.

A :class:`Limit` prepares a network and inputs once (the pass of every input with itself, which
gives the variances) and then computes any block of the kernels; ``blocks`` puts them together.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.layers import Modulated, Modulation, Once, Own
from embens.theory.kernel import Kernels, MemberKernel, zero_cross
from embens.theory.limit import convolution
from embens.theory.limit.rules import is_trainable, propagate
from embens.theory.limit.state import DIAGONAL, Side, State, Tape, describe

Step = tuple[str, nn.Module]


class Limit:
    """An infinitely wide network or ensemble on some inputs.

    Args:
        ensemble: what ``embed`` and the families return; a plain network is an ensemble whose
            members are all equal. The widths of its layers don't matter.
        x1: inputs, ``(n1, …)``.
        x2: other inputs; None: the same.
        dtype: of all computations.

    Attributes:
        conditional: whether kernels have member axes; see :class:`~embens.theory.MemberKernel`.
        shape: ``(n1, n2)``.
        symmetric: whether ``x2`` is ``x1``.
    """

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
        for name, x in (("x1", x1), ("x2", x2)):
            if name == "x1" or x is not None:
                _check_inputs(name, x)
        network = ensemble.network if isinstance(ensemble, EmbeddedEnsemble) else ensemble
        self.separate = isinstance(network, Own)
        if isinstance(network, Own):
            network = network.plain(0, {})
        steps = list(_steps(network))
        first = next((i for i, (_, m) in enumerate(steps) if _starts(m)), None)
        if first is None:
            raise TypeError(
                "the network has no Linear or convolution that can be read: expected nn.Sequential "
                f"of layers and activations, got {type(network).__name__}. Give "
                f"{_containers(steps)} a rule with embens.theory.propagate.register."
            )
        self._before, self._steps = steps[:first], steps[first:]
        self._poolings = convolution.count_poolings(nn.ModuleList([m for _, m in self._steps]))
        self.dtype = dtype
        self.symmetric = x2 is None or x2 is x1 or (x2.shape == x1.shape and torch.equal(x1, x2))
        self._x1 = self._prepare(x1, "x1")
        self._x2 = self._x1 if self.symmetric else self._prepare(x2, "x2")  # type: ignore[arg-type]
        if self._x1.shape[1:] != self._x2.shape[1:]:
            raise ValueError(
                f"x1 and x2 must have the same features; got {tuple(x1.shape[1:])} and "
                f"{tuple(x2.shape[1:])}."  # type: ignore[union-attr]
            )
        self.shape = len(self._x1), len(self._x2)
        self._input_post = _modulation(self._steps[0][1], "post")
        self._output_pre = _modulation(self._steps[-1][1], "pre")
        self.conditional = self._input_post is not None or self._output_pre is not None
        self._members = int(self._input_post is not None)  # member axes while propagating
        with torch.no_grad():
            tape1 = self._record(self._modulated(self._x1))
            tape2 = tape1 if self.symmetric else self._record(self._modulated(self._x2))
            self._tapes = _prepared(tape1, tape2)

    def description(self) -> list[str]:
        """Return texts that, with :meth:`tensors`, say all that determines the kernels."""
        frozen = [
            f"{path} {name}"
            for path, module in self._steps
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad
        ]
        return [str((path, repr(m))) for path, m in self._steps] + frozen + [str(self.separate)]

    def tensors(self) -> list[Tensor]:
        """Return inputs and drawn modulations that kernels depend on."""
        drawn = [m.of(None) for m in (self._input_post, self._output_pre) if m is not None]
        return [self._x1, self._x2, *drawn]

    # Inputs

    def _prepare(self, x: Tensor, name: str) -> Tensor:
        """Return inputs as the first layer sees them."""
        x = x.detach().to(self.dtype)
        for path, module in self._before:
            if any(True for _ in module.parameters()):
                raise TypeError(
                    f"{describe(module, path)} comes before the first Linear or convolution and "
                    "has parameters of its own, so the inputs of that layer are random. If it is "
                    "or holds that first layer, register a rule for it with "
                    "embens.theory.propagate.register."
                )
            x = module(x)
        path, module = self._steps[0]
        layer = _layer(module)
        if layer is None:  # a module with a rule of its own knows what it takes
            return x
        spatial = len(layer.kernel_size) if isinstance(layer, _ConvNd) else 0
        expected = layer.in_channels if isinstance(layer, _ConvNd) else layer.in_features
        if x.dim() != 2 + spatial or x.shape[1] != expected:
            pixels = ", pixels" * spatial
            raise ValueError(
                f"{name} does not fit {describe(layer, path)}, which takes "
                f"(n, {expected}{pixels}); got {tuple(x.shape)}."
                + ("" if spatial or x.dim() == 2 else " Put nn.Flatten() before it.")
            )
        return x

    def _modulated(self, x: Tensor) -> Tensor:
        """Return inputs times the drawn input modulations, members first, if there are any."""
        if self._input_post is None:
            return x
        u = self._input_post.of(None).to(x)
        return x * u.reshape(len(u), 1, u.shape[1], *(1,) * (x.dim() - 2))

    # Passes

    def _run(self, state: State) -> State:
        for path, module in self._steps:
            state = propagate(module, state.replace(path=path))
        return state.replace(path="")

    def _state(self, x1: Tensor, x2: Tensor, **options) -> State:
        nothing = Side(None, None)
        return State(
            nothing,
            nothing,
            inputs=(x1, x2),
            drawn=self._input_post is not None,
            poolings=self._poolings,
            **options,
        )

    def _record(self, x: Tensor) -> Tape:
        """Return the variances of inputs at each activation, a few inputs at a time."""
        axis = self._members
        size = max(1, _RECORD_NUMBERS // max(1, self._numbers(x)))
        tapes = []
        for rows in x.split(size, dim=axis):
            tape = Tape()
            self._finish(self._run(self._state(rows, rows, recording=tape, tracked=False)))
            tapes.append(tape)
        parts = zip(*(tape.variances for tape in tapes), strict=True)
        merged = [torch.cat(part, dim=axis) for part in parts]
        return Tape(merged, tapes[0].duals, tapes[0].laws)

    def _numbers(self, x: Tensor) -> int:
        """Return how many numbers one pair of inputs has in a kernel."""
        layer = _layer(self._steps[0][1])
        if layer is None:
            layer = next((m for m in self._steps[0][1].modules() if isinstance(m, LAYERS)), None)
        spatial = len(layer.kernel_size) if isinstance(layer, _ConvNd) else 0
        pixels = x.shape[x.dim() - spatial :].numel() if spatial else 1
        members = len(x) if self._members else 1
        return pixels ** (2 if self._poolings else 1) * members

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._x1.device

    @property
    def numbers(self) -> int:
        """How many numbers one pair of inputs has in the largest kernel on the way."""
        x = self._modulated(self._x1[:1])
        return self._numbers(x) * (len(x) if self._members else 1)

    @torch.no_grad()
    def block(self, rows: slice = slice(None), columns: slice = slice(None)) -> Kernels:
        """Return the kernels of some ``x1`` and some ``x2``."""
        axis = self._members
        x1, x2 = self._modulated(self._x1[rows]), self._modulated(self._x2[columns])
        tapes = self._tapes[0].rows(rows, axis), self._tapes[1].rows(columns, axis)
        spans = rows.indices(self.shape[0]), columns.indices(self.shape[1])
        aligned = self.symmetric and spans[0] == spans[1]
        state = self._finish(self._run(self._state(x1, x2, tapes=tapes, aligned=aligned)))
        if self._input_post is not None and is_trainable(self._input_post):
            state = self._with_input_tangents(state, rows, columns)
        return self._kernels(state, symmetric=aligned)

    def _finish(self, state: State) -> State:
        path, module = self._steps[-1]
        if not state.gaussian:
            raise TypeError(
                f"the network ends in {describe(module, path)}; in the limit it must end in a "
                "Linear or a convolution, whose outputs are Gaussian."
            )
        if state.layout is not None:
            kernel = state.same.nngp
            assert kernel is not None
            if any(size != 1 for size in kernel.shape[-state.spatial :]):
                raise TypeError(
                    f"the network ends in {describe(module, path)} with pixels "
                    f"{tuple(kernel.shape[-state.spatial :])} left; end it in nn.Flatten() and a "
                    "Linear, after nn.AdaptiveAvgPool2d(1) if pixels are to be averaged."
                )
            axes = tuple(range(-state.spatial * (1 if state.layout == DIAGONAL else 2), 0))
            state = state.map(lambda kernel: kernel.mean(axes)).replace(layout=None, spatial=0)
        return state

    # Input and output modulations

    def _with_input_tangents(self, state: State, rows: slice, columns: slice) -> State:
        r"""Add the tangents of trainable input modulations.

        .. math:: \sum_c \partial_{u_c} \partial_{u'_c} \Sigma_{aa}(u \circ x, u' \circ x')

        is their mean over initialisations; with a finite number of inputs they don't concentrate.
        """
        assert self._input_post is not None
        _load_rules_of_jvp()
        x1, x2 = self._x1[rows], self._x2[columns]
        u = self._input_post.of(None).to(x1)
        shape = (-1, *(1,) * (x1.dim() - 2))
        size = self._input_post.size

        def covariance(first: Tensor, second: Tensor) -> Tensor:
            a, b = x1 * first.reshape(shape), x2 * second.reshape(shape)
            tapes = []
            for x in (a, b):
                tape = Tape()
                self._run(self._state(x, x, recording=tape, tracked=False))
                tapes.append(tape)
            result = self._run(self._state(a, b, tapes=tuple(tapes), tracked=False))
            assert result.same.nngp is not None
            return self._finish(result).same.nngp  # type: ignore[return-value]

        total = []
        for numbers in u:
            sums = torch.zeros(x1.shape[0], x2.shape[0], dtype=x1.dtype, device=x1.device)
            for c in range(size):
                direction = torch.zeros(size, dtype=u.dtype, device=u.device)
                direction[c] = 1
                direction = direction.repeat_interleave(self._input_post.repeat)

                def inner(first: Tensor, numbers=numbers, direction=direction) -> Tensor:
                    return torch.func.jvp(
                        lambda second: covariance(first, second), (numbers,), (direction,)
                    )[1]

                sums += torch.func.jvp(inner, (numbers,), (direction,))[1]
            total.append(sums)
        tangents = torch.stack(total)
        individual = state.individual
        return state.replace(individual=tangents if individual is None else individual + tangents)

    def _kernels(self, state: State, *, symmetric: bool) -> Kernels:
        """Return what a state has come to; ``symmetric`` to the last bit where inputs are equal."""
        same, cross = state.same, state.crossed
        pairs = [(same.nngp, cross.nngp), (same.ntk, cross.ntk), (state.individual, None)]
        if self.separate:  # all that members have is their own
            pairs = [(same.nngp, None), (None, None), (same.ntk, None)]
        nothing = torch.zeros((), dtype=self.dtype, device=self.device).expand(same.nngp.shape)  # type: ignore[union-attr]
        result = []
        for within, between in pairs:
            within = nothing if within is None else within
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
        weights = torch.ones(members, members, dtype=self.dtype, device=kernels[0].same.device)
        if pre is not None:
            v = pre.of(None).to(weights)
            weights = v @ v.mT / v.shape[1]  # the mean over outputs
        diagonal = torch.eye(members, dtype=torch.bool, device=weights.device)[:, :, None, None]
        result = []
        for index, kernel in enumerate(kernels):
            same = weights.diagonal()[:, None, None] * kernel.same
            if index == 2 and pre is not None and is_trainable(pre):
                same = same + kernels[0].same
            cross = weights[:, :, None, None] * kernel.cross
            result.append(MemberKernel(same, torch.where(diagonal, same[:, None], cross)))
        return result


_RECORD_NUMBERS = 2**22


def _check_inputs(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name} must be a tensor; got {type(x).__name__}. Use torch.as_tensor({name})."
        )
    if x.is_complex():
        raise TypeError(f"{name} must be real; got {x.dtype}.")
    if x.dim() < 2 or not x.numel():
        hint = f" For one input pass {name}[None]." if x.dim() == 1 and x.numel() else ""
        raise ValueError(
            f"{name} must hold at least one input, (n, features…); got {tuple(x.shape)}.{hint}"
        )
    if not torch.isfinite(x).all():
        raise ValueError(f"{name} holds values that are not finite; remove or replace them first.")


def _prepared(first: Tape, second: Tape) -> tuple[Tape, Tape]:
    """Return the tapes with their activations made ready for the variances on both."""
    ready = []
    for i, (dual, law) in enumerate(zip(first.duals, first.laws, strict=True)):
        both = (first.variances[i], second.variances[i])
        low, high = (min(v.min() for v in both), max(v.max() for v in both))
        ready.append(dual.prepare(low.item(), high.item(), law))
    return tuple(Tape(t.variances, ready, t.laws) for t in (first, second))  # type: ignore[return-value]


def _symmetric(kernel: MemberKernel) -> MemberKernel:
    """Return the kernel without the rounding that tells its two halves apart."""
    mirrored = kernel.mT
    same = (kernel.same + mirrored.same) / 2 if any(kernel.same.stride()) else kernel.same
    if kernel.cross is kernel.same:
        return MemberKernel(same, same)
    if not any(kernel.cross.stride()):  # one number for all
        return MemberKernel(same, kernel.cross)
    return MemberKernel(same, (kernel.cross + mirrored.cross) / 2)


@cache
def _load_rules_of_jvp() -> None:
    """Import what torch.func.jvp imports at its first call, without its deprecation warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.func.jvp(torch.sqrt, (torch.ones(()),), (torch.ones(()),))
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def _steps(module: nn.Module, path: str = "") -> Iterator[Step]:
    """Yield the modules of nested sequences in their order."""
    if isinstance(module, Once):
        yield from _steps(module.module, path)
    elif type(module) is nn.Sequential:
        for name, child in module.named_children():
            yield from _steps(child, f"{path}.{name}" if path else name)
    else:
        yield path, module


LAYERS = (nn.Linear, _ConvNd)


def _layer(module: nn.Module) -> nn.Module | None:
    layer = module.plain_layer if isinstance(module, Modulated) else module
    return layer if isinstance(layer, LAYERS) else None


def _starts(module: nn.Module) -> bool:
    """Whether a module is the first layer, or has a rule and holds it."""
    if _layer(module) is not None:
        return True
    ruled = propagate.dispatch(type(module)) is not propagate.dispatch(nn.Module)
    return ruled and any(isinstance(m, LAYERS) for m in module.modules())


def _containers(steps: list[Step]) -> str:
    names = [describe(m, path) for path, m in steps if any(True for _ in m.parameters())]
    return names[0] if names else "your module"


def _modulation(module: nn.Module, kind: str) -> Modulation | None:
    return getattr(module, kind) if isinstance(module, Modulated) else None
