"""The command ``embens diagnose``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from finite.diagnosed import X, Y, batch_ensemble

import embens
from embens import networks
from embens.cli import main


def run(*arguments: str) -> int:
    return main(["diagnose", *arguments])


@pytest.fixture
def saved(tmp_path) -> Path:
    batch_ensemble(p=0.99).save(tmp_path / "ensemble.safetensors")
    (tmp_path / "network.py").write_text(
        "from embens import networks\n"
        "def build():\n    return networks.mlp(12, 64, 2, 4, weight_std=2**0.5)\n"
        "number = 3\ndef wrong():\n    return 3\n"
    )
    numpy = pytest.importorskip("numpy")
    numpy.savez(tmp_path / "data.npz", x=X.numpy(), y=Y.numpy())
    numpy.savez(tmp_path / "other.npz", a=X.numpy())
    return tmp_path


OWN = "mlp(12, width=64, depth=2, outputs=4, weight_std=1.4142135623730951)"


def test_the_command_prints_text_or_numbers(saved, capsys):
    arguments = (str(saved / "ensemble.safetensors"), "--data", str(saved / "data.npz"))
    assert run(*arguments, "--reference", OWN, "--gamma", "8") == 0
    assert "8 times" not in (text := capsys.readouterr().out)
    assert "collective" in text
    assert "! gamma=8" in text
    reference = f"{saved / 'network.py'}:build"
    picture = saved / "out.png"
    assert run(*arguments, "--reference", reference, "--json", "--plot", str(picture)) == 0
    assert json.loads(capsys.readouterr().out)["regime"] == "collective"
    assert picture.exists()


def test_the_command_has_data_of_its_own(tmp_path, capsys):
    pytest.importorskip("sklearn")
    path = tmp_path / "e.safetensors"
    embens.batch_ensemble(networks.mlp(64, 16, 1, 10), 2).save(path)
    assert run(str(path), "--reference", "mlp(64, 16, 1, 10)") == 0
    embens.batch_ensemble(networks.cnn((4, 4), inputs=1, outputs=10, image=8), 2).save(path)
    assert run(str(path), "--reference", "cnn((4, 4), inputs=1, outputs=10, image=8)") == 0
    assert "2 members" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reference", "data", "message"),
    [
        ("mlp(12, width=64", "data.npz", "such as mlp(…)"),
        ("mpl(12)", "data.npz", "did you mean 'mlp'"),
        ("mlp(width=open('x'))", "data.npz", "literal values"),
        ("mlp(12, 32, 2, 4)", "data.npz", "which is another shape"),
        ("mlp(widht=3)", "data.npz", "widht"),
        ("no.such.module:build", "data.npz", "there is no file no.such.module"),
        ("nothing.py:build", "data.npz", "there is no file"),
        ("{folder}/network.py:builds", "data.npz", "has no 'builds'"),
        ("{folder}/network.py:wrong", "data.npz", "should return a torch.nn.Module"),
        (OWN, "nothing.npz", "there is no file"),
        (OWN, "other.npz", "expected arrays x and y"),
    ],
)
def test_a_wrong_command_is_explained(saved, capsys, reference, data, message):
    reference = reference.replace("{folder}", str(saved))
    with pytest.raises(SystemExit) as stop:
        run(
            *(str(saved / "ensemble.safetensors"), "--reference", reference),
            *("--data", str(saved / data)),
        )
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
