"""The README is true: its code runs, what it points to exists, its example is short."""

from __future__ import annotations

from pages import ROOT, blocks, check_references, run

README = ROOT / "README.md"


def test_every_block_runs_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(blocks(README)) >= 4
    names = run(README)
    assert names["outputs"].shape == (8, 256, 3)
    assert names["split"].shape == (256, 3)


def test_the_first_example_has_at_most_fifteen_lines():
    assert len([line for line in blocks(README)[0].splitlines() if line.strip()]) <= 15


def test_what_it_points_to_exists():
    check_references(README)
