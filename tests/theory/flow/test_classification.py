"""Cross-entropy training in the limit."""

import math

import pytest
import torch
from theory.hand_made import TEST, TRAIN, flatten, random_kernels, split
from torch.nn.functional import cross_entropy, one_hot

import embens
from embens import laws
from embens.theory.blocks import kernels
from embens.theory.flow import gradient_flow
from embens.theory.flow.classification import (
    CrossEntropySettings,
    apply,
    cross_entropy_flow,
    integrate,
)
from embens.theory.kernel import Kernels

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
        outputs = integrate(*ntks, lambda f: f - y, start, times, rtol=1e-10, atol=1e-12)
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
        with pytest.raises(RuntimeError, match=r"the solver did not come to time 5.*earlier times"):
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
        outputs = cross_entropy_flow(
            *parts,
            LABELS,
            members=3,
            times=[0.0],
            settings=CrossEntropySettings(draws=400, generator=generator()),
        )[:, 0]
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

    def test_gives_the_same_for_the_same_generator_and_keeps_draws_apart(self):
        parts = split(random_kernels())
        arguments = {"members": 2, "times": [1.0]}
        one = cross_entropy_flow(
            *parts, LABELS, settings=CrossEntropySettings(generator=generator()), **arguments
        )
        two = cross_entropy_flow(
            *parts, LABELS, settings=CrossEntropySettings(generator=generator()), **arguments
        )
        assert torch.equal(one, two)
        several = cross_entropy_flow(
            *parts,
            LABELS,
            settings=CrossEntropySettings(draws=2, generator=generator()),
            **arguments,
        )
        assert several.shape == (2, 1, 2, TEST, 3)
        assert not torch.equal(several[0], several[1])

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
            ({"times": [1.0, 0.5]}, ValueError, "times must be finite, >= 0 and in rising order"),
            ({"times": [math.inf]}, ValueError, "has no limit at infinite time"),
            ({"times": []}, ValueError, "times must be finite"),
            ({"k_test_test": None}, ValueError, "got None for k_test_test.*start="),
            ({"members": 0}, ValueError, "members must be at least 1"),
            ({"gamma": -1.0}, ValueError, "gamma must be a positive number"),
            (
                {"start": (torch.zeros(3, TRAIN, 3), torch.zeros(3, 1, 3))},
                ValueError,
                r"test outputs of shape \(3, 4, 3\); got \(3, 1, 3\)",
            ),
            (
                {"start": (torch.zeros(3, TRAIN, 3), torch.zeros(3, TEST, 3)), "draws": 2},
                ValueError,
                "start and draws exclude each other",
            ),
        ],
    )
    def test_says_what_it_expects(self, change, error, message):
        change = dict(change)
        given = dict(zip(("k_train_train", "k_test_train", "k_test_test"), split(random_kernels()),
                         strict=True))  # fmt: skip
        given |= {"labels": LABELS, "members": 3, "times": [1.0]}
        settings = {k: change.pop(k) for k in ("classes", "start", "draws") if k in change}
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
