"""Draws of Gaussian outputs of exchangeable members, from two covariances whatever their number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens.theory.kernel import Kernels

if TYPE_CHECKING:
    from jaxtyping import Float


def draw_members(
    of_mean: Float[Tensor, "n n"],
    of_deviation: Float[Tensor, "n n"],
    *,
    members: int,
    shape: tuple[int, ...] = (),
    draws: int = 1,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "draw member n ..."]:
    r"""Draw Gaussian outputs of exchangeable members from the covariances of both modes.

    .. math::
        f_a = \bar f + h_a - \tfrac1M \textstyle\sum_b h_b, \qquad
        \bar f \sim N(0, V_m), \quad h_a \sim N(0, V_d)
    """
    outputs = math.prod(shape)

    def draw(covariance: Tensor, count: int) -> Tensor:
        values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
        root = vectors * values.clamp(min=0).sqrt()
        size = (draws, count, len(values), outputs)
        noise = torch.randn(size, generator=generator, dtype=values.dtype)
        return root @ noise.to(values.device)

    own = draw(of_deviation, members)
    result = draw(of_mean, 1) + own - own.mean(1, keepdim=True)
    return result.reshape(*result.shape[:-1], *shape)


def draw_prior(
    k_train_train: Kernels,
    k_test_train: Kernels,
    k_test_test: Kernels,
    *,
    members: int,
    outputs: int,
    draws: int = 1,
    generator: torch.Generator | None = None,
) -> tuple[Float[Tensor, "draw member n k"], Float[Tensor, "draw member test k"]]:
    """Draw outputs at initialisation, on train and test data together.

    Args:
        k_train_train: kernels of the train data with themselves.
        k_test_train: of the test data with the train data.
        k_test_test: of the test data with themselves.
        members: how many.
        outputs: how many outputs a member has for each sample; independent.
        draws: how many initialisations.
        generator: draws them.
    """
    train, carry, test = (k.nngp.modes(members) for k in (k_train_train, k_test_train, k_test_test))
    mean, deviation = (
        torch.cat([torch.cat([train[k], carry[k].mT], 1), torch.cat([carry[k], test[k]], 1)])
        for k in range(2)
    )
    joint = draw_members(
        mean.double() / members,
        deviation.double(),
        members=members,
        shape=(outputs,),
        draws=draws,
        generator=generator,
    )
    return joint.split([len(train[0]), len(test[0])], dim=2)  # type: ignore[return-value]
