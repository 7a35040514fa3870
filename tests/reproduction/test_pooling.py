"""Intervals from pooled residuals, on simulated sweeps whose truth is known."""

from __future__ import annotations

import math

import numpy
import pandas
import pytest

from reproduction import claims
from reproduction.claims import HOLDS, UNDECIDED, Claim, judge
from reproduction.pooling import PooledTables, pooled_error
from reproduction.rows import Rows

MEMBERS = (1, 2, 4, 8, 16)
SHIFTS = (0.0, 0.3, 0.6, 0.9)
AXES = ("p", "members")
SEEDS = 3


def simulate(
    generator, *, residual=0.01, seed_effect=0.0, seeds=SEEDS, truth=lambda p, m: 0.4 + 0.02 * m
):
    """Return a sweep of 20 cells; ``truth`` is a function of p and log2 M."""
    effects = generator.normal(0, seed_effect, seeds) if seed_effect else numpy.zeros(seeds)
    rows = []
    for p in SHIFTS:
        for members in MEMBERS:
            for seed in range(seeds):
                noise = generator.normal(0, residual)
                accuracy = truth(p, math.log2(members)) + effects[seed] + noise
                row = {"p": p, "members": members, "seed": seed, "accuracy": accuracy}
                rows.append(row)
    return pandas.DataFrame(rows)


def claim_of(statistic, **options):
    return Claim(statement="s", measure="m", statistic=statistic, **options)


# Fast statistics: the rows of a table keep their order, p × M × seed.
def values_of(rows):
    return rows.frame["accuracy"].to_numpy().reshape(len(SHIFTS), len(MEMBERS), -1)


def mean(rows):
    return values_of(rows).mean()


def slope(rows):
    return numpy.polyfit(numpy.log2(MEMBERS), values_of(rows).mean((0, 2)), 1)[0]


def difference(rows):
    values = values_of(rows)
    return values[3].mean() - values[0].mean()


def one_cell(rows):
    return values_of(rows)[1, 2].mean()


def rise_and_fall(rows):
    means = values_of(rows).mean((0, 2))
    return means.max() - max(means[0], means[-1])


TRUTHS = {mean: 0.44, slope: 0.02, difference: 0.0, one_cell: 0.44}
LEVELS = (mean, one_cell)
"""Statistics in which the effects of seeds do not cancel."""


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr(claims, "BOOTSTRAP_SAMPLES", 25)


MANY_OR_FEW = pytest.mark.parametrize("repeats", [12, pytest.param(200, marks=pytest.mark.long)])


@MANY_OR_FEW
@pytest.mark.parametrize("seeds", [2, SEEDS])
@pytest.mark.parametrize("seed_effect", [0.0, 0.02], ids=["no seed effect", "a seed effect"])
def test_the_interval_covers_the_truth_as_often_as_it_says(seed_effect, seeds, repeats):
    generator = numpy.random.default_rng(0)
    covered = dict.fromkeys(TRUTHS, 0)
    tested = [claim_of(statistic) for statistic in TRUTHS]
    for _ in range(repeats):
        table = simulate(generator, seed_effect=seed_effect, seeds=seeds)
        for judgement, (statistic, truth) in zip(
            judge(tested, table, AXES), TRUTHS.items(), strict=True
        ):
            covered[statistic] += judgement.low < truth < judgement.high
    for statistic, count in covered.items():
        # Two or three seeds estimate their spread poorly, and the interval does not know.
        nominal = 0.85 if seed_effect and statistic in LEVELS else 0.95
        # Three standard errors of a binomial proportion.
        least = repeats * (nominal - 3 * math.sqrt(nominal * (1 - nominal) / repeats))
        assert count > least, (statistic.__name__, count)


def test_the_interval_of_a_cell_is_much_shorter_than_with_two_degrees_of_freedom():
    generator = numpy.random.default_rng(1)
    widths = {"pooled": [], "seeds": []}
    for _ in range(8):
        table = simulate(generator)
        for method, axes in (("pooled", AXES), ("seeds", ())):
            (judgement,) = judge([claim_of(one_cell)], table, axes)
            widths[method].append(judgement.high - judgement.low)

    # Student's quantiles are 4.3 and 2.0; the mean of an estimated deviation is 0.89.
    assert numpy.mean(widths["pooled"]) < 0.75 * numpy.mean(widths["seeds"])


@MANY_OR_FEW
def test_a_flat_curve_has_no_maximum(repeats):
    generator = numpy.random.default_rng(2)
    claim = claim_of(rise_and_fall, above=0.0, jumps=True)
    held = 0
    for _ in range(repeats):
        table = simulate(generator, truth=lambda p, m: 0.4)
        held += judge([claim], table, AXES)[0].verdict == HOLDS

    assert held / repeats <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / repeats)


def test_seeds_that_contradict_the_model_are_not_pooled():
    generator = numpy.random.default_rng(3)
    table = simulate(generator, residual=0.001)
    # The slope in M differs from seed to seed: residuals of different cells belong together.
    table["accuracy"] += (table["seed"] - 1) * 0.02 * numpy.log2(table["members"])
    by_seeds, _ = judge([claim_of(slope), claim_of(mean)], table)
    pooled, _ = judge([claim_of(slope), claim_of(mean)], table, AXES)

    assert pooled.method == "seeds"
    assert (pooled.low, pooled.high) == (by_seeds.low, by_seeds.high)
    assert judge([claim_of(slope)], simulate(generator), AXES)[0].method == "pooled"


def test_the_variance_of_residuals_is_that_of_an_analysis_of_variance():
    table = simulate(numpy.random.default_rng(4), seed_effect=0.02)
    values = table.pivot_table(index=["p", "members"], columns="seed", values="accuracy").to_numpy()
    centred = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    cells, seeds = values.shape
    degrees = (cells - 1) * (seeds - 1)
    expected = (centred**2).sum() / degrees / seeds  # of the mean of one cell
    pooled = PooledTables.draw(table, AXES, 400)
    assert pooled.residual_degrees == degrees
    drawn = [one_cell(rows) for rows in pooled.residual_tables]
    assert numpy.var(drawn, ddof=1) == pytest.approx(expected, rel=0.25)


def test_cells_that_diverged_keep_their_values():
    table = simulate(numpy.random.default_rng(5)).assign(diverged=0.0)
    table.loc[3, "diverged"] = 1.0
    table.loc[3, "accuracy"] = 7.0
    diverged = (table["p"] == 0.0) & (table["members"] == 2)
    pooled = PooledTables.draw(table, AXES, 3)
    assert pooled.is_complete
    for rows in pooled.residual_tables:
        redrawn = rows.frame
        assert redrawn["diverged"].equals(table["diverged"])
        assert redrawn["accuracy"][diverged].equals(table["accuracy"][diverged])
        assert (redrawn["accuracy"] != table["accuracy"])[~diverged].all()
        assert redrawn["accuracy"][~diverged].max() < 1.0


def incomplete(table):
    """Return a table in which the cells of p=0.9 have the first seed alone."""
    return table[(table["p"] != 0.9) | (table["seed"] == 0)].reset_index(drop=True)


def partial_difference(rows):
    accuracy = rows.frame["accuracy"].to_numpy()
    cells = len(MEMBERS) * SEEDS
    return accuracy[3 * cells :].mean() - accuracy[:cells].mean()


@MANY_OR_FEW
@pytest.mark.parametrize("seed_effect", [0.0, 0.02], ids=["no seed effect", "a seed effect"])
def test_cells_that_lack_seeds_have_noise_as_well(seed_effect, repeats):
    generator = numpy.random.default_rng(11)
    covered = 0
    for _ in range(repeats):
        table = incomplete(simulate(generator, seed_effect=seed_effect))
        (judgement,) = judge([claim_of(partial_difference)], table, AXES)
        assert judgement.method == "pooled"
        covered += judgement.low < 0.0 < judgement.high
    # Three seeds estimate their spread poorly, and the interval does not know.
    nominal = 0.95 if not seed_effect else 0.75

    assert covered > repeats * (nominal - 3 * math.sqrt(nominal * (1 - nominal) / repeats))


def test_a_cell_with_one_seed_has_the_variance_of_one_residual():
    table = incomplete(simulate(numpy.random.default_rng(12)))
    pooled = PooledTables.draw(table, AXES, 400)
    assert not pooled.is_complete
    last = [rows.frame["accuracy"].iloc[-1] for rows in pooled.residual_tables]
    first = [rows.frame["accuracy"].iloc[:SEEDS].mean() for rows in pooled.residual_tables]
    assert numpy.var(last) == pytest.approx(SEEDS * numpy.var(first), rel=0.35)


def test_losses_stay_positive():
    table = simulate(numpy.random.default_rng(6)).assign(loss=lambda t: 10 ** (-3 * t["p"]))
    table["loss"] *= numpy.exp(numpy.random.default_rng(7).normal(0, 0.5, len(table)))
    pooled = PooledTables.draw(table, AXES, 20)
    assert all((rows["loss"] > 0).all() for rows in pooled.residual_tables)


def test_draws_are_the_same_every_time():
    table = simulate(numpy.random.default_rng(8))
    errors = [pooled_error(slope, 0.0, PooledTables.draw(table, AXES, 10)) for _ in range(2)]
    assert errors[0] == errors[1]


def test_rows_of_a_cell_are_redrawn_together():
    table = simulate(numpy.random.default_rng(9))
    doubled = pandas.concat([table.assign(part=0.0), table.assign(part=1.0)])
    doubled = doubled.sort_values(["p", "members", "seed"], ignore_index=True)
    for rows in PooledTables.draw(doubled, AXES, 3).residual_tables:
        frame = rows.frame
        first, second = (frame[frame["part"] == part] for part in (0.0, 1.0))
        assert numpy.allclose(first["accuracy"], second["accuracy"])


def test_an_undefined_statistic_has_no_interval():
    pooled = PooledTables.draw(simulate(numpy.random.default_rng(10)), AXES, 3)
    assert math.isnan(pooled_error(lambda rows: math.nan, 0.0, pooled).variance)
    assert isinstance(pooled.residual_tables[0], Rows)


def lacks_seed(table, members):
    """Return a table in which the cells of some M lack the last seed, and have no correlation."""
    table = table.assign(correlation=0.5)
    table.loc[table["members"] == members, "correlation"] = math.nan
    is_missing = (table["members"] == members) & (table["seed"] == SEEDS - 1)
    return table[~is_missing].reset_index(drop=True)


def accuracy_at(members):
    return lambda rows: rows.where(members=members).mean("accuracy")


def test_cells_of_other_quantities_borrow_residuals_if_all_of_them_lack_a_seed():
    table = lacks_seed(simulate(numpy.random.default_rng(13)), members=1)
    pooled = PooledTables.draw(table, AXES, 400)
    values = {m: [accuracy_at(m)(rows) for rows in pooled.residual_tables] for m in (1, 2)}
    assert numpy.var(values[1]) == pytest.approx(1.5 * numpy.var(values[2]), rel=0.3)
    assert all(rows.where(members=1)["correlation"].isna().all() for rows in pooled.seed_tables)


def test_a_statistic_of_cells_whose_noise_is_unknown_has_no_interval():
    table = simulate(numpy.random.default_rng(14))
    # Only these cells have a duration, and all of them lack a seed.
    table["duration"] = table["accuracy"].where(table["members"] == 1)
    table = table[(table["members"] > 1) | (table["seed"] > 0)].reset_index(drop=True)
    claims_of_cells = [claim_of(accuracy_at(1), above=0.0), claim_of(accuracy_at(2), above=0.0)]
    unknown, known = judge(claims_of_cells, table, AXES)

    assert (unknown.verdict, unknown.note) == (UNDECIDED, "the noise of some cells is not known")
    assert unknown.value == accuracy_at(1)(Rows(table))
    assert known.verdict == HOLDS


def test_a_quantity_without_noise_does_not_separate_cells():
    # The cell with a value of the theory lacks a seed; its noise is that of the other cells.
    table = simulate(numpy.random.default_rng(0))
    is_special = (table["p"] == 0.3) & (table["members"] == 2)
    table.loc[is_special, "coupling"] = 0.25
    table = table[~(is_special & (table["seed"] == 2))]
    special = claim_of(lambda rows: rows.where(p=0.3, members=2).mean("accuracy"), above=0.0)
    (judgement,) = judge([special], table, AXES)
    assert judgement.verdict == HOLDS
    half_width = (judgement.high - judgement.low) / 2
    assert half_width == pytest.approx(2.03 * 0.01 / math.sqrt(2), rel=0.5)


def test_baselines_do_not_lend_their_noise_to_an_experiment():
    # Cells with one member lack a seed and a correlation, like the noisier network beside them.
    table = simulate(numpy.random.default_rng(3))
    table["correlation"] = table["accuracy"].where(table["members"] > 1)
    table = table[(table["members"] > 1) | (table["seed"] < 2)]
    networks = pandas.DataFrame({"networks": 1.0, "seed": range(3), "accuracy": [0.1, 0.5, 0.9]})
    table = pandas.concat([table, networks], ignore_index=True)
    single = claim_of(lambda rows: rows.where(p=0.3, members=1).mean("accuracy"), above=0.0)
    (judgement,) = judge([single], table, (*AXES, "networks"))
    assert judgement.high - judgement.low < 0.1
