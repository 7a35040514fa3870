"""Blocks do not change the kernels."""

from __future__ import annotations

import torch
from theory.measured import expected, points

import embens
from embens import laws, networks, theory


def test_blocks_do_not_change_the_result():
    x = points(23)
    for post in (laws.Normal(), laws.Shifted(0.5)):
        ensemble = embens.embed(networks.mlp(5, 4, 3), pre=laws.Normal(), post=post)
        whole = expected(theory.kernels(ensemble, x, block=23))
        parts = expected(theory.kernels(ensemble, x, block=4))
        between = expected(theory.kernels(ensemble, x[:10], x[10:], block=4))
        for name, value in whole.items():
            torch.testing.assert_close(parts[name], value, rtol=1e-13, atol=1e-15)
            torch.testing.assert_close(between[name], value[:10, 10:], rtol=1e-12, atol=1e-14)
            assert torch.equal(parts[name], parts[name].mT), name


def test_conditional_kernels_in_blocks_are_mirrored_with_their_members():
    x = points(5)
    ensemble = embens.embed(networks.mlp(5, 4, 1), 2, sites="all", trainable=False)
    whole, parts = theory.kernels(ensemble, x), theory.kernels(ensemble, x, block=2)
    for name, value in expected(whole).items():
        torch.testing.assert_close(expected(parts)[name], value)
