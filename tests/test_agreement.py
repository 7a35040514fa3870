"""The contract of the core: folded equals merged equals single members.

The battery goes through every architecture, family, mode, chunk and kind of batch. References that
do unusual things follow: they are right, or they are refused with a reason.
"""

import pytest
import torch
from agreement import assert_same, check_agreement, run_merged, tensors_of
from cases import ARCHITECTURES, FAMILIES

MEMBERS = 3


def build(case, family):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    reference = case.build().double()
    ensemble = FAMILIES[family](reference, members=MEMBERS, generator=generator)
    x = case.inputs(torch.Generator().manual_seed(2))
    return ensemble, x.double() if x.is_floating_point() else x


MODES_MATTER = ("residual", "mlp")  # the other architectures do the same in both modes


def battery() -> list:
    """Return all combinations; training mode is sampled outside of long runs."""
    combinations = []
    for case in ARCHITECTURES:
        for family in FAMILIES:
            for training in (False, True):
                is_usual = not training or case.name in MODES_MATTER
                mode = "training" if training else "evaluation"
                combinations.append(
                    pytest.param(
                        *(case, family, training),
                        id=f"{case}, {family}, {mode}",
                        marks=() if is_usual else pytest.mark.long,
                    )
                )
    return combinations


@pytest.mark.parametrize(("case", "family", "training"), battery())
def test_folded_equals_merged_equals_members(case, family, training):
    ensemble, x = build(case, family)
    check_agreement(ensemble.train(training), x, chunks=(None, 2), passes=1)
