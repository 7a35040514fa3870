"""What a run says while it runs."""

from __future__ import annotations

import io
import math

from experiments import problem
from rich.console import Console

from embens.experiments.job import Done, make_job
from embens.experiments.progress import Progress, describe, duration


def console(**options):
    return Console(file=io.StringIO(), width=200, **options)


def jobs(count):
    return [make_job("transition", cell) for cell in problem.cells(count)]


def test_without_a_terminal_lines_tell_count_time_left_and_the_latest_result():
    shown = console()
    with Progress(shown, "transition") as progress:
        progress.start(sum(job.cell.weight for job in jobs(4)), 0.0, 4, 0)
        for job in jobs(4):
            progress.update(job, Done(job.key, [{"accuracy": 0.5}], None, 1.0))
    lines = shown.file.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("transition 1/4")
    assert "left: p=0.5 members=1 gamma=M seed=0: accuracy 0.5" in lines[0]
    assert "0 s left" in lines[-1]


def test_many_cells_make_ten_lines():
    shown = console()
    with Progress(shown, "t") as progress:
        progress.start(100.0, 0.0, 100, 0)
        for job in jobs(1) * 100:
            progress.update(job, Done(job.key, [{}], None, 1.0))
    assert len(shown.file.getvalue().splitlines()) == 10


def test_on_a_terminal_a_bar_is_drawn():
    shown = console(force_terminal=True)
    with Progress(shown, "transition") as progress:
        progress.start(2.0, 1.0, 2, 1)
        progress.update(jobs(1)[0], Done("k", [{"accuracy": 0.25}], None, 1.0))
    text = shown.file.getvalue()
    assert "2/2" in text
    assert "1 of 2 cells are there already" in text


def test_time_left_goes_by_the_weights_of_cells(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("embens.experiments.progress.time.perf_counter", lambda: now[0])
    progress = Progress(console(), "t")
    progress.start(100.0, 40.0, 5, 2)
    assert math.isnan(progress.time_left())
    now[0] = 10.0
    progress.skip(20.0)
    assert progress.time_left() == 20.0  # 40 of 100 left, 20 took ten seconds


def test_a_failure_is_told_by_its_last_line():
    job = jobs(1)[0]
    assert describe(job, Done(job.key, None, "Traceback\n\nValueError: no\n", 1.0)).endswith(
        "failed, ValueError: no"
    )
    assert duration(float("nan")) == "?"


def test_a_narrow_terminal_shows_count_time_left_and_the_latest_result():
    shown = Console(file=io.StringIO(), width=80, force_terminal=True)
    progress = Progress(shown, "parametrization")
    progress.start(10.0, 0.0, 240, 0)
    failure = Done("k", None, "Traceback\n[/] ValueError: " + "no " * 50, 1.0)
    progress.update(jobs(1)[0], failure)
    progress.skip(1.0)
    shown.print(progress.frame())
    first, second = shown.file.getvalue().splitlines()
    assert "2/240 (1 failed)" in first
    assert "left" in first
    assert "members=1 gamma=M seed=0: failed, [/] ValueError" in second
