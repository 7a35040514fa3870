"""Tables hold what belongs together, and say where it comes from."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

from experiments import problem

from embens.experiments import grid, table
from embens.experiments.engines import Inline
from embens.experiments.results import Results
from embens.experiments.table import tidy


def measure(cells, folder):
    grid.run("transition", cells, results=Results(folder), engine=Inline())


def test_the_table_holds_what_the_present_code_measured(tmp_path):
    measure(problem.cells(2), tmp_path)
    results = Results(tmp_path)
    results.add({**next(iter(results.records.values())), "key": "old", "code": "another"})
    found = tidy(results, "transition", problem.SETTING)
    assert list(found["members"]) == [1, 2]
    assert set(found) >= {"p", "gamma", "seed", "accuracy", "seconds"}
    assert not len(tidy(results, "transition", replace(problem.SETTING, records="other data")))
    assert table.count_others(results, "transition") == 1


def test_results_with_other_epochs_stay_out_of_the_table(tmp_path):
    longer = replace(problem.SETTING, epochs=2)
    measure(problem.cells(3), tmp_path)
    measure(problem.cells(2, longer), tmp_path)
    results = Results(tmp_path)
    assert list(tidy(results, "transition", problem.SETTING)["members"]) == [1, 2, 3]
    assert list(tidy(results, "transition", longer)["members"]) == [1, 2]
    table.write(results, "transition", longer, tidy(results, "transition", longer))
    assert json.loads((tmp_path / "manifest.json").read_text())["cells"] == 2


def test_the_commit_is_not_that_of_a_repository_in_which_the_library_is_installed(
    tmp_path, monkeypatch
):
    site = tmp_path / "venv" / "lib" / "embens" / "experiments"
    site.mkdir(parents=True)
    (site / "table.py").write_text("installed")
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *author, *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(table, "__file__", str(site / "table.py"))
    assert table.commit() is None
