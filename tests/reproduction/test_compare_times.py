"""Times of the systems of compare."""

from __future__ import annotations

from dataclasses import replace

from reproduction import compare_times
from reproduction.competitors import FOUR_NETWORKS, ONE, SYSTEMS, TWO_NETWORKS
from reproduction.figures.compare import CHANGES
from reproduction.grid.settings import PRESETS

SETTING = replace(PRESETS["quick"], **{**CHANGES["quick"], "epochs": 2, "train": 64})


def test_every_system_is_timed_and_the_fastest_round_counts(monkeypatch):
    turns = []

    def time_system(cell):
        turns.append(cell["system"])
        return {"training_seconds": float(len(turns)), "inference_seconds": -float(len(turns))}

    monkeypatch.setattr(compare_times, "time_system", time_system)
    rows = compare_times.measure_times(SETTING, rounds=2)

    systems = [*SYSTEMS, TWO_NETWORKS, FOUR_NETWORKS]
    assert turns == systems * 2
    assert [row["system"] for row in rows] == systems
    assert rows[0]["training_seconds"] == 1.0
    assert rows[0]["inference_seconds"] == -1.0 - len(systems)


def test_systems_are_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(compare_times, "SETTING", SETTING)
    monkeypatch.setattr(compare_times, "SYSTEMS", {ONE: SYSTEMS[ONE]})
    monkeypatch.setattr(compare_times, "ROUNDS", 1)
    compare_times.main([str(tmp_path / "times.csv")])
    header, *rows = (tmp_path / "times.csv").read_text().splitlines()

    assert header == "system,training_seconds,inference_seconds"
    assert [row.split(",")[0] for row in rows] == [ONE, TWO_NETWORKS, FOUR_NETWORKS]
    assert all(float(value) > 0 for row in rows for value in row.split(",")[1:])
