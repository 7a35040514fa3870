"""The battery of the experiment gradients, its exponents and its cosines."""

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


class TestGradients(Battery):
    name = "gradients"
    contradicting_seeds = 2
    # The tables have the theory's exponent of −1/2.
    never_true = ("|cos| ∝ 1/width, as in the paper",)

    @staticmethod
    def confirming_rows(cell, noise):
        exponents = {"total": -0.5, "first": -0.5, "inner": -1.0, "last": -0.5}
        if cell["kind"] == "shifted":
            exponents = dict.fromkeys(exponents, 0.0)
        spread = 1.5 if cell["kind"] == "input and output" else 0.2
        return make_rows(cell, noise, exponents, spread)

    @staticmethod
    def contradicting_rows(cell, noise):
        exponent = -0.8 if cell["kind"] == "shifted" else 0.0
        spread = 0.2 if cell["kind"] == "input and output" else 1.5
        return make_rows(cell, noise, dict.fromkeys(gradients.PARTS, exponent), spread)


def make_rows(cell, noise, exponents, spread):
    """Return a row per member: cosines are powers of the width, norms differ by ``spread``."""
    rows = []
    for member in range(4):
        row = {"member": member, "norm": 10 ** (spread * (member - 1.5) + noise(0.02))}
        for part, exponent in exponents.items():
            cosine = 0.1 * cell["width"] ** exponent * math.exp(noise(0.01))
            row[f"cos_{part}"] = cosine
            row[f"cos2_{part}"] = 2 * cosine**2
        rows.append(row)
    return rows


def test_claim_of_the_paper_holds_if_cosines_fall_with_the_inverse_width():
    rows = []
    for width in (1.0, 2.0, 4.0):
        for seed in range(3):
            row = {"kind": "centred", "width": width, "seed": seed, "norm": 1.0}
            for part in gradients.PARTS:
                row[f"cos_{part}"] = 1 / width
                row[f"cos2_{part}"] = 1 / width**2
            rows.append(row)

    claims = judge(gradients.CLAIMS, pandas.DataFrame(rows))

    verdicts = {claim.statement: claim.verdict for claim in claims}
    assert verdicts["|cos| ∝ 1/width, as in the paper"] == HOLDS
    assert verdicts["|cos| ∝ width^−1/2, as in the theory"] == FAILS


def test_total_cosines_follow_from_those_of_the_layers():
    cell = cells_of("gradients", PRESETS["quick"], [0])[0]
    network, generator = cell.build_reference()
    ensemble = batch_ensemble(network, 4, generator=generator)
    x, y = gradients.draw_samples(cell, generator)

    by_layer = gradient_cosines(ensemble, x, y, by_layer=True)
    total = gradients.total_cosines(by_layer, dict(gradient_norms(ensemble, x, y)))

    torch.testing.assert_close(total, gradient_cosines(ensemble, x, y), rtol=1e-4, atol=1e-5)
