"""The command that writes kernels."""

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
from embens.theory.storage import NAMES


def points(n: int = 20) -> torch.Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def assert_same(k, reference):
    for mine, other in zip(k.blocks, reference.blocks, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


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
        assert sorted(file) == sorted([*NAMES, "embens.json"])
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
