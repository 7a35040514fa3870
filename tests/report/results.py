"""A folder of results to report on, from a made-up table."""

from __future__ import annotations

from experiments import synthetic

from embens.experiments import contract, grid
from embens.experiments.figure import draw
from embens.experiments.setting import PRESETS
from embens.experiments.store import Store
from embens.experiments.table import manifest, write


def make(out, *names, kind="mixed"):
    """Write what ``embens reproduce`` would have written."""
    setting = PRESETS["quick"]
    for name in names:
        experiment, rows = contract.load(name), synthetic.table(name, kind, seeds=2)
        store = Store(grid.folder_of(out, name, "quick"))
        figure = experiment.plot(rows)
        about = {"label": experiment.LABEL, "title": experiment.TITLE, "about": experiment.ABOUT}
        write(
            store.folder,
            rows,
            {
                "claims": [c.to_dict() for c in experiment.claims(rows)],
                "figure": figure.to_dict(),
                "manifest": manifest(name, setting, rows, store, **about),
            },
        )
        draw(figure, store.folder / "figure.png")
    return out
