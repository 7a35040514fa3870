"""Perceptrons drawn layer by layer from Gaussian conditionals, many at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from embens import laws


def sampled_tangents(
    x: Tensor,
    width: int,
    depth: int,
    activation,
    pre,
    post,
    *,
    draws: int,
    members: int = 4,
    weight_std: float = math.sqrt(2),
    chunk: int = 250,
) -> Tensor:
    """Draw the shared tangent kernel between two members, ``(draw, n, n)``.

    Weights of hidden layers are never formed. Given a layer's inputs H, its outputs Z = W H are
    Gaussian; given both, Wᵀδ is the projection on H plus independent noise. This is exact and costs
    N instead of N² values.
    """
    generator = torch.Generator().manual_seed(0)
    n = len(x)
    columns = 2 * n  # inputs of the first member, then of the second

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def modulation(law, count: int) -> Tensor:
        if law is None:
            return torch.ones(count, width, columns, dtype=torch.float64)
        if isinstance(law, laws.Joint):
            values = torch.stack([law.sample((members, width), generator) for _ in range(count)])
            values = values[:, :2]
        else:
            values = law.sample((count, 2, width), generator)
        return values.double().repeat_interleave(n, 1).mT

    kernels = []
    for count in [chunk] * (draws // chunk):
        inputs = [torch.cat([x, x]).mT.expand(count, -1, columns)]
        outputs, slopes = [], []
        for layer in range(depth):
            signal = inputs[-1]
            fan_in = signal.shape[1]
            if layer == 0:
                z = normal(count, width, fan_in) @ signal * weight_std / math.sqrt(fan_in)
            else:
                covariance = weight_std**2 / fan_in * signal.mT @ signal
                z = normal(count, width, columns) @ _root(covariance).mT
            u, v = modulation(post, count), modulation(pre, count)
            units = (v * z).requires_grad_()
            values = activation(units)
            (slope,) = torch.autograd.grad(values.sum(), units)
            outputs.append(z)
            slopes.append(u * v * slope)
            inputs.append(u * values.detach())
        kernels.append(_tangents(inputs, outputs, slopes, weight_std, normal)[:, :n, n:])
    return torch.cat(kernels)


def _tangents(inputs, outputs, slopes, weight_std, normal) -> Tensor:
    count, width, columns = inputs[-1].shape
    kernel = weight_std**2 / width * inputs[-1].mT @ inputs[-1]
    gradient = normal(count, width, 1) * weight_std / math.sqrt(width)
    gradient = gradient.expand(-1, -1, columns)
    for layer in range(len(outputs) - 1, -1, -1):
        delta = slopes[layer] * gradient
        overlap = delta.mT @ delta
        signal = inputs[layer]
        fan_in = signal.shape[1]
        gram = signal.mT @ signal
        kernel = kernel + weight_std**2 / fan_in * gram * overlap
        if layer:
            fresh = normal(count, fan_in, columns) @ _root(overlap).mT
            inverse = torch.linalg.pinv(gram, hermitian=True)
            known = signal @ (inverse @ (outputs[layer].mT @ delta))
            fresh = fresh - signal @ (inverse @ (signal.mT @ fresh))
            gradient = known + weight_std / math.sqrt(fan_in) * fresh
    return kernel


def _root(covariance: Tensor) -> Tensor:
    size = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype)
    return torch.linalg.cholesky(covariance + 1e-12 * size * identity)


def variance(draws: Tensor) -> tuple[Tensor, Tensor]:
    """Return the variance over draws and its relative standard error."""
    centred = draws - draws.mean(0)
    value = centred.square().mean(0)
    spread = (centred**4).mean(0) - value**2
    return value, (spread / len(draws)).sqrt() / value
