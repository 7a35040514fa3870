"""Kernels of train and test data, and targets: what is wrong with them, said before any work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens.theory.kernel import Kernels

if TYPE_CHECKING:
    from jaxtyping import Float

SYMMETRY = 1e-8
"""Relative error up to which a kernel counts as symmetric."""


def check_kernels(
    k_train_train: Kernels, k_test_train: Kernels, k_test_test: Kernels | None, *, what: str
) -> None:
    """Say what is wrong with the kernels of train and test data, if anything is."""
    given = {"k_train_train": k_train_train, "k_test_train": k_test_train}
    if k_test_test is not None:
        given["k_test_test"] = k_test_test
    for name, kernels in given.items():
        if not isinstance(kernels, Kernels):
            raise TypeError(
                f"{name} must be Kernels, as theory.kernels(ensemble, x1, x2) gives them; got "
                f"{type(kernels).__name__}."
            )
        if kernels.conditional:
            raise ValueError(
                f"{what} does not apply: {name} is conditional on drawn input or output "
                "modulations, so members are not exchangeable and, where those are trained, their "
                "kernel does not stay as it was. Expected sites='hidden'."
            )
    n, test = k_train_train.nngp.same.shape[-1], k_test_train.nngp.same.shape[-2]
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


def check_targets(y: Tensor, k_train_train: Kernels) -> Float[Tensor, "n ..."]:
    """Return targets in float64, or say what is wrong with them."""
    n = k_train_train.nngp.same.shape[-1]
    if not isinstance(y, Tensor):
        raise TypeError(f"y must be a tensor; got {type(y).__name__}. Use torch.as_tensor.")
    if not y.dim() or len(y) != n or not y.numel():
        raise ValueError(
            f"y must have a row for each of the {n} train samples, shape ({n},) or ({n}, k); got "
            f"{tuple(y.shape)}."
        )
    y = y.to(dtype=torch.float64, device=k_train_train.nngp.same.device)
    if not y.isfinite().all():
        raise ValueError(f"y must be finite; got {int((~y.isfinite()).sum())} values that are not.")
    return y
