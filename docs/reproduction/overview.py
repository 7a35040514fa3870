"""Write index.md: one row for each figure of the paper, with the claim that matters most.

Run from the repository root: ``python -m docs.reproduction.overview``
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from docs.reproduction.claims import count_text
from docs.reproduction.statements import FIGURES, Figure
from reproduction.claims import FAILS, HOLDS, UNDECIDED
from reproduction.competitors import (
    FOUR_NETWORKS,
    LOW_RANK,
    ONE,
    SEPARATE,
    SIGNS,
    SYSTEMS,
    TWO_NETWORKS,
    WIDE,
)
from reproduction.grid.cells import cells_of
from reproduction.grid.settings import PRESETS as SETTINGS
from reproduction.report.page import collect
from reproduction.storage import write_atomically
from reproduction.summary import SAME_NETWORKS

FOLDER = Path(__file__).parent
PRESETS = ("paper", "gpu", "cpu", "earlier", "quick")
"""Presets from the largest to the smallest scale."""

HEAD = """# The paper in two minutes

One row for each figure of *Embedded Ensembles: Infinite Width Limit and Operating Regimes*
(Velikanov et al., AISTATS 2022): a statement of the paper, our measurement with a 95 % interval,
and the verdict. Each statement is true for some values: it **holds** if the whole interval contains
only such values, and **does not hold** if the interval contains none. Otherwise it is
**undecided**. Names link to our pictures, which show the paper's numbers as well.

Written by `overview.py`; do not edit by hand.
"""

SCALES = """
[All claims](claims.md) lists every statement with its interval. [The details](README.md) describe
set-up and statistics.

| scale | data and network |
| - | - |
| `cpu` | CIFAR-100 at 16×16, 20 classes, 10,000 images, 30 epochs ([set-up](README.md#presets)) |
| `cpu`: `gradients`, `ntk-at-init`, `cost` | the paper's network in its own width, not trained |
| `cpu`: `theorems` | perceptrons with 64 to 4,096 units |
| `cpu`: `compare` | see [equal compute](#equal-compute) |
| `earlier` | CIFAR-100, 1,000 images that the networks memorise; weak evidence |
| `quick` | scikit-learn's digits and tiny perceptrons; a smoke test |

**No figure with trained networks has been run at the paper's scale:** four times the channels, four
times the images, 100 classes, and at least 500 epochs. So a different result may be due to scale.
The presets `gpu` and `paper` have the paper's network but have not been run.
"""

GAINS = """
**What ensembles gain at `cpu`**, in points of test accuracy. The ensembles have modulations
N(p, 1−p²) below the transition, with the largest M that was run. The paper compares with M=1, whose
modulations cost accuracy, and reports a gain of about 5 points.

| compared | difference, 95 % interval |
| - | - |
| ensemble minus one network at its best learning rate | {one} |
| ensemble minus as many separate networks | {separate} |
| signs minus N(0, 1), M ≥ 4 | {signs} |
"""
GAIN_CLAIMS = {
    "one": "the ensemble is more accurate than one network at its best rate",
    "separate": "the ensemble is as accurate as M separate networks (to 1 %)",
    "signs": "centred signs make more accurate ensembles than N(0, 1)",
}

TAIL = """
## What the paper leaves open

The paper does not state the following; these are our choices.

| open | `cpu` | `earlier` | `quick` |
| - | - | - | - |
| pooling | average | average | no convolutions |
| readout | mean over pixels | mean over pixels | – |
| weight decay | 5e-4 | 5e-4 | 5e-4 |
| augmentation | flips and shifts | none | none |

## Errata

Errors of the paper that change a statement or a formula.
[Theory](../theory-derivations.md#where-the-papers-formulas-are-wrong) has the corrections with
values. Tests check all of them except the misprints.

- **Proposition 2.** The tangent kernel contains E[v v′ φ′(v z) φ′(v′ z′)]. The paper factorises
  this mean, which is wrong if there are modulations v before the activation. Φ_z is printed with φ
  in the place of φ′. The condition for independence, E[u] = 0 in the last hidden layer, is not
  affected.
- **Theorem 2(3).** Members with E[u] ≠ 0 need not have a positive tangent kernel: it can be
  negative for some activations if v has both signs and inputs differ in norm. The theorem is true
  for v ≥ 0, for ReLU, and for inputs of equal norm.
- **Theorems 1(2) and 2(2).** With a shared bias in the output layer, members are coupled although
  E[u] = 0.
- **Cosines between gradients.** The limiting exponent in the width is −½ in total, not −1. Inner
  layers alone, and cos², have −1. Over the widths of `gradients` neither total has reached its
  limit (|cos| {cosine}, cos² {squared}).
- **Modulations v alone.** Members with u = 1 are not always collective: with an odd activation
  such as tanh and a symmetric v they are independent.
- **γ in the collective regime.** The spectrum of the kernel gives a value between 1 and M, not
  always 1. The kernels change smoothly with p: the transition near p = 0.6 is not a property of
  the limit.
- **Misprints.** Section 3.1 lists γ = 1 and γ = M in the wrong order (independent: M). The caption
  of the ablation says variance 1/√2, which is the standard deviation.

## Beyond the paper

| experiment | question |
| - | - |
{beyond}

### Equal compute

{compare}
"""

COMPARE = """![Accuracy and log loss against the compute of training](compare/cpu/summary.png)

Networks with batch norm, 32–64–128–256 channels, on 8,000 images of 16 classes. The compute of one
network is 15 epochs. Each cell shows the accuracy in %, the log loss, the log loss after
temperature scaling, and in brackets the number of seeds. *Separate networks* are as many as the
compute pays for, with 15 epochs each. All other systems spend a larger compute on more epochs,
except for the wider network. Guessing has a log loss of 2.77.
[More pictures](compare/cpu/figure.png), [claims](claims.md#compare-cpu).
"""
MEASURES = """All measures at 4 ×, without / with temperature scaling. *Unknown classes* is the area
under the ROC curve that separates images of four other classes. Parameters and times are relative
to one network. Times are those of a [shorter training](README.md#what-was-run-at-cpu) with equal
compute.
"""
MEASURE_HEAD = (
    "system",
    "accuracy",
    "log loss / scaled",
    "calibration error / scaled",
    "unknown classes",
    "parameters",
    "training",
    "inference",
    "seeds",
)
MEASURED_BUDGET = 4
COMPARED_SYSTEMS = (*SYSTEMS, TWO_NETWORKS, FOUR_NETWORKS)
COMPARED = ("accuracy", "nll", "scaled_nll")
CONCLUSION = """**Embed two members drawn from signs if training is so long that one network becomes
overconfident, and memory holds one network only; otherwise train one network longer, or two.**

- At 4 × one network is overconfident, and two members have a lower log loss. At 1 × and 2 × one
  network trained as long is better.
- Two networks, with twice the parameters, are about as good as two members at 4 ×.
- The advantage in log loss is mainly better calibration: after temperature scaling of both, the
  mean difference over 2 × and 4 × is undecided.
- Four or eight members, low-rank members, four networks and a wider network are worse than one
  network at 4 ×, also after scaling. They are trained for 15 epochs at most.
- Two members are about as good with split batches, in which each sample trains one member.
- Eight last-layer members cost as much as one network and gain little.
"""
WORSE = (WIDE, FOUR_NETWORKS, LOW_RANK, *SIGNS[1:])
"""Systems that the conclusion calls worse than one network, by log loss after scaling."""
CONCLUSION_VERDICTS = {
    "two members have a lower log loss than one network trained as long": "holds",
    "they also have a lower log loss after temperature scaling": "undecided",
    "they are better calibrated without held-out samples": "holds",
    "two members gain on one network as the compute grows": "holds",
}
"""Verdicts on which the conclusion relies."""

BEYOND = {
    "compare": "At equal compute: members, one network trained longer, a wider one, or several?",
    "gain": "What do members inside one network gain, and what do they cost?",
    "laws": "Which distribution of modulations is best?",
    "richness": "Does feature learning move the transition?",
    "systems": "How do other single-network ensembles compare?",
}


def markdown(entries: list[dict[str, Any]]) -> str:
    """Return the page of entries from :func:`reproduction.report.page.collect`."""
    by_title = {(entry["name"], entry["manifest"]["preset"]): entry for entry in entries}
    lines = [
        HEAD,
        verdicts_text(entries),
        table_row("figure", "the paper", "measured", "verdict", "what we see"),
    ]
    lines.append(table_row(*["-"] * 5))
    for figure in FIGURES:
        runs = [by_title[figure.name, name] for name in PRESETS if (figure.name, name) in by_title]
        lines.append(row_of(figure, next(entry for entry in runs if is_far(entry))))
    beyond = []
    for name, question in BEYOND.items():
        presets = [preset for preset in PRESETS if (name, preset) in by_title]
        links = [f"[{preset}]({name}/{preset}/figure.png)" for preset in presets]
        beyond.append(table_row(f"`{name}`: {', '.join(links) or 'not run'}", question))
    compared = by_title.get(("compare", "cpu"))
    text = "Not run." if compared is None else compare_section(compared)
    gradients = claims_of(by_title["gradients", "cpu"])
    tail = TAIL.format(
        beyond="\n".join(beyond),
        compare=text,
        cosine=number_text(gradients["|cos| ∝ 1/width, as in the paper"]["value"], 2),
        squared=number_text(gradients["cos² ∝ 1/width (theory)"]["value"], 1),
    )
    return "\n".join(lines) + "\n" + SCALES + gains_text(by_title["transition", "cpu"]) + tail


def verdicts_text(entries: list[dict[str, Any]]) -> str:
    """Return how many claims of the paper hold at ``cpu``; our own experiments do not count."""
    figures = {figure.name for figure in FIGURES}
    claims = []
    for entry in entries:
        if entry["manifest"]["preset"] == "cpu" and entry["name"] in figures:
            claims += [claim for claim in entry["claims"] if not claim["paper"].startswith("–")]
    verdicts = [claim["verdict"] for claim in claims]
    missing = sum(claim["note"].startswith("missing") for claim in claims)
    return (
        f"At `cpu` {len(claims)} of the paper's statements are tested: {verdicts.count(HOLDS)} "
        f"hold, {verdicts.count(FAILS)} do not hold, and {verdicts.count(UNDECIDED)} are "
        f"undecided, {missing} of them because cells were not run.\n"
    )


def gains_text(entry: dict[str, Any]) -> str:
    """Return what ensembles gain over networks, in percent points with intervals."""
    claims = claims_of(entry)
    texts = {}
    for name, statement in GAIN_CLAIMS.items():
        ends = [100 * claims[statement][end] for end in ("value", "low", "high")]
        value, low, high = (number_text(end, 1) for end in ends)
        texts[name] = f"{value} [{low}, {high}]"
    return GAINS.format(**texts)


def claims_of(entry: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the claims of an entry by their statements."""
    return {claim["statement"]: claim for claim in entry["claims"]}


def check_verdicts(entry: dict[str, Any], verdicts: Mapping[str, str]) -> None:
    """Raise if a text relies on verdicts that the results no longer give."""
    claims = claims_of(entry)
    for statement, verdict in verdicts.items():
        if claims[statement]["verdict"] != verdict:
            raise ValueError(
                f"{entry['name']}: the text says that {statement!r} is {verdict!r}, got "
                f"{claims[statement]['verdict']!r}. Rewrite the text."
            )


def is_far(entry: dict[str, Any]) -> bool:
    """Return whether a run is complete enough to be shown: a tenth of the cells of its sweep."""
    manifest = entry["manifest"]
    preset = manifest["preset"]
    if preset not in SETTINGS:
        return True
    return manifest["cells"] >= len(cells_of(entry["name"], SETTINGS[preset])) / 10


def compare_section(entry: dict[str, Any]) -> str:
    """Return the tables of ``compare``: quality by budget, and all measures at one budget."""
    cells = compared_cells(entry)
    check_conclusion(entry, cells)
    budgets = sorted({budget for _, budget in cells})
    head = ["system", *(f"{budget} ×" for budget in budgets)]
    lines = [COMPARE, table_row(*head), table_row(*["-"] * len(head))]
    for system in COMPARED_SYSTEMS:
        texts = [compared_text(cells.get((system, budget), [])) for budget in budgets]
        if any(text != "–" for text in texts):
            lines.append(table_row(system, *texts))
    lines += ["", MEASURES, table_row(*MEASURE_HEAD), table_row(*["-"] * len(MEASURE_HEAD))]
    times = read_times()
    for system in COMPARED_SYSTEMS:
        rows = cells.get((system, MEASURED_BUDGET), [])
        if rows:
            one = fmean(row["parameters"] for row in cells[ONE, MEASURED_BUDGET])
            lines.append(table_row(system, *measure_texts(system, rows, one, times)))
    return "\n".join(lines) + "\n\n" + CONCLUSION


def check_conclusion(
    entry: dict[str, Any], cells: dict[tuple[str, int], list[dict[str, float]]]
) -> None:
    """Raise if the results no longer agree with the conclusion."""
    check_verdicts(entry, CONCLUSION_VERDICTS)
    losses = {}
    for system in (ONE, *WORSE):
        losses[system] = fmean(row["scaled_nll"] for row in cells[system, MEASURED_BUDGET])
    wrong = [system for system in WORSE if losses[system] <= losses[ONE]]
    if wrong:
        raise ValueError(f"the conclusion calls {wrong} worse than one network. Rewrite it.")


def compared_cells(entry: dict[str, Any]) -> dict[tuple[str, int], list[dict[str, float]]]:
    """Return the measured values of ``compare``, a row for each seed, by system and budget."""
    header, *rows = entry["table"]
    cells: dict[tuple[str, int], list[dict[str, float]]] = {}
    for row in rows:
        values = dict(zip(header, row, strict=True))
        key = values.pop("system"), int(values["budget"])
        numbers = {name: float(value or "nan") for name, value in values.items()}
        cells.setdefault(key, []).append(numbers)
    for system, budget in SAME_NETWORKS.items():
        cells.setdefault((system, budget), cells.get((SEPARATE, budget), []))
    return cells


def read_times() -> dict[str, dict[str, float]]:
    """Return the times of training and inference by system, relative to one network."""
    with (FOLDER / "compare" / "cpu" / "times.csv").open() as file:
        rows = {row.pop("system"): row for row in csv.DictReader(file)}
    times = {}
    for system, row in rows.items():
        times[system] = {name: float(row[name]) / float(rows[ONE][name]) for name in row}
    return times


def measure_texts(
    system: str,
    rows: list[dict[str, float]],
    one_network: float,
    times: dict[str, dict[str, float]],
) -> list[str]:
    """Return the cells of one system in the table of all measures.

    Args:
        system: The system.
        rows: Its measured values, a row for each seed.
        one_network: Parameters of one network.
        times: Times relative to one network by system.
    """
    means = {name: fmean(row[name] for row in rows) for name in rows[0]}
    return [
        f"{100 * means['accuracy']:.1f}",
        f"{means['nll']:.2f} / {means['scaled_nll']:.2f}",
        f"{means['calibration']:.3f} / {means['scaled_calibration']:.3f}",
        f"{means['auroc']:.3f}",
        f"{means['parameters'] / one_network:.2f} ×",
        f"{times[system]['training_seconds']:.1f} ×",
        f"{times[system]['inference_seconds']:.1f} ×",
        str(len(rows)),
    ]


def compared_text(rows: list[dict[str, float]]) -> str:
    """Return accuracy, log loss and scaled log loss with the number of seeds."""
    if not rows:
        return "–"
    accuracy, loss, scaled = (fmean(row[name] for row in rows) for name in COMPARED)
    return f"{100 * accuracy:.1f} / {loss:.2f} / {scaled:.2f} ({len(rows)})"


def row_of(figure: Figure, entry: dict[str, Any]) -> str:
    """Return the row of a figure; its claim must exist."""
    preset, label = entry["manifest"]["preset"], entry["manifest"]["label"]
    check_verdicts(entry, figure.verdicts)
    claims = claims_of(entry)
    values = {name: claims[statement]["value"] for name, statement in figure.values.items()}
    points = {name: 100 * claims[statement]["value"] for name, statement in figure.points.items()}
    comment = re.sub(r"(?<!\w)-(?=\d)", "−", figure.comment.format(**values, **points))
    claim = claims[figure.claim]
    cells = count_text(entry)
    scale = f"{preset}, {cells}" if " of " in cells else preset
    name = f"[{figure.name}]({figure.name}/{preset}/figure.png) ({scale}), {label}"
    text = f"{figure.quantity}: {claim['note'] or interval_text(claim)}"
    return table_row(name, figure.statement, text, f"**{claim['verdict']}**", comment)


def interval_text(claim: dict[str, Any]) -> str:
    """Return the value of a claim with its interval, with more digits if they are small."""
    ends = [claim["value"], claim["low"], claim["high"]]
    if None in ends:
        return f"{claim['value']:.2f}, no interval"
    digits = 2 if max(map(abs, ends)) >= 0.1 else 3
    value, low, high = (number_text(end, digits) for end in ends)
    return f"{value} [{low}, {high}]"


def number_text(value: float, digits: int) -> str:
    """Return a number with a minus sign instead of a hyphen."""
    return f"{value:.{digits}f}".replace("-", "−")


def table_row(*cells: object) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    write_atomically(FOLDER / "index.md", markdown(collect(FOLDER)))
