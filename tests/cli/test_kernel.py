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
    marks = tmp_path / "k.npz.partial"
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
        (["--out", "k.txt"], "ends in .npz"),
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


def command(folder, out):
    np.save(folder / "x.npy", points(300).numpy())
    network = ("--network", "mlp(inputs=5, depth=2)", "--law", "Shifted(0.5)", "--quiet")
    return ["kernel", *network, "--data", str(folder / "x.npy"), "--out", str(out), "--block", "40"]


def expected():
    law = laws.Shifted(0.5)
    return theory.kernels(embens.embed(networks.mlp(5, depth=2), pre=law, post=law), points(300))


@pytest.mark.long
def test_three_runs_at_once_on_one_file_do_not_harm_each_other(tmp_path):
    folder = tmp_path / "out"
    call = [sys.executable, "-m", "embens.cli", *command(tmp_path, folder / "k.npz")]
    for _ in range(3):
        runs = [subprocess.Popen(call, stderr=subprocess.PIPE, text=True) for _ in range(3)]
        errors = [run.communicate()[1] for run in runs]
        codes = [run.returncode for run in runs]
        assert 0 in codes
        for code, error in zip(codes, errors, strict=True):
            assert code == 0 or (code == 2 and "k.npz is in use by" in error), error
        assert_same(theory.load_kernels(folder / "k.npz"), expected())
        assert [path.name for path in folder.iterdir()] == ["k.npz"]
        (folder / "k.npz").unlink()


DISK = """
import subprocess, sys, os
from embens import cli

disk, *arguments = sys.argv[1:]
print(os.listdir(disk))
for size in ("size=1m", "size=30m", "ro"):
    subprocess.run(["mount", "-o", f"remount,{size}", disk], check=True)
    try:
        print(cli.main([*arguments, "--points", "250"] if size == "ro" else arguments))
    except SystemExit as stop:
        print(stop.code)
    print(sorted(os.listdir(disk)))
"""


@pytest.mark.long
def test_a_disk_that_is_full_or_read_only_is_an_error_and_with_room_it_goes_on(tmp_path):
    """On a small file system of its own, which nobody else sees."""
    disk, out = tmp_path / "disk", tmp_path / "found.npz"
    disk.mkdir()
    mount = 'mount -t tmpfs -o size=1m none "$1" || exit 77; '
    script = mount + 'disk="$1"; code="$2"; shift 2; "$0" -c "$code" "$disk" "$@"; '
    script += f'cp -r "$disk/k.npz" "{out}"'
    arguments = command(tmp_path, disk / "k.npz")
    shell = ["unshare", "-rm", "sh", "-c", script, sys.executable, str(disk), DISK, *arguments]
    try:
        done = subprocess.run(shell, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip("file systems can't be mounted here")
    lines = [line for line in done.stdout.splitlines() if line[0] in "[02"]
    parts = lines.pop(2)
    assert lines == ["[]", "2", "0", "['k.npz']", "2", "['k.npz']"], done.stderr
    assert "k.npz.partial" in parts
    assert "Traceback" not in done.stderr
    full, read_only = [line for line in done.stderr.splitlines() if "error:" in line]
    assert "No space left on device" in full
    assert "Read-only file system" in read_only
    assert_same(theory.load_kernels(out), expected())
