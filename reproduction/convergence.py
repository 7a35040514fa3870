"""Claims on convergence to the infinite-width limit, for ``theorems``."""

from functools import partial

from reproduction.claims import Claim, slope
from reproduction.rows import Rows, Selection, where


def coupling_at_largest_width(rows: Rows, case: str) -> float:
    """Return the tangent kernel between members relative to that within, at the largest width."""
    return rows.where(part="kernels", case=case).last("units").mean("ntk_coupling")


def exponent_claim(
    statement: str,
    measure: str,
    paper: str,
    selection: Selection,
    column: str,
    *,
    above: float,
    below: float,
) -> Claim:
    """Return a claim on the exponent of a column in the width."""
    return Claim(
        statement=statement,
        measure=measure,
        statistic=slope(selection, column, "units", log_y=True),
        above=above,
        below=below,
        paper=paper,
    )


def convergence_claims(case: str, errors: dict[str, str]) -> list[Claim]:
    """Return the claims that kernels converge, for one case of laws.

    Args:
        case: Name of the case.
        errors: Columns of errors with the names of the kernels.

    Returns:
        A claim for each kernel.
    """
    claims = []
    for column, text in errors.items():
        claim = exponent_claim(
            f"{case}: the squared error of the {text} falls as 1/width",
            "exponent of the relative mean squared error in the width",
            "kernels converge to their limit",
            where(part="kernels", case=case),
            column,
            above=-1.5,
            below=-0.5,
        )
        claims.append(claim)
    return claims


def coupling_claim(case: str, text: str, *, above: float, below: float) -> Claim:
    """Return a claim on the coupling of members for one case of laws."""
    return Claim(
        statement=f"the tangent kernel between members {text}",
        measure="between members relative to within, at the largest width",
        statistic=partial(coupling_at_largest_width, case=case),
        above=above,
        below=below,
        paper="zero if and only if E[u^L]=0",
    )
