"""MC dropout with Gaussian masks (fig:gaussian_mc_dropout_shifted).

Masks N(1, 0.1²) drawn afresh at every pass; N(0, 1) drawn afresh; N(0, 1) as a fixed set, at
several widths. For fresh masks M counts the masks at test time. Dashed: one network and separate
ones, at the best rate for one network.

Also fig:gaussian_mc_dropout_no_shift and fig:MC-Dropout-zero-centred. Masks drawn afresh at every
pass make no members: a network is trained once and M is the number of masks that it is tested with.
"""

from functools import partial

import torch

from embens import laws
from embens.embedding.families import mc_dropout
from reproduction import claims
from reproduction import baselines as fair
from reproduction.claims import Claim, Frame, Rows, growth_of_best, inverted_u, trend, where
from reproduction.grid.cells import MEMBERS, Cell, Row, score, sweep, train
from reproduction.drawing import Figure, curves, panels, shades
from embens.prediction import predict

WIDTHS = (0.5, 1.0, 2.0)

SWEEP = [
    sweep(kind=["fresh shifted", "fresh centred"], width=1.0, members=1),  # one mask a step
    sweep(kind="fixed centred", width=WIDTHS, members=MEMBERS),
    fair.sweep(1.0),
]


def measure(cell: Cell) -> list[Row]:
    """Train one ensemble; with fresh masks, test it with several numbers of them."""
    fresh = cell.kind.startswith("fresh")
    law = laws.Normal(1.0, 0.1) if cell.kind == "fresh shifted" else laws.Normal()
    ensemble = cell.make(mc_dropout, law=law, fresh=fresh)
    training = train(cell, ensemble)
    masks = MEMBERS[cell.setting.preset] if fresh else (cell.members,)
    draws, (inputs, target) = torch.Generator().manual_seed(cell.seed + 1), training.data.test
    found = predict(ensemble, inputs, members=max(masks) if fresh else None, generator=draws)
    diverged = {"diverged": float(training.diverged)}
    return [{"masks": m, **score(found.members[:m], target), **diverged} for m in masks]


_fresh, _fixed = (where(kind=kind) for kind in ("fresh shifted", "fixed centred"))
_normal = where(kind="fixed centred", width=1.0)


def _saturation(rows: Rows) -> float:
    """Gain over the first half of the doublings less that over the second."""
    _, values = _fresh(rows).curve("masks", "accuracy", least=3)
    middle = values[len(values) // 2]
    return (middle - values[0]) - (values[-1] - middle)


def _learns(rows: Rows) -> float:
    """Accuracy relative to fresh shifted masks, at the largest M."""
    last = [rows.where(kind=f"fresh {kind}").last("masks") for kind in ("centred", "shifted")]
    return last[0].mean("accuracy") / last[1].mean("accuracy")


_several = partial(Rows.between, column="masks", low=4)
CLAIMS = [
    Claim(trend(_fresh, "accuracy", "masks"), above=0.0).says(
        "with fresh shifted masks accuracy approaches its limit from below", "increases to a limit"
    ),
    Claim(_saturation, above=0.0).says(
        "most of that gain comes with the first masks", "asymptotically approaches some limit"
    ),
    Claim(trend(_fresh, "member_accuracy", "masks"), above=-0.002).says(
        "members do not suffer (slope above −0.2 % per doubling)", "members do not suffer from M"
    ),
    Claim(lambda t: _several(_fresh(t)).mean("correlation"), above=0.8).says(
        "fresh shifted masks are highly correlated (collective)",
        "highly correlated",
        "correlation, mean over M ≥ 4",
    ),
    Claim(_learns, below=0.5).says(
        "with fresh centred masks the network hardly learns (half the accuracy)", "does not learn"
    ),
    Claim(lambda t: claims.less("correlation", _fresh, _normal)(_several(t)), above=0.1).says(
        "fixed centred masks are much less correlated (independent; by 0.1)",
        "models are not correlated",
        "correlation of fresh shifted less fixed centred masks, M ≥ 4, width 1",
    ),
    Claim(inverted_u(lambda t: _fixed(t).first("width"), "masks"), above=0.0, jumps=True).says(
        "fixed centred masks have a best M (at the smallest width)", "an optimum for each width"
    ),
    Claim(growth_of_best(_fixed, "masks"), above=0.0).says(
        "the best M grows with width", "an optimal ratio of the number of models to the width"
    ),
    *fair.claims(_normal),
]


def plot(table: Frame) -> Figure:
    """Return a row of panels for each of the paper's three figures."""
    colours = shades([0.0, *table["width"]], "plasma")
    draw = partial(curves, x="masks", by="width", label="×{}", colours=colours)
    see = {
        "fresh shifted": ("accuracy nears a limit", "members do not suffer", "members are alike"),
        "fresh centred": ("is anything learned?", "what a member learns", "do members differ?"),
        "fixed centred": ("a best M for each width?", "what M costs a member", "members differ"),
    }
    found = []
    for kind, titles in see.items():
        columns = zip(("accuracy", "member_accuracy", "correlation"), titles, strict=True)
        named = {column: f"{kind}: {title}" for column, title in columns}
        own = partial(draw, table[table["kind"] == kind])
        found += panels(fair.beside(own, table), named, "masks M")
    return Figure(found, columns=3)
