"""Pictures of predictions."""

import torch

from embens.prediction import Prediction


def test_every_decision_has_a_picture(tmp_path):
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(6, (200,), generator=generator)
    prediction = Prediction(torch.randn(3, 200, 6, generator=generator))
    prediction.risk_coverage(target).plot(tmp_path / "risk.png")
    prediction.flag(prediction).plot(tmp_path / "flags.png")
    prediction.conformal_sets(prediction, target).plot(tmp_path / "sets.png")
    prediction.plot_reliability(target, tmp_path / "reliability.png")
    tempered = prediction.tempered(2.0)
    tempered.plot_reliability(target, tmp_path / "both.png", before=prediction)
    pictures = sorted(tmp_path.glob("*.png"))

    assert len(pictures) == 5
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in pictures)
