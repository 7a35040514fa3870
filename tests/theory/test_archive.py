"""Kernels in files: round trips, damaged files, and interrupted computations."""

from __future__ import annotations

import signal

import pytest
import torch

import embens
from embens import laws, networks, theory
from embens.files import Refused, locked
from embens.theory import archive


def ensemble(**options):
    options = {"pre": laws.Normal(), "post": laws.Shifted(0.5), **options}
    return embens.embed(networks.mlp(5, 4, 2), 2, **options)


def inputs(n: int = 20) -> torch.Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def assert_same(k, reference):
    for mine, other in zip(k.blocks, reference.blocks, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_what_is_written_is_what_kernels_gives(tmp_path):
    path = tmp_path / "k.npz"
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

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(archive._Assembly, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        theory.write_kernels(path, ensemble(), inputs(), block=5)
    for other in (
        {"ensemble": ensemble(post=laws.Shifted(0.6)), "x1": inputs(), "block": 5},
        {"ensemble": ensemble(), "x1": inputs() + 1, "block": 5},
        {"ensemble": ensemble(), "x1": inputs(), "block": 4},
    ):
        with pytest.raises(FileExistsError, match="part of other kernels"):
            theory.write_kernels(path, **other)


def test_kernels_of_members_that_differ_come_back(tmp_path):
    some = embens.embed(networks.mlp(5, 4, 1), 2, sites="all", trainable=False)
    theory.write_kernels(tmp_path / "k.npz", some, inputs(7), block=3)
    loaded = theory.load_kernels(tmp_path / "k.npz")
    assert loaded.conditional
    assert_same(loaded, theory.kernels(some, inputs(7)))


def test_a_flipped_bit_anywhere_is_refused(tmp_path):
    path = tmp_path / "k.npz"
    theory.write_kernels(path, ensemble(), inputs(), block=6)
    reference = theory.load_kernels(path)
    content = path.read_bytes()
    for place in range(0, len(content), len(content) // 150):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            loaded = theory.load_kernels(path)
        except Refused:
            continue
        assert all(map(torch.equal, loaded.blocks, reference.blocks))  # a date, say


def test_arrays_that_do_not_belong_together_and_other_files_are_refused(tmp_path):
    import numpy as np

    np.savez(tmp_path / "k.npz", **{name: np.eye(3) for name in archive.NAMES})
    with pytest.raises(Refused, match="has no embens header"):
        theory.load_kernels(tmp_path / "k.npz")
    np.savez_compressed(tmp_path / "k.npz", **{name: np.zeros((2000, 2000)) for name in "ab"})
    with pytest.raises(Refused, match="is compressed"):  # it may hold any amount
        theory.load_kernels(tmp_path / "k.npz")
    (tmp_path / "k.npz").write_text("text")
    with pytest.raises(Refused, match=r"k.npz can't be read: BadZipFile"):
        theory.load_kernels(tmp_path / "k.npz")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        theory.load_kernels(tmp_path / "none.npz")
    with pytest.raises(ValueError, match=r"ends in \.npz"):
        theory.load_kernels(tmp_path / "k.zarr")


def test_a_file_in_use_is_left_alone_and_one_that_is_there_is_not_computed_again(tmp_path):
    path = tmp_path / "k.npz"
    message, lock = r"k.npz is in use by process", locked(tmp_path / ".k.npz.lock", "it")
    with lock, pytest.raises(BlockingIOError, match=message):
        theory.write_kernels(path, ensemble(), inputs())
    theory.write_kernels(path, ensemble(), inputs())
    before = path.stat().st_mtime_ns
    theory.write_kernels(path, ensemble(), inputs())
    assert path.stat().st_mtime_ns == before
    theory.write_kernels(path, ensemble(), inputs() + 1)
    assert path.stat().st_mtime_ns != before


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="there are no limits on files here")
def test_a_full_disk_is_an_error_and_afterwards_it_goes_on(tmp_path):
    import resource

    path, limits = tmp_path / "k.npz", resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            theory.write_kernels(path, ensemble(), inputs(100), block=40)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    theory.write_kernels(path, ensemble(), inputs(100), block=40)
    assert_same(theory.load_kernels(path), theory.kernels(ensemble(), inputs(100)))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_damaged_file_with_the_right_header_is_left_alone_and_refused_when_it_is_read(tmp_path):
    path = tmp_path / "k.npz"
    theory.write_kernels(path, ensemble(), inputs(), block=6)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    theory.write_kernels(path, ensemble(), inputs(), block=6)
    with pytest.raises(Refused, match=r"k\.npz"):
        theory.load_kernels(path)
    path.unlink()
    theory.write_kernels(path, ensemble(), inputs(), block=6)
    assert_same(theory.load_kernels(path), theory.kernels(ensemble(), inputs()))
