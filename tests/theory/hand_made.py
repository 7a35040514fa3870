"""Random kernels of members, and their training by one dense matrix of all members."""

from __future__ import annotations

import torch
from torch import Tensor

from embens.theory.kernel import Kernels, MemberKernel

TRAIN, TEST = 7, 4
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def close(actual, expected, **tolerance):
    """Compare tensors, to 1e-9 unless a tolerance is given."""
    torch.testing.assert_close(actual, expected, **(tolerance or EXACT))


def targets(*shape, seed=5) -> Tensor:
    """Return normal targets."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def gram(generator: torch.Generator, n: int, rank: int | None = None) -> Tensor:
    features = torch.randn(n, rank or 2 * n, generator=generator, dtype=torch.float64)
    return features @ features.mT / features.shape[1]


def random_kernels(
    seed: int = 0, n: int = TRAIN + TEST, *, coupling: float = 1.0, individual: float = 0.5
) -> Kernels:
    """Return random kernels: a part that members share, and a part within each member."""
    generator = torch.Generator().manual_seed(seed)

    def kernel() -> MemberKernel:
        cross = coupling * gram(generator, n)
        return MemberKernel(same=cross + gram(generator, n), cross=cross)

    within = individual * gram(generator, n)
    return Kernels(kernel(), kernel(), MemberKernel(within, torch.zeros_like(within)))


def split(kernels: Kernels, train: int = TRAIN) -> tuple[Kernels, Kernels, Kernels]:
    """Return train with train, test with train, test with test."""
    first = slice(None, train)
    last = slice(train, None)
    return kernels[first, first], kernels[last, first], kernels[last, last]


def flatten(blocks: Tensor) -> Tensor:
    """Make (member, member, n1, n2) a matrix."""
    m, _, rows, columns = blocks.shape
    return blocks.permute(0, 2, 1, 3).reshape(m * rows, m * columns)


class Dense:
    """Outputs of all members, computed with the dense matrix of all members."""

    def __init__(
        self, parts: tuple[Kernels, Kernels, Kernels], members: int, gamma: float, **rates
    ):
        self.members = members
        train, test_train, _ = parts
        self.train = flatten(train.ntk(members, gamma, **rates).dense(members))
        self.test_train = flatten(test_train.ntk(members, gamma, **rates).dense(members))
        self.prior = [flatten(k.nngp.dense(members)) for k in parts]
        self.samples = len(train.nngp.same)

    def response(self, t: float) -> Tensor:
        """Return A(t), from the integral of the matrix exponential, by a block matrix."""
        n = len(self.train)
        block = torch.zeros(2 * n, 2 * n, dtype=torch.float64)
        block[:n, :n] = -self.train / self.samples
        block[:n, n:] = torch.eye(n, dtype=torch.float64) / self.samples
        return self.test_train @ torch.linalg.matrix_exp(block * t)[:n, n:]

    def response_at_infinity(self) -> Tensor:
        return torch.linalg.solve(self.train, self.test_train.mT).mT

    def response_after(self, steps: int, rate: float) -> Tensor:
        """Return A(n), by iterating gradient descent on every residual at once."""
        n = len(self.train)
        residual = torch.eye(n, dtype=torch.float64)
        moved = torch.zeros(n, n, dtype=torch.float64)
        for _ in range(steps):
            moved = moved + rate / self.samples * residual
            residual = residual - rate / self.samples * self.train @ residual
        return self.test_train @ moved

    def mean(self, response: Tensor, y: Tensor) -> Tensor:
        moved = response @ y.reshape(len(y), -1).repeat(self.members, 1)
        return moved.reshape(self.members, -1, *y.shape[1:])

    def covariance(self, response: Tensor) -> Tensor:
        """Return (member, member, test, test)."""
        train, test_train, test = self.prior
        full = (
            test
            - response @ test_train.mT
            - test_train @ response.mT
            + response @ train @ response.mT
        )
        m, n = self.members, len(test) // self.members
        return full.reshape(m, n, m, n).permute(0, 2, 1, 3)
