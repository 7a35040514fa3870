"""The predicted number of members: limits in closed form, and linearised networks."""

from __future__ import annotations

import pytest
import torch
from theory.measured import points

import embens
from embens import laws, theory
from embens.theory.capacity import layer_blocks

SIGNS = laws.Signs(0.0)
TRAIN, TEST = 8, 20


def problem(features=3):
    x = points(TRAIN + TEST, features=features, seed=3)
    y = x[:, 0]
    return x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:]


def ensemble_of(width, members=8, generator=None, *, depth=2, features=3):
    net = embens.networks.mlp(
        features, width, depth, weight_std=2**0.5, generator=generator
    ).double()
    return embens.embed(net, members, pre=SIGNS, post=SIGNS, trainable=False, generator=generator)


def linearised_error(width: int, members: int, time: float, seeds: int, **shape) -> float:
    """Return the test error of networks that are linearised at their initialisation."""
    x_train, y_train, x_test, y_test = problem(shape.get("features", 3))
    x = torch.cat([x_train, x_test])
    errors = []
    for seed in range(seeds):
        ensemble = ensemble_of(width, members, torch.Generator().manual_seed(seed), **shape)
        kernel = embens.finite.ntk(ensemble, x, outputs="trace").shared
        with torch.no_grad():
            outputs = ensemble(x)[..., 0]
        size = members * TRAIN
        train = kernel[:, :, :TRAIN, :TRAIN].permute(0, 2, 1, 3).reshape(size, size)
        test_kernel = kernel[:, :, TRAIN:, :TRAIN].mean(0).permute(1, 0, 2).reshape(TEST, size)
        values, vectors = torch.linalg.eigh(train)
        gains = -torch.expm1(-values * time / TRAIN) / values.clamp(min=1e-12)
        gains = torch.where(values > 1e-10 * values[-1], gains, 0.0)
        residual = (y_train - outputs[:, :TRAIN]).flatten()
        change = test_kernel @ vectors @ (gains * (vectors.mT @ residual))
        mean = outputs[:, TRAIN:].mean(0) + change
        errors.append((mean - y_test).square().mean().item())
    return sum(errors) / seeds


def predict(width, members, **options):
    gamma = float if "gamma" not in options else options.pop("gamma")
    return theory.best_members(
        ensemble_of(width), problem()[:2], problem()[2:], members=members, gamma=gamma, **options
    )


def test_wide_networks_have_the_error_of_gradient_flow():
    x_train, y_train, x_test, y_test = problem()
    ensemble = ensemble_of(2000)
    report = theory.best_members(
        ensemble,
        (x_train, y_train),
        (x_test, y_test),
        members=(1, 4),
        gamma=float,
        time=50.0,
        draws=1,
    )
    parts = [
        theory.kernels(ensemble, x_train),
        theory.kernels(ensemble, x_test, x_train),
        theory.kernels(ensemble, x_test),
    ]
    for index, members in enumerate((1, 4)):
        flow = theory.gradient_flow(*parts, y_train, members=members, gamma=float(members))
        bias = (flow.mean(50.0).flatten() - y_test).square().mean()
        variance = flow.ensemble_variance(50.0).mean()
        assert report.errors[index].item() == pytest.approx((bias + variance).item(), rel=0.1)
        assert report.separate[index].item() == pytest.approx((bias + variance).item(), rel=1e-6)


@pytest.mark.parametrize("members", [1, 4, 16])
def test_error_is_that_of_linearised_networks(members):
    report = predict(64, (members,), time=300.0, draws=8)
    measured = linearised_error(64, members, 300.0, seeds=12)
    assert report.errors.item() == pytest.approx(measured, rel=0.5)


@pytest.mark.parametrize("members", [1, 3])
def test_first_layers_have_as_many_features_as_inputs_and_units(members):
    """The kernel of inputs multiplies that of gradients; width 16 alone would be 16 features."""
    shape = {"depth": 1, "features": 5}
    x_train, y_train, x_test, y_test = problem(features=5)
    report = theory.best_members(
        ensemble_of(16, **shape),
        (x_train, y_train),
        (x_test, y_test),
        members=(members,),
        gamma=float,
        time=3000.0,
        draws=24,
    )
    measured = linearised_error(16, members, 3000.0, seeds=40, **shape)
    assert 0.5 < report.errors.item() / measured < 2


def test_orthogonal_inputs_have_features_of_the_whole_kernel():
    x = torch.eye(3, dtype=torch.float64)
    blocks = layer_blocks(ensemble_of(16), x, count=3)
    assert blocks["0"].inputs is None
    blocks = layer_blocks(ensemble_of(16), x + 1, count=3)
    assert blocks["0"].inputs is not None


def test_wide_networks_hold_more_members():
    candidates = (1, 4, 16, 32)
    narrow, wide = (predict(width, candidates, time=3000.0) for width in (8, 64))
    assert narrow.best < wide.best
    assert (narrow.excess[1:] > wide.excess[1:]).all()


def trained_error(scale: float, *, rate: float = 0.02, time: float = 100.0) -> float:
    """Return the test error of 16 members at width 16, trained by gradient descent.

    The change of outputs is multiplied by ``scale``. A large one keeps features as they were.
    """
    x_train, y_train, x_test, y_test = problem()
    x = torch.cat([x_train, x_test])
    ensemble = ensemble_of(16, 16, torch.Generator().manual_seed(0))
    parameters = list(ensemble.shared_parameters())
    with torch.no_grad():
        start = ensemble(x)[..., 0]
    for _ in range(round(time / rate)):
        change = ensemble(x_train)[..., 0] - start[:, :TRAIN]
        outputs = start[:, :TRAIN] + scale * change
        loss = 0.5 * (outputs - y_train).square().sum() / TRAIN
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= rate / scale**2 * gradient
    with torch.no_grad():
        outputs = start + scale * (ensemble(x)[..., 0] - start)
    return (outputs[:, TRAIN:].mean(0) - y_test).square().mean().item()


@pytest.mark.long
def test_networks_that_learn_features_leave_the_prediction():
    linearised = linearised_error(16, 16, 100.0, seeds=1)
    assert trained_error(30.0) == pytest.approx(linearised, rel=0.1)
    assert trained_error(1.0) < 0.7 * linearised


def test_a_layer_has_at_most_as_many_features_as_weights():
    report = predict(16, (1,))
    assert report.features["2"] == 16 * 16
    assert report.features["4"] == pytest.approx(16, rel=1e-3)
    assert report.features["0"] <= 3 * 16


@pytest.mark.parametrize("time", [0, -1.0, float("nan")])
def test_invalid_times_raise(time):
    with pytest.raises(ValueError, match="time must be a positive number"):
        predict(8, (1,), time=time)


def test_no_candidates_raise():
    with pytest.raises(ValueError, match="at least one number of members"):
        predict(8, ())
