"""Write index.md: one row for each figure of the paper, with the claim that matters most.

Run from the repository root: ``python -m docs.reproduction.overview``
"""

from __future__ import annotations

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
    ONE,
    SEPARATE,
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
(Velikanov et al., AISTATS 2022): one of its statements, our measurement with a 95 % interval, and
the verdict. Each statement is true in a region of values. It **holds** if the whole interval lies
in this region, and **does not hold** if the whole interval lies outside. Otherwise it is
**undecided**. Names link to the pictures. [All claims](claims.md) has every statement with its
region, and [the details](README.md) have set-up and history.

| scale | data and network |
| - | - |
| `cpu` | CIFAR-100, see the [set-up](README.md#presets): 20 classes, 10,000 training images |
| `cpu`: `gradients`, `ntk-at-init`, `cost` | the paper's network in its own width, not trained |
| `cpu`: `theorems` | perceptrons with 64 to 4,096 units |
| `cpu`: `compare` | see [equal compute](#equal-compute) |
| `earlier` | CIFAR-100, 1,000 images that the networks memorise; weak evidence |
| `quick` | scikit-learn's digits and tiny perceptrons; a smoke test |

**No figure with trained networks has been run at the paper's scale.** Its networks have four times
the channels of `cpu`. They see four times the images, with 100 classes, for 500 epochs or more
instead of 30. So a different result may be due to scale. The presets `gpu` and `paper` have the
paper's network but have not been run.

Written by `overview.py`; do not edit by hand.
"""

GAINS = """
**What ensembles gain at `cpu`**, in points of test accuracy with 95 % intervals: ensembles of
N(p, 1−p²) below the transition, at the largest M that was run, differ from one network at its best
learning rate by {one}, and from as many separate networks by {separate}. Signs in
place of N(0, 1) change the accuracy by {signs} (M ≥ 4). The paper compares with M=1, whose
modulations cost accuracy, and reports a gain of about 5 points.
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

Networks with batch norm, 32–64–128–256 channels, on 8,000 images of 16 classes; the compute of one
network is 15 epochs. Cells: accuracy in % / log loss / log loss after temperature scaling, with the
number of seeds in brackets. The row *separate networks* spends a larger compute on more networks,
of 15 epochs each. The row *two networks* spends it on more epochs. Guessing has a log loss of 2.77.
[All measures](compare/cpu/figure.png), [claims](claims.md#compare-cpu).
"""
COMPARED = ("accuracy", "nll", "scaled_nll")
CONCLUSION = """**Embed two members drawn from signs if training is so long that one network becomes
overconfident, and memory holds one network only; otherwise train one network longer, or two.**

- At 4 × one network is overconfident, and two members have a lower log loss. At 1 × and 2 × one
  network trained as long is better.
- Two networks, with twice the parameters, are about as good as two members at 4 ×.
- The advantage in log loss is mainly better calibration: after temperature scaling of both, the
  mean difference over 2 × and 4 × is undecided.
- Four members are worse than two at every compute here.
"""
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
        table_row("experiment", "the paper", "measured", "verdict", "what we see"),
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
    return "\n".join(lines) + "\n" + gains_text(by_title["transition", "cpu"]) + tail


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
    """Return the table of ``compare``: a row for each system, a column for each budget."""
    check_verdicts(entry, CONCLUSION_VERDICTS)
    header, *rows = entry["table"]
    cells: dict[tuple[str, int], list[list[float]]] = {}
    parameters: dict[str, float] = {}
    for row in rows:
        values = dict(zip(header, row, strict=True))
        key = values["system"], int(values["budget"])
        cells.setdefault(key, []).append([float(values[name]) for name in COMPARED])
        parameters.setdefault(values["system"], float(values["parameters"]))
    for system, budget in SAME_NETWORKS.items():
        cells.setdefault((system, budget), cells.get((SEPARATE, budget), []))
    budgets = sorted({budget for _, budget in cells})
    head = ["system", "parameters", *(f"{budget} ×" for budget in budgets)]
    lines = [COMPARE, table_row(*head), table_row(*["-"] * len(head))]
    for system in (*SYSTEMS, TWO_NETWORKS, FOUR_NETWORKS):
        if system not in parameters:
            continue
        texts = [compared_text(cells.get((system, budget), [])) for budget in budgets]
        size = f"{parameters[system] / parameters[ONE]:.2f} ×"
        if system in (SEPARATE, WIDE):
            size = "as compute"
        lines.append(table_row(system, size, *texts))
    return "\n".join(lines) + "\n\n" + CONCLUSION


def compared_text(values: list[list[float]]) -> str:
    """Return accuracy, log loss and scaled log loss with the number of seeds."""
    if not values:
        return "–"
    accuracy, loss, scaled = (fmean(column) for column in zip(*values, strict=True))
    return f"{100 * accuracy:.1f} / {loss:.2f} / {scaled:.2f} ({len(values)})"


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
    measured = claim["note"] or interval_text(claim)
    text = f"{claim['measure']}: {measured}"
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
