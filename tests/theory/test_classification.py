"""Classification in the limit: cross-entropy training, and performance on digits."""

import math

import pytest
import torch
from sklearn.datasets import load_digits
from theory.hand_made import TEST, TRAIN, flatten, random_kernels, split
from torch.nn.functional import cross_entropy, one_hot

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
        y = randn(TRAIN, 2)
        start = randn(members, TRAIN, 2, seed=1), randn(members, TEST, 2, seed=2)
        ntks = [k.ntk(members, 2.0) for k in parts[:2]]
        times = [0.0, 0.5, 7.0, 40.0]
        outputs = integrate(*ntks, lambda f: f - y, start, times, accuracy=1e-10)
        flow = gradient_flow(*parts[:2], None, y, members, gamma=2.0)
        torch.testing.assert_close(
            outputs, flow.evolve(torch.tensor(times), *start), rtol=1e-8, atol=1e-8
        )

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
        parts, members, rate, steps = split(random_kernels()), 2, 1e-3, 3000
        start = randn(members, TRAIN, 3, seed=1), randn(members, TEST, 3, seed=2)
        flow = cross_entropy_flow(
            *parts[:2],
            None,
            LABELS,
            members,
            gamma=1.5,
            times=[steps * rate],
            settings=CrossEntropySettings(start=start),
        )
        dense = [flatten(k.ntk(members, 1.5).dense(members)) for k in parts[:2]]
        train, test = (s.reshape(-1, 3) for s in start)
        truth = one_hot(LABELS, 3).double().repeat(members, 1)
        for _ in range(steps):
            residual = train.softmax(-1) - truth
            train, test = (
                f - rate / TRAIN * k @ residual for f, k in zip((train, test), dense, strict=True)
            )
        moved = (flow[0] - start[1]).abs().max()
        assert moved > 0.1
        error = (flow[0].reshape(-1, 3) - test).abs().max()
        assert error < 1e-3 * moved

    def test_starts_from_the_prior(self):
        parts = split(random_kernels())
        settings = CrossEntropySettings(generator=generator())
        arguments = {"members": 3, "gamma": 2.0, "times": [0.0], "settings": settings}
        outputs = torch.cat([cross_entropy_flow(*parts, LABELS, **arguments) for _ in range(400)])
        assert outputs.shape == (400, 3, TEST, 3)
        error = 5 * parts[2].nngp.same.max().item() / math.sqrt(400 * 3)
        for a, b, expected in ((0, 0, "same"), (0, 2, "cross")):
            measured = torch.einsum("dik,djk->ij", outputs[:, a], outputs[:, b]) / (400 * 3)
            torch.testing.assert_close(
                measured, getattr(parts[2].nngp, expected), rtol=0, atol=error
            )

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
        arguments = {"members": 2, "times": [1.0]}
        one = cross_entropy_flow(
            *parts, LABELS, settings=CrossEntropySettings(generator=generator()), **arguments
        )
        two = cross_entropy_flow(
            *parts, LABELS, settings=CrossEntropySettings(generator=generator()), **arguments
        )
        assert torch.equal(one, two)

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
        k = [kernels(ensemble, *pair) for pair in ((x,), (x_test, x))]
        with torch.no_grad():
            start = ensemble(x), ensemble(x_test)
        rate, steps = 0.1, 80
        groups = ensemble.parameter_groups(rate, weight_decay=0.0, gamma=2.0)
        optimizer = torch.optim.SGD(groups)
        for _ in range(steps):
            optimizer.zero_grad()
            embens.objective(ensemble(x), labels).backward()
            optimizer.step()
        with torch.no_grad():
            trained = ensemble(x_test)
        flow = cross_entropy_flow(
            *k,
            None,
            labels,
            3,
            gamma=2.0,
            times=[rate * steps],
            settings=CrossEntropySettings(start=start),
        )
        moved = (trained - start[1]).norm()
        assert cross_entropy(trained.mean(0), torch.zeros(5).long()).isfinite()
        assert (flow[0] - trained).norm() < 0.08 * moved

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
    def test_says_what_it_expects(self, change, error, message):
        change = dict(change)
        given = dict(zip(("k_train_train", "k_test_train", "k_test_test"), split(random_kernels()),
                         strict=True))  # fmt: skip
        given |= {"labels": LABELS, "members": 3, "times": [1.0]}
        settings = {k: change.pop(k) for k in ("classes", "start") if k in change}
        given |= {"settings": CrossEntropySettings(**settings), **change}
        with pytest.raises(error, match=message):
            cross_entropy_flow(**given)

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
            blocks[p] = [kernels(ensemble, *pair) for pair in ((x,), (x_test, x), (x_test,))]
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
        computed = [on_digits(m, 0.0, draws=48) for m in (1, 2, 8)]
        error = [max(f.error["accuracy"], f.error["nll"]) for f in computed]
        assert computed[0].accuracy + 3 * error[0] < computed[2].accuracy
        assert computed[0].nll > computed[1].nll + error[0] > computed[2].nll
        assert computed[0].member_accuracy == pytest.approx(computed[2].member_accuracy, abs=0.01)

    def test_does_not_depend_on_members_where_they_are_equal(self, on_digits):
        for name in NAMES:
            one, many = (getattr(on_digits(m, 1.0, draws=48), name) for m in (1, 8))
            error = on_digits(1, 1.0, draws=48).error[name]
            assert abs(one - many) < 4 * math.sqrt(2) * error
        assert on_digits(8, 1.0).accuracy == pytest.approx(on_digits(8, 1.0).member_accuracy)
        assert on_digits(8, 1.0).correlation == pytest.approx(1.0, abs=1e-6)
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
        drawn = flow.sample(2.0, 7, generator=generator())
        values = torch.stack([metrics.nll(o, labels) for o in drawn])
        assert computed.nll == pytest.approx(values.mean().item())
        assert computed.error["nll"] == pytest.approx(values.std().item() / math.sqrt(7))
        assert set(computed.error) == {*NAMES, "correlation", "disagreement"}

    @pytest.mark.filterwarnings("error")
    def test_members_alone_have_no_correlation(self):
        labels = torch.arange(TEST) % 3
        alone = performance(self.flow(members=1), labels, t=2.0, generator=generator())
        assert math.isnan(alone.correlation)
        assert math.isnan(alone.disagreement)
        assert math.isnan(alone.error["correlation"])
        assert alone.error["nll"] > 0
        several = performance(self.flow(), labels, t=2.0, draws=7, generator=generator())
        drawn = self.flow().sample(2.0, 7, generator=generator())
        values = [float(metrics.disagreement(outputs)) for outputs in drawn]
        assert several.disagreement == pytest.approx(sum(values) / 7)

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


@pytest.mark.long
def test_trained_networks_perform_as_the_limit_says_with_an_error_of_one_over_the_width():
    """Squared loss, NTK parametrization, signs: networks by hand, thousands at a time.

    With targets four times as large, networks of width 64 are still far from the limit.
    """
    members, train, classes, time, steps, draws = 2, 8, 3, 2.0, 16, 3000
    source = generator()
    x = torch.randn(32, 4, generator=source, dtype=torch.float64)
    x = torch.nn.functional.normalize(x, dim=1)
    labels = (x @ torch.randn(4, classes, generator=source, dtype=torch.float64)).argmax(1)
    y = centred_targets(labels[:train], classes)
    signs = laws.Signs(0.0)
    net = networks.mlp(4, 8, 1, classes, weight_std=math.sqrt(2))
    ensemble = embens.embed(net, members, pre=signs, post=signs)
    pairs = ((x[:train],), (x[train:], x[:train]), (x[train:],))
    flow = gradient_flow(*(kernels(ensemble, *pair) for pair in pairs), y, members, gamma=members)
    limit = performance(flow, labels[train:], t=time, draws=3000, generator=generator())

    def outputs(numbers: list[torch.Tensor], width: int, rows: slice) -> torch.Tensor:
        first, last, pre, post = numbers
        z = torch.einsum("snd,xd->snx", first, x[rows].float()) * math.sqrt(2 / 4)
        hidden = torch.relu(z[:, None] * pre[..., None]) * post[..., None]
        return torch.einsum("scn,smnx->smxc", last, hidden) * math.sqrt(2 / width)

    def slopes(numbers: list[torch.Tensor], width: int) -> list[torch.Tensor]:
        numbers = [n.detach().requires_grad_() for n in numbers]
        errors = outputs(numbers, width, slice(train)) - y.float()
        return list(torch.autograd.grad(-errors.square().sum() / 2 / train, numbers))

    def excess(width: int) -> float:
        source, step = generator(width), time / steps
        shapes = ((width, 4), (classes, width), (members, width), (members, width))
        drawn = [torch.randn(draws, *shape, generator=source) for shape in shapes]
        numbers = [*drawn[:2], *(n.sign() for n in drawn[2:])]
        for _ in range(steps):  # Heun's method for the flow; gamma = M: all rates are 1
            first = slopes(numbers, width)
            ahead = [n + step * s for n, s in zip(numbers, first, strict=True)]
            both = zip(numbers, first, slopes(ahead, width), strict=True)
            numbers = [n + step / 2 * (s + t) for n, s, t in both]
        mean = outputs(numbers, width, slice(train, None)).softmax(-1).mean(1)
        chosen = mean.gather(-1, labels[train:].expand(draws, -1)[..., None])
        return -chosen.log().mean().item() - limit.nll

    widths = (16, 32, 64)
    computed = [excess(width) for width in widths]
    slope = math.log(computed[2] / computed[0]) / math.log(widths[2] / widths[0])
    assert slope == pytest.approx(-1, abs=0.4)  # errors of found are about 0.002 to 0.003
    assert computed[0] > computed[1] > computed[2] > 0
