"""Kernels in files."""

from __future__ import annotations

import pytest
import torch

import embens
from embens import laws, networks, theory
from embens.theory import files


def ensemble(**options):
    options = {"pre": laws.Normal(), "post": laws.Shifted(0.5), **options}
    return embens.embed(networks.mlp(5, 4, 2), 2, **options)


def points(n: int = 20) -> torch.Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def assert_same(k, reference):
    for mine, other in zip(k.blocks, reference.blocks, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("ending", ["npz", "zarr"])
def test_what_is_written_is_what_kernels_gives(tmp_path, ending):
    if ending == "zarr":
        pytest.importorskip("zarr")
    path = tmp_path / f"k.{ending}"
    theory.write_kernels(path, ensemble(), points(), block=6)
    assert_same(theory.load_kernels(path), theory.kernels(ensemble(), points()))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_an_interrupted_file_goes_on_with_the_blocks_that_are_left(tmp_path, monkeypatch):
    path, computed = tmp_path / "k.npz", []
    reference = theory.kernels(ensemble(), points())
    block, most = theory.Limit.block, 5

    def counted(self, rows, columns):
        if len(computed) == most:
            raise KeyboardInterrupt
        computed.append((rows.start, columns.start))
        return block(self, rows, columns)

    monkeypatch.setattr(theory.Limit, "block", counted)
    monkeypatch.setattr(files, "_FLUSH_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        theory.write_kernels(path, ensemble(), points(), block=5)
    assert not path.exists()
    first, computed, most = computed, [], 10
    theory.write_kernels(path, ensemble(), points(), block=5)
    assert len(first) == 5
    assert len(computed) == 10 - 5
    assert not set(first) & set(computed)
    assert_same(theory.load_kernels(path), reference)


def test_a_part_of_other_kernels_is_not_mixed_in(tmp_path, monkeypatch):
    path = tmp_path / "k.npz"
    monkeypatch.setattr(files, "_publish", lambda *a: None)
    theory.write_kernels(path, ensemble(), points(), block=5)
    for other in (
        {"ensemble": ensemble(post=laws.Shifted(0.6)), "x1": points(), "block": 5},
        {"ensemble": ensemble(), "x1": points() + 1, "block": 5},
        {"ensemble": ensemble(), "x1": points(), "block": 4},
    ):
        with pytest.raises(FileExistsError, match="part of other kernels"):
            theory.write_kernels(path, **other)
