"""A training problem in the limit: kernels of train and test data, members, gradient scale.

Inputs are validated here before any computation. Outputs at initialisation are drawn here too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens.checks import check_members
from embens.optim import Gamma
from embens.theory.kernel import Kernels, MemberKernel, check_rates, resolve_gamma

if TYPE_CHECKING:
    from jaxtyping import Float

SYMMETRY = 1e-8
"""Relative error up to which a kernel counts as symmetric."""


@dataclass(frozen=True)
class Problem:
    """Kernels in float64 of train with train, test with train, and test with test data.

    Attributes:
        nngp: Prior covariances; the last one is None if it was not given.
        ntk: Tangent kernels of train with train and of test with train data.
        members: Number of members.
        gamma: Gradient scale of shared parameters.
    """

    nngp: tuple[MemberKernel, MemberKernel, MemberKernel | None]
    ntk: tuple[MemberKernel, MemberKernel]
    members: int
    gamma: float

    @classmethod
    def of(
        cls,
        parts: tuple[Kernels, Kernels, Kernels | None],
        members: int,
        gamma: Gamma,
        *,
        rates: dict[str, float],
        caller: str,
    ) -> Problem:
        """Validate the arguments of a training function.

        Args:
            parts: Kernels of train with train, test with train and test with test data.
            members: Number of members.
            gamma: Gradient scale: a number, a function of members, or None.
            rates: Relative rates, as in :meth:`embens.theory.Kernels.ntk`.
            caller: Name of the training function, for messages.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If shapes do not fit, or values are not finite.
        """
        train, test_train, test = parts
        named = {"k_train_train": train, "k_test_train": test_train}
        if test is not None:
            named["k_test_test"] = test
        _check_kernels(named, caller)
        check_members(members)
        check_rates(**rates)
        train, test_train = train.to(torch.float64), test_train.to(torch.float64)
        test_nngp = None if test is None else test.to(torch.float64).nngp
        scale = resolve_gamma(train, members, gamma, **rates)
        ntk = train.ntk(members, scale, **rates), test_train.ntk(members, scale, **rates)
        return cls((train.nngp, test_train.nngp, test_nngp), ntk, members, scale)

    def draw(
        self,
        outputs: int,
        generator: torch.Generator | None,
    ) -> tuple[Float[Tensor, "member n k"], Float[Tensor, "member test k"]]:
        """Draw outputs at initialisation on train and test data together.

        Args:
            outputs: Number of outputs of the network.
            generator: Source of randomness; None means torch's default one.

        Returns:
            Train outputs ``(member, n, k)`` and test outputs ``(member, test, k)``.

        Raises:
            ValueError: If the kernels of the test data with themselves were not given.
        """
        train, test_train, test = self.nngp
        if test is None:
            raise ValueError(
                "outputs at initialisation can't be drawn without the kernels of the test data "
                "with themselves; got None for k_test_test. Pass it, or start=(train, test) "
                "outputs."
            )
        modes = []
        for train_mode, test_train_mode, test_mode in zip(
            train.modes(self.members),
            test_train.modes(self.members),
            test.modes(self.members),
            strict=True,
        ):
            above = torch.cat([train_mode, test_train_mode.mT], 1)
            below = torch.cat([test_train_mode, test_mode], 1)
            modes.append(torch.cat([above, below]))
        mean, deviation = modes
        draws = draw_members(
            mean / self.members,
            deviation,
            self.members,
            (outputs,),
            generator=generator,
        )
        samples = [len(train.same), len(test.same)]
        train_outputs, test_outputs = draws[0].split(samples, dim=1)
        return train_outputs, test_outputs


def draw_members(
    mean_covariance: Float[Tensor, "n n"],
    deviation_covariance: Float[Tensor, "n n"],
    members: int,
    shape: tuple[int, ...] = (),
    draws: int = 1,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "draw member n ..."]:
    r"""Draw Gaussian outputs of exchangeable members from the covariances of both modes.

    .. math::
        f_a = \bar f + h_a - \tfrac1M \textstyle\sum_b h_b, \qquad
        \bar f \sim N(0, V_m), \quad h_a \sim N(0, V_d)

    Args:
        mean_covariance: :math:`V_m`, ``(n, n)``.
        deviation_covariance: :math:`V_d`, ``(n, n)``.
        members: Number of members :math:`M`.
        shape: Shape of the outputs for one sample.
        draws: Number of ensembles to draw.
        generator: Source of randomness; None means torch's default one.

    Returns:
        Outputs ``(draw, member, n, *shape)``.
    """

    def draw(covariance: Tensor, count: int) -> Tensor:
        root = covariance_root(covariance)
        size = (draws, count, len(root), math.prod(shape))
        noise = torch.randn(size, generator=generator, dtype=root.dtype)
        return root @ noise.to(root.device)

    deviations = draw(deviation_covariance, members)
    outputs = draw(mean_covariance, 1) + deviations - deviations.mean(1, keepdim=True)
    return outputs.reshape(*outputs.shape[:-1], *shape)


def covariance_root(covariance: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Return a matrix R with covariance R Rᵀ; eigenvalues that rounding made negative count as 0.

    Args:
        covariance: A covariance, ``(n, n)``.

    Example:
        >>> root = covariance_root(torch.tensor([[4.0, 0.0], [0.0, 9.0]]))
        >>> root @ root.mT
        tensor([[4., 0.],
                [0., 9.]])
    """
    values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
    return vectors * values.clamp(min=0).sqrt()


def _check_kernels(named: dict[str, Kernels], caller: str) -> None:
    for name, kernels in named.items():
        if not isinstance(kernels, Kernels):
            raise TypeError(
                f"{name} must be Kernels, as theory.kernels(ensemble, x1, x2) gives them; got "
                f"{type(kernels).__name__}."
            )
        kernels.nngp.require_exchangeable(caller)
    n = named["k_train_train"].nngp.same.shape[-1]
    test = named["k_test_train"].nngp.same.shape[-2]
    shapes = {
        "k_train_train": (n, n),
        "k_test_train": (test, n),
        "k_test_test": (test, test),
    }
    for name, kernels in named.items():
        for part, kernel in vars(kernels).items():
            _check_block(f"{name}.{part}.same", kernel.same, shapes[name])
            _check_block(f"{name}.{part}.cross", kernel.cross, shapes[name])


def _check_block(name: str, block: Tensor, shape: tuple[int, int]) -> None:
    is_test_train = "_test_train" in name
    if block.shape != shape or shape[1] == 0:
        is_transposed = is_test_train and block.shape[0] == shape[1]
        hint = " Exchange its inputs with .mT." if is_transposed else ""
        raise ValueError(
            f"{name} must have shape {shape}, test data before train data; got "
            f"{tuple(block.shape)}.{hint}"
        )
    if not block.isfinite().all():
        raise ValueError(f"{name} must be finite; got NaN or infinity. Look at the inputs.")
    if is_test_train or not len(block):
        return
    error = (block - block.mT).abs().max().item()
    if error > SYMMETRY * block.abs().max().item():
        raise ValueError(
            f"{name} must be symmetric, a kernel of inputs with themselves; got entries that "
            f"differ by {error:.3g}. Give kernels(ensemble, x) of one set of inputs."
        )


def check_targets(y: Tensor, like: Float[Tensor, "n n"]) -> Float[Tensor, "n ..."]:
    """Return targets with the dtype and device of the train data's kernel.

    Args:
        y: Targets, ``(n,)`` or ``(n, k)``.
        like: Kernel of the train data, ``(n, n)``.

    Raises:
        TypeError: If ``y`` is not a tensor.
        ValueError: If its shape does not fit, or values are not finite.
    """
    n = len(like)
    if not isinstance(y, Tensor):
        raise TypeError(f"y must be a tensor; got {type(y).__name__}. Use torch.as_tensor.")
    if not y.dim() or len(y) != n or not y.numel():
        raise ValueError(
            f"y must have a row for each of the {n} train samples, shape ({n},) or ({n}, k); got "
            f"{tuple(y.shape)}."
        )
    y = y.to(like)
    if not y.isfinite().all():
        raise ValueError(f"y must be finite; got {int((~y.isfinite()).sum())} values that are not.")
    return y
