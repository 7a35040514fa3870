"""What is to be learnt in the limit: kernels of train and test data, members, gradient scale.

What is wrong with them is said before any work. Outputs at initialisation are drawn here too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens.checks import Gamma, check_members
from embens.theory.kernel import Kernels, MemberKernel, check_rates, resolve_gamma

if TYPE_CHECKING:
    from jaxtyping import Float

SYMMETRY = 1e-8  # relative error up to which a kernel counts as symmetric


@dataclass(frozen=True)
class Problem:
    """Kernels in float64 of train with train, test with train, and test with test data.

    The last ones are None where they were not given; ``ntk`` has only the first two.
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
        what: str,
    ) -> Problem:
        """Return the problem if nothing is wrong; ``what`` is the function that was called."""
        names = ("k_train_train", "k_test_train", "k_test_test")
        given = dict(zip(names if parts[2] is not None else names[:2], parts, strict=False))
        _check_kernels(given, what)  # type: ignore[arg-type]
        check_members(members)
        check_rates(**rates)
        train, carry = (k.to(torch.float64) for k in parts[:2])
        test = None if parts[2] is None else parts[2].to(torch.float64).nngp
        scale = resolve_gamma(train, members, gamma, **rates)
        ntk = train.ntk(members, scale, **rates), carry.ntk(members, scale, **rates)
        return cls((train.nngp, carry.nngp, test), ntk, members, scale)

    def draw(
        self, outputs: int, generator: torch.Generator | None
    ) -> tuple[Float[Tensor, "member n k"], Float[Tensor, "member test k"]]:
        """Draw outputs at initialisation, on train and test data together."""
        train, carry, test = (None if k is None else k.modes(self.members) for k in self.nngp)
        if test is None:
            raise ValueError(
                "outputs at initialisation can't be drawn without the kernels of the test data "
                "with themselves; got None for k_test_test. Pass it, or start=(train, test) "
                "outputs."
            )
        mean, deviation = (
            torch.cat([torch.cat([a, b.mT], 1), torch.cat([b, c], 1)])
            for a, b, c in zip(train, carry, test, strict=True)  # type: ignore[arg-type]
        )
        (joint,) = draw_members(
            mean / self.members, deviation, self.members, (outputs,), generator=generator
        )
        return joint.split([len(train[0]), len(test[0])], dim=1)  # type: ignore[index,return-value]


def draw_members(
    of_mean: Float[Tensor, "n n"],
    of_deviation: Float[Tensor, "n n"],
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

    def draw(covariance: Tensor, count: int) -> Tensor:
        values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2)
        root = vectors * values.clamp(min=0).sqrt()
        size = (draws, count, len(values), math.prod(shape))
        noise = torch.randn(size, generator=generator, dtype=values.dtype)
        return root @ noise.to(values.device)

    own = draw(of_deviation, members)
    result = draw(of_mean, 1) + own - own.mean(1, keepdim=True)
    return result.reshape(*result.shape[:-1], *shape)


def _check_kernels(given: dict[str, Kernels], what: str) -> None:
    for name, kernels in given.items():
        if not isinstance(kernels, Kernels):
            raise TypeError(
                f"{name} must be Kernels, as theory.kernels(ensemble, x1, x2) gives them; got "
                f"{type(kernels).__name__}."
            )
        kernels.nngp.require_exchangeable(what)
    n, test = given["k_train_train"].nngp.same.shape[-1], given["k_test_train"].nngp.same.shape[-2]
    shapes = {"k_train_train": (n, n), "k_test_train": (test, n), "k_test_test": (test, test)}
    for name, kernels in given.items():
        for part, kernel in vars(kernels).items():
            for block in ("same", "cross"):
                _check_block(f"{name}.{part}.{block}", getattr(kernel, block), shapes[name])


def _check_block(name: str, block: Tensor, shape: tuple[int, int]) -> None:
    if block.shape != shape or 0 in shape[1:]:
        turned = block.shape[0] == shape[1] and "_test_train" in name
        hint = " Exchange its inputs with .mT." if turned else ""
        raise ValueError(
            f"{name} must have shape {shape}, test data before train data; got "
            f"{tuple(block.shape)}.{hint}"
        )
    if not block.isfinite().all():
        raise ValueError(f"{name} must be finite; got NaN or infinity. Look at the inputs.")
    if "_test_train" not in name:
        error = (block - block.mT).abs().max().item() if len(block) else 0.0
        if error > SYMMETRY * block.abs().max().item():
            raise ValueError(
                f"{name} must be symmetric, a kernel of inputs with themselves; got entries that "
                f"differ by {error:.3g}. Give kernels(ensemble, x) of one set of inputs."
            )


def check_targets(y: Tensor, like: Float[Tensor, "n n"]) -> Float[Tensor, "n ..."]:
    """Return targets like the train data's kernel, or say what is wrong with them."""
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
