"""MC dropout with Gaussian masks (fig:gaussian_mc_dropout_shifted).

Masks N(1, 0.1²) drawn afresh at every pass; N(0, 1) drawn afresh; N(0, 1) as a fixed set, at
several widths. For fresh masks M is the number of masks at test time. Dashed: one network and
separate networks, at the best learning rate for one network.

Also fig:gaussian_mc_dropout_no_shift and fig:MC-Dropout-zero-centred. With fresh masks there are no
members: a network is trained once and tested with M masks.
"""

from functools import partial

import torch

from embens import laws, mc_dropout, predict
from reproduction import baselines
from reproduction.claims import Claim, growth_of_best, rise_and_fall, slope
from reproduction.drawing import Figure, curves, panels, shades, state
from reproduction.figures.transition import AROUND_BEST
from reproduction.grid.cells import MEMBERS, Cell, Row, sweep
from reproduction.grid.settings import DROPOUT, of_preset
from reproduction.rows import Frame, Rows, where
from reproduction.training import score, train

FRESH_SHIFTED, FRESH_CENTRED, FIXED = "fresh shifted", "fresh centred", "fixed centred"
WIDTHS = (0.5, 1.0, 2.0)

POOLED = True
SWEEP = [
    sweep(kind=[FRESH_SHIFTED, FRESH_CENTRED], width=1.0, members=1),
    sweep(kind=FIXED, width=WIDTHS, members=MEMBERS),
    baselines.sweep(1.0),
]


def measure(cell: Cell) -> list[Row]:
    """Train one ensemble; with fresh masks, test it with several numbers of masks."""
    is_fresh = cell["kind"] != FIXED
    law = laws.Normal(1.0, 0.1) if cell["kind"] == FRESH_SHIFTED else laws.Normal()
    ensemble = cell.build_ensemble(mc_dropout, law=law, fresh=is_fresh)
    training = train(cell, ensemble, family=DROPOUT)
    inputs, target = training.data.test
    if is_fresh:
        numbers_of_masks = of_preset(MEMBERS, cell.setting.preset)
        generator = torch.Generator().manual_seed(cell.seed + 1)
        prediction = predict(ensemble, inputs, members=max(numbers_of_masks), generator=generator)
    else:
        numbers_of_masks = (cell["members"],)
        prediction = predict(ensemble, inputs)
    rows = []
    for masks in numbers_of_masks:
        scores = score(prediction.members[:masks], target)
        rows.append({"masks": masks, **scores, "diverged": float(training.diverged)})
    return rows


fresh_shifted = where(kind=FRESH_SHIFTED)
fixed = where(kind=FIXED)
fixed_at_width_one = where(kind=FIXED, width=1.0)


def fixed_with_many_masks(rows: Rows) -> Rows:
    """Return the rows with fixed masks, if the sweep covers the paper's best M."""
    return fixed(rows).spanning("masks", *AROUND_BEST)


def narrow_with_many_masks(rows: Rows) -> Rows:
    """Return the fixed masks of the narrowest network, if the sweep covers the paper's best M."""
    return fixed(rows).first("width").spanning("masks", *AROUND_BEST)


def several(rows: Rows) -> Rows:
    """Return the rows with at least four masks."""
    return rows.between("masks", low=4)


def saturation(rows: Rows) -> float:
    """Return the gain over the first half of the doublings minus that over the second half."""
    _, accuracies = fresh_shifted(rows).curve("masks", "accuracy", minimum=3)
    middle = accuracies[len(accuracies) // 2]
    return (middle - accuracies[0]) - (accuracies[-1] - middle)


def relative_accuracy_when_centred(rows: Rows) -> float:
    """Return the accuracy with fresh centred masks relative to fresh shifted ones."""
    centred = rows.where(kind=FRESH_CENTRED).last("masks")
    shifted = rows.where(kind=FRESH_SHIFTED).last("masks")
    return centred.mean("accuracy") / shifted.mean("accuracy")


def difference_of_correlations(rows: Rows) -> float:
    """Return the correlation with fresh shifted masks minus that with fixed centred ones."""
    compared = several(rows)
    shifted = fresh_shifted(compared).mean("correlation")
    return shifted - fixed_at_width_one(compared).mean("correlation")


CLAIMS = [
    Claim(
        statement="with fresh shifted masks accuracy grows with the number of masks",
        measure="slope of accuracy per doubling of M",
        statistic=slope(fresh_shifted, "accuracy", "masks"),
        above=0.0,
        paper="increases to a limit",
    ),
    Claim(
        statement="most of that gain comes with the first masks",
        measure="gain over the first half of the doublings minus that over the second half",
        statistic=saturation,
        above=0.0,
        paper="asymptotically approaches some limit",
    ),
    Claim(
        statement="members do not suffer (slope above −0.2 % per doubling)",
        measure="slope of member accuracy per doubling of M",
        statistic=slope(fresh_shifted, "member_accuracy", "masks"),
        above=-0.002,
        paper="members do not suffer from M",
    ),
    Claim(
        statement="fresh shifted masks are highly correlated (collective)",
        measure="correlation, mean over M ≥ 4",
        statistic=lambda rows: several(fresh_shifted(rows)).mean("correlation"),
        above=0.8,
        paper="highly correlated",
    ),
    Claim(
        statement="with fresh centred masks the network hardly learns (half the accuracy)",
        measure="accuracy relative to fresh shifted masks, at the largest M",
        statistic=relative_accuracy_when_centred,
        below=0.5,
        paper="does not learn",
    ),
    Claim(
        statement="fixed centred masks are much less correlated (independent; by 0.1)",
        measure="correlation of fresh shifted minus fixed centred masks, M ≥ 4, width 1",
        statistic=difference_of_correlations,
        above=0.1,
        paper="models are not correlated",
    ),
    Claim(
        statement="fixed centred masks have a best M (at the smallest width)",
        measure="smaller of the rise to the best M and the fall to the largest M",
        statistic=rise_and_fall(narrow_with_many_masks, "masks"),
        above=0.0,
        paper="an optimum for each width",
        jumps=True,
    ),
    Claim(
        statement="with fixed centred masks the best M grows with width",
        measure="exponent of the best M in the width, mean over seeds",
        statistic=growth_of_best(fixed_with_many_masks, "masks"),
        above=0.0,
        paper="an optimal ratio of the number of models to the width",
    ),
    *baselines.claims(fixed_at_width_one),
]


def titles_of_kind(rows: Rows, kind: str) -> dict[str, str]:
    """Return the titles of the panels of one kind of masks, with their results."""

    def accuracy() -> str:
        if rows["width"].nunique() == 1:
            return f"{kind}: accuracy {100 * rows.last('masks').mean('accuracy'):.1f} %"
        texts = []
        for width, rows_of_width in rows.by("width"):
            texts.append(f"{rows_of_width.best('masks'):g} at width ×{width:g}")
        return f"{kind}: best M={', '.join(texts)}"

    def members() -> str:
        return f"{kind}: members {100 * rows.slope('masks', 'member_accuracy'):+.1f} % per doubling"

    def correlation() -> str:
        return f"{kind}: correlation {several(rows).mean('correlation'):.2f} (M ≥ 4)"

    return {
        "accuracy": state(accuracy, f"{kind}: ensemble accuracy"),
        "member_accuracy": state(members, f"{kind}: member accuracy"),
        "correlation": state(correlation, f"{kind}: correlation"),
    }


def plot(table: Frame) -> Figure:
    """Return a row of panels for each of the paper's three figures."""
    colours = shades([0.0, *table["width"]], "plasma")
    all_panels = []
    for kind in (FRESH_SHIFTED, FRESH_CENTRED, FIXED):
        rows = table[table["kind"] == kind]
        draw = partial(curves, rows, "masks", by="width", label="width ×{}", colours=colours)
        titles = titles_of_kind(Rows(rows), kind)
        all_panels += panels(baselines.with_lines(draw, table), titles, "masks M")
    return Figure(all_panels, columns=3)
