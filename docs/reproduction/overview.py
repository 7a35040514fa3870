"""Write index.md: one row for each figure of the paper, with the claim that matters most.

Run from the repository root: ``python -m docs.reproduction.overview``
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from docs.reproduction.claims import count_text
from reproduction.competitors import (
    FOUR_NETWORKS,
    ONE,
    SEPARATE,
    SYSTEMS,
    TWO_NETWORKS,
    WIDE,
)
from reproduction.report.page import collect
from reproduction.storage import write_atomically

FOLDER = Path(__file__).parent
PRESETS = ("paper", "gpu", "cpu", "earlier", "quick")
"""Presets from the largest to the smallest scale."""


@dataclass(frozen=True)
class Figure:
    """One row of the page.

    Attributes:
        name: Name of the experiment.
        statement: What the paper says.
        claim: Statement of the claim whose value is shown.
        comment: What we see, in one sentence.
    """

    name: str
    statement: str
    claim: str
    comment: str


FIGURES = [
    Figure(
        "transition",
        "Members change from independent to collective near p = 0.6.",
        "the curves separate into two groups near p=0.6",
        "There are two regimes with a sharp transition, at a larger p than in the paper.",
    ),
    Figure(
        "widths",
        "Wider networks have room for more members.",
        "the best number of members grows with the width",
        "Members gain most in the widest network.",
    ),
    Figure(
        "trajectories",
        "With γ = M, members learn equally fast for every M.",
        "with γ=M members learn equally fast for every M (exponent 0, to 0.2)",
        "The run is too short to decide; on digits the statement holds.",
    ),
    Figure(
        "lld-rates",
        "Last-layer dropout is best near ten members.",
        "the best number of members is near 10",
        "Sixteen hidden units have room for one or two members only.",
    ),
    Figure(
        "gradients",
        "The cosine between members' gradients falls as 1/width.",
        "|cos| ∝ 1/width, as in the paper",
        "Inner layers fall as 1/width; first and last layers as 1/√width, so the total falls more "
        "slowly than stated.",
    ),
    Figure(
        "ablation",
        "Modulations after the activation alone are as good as both.",
        "post only: as accurate as the baseline (to 1 %)",
        "So they are; modulated inputs and outputs cost less than in the paper.",
    ),
    Figure(
        "ntk-at-init",
        "The tangent kernel between members falls as 1/width.",
        "the ratio falls as 1/width when centred (normalised by the limit)",
        "Heavy tails make the ratio noisy, and few seeds do not decide it.",
    ),
    Figure(
        "mc-dropout",
        "Fixed centred masks train independent members, with a best M that grows with the width.",
        "with fixed centred masks the best M grows with width",
        "Fixed masks give independent members; fresh centred masks do not learn.",
    ),
    Figure(
        "lld",
        "Last-layer members become more correlated as p grows.",
        "correlation grows with p",
        "So they do; the other statements need more seeds.",
    ),
    Figure(
        "cost",
        "Last-layer dropout with 50 members costs about 10 % more time.",
        "a training step costs at most 1.1 × that of one network at M=50",
        "So it does; the time of a BatchEnsemble is proportional to M.",
    ),
    Figure(
        "theorems",
        "Kernels between members vanish if and only if the last modulations are centred.",
        "the tangent kernel between members vanishes if only u of the last layer is centred",
        "Kernels converge as stated; a shared output bias couples members (an erratum).",
    ),
    Figure(
        "parametrization",
        "Standard and NTK parametrization reach a similar accuracy.",
        "both reach a similar ensemble accuracy (to 1.5 %)",
        "The difference is small; the interval is too wide for a verdict.",
    ),
]

HEAD = """# The paper in two minutes

One row for each figure of *Embedded Ensembles: Infinite Width Limit and Operating Regimes*
(Velikanov et al., AISTATS 2022): its main statement, our measurement with a 95 % interval, and the
verdict, which is computed from our table. A click on a name opens the picture.
[All claims](claims.md) has every statement, and [the details](README.md) have set-up, history and
discussion.

| preset | data and network |
| - | - |
| `cpu` | CIFAR-100, 10,000 images of 20 coarse classes, 16×16 pixels |
| `cpu`: `gradients`, `ntk-at-init`, `cost` | the paper's network; nothing is trained |
| `earlier` | CIFAR-100, 1,000 images that the networks memorise; weak evidence |
| `quick` | scikit-learn's digits and tiny perceptrons; a smoke test |

**All trained networks are much smaller than the paper's**: a different result may be due to scale.
`gpu` and `paper`, the set-up of the paper, have not been run.

Written by `overview.py`; do not edit by hand.
"""

TAIL = """
## What the paper leaves open

The paper does not state the kind of pooling, the readout, the weight decay and the augmentation. We
chose average pooling, the mean over pixels, 5e-4, and flips with shifts (`cpu`).

## Errata

- **Cosines between gradients.** The exponent of the total is −½ in the limit and about −0.8 at the
  paper's widths, because the last layer holds 8–13 % of the squared gradient norm there. In the
  standard parametrization the share of the first layer vanishes.
- **Output bias.** A shared bias of the output layer couples members even if all modulations are
  centred.
- **γ in the collective regime.** The spectrum of the kernel gives a value between 1 and M, not
  exactly 1.

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
number of seeds in brackets. Separate networks are trained for 15 epochs each, and a larger compute
pays for more of them; for two networks it pays for more epochs. Guessing has a log loss of 2.77.
[All measures](compare/cpu/figure.png), [claims](claims.md#compare-cpu).
"""
COMPARED = ("accuracy", "nll", "scaled_nll")
CONCLUSION = """**When is an embedded ensemble the right choice?** Two members drawn from signs
are, if training is so long that one network becomes overconfident (here 4 ×) and only the
parameters of one network can be stored. They are not, if training is short (1 × and 2 ×), where one
network trained as long is better, if two networks can be stored, which are as good at 4 × or
better, or if there are more members than the width has room for (here four).
"""

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
    lines = [HEAD, table_row("experiment", "the paper", "measured", "verdict", "what we see")]
    lines.append(table_row(*["-"] * 5))
    for figure in FIGURES:
        preset = next(name for name in PRESETS if (figure.name, name) in by_title)
        lines.append(row_of(figure, by_title[figure.name, preset]))
    beyond = []
    for name, question in BEYOND.items():
        presets = [preset for preset in PRESETS if (name, preset) in by_title]
        links = [f"[{preset}]({name}/{preset}/figure.png)" for preset in presets]
        beyond.append(table_row(f"`{name}`: {', '.join(links) or 'not run'}", question))
    compared = by_title.get(("compare", "cpu"))
    text = "Not run." if compared is None else compare_section(compared["table"])
    return "\n".join(lines) + "\n" + TAIL.format(beyond="\n".join(beyond), compare=text)


def compare_section(table: list[list[str]]) -> str:
    """Return the table of ``compare``: a row for each system, a column for each budget."""
    header, *rows = table
    cells: dict[tuple[str, int], list[list[float]]] = {}
    parameters: dict[str, float] = {}
    for row in rows:
        values = dict(zip(header, row, strict=True))
        key = values["system"], int(values["budget"])
        cells.setdefault(key, []).append([float(values[name]) for name in COMPARED])
        parameters.setdefault(values["system"], float(values["parameters"]))
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
    (claim,) = [claim for claim in entry["claims"] if claim["statement"] == figure.claim]
    cells = count_text(entry)
    scale = f"{preset}, {cells}" if " of " in cells else preset
    name = f"[{figure.name}]({figure.name}/{preset}/figure.png) ({scale}), {label}"
    measured = claim["note"] or f"{claim['value']:.2f} [{claim['low']:.2f}, {claim['high']:.2f}]"
    text = f"{claim['measure']}: {measured}"
    return table_row(name, figure.statement, text, f"**{claim['verdict']}**", figure.comment)


def table_row(*cells: object) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    write_atomically(FOLDER / "index.md", markdown(collect(FOLDER)))
