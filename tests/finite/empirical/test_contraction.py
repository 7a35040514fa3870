"""Tiles and chunks give the same kernel."""

from __future__ import annotations

import pytest
import torch
from cases import ARCHITECTURES
from finite.jacobians import (
    assert_equal,
    build,
)

from embens import finite
from embens.finite.empirical import contraction, kernels


@pytest.mark.parametrize("outputs", ["all", "nll"])
@pytest.mark.parametrize("name", ["paper's cnn", "cross attention", "tied", "transposed"])
def test_chunks_and_tiles_do_not_change_the_kernel(name, outputs, monkeypatch):
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    ensemble, x = build(architecture, "batch_ensemble")
    given = {}
    if outputs == "nll":
        given = {"target": torch.arange(len(x)) % 2}
    whole = finite.ntk(ensemble, x, outputs=outputs, **given)
    monkeypatch.setattr(contraction, "TILE_BYTES", 1)
    monkeypatch.setattr(kernels, "SMALL", 0)
    for chunk in (1, 2, 100):
        kernel = finite.ntk(ensemble, x, outputs=outputs, chunk=chunk, **given)
        assert_equal(kernel, (whole.shared, whole.individual))
    rectangular = finite.ntk(
        ensemble,
        x,
        x,
        outputs=outputs,
        chunk=2,
        **given,
        **({"target2": given["target"]} if given else {}),
    )
    assert_equal(rectangular, (whole.shared, whole.individual))
