"""Blocks do not change the kernels, in memory or in a file."""

from __future__ import annotations

import pytest
import torch
from theory.measured import expected, points

import embens
from embens import laws, networks, theory
from embens.theory import blocks


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


def ensemble(**options):
    options = {"pre": laws.Normal(), "post": laws.Shifted(0.5), **options}
    return embens.embed(networks.mlp(5, 4, 2), 2, **options)


def inputs(n: int = 20) -> torch.Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def assert_same(k, reference):
    for mine, other in zip(k.blocks, reference.blocks, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("ending", ["npz", "zarr"])
def test_what_is_written_is_what_kernels_gives(tmp_path, ending):
    if ending == "zarr":
        pytest.importorskip("zarr")
    path = tmp_path / f"k.{ending}"
    theory.write_kernels(path, ensemble(), inputs(), block=6)
    assert_same(theory.load_kernels(path), theory.kernels(ensemble(), inputs()))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_an_interrupted_file_goes_on_with_the_blocks_that_are_left(tmp_path, monkeypatch):
    path, computed = tmp_path / "k.npz", []
    reference = theory.kernels(ensemble(), inputs())
    block, most = theory.Limit.block, 5

    def counted(self, rows, columns):
        if len(computed) == most:
            raise KeyboardInterrupt
        computed.append((rows.start, columns.start))
        return block(self, rows, columns)

    monkeypatch.setattr(theory.Limit, "block", counted)
    monkeypatch.setattr(blocks, "_FLUSH_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        theory.write_kernels(path, ensemble(), inputs(), block=5)
    assert not path.exists()
    first, computed, most = computed, [], 10
    theory.write_kernels(path, ensemble(), inputs(), block=5)
    assert len(first) == 5
    assert len(computed) == 10 - 5
    assert not set(first) & set(computed)
    assert_same(theory.load_kernels(path), reference)


def test_a_part_of_other_kernels_is_not_mixed_in(tmp_path, monkeypatch):
    path = tmp_path / "k.npz"
    monkeypatch.setattr(blocks, "_publish", lambda *a: None)
    theory.write_kernels(path, ensemble(), inputs(), block=5)
    for other in (
        {"ensemble": ensemble(post=laws.Shifted(0.6)), "x1": inputs(), "block": 5},
        {"ensemble": ensemble(), "x1": inputs() + 1, "block": 5},
        {"ensemble": ensemble(), "x1": inputs(), "block": 4},
    ):
        with pytest.raises(FileExistsError, match="part of other kernels"):
            theory.write_kernels(path, **other)
