"""What a fitted estimator is, in words: as text, as HTML, as a model card."""

from __future__ import annotations

import html
import os
from typing import Any

from embens.estimators.gaussians import Gaussians
from embens.files import write_atomically

CARD = """# {kind}

{facts}

## Columns

{columns}

{notes}

## What its numbers mean

- Scores above are of held-out rows that training was stopped by: a little too good for new rows.
- {promise} The promise holds on average over rows that come from where these came from, not for
  each row, and not after the world has changed.
- Epistemic uncertainty is what members disagree about. It is small far from all rows, too: the
  members share most of their weights.
"""


def facts(estimator: Any) -> dict[str, str]:
    """Return what is worth knowing of a fitted estimator, by names."""
    fitted, known, head = estimator.fitted_, estimator.preprocessing_, estimator.head_
    ensemble, run = fitted.ensemble, fitted.run
    kind = (
        "classes"
        if not isinstance(head, Gaussians)
        else (f"numbers, loss {head.loss!r}, transform {head.transform!r}")
    )
    found = {
        "target": kind,
        "columns": f"{len(set(known.numeric))} numeric, {len(known.categorical)} categorical",
        "members": f"{ensemble.members}, {estimator.family}",
        "network": f"{estimator.depth} layers of {estimator.width_}",
        "parameters": f"{estimator.n_parameters_:,}",
        "dropout, weight decay": f"{estimator.dropout_:g}, {estimator.weight_decay_:g}",
        "training": f"{len(run.epochs)} epochs, ended by {run.stopped}; best {run.best_epoch}",
        "seconds": f"{sum(row['seconds'] for row in run.epochs):.1f}",
    }
    if fitted.held_out is not None:
        metric, members = getattr(head, "stopping", "log loss"), fitted.held_out["members"]
        found[f"held-out {metric}"] = f"{fitted.held_out['ensemble']:.4g}"
        found["of its members"] = f"{sum(members) / len(members):.4g}"
    if head.scores is not None:
        found["conformal rows"] = str(len(head.scores))
    return found


def summary(estimator: Any) -> str:
    """Return a few lines about the fitted estimator."""
    found = facts(estimator)
    width = max(map(len, found))
    lines = [f"{name:<{width}}  {value}" for name, value in found.items()]
    notes = [f"note: {note}" for note in estimator.preprocessing_.notes]
    return "\n".join([type(estimator).__name__, *lines, *notes])


def to_html(estimator: Any) -> str:
    """Return the facts as a table of HTML."""
    cells = (
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in facts(estimator).items()
    )
    return f"<table>{''.join(cells)}</table>"


def model_card(estimator: Any, path: str | os.PathLike[str] | None = None) -> str:
    """Return a model card in Markdown; with a path, write it there."""
    known = estimator.preprocessing_
    promise = "predict_set and predict_interval need held-out rows, which this fit had none of."
    if estimator.head_.scores is not None:
        what = "interval" if isinstance(estimator.head_, Gaussians) else "set"
        promise = f"predict_{what} holds the truth with the chance that is asked for."
    text = CARD.format(
        kind=type(estimator).__name__,
        facts="\n".join(f"- {name}: {value}" for name, value in facts(estimator).items()),
        columns=", ".join(f"`{name}`" for name in known.names),
        notes="\n".join(f"- {note}" for note in known.notes),
        promise=promise,
    )
    if path is not None:
        write_atomically(path, text)
    return text
