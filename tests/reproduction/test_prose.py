"""Numbers and comparisons in prose follow from published tables and recorded choices."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from scipy import stats

from reproduction.grid.results import read_table
from reproduction.grid.settings import read_choices

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "reproduction"


@pytest.fixture(scope="module")
def equal_compute():
    """Means over seeds by system and budget."""
    table = read_table(DOCS / "compare" / "cpu")
    return table.groupby(["system", "budget"]).mean(numeric_only=True)


def test_the_caption_of_the_readme_states_the_table(equal_compute):
    caption = re.search(r"(?ms)^\*A CNN .*?\*$", (ROOT / "README.md").read_text()).group()
    caption = " ".join(caption.split())
    one, two, four = "one network", "signs M=2", "signs M=4"

    def value(column, system, budget):
        return equal_compute[column][system, budget]

    assert "At 1 × and 2 × one network is better" in caption
    for budget in (1, 2):
        assert value("nll", one, budget) < value("nll", two, budget)
        assert value("accuracy", one, budget) > value("accuracy", two, budget)
    assert "At 4 × it is overconfident: two members in its memory have a lower log loss" in caption
    assert value("temperature", one, 4) > 1.5
    gap = value("nll", one, 4) - value("nll", two, 4)
    scaled_gap = value("scaled_nll", one, 4) - value("scaled_nll", two, 4)
    assert gap > 0
    assert value("parameters", two, 4) < 1.05 * value("parameters", one, 4)
    assert "Temperature scaling (right) closes most of the gap" in caption
    assert scaled_gap < gap / 2
    assert "two networks, in twice the memory, are about as good" in caption
    assert value("nll", "two networks", 4) == pytest.approx(value("nll", two, 4), abs=0.03)
    assert "Four members, more networks or a wider one are worse" in caption
    for system in (four, "separate networks", "one wider network"):
        assert value("scaled_nll", system, 4) > value("scaled_nll", two, 4)
    index = " ".join((DOCS / "index.md").read_text().split())
    assert "At 1 × and 2 × one network trained as long is better." in index
    assert (
        "Two networks, with twice the parameters, are about as good as two members at 4 ×" in index
    )
    assert "Two members are about as good with split batches" in index
    assert value("scaled_nll", two, 4) == pytest.approx(
        value("scaled_nll", "signs M=2 split", 4), abs=0.03
    )
    assert ", two seeds, " in caption
    seeds = read_table(DOCS / "compare" / "cpu").groupby("system")["seed"].nunique()
    shown = [one, two, four, "two networks", "separate networks", "one wider network"]
    assert seeds[shown].tolist() == [2] * 6


LAWS = {"N(0, 1)": "normal", "N(p, 1−p²)": "normal", "signs": "signs"}


@pytest.fixture(scope="module")
def pairs():
    """The cells that decided the default law."""
    table = read_table(DOCS / "transition" / "cpu")
    is_pair = (table["members"] == 4) & (table["gamma"] == "M") & table["p"].isin([0.0, 0.9])
    return table[is_pair]


def rows_of(text: str, columns: int) -> list[list[str]]:
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == columns:
            rows.append(cells)
    return rows


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def test_the_decision_for_the_default_law_has_the_numbers_of_the_table(pairs):
    page = (ROOT / "docs" / "adr" / "0008-default-law.md").read_text()
    second = page[page.index("## Second protocol") :]
    rows = [row for row in rows_of(second, 6) if row[1] in LAWS]
    assert len(rows) == 4
    for p, law, accuracies, losses, member, correlation in rows:
        cells = pairs[(pairs["p"] == float(p)) & (pairs["law"] == LAWS[law])].sort_values("seed")
        for text, column, tolerance in ((accuracies, "accuracy", 6e-4), (losses, "nll", 6e-4)):
            values = [number(value) for value in text.split("/")]
            assert values == pytest.approx(cells[column].tolist()[:3], abs=tolerance)
        assert number(member) == pytest.approx(cells["member_accuracy"].mean(), abs=6e-4)
        assert number(correlation) == pytest.approx(cells["correlation"].mean(), abs=6e-3)
    columns = {
        "log loss": "nll",
        "accuracy": "accuracy",
        "accuracy of a member": "member_accuracy",
        "correlation of members": "correlation",
    }
    by_law = pairs.set_index(["p", "seed", "law"])
    for name, mean, ends in (row for row in rows_of(second, 3) if row[0] in columns):
        values = by_law[columns[name]].unstack("law")
        differences = values["signs"] - values["normal"]
        centre = differences.mean()
        half_width = stats.t.ppf(0.975, 5) * differences.std() / math.sqrt(6)
        low, high = (number(end) for end in ends.split(" to "))
        assert [number(mean), low, high] == pytest.approx(
            [centre, centre - half_width, centre + half_width], abs=6e-4
        )


def test_margins_of_the_chosen_rates_are_those_recorded():
    losses = read_choices()["cpu"]["compare"]["validation_nll"]
    margins = [losses[name]["0.1"] - losses[name]["0.03"] for name in ("one network", "signs M=4")]
    text = " ".join((DOCS / "README.md").read_text().split())
    shown = "{:.3f} and {:.2f} nats".format(*margins)
    assert f"Networks and signs are best at 0.03, the smallest rate, by {shown}." in text
