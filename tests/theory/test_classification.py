"""Classification in the limit: cross-entropy training, and performance on digits."""

import math

import pytest
import torch
from sklearn.datasets import load_digits
from theory.hand_made import TEST, TRAIN, flatten, random_kernels, split
from torch.nn.functional import one_hot

import embens
from embens import laws, metrics, networks
from embens.theory import gradient_flow
from embens.theory.blocks import kernels
from embens.theory.classification import (
    CrossEntropySettings,
    apply,
    centred_targets,
    cross_entropy_flow,
    integrate,
    performance,
)
from embens.theory.kernel import Kernels

NAMES = ("accuracy", "member_accuracy", "nll", "brier", "calibration_error")
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0])


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class TestIntegrate:
    def test_gives_the_closed_form_for_the_squared_loss(self):
        parts, members = split(random_kernels()), 3
        train_train, test_train, _ = parts
        y = randn(TRAIN, 2)
        start = randn(members, TRAIN, 2, seed=1), randn(members, TEST, 2, seed=2)
        times = [0.0, 0.5, 7.0, 40.0]

        outputs = integrate(
            train_train.ntk(members, 2.0),
            test_train.ntk(members, 2.0),
            lambda f: f - y,
            start,
            times,
            accuracy=1e-10,
        )

        flow = gradient_flow(train_train, test_train, None, y, members, gamma=2.0)
        expected = flow.evolve(torch.tensor(times), *start)
        torch.testing.assert_close(outputs, expected, rtol=1e-8, atol=1e-8)

    def test_applies_a_kernel_as_the_matrix_of_all_members_does(self):
        kernel = random_kernels()[:4, :].nngp
        values = randn(3, TRAIN + TEST, 2)
        dense = flatten(kernel.dense(3)) @ values.reshape(-1, 2)
        torch.testing.assert_close(apply(kernel, values), dense.reshape(3, 4, 2))

    def test_says_where_the_solver_gives_up(self):
        ntk = random_kernels()[:2, :2].ntk(2, 1.0)
        start = randn(2, 2, 1), randn(2, 2, 1)
        with pytest.raises(RuntimeError, match=r"the solver did not reach time 5.*earlier times"):
            integrate(ntk, ntk, lambda f: -(f**3), start, [5.0])


class TestCrossEntropyFlow:
    def test_follows_small_steps_of_the_dense_equation(self):
        train_train, test_train, _ = split(random_kernels())
        members, rate, steps = 2, 1e-3, 3000
        start = randn(members, TRAIN, 3, seed=1), randn(members, TEST, 3, seed=2)

        (outputs,) = cross_entropy_flow(
            train_train,
            test_train,
            None,
            LABELS,
            members,
            gamma=1.5,
            times=[steps * rate],
            settings=CrossEntropySettings(start=start),
        )

        train_kernel = flatten(train_train.ntk(members, 1.5).dense(members))
        test_kernel = flatten(test_train.ntk(members, 1.5).dense(members))
        targets = one_hot(LABELS, 3).double().repeat(members, 1)
        train, test = (outputs_before.reshape(-1, 3) for outputs_before in start)
        for _ in range(steps):
            residual = train.softmax(-1) - targets
            train = train - rate / TRAIN * train_kernel @ residual
            test = test - rate / TRAIN * test_kernel @ residual
        change = (outputs - start[1]).abs().max()
        error = (outputs.reshape(-1, 3) - test).abs().max()
        assert change > 0.1
        assert error < 1e-3 * change

    def test_starts_from_the_prior(self):
        parts = split(random_kernels())
        settings = CrossEntropySettings(generator=generator())
        arguments = {"members": 3, "gamma": 2.0, "times": [0.0], "settings": settings}
        draws, classes = 400, 3

        outputs = torch.cat([cross_entropy_flow(*parts, LABELS, **arguments) for _ in range(draws)])

        assert outputs.shape == (draws, 3, TEST, classes)
        nngp = parts[2].nngp
        samples = draws * classes
        within = torch.einsum("dik,djk->ij", outputs[:, 0], outputs[:, 0]) / samples
        between = torch.einsum("dik,djk->ij", outputs[:, 0], outputs[:, 2]) / samples
        tolerance = 5 * nngp.same.max().item() / math.sqrt(samples)
        torch.testing.assert_close(within, nngp.same, rtol=0, atol=tolerance)
        torch.testing.assert_close(between, nngp.cross, rtol=0, atol=tolerance)

    def test_fits_the_labels_in_time(self):
        train, _, _ = split(random_kernels())
        outputs = cross_entropy_flow(
            train,
            train,
            train,
            LABELS,
            3,
            times=[0.0, 30.0, 300.0],
            settings=CrossEntropySettings(generator=generator()),
        )
        assert outputs.shape == (3, 3, TRAIN, 3)
        losses = [embens.metrics.member_nll(o, LABELS).mean().item() for o in outputs]
        assert losses[0] > losses[1] > losses[2]
        assert losses[2] < 0.05
        assert embens.metrics.ensemble_accuracy(outputs[-1], LABELS) == 1

    def test_gives_the_same_for_the_same_generator(self):
        parts = split(random_kernels())

        def run(seed):
            settings = CrossEntropySettings(generator=generator(seed))
            return cross_entropy_flow(*parts, LABELS, 2, times=[1.0], settings=settings)

        assert torch.equal(run(0), run(0))
        assert not torch.equal(run(0), run(1))

    def test_has_outputs_for_classes_without_samples(self):
        outputs = cross_entropy_flow(
            *split(random_kernels()),
            LABELS,
            2,
            times=[1.0],
            settings=CrossEntropySettings(classes=5, generator=generator()),
        )
        assert outputs.shape == (1, 2, TEST, 5)

    def test_predicts_a_wide_network_that_is_trained(self):
        """From its own outputs at initialisation; at this width the kernel is off by a few %."""
        net = embens.networks.mlp(4, 6000, 1, 3, weight_std=math.sqrt(2), generator=generator())
        law = laws.Shifted(0.6)
        ensemble = embens.embed(net.double(), 3, pre=law, post=law, generator=generator(1))
        x, x_test = randn(8, 4), randn(5, 4, seed=1)
        labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
        rate, steps = 0.1, 80
        with torch.no_grad():
            start = ensemble(x), ensemble(x_test)

        (predicted,) = cross_entropy_flow(
            kernels(ensemble, x),
            kernels(ensemble, x_test, x),
            None,
            labels,
            3,
            gamma=2.0,
            times=[rate * steps],
            settings=CrossEntropySettings(start=start),
        )

        optimizer = torch.optim.SGD(ensemble.parameter_groups(rate, weight_decay=0.0, gamma=2.0))
        for _ in range(steps):
            optimizer.zero_grad()
            embens.objective(ensemble(x), labels).backward()
            optimizer.step()
        with torch.no_grad():
            trained = ensemble(x_test)
        change = (trained - start[1]).norm()
        assert change > 1
        assert (predicted - trained).norm() < 0.08 * change

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"labels": LABELS.double()}, TypeError, "labels must be 7 class .*torch.float64"),
            ({"labels": [0]}, TypeError, "labels must be 7 class indices.*got list"),
            ({"labels": LABELS[:3]}, ValueError, r"labels must be 7 .*got shape \(3,\)"),
            ({"classes": 2}, ValueError, "from 0 to 1; got 0 to 2"),
            ({"times": [1.0, 0.5]}, ValueError, "times must be finite, >= 0 and increasing"),
            ({"times": [math.inf]}, ValueError, "has no limit at infinite time"),
            ({"times": []}, ValueError, "times must be finite"),
            ({"k_test_test": None}, ValueError, "got None for k_test_test.*start="),
            ({"members": 0}, ValueError, "members must be a positive integer, got 0"),
            ({"gamma": -1.0}, ValueError, "gamma must be a positive number"),
            (
                {"start": (torch.zeros(3, TRAIN, 3), torch.zeros(3, 1, 3))},
                ValueError,
                r"test outputs of shape \(3, 4, 3\); got \(3, 1, 3\)",
            ),
        ],
    )
    def test_raises_for_invalid_arguments(self, change, error, message):
        train_train, test_train, test_test = split(random_kernels())
        arguments = {
            "k_train_train": train_train,
            "k_test_train": test_train,
            "k_test_test": test_test,
            "labels": LABELS,
            "members": 3,
            "times": [1.0],
        }
        settings = {}
        for name, value in change.items():
            if name in ("classes", "start"):
                settings[name] = value
            else:
                arguments[name] = value

        with pytest.raises(error, match=message):
            cross_entropy_flow(**arguments, settings=CrossEntropySettings(**settings))

    def test_does_not_apply_to_conditional_kernels(self):
        k = random_kernels()[:TRAIN, :TRAIN]
        same = k.nngp.same.expand(2, TRAIN, TRAIN)
        kernel = type(k.nngp)(same, same.expand(2, 2, TRAIN, TRAIN))
        conditional = Kernels(kernel, kernel, kernel)
        with pytest.raises(ValueError, match="cross_entropy_flow does not apply"):
            cross_entropy_flow(conditional, conditional, None, LABELS, times=[1.0])


@pytest.fixture(scope="module")
def digits():
    """Return 150 training and 150 test samples, standardised, as ``(inputs, targets)`` pairs."""
    pixels, targets = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=generator())[:300]
    inputs = torch.from_numpy(pixels)[order].float()
    targets = torch.from_numpy(targets)[order].long()
    train = inputs[:150]
    inputs = (inputs - train.mean(0)) / train.std(0).clamp(min=1.0)
    return (inputs[:150], targets[:150]), (inputs[150:], targets[150:])


@pytest.fixture(scope="module")
def on_digits(digits):
    """Return a function that measures M members with modulations N(p, 1 - p²) on digits."""
    (x, y), (x_test, y_test) = digits
    net = networks.mlp(64, 8, 2, 10, weight_std=math.sqrt(2))
    blocks = {}

    def evaluate(members, p, **options):
        if p not in blocks:
            ensemble = embens.batch_ensemble(net, 2, p=p)
            blocks[p] = [
                kernels(ensemble, x),
                kernels(ensemble, x_test, x),
                kernels(ensemble, x_test),
            ]
        flow = gradient_flow(*blocks[p], centred_targets(y, 10, scale=5.0), members)
        return performance(flow, y_test, generator=generator(), **options)

    return evaluate


class TestOnDigits:
    def test_is_sensible(self, on_digits):
        computed = on_digits(4, 0.0)
        assert 0.85 < computed.accuracy < 1
        assert computed.member_accuracy <= computed.accuracy
        assert computed.nll < math.log(10) / 2
        assert 0 < computed.brier < 0.9
        assert 0 < computed.calibration_error < 1
        untrained = on_digits(4, 0.0, t=0.0)
        assert untrained.accuracy == pytest.approx(0.1, abs=0.03)

    def test_improves_with_members_where_they_are_independent(self, on_digits):
        one, two, eight = (on_digits(members, 0.0, draws=48) for members in (1, 2, 8))

        assert one.accuracy + 3 * one.error["accuracy"] < eight.accuracy
        assert one.nll > two.nll + one.error["nll"]
        assert two.nll > eight.nll
        assert one.member_accuracy == pytest.approx(eight.member_accuracy, abs=0.01)

    @pytest.mark.parametrize("name", NAMES)
    def test_does_not_depend_on_members_where_they_are_equal(self, on_digits, name):
        one = on_digits(1, 1.0, draws=48)
        eight = on_digits(8, 1.0, draws=48)

        difference = getattr(one, name) - getattr(eight, name)
        assert abs(difference) < 4 * math.sqrt(2) * one.error[name]

    def test_has_correlations_that_grow_with_p(self, on_digits):
        equal = on_digits(8, 1.0)

        assert equal.accuracy == pytest.approx(equal.member_accuracy)
        assert equal.correlation == pytest.approx(1.0, abs=1e-6)
        assert on_digits(8, 0.0).correlation < on_digits(8, 0.95).correlation < 1

    def test_gains_less_from_members_the_more_they_are_coupled(self, on_digits):
        gains = []
        for p in (0.0, 0.95, 1.0):
            computed = on_digits(8, p)
            gains.append(computed.accuracy - computed.member_accuracy)
        assert gains[0] > gains[1] > gains[2]


class TestPerformance:
    def flow(self, members=3):
        y = centred_targets(torch.arange(TRAIN) % 3, 3)
        return gradient_flow(*split(random_kernels()), y, members, gamma=2.0)

    def test_is_the_mean_of_the_metrics_over_draws(self):
        flow, labels = self.flow(), torch.arange(TEST) % 3

        computed = performance(flow, labels, t=2.0, draws=7, generator=generator())

        samples = flow.sample(2.0, 7, generator=generator())
        values = torch.stack([metrics.nll(outputs, labels) for outputs in samples])
        assert computed.nll == pytest.approx(values.mean().item())
        assert computed.error["nll"] == pytest.approx(values.std().item() / math.sqrt(7))
        assert set(computed.error) == {*NAMES, "correlation", "disagreement"}

    def test_single_member_has_no_correlation(self):
        labels = torch.arange(TEST) % 3
        computed = performance(self.flow(members=1), labels, t=2.0, generator=generator())

        assert math.isnan(computed.correlation)
        assert math.isnan(computed.disagreement)
        assert math.isnan(computed.error["correlation"])
        assert computed.error["nll"] > 0

    def test_disagreement_is_the_mean_over_draws(self):
        labels = torch.arange(TEST) % 3
        computed = performance(self.flow(), labels, t=2.0, draws=7, generator=generator())

        samples = self.flow().sample(2.0, 7, generator=generator())
        values = [float(metrics.disagreement(outputs)) for outputs in samples]
        assert computed.disagreement == pytest.approx(sum(values) / 7)

    def test_needs_an_output_for_each_class(self):
        flow = gradient_flow(*split(random_kernels()), torch.zeros(TRAIN))
        with pytest.raises(ValueError, match=r"one output for each class.*got \(7,\)"):
            performance(flow, torch.zeros(TEST).long())

    def test_needs_a_draw(self):
        with pytest.raises(ValueError, match="draws must be a positive integer, got 0"):
            performance(self.flow(), torch.zeros(TEST).long(), draws=0)

    def test_has_centred_targets_of_a_given_height(self):
        y = centred_targets(torch.tensor([0, 2]), 3, scale=6.0)
        assert y.tolist() == [[4.0, -2.0, -2.0], [-2.0, -2.0, 4.0]]


class WideNetworks:
    """Many ensembles of one hidden layer in the NTK parametrization, trained at once by hand.

    Parameters are a list of four tensors whose first axis is the ensemble: weights of the first
    and of the last layer, and the members' pre- and post-activation modulations.
    """

    def __init__(self, x, y, width):
        self.x = x.float()
        self.y = y.float()
        self.width = width

    def draw(self, count, members, generator):
        inputs, classes = self.x.shape[1], self.y.shape[1]
        return [
            torch.randn(count, self.width, inputs, generator=generator),
            torch.randn(count, classes, self.width, generator=generator),
            torch.randn(count, members, self.width, generator=generator).sign(),
            torch.randn(count, members, self.width, generator=generator).sign(),
        ]

    def outputs(self, parameters, x):
        """Return outputs ``(ensemble, member, sample, class)``."""
        first, last, pre, post = parameters
        z = torch.einsum("snd,xd->snx", first, x) * math.sqrt(2 / x.shape[1])
        hidden = torch.relu(z[:, None] * pre[..., None]) * post[..., None]
        return torch.einsum("scn,smnx->smxc", last, hidden) * math.sqrt(2 / self.width)

    def velocities(self, parameters):
        """Return the gradient flow's velocities; with gamma = M, all rates are 1."""
        parameters = [parameter.detach().requires_grad_() for parameter in parameters]
        errors = self.outputs(parameters, self.x) - self.y
        loss = errors.square().sum() / 2 / len(self.x)
        return [-gradient for gradient in torch.autograd.grad(loss, parameters)]

    def step(self, parameters, size):
        """Return the parameters after a step of Heun's method."""
        velocities = self.velocities(parameters)
        ahead = []
        for parameter, velocity in zip(parameters, velocities, strict=True):
            ahead.append(parameter + size * velocity)
        moved = []
        velocities_ahead = self.velocities(ahead)
        for parameter, first, second in zip(parameters, velocities, velocities_ahead, strict=True):
            moved.append(parameter + size / 2 * (first + second))
        return moved


@pytest.mark.long
def test_trained_networks_perform_as_the_limit_with_an_error_of_one_over_the_width():
    """Squared loss, NTK parametrization, signs.

    With targets four times as large, networks of width 64 are still far from the limit.
    """
    members, train, classes, time, steps, draws = 2, 8, 3, 2.0, 16, 3000
    source = generator()
    x = torch.randn(32, 4, generator=source, dtype=torch.float64)
    x = torch.nn.functional.normalize(x, dim=1)
    labels = (x @ torch.randn(4, classes, generator=source, dtype=torch.float64)).argmax(1)
    x_train, x_test = x[:train], x[train:]
    y = centred_targets(labels[:train], classes)
    signs = laws.Signs(0.0)
    net = networks.mlp(4, 8, 1, classes, weight_std=math.sqrt(2))
    ensemble = embens.embed(net, members, pre=signs, post=signs)
    flow = gradient_flow(
        kernels(ensemble, x_train),
        kernels(ensemble, x_test, x_train),
        kernels(ensemble, x_test),
        y,
        members,
        gamma=members,
    )
    limit = performance(flow, labels[train:], t=time, draws=3000, generator=generator())

    def excess_nll(width: int) -> float:
        wide = WideNetworks(x_train, y, width)
        parameters = wide.draw(draws, members, generator(width))
        for _ in range(steps):
            parameters = wide.step(parameters, time / steps)
        probabilities = wide.outputs(parameters, x_test.float()).softmax(-1).mean(1)
        labels_of_draws = labels[train:].expand(draws, -1)[..., None]
        nll = -probabilities.gather(-1, labels_of_draws).log().mean()
        return nll.item() - limit.nll

    narrow, medium, wide = excess_nll(16), excess_nll(32), excess_nll(64)
    exponent = math.log(wide / narrow) / math.log(64 / 16)
    assert exponent == pytest.approx(-1, abs=0.4)  # standard errors are about 0.002 to 0.003
    assert narrow > medium > wide > 0
