"""Kernels of finite networks from one gradient for each member and input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from embens import theory


def measured_kernels(ensemble: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return products of outputs and of gradients, ``(member, member, n, n)``, of output 0.

    Gradients of layers in the standard parametrization are divided by √fan-in, as their limit is.
    """
    outputs = ensemble(x)[..., 0]
    shared, scales = _shared_parameters(ensemble)
    individual = _individual_parameters(ensemble)
    shared_rows, individual_rows = [], []
    for output in outputs.flatten():
        gradients = torch.autograd.grad(
            output, shared + individual, retain_graph=True, materialize_grads=True
        )
        shared_gradients = []
        for gradient, scale in zip(gradients[: len(shared)], scales, strict=True):
            shared_gradients.append(scale * gradient)
        shared_rows.append(_concatenate(shared_gradients))
        individual_rows.append(_concatenate(gradients[len(shared) :]))
    return {
        "nngp": torch.einsum("ai,bj->abij", outputs, outputs).detach(),
        "shared": _products(shared_rows, outputs.shape),
        "individual": _products(individual_rows, outputs.shape),
    }


def _concatenate(gradients) -> Tensor:
    """Return all values in one row, with a 0 for the case that there are none."""
    return torch.cat([torch.zeros(1), *(gradient.flatten() for gradient in gradients)])


def _products(rows: list[Tensor], shape) -> Tensor:
    """Return inner products of rows, one per member and input."""
    stacked = torch.stack(rows).reshape(*shape, -1)
    return torch.einsum("aip,bjp->abij", stacked, stacked)


def _individual_parameters(network: nn.Module) -> list[Tensor]:
    """Return the trainable individual parameters; a plain network has none."""
    if not hasattr(network, "individual_parameters"):
        return []
    return [p for p in network.individual_parameters() if p.requires_grad]


def _shared_parameters(network: nn.Module) -> tuple[list[Tensor], list[float]]:
    """Return the trainable shared parameters and the scales of their gradients."""
    individual = {id(parameter) for parameter in _individual_parameters(network)}
    parameters, scales = [], []
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in individual:
                parameters.append(parameter)
                scales.append(_gradient_scale(module))
    return parameters, scales


def _gradient_scale(module: nn.Module) -> float:
    if getattr(module, "parametrization", "standard") == "ntk":
        return 1.0
    if isinstance(module, nn.Embedding):
        return 1.0  # one token is one input
    return module.weight[0].numel() ** -0.5


def average(draw, x: Tensor, seeds: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return means and standard errors over networks ``draw(generator)``.

    Members are exchangeable, so blocks within and between members are averaged first.
    """
    samples: dict[str, list[Tensor]] = {}
    for seed in range(seeds):
        kernels = measured_kernels(draw(torch.Generator().manual_seed(seed)), x)
        for name, blocks in kernels.items():
            members = len(blocks)
            diagonal = torch.eye(members, dtype=torch.bool)
            samples.setdefault(f"{name}.same", []).append(blocks[diagonal].mean(0))
            if members > 1:
                samples.setdefault(f"{name}.cross", []).append(blocks[~diagonal].mean(0))

    averages = {}
    for name, kernels in samples.items():
        stacked = torch.stack(kernels)
        averages[name] = (stacked.mean(0), stacked.std(0) / seeds**0.5)
    return averages


def expected(k) -> dict[str, Tensor]:
    """Return the limit's kernels under the same names."""
    return {
        "nngp.same": k.nngp.same,
        "nngp.cross": k.nngp.cross,
        "shared.same": k.ntk_shared.same,
        "shared.cross": k.ntk_shared.cross,
        "individual.same": k.ntk_individual.same,
        "individual.cross": k.ntk_individual.cross,
    }


def assert_gradients_agree(draw, x: Tensor, seeds: int, bias: float, width: int = 8) -> None:
    """Compare the limit's tangent kernels with means over drawn networks.

    Covariances of outputs are left out: one output is one draw, far noisier than gradients.

    Args:
        draw: Returns a network for ``(generator, width)``, and by default a wide one.
        x: Inputs.
        seeds: Number of networks.
        bias: Error of order 1/width that is allowed, relative to the kernel within members.
        width: Width of the network whose limit is computed.
    """
    limit = expected(theory.kernels(draw(None, width=width), x))
    for part, (mean, error) in average(draw, x, seeds).items():
        if part.startswith("nngp"):
            continue
        scale = limit[part.replace("cross", "same")].abs().mean()
        excess = ((mean - limit[part]).abs() - bias * scale).clamp(min=0)
        assert (excess <= 4 * error + 1e-12).all(), (part, mean, limit[part], error)


def points(n: int = 3, features: int = 5, seed: int = 0) -> Tensor:
    """Return inputs of a perceptron."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, features, generator=generator, dtype=torch.float64)


def images(n: int = 2, channels: int = 2, size: int = 4, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, channels, size, size, generator=generator)


def long_except(cases, quick):
    """Return test parameters for all cases, with the mark ``long`` for those that are not quick."""
    missing = set(quick) - set(cases)
    assert not missing, missing
    parameters = []
    for case in cases:
        marks = () if case in quick else pytest.mark.long
        parameters.append(pytest.param(case, marks=marks))
    return parameters
