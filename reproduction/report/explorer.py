r"""``embens explore``: one page with dials, on which the infinitely wide ensemble answers at once.

All that the page shows is computed here, by :mod:`embens.theory`, on a grid of its dials: family,
activation, depth, number of members and :math:`p`. The page interpolates in :math:`p` alone (cubics
in its arc cosine, through four neighbours) and draws; of the theory it computes nothing. A test
reads its numbers in a browser, and compares them with the theory at values of :math:`p` in between.
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

from embens import laws, networks
from embens.embedding.families import batch_ensemble, last_layer_dropout, mc_dropout
from embens.ensemble import EmbeddedEnsemble
from embens.files import write_atomically
from embens.theory import GradientFlow, effective_width, gradient_flow, kernels, regime

FAMILIES: dict[str, Callable[[Any, int, float], EmbeddedEnsemble]] = {
    "BatchEnsemble, N(p, 1 − p²)": lambda net, m, p: batch_ensemble(net, m, p),
    "BatchEnsemble, signs with mean p": lambda net, m, p: batch_ensemble(net, m, p, law=laws.Signs),
    "fixed masks, N(p, 1 − p²)": lambda net, m, p: mc_dropout(net, m, laws.Shifted(p)),
    "last-layer masks, N(p, 1 − p²)": lambda net, m, p: last_layer_dropout(net, m, laws.Shifted(p)),
}
ACTIVATIONS = {"relu": math.sqrt(2), "erf": 2.0, "gelu": 1.5}  # and the scale of weights for each
DEPTHS = (1, 2, 3)
MEMBERS = (2, 4, 8, 32)
STEPS = 12  # of the angle whose cosine is p: in it everything is smooth, also at p = 1
ANGLES = 25  # from 0 to π, at which kernels are given
WIDTH = 64  # effective widths are fractions of it
POINTS = 41  # at which the ensemble that fits a curve is drawn
GRID = torch.linspace(-math.pi, math.pi, POINTS).double()
DRAWN = 4  # members of which a sample is drawn
DATA = torch.tensor([-2.5, -2.0, -1.6, 0.2, 0.5, 1.9], dtype=torch.float64)


def ensemble_of(family: str, activation: str, depth: int, p: float) -> EmbeddedEnsemble:
    """Return the ensemble that a position of the dials stands for; its kernels suit any M.

    It has many members: drawn signs of two may be the same, which makes them one model.
    """
    scale = ACTIVATIONS[activation]
    net = networks.mlp(3, WIDTH, depth, 1, activation=activation, weight_std=scale)
    return FAMILIES[family](net.double(), MEMBERS[-1], p)


def circle(angles: Tensor, height: float) -> Tensor:
    """Return points of a circle; at height 0 the angle of two points is that of their vectors."""
    return torch.stack([angles.cos(), angles.sin(), torch.full_like(angles, height)], -1).double()


def target(angles: Tensor) -> Tensor:
    """Return the curve that is learnt."""
    return (2 * angles).sin()[:, None]


def numbers(ensemble: EmbeddedEnsemble, normals: Tensor) -> dict[str, Any]:
    """Return what the page shows of an ensemble; samples are of normals ``(1 + DRAWN, POINTS)``."""
    angles = torch.linspace(0, math.pi, ANGLES).double()
    k = kernels(ensemble, circle(angles, 0), circle(angles[:1], 0))
    blocks = (k.nngp.same, k.nngp.cross, k.ntk_shared.same, k.ntk_shared.cross)
    found: dict[str, Any] = {
        "coupling": regime(ensemble).coupling,
        "width": effective_width(ensemble, circle(angles[:1], 0)) / WIDTH,
        "kernels": [block[:, 0].tolist() for block in blocks],
    }
    x, test = circle(DATA, 1), circle(GRID, 1)
    three = kernels(ensemble, x), kernels(ensemble, test, x), kernels(ensemble, test)
    flows = {members: gradient_flow(*three, target(DATA), members) for members in MEMBERS}
    for members, flow in flows.items():
        found[f"M{members}"] = {"gamma": flow.gamma, **_fitted(flow, math.inf, normals)}
    found["before"] = _fitted(flows[MEMBERS[0]], 0.0, normals)
    return found


def _fitted(flow: GradientFlow, t: float, normals: Tensor) -> dict[str, Any]:
    """Return what is known of the outputs on the grid at some time, and a sample of members."""
    mean, covariance, of_mean = flow.mean(t)[:, 0], flow.covariance(t), flow.ensemble_variance(t)
    variance = covariance.same.diagonal()
    bias = (mean - target(GRID)[:, 0]).square().mean()
    # What members have in common, and what is each one's own. Roots are symmetric, so that curves
    # move smoothly as the dials are turned.
    own = normals[1:] @ _root(covariance.same - covariance.cross)
    samples = mean + normals[:1] @ _root(covariance.cross) + own
    return {
        "mean": mean.tolist(),
        "member": variance.clamp(min=0).sqrt().tolist(),
        "ensemble": of_mean.clamp(min=0).sqrt().tolist(),
        "samples": samples.tolist(),
        "correlation": float(covariance.cross.diagonal().sum() / variance.sum()),
        "error": float(bias + variance.mean()),
        "ensemble_error": float(bias + of_mean.mean()),
    }


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return vectors * values.clamp(min=0).sqrt() @ vectors.mT


ARCS = [math.pi / 2 * (1 - k / STEPS) for k in range(STEPS + 1)]
"""The arc cosines of the values of ``p``, from p = 0 to p = 1."""


def write(path: str | Path, progress: Callable[[list], Iterable] = iter) -> Path:
    """Write the page; return where it is. ``progress`` wraps the positions that are computed."""
    generator = torch.Generator().manual_seed(4)
    normals = torch.randn(1 + DRAWN, POINTS, generator=generator).double()
    shifts = [round(math.cos(arc), 12) for arc in ARCS]
    positions = [*product(FAMILIES, ACTIVATIONS, DEPTHS, shifts)]  # the last changes fastest
    rows = [numbers(ensemble_of(*dials), normals) for dials in progress(positions)]
    data = {
        "families": list(FAMILIES),
        "activations": list(ACTIVATIONS),
        "depths": DEPTHS,
        "members": MEMBERS,
        "arcs": ARCS,
        "points": DATA.tolist(),
        "targets": target(DATA)[:, 0].tolist(),
        "rows": json.loads(json.dumps(rows), parse_float=lambda text: float(f"{float(text):.4g}")),
    }
    packed = zlib.compress(json.dumps(data, allow_nan=False).encode(), 9)
    text = files("reproduction.report").joinpath("explorer.html").read_text(encoding="utf-8")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.replace("{{data}}", base64.b64encode(packed).decode()))
    return path
