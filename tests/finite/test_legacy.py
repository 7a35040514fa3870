"""The core with wrapped layers; delete this file with it."""

from __future__ import annotations

import embens
from embens import networks
from embens.finite import legacy
from embens.finite.adapter import individual_tensors


def test_the_core_is_recognized():
    ensemble = embens.batch_ensemble(networks.mlp(4, 6, 2, 3), 2)
    assert legacy.applies(ensemble) == hasattr(ensemble, "individuals")
    assert set(individual_tensors(ensemble)) == {"0.pre", "2.pre", "2.post", "4.post"}
