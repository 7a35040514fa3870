"""Predictions against formulas, for every family and task."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import embens
from embens import metrics
from embens.files import Refused
from embens.prediction import Prediction, StoredPrediction, predict


def reference(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, outputs)),
    )


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(23, 4, generator=torch.Generator().manual_seed(1))


FAMILIES = {
    "batch ensemble": lambda net: embens.batch_ensemble(net, 5),
    "masks": lambda net: embens.mc_dropout(net, 5),
    "last layer": lambda net: embens.last_layer_dropout(net, 5),
    "independent": lambda net: embens.independent(net, 5),
}


@pytest.mark.parametrize("batch_size", [1, 7, 1024])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_members_are_the_outputs_in_evaluation_mode(family, batch_size, x):
    ensemble = family(reference())
    prediction = predict(ensemble, x, batch_size=batch_size)
    assert ensemble.training
    assert not prediction.members.requires_grad
    ensemble.eval()
    outputs = ensemble(x).detach()
    torch.testing.assert_close(prediction.members, outputs)
    torch.testing.assert_close(prediction.mean, outputs.mean(0))
    torch.testing.assert_close(prediction.variance, outputs.var(0, correction=0))


def test_uncertainty_of_classes_follows_the_formulas(x):
    prediction = predict(embens.batch_ensemble(reference(), 5), x)
    each = prediction.members.softmax(-1)
    mean = each.mean(0)
    entropy = -(mean * mean.log()).sum(-1)
    information = entropy + (each * each.log()).sum(-1).mean(0)
    torch.testing.assert_close(prediction.probabilities, mean)
    torch.testing.assert_close(prediction.entropy, entropy)
    torch.testing.assert_close(prediction.mutual_information, information, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(prediction.entropy, metrics.predictive_entropy(prediction.members))


def test_the_gaussian_mixture_has_its_two_parts(x):
    prediction = predict(embens.batch_ensemble(reference(2), 5), x, task="gaussian")
    means, variances = prediction.members[..., 0], prediction.members[..., 1].exp()
    torch.testing.assert_close(prediction.mean, means.mean(0))
    torch.testing.assert_close(prediction.aleatoric, variances.mean(0))
    torch.testing.assert_close(prediction.epistemic, means.var(0, correction=0))
    second = (means.square() + variances).mean(0)
    torch.testing.assert_close(prediction.variance, second - prediction.mean.square())


def test_point_predictions_have_no_aleatoric_part(x):
    prediction = predict(embens.batch_ensemble(reference(2), 5), x, task="regression")
    assert prediction.mean.shape == (23, 2)
    assert not prediction.aleatoric.any()
    assert torch.equal(prediction.variance, prediction.epistemic)


@pytest.mark.parametrize("members", [1, 5, 8])
def test_fresh_masks_are_drawn_as_many_as_asked_for(members, x):
    ensemble = embens.mc_dropout(reference(), 5, fresh=True, law=embens.laws.Normal())

    def run(batch_size, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return predict(
            ensemble, x, members=members, batch_size=batch_size, generator=generator
        ).members

    outputs = run(1024)
    assert outputs.shape == (members, 23, 3)
    assert len({tuple(o.flatten().tolist()) for o in outputs}) == members
    torch.testing.assert_close(run(7), outputs)  # one mask for all samples
    assert not torch.equal(run(1024, seed=1), outputs)


def test_fresh_masks_come_from_the_global_generator_by_default(x):
    ensemble = embens.mc_dropout(reference(), 5, fresh=True)
    torch.manual_seed(3)
    first = predict(ensemble, x).members
    second = predict(ensemble, x).members
    torch.manual_seed(3)
    assert torch.equal(predict(ensemble, x).members, first)
    assert not torch.equal(first, second)


def test_the_mode_of_every_part_is_restored(x):
    ensemble = embens.batch_ensemble(reference(), 3)
    frozen = next(m for m in ensemble.modules() if isinstance(m, nn.BatchNorm1d))
    frozen.eval()
    modes = [m.training for m in ensemble.modules()]
    predict(ensemble, x)
    assert [m.training for m in ensemble.modules()] == modes
    with pytest.raises(RuntimeError):
        predict(ensemble, x[:, :2])
    assert [m.training for m in ensemble.modules()] == modes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_is_kept(dtype, x):
    ensemble = embens.batch_ensemble(reference().to(dtype), 3)
    prediction = predict(ensemble, x.to(dtype))
    assert prediction.members.dtype == prediction.mean.dtype == dtype
    assert prediction.entropy.isfinite().all()


def test_several_inputs_and_no_samples_work(x):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(4, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, a, b):
            return self.head(torch.relu(self.first(a) + self.second(b)))

    ensemble = embens.batch_ensemble(Sum(), 3)
    assert predict(ensemble, (x, x), batch_size=5).members.shape == (3, 23, 3)
    assert predict(ensemble, (x[:0], x[:0])).mean.shape == (0, 3)
    with pytest.raises(ValueError, match="as many rows in all of them"):
        predict(ensemble, (x, x[:3]))


def test_errors_say_what_to_do(x):
    ensemble = embens.batch_ensemble(reference(), 5)
    with pytest.raises(ValueError, match=r"members=7: the 5 members .* embed with fresh=True"):
        predict(ensemble, x, members=7)
    with pytest.raises(ValueError, match="task: unknown 'regresion'; did you mean 'regression'"):
        predict(ensemble, x, task="regresion")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size must be at least 1; got 0"):
        predict(ensemble, x, batch_size=0)
    with pytest.raises(TypeError, match=r"x: expected a tensor \(batch, …\)"):
        predict(ensemble, x.tolist())
    with pytest.raises(ValueError, match=r"expects outputs \(…, 2\)"):
        predict(ensemble, x, task="gaussian")
    with pytest.raises(ValueError, match="entropy is defined for 'classification'"):
        _ = predict(ensemble, x, task="regression").entropy
    with pytest.raises(ValueError, match="aleatoric is defined for 'regression' and 'gaussian'"):
        _ = Prediction(ensemble(x)).aleatoric
    fresh = embens.mc_dropout(reference(), 5, fresh=True)
    with pytest.raises(ValueError, match="members must be at least 1; got 0"):
        predict(fresh, x, members=0)


@pytest.mark.parametrize("as_tuple", [True, False])
def test_inputs_by_name_and_several_outputs(as_tuple, x):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.label, self.value = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 2)

        def forward(self, a, b):
            hidden = torch.relu(self.body(a - b))
            outputs = {"label": self.label(hidden), "value": self.value(hidden)}
            return tuple(outputs.values()) if as_tuple else outputs

    ensemble = embens.batch_ensemble(Heads(), 3)
    expected = ensemble(x, 2 * x)
    label = 0 if as_tuple else "label"
    for inputs in ((x, 2 * x), {"b": 2 * x, "a": x}):
        prediction = predict(ensemble, inputs, batch_size=5)
        torch.testing.assert_close(prediction.members, expected)
        probabilities = expected[label].softmax(-1).mean(0)
        torch.testing.assert_close(prediction[label].probabilities, probabilities)
        with pytest.raises(TypeError, match=r"take one output: prediction\[key\]\.entropy"):
            _ = prediction.entropy
    assert "(3, 23, 3)" in repr(prediction)
    with pytest.raises(TypeError, match="one output"):
        _ = prediction[label][0]


def test_rows_that_are_not_finite_are_named(x):
    ensemble = embens.batch_ensemble(reference(), 3)
    x[[2, 9]] = torch.nan
    with pytest.raises(ValueError, match="x have NaN in rows 2, 9, and so have the outputs"):
        predict(ensemble, x)
    with pytest.raises(TypeError, match="'batchsize'; did you mean 'batch_size'"):
        predict(ensemble, x, batchsize=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prediction_that_is_streamed_to_disk_is_the_one_in_memory(family, x, tmp_path):
    ensemble = FAMILIES[family](reference())
    fresh = any(site.random for site in ensemble.plan.sites)
    options = {"members": 7} if fresh else {}
    expected = predict(ensemble, x, generator=torch.Generator().manual_seed(3), **options)
    for inputs in (x, iter(x.split(10))):
        generator = torch.Generator().manual_seed(3)
        stored = predict(
            *(ensemble, inputs), batch_size=10, generator=generator, to=tmp_path / "p", **options
        )
        parts = list(stored)
        assert [part.members.shape[1] for part in parts] == [10, 10, 3]
        assert len(stored) == len(StoredPrediction(tmp_path / "p")) == 23
        torch.testing.assert_close(torch.cat([p.members for p in parts], 1), expected.members)
        together = torch.cat([part.mutual_information for part in parts])
        torch.testing.assert_close(together, expected.mutual_information)


def test_streaming_never_holds_more_than_a_batch(x, tmp_path):
    ensemble, alive, most = embens.batch_ensemble(reference(), 5), weakref.WeakSet(), []

    def batches():
        for _ in range(6):
            batch = x.clone()
            alive.add(batch)
            most.append(len(alive))
            yield batch

    assert len(predict(ensemble, batches(), to=tmp_path / "p")) == 6 * 23
    assert max(most) <= 2


def test_outputs_of_any_shape_and_dtype_are_streamed(tmp_path):
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Unflatten(-1, (2, 3)))
    for dtype in (torch.float64, torch.bfloat16):
        ensemble = embens.batch_ensemble(net.to(dtype), 3)
        inputs = torch.randn(5, 4, dtype=dtype)
        (part,) = predict(ensemble, inputs, task="regression", to=tmp_path / "p")
        expected = predict(ensemble, inputs, task="regression").members
        assert part.members.shape == (3, 5, 2, 3)
        assert part.task == "regression"
        torch.testing.assert_close(part.members, expected.to(part.members.dtype))


def test_what_can_not_be_streamed_is_refused_and_leaves_no_file(x, tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            h = torch.relu(self.a(x))
            return h, self.b(h)

    with pytest.raises(TypeError, match="one output; got a tuple"):
        predict(embens.batch_ensemble(Two(), 3), x, to=tmp_path / "p")
    with pytest.raises(ValueError, match="at least one batch"):
        predict(embens.batch_ensemble(reference(), 3), iter([]), to=tmp_path / "p")
    with pytest.raises(TypeError, match="a tensor"):
        predict(embens.batch_ensemble(reference(), 3), iter([x]))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "q").write_text("no Arrow")
    with pytest.raises(Refused, match="can't be read"):
        StoredPrediction(tmp_path / "q")
