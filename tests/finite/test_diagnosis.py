"""A diagnosis as text and as a dict."""

from __future__ import annotations

import json

from finite.diagnosed import X, Y, batch_ensemble

from embens.finite import diagnose


def test_a_diagnosis_prints_as_text_and_exports_as_a_dict():
    ensemble = batch_ensemble(p=0.99)
    report = diagnose(ensemble, X, Y, gamma=8)
    text = str(report)
    for word in ("collective", "coupling", "cosines", "gamma", "rates", "warnings", "fix:"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 100
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["regime"] == "collective"
    assert values["warnings"][0]["code"] == "large-gamma"
    assert len(values["cosines"]) == 8
    assert set(values["layers"]) == {"0", "2", "4"}
