r"""Empirical tangent kernels: those of the network at hand, at its finite width.

The tangent kernel of members :math:`a, b` has a part from the parameters :math:`w` that they share
and, for each member alone, a part from its individual parameters :math:`u_a`:

.. math::
    \Theta^{com}_{ab}(x, x') = \sum_w \frac{\partial f_a(x)}{\partial w}
        \frac{\partial f_b(x')}{\partial w}, \qquad
    \Theta^{ind}_a(x, x') = \sum_{u_a} \frac{\partial f_a(x)}{\partial u_a}
        \frac{\partial f_a(x')}{\partial u_a} .

Gradients are those of the parameters as they are, in their parametrization, with neither learning
rates nor the gradient scale :math:`\gamma`; :meth:`FiniteKernel.ntk` puts these in. Frozen
parameters don't count. Reductions of the class axes, the paper's two among them:

===========  ==================================================================================
``"all"``    :math:`\Theta_{kk'}` for all pairs of outputs
``"trace"``  :math:`\sum_k \Theta_{kk}`
``"target"`` :math:`\Theta_{y(x) y(x')}`
``"nll"``    of :math:`-\log p_{y(x)}(x)` instead of :math:`f`, with :math:`p = \mathrm{softmax} f`
===========  ==================================================================================

How: one backward pass for each member and class gives the cotangents of all layers for all samples
at once (``recording``, ``terms``), from which Gram matrices follow (``contraction``), block by
block (``blocks``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens.checks import check_choice, gradient_factor
from embens.ensemble import EmbeddedEnsemble
from embens.finite.checks import check_call, check_inputs
from embens.finite.empirical.blocks import OUTPUTS, Blocks, Outputs, probe
from embens.finite.empirical.recording import Inputs, Recorder, Samples, as_inputs

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class FiniteKernel:
    r"""Tangent kernel of a network of finite width between two sets of samples.

    Attributes:
        shared: :math:`\Theta^{com}`.
        individual: :math:`\Theta^{ind}`.
        natural_gamma: the ensemble's default gradient scale.
    """

    shared: Float[Tensor, "m m n1 n2 *classes"]
    individual: Float[Tensor, "m n1 n2 *classes"]
    natural_gamma: float = 1.0

    @property
    def members(self) -> int:
        """How many members there are."""
        return len(self.shared)

    @property
    def same(self) -> Float[Tensor, "m n1 n2 *classes"]:
        """The shared part of each member with itself."""
        return self.shared[range(self.members), range(self.members)]

    def ntk(
        self,
        gamma: float | Callable[[int], float] | None = None,
        *,
        shared_rate: float = 1.0,
        individual_rate: float = 1.0,
    ) -> Float[Tensor, "m m n1 n2 *classes"]:
        r"""Return the kernel that training follows.

        .. math::
            \Theta_{ab} = \eta_w \frac{\gamma}{M} \Theta^{com}_{ab}
                + \delta_{ab}\, \eta_u \Theta^{ind}_a

        Args:
            gamma: the gradient scale, or a function of the number of members; None: the ensemble's
                natural one.
            shared_rate: :math:`\eta_w`, relative to the training's learning rate.
            individual_rate: :math:`\eta_u`.
        """
        factor = gradient_factor(gamma, self.members, self.natural_gamma)
        result = shared_rate * factor * self.shared
        a = range(self.members)
        result[a, a] += individual_rate * self.individual
        return result

    def to(self, *args, **kwargs) -> FiniteKernel:
        """Return the kernel with another dtype or on another device."""
        parts = (part.to(*args, **kwargs) for part in (self.shared, self.individual))
        return FiniteKernel(*parts, natural_gamma=self.natural_gamma)


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
    """Return the empirical tangent kernel, shared and individual parts.

    Args:
        ensemble: of any family, in the mode it is in: batch statistics and random layers need
            ``ensemble.eval()``.
        x1: samples along the first axis; a tuple of tensors for a reference of several arguments.
        x2: other samples; None: the kernel of ``x1`` with itself, symmetric.
        outputs: which outputs, or which reduction of them; see the module. Axes after the batch
            count as classes, all together.
        target: the classes of ``x1``, for "target" and "nll".
        target2: the classes of ``x2``.
        chunk: how many samples run at once; bounds memory, and does not change the result beyond
            rounding. None: chosen by the size of the network.

    Returns:
        A kernel with ``shared`` (member, member, batch, batch) and ``individual`` (member, batch,
        batch); for "all" with two class axes more.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> ensemble = batch_ensemble(networks.mlp(inputs=4, width=8, depth=2), members=3)
        >>> kernel = ntk(ensemble, torch.ones(5, 4), outputs="trace")
        >>> kernel.shared.shape, kernel.individual.shape
        (torch.Size([3, 3, 5, 5]), torch.Size([3, 5, 5]))
    """
    check_call(ensemble, x1)
    if x2 is not None:
        check_inputs(x2, "x2", ensemble=ensemble)
    check_choice("outputs", outputs, OUTPUTS)
    left = Samples(as_inputs(x1, "x1"), _check_target(outputs, target, x1, "target"))
    right = None
    if x2 is not None:
        right = Samples(as_inputs(x2, "x2"), _check_target(outputs, target2, x2, "target2"))
    elif target2 is not None:
        raise ValueError("target2 belongs to x2; got target2 without x2. Leave it out.")
    return _compute(ensemble, left, right, outputs, chunk)


def trace_of(
    ensemble: EmbeddedEnsemble, x: Tensor | Inputs, *, chosen: Int[Tensor, " k"], memory: float
) -> FiniteKernel:
    """Return the sum of the kernels of chosen outputs, counted over all axes after the batch.

    ``memory`` is in bytes, roughly; a ValueError where not even one sample fits.
    """
    samples = Samples(as_inputs(x, "x"), None)
    return _compute(ensemble, samples, None, "trace", None, chosen, memory)


def _compute(
    ensemble: EmbeddedEnsemble,
    left: Samples,
    right: Samples | None,
    outputs: Outputs,
    chunk: int | None,
    chosen: Tensor | None = None,
    memory: float | None = None,
) -> FiniteKernel:
    recorder = Recorder(ensemble)
    with torch.no_grad(), recorder.watching():
        recorder.survey(probe(left, right))
        run = Blocks(recorder, outputs, chosen, memory)
        size = run.chunk_size(left, chunk)
        parts = run.kernel(left.split(size), None if right is None else right.split(size))
    return FiniteKernel(*parts, natural_gamma=ensemble.natural_gamma)


def _check_target(
    outputs: Outputs, target: Tensor | None, x: Tensor | Inputs, name: str
) -> Tensor | None:
    if outputs in ("all", "trace"):
        if target is not None:
            raise ValueError(
                f"outputs={outputs!r} uses no target; got {name}. Leave it out, or choose "
                "outputs='target' or 'nll'."
            )
        return None
    count = len(x if isinstance(x, Tensor) else x[0])
    if target is None:
        raise ValueError(f"outputs={outputs!r} needs {name}=, the class of each of {count} samples")
    target = torch.as_tensor(target)
    if target.shape == (count, 1):
        target = target[:, 0]
    if target.shape != (count,) or target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(
            f"{name} must hold a class (whole number) for each of {count} samples; got shape "
            f"{tuple(target.shape)} of {target.dtype}"
        )
    return target.long()
