r"""A page with controls for the infinite-width theory.

Everything on the page is computed here, by :mod:`embens.theory`, on a grid of the controls: family,
activation, depth, number of members and :math:`p`. The page only interpolates in :math:`p` (cubic
in its arc cosine, through four neighbours) and draws. A test reads the numbers in a browser and
compares them with the theory at values of :math:`p` between the grid points.
"""

import base64
import json
import math
import zlib
from collections.abc import Callable, Iterable
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embens import (
    EmbeddedEnsemble,
    embed,
    last_layer_dropout,
    laws,
    mc_dropout,
    networks,
)
from embens.theory import GradientFlow, effective_width, gradient_flow, kernels, regime
from reproduction.storage import check_output, write_atomically

NORMAL, SIGNS = "BatchEnsemble, N(p, 1 − p²)", "BatchEnsemble, signs with mean p"
MASKS, LAST_LAYER_MASKS = "fixed masks, N(p, 1 − p²)", "last-layer masks, N(p, 1 − p²)"
FAMILIES = (SIGNS, NORMAL, MASKS, LAST_LAYER_MASKS)
ACTIVATIONS = {"relu": math.sqrt(2), "gelu": 1.5}
"""Activations with the standard deviation of the weights."""
DEPTHS = (1, 2, 3)
MEMBERS = (2, 4, 8, 32)
STEPS = 12
ARCS = [math.pi / 2 * (1 - step / STEPS) for step in range(STEPS + 1)]
"""Arc cosines of the grid of p, from p = 0 to p = 1. All curves are smooth in them."""
ANGLES = 25  # between 0 and π, at which kernels are shown
WIDTH = 64  # effective widths are fractions of it
POINTS = 41  # at which the fitted curve is drawn
GRID = torch.linspace(-math.pi, math.pi, POINTS).double()
DRAWN_MEMBERS = 4
DATA = torch.tensor([-2.5, -2.0, -1.6, 0.2, 0.5, 1.9], dtype=torch.float64)
"""Angles of the training points."""


def build_ensemble(family: str, activation: str, depth: int, p: float) -> EmbeddedEnsemble:
    """Return the ensemble of one position of the controls.

    It has many members: the random signs of two members could be equal, which would make them the
    same model. Its kernels apply to any number of members.

    Args:
        family: One of ``FAMILIES``.
        activation: One of ``ACTIVATIONS``.
        depth: Number of hidden layers.
        p: Mean of the modulations.

    Returns:
        The ensemble.
    """
    network = networks.mlp(
        3, WIDTH, depth, 1, activation=activation, weight_std=ACTIVATIONS[activation]
    ).double()
    members = MEMBERS[-1]
    if family == NORMAL:
        return embed(network, members, pre=laws.Shifted(p), post=laws.Shifted(p))
    if family == SIGNS:
        return embed(network, members, pre=laws.Signs(p), post=laws.Signs(p))
    if family == MASKS:
        return mc_dropout(network, members, laws.Shifted(p), fresh=False)
    return last_layer_dropout(network, members, laws.Shifted(p))


def circle(angles: Tensor, height: float) -> Tensor:
    """Return points of a circle in space, ``(angle, 3)``.

    Args:
        angles: Angles ``(angle,)``.
        height: Third coordinate; at 0 the angle of two points is that of their vectors.

    Returns:
        The points.
    """
    return torch.stack([angles.cos(), angles.sin(), torch.full_like(angles, height)], -1).double()


def target(angles: Tensor) -> Tensor:
    """Return the curve to be learned, ``(angle, 1)``."""
    return (2 * angles).sin()[:, None]


def compute(ensemble: EmbeddedEnsemble, normals: Tensor) -> dict[str, Any]:
    """Return everything the page shows of an ensemble.

    Args:
        ensemble: The ensemble.
        normals: Standard normal values ``(1 + DRAWN_MEMBERS, POINTS)`` of the drawn samples.

    Returns:
        Plain values by name.
    """
    angles = torch.linspace(0, math.pi, ANGLES).double()
    shown_points = circle(angles, 0)
    # One call for all points: smooth activations tabulate their expectations once per call.
    k = kernels(ensemble, torch.cat([shown_points, circle(DATA, 1), circle(GRID, 1)]))
    angle_rows = slice(0, ANGLES)
    train = slice(ANGLES, ANGLES + len(DATA))
    test = slice(ANGLES + len(DATA), None)
    curves = k[angle_rows, slice(0, 1)]
    blocks = (
        curves.nngp.same,
        curves.nngp.cross,
        curves.ntk_shared.same,
        curves.ntk_shared.cross,
    )
    shown: dict[str, Any] = {
        "coupling": regime(ensemble).coupling,
        "width": effective_width(ensemble, shown_points[:1]) / WIDTH,
        "kernels": [block[:, 0].tolist() for block in blocks],
    }
    train_train, test_train, test_test = k[train, train], k[test, train], k[test, test]
    for members in MEMBERS:
        flow = gradient_flow(train_train, test_train, test_test, target(DATA), members)
        shown[f"M{members}"] = {"gamma": flow.gamma, **_outputs_at(flow, math.inf, normals)}
        if members == MEMBERS[0]:
            # Before training the number of members does not matter.
            shown["before"] = _outputs_at(flow, 0.0, normals)
    return shown


def _outputs_at(flow: GradientFlow, time: float, normals: Tensor) -> dict[str, Any]:
    """Return the distribution of the outputs on the grid at a time, and a sample of members."""
    mean = flow.mean(time)[:, 0]
    covariance = flow.covariance(time)
    ensemble_variance = flow.ensemble_variance(time)
    variance = covariance.same.diagonal()
    squared_bias = (mean - target(GRID)[:, 0]).square().mean()
    # Members are a common part plus independent parts. Symmetric roots make the curves move
    # smoothly with the controls.
    common = normals[:1] @ _symmetric_root(covariance.cross)
    independent = normals[1:] @ _symmetric_root(covariance.same - covariance.cross)
    return {
        "mean": mean.tolist(),
        "member": variance.clamp(min=0).sqrt().tolist(),
        "ensemble": ensemble_variance.clamp(min=0).sqrt().tolist(),
        "samples": (mean + common + independent).tolist(),
        "correlation": float(covariance.cross.diagonal().sum() / variance.sum()),
        "error": float(squared_bias + variance.mean()),
        "ensemble_error": float(squared_bias + ensemble_variance.mean()),
    }


def _symmetric_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return vectors * values.clamp(min=0).sqrt() @ vectors.mT


def write(path: str | Path, progress: Callable[[list], Iterable] = iter) -> Path:
    """Write the page.

    Args:
        path: The page.
        progress: Wraps the list of positions, for example to show a progress bar.

    Returns:
        The path of the page.
    """
    path = Path(path)
    if path.parent.exists():
        check_output(path)
    generator = torch.Generator().manual_seed(4)
    normals = torch.randn(1 + DRAWN_MEMBERS, POINTS, generator=generator).double()
    shifts = [round(math.cos(arc), 12) for arc in ARCS]
    # The page relies on this order: p changes fastest.
    positions = list(product(FAMILIES, ACTIVATIONS, DEPTHS, shifts))
    rows = []
    for family, activation, depth, p in progress(positions):
        rows.append(compute(build_ensemble(family, activation, depth, p), normals))
    data = {
        "families": list(FAMILIES),
        "activations": list(ACTIVATIONS),
        "depths": DEPTHS,
        "members": MEMBERS,
        "arcs": ARCS,
        "points": DATA.tolist(),
        "targets": target(DATA)[:, 0].tolist(),
        "rows": _rounded(rows),
    }
    packed = zlib.compress(json.dumps(data, allow_nan=False).encode(), 9)
    text = files("reproduction.report").joinpath("explorer.html").read_text(encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.replace("{{data}}", base64.b64encode(packed).decode()))
    return path


def _rounded(value: Any) -> Any:
    """Return nested lists and dicts with all floats rounded to four digits."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.4g}"))
