"""The battery of the experiment ablation."""

from __future__ import annotations

from tests.reproduction.battery import Battery


class TestAblation(Battery):
    name = "ablation"

    @staticmethod
    def confirming_rows(cell, noise):
        accuracies = {
            "pre only": -0.02,
            "shifted": -0.02,
            "last layer, trainable": -0.03,
            "input and output": -0.1,
            "gamma=1": -0.01,
            "modulation rate ×5": 0.01,
        }
        correlations = {"pre only": 0.2, "shifted": 0.2, "last layer, trainable": 0.58}
        return make_row(cell, noise, accuracies, correlations, gradient_ratio=0.2)

    @staticmethod
    def contradicting_rows(cell, noise):
        accuracies = {
            "post only": 0.03,
            "pre only": 0.02,
            "shifted": 0.02,
            "last layer, trainable": 0.03,
            "gamma=1": 0.01,
            "modulation rate ×5": -0.01,
        }
        correlations = {
            "post only": 0.2,
            "pre only": -0.2,
            "shifted": -0.2,
            "last layer, trainable": 0.1,
        }
        return make_row(cell, noise, accuracies, correlations, gradient_ratio=1.5)


def make_row(cell, noise, accuracies, correlations, gradient_ratio):
    """Return a row from differences between the variants and the usual ensemble."""
    variant = cell["variant"]
    return {
        "accuracy": 0.9 + accuracies.get(variant, 0.0) + noise(0.001),
        "correlation": 0.4 + correlations.get(variant, 0.0) + noise(0.002),
        "member_accuracy": 0.85,
        "member_train_accuracy": 0.9,
        "gradient_ratio": gradient_ratio + noise(0.01),
    }
