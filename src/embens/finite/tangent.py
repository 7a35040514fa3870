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

PASS_BYTES = 2**29
"""Memory for one chunk of samples of all members, if no chunk size is given."""


@dataclass(frozen=True)
class FiniteKernel:
    r"""Tangent kernel of a network of finite width.

    Attributes:
        shared: :math:`\Theta^{com}`, ``(member, member, batch, batch[, class, class])``.
        individual: :math:`\Theta^{ind}`, ``(member, batch, batch[, class, class])``.
        natural_gamma: the ensemble's default gradient scale.
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
            gamma: a number, a function of the number of members, or None for the natural one.

        Returns:
            The kernel between all members, ``(member, member, batch, batch[, class, class])``.

        Example:
            >>> kernel = FiniteKernel(torch.ones(2, 2, 1, 1), torch.ones(2, 1, 1))
            >>> kernel.ntk(gamma=2.0)[:, :, 0, 0]
            tensor([[2., 1.],
                    [1., 2.]])
        """
        result = gradient_factor(gamma, self.members, self.natural_gamma) * self.shared
        members = range(self.members)
        result[members, members] += self.individual
        return result

    def to(self, *args: Any, **kwargs: Any) -> FiniteKernel:
        """Return the kernel with another dtype or on another device.

        Args:
            *args: as for ``torch.Tensor.to``.
            **kwargs: as for ``torch.Tensor.to``.

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
        ensemble: any ensemble, used in its current mode. Batch statistics and random layers need
            ``ensemble.eval()``. Fresh masks are drawn once.
        x1: samples along the first axis, or a tuple of such tensors for several arguments.
        x2: other samples; None: the symmetric kernel of ``x1`` with itself.
        outputs: ``"all"`` pairs of outputs :math:`\Theta_{kk'}`; their ``"trace"``
            :math:`\sum_k \Theta_{kk}`; :math:`\Theta_{y(x) y(x')}` of the ``"target"`` class; or
            the kernel of the loss :math:`-\log p_{y(x)}(x)` (``"nll"``). Axes after the batch
            count as classes.
        target: the classes of ``x1``, for ``"target"`` and ``"nll"``.
        target2: the classes of ``x2``.
        chunk: the number of samples that run at once. It bounds the memory and does not change the
            result beyond rounding. None: chosen from the size of the network.

    Returns:
        A kernel with ``shared``, ``(member, member, batch, batch)``, and ``individual``,
        ``(member, batch, batch)``; ``"all"`` has two more class axes.

    Raises:
        ValueError: if a sample's output depends on other samples, or the target does not fit.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> ensemble = batch_ensemble(networks.mlp(inputs=4, width=8, depth=2), members=3)
        >>> kernel = ntk(ensemble, torch.ones(5, 4), outputs="trace")
        >>> kernel.shared.shape, kernel.individual.shape
        (torch.Size([3, 3, 5, 5]), torch.Size([3, 5, 5]))
    """
    check_measurement(ensemble, x1)
    check_choice("outputs", outputs, get_args(Outputs))
    left = Samples(as_inputs(x1, "x1"))
    left = Samples(left.inputs, _check_target(outputs, target, len(left), "target"))
    right = None
    if x2 is not None:
        right = Samples(as_inputs(x2, "x2"))
        right = Samples(right.inputs, _check_target(outputs, target2, len(right), "target2"))
    elif target2 is not None:
        raise ValueError("target2 belongs to x2, got target2 without x2. Leave it out.")
    return KernelComputation(with_fixed_masks(ensemble), outputs).kernel(left, right, chunk)


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
        ensemble: an ensemble without fresh masks.
        outputs: as for :func:`ntk`.
    """

    def __init__(self, ensemble: EmbeddedEnsemble, outputs: Outputs):
        self.ensemble = ensemble
        self.outputs = outputs
        self.recorder = Recorder(ensemble)
        self._classes = 1  # that are contracted, in all
        self._classes_at_once = 1  # that are in memory together

    def kernel(self, left: Samples, right: Samples | None, chunk: int | None) -> FiniteKernel:
        """Return the kernel between two sets of samples, or of one set with itself."""
        with torch.no_grad():
            self.recorder.survey(_first_and_last(left, right))
            if self.outputs in ("all", "trace"):
                self._classes = self.recorder.classes
            if self.outputs == "all":
                self._classes_at_once = self._classes
            shared, individual = self._all_blocks(left, right, self._chunk_size(chunk))
        if self.outputs != "all":
            shared, individual = shared[..., 0, 0], individual[..., 0, 0]
        return FiniteKernel(shared, individual, self.ensemble.natural_gamma)

    def _chunk_size(self, chunk: int | None) -> int:
        if chunk is not None:
            return check_whole("chunk", chunk)
        # About eight copies of the factors exist at a time; explicit gradients on both sides.
        explicit = sum(p.numel() * p.element_size() for p in self.recorder.general.values())
        sample_bytes = 8 * self.recorder.size + 2 * self._classes_at_once * explicit
        return max(1, PASS_BYTES // max(1, sample_bytes * self.ensemble.members))

    def _all_blocks(
        self, left: Samples, right: Samples | None, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """Return both parts of the kernel, always with class axes."""
        chunks = left.split(chunk)
        other_chunks = chunks if right is None else right.split(chunk)
        blocks: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for i, samples in enumerate(chunks):
            first = self.recorder.record(samples)
            for j, others in enumerate(other_chunks):
                if right is not None or j > i:
                    blocks[i, j] = self._block(first, self.recorder.record(others))
                elif j == i:
                    blocks[i, j] = self._block(first, None)
                else:
                    shared, individual = blocks[j, i]
                    shared = shared.permute(1, 0, 3, 2, 5, 4)
                    blocks[i, j] = shared, individual.permute(0, 2, 1, 4, 3)
        parts = []
        for part in (0, 1):
            rows = []
            for i in range(len(chunks)):
                row = [blocks[i, j][part] for j in range(len(other_chunks))]
                rows.append(torch.cat(row, -3))
            parts.append(torch.cat(rows, -4))
        return parts[0], parts[1]

    def _block(self, first: Recording, second: Recording | None) -> tuple[Tensor, Tensor]:
        """Return the shared and the individual part for two chunks of samples.

        Args:
            first: the samples of the rows.
            second: the samples of the columns; None: the same.
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
            left = self._gradients(first, part)
            right = None if second is None else self._gradients(second, part)
            self._add_grams(shared, individual, left, right)
        shared = shared.view(members, rows, classes, members, columns, classes)
        individual = individual.view(members, rows, classes, columns, classes)
        return shared.permute(0, 3, 1, 4, 2, 5), individual.transpose(2, 3)

    def _add_grams(
        self,
        shared: Tensor,
        individual: Tensor,
        left: SampleGradients,
        right: SampleGradients | None,
    ) -> None:
        """Add the Gram matrices of all parameters."""
        for key in left.parameter_keys():
            if key in self.recorder.individual:
                for a in range(self.ensemble.members):
                    member_right = None if right is None else right.member(a)
                    individual[a] += contract(key, left.member(a), member_right)
            else:
                shared += contract(key, left, right)
            left.discard(key)
            if right is not None:
                right.discard(key)

    def _gradients(self, recording: Recording, classes: range) -> SampleGradients:
        cotangents = []
        for output in recording.outputs:
            cotangents.append(self._cotangents(output, recording.samples.target, classes))
        return self.recorder.gradients(recording, cotangents)

    def _cotangents(self, output: Tensor, target: Tensor | None, classes: range) -> Tensor:
        """Return the derivative of the kernel's function by the outputs, ``(class, batch, ...)``.

        Args:
            output: of one member.
            target: the classes of the samples, for "target" and "nll".
            classes: the outputs that are wanted, for "all" and "trace".
        """
        values = output.detach()
        if target is None:
            chosen = values.new_zeros(len(classes), values[0].numel())
            chosen[range(len(classes)), classes] = 1.0
            return chosen.view(len(chosen), 1, *values.shape[1:]).expand(-1, *values.shape)
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
        chosen = F.one_hot(target, values.shape[1]).to(values.dtype)
        if self.outputs == "target":
            return chosen[None]
        return (values.softmax(1) - chosen)[None]


def _first_and_last(left: Samples, right: Samples | None) -> Inputs:
    """Return two samples that are likely to differ."""
    first = left.inputs
    last = first if right is None else right.inputs
    for x, y in zip(first, last, strict=True):
        if x.shape[1:] != y.shape[1:] or x.dtype != y.dtype:
            last = first
            break
    return tuple(torch.cat([x[:1], y[-1:]]) for x, y in zip(first, last, strict=True))
