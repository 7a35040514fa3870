"""What ensembles became before: Gaussian processes, and where their numbers come from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from finite.test_forecasting import PROBE

from embens.finite import experience

ROOT = Path(__file__).parents[2]


class TestExperience:
    def known(self, noise: float):
        x = torch.linspace(-3, 3, 30, dtype=torch.float64)[:, None]
        return experience.Experience.of(x, x.sin(), 1.0, noise), x

    def test_without_noise_it_goes_through_what_it_knows(self):
        known, x = self.known(1e-6)
        means, _ = known.expect(x[::7])
        torch.testing.assert_close(means, x[::7].sin(), atol=1e-3, rtol=0)
        between = torch.tensor([[0.31]], dtype=torch.float64)
        assert known.expect(between)[0].item() == pytest.approx(between.sin().item(), abs=0.02)

    def test_is_less_sure_of_what_lies_apart(self):
        known, x = self.known(0.1)
        _, near = known.expect(x[15:16])
        _, far = known.expect(torch.full((1, 1), 9.0, dtype=torch.float64))
        assert far > near >= 0.1**0.5 * known.scale

    def test_is_that_of_the_development(self, monkeypatch):
        results = ROOT / "benchmarks" / "results" / "forecast"
        if not (results / "development.jsonl").exists():
            pytest.skip("benchmarks are not part of a package")
        monkeypatch.syspath_prepend(str(ROOT))
        from benchmarks import forecast as benchmark

        names = ("development", "earlier")
        lines = [line for name in names for line in benchmark.read(results / f"{name}.jsonl")]
        assert not {line["task"] for line in lines} & set(benchmark.FRESH)
        features, values, _ = benchmark.table_of(lines)
        stored, reach = experience.known()
        again = experience.Experience.of(features, values, stored.length, stored.noise)
        torch.testing.assert_close(again.known, stored.known, atol=2e-3, rtol=0)
        torch.testing.assert_close(again.weights, stored.weights, atol=1e-5, rtol=1e-5)
        assert tuple(reach) == benchmark.NAMES

    def test_tasks_left_out_by_the_inverse_are_those_of_a_process_without_them(self, monkeypatch):
        if not (ROOT / "benchmarks" / "forecast.py").exists():
            pytest.skip("benchmarks are not part of a package")
        monkeypatch.syspath_prepend(str(ROOT))
        from benchmarks import forecast as benchmark

        known, x = self.known(0.1)
        tasks = np.array(["a", "b", "c"] * 10)
        means, spread = benchmark.left_out(known, x.sin(), tasks)
        others = torch.from_numpy(tasks != "b")
        joint, outcomes = (
            experience.joint(known.known, 1.0, 0.1),
            (x.sin() - known.mean) / known.scale,
        )
        among, meet = joint[others][:, others], joint[~others][:, others]
        expected = meet @ torch.linalg.solve(among, outcomes[others])
        torch.testing.assert_close(means[~others], known.mean + known.scale * expected)
        left = joint[~others][:, ~others] - meet @ torch.linalg.solve(among, meet.T)
        torch.testing.assert_close(spread[~others, 0], known.scale * left.diagonal().sqrt())

    def test_what_is_expected_has_a_mean_and_an_error_of_every_outcome(self):
        means, errors = experience.expect(PROBE)
        assert means.keys() == errors.keys() >= {"correlation", "gain", "lead", "more", "logit"}
        assert all(error > 0 for error in errors.values())
