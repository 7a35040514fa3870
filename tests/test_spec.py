"""The specification of an ensemble."""

import pytest
from cases import Residual
from torch import nn

import embens
from embens import laws
from embens.sites import Site
from embens.spec import EnsembleSpec, LowRankSite, PerMember

SPEC = EnsembleSpec(
    "embed",
    3,
    (Site("0", "pre", laws.Shifted(0.5), 4), Site("2", "post", laws.Normal(), 2, 2, False)),
    (LowRankSite("2", 1, "additive", 0.5),),
    (PerMember("4", ("weight", "bias"), drawn=True),),
    frozen=True,
)


def test_subsets_of_subsets_name_the_original_members():
    subset = SPEC.subset([2, 0, 2]).subset([0, 1])
    assert (subset.members, subset.chosen, subset.sampled) == (2, (2, 0), 3)
    assert not subset.has_repeated_members
    assert SPEC.subset([2, 0, 2]).has_repeated_members


def test_a_reference_of_another_architecture_raises():
    spec = embens.batch_ensemble(Residual(), 2).spec
    spec.check_reference(Residual())
    with pytest.raises(ValueError, match=r"the reference has no module .* architecture"):
        spec.check_reference(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    other = Residual()
    other.head = nn.Linear(9, 5)
    with pytest.raises(ValueError, match="another shape"):
        spec.check_reference(other)
    without_statistics = Residual()
    without_statistics.blocks[0].norm1 = nn.BatchNorm2d(6, track_running_stats=False)
    with pytest.raises(ValueError, match=r"'blocks\.0\.norm1' has no tensor 'running_mean'"):
        spec.check_reference(without_statistics)
