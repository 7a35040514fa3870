"""Kernels in files, and the command that writes them."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import embens
from embens import cli, laws, networks, theory
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


def test_a_killed_command_resumes_and_ends_with_the_same_file(tmp_path):
    """SIGKILL in the middle, then the same command again."""
    np.save(tmp_path / "x.npy", points(300).numpy())
    out = tmp_path / "k.npz"
    arguments = [
        sys.executable, "-m", "embens.cli", "kernel", "--network", "mlp(inputs=5, depth=2)",
        "--law", "Shifted(0.5)", "--data", str(tmp_path / "x.npy"), "--out", str(out),
        "--block", "20", "--quiet",
    ]  # fmt: skip
    process = subprocess.Popen(arguments)
    marks = tmp_path / "k.npz.partial" / "nngp_same.npy"
    while not marks.exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "natural gamma of 8 members" in done.stdout
    law = laws.Shifted(0.5)
    reference = embens.embed(networks.mlp(5, depth=2), pre=law, post=law)
    assert_same(theory.load_kernels(out), theory.kernels(reference, points(300)))


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    out = tmp_path / "digits.npz"
    assert cli.main(["kernel", "--points", "30", "--out", str(out), "--law", "Normal()"]) == 0
    printed = capsys.readouterr().out
    assert "30 × 30 inputs" in printed
    assert "independent" in printed.lower()
    with np.load(out) as file:
        assert sorted(file) == sorted(files.NAMES)
        assert (file["nngp_cross"] == 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "k.txt"], "ends in .npz or .zarr"),
        (["--out", "k.npz", "--law", "Shifted(2)"], r"p must be a number in \[-1, 1\]"),
        (["--out", "k.npz", "--law", "Shifed(0.2)"], "did you mean 'Shifted'"),
        (["--out", "k.npz", "--network", "mlp(inputs=__import__('os'))"], "literal values"),
        (["--out", "k.npz", "--network", "mlp(inputs=5)"], r"takes \(n, 5\); got"),
        (["--out", "k.npz", "--data", "nothing.npy"], "there is no file nothing.npy"),
        (["--out", "k.npz", "--points", "0"], "at least 1"),
        (["--out", "k.npz", "--network", "nowhere.py:make"], "there is no file nowhere.py"),
    ],
)
def test_a_wrong_call_is_explained_before_anything_is_written(
    arguments, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["kernel", *arguments])
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())
