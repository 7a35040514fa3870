"""Saving and loading: nothing lost, nothing executed, nothing foreign accepted."""

from __future__ import annotations

import dataclasses
import json
import pickle
import struct
from functools import partial

import cases
import pytest
import torch
from cases import ARCHITECTURES, Residual
from torch import nn

import embens
from embens import laws

FAMILIES = {
    "batch ensemble": lambda r: embens.batch_ensemble(r, 3, p=0.3),
    "frozen masks": lambda r: embens.mc_dropout(r, 3),
    "fresh masks": lambda r: embens.mc_dropout(r, 3, law=laws.Ternary(), fresh=True),
    "last layer": lambda r: embens.last_layer_dropout(r, 3, law=laws.Rademacher()),
    "independent": lambda r: embens.independent(r, 3),
    **{name: partial(family, members=3) for name, family in cases.FAMILIES.items()},
    "by site": lambda r: embens.embed(r, 3, pre=None, sites="all", trainable=False),
}


def mlp(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ensemble.safetensors"


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_loaded_ensemble_is_the_saved_one(case, family, path):
    reference, x = case.build(), case.inputs(torch.Generator().manual_seed(0))
    ensemble = family(reference).eval()
    with torch.no_grad():
        for p in ensemble.parameters():
            p.add_(0.1)
    ensemble.save(path)
    loaded = embens.load(path, case.build()).eval()
    assert loaded.plan == ensemble.plan
    for a, b in zip(loaded.state_dict().items(), ensemble.state_dict().items(), strict=True):
        assert a[0] == b[0]
        assert torch.equal(a[1], b[1])
    states = []
    for e in (ensemble, loaded):
        torch.manual_seed(0)
        states.append(e(x))
    assert torch.equal(*states)
    assert [p.requires_grad for p in loaded.parameters()] == [
        p.requires_grad for p in ensemble.parameters()
    ]


def test_the_reference_that_is_given_is_not_changed(path):
    embens.batch_ensemble(mlp(), 3).save(path)
    reference = mlp()
    before = [p.clone() for p in reference.parameters()]
    embens.load(path, reference)
    assert all(torch.equal(a, b) for a, b in zip(before, reference.parameters(), strict=True))


def test_a_law_of_the_users_own_is_loaded_once_its_class_is_defined_or_given(path, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Halves(laws.Discrete):
        value: float = 0.5

        @property
        def atoms(self):
            return ((-self.value, 0.5), (self.value, 0.5))

    embens.embed(mlp(), 2, pre=Halves(0.25)).save(path)
    assert Halves(0.25) in {s.law for s in embens.load(path, mlp()).plan.sites}
    monkeypatch.setattr(laws, "known", dict)  # as in a process that does not define it
    with pytest.raises(ValueError, match=r"laws=\[Halves\]"):
        embens.load(path, mlp())
    loaded = embens.load(path, mlp(), laws=[Halves, laws.Normal])
    assert Halves(0.25) in {s.law for s in loaded.plan.sites}


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.999])
def test_a_truncated_file_is_refused(path, keep):
    embens.batch_ensemble(mlp(), 3).save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        embens.load(path, mlp())


class Trap:
    """Would leave a mark if it were unpickled."""

    fired = False

    def __reduce__(self):
        return (setattr, (Trap, "fired", True))


def test_foreign_files_are_refused_and_never_executed(path):
    from safetensors.torch import save_file

    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        embens.load(path, mlp())
    assert not Trap.fired
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="no embens header"):
        embens.load(path, mlp())
    for header in ("{", "[]", "7", '{"format": "embens ensemble", "version": 1, "plan": {}}'):
        save_file({"a": torch.zeros(2)}, path, {"embens": header})
        with pytest.raises(ValueError, match="header"):
            embens.load(path, mlp())
    save_file({}, path, {"embens": json.dumps({"format": "embens ensemble", "version": 99})})
    with pytest.raises(ValueError, match=r"format version 99.*newer embens"):
        embens.load(path, mlp())


def edit_header(path, change) -> None:
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    plan = json.loads(header["__metadata__"]["embens"])
    change(plan["plan"])
    header["__metadata__"]["embens"] = json.dumps(plan)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + size :])


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.update(members=-1),
        lambda plan: plan.update(members="many"),
        lambda plan: plan["sites"][0].update(size=10**12),
        lambda plan: plan["sites"][0].update(kind="sideways"),
        lambda plan: plan["sites"][0]["law"].update(p="os.system"),
        lambda plan: plan["sites"][0]["law"].update(law="__import__"),
        lambda plan: plan["sites"][0].update(layer="nowhere"),
        lambda plan: plan.update(own=[["0", ["__class__"]]]),
        lambda plan: plan.update(surprise=1),
    ],
)
def test_a_header_that_was_tampered_with_is_refused_before_anything_is_built(path, change):
    embens.batch_ensemble(mlp(), 3).save(path)
    edit_header(path, change)
    with pytest.raises(ValueError, match=r"header|reference|law|members"):
        embens.load(path, mlp())


def test_another_architecture_is_refused_with_the_difference(path):
    embens.batch_ensemble(mlp(), 3).save(path)
    with pytest.raises(ValueError, match=r"reference.s layer needs 7, which is another shape"):
        embens.load(path, mlp(width=7))
    with pytest.raises(ValueError, match="the reference has no module '2'"):
        embens.load(path, nn.Sequential(nn.Linear(3, 6)))
    with pytest.raises(ValueError, match="no module '0'"):
        embens.load(path, Residual())


def test_a_missing_file_or_folder_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        embens.load(tmp_path / "nothing", mlp())
    with pytest.raises(FileNotFoundError, match="does not exist"):
        embens.batch_ensemble(mlp(), 2).save(tmp_path / "no" / "where")


def test_saving_over_a_file_is_atomic(path, monkeypatch):
    ensemble = embens.batch_ensemble(mlp(), 3)
    ensemble.save(path)
    before = path.read_bytes()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        ensemble.save(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_saved_file_has_the_permissions_of_any_new_file(path, tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    embens.batch_ensemble(mlp(), 2).save(path)
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o640)
    embens.batch_ensemble(mlp(), 2).save(path)
    assert path.stat().st_mode & 0o777 == 0o640
