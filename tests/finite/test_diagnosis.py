"""A diagnosis as text, as a dict and as a picture."""

from __future__ import annotations

import json

from finite.diagnosed import X, Y, batch_ensemble

from embens.finite import diagnose


def test_text_dict_and_picture(tmp_path):
    ensemble = batch_ensemble(p=0.99)
    picture = tmp_path / "diagnose.png"
    report = diagnose(ensemble, X, Y, gamma=8)
    report.plot(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = str(report)
    for word in ("collective", "coupling", "pull", "gamma", "rates", "warnings", "do:"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 100
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["regime"] == "collective"
    assert values["warnings"][0]["code"] == "large-gamma"
    assert values["forecast"] is None  # of fewer than 64 samples
    assert len(values["cosines"]) == 8
    assert set(values["overlap"]) == {"0", "2", "4"}
