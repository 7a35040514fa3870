"""Run an ensemble on data in batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import embens
from embens import metrics
from embens.inference import predict
from embens.prediction import Prediction


def reference(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(8, outputs),
    )


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(23, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["predict", "evaluate", "to_onnx"])
def test_an_ensemble_without_values_is_refused(name, x, tmp_path):
    with torch.device("meta"):
        ensemble = embens.batch_ensemble(reference(), 2)
    calls = {
        "predict": lambda: predict(ensemble, x),
        "evaluate": lambda: embens.evaluate(ensemble, (x, torch.zeros(23).long())),
        "to_onnx": lambda: ensemble.to_onnx(tmp_path / "file", x),
    }
    with pytest.raises(ValueError, match=rf"{name} needs values, but 'reference\.0\.weight' is on"):
        calls[name]()


FAMILIES = {
    "batch ensemble": lambda net: embens.batch_ensemble(net, 5),
    "masks": lambda net: embens.mc_dropout(net, 5, fresh=False),
    "last layer": lambda net: embens.last_layer_dropout(net, 5),
    "independent": lambda net: embens.independent(net, 5),
}


def make_sources(x):
    target = torch.arange(len(x))
    return {
        "array": x.numpy(),
        "double array": x.double().numpy(),
        "tensor data set": TensorDataset(x),
        "data set with targets": TensorDataset(x, target),
        "loader": DataLoader(TensorDataset(x), batch_size=10),
        "loader with targets": DataLoader(TensorDataset(x, target), batch_size=10),
        "loader of tensors": DataLoader(x, batch_size=10),
        "iterator": iter(x.split(10)),
    }


class Several(nn.Module):
    """Returns logits among other outputs."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.tanh(self.hidden(x))
        return {"logits": self.head(hidden), "hidden": hidden}


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


def test_class_uncertainties_equal_their_formulas(x):
    prediction = predict(embens.batch_ensemble(reference(), 5), x)
    probabilities = prediction.members.softmax(-1)
    mean = probabilities.mean(0)
    entropy = -(mean * mean.log()).sum(-1)
    information = entropy + (probabilities * probabilities.log()).sum(-1).mean(0)
    torch.testing.assert_close(prediction.probabilities, mean)
    torch.testing.assert_close(prediction.entropy, entropy)
    torch.testing.assert_close(prediction.mutual_information, information, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(prediction.entropy, metrics.predictive_entropy(prediction.members))


def test_the_variance_of_a_gaussian_mixture_has_two_parts(x):
    prediction = predict(embens.batch_ensemble(reference(2), 5), x, task="gaussian")
    means, variances = prediction.members[..., 0], prediction.members[..., 1].exp()
    torch.testing.assert_close(prediction.mean, means.mean(0))
    torch.testing.assert_close(prediction.aleatoric, variances.mean(0))
    torch.testing.assert_close(prediction.epistemic, means.var(0, correction=0))
    second = (means.square() + variances).mean(0)
    torch.testing.assert_close(prediction.variance, second - prediction.mean.square())
    torch.testing.assert_close(prediction.std, prediction.variance.sqrt())


def test_point_predictions_have_no_aleatoric_part(x):
    prediction = predict(embens.batch_ensemble(reference(2), 5), x, task="regression")
    assert prediction.mean.shape == (23, 2)
    assert not prediction.aleatoric.any()
    assert torch.equal(prediction.variance, prediction.epistemic)


def test_intervals_of_point_predictions_are_those_of_a_normal(x):
    prediction = predict(embens.batch_ensemble(reference(1), 5), x, task="regression")
    low, high = prediction.interval(0.9)
    assert low.shape == high.shape == (23, 1)
    torch.testing.assert_close((low + high) / 2, prediction.mean)
    torch.testing.assert_close(high, prediction.mean + 1.6448536 * prediction.std)
    torch.testing.assert_close(prediction.quantile(0.05), low)
    torch.testing.assert_close(prediction.quantile(0.5), prediction.mean)


@pytest.mark.parametrize("members", [1, 5, 8])
def test_the_requested_number_of_fresh_masks_is_drawn(members, x):
    ensemble = embens.mc_dropout(reference(), 5, fresh=True, law=embens.laws.Normal())

    def run(batch_size, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return predict(
            ensemble, x, members=members, batch_size=batch_size, generator=generator
        ).members

    outputs = run(1024)
    assert outputs.shape == (members, 23, 3)
    assert len({tuple(o.flatten().tolist()) for o in outputs}) == members
    torch.testing.assert_close(run(7), outputs)  # the same masks for all batches
    assert not torch.equal(run(1024, seed=1), outputs)


def test_fresh_masks_come_from_the_global_generator_by_default(x):
    ensemble = embens.mc_dropout(reference(), 5, fresh=True)
    torch.manual_seed(3)
    first = predict(ensemble, x).members
    second = predict(ensemble, x).members
    torch.manual_seed(3)
    assert torch.equal(predict(ensemble, x).members, first)
    assert not torch.equal(first, second)


def test_the_mode_of_every_module_is_restored(x):
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


def test_several_inputs_and_empty_batches_work(x):
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
    with pytest.raises(ValueError, match="same number of rows in all tensors"):
        predict(ensemble, (x, x[:3]))


def test_invalid_arguments_raise(x):
    ensemble = embens.batch_ensemble(reference(), 5)
    with pytest.raises(ValueError, match=r"members=7 needs masks .* the 5 members .*fresh=True"):
        predict(ensemble, x, members=7)
    with pytest.raises(ValueError, match="task: unknown 'regresion'; did you mean 'regression'"):
        predict(ensemble, x, task="regresion")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size must be a positive integer, got 0"):
        predict(ensemble, x, batch_size=0)
    with pytest.raises(TypeError, match=r"x must be a tensor \(batch, …\)"):
        predict(ensemble, x.tolist())
    with pytest.raises(ValueError, match=r"needs outputs \(…, 2\)"):
        predict(ensemble, x, task="gaussian")
    with pytest.raises(ValueError, match="entropy is defined for 'classification'"):
        _ = predict(ensemble, x, task="regression").entropy
    with pytest.raises(ValueError, match="aleatoric is defined for 'regression' and 'gaussian'"):
        _ = Prediction(ensemble.eval()(x)).aleatoric
    with pytest.raises(ValueError, match="x must contain at least one batch"):
        predict(ensemble, iter([]))
    with pytest.raises(TypeError, match="'batchsize'; did you mean 'batch_size'"):
        predict(ensemble, x, batchsize=3)
    fresh = embens.mc_dropout(reference(), 5, fresh=True)
    with pytest.raises(ValueError, match="members must be a positive integer, got 0"):
        predict(fresh, x, members=0)


def test_inputs_in_several_arguments_raise_with_the_fix(x):
    with pytest.raises(
        TypeError, match=r"one argument, got 2 .* Call predict\(ensemble, \(x, z\)\)"
    ):
        predict(embens.batch_ensemble(reference(), 5), x, x)


def test_a_wrong_number_of_features_is_named():
    network = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 3))
    ensemble = embens.batch_ensemble(network, 2)

    with pytest.raises(RuntimeError) as raised:
        predict(ensemble, torch.zeros(2, 5))

    (note,) = raised.value.__notes__
    assert "inputs have shape (2, 5)" in note
    assert "expects 4 features" in note


@pytest.mark.parametrize("as_tuple", [True, False])
def test_named_inputs_and_several_outputs_work(as_tuple, x):
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
        with pytest.raises(TypeError, match=r"Select one output: prediction\[key\]\.entropy"):
            _ = prediction.entropy
    assert "(3, 23, 3)" in repr(prediction)
    with pytest.raises(TypeError, match="single output"):
        _ = prediction[label][0]


def test_rows_that_are_not_finite_are_named(x):
    ensemble = embens.batch_ensemble(reference(), 3)
    x[[2, 9]] = torch.nan
    with pytest.raises(ValueError, match="inputs have NaN in rows 2, 9, so the outputs are not"):
        predict(ensemble, x)
    with pytest.raises(ValueError, match="in row 0 of the batch that starts at row 6"):
        predict(ensemble, x[3:], batch_size=2)
    x[2] = torch.inf
    with pytest.raises(ValueError, match="inputs have infinite values in row 2"):
        predict(ensemble, x[:8])


@pytest.mark.parametrize("kind", make_sources(torch.zeros(2, 4)))
@pytest.mark.parametrize("family", FAMILIES)
def test_all_kinds_of_data_give_the_same_prediction(family, kind, x):
    ensemble = FAMILIES[family](reference())
    expected = predict(ensemble, x, generator=torch.Generator().manual_seed(3))
    data = make_sources(x)[kind]
    prediction = predict(ensemble, data, batch_size=10, generator=torch.Generator().manual_seed(3))
    assert prediction.members.dtype == torch.float32
    torch.testing.assert_close(prediction.members, expected.members)


def test_arrays_get_the_dtype_of_the_ensemble(x):
    ensemble = embens.batch_ensemble(reference().double(), 3)
    assert predict(ensemble, np.float32(x)).members.dtype == torch.float64


def test_members_are_the_logits_of_a_network_that_returns_them(x):
    ensemble = embens.batch_ensemble(Several(), 3)
    prediction = predict(ensemble, x, batch_size=10)
    expected = ensemble(x)
    torch.testing.assert_close(prediction.members, expected["logits"].detach())
    torch.testing.assert_close(prediction["hidden"].members, expected["hidden"].detach())
    assert prediction.probabilities.shape == (23, 3)


def test_inputs_of_another_type_raise_with_the_fix():
    ensemble = embens.batch_ensemble(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), 3)
    x = torch.zeros(6, 4, dtype=torch.float64)
    with pytest.raises(RuntimeError) as caught:
        predict(ensemble, x)
    assert "Convert the inputs with x.to(torch.float32)" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError) as caught:
        embens.fit(ensemble, (x, torch.zeros(6, dtype=torch.int64)), epochs=1)
    assert "Convert the inputs with x.to(torch.float32)" in caught.value.__notes__[0]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("name", FAMILIES)
def test_statistics_of_few_batches_warn(name, x):
    ensemble = FAMILIES[name](normed())
    embens.predict(ensemble, x)  # was not trained
    for _ in range(5):
        ensemble.train()(x)
    expected = r"'1' \(BatchNorm1d\) has seen 5 batches in training mode, so 59% of its running"
    with pytest.warns(UserWarning, match=expected):
        embens.predict(ensemble, x)
    with pytest.warns(UserWarning, match=expected):
        embens.evaluate(ensemble, (x, torch.arange(len(x)) % 3))
    for _ in range(20):
        ensemble.train()(x)
    embens.predict(ensemble, x)


def test_statistics_over_all_batches_never_lag(x):
    network = normed()
    network[1].momentum = None
    ensemble = embens.batch_ensemble(network, 3)
    ensemble.train()(x)
    embens.predict(ensemble, x)
