r"""The infinite-width limit of an ensemble on some inputs.

A :class:`Limit` reads the plain reference and the specification of an ensemble. It passes every
input with itself through the rules of :mod:`embens.theory.recursion` once, which gives the
variances, and then computes any block of the kernels. :mod:`embens.theory.blocks` assembles the
blocks.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from embens.ensemble import EmbeddedEnsemble
from embens.theory.chain import (
    first_layer,
    is_chain,
    pixel_axes,
    require_separate_parameters,
    split_chain,
)
from embens.theory.conditions import Conditions
from embens.theory.ensembles import (
    data_flow,
    has_repeated_members,
    per_member,
    plain_reference,
)
from embens.theory.expectations import Dual
from embens.theory.kernel import Kernels, MemberKernel, zero_cross
from embens.theory.lookup import look_up  # noqa: F401 (registers a rule)
from embens.theory.moments import DIAGONAL, MEASURE, Pass, Recorded, State, describe
from embens.theory.normalisation import normalise  # noqa: F401 (registers rules)
from embens.theory.pixels import count_poolings
from embens.theory.placement import SHARED, Placement, find_placements
from embens.theory.recursion import propagate
from embens.theory.tensor_rules import mixes_pixels_anywhere
from embens.theory.walk import ALL_PAIRS, Walk, start_state

_RECORD_ENTRIES = 2**22  # entries of one kernel in the pass of every input with itself


class Limit:
    """An infinitely wide network or ensemble on some inputs; see :func:`embens.theory.kernels`.

    Args:
        ensemble: An ensemble, or a plain network.
        x1: Inputs, ``(n1, …)``.
        x2: Other inputs, ``(n2, …)``; None means ``x1``.
        dtype: ``torch.float64`` or ``torch.float32``.

    Attributes:
        walk: The traced graph; None for networks in ``nn.Sequential``.
        steps: Names and modules of the network, from the first layer on.
        x1: The inputs after the modules before the first layer.
        placements: Modulations and copies at each layer.
        separate: True if members are separate networks.
        conditional: True if kernels are conditional on drawn input or output modulations.
        symmetric: True if ``x1`` and ``x2`` are equal.
        shape: Number of inputs in both sets, ``(n1, n2)``.

    Raises:
        TypeError: If the limit of a module is not known, or an argument has a wrong type.
        ValueError: If inputs do not fit the network, or the limit does not exist.

    Example:
        >>> from embens import networks
        >>> limit = Limit(networks.mlp(2, 8, depth=1), torch.eye(2))
        >>> limit.shape, limit.block(rows=slice(0, 1)).nngp.same.shape
        ((2, 2), torch.Size([1, 2]))
        >>> len(limit.fingerprint())
        64
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
        _check_inputs("x1", x1)
        if x2 is not None:
            _check_inputs("x2", x2)
        self.dtype = dtype
        self.separate = False
        self.placements: dict[nn.Module, Placement] = {}
        network: nn.Module = ensemble
        if isinstance(ensemble, EmbeddedEnsemble):
            _require_limit(ensemble)
            self.separate = ensemble.spec.separate
            if self.separate:
                network = ensemble.member(0)
            else:
                network = plain_reference(ensemble)
                self.placements = find_placements(ensemble, network)
        self._read_network(network, x1[:1])
        first = last = SHARED
        if self.walk is None:
            first = self.placements.get(self.steps[0][1], SHARED)
            last = self.placements.get(self.steps[-1][1], SHARED)
        self._conditions = Conditions.of(ensemble, first.post, last.pre)
        self.conditional = self._conditions.exist
        self._member_axes = 0 if self._conditions.input_values is None else 1
        self._prepare_inputs(x1, x2)
        self._prepare_activations()

    def _read_network(self, network: nn.Module, example: Tensor) -> None:
        """List the layers of a chain, or trace the forward of other networks."""
        self.walk: Walk | None = None
        if is_chain(network):
            self._preprocessing, self.steps = split_chain(network)
            self._poolings = sum(count_poolings(module) for _, module in self.steps)
        else:
            self._preprocessing = []
            self.walk = Walk(network, example)
            self.steps = self.walk.layers
            mixes = mixes_pixels_anywhere(self.walk.nodes, network)
            self._poolings = ALL_PAIRS if mixes else 0
            self._require_hidden_modulations(network)
        require_separate_parameters(self.steps)

    def _require_hidden_modulations(self, network: nn.Module) -> None:
        """Raise where inputs or outputs of custom code are modulated."""
        flow = data_flow(network)
        for name, module in network.named_modules():
            placement = self.placements.get(module, SHARED)
            is_input = name in flow.first and placement.post is not None
            is_output = name in flow.last and placement.pre is not None
            if is_input or is_output:
                raise TypeError(
                    f"{describe(module, name)} has modulated inputs or outputs of the network, "
                    "whose limit is known for nn.Sequential only. Use sites='hidden'. " + MEASURE
                )

    def _prepare_inputs(self, x1: Tensor, x2: Tensor | None) -> None:
        self.symmetric = x2 is None or x2 is x1
        if x2 is not None and x2.shape == x1.shape:
            self.symmetric = self.symmetric or torch.equal(x1, x2)
        self.x1 = self._preprocess(x1, "x1")
        self._x2 = self.x1
        if x2 is not None and not self.symmetric:
            self._x2 = self._preprocess(x2, "x2")
        if self.x1.shape[1:] != self._x2.shape[1:]:
            raise ValueError(
                f"x1 and x2 must have the same features; got {tuple(self.x1.shape[1:])} and "
                f"{tuple(self._x2.shape[1:])}."
            )
        self.shape = len(self.x1), len(self._x2)

    @torch.no_grad()
    def _prepare_activations(self) -> None:
        """Record the variances of all inputs and prepare duals for them."""
        self._duals: list[Dual] = []
        record1 = self._record(self._conditions.modulate(self.x1))
        record2 = record1
        if not self.symmetric:
            record2 = self._record(self._conditions.modulate(self._x2))
        for first, second in zip(record1, record2, strict=True):
            largest = max(first.variances.max().item(), second.variances.max().item())
            self._duals.append(first.dual.prepare(largest or 1.0, first.law))
        self._variances = (
            [recorded.variances for recorded in record1],
            [recorded.variances for recorded in record2],
        )

    @property
    def device(self) -> torch.device:
        """Device on which kernels are computed."""
        return self.x1.device

    @property
    def pair_entries(self) -> int:
        """Number of entries that one pair of inputs has in the largest kernel of a layer."""
        if self.walk is not None:
            pixels = self.walk.largest_image
        else:
            spatial = pixel_axes(first_layer(self.steps[0][1]))
            pixels = self.x1.shape[2 : 2 + spatial].numel()
        entries = pixels**2 if self._poolings else pixels
        members = 1 if self._conditions.input_values is None else len(self._conditions.input_values)
        return members**2 * entries

    def fingerprint(self, *more: Any) -> str:
        """Return a hash of everything that determines the kernels.

        Args:
            *more: Further values to include, by their ``repr``.

        Returns:
            A hexadecimal string.
        """
        network = []
        for path, module in self.steps:
            frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
            placements = [self.placements.get(part, SHARED) for part in module.modules()]
            network.append((path, module, frozen, placements))
        if self.walk is not None:
            more = (*more, *(node.format_node() for node in self.walk.nodes))
        digest = hashlib.sha256(str((network, self.separate, more)).encode())
        for tensor in (
            self.x1,
            self._x2,
            self._conditions.input_values,
            self._conditions.output_values,
        ):
            if tensor is None:
                continue
            digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def block(self, rows: slice = slice(None), columns: slice = slice(None)) -> Kernels:
        """Return the kernels of some inputs.

        Args:
            rows: Slice of ``x1``.
            columns: Slice of ``x2``.

        Returns:
            Kernels with blocks ``(row, column)``; conditional ones have member axes before these.
        """
        x1 = self.x1[rows]
        x2 = self._x2[columns]
        same_rows = rows.indices(self.shape[0]) == columns.indices(self.shape[1])
        members = (slice(None),) * self._member_axes
        facts = self._facts(
            variances=(
                [variances[(*members, rows)] for variances in self._variances[0]],
                [variances[(*members, columns)] for variances in self._variances[1]],
            ),
            aligned=self.symmetric and same_rows,
        )
        state = self._run(self._conditions.modulate(x1), self._conditions.modulate(x2), facts)
        if self._conditions.input_post is not None and self._conditions.input_post.trainable:
            tangents = self._input_tangents(x1, x2)
            if state.individual is not None:
                tangents = tangents + state.individual
            state = state.replace(individual=tangents)
        return self._kernels(state, symmetric=facts.aligned)

    def _facts(self, **options: Any) -> Pass:
        return Pass(
            placements=self.placements,
            duals=self._duals,
            input_members=self._conditions.input_values is not None,
            **options,
        )

    def _preprocess(self, x: Tensor, name: str) -> Tensor:
        """Apply the modules before the first layer, and check the shape."""
        x = x.detach().to(self.dtype)
        for module in self._preprocessing:
            x = module(x)
        if self.walk is not None:
            return x
        path, module = self.steps[0]
        layer = first_layer(module)
        if layer is not module:
            return x  # a module with a user's rule knows which shapes it takes
        spatial = pixel_axes(layer)
        expected = layer.in_channels if spatial else layer.in_features
        if x.dim() == 2 + spatial and x.shape[1] == expected:
            return x
        hint = "" if spatial or x.dim() == 2 else " Put nn.Flatten() before it."
        raise ValueError(
            f"{name} does not fit {describe(layer, path)}, which takes "
            f"(n, {expected}{', pixels' * spatial}); got {tuple(x.shape)}.{hint}"
        )

    def _run(self, x1: Tensor, x2: Tensor, facts: Pass) -> State:
        """Pass inputs through all modules; return the state of the outputs, without pixels."""
        state = start_state((x1, x2), self._poolings, facts)
        if self.walk is not None:
            state = self.walk.run(state)
        else:
            for path, module in self.steps:
                state = propagate(module, state.replace(path=path))
        path, module = self.steps[-1]
        if not state.gaussian:
            raise TypeError(
                f"the network ends in {describe(module, path)}; in the limit it must end in a "
                f"Linear or a convolution, whose outputs are Gaussian. {MEASURE}"
            )
        if state.low_rank is not None or state.addends:
            raise TypeError(
                f"the last layer {describe(module, path)} has multiplicative low-rank members. "
                "Outputs are finitely many, so they are a mixture of Gaussians. Use sites= with "
                f"the names of hidden layers. {MEASURE}"
            )
        if state.layout is None:
            return state
        if any(size != 1 for size in state.pixels):
            raise TypeError(
                f"the network ends in {describe(module, path)} with pixels {state.pixels} left; "
                "end it in nn.Flatten() and a Linear, after nn.AdaptiveAvgPool2d(1) if pixels are "
                "to be averaged."
            )
        groups = 1 if state.layout == DIAGONAL else 2  # of pixel axes, all of size 1
        axes = tuple(range(-state.spatial * groups, 0))
        return state.map(lambda kernel: kernel.mean(axes))

    def _record(self, x: Tensor) -> list[Recorded]:
        """Return the variances of inputs at each activation, computed a few inputs at a time."""
        size = max(1, _RECORD_ENTRIES // self.pair_entries)
        parts: list[list[Recorded]] = []
        for inputs in x.split(size, dim=self._member_axes):
            recording: list[Recorded] = []
            facts = self._facts(recording=recording, tracked=False)
            self._run(inputs, inputs, facts)
            parts.append(recording)
        records = []
        for of_activation in zip(*parts, strict=True):
            chunks = [recorded.variances for recorded in of_activation]
            variances = torch.cat(chunks, dim=self._member_axes)
            records.append(of_activation[0]._replace(variances=variances))
        return records

    def _input_tangents(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Return the tangent kernel of trainable input modulations, ``(member, n1, n2)``."""
        modulate = self._conditions.modulate

        def covariance(u1: Tensor, u2: Tensor) -> Tensor:
            inputs1 = modulate(x1, u1)
            inputs2 = modulate(x2, u2)
            variances = (
                [recorded.variances for recorded in self._record(inputs1)],
                [recorded.variances for recorded in self._record(inputs2)],
            )
            facts = self._facts(variances=variances, tracked=False)
            return self._run(inputs1, inputs2, facts).covariance

        return self._conditions.input_tangents(covariance, like=x1)

    def _kernels(self, state: State, *, symmetric: bool) -> Kernels:
        """Return the kernels of the outputs; ``symmetric`` to the last bit for equal inputs."""
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        zero = zero.expand_as(state.covariance)
        same = state.same
        if self.separate:  # all parameters are individual, and nothing is shared
            nngp = _member_kernel(same.nngp, None, zero)
            shared = _member_kernel(None, None, zero)
            individual = _member_kernel(same.ntk, None, zero)
        else:
            cross = state.crossed
            nngp = _member_kernel(same.nngp, cross.nngp, zero)
            shared = _member_kernel(same.ntk, cross.ntk, zero)
            individual = _member_kernel(state.individual, None, zero)
        if self.conditional:
            nngp, shared, individual = self._conditions.apply(nngp, shared, individual)
        if symmetric:
            nngp = _symmetric(nngp)
            shared = _symmetric(shared)
            individual = _symmetric(individual)
        return Kernels(nngp, shared, individual)


def _require_limit(ensemble: EmbeddedEnsemble) -> None:
    """Raise where members are not independent draws of one initialisation."""
    if has_repeated_members(ensemble):
        raise ValueError(
            "some members of this ensemble are equal, so members are not exchangeable. Use the "
            "ensemble from which the subset was made."
        )
    if not ensemble.spec.separate:
        return
    for item in per_member(ensemble):
        if item.tensors and not item.drawn:
            raise ValueError(
                "the limit needs members that are independent draws of an initialisation; these "
                "are copies of given networks. Use embens.independent(reference, members)."
            )


def _check_inputs(name: str, x: Any) -> None:
    if not isinstance(x, Tensor) or x.is_complex():
        received = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"{name} must be a real tensor; got {received}. Use torch.as_tensor({name})."
        )
    if x.dim() < 2 or not x.numel():
        hint = ""
        if x.dim() == 1 and x.numel():
            hint = f" For one input pass {name}[None]."
        raise ValueError(
            f"{name} must hold at least one input, (n, features…); got {tuple(x.shape)}.{hint}"
        )
    if not torch.isfinite(x).all():
        raise ValueError(f"{name} holds values that are not finite; remove or replace them first.")


def _member_kernel(same: Tensor | None, cross: Tensor | None, zero: Tensor) -> MemberKernel:
    """Return a kernel with zeros in place of missing blocks."""
    if same is None:
        same = zero
    if cross is None:
        cross = zero_cross(same)
    return MemberKernel(same, cross)


def _symmetric(kernel: MemberKernel) -> MemberKernel:
    """Return the kernel without rounding differences between its two halves."""
    transposed = kernel.mT
    same = _mean(kernel.same, transposed.same)
    if kernel.cross is kernel.same:
        return MemberKernel(same, same)
    return MemberKernel(same, _mean(kernel.cross, transposed.cross))


def _mean(block: Tensor, mirrored: Tensor) -> Tensor:
    if not any(block.stride()):
        return block  # one value for all entries, which takes no memory
    return (block + mirrored) / 2
