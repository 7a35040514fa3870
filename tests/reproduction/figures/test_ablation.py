"""ablation: its battery, on tables of which its claims are true, or false."""

from __future__ import annotations

from tests.reproduction.battery import Battery


def rows(c, true, noise):
    sign = 1 if true else -1
    worse = {
        "post only": 0.0 if true else 0.03,
        "pre only": -0.02 * sign,
        "shifted": -0.02 * sign,
        "last layer, trainable": -0.03 * sign,
        "input and output": -0.1 if true else 0.0,
        "gamma=1": -0.01 if true else 0.01,
        "modulation rate ×5": 0.01 * sign,
    }
    more = {
        "post only": 0.0 if true else 0.2,
        "pre only": 0.2 * sign,
        "shifted": 0.2 * sign,
        "last layer, trainable": 0.58 if true else 0.1,
    }
    return {
        "accuracy": 0.9 + worse.get(c["variant"], 0.0) + noise(0.001),
        "correlation": 0.4 + more.get(c["variant"], 0.0) + noise(0.002),
        "member_accuracy": 0.85,
        "member_train_accuracy": 0.9,
        "gradient_ratio": (0.2 if true else 1.5) + noise(0.01),
    }


class TestAblation(Battery):
    name, rows = "ablation", staticmethod(rows)
