"""Kernels of finite networks from one gradient for each member and input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn


def measured_kernels(ensemble: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return products of outputs and of gradients, ``(member, member, n, n)``, of output 0.

    Gradients of layers in the standard parametrization are divided by √fan-in, as their limit is.
    """
    outputs = ensemble(x)[..., 0]
    shared, individual = _parameters(ensemble)
    rows: dict[str, list[Tensor]] = {"shared": [], "individual": []}
    for output in outputs.flatten():
        parameters = [p for p, _ in shared] + individual
        filled = torch.autograd.grad(output, parameters, retain_graph=True, materialize_grads=True)
        scaled = [g * s for g, (_, s) in zip(filled, shared, strict=False)]
        rows["shared"].append(torch.cat([g.flatten() for g in scaled] + [torch.zeros(1)]))
        unscaled = filled[len(shared) :]
        rows["individual"].append(torch.cat([g.flatten() for g in unscaled] + [torch.zeros(1)]))
    members, n = outputs.shape
    result = {"nngp": torch.einsum("ai,bj->abij", outputs, outputs).detach()}
    for name, gradients in rows.items():
        stacked = torch.stack(gradients).reshape(members, n, -1)
        result[name] = torch.einsum("aip,bjp->abij", stacked, stacked)
    return result


def _parameters(ensemble: nn.Module) -> tuple[list[tuple[Tensor, float]], list[Tensor]]:
    shared, individual = [], []
    individual_ids = {id(p) for p in getattr(ensemble, "individual_parameters", tuple)()}
    for module in ensemble.modules():
        for parameter in module.parameters(recurse=False):
            if not parameter.requires_grad:
                continue
            if id(parameter) in individual_ids:
                individual.append(parameter)
            else:
                standard = getattr(module, "parametrization", "standard") != "ntk"
                fan_in = module.weight[0].numel()
                if isinstance(module, nn.Embedding):
                    fan_in = 1  # one token is one input
                shared.append((parameter, fan_in**-0.5 if standard else 1.0))
    return shared, individual


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
    return {
        name: (torch.stack(v).mean(0), torch.stack(v).std(0) / len(v) ** 0.5)
        for name, v in samples.items()
    }


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
    return [case if case in quick else pytest.param(case, marks=pytest.mark.long) for case in cases]
