"""A run continues from the published table of its folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from unittest import mock

import pandas
import pytest

from reproduction import claims
from reproduction.grid import published, runs
from reproduction.grid.cells import cells_of
from reproduction.grid.engines import inline
from reproduction.grid.keys import key_of
from reproduction.grid.published import published_records
from reproduction.grid.results import (
    Results,
    make_table,
    open_results,
    redraw,
    write_summary,
)
from reproduction.storage import DamagedFileError, checksum, seal
from tests.reproduction import problem


@pytest.fixture(autouse=True)
def few_samples(monkeypatch):
    monkeypatch.setattr(claims, "BOOTSTRAP_SAMPLES", 10)


def select(members, seeds=(0,)):
    """Return small cells of ``transition`` with their baselines."""
    cells = cells_of("transition", problem.SETTING, seeds)
    return runs.select(cells, p=[0.0, 0.5, 0.9], members=members, law=["normal"], gamma=["M"])


def publish(folder, cells):
    """Run cells, write the summary, and remove all other files."""
    results = Results(folder)
    runs.run("transition", cells, results, inline)
    table = make_table(results, "transition", problem.SETTING)
    write_summary(results, "transition", problem.SETTING, table)
    results.path.unlink()
    return results


@pytest.fixture(scope="module")
def published_folder(tmp_path_factory):
    """A published folder of one member, which tests copy."""
    folder = tmp_path_factory.mktemp("published") / "transition" / "quick"
    with mock.patch.object(claims, "BOOTSTRAP_SAMPLES", 10):
        publish(folder, select([1]))
    return folder


def open_published(folder, setting=problem.SETTING):
    return open_results(folder, "transition", setting)


def test_only_missing_cells_are_measured_and_all_are_in_the_table(tmp_path):
    folder = tmp_path / "transition" / "quick"
    first = publish(folder, select([1, 2]))
    text = (folder / "table.csv").read_text()
    results = open_published(folder)
    measured, failed = runs.run("transition", select([1, 2, 4]), results, inline)
    assert (measured, failed) == (3, [])
    table = make_table(results, "transition", problem.SETTING)
    assert set(first.records) < set(results.records)
    assert set(table["members"]) == {1, 2, 4, 8}  # eight networks are a baseline
    write_summary(results, "transition", problem.SETTING, table)
    written = set((folder / "table.csv").read_text().splitlines())
    assert set(text.splitlines()) <= written
    assert len(written) == len(text.splitlines()) + 3


def test_records_of_the_table_are_those_of_the_run_to_six_digits(tmp_path):
    folder = tmp_path / "transition" / "quick"
    expected = publish(folder, select([1, 2], seeds=(0, 3))).records
    records = open_published(folder).records

    assert records.keys() == expected.keys()
    for key, record in expected.items():
        assert records[key]["cell"] == record["cell"]
        assert records[key]["code"] == record["code"]
        for ours, theirs in zip(records[key]["rows"], record["rows"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-9, nan_ok=True)


def test_results_of_the_folder_come_before_the_table(published_folder, tmp_path):
    folder = tmp_path / "transition" / "quick"
    shutil.copytree(published_folder, folder)
    key = key_of(select([1])[0])
    Results(folder).add({"key": key, "rows": [{"accuracy": 2.0}]})
    assert open_published(folder).records[key]["rows"] == [{"accuracy": 2.0}]


def test_a_table_of_another_setting_or_other_code_is_not_used(
    published_folder, tmp_path, monkeypatch
):
    folder = tmp_path / "transition" / "quick"
    shutil.copytree(published_folder, folder)
    longer = replace(problem.SETTING, epochs=2)
    assert published_records(folder, "transition", longer) == []
    assert published_records(folder, "transition", problem.SETTING)
    monkeypatch.setattr(published, "code_version", lambda name: "other")
    assert published_records(folder, "transition", problem.SETTING) == []


def test_a_table_without_its_identity_is_not_used(published_folder, tmp_path):
    folder = tmp_path / "transition" / "quick"
    shutil.copytree(published_folder, folder)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in ("codes", "cell_setting", "sha256"):
        del manifest[name]
    path.write_text(json.dumps(seal(manifest)))

    assert published_records(folder, "transition", problem.SETTING) == []
    assert published_records(tmp_path, "transition", problem.SETTING) == []


def test_an_edited_table_is_refused(published_folder, tmp_path):
    folder = tmp_path / "transition" / "quick"
    shutil.copytree(published_folder, folder)
    path = folder / "table.csv"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(DamagedFileError, match=r"table\.csv does not match"):
        open_published(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(DamagedFileError, match=r"manifest\.json is damaged"):
        open_published(folder)
    assert published.borrowed_records(folder, select([1])) == []


def forge(folder, name, content):
    """Replace a file, with a valid checksum in the manifest."""
    (folder / name).write_text(content)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["sha256"]
    manifest["files"][name] = checksum(content)
    (folder / "manifest.json").write_text(json.dumps(seal(manifest)))


def use(folder):
    """Continue a published table, and draw it again."""
    open_published(folder)
    redraw(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text.splitlines()[0] + "\n",
        lambda text: text.replace("seed", "sead"),
        lambda text: text.replace("normal", "high").replace(",0.5,", ",<script>,"),
        lambda text: text.replace(",M,0,", ",M,,"),
    ],
)
def test_a_forged_table_is_an_error_with_its_name(change, published_folder, tmp_path):
    folder = tmp_path / "quick"
    shutil.copytree(published_folder, folder)
    text = (folder / "table.csv").read_text()
    forge(folder, "table.csv", change(text))

    with pytest.raises(DamagedFileError, match="quick"):
        use(folder)
    assert isinstance(published.borrowed_records(folder, select([1])), list)


@pytest.mark.parametrize("name", ["files", "codes", "setting"])
def test_a_forged_manifest_is_an_error_with_its_name(name, published_folder, tmp_path):
    folder = tmp_path / "quick"
    shutil.copytree(published_folder, folder)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["sha256"]
    manifest[name] = 3
    (folder / "manifest.json").write_text(json.dumps(seal(manifest)))

    with pytest.raises(DamagedFileError, match="quick"):
        use(folder)


def test_published_baselines_serve_other_experiments(published_folder, tmp_path):
    shutil.copytree(published_folder, tmp_path / "transition" / "quick")
    baseline = select([1])[-1]
    assert baseline.experiment == "baselines"
    results = Results(tmp_path / "widths" / "quick")
    assert runs.run("widths", [baseline], results, inline) == (0, [])
    assert len(results.records[key_of(baseline)]["rows"]) == 4
    assert list(Results(results.folder).records) == [key_of(baseline)]


def test_the_command_continues_from_a_published_table(tmp_path, capsys):
    options = "--epochs 1 --workers 0 --seeds 1 --only p=0 law=normal --members".split()
    problem.reproduce("transition", "--out", tmp_path, *options, "1", "2")
    folder = tmp_path / "transition" / "quick"
    (folder / "results.jsonl").unlink()
    capsys.readouterr()
    problem.reproduce("transition", "--out", tmp_path, *options, "2", "4", "--dry-run")
    assert "3 cells, 1 to measure" in capsys.readouterr().out
    problem.reproduce("transition", "--out", tmp_path, *options, "2", "4")
    assert "1 cells measured" in capsys.readouterr().out
    table = pandas.read_csv(folder / "table.csv")
    assert {1, 2, 4} <= set(table["members"])
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"]["table.csv"] == checksum((folder / "table.csv").read_text())
    assert manifest["cells"] == 4
