r"""Empirical tangent kernels of a network of finite width.

.. math::
    \Theta^{com}_{ab}(x, x') = \sum_w \frac{\partial f_a(x)}{\partial w}
        \frac{\partial f_b(x')}{\partial w}, \qquad
    \Theta^{ind}_a(x, x') = \sum_{u_a} \frac{\partial f_a(x)}{\partial u_a}
        \frac{\partial f_a(x')}{\partial u_a}

The sums run over the trainable shared parameters :math:`w` and individual parameters :math:`u_a`,
without learning rates and without the gradient scale :math:`\gamma`.

Members run as plain networks (``recording``). The kernel is the sum over parameters of the Gram
matrices of their per-sample gradients (``grams``). Samples run in chunks that fit into memory, and
a symmetric kernel computes only its upper half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from embens.checks import check_choice, check_whole, short_repr
from embens.ensemble import EmbeddedEnsemble
from embens.finite.arguments import Inputs, as_inputs, check_measurement
from embens.finite.grams import SampleGradients, contract
from embens.finite.recording import Recorder, Recording, Samples
from embens.finite.values import with_fixed_masks
from embens.optim import Gamma, gradient_factor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Outputs = Literal["all", "trace", "target", "nll"]
Blocks = dict[tuple[int, int], Tensor]

PASS_BYTES = 2**29
"""Memory for one chunk of samples of all members, if no chunk size is given."""


@dataclass(frozen=True)
class FiniteKernel:
    r"""Tangent kernel of a network of finite width.

    Attributes:
        shared: :math:`\Theta^{com}`, ``(member, member, batch, batch[, class, class])``.
        individual: :math:`\Theta^{ind}`, ``(member, batch, batch[, class, class])``.
        natural_gamma: The ensemble's default gradient scale.

    Example:
        >>> kernel = FiniteKernel(torch.ones(3, 3, 5, 5), torch.zeros(3, 5, 5))
        >>> kernel.members, kernel.same.shape
        (3, torch.Size([3, 5, 5]))
    """

    shared: Float[Tensor, "m m n1 n2 *classes"]
    individual: Float[Tensor, "m n1 n2 *classes"]
    natural_gamma: float = 1.0
    __repr__ = short_repr

    @property
    def members(self) -> int:
        """The number of members."""
        return len(self.shared)

    @property
    def same(self) -> Float[Tensor, "m n1 n2 *classes"]:
        """The shared part within each member."""
        members = range(self.members)
        return self.shared[members, members]

    def ntk(self, gamma: Gamma = None) -> Float[Tensor, "m m n1 n2 *classes"]:
        r"""Return :math:`\frac{\gamma}{M} \Theta^{com}_{ab} + \delta_{ab} \Theta^{ind}_a`.

        Gradient descent with the gradient scale ``gamma`` follows this kernel.

        Args:
            gamma: A number, a function of the number of members, or None for the natural one.

        Returns:
            The kernel between all members, ``(member, member, batch, batch[, class, class])``.

        Example:
            >>> kernel = FiniteKernel(torch.ones(2, 2, 1, 1), torch.ones(2, 1, 1))
            >>> kernel.ntk(gamma=2.0)[:, :, 0, 0]
            tensor([[2., 1.],
                    [1., 2.]])
        """
        factor = gradient_factor(gamma, self.members, self.natural_gamma)
        result = factor * self.shared
        members = range(self.members)
        result[members, members] += self.individual
        return result

    def to(self, *args: Any, **kwargs: Any) -> FiniteKernel:
        """Return the kernel with another dtype or on another device.

        Args:
            *args: As for ``torch.Tensor.to``.
            **kwargs: As for ``torch.Tensor.to``.

        Returns:
            A kernel with blocks of the same shapes.

        Example:
            >>> kernel = FiniteKernel(torch.ones(2, 2, 1, 1), torch.ones(2, 1, 1))
            >>> kernel.to(torch.float64).shared.dtype
            torch.float64
        """
        shared = self.shared.to(*args, **kwargs)
        individual = self.individual.to(*args, **kwargs)
        return FiniteKernel(shared, individual, self.natural_gamma)


def ntk(
    ensemble: EmbeddedEnsemble,
    x1: Tensor | Inputs,
    x2: Tensor | Inputs | None = None,
    *,
    outputs: Outputs = "all",
    target: Int[Tensor, " n1"] | None = None,
    target2: Int[Tensor, " n2"] | None = None,
    chunk: int | None = None,
) -> FiniteKernel:
    r"""Return the empirical tangent kernel of an ensemble.

    Args:
        ensemble: Any ensemble, used in its current mode. Batch statistics and random layers need
            ``ensemble.eval()``. Fresh masks are drawn once.
        x1: Samples along the first axis, or a tuple of such tensors for several arguments.
        x2: Other samples; None: the symmetric kernel of ``x1`` with itself.
        outputs: ``"all"`` pairs of outputs :math:`\Theta_{kk'}`; their ``"trace"``
            :math:`\sum_k \Theta_{kk}`; :math:`\Theta_{y(x) y(x')}` of the ``"target"`` class; or
            the kernel of the loss :math:`-\log p_{y(x)}(x)` (``"nll"``). Axes after the batch
            count as classes.
        target: The classes of ``x1``, for ``"target"`` and ``"nll"``.
        target2: The classes of ``x2``.
        chunk: The number of samples that run at once. It bounds the memory and does not change the
            result beyond rounding. None: chosen from the size of the network.

    Returns:
        A kernel with ``shared``, ``(member, member, batch, batch)``, and ``individual``,
        ``(member, batch, batch)``; ``"all"`` has two more class axes.

    Raises:
        ValueError: If a sample's output depends on other samples, or the target does not fit.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> ensemble = batch_ensemble(networks.mlp(inputs=4, width=8, depth=2), members=3)
        >>> kernel = ntk(ensemble, torch.ones(5, 4), outputs="trace")
        >>> kernel.shared.shape, kernel.individual.shape
        (torch.Size([3, 3, 5, 5]), torch.Size([3, 5, 5]))
    """
    check_measurement(ensemble, x1)
    check_choice("outputs", outputs, get_args(Outputs))
    row_inputs = as_inputs(x1, "x1")
    row_target = _check_target(outputs, target, len(row_inputs[0]), "target")
    row_samples = Samples(row_inputs, row_target)
    column_samples = None
    if x2 is not None:
        column_inputs = as_inputs(x2, "x2")
        column_target = _check_target(outputs, target2, len(column_inputs[0]), "target2")
        column_samples = Samples(column_inputs, column_target)
    elif target2 is not None:
        raise ValueError("target2 belongs to x2, got target2 without x2. Leave it out.")
    computation = KernelComputation(with_fixed_masks(ensemble), outputs)
    return computation.kernel(row_samples, column_samples, chunk)


def _check_target(outputs: Outputs, target: Tensor | None, count: int, name: str) -> Tensor | None:
    if outputs in ("all", "trace"):
        if target is None:
            return None
        raise ValueError(
            f"outputs={outputs!r} uses no target, got {name}. Leave it out, or choose "
            "outputs='target' or 'nll'."
        )
    if target is None:
        raise ValueError(
            f"outputs={outputs!r} needs {name}=, the class of each of {count} samples."
        )
    target = torch.as_tensor(target)
    if target.shape == (count, 1):
        target = target[:, 0]
    if target.shape != (count,) or target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(
            f"{name} must hold an integer class for each of {count} samples, got shape "
            f"{tuple(target.shape)} of {target.dtype}."
        )
    return target.long()


class KernelComputation:
    """The computation of one kernel, block of samples by block of samples.

    Args:
        ensemble: An ensemble without fresh masks.
        outputs: As for :func:`ntk`.
    """

    def __init__(self, ensemble: EmbeddedEnsemble, outputs: Outputs):
        self.ensemble = ensemble
        self.outputs = outputs
        self.recorder = Recorder(ensemble)
        self._classes = 1  # that are contracted, in all
        self._classes_at_once = 1  # that are in memory together

    def kernel(
        self,
        row_samples: Samples,
        column_samples: Samples | None,
        chunk: int | None,
    ) -> FiniteKernel:
        """Return the kernel between two sets of samples.

        Args:
            row_samples: The samples of the rows.
            column_samples: The samples of the columns; None: those of the rows.
            chunk: The number of samples that run at once; None: chosen.
        """
        with torch.no_grad():
            self.recorder.survey(_first_and_last(row_samples, column_samples))
            if self.outputs in ("all", "trace"):
                self._classes = self.recorder.classes
            if self.outputs == "all":
                self._classes_at_once = self._classes
            size = self._chunk_size(chunk)
            shared, individual = self._all_blocks(row_samples, column_samples, size)
        if self.outputs != "all":
            shared = shared[..., 0, 0]
            individual = individual[..., 0, 0]
        return FiniteKernel(shared, individual, self.ensemble.natural_gamma)

    def _chunk_size(self, chunk: int | None) -> int:
        if chunk is not None:
            return check_whole("chunk", chunk)
        # About eight copies of the factors exist at a time; explicit gradients on both sides.
        explicit = sum(p.numel() * p.element_size() for p in self.recorder.general.values())
        sample_bytes = 8 * self.recorder.size + 2 * self._classes_at_once * explicit
        return max(1, PASS_BYTES // max(1, sample_bytes * self.ensemble.members))

    def _all_blocks(
        self,
        row_samples: Samples,
        column_samples: Samples | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        """Return both parts of the kernel, always with class axes."""
        row_chunks = row_samples.split(chunk)
        column_chunks = row_chunks
        if column_samples is not None:
            column_chunks = column_samples.split(chunk)
        blocks: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for i, row_chunk in enumerate(row_chunks):
            rows = self.recorder.record(row_chunk)
            for j, column_chunk in enumerate(column_chunks):
                if column_samples is not None or j > i:
                    columns = self.recorder.record(column_chunk)
                    blocks[i, j] = self._block(rows, columns)
                elif j == i:
                    blocks[i, j] = self._block(rows, None)
                else:
                    blocks[i, j] = _transpose_block(*blocks[j, i])
        shared = {place: block[0] for place, block in blocks.items()}
        individual = {place: block[1] for place, block in blocks.items()}
        counts = len(row_chunks), len(column_chunks)
        return _join_blocks(shared, *counts), _join_blocks(individual, *counts)

    def _block(self, first: Recording, second: Recording | None) -> tuple[Tensor, Tensor]:
        """Return the shared and the individual part for two chunks of samples.

        Args:
            first: The samples of the rows.
            second: The samples of the columns; None: the same.
        """
        members = self.ensemble.members
        classes = self._classes_at_once
        rows = len(first.samples)
        columns = rows if second is None else len(second.samples)
        zeros = first.outputs[0].detach().new_zeros
        shared = zeros(members * rows * classes, members * columns * classes)
        individual = zeros(members, rows * classes, columns * classes)
        for start in range(0, self._classes, classes):
            part = range(start, start + classes)
            row_gradients = self._gradients(first, part)
            column_gradients = None if second is None else self._gradients(second, part)
            self._add_grams(shared, individual, row_gradients, column_gradients)
        shared = shared.view(members, rows, classes, members, columns, classes)
        individual = individual.view(members, rows, classes, columns, classes)
        return shared.permute(0, 3, 1, 4, 2, 5), individual.transpose(2, 3)

    def _add_grams(
        self,
        shared: Tensor,
        individual: Tensor,
        row_gradients: SampleGradients,
        column_gradients: SampleGradients | None,
    ) -> None:
        """Add the Gram matrices of all parameters, and free the memory of their gradients."""
        for key in row_gradients.parameter_keys():
            if key not in self.recorder.individual:
                shared += contract(key, row_gradients, column_gradients)
            elif column_gradients is None:
                for a in range(self.ensemble.members):
                    individual[a] += contract(key, row_gradients.member(a))
            else:
                for a in range(self.ensemble.members):
                    individual[a] += contract(
                        key, row_gradients.member(a), column_gradients.member(a)
                    )
            row_gradients.discard(key)
            if column_gradients is not None:
                column_gradients.discard(key)

    def _gradients(self, recording: Recording, classes: range) -> SampleGradients:
        cotangents = []
        for output in recording.outputs:
            cotangent = self._cotangents(output, recording.samples.target, classes)
            cotangents.append(cotangent)
        return self.recorder.gradients(recording, cotangents)

    def _cotangents(self, output: Tensor, target: Tensor | None, classes: range) -> Tensor:
        """Return the derivative of the kernel's function by the outputs, ``(class, batch, ...)``.

        Args:
            output: The output of one member.
            target: The classes of the samples, for "target" and "nll".
            classes: The outputs to differentiate, for "all" and "trace".
        """
        values = output.detach()
        if target is None:
            unit_vectors = values.new_zeros(len(classes), values[0].numel())
            unit_vectors[range(len(classes)), classes] = 1.0
            unit_vectors = unit_vectors.view(len(classes), 1, *values.shape[1:])
            return unit_vectors.expand(-1, *values.shape)
        if values.dim() != 2:
            raise ValueError(
                f"outputs={self.outputs!r} is for classification, with outputs (batch, class), got "
                f"outputs of shape {tuple(values.shape)}. Use 'all' or 'trace'."
            )
        smallest, largest = int(target.min()), int(target.max())
        if smallest < 0 or largest >= values.shape[1]:
            raise ValueError(
                f"target has classes from {smallest} to {largest}, but the outputs have "
                f"{values.shape[1]} classes, counted from 0."
            )
        one_hot = F.one_hot(target, values.shape[1]).to(values.dtype)
        if self.outputs == "target":
            return one_hot[None]
        return (values.softmax(1) - one_hot)[None]


def _transpose_block(shared: Tensor, individual: Tensor) -> tuple[Tensor, Tensor]:
    """Exchange both members, both samples and both classes of a block."""
    return shared.permute(1, 0, 3, 2, 5, 4), individual.permute(0, 2, 1, 4, 3)


def _join_blocks(blocks: Blocks, rows: int, columns: int) -> Tensor:
    """Concatenate blocks ``(…, batch, batch, class, class)`` along both batch axes."""
    bands = []
    for i in range(rows):
        band = [blocks[i, j] for j in range(columns)]
        bands.append(torch.cat(band, -3))
    return torch.cat(bands, -4)


def _first_and_last(row_samples: Samples, column_samples: Samples | None) -> Inputs:
    """Return two samples that are likely to differ."""
    first = row_samples.inputs
    last = first if column_samples is None else column_samples.inputs
    for x, y in zip(first, last, strict=True):
        if x.shape[1:] != y.shape[1:] or x.dtype != y.dtype:
            last = first
            break
    pairs = []
    for x, y in zip(first, last, strict=True):
        pairs.append(torch.cat([x[:1], y[-1:]]))
    return tuple(pairs)
