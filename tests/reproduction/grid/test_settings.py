"""Presets, their data and their networks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reproduction.grid.settings import PRESETS, build_reference, load_data, with_fingerprint
from tests.reproduction import problem


@pytest.fixture
def paper(small_cifar):
    return with_fingerprint(replace(PRESETS["paper"], epochs=1, validation=0, train=256))


def test_the_preset_paper_has_the_network_of_the_paper(paper):
    sizes = [tuple(p.shape) for p in build_reference(paper).parameters()]
    assert sizes == [
        (64, 3, 3, 3), (128, 64, 3, 3), (256, 128, 3, 3), (512, 256, 3, 3), (100, 512)
    ]  # fmt: skip
    held = PRESETS["paper"]
    assert (held.train, held.validation, held.batch_size, held.lr) == (40_000, 10_000, 128, 0.01)
    assert (held.epochs, held.labels, held.image) == (1000, "fine", 32)


def test_a_part_of_the_paper_s_data_is_held_out(paper):
    data = load_data(replace(paper, validation=10_000, records=""))
    assert len(data.validation.targets) == 51  # a fifth at most, of a small folder
    assert len(data.train.targets) == 205
    assert data.classes == 100


def test_other_records_have_another_fingerprint(paper, tmp_path, monkeypatch):
    folder = problem.write_cifar(tmp_path / "other", train=255, test=32)
    monkeypatch.setenv("EMBENS_DATA", str(folder))
    assert with_fingerprint(paper).records != paper.records
    assert with_fingerprint(PRESETS["quick"]) == PRESETS["quick"]


def test_the_first_records_give_the_samples_of_the_whole_archive(tmp_path, monkeypatch):
    whole = problem.write_cifar(tmp_path / "whole", train=60)
    part = tmp_path / "part"
    part.mkdir()
    record = 2 + 3072
    (part / "train.bin").write_bytes((whole / "train.bin").read_bytes()[: 40 * record])
    (part / "test.bin").write_bytes((whole / "test.bin").read_bytes())
    setting = replace(PRESETS["cpu"], pool=40, train=20, validation=8, test=10)
    fingerprints = set()
    for folder in (whole, part):
        monkeypatch.setenv("EMBENS_DATA", str(folder))
        fingerprints.add(with_fingerprint(setting).records)

    assert len(fingerprints) == 1
    assert with_fingerprint(replace(setting, pool=39)).records not in fingerprints


def test_the_data_of_a_setting_are_read_once():
    assert load_data(PRESETS["quick"]) is load_data(replace(PRESETS["quick"]))
