"""Comparisons against training by hand, scipy's tests and simulated tables."""

from __future__ import annotations

import numpy
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import embens
from embens import metrics
from embens.comparison import compare
from embens.differences import Comparison

ARGUMENTS = {"epochs": 4, "lr": 0.1, "batch_size": 16, "progress": False}


def data(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def parts(rows: int = 48) -> tuple:
    return data(rows, 0), data(30, 1), data(50, 2)


def make_network(seed: int = 0, outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, outputs))


def candidates() -> dict[str, nn.Module]:
    generator = torch.Generator().manual_seed(1)
    return {
        "one": make_network(),
        "batch": embens.batch_ensemble(make_network(), 3, generator=generator),
    }


def one_network() -> embens.EmbeddedEnsemble:
    return embens.independent(make_network(), 1, initialise=lambda module: None)


def train_by_hand(ensemble, seed: int = 0, lr: float = 0.1) -> Tensor:
    train, validation, test = parts()
    embens.fit(
        ensemble, train, validation, epochs=4, batch_size=16, lr=lr, seed=seed, progress=False
    )
    return embens.predict(ensemble, test[0]).members


def test_scores_and_differences_are_those_of_training_by_hand():
    result = compare(candidates(), *parts(), **ARGUMENTS)
    one = train_by_hand(one_network())
    batch = train_by_hand(candidates()["batch"])
    target = parts()[2][1]
    for name, outputs in (("one", one), ("batch", batch)):
        scores = result.scores[name]
        assert scores["accuracy"] == pytest.approx(
            float(metrics.ensemble_accuracy(outputs, target))
        )
        assert scores["nll"] == pytest.approx(float(metrics.nll(outputs, target)), rel=1e-5)
        assert scores["brier"] == pytest.approx(float(metrics.brier(outputs, target)), rel=1e-5)
    hits = [(outputs.mean(0).argmax(-1) == target).numpy() for outputs in (one, batch)]
    losses = [
        -numpy.log(outputs.softmax(-1).mean(0).numpy()[range(50), target])
        for outputs in (one, batch)
    ]
    for metric, (first, second) in {"accuracy": hits, "nll": losses}.items():
        (difference,) = [each for each in result.differences if each.metric == metric]
        paired = second.astype(float) - first
        expected = stats.ttest_1samp(paired, 0.0).confidence_interval(0.95)
        assert difference.value == pytest.approx(paired.mean(), abs=1e-5)
        assert difference.low == pytest.approx(expected.low, abs=1e-5)
        assert difference.high == pytest.approx(expected.high, abs=1e-5)


def test_the_temperature_is_chosen_on_validation_data():
    result = compare(candidates(), *parts(), **ARGUMENTS)
    ensemble = candidates()["batch"]
    outputs = train_by_hand(ensemble)
    x, y = parts()[1]
    temperature = embens.uncertainty.best_temperature(embens.predict(ensemble, x).members, y)
    scores = result.scores["batch"]
    assert scores["temperature"] == pytest.approx(temperature)
    expected = metrics.nll(outputs / temperature, parts()[2][1])
    assert scores["calibrated_nll"] == pytest.approx(float(expected), rel=1e-5)


def test_costs_are_reported_and_candidates_stay_as_they_are():
    compared = candidates()
    before = {name: str(module.state_dict()) for name, module in compared.items()}
    result = compare(compared, *parts(), **ARGUMENTS)
    assert {name: str(module.state_dict()) for name, module in compared.items()} == before
    for name, scores in result.scores.items():
        count = sum(parameter.numel() for parameter in compared[name].parameters())
        assert scores["parameters"] == count
        assert scores["epochs"] == 4
        assert scores["training_seconds"] > 0
        assert scores["inference_seconds"] > 0


def test_each_candidate_uses_the_rate_with_the_lowest_validation_loss():
    rates = [1e-4, 0.1, 0.3]
    arguments = {**ARGUMENTS, "lr": rates}
    result = compare(candidates(), *parts(), **arguments)
    losses = {}
    for rate in rates:
        ensemble = candidates()["batch"]
        train_by_hand(ensemble, lr=rate)
        x, y = parts()[1]
        losses[rate] = float(metrics.nll(embens.predict(ensemble, x).members, y))

    assert result.scores["batch"]["lr"] == min(losses, key=losses.__getitem__)


def test_a_rate_that_diverges_is_not_chosen():
    result = compare(candidates(), *parts(), **{**ARGUMENTS, "lr": [1e20, 0.1]})
    assert result.scores["batch"]["lr"] == 0.1
    with pytest.raises(embens.Divergence) as caught:
        compare(candidates(), *parts(), **{**ARGUMENTS, "lr": 1e20})
    assert "'one'" in caught.value.__notes__[0]


def test_functions_are_called_for_each_seed_with_new_weights():
    weights = []

    def make() -> nn.Module:
        network = nn.Linear(3, 3)
        weights.append(network.weight.detach().clone())
        return network

    result = compare({"one": make_network(), "new": make}, *parts(), seeds=2, **ARGUMENTS)
    assert result.seeds == 2
    assert not torch.equal(weights[-1], weights[-2])
    again = compare({"one": make_network(), "new": make}, *parts(), seeds=2, **ARGUMENTS)
    assert again.differences == result.differences


def test_a_compute_budget_gives_cheap_candidates_more_epochs():
    network = make_network()
    compared = {
        "one": network,
        "batch": embens.batch_ensemble(network, 4),
        "separate": embens.independent(network, 4),
    }
    result = compare(compared, *parts(), budget="compute", **ARGUMENTS)

    assert result.scores["separate"]["epochs"] == 4
    assert result.scores["one"]["epochs"] == 16
    # Members share the first layer's pass.
    assert 4 <= result.scores["batch"]["epochs"] <= 6


def test_a_compute_budget_counts_layers_that_members_share_once():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())]
        network = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), *layers, nn.Linear(16, 3))
    compared = {
        "one": network,
        "dropout": embens.last_layer_dropout(network, 8),
        "separate": embens.independent(network, 8),
    }
    result = compare(compared, *parts(), budget="compute", **ARGUMENTS)

    epochs = {name: scores["epochs"] for name, scores in result.scores.items()}
    assert epochs["one"] == 32
    # Eight last layers cost a third of one network.
    assert 20 <= epochs["dropout"] <= 28


def test_an_interrupted_comparison_continues_with_the_same_result(tmp_path):
    expected = compare(candidates(), *parts(), **ARGUMENTS)

    class StopError(Exception):
        pass

    def stop(ensemble, record):
        if ensemble.members == 3 and record["epoch"] == 3:
            raise StopError

    arguments = {**ARGUMENTS, "folder": tmp_path}
    with pytest.raises(StopError):
        compare(candidates(), *parts(), callbacks=[stop], **arguments)
    steps = []

    def count(ensemble, record):
        steps.append((ensemble.members, record["epoch"]))

    continued = compare(candidates(), *parts(), callbacks=[count], **arguments)
    assert continued.differences == expected.differences
    assert (1, 1) not in steps
    assert steps == [(3, epoch) for epoch in range(steps[0][1], 5)]


def test_regression_compares_squared_errors():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    part = (x, x[:, 0])
    network = make_network(outputs=1)
    generator = torch.Generator().manual_seed(1)
    compared = {
        "one": network,
        "batch": embens.batch_ensemble(network, 2, generator=generator),
    }
    # With modulations of large variance, the squared error of a few samples diverges at 0.1.
    result = compare(compared, part, part, part, **{**ARGUMENTS, "lr": 0.01})
    assert [difference.metric for difference in result.differences] == ["squared_error"]
    scores = result.scores
    value = scores["batch"]["squared_error"] - scores["one"]["squared_error"]
    assert result.differences[0].value == pytest.approx(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidates": {}}, "at least one"),
        ({"epochs": 0}, "epochs must be a positive integer, got 0"),
        ({"seeds": 0}, "seeds must be a positive integer, got 0"),
        ({"budget": "time"}, "budget: unknown 'time'"),
        ({"lr": []}, "empty list"),
        ({"lr": [0.1, -1.0]}, "lr must be a positive number"),
        ({"test": (torch.zeros(4, 3), torch.full((4,), 7))}, "7"),
        ({"test": (torch.zeros(4, 3), torch.tensor([0, 1, 2, 7]))}, "indices from 0 to 7"),
    ],
)
def test_invalid_arguments_are_refused_before_training(change, message):
    train, validation, test = parts()
    arguments = {
        "candidates": {"one": make_network},
        "train": train,
        "validation": validation,
        "test": test,
        **ARGUMENTS,
        "callbacks": [lambda *_: pytest.fail("trained")],
        **change,
    }
    with pytest.raises(ValueError, match=message):
        compare(**arguments)


@pytest.mark.parametrize("budget", ["epochs", "compute"])
def test_arrays_of_any_precision_give_the_result_of_tensors(budget):
    arrays = [(x.double().numpy(), target.numpy()) for x, target in parts()]
    arguments = {**ARGUMENTS, "budget": budget}
    expected = compare(candidates(), *parts(), **arguments)
    assert compare(candidates(), *arrays, **arguments).differences == expected.differences


def test_a_candidate_that_is_no_module_is_refused():
    for candidate in (3, lambda: 3):
        with pytest.raises(TypeError, match="got int"):
            compare({"one": candidate}, *parts(), **ARGUMENTS)


@pytest.mark.parametrize("progress", [True, None, False])
def test_lines_of_epochs_follow_the_name_of_their_candidate(progress, capsys):
    compare(candidates(), *parts(), **{**ARGUMENTS, "progress": progress})
    lines = capsys.readouterr().err.splitlines()
    if progress is False:
        assert lines == []
    else:
        assert lines.index("one (1 of 2)") == 0
        assert lines[lines.index("batch (2 of 2)") + 1].startswith("epoch 1/4")


def test_tables_show_every_candidate_and_interval():
    result = compare(candidates(), *parts(), **ARGUMENTS)
    text = str(result)

    assert isinstance(result, Comparison)
    assert all(name in text for name in ("one", "batch", "nll", "95 % interval"))
    assert list(result.to_pandas().index) == ["one", "batch"]
    assert len(result.to_pandas("differences")) == 4


def test_a_network_starts_from_its_own_weights():
    network = make_network(seed=5)
    test = parts()[2]
    result = compare({"one": network}, *parts(), **{**ARGUMENTS, "lr": 1e-12})
    expected = nn.functional.cross_entropy(network(test[0]).detach(), test[1])

    assert result.scores["one"]["nll"] == pytest.approx(float(expected), rel=1e-5)
    assert result.differences == []


def test_networks_that_predict_variances_are_compared_by_their_distributions():
    def data(rows, seed):
        x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))
        return x, x[:, 0]

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    ensemble = embens.batch_ensemble(network, 3, law=embens.laws.Shifted)
    test = data(40, 2)
    result = compare(
        {"one": network, "batch": ensemble},
        data(60, 0),
        data(30, 1),
        test,
        criterion=embens.gaussian_nll,
        **ARGUMENTS,
    )
    assert [each.metric for each in result.differences] == ["squared_error", "nll", "crps"]
    embens.fit(ensemble, data(60, 0), data(30, 1), criterion=embens.gaussian_nll, **ARGUMENTS)
    expected = embens.evaluate(ensemble, test, task="gaussian")
    scores = result.scores["batch"]
    assert scores["nll"] == pytest.approx(expected["nll"])
    assert scores["crps"] == pytest.approx(expected["crps"])
    assert scores["squared_error"] ** 0.5 == pytest.approx(expected["rmse"])


def test_rows_of_probabilities_are_not_compared_as_values():
    soft = [(x, nn.functional.one_hot(y, 3).float()) for x, y in parts()]
    with pytest.raises(ValueError, match="rows of class probabilities"):
        compare(candidates(), *soft, **ARGUMENTS)
    result = compare(candidates(), *soft, criterion=nn.functional.mse_loss, **ARGUMENTS)
    assert [each.metric for each in result.differences] == ["squared_error"]
