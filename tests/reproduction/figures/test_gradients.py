"""gradients: its battery, on tables of which its claims are true, or false."""

from __future__ import annotations

import math

import pandas
import torch

from embens.finite import gradient_cosines, gradient_norms
from reproduction.claims import FAILS, HOLDS, judge
from reproduction.figures import gradients
from reproduction.grid.cells import cells_of
from reproduction.grid.settings import PRESETS
from reproduction.training import batch_ensemble
from tests.reproduction.battery import Battery


def rows(c, true, noise):
    rows = []
    for member in range(4):
        wide = c["kind"] == "input and output"
        spread = (1.5 if wide else 0.2) if true else (0.2 if wide else 1.5)
        norm = 10 ** (spread * (member - 1.5) + noise(0.02))
        power = {"total": -0.5, "first": -0.5, "inner": -1.0, "last": -0.5}
        if c["kind"] == "shifted":
            power = dict.fromkeys(power, 0.0 if true else -0.8)
        elif not true:
            power = dict.fromkeys(power, 0.0)
        row = {"member": member, "norm": norm}
        for part, exponent in power.items():
            scale = 0.1 * c["width"] ** exponent * math.exp(noise(0.01))
            row |= {f"cos_{part}": scale, f"cos2_{part}": 2 * scale**2}
        rows.append(row)
    return rows


class TestGradients(Battery):
    name, rows = "gradients", staticmethod(rows)
    contradicting = 2
    never_true = ("|cos| ∝ 1/width, as in the paper",)  # with the theory's −1/2; see the test below


def test_the_paper_s_exponent_can_hold_instead_of_the_theory_s():
    table = [
        {"kind": "centred", "width": w, "seed": s, "norm": 1.0}
        | {f"cos_{part}": 1 / w for part in gradients.PARTS}
        | {f"cos2_{part}": 1 / w**2 for part in gradients.PARTS}
        for w in (1.0, 2.0, 4.0)
        for s in range(3)
    ]
    verdicts = {c.statement: c.verdict for c in judge(gradients.CLAIMS, pandas.DataFrame(table))}
    assert verdicts["|cos| ∝ 1/width, as in the paper"] == HOLDS
    assert verdicts["|cos| ∝ width^−1/2, as in the theory"] == FAILS


def test_whole_cosines_follow_from_those_of_the_layers():
    cell = cells_of("gradients", PRESETS["quick"], [0])[0]
    network, generator = cell.build_reference()
    ensemble = batch_ensemble(network, 4, generator=generator)
    x, y = gradients.draw_samples(cell, generator)
    by_layer = gradient_cosines(ensemble, x, y, by_layer=True)
    total = gradients.total_cosines(by_layer, dict(gradient_norms(ensemble, x, y)))
    torch.testing.assert_close(total, gradient_cosines(ensemble, x, y), rtol=1e-4, atol=1e-5)
