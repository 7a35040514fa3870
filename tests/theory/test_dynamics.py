"""Training in the limit: closed form against the matrix of all members, and wide networks."""

import itertools
import math
from functools import partial

import pytest
import torch
from theory.hand_made import TEST, TRAIN, Dense, close, gram, random_kernels, split, targets

import embens
from embens import laws, networks
from embens.theory import FlowSettings, GradientFlow, gradient_descent, gradient_flow
from embens.theory.blocks import kernels
from embens.theory.kernel import Kernels, MemberKernel, natural_gamma

INF = math.inf


def zeros_like(kernel: MemberKernel) -> MemberKernel:
    return MemberKernel(torch.zeros_like(kernel.same), torch.zeros_like(kernel.same))


def check_table(flow: GradientFlow, t, dense: Dense, response):
    """Compare every quantity with the dense solution's."""
    members = flow.members
    means = dense.mean(response, flow.targets)
    covariances = dense.covariance(response)
    ensemble_covariance = covariances.mean((0, 1))
    covariance_within = torch.stack([covariances[a, a] for a in range(members)]).mean(0)

    for a in range(members):
        close(flow.mean(t), means[a])
    close(flow.covariance(t).dense(members), covariances)
    close(flow.variance(t), covariances[0, 0].diagonal())
    close(flow.ensemble_variance(t), ensemble_covariance.diagonal())
    close(flow.diversity(t), (covariance_within - ensemble_covariance).diagonal())


class TestModes:
    @pytest.mark.parametrize("members", [1, 2, 5])
    @pytest.mark.parametrize("t", [0.0, 0.3, 4.0, 60.0])
    @pytest.mark.parametrize("shape", [(TRAIN,), (TRAIN, 3), (TRAIN, 2, 2)])
    def test_give_what_the_matrix_exponential_of_all_members_gives(self, members, t, shape):
        rates = {"shared_rate": 0.7, "individual_rate": 1.9}
        parts = split(random_kernels())
        flow = gradient_flow(
            *parts, targets(*shape), members, gamma=1.7, settings=FlowSettings(**rates)
        )
        dense = Dense(parts, members, 1.7, **rates)

        check_table(flow, t, dense, dense.response(t))
        assert flow.mean(t).shape == (TEST, *shape[1:])

    @pytest.mark.parametrize("members", [2, 5])
    def test_give_the_inverse_at_infinite_time(self, members):
        parts = split(random_kernels(1))
        flow = gradient_flow(*parts, targets(TRAIN, 2), members, gamma=3.0)
        dense = Dense(parts, members, 3.0)
        check_table(flow, INF, dense, dense.response_at_infinity())
        check_table(flow, 1e9, dense, dense.response_at_infinity())

    def test_cost_the_same_for_any_number_of_members(self):
        parts = split(random_kernels())
        flow = gradient_flow(*parts, targets(TRAIN), members=10**9, gamma=2.0)
        assert flow.diversity(1.0).isfinite().all()
        for mode in flow.modes:
            tensors = [value for value in vars(mode).values() if isinstance(value, torch.Tensor)]
            assert tensors
            for tensor in tensors:
                assert tensor.numel() <= 200

    def test_evolve_given_outputs_as_the_matrix_for_all_members_does(self):
        parts, members = split(random_kernels(2)), 3
        y = targets(TRAIN, 2)
        train, test = targets(members, TRAIN, 2, seed=6), targets(members, TEST, 2, seed=7)
        flow = gradient_flow(*parts[:2], None, y, members, gamma=2.0)
        response = Dense(parts, members, 2.0).response(1.5)
        expected = test - (response @ (train - y).reshape(-1, 2)).reshape(members, TEST, 2)
        close(flow.evolve(1.5, train, test), expected)
        several = flow.evolve(torch.tensor([0.0, 1.5]), train, test)
        close(several, torch.stack([test, expected]))


class TestRegimes:
    def test_without_coupling_is_an_independent_ensemble(self):
        kernels = random_kernels(coupling=0.0)
        parts = split(kernels)
        y, members = targets(TRAIN), 6
        flow = gradient_flow(*parts, y, members, gamma=float(members))
        alone = gradient_flow(*parts, y, members=1, gamma=1.0)
        for t in (0.0, 2.0, INF):
            close(flow.mean(t), alone.mean(t))
            close(flow.variance(t), alone.variance(t))
            close(flow.ensemble_variance(t), alone.variance(t) / members)
            close(flow.covariance(t).cross, torch.zeros(TEST, TEST, dtype=torch.float64))

    def test_equal_members_are_one_network(self):
        kernel = MemberKernel(*[gram(torch.Generator().manual_seed(0), TRAIN + TEST)] * 2)
        parts = split(Kernels(kernel, kernel, zeros_like(kernel)))
        flow = gradient_flow(*parts, targets(TRAIN), members=9)
        alone = gradient_flow(*parts, targets(TRAIN), members=1)
        assert flow.gamma == 1
        assert flow.rank == (TRAIN, 0)
        for t in (0.5, INF):
            close(flow.mean(t), alone.mean(t))
            close(flow.variance(t), alone.variance(t))
            assert not flow.diversity(t).any()

    def test_at_gamma_1_frozen_modulations_keep_their_diversity_as_members_grow(self):
        """Deviations then relax M times slower, while the mean does not."""
        train, _, _ = split(random_kernels(individual=0.0))
        y = targets(TRAIN)

        def flow(members):
            return gradient_flow(train, train, train, y, members, gamma=1.0)

        def relative_residual(members):
            return (flow(members).mean(20.0) - y).norm() / y.norm()

        initial = (train.nngp.same - train.nngp.cross).diagonal()
        diversity_of_two = 2 * flow(2).diversity(20.0)
        assert diversity_of_two.sum() < 0.5 * initial.sum()
        close(diversity_of_two, 20 / 19 * flow(20).diversity(200.0))
        close(flow(10**5).diversity(20.0), initial, rtol=1e-3, atol=0.0)
        assert relative_residual(10**5) < 0.4
        close(relative_residual(10**5), relative_residual(10**7), rtol=1e-4, atol=0.0)

    def test_natural_gamma_is_the_default_and_makes_the_stable_rate_that_of_a_network_alone(self):
        parts = split(random_kernels())

        flow = gradient_flow(*parts, targets(TRAIN), members=5)
        alone = gradient_flow(*parts, targets(TRAIN), members=1, gamma=1.0)

        assert flow.gamma == natural_gamma(parts[0], 5)
        assert flow.largest_stable_rate.mean == pytest.approx(alone.largest_stable_rate.mean)
        assert alone.largest_stable_rate.deviation == INF  # one member has none

    def test_natural_gamma_depends_on_the_individual_rate(self):
        parts = split(random_kernels())
        settings = FlowSettings(individual_rate=3.0)

        flow = gradient_flow(*parts, targets(TRAIN), members=5, settings=settings)

        assert flow.gamma == natural_gamma(parts[0], 5, individual_rate=3.0)
        assert flow.gamma != natural_gamma(parts[0], 5)


class TestRepellingMembers:
    def parts(self, r: float) -> tuple[Kernels, Kernels, Kernels]:
        """Return kernels whose values between members are r times those within."""
        kernels = random_kernels(coupling=0.0, individual=0.0)
        nngp = MemberKernel(kernels.nngp.same, r * kernels.nngp.same)
        ntk_shared = MemberKernel(kernels.ntk_shared.same, r * kernels.ntk_shared.same)
        return split(Kernels(nngp, ntk_shared, kernels.ntk_individual))

    @pytest.mark.parametrize("t", [0.0, 0.5, 8.0])
    def test_train_as_the_matrix_of_all_members_says(self, t):
        parts = self.parts(-0.2)
        flow = gradient_flow(*parts, targets(TRAIN), 4, gamma=1.7)
        dense = Dense(parts, 4, 1.7)
        check_table(flow, t, dense, dense.response(t))

    def test_have_deviations_that_are_faster_than_the_mean(self):
        flow = gradient_flow(*self.parts(-0.2), targets(TRAIN), 4)
        assert flow.largest_stable_rate.deviation < flow.largest_stable_rate.mean
        alone = gradient_flow(*self.parts(0.0), targets(TRAIN), 1).largest_stable_rate.mean
        assert min(flow.largest_stable_rate) == pytest.approx(alone, rel=1e-9)

    @pytest.mark.parametrize("solve", [gradient_flow, partial(gradient_descent, rate=0.1)])
    def test_at_the_bound_have_a_mean_that_never_learns_and_say_so(self, solve):
        with pytest.warns(UserWarning, match=r"the ensemble mean cannot learn.*rho above"):
            flow = solve(*self.parts(-1 / 3), targets(TRAIN), 4)
        assert flow.largest_stable_rate.mean > 1e9
        assert flow.mean(50.0).abs().max() < 1e-9
        assert flow.ensemble_variance(50.0).abs().max() < 1e-9


class TestDescent:
    @pytest.mark.parametrize(
        ("steps", "part"),
        # Beyond the largest rate, rounding errors grow with the steps.
        [*itertools.product([0, 1, 2, 25], [0.05, 0.5, 0.9]), (0, 1.2), (1, 1.2), (2, 1.2)],
    )
    @pytest.mark.filterwarnings("ignore:rate")
    def test_gives_what_iterating_steps_gives(self, steps, part):
        parts, members = split(random_kernels()), 3
        y = targets(TRAIN, 2)
        rate = part * gradient_flow(*parts, y, members, gamma=2.0).largest_stable_rate.mean

        descent = gradient_descent(*parts, y, members, gamma=2.0, rate=rate)

        dense = Dense(parts, members, 2.0)
        check_table(descent, steps, dense, dense.response_after(steps, rate))

    def test_at_a_small_rate_is_the_flow(self):
        parts = split(random_kernels())
        flow = gradient_flow(*parts, targets(TRAIN), 3, gamma=2.0)
        errors = []
        for rate in (1e-2, 1e-3):
            descent = gradient_descent(*parts, targets(TRAIN), 3, gamma=2.0, rate=rate)
            errors.append((descent.mean(round(2 / rate)) - flow.mean(2.0)).abs().max().item())

        assert errors[1] < 1e-3
        assert errors[0] / errors[1] == pytest.approx(10, rel=0.1)  # first order in the rate

    def setup_method(self):
        train, _, _ = split(random_kernels())
        self.parts = train, train, train
        self.y = targets(TRAIN)
        self.stable = gradient_flow(*self.parts, self.y, 3, gamma=2.0).largest_stable_rate

    def descend(self, rate):
        return gradient_descent(*self.parts, self.y, 3, gamma=2.0, rate=rate)

    def test_is_stable_just_below_the_largest_rate(self):
        below = self.descend(0.999 * self.stable.mean)

        close(below.mean(30_000), self.y)
        close(below.mean(INF), self.y)

    def test_diverges_in_the_mean_just_above_its_largest_rate(self):
        assert self.stable.mean < self.stable.deviation
        with pytest.warns(UserWarning, match=r"rate .* too large: .* diverges from"):
            above = self.descend(1.001 * self.stable.mean)

        assert above.mean(20_000).abs().max() > 1e3
        assert above.diversity(20_000).max() < 1e-6  # deviations are stable up to their own rate
        with pytest.raises(ValueError, match="the mean mode has eigenvalues"):
            above.mean(INF)

    def test_diverges_in_the_deviations_just_above_theirs(self):
        with pytest.warns(UserWarning, match="too large"):
            above = self.descend(1.001 * self.stable.deviation)

        assert above.diversity(20_000).max() > 1e3

    def test_counts_whole_steps(self):
        descent = gradient_descent(*split(random_kernels()), targets(TRAIN), rate=1e-3)
        with pytest.raises(
            ValueError, match=r"steps must be a non-negative int.*use gradient_flow"
        ):
            descent.mean(0.5)

    def test_needs_a_positive_rate(self):
        with pytest.raises(ValueError, match="rate must be a number >= 0, got -1"):
            gradient_descent(*split(random_kernels()), targets(TRAIN), rate=-1.0)


def half_squares(outputs, target):
    return (outputs - target).square().mean() / 2


def wide_ensemble(width, law, seed, *, depth=1, activation="relu", trainable=True):
    generator = torch.Generator().manual_seed(seed)
    net = networks.mlp(
        3, width, depth, 1, activation=activation, weight_std=math.sqrt(2), generator=generator
    )
    return embens.embed(
        net.double(), 3, pre=law, post=law, trainable=trainable, generator=generator
    )


class TestTrainedEnsembles:
    """Real wide ensembles, trained by full-batch gradient descent."""

    x, x_test, y = targets(8, 3), targets(5, 3, seed=1), targets(8, 1, seed=2)

    def error(self, ensemble, descent, steps, individual_rate):
        """Return how far a trained ensemble is from its prediction, by how far it moved."""
        rate = descent.rate
        with torch.no_grad():
            start = ensemble(self.x), ensemble(self.x_test)
        groups = ensemble.parameter_groups(rate, rate * individual_rate, 0.0, gamma=descent.gamma)
        optimizer = torch.optim.SGD(groups)
        for _ in range(steps):
            optimizer.zero_grad()
            outputs = ensemble(self.x)
            embens.objective(outputs, self.y, half_squares).backward()
            optimizer.step()
        with torch.no_grad():
            trained = ensemble(self.x_test)
        predicted = descent.evolve(steps, *start)
        return (trained - predicted).norm() / (trained - start[1]).norm()

    def mean_error(self, width, law, descent, individual_rate, **options):
        errors = []
        for seed in range(2):
            ensemble = wide_ensemble(width, law, seed, **options)
            errors.append(self.error(ensemble, descent, 60, individual_rate))
        return torch.stack(errors).mean()

    @pytest.mark.parametrize(
        ("law", "gamma", "individual_rate", "options"),
        [
            (laws.Normal(), 3.0, 1.0, {}),
            (laws.Shifted(0.7), 2.0, 2.0, {}),
            pytest.param(
                *(laws.Shifted(0.7), 1.0, 1.0, {"trainable": False, "activation": "erf"}),
                marks=pytest.mark.long,
            ),
        ],
    )
    def test_are_predicted_from_their_initial_outputs_better_with_the_width(
        self, law, gamma, individual_rate, options
    ):
        """The kernel of width N is off by O(1/√N): 16 times the width, a fourth of the error."""
        ensemble = wide_ensemble(8, law, 0, **options)  # of any width
        parts = kernels(ensemble, self.x), kernels(ensemble, self.x_test, self.x), None
        settings = FlowSettings(individual_rate=individual_rate)
        flow = gradient_flow(*parts, self.y, 3, gamma, settings=settings)
        rate = 0.4 * flow.largest_stable_rate.mean
        descent = gradient_descent(*parts, self.y, 3, gamma, rate=rate, settings=settings)

        narrow = self.mean_error(512, law, descent, individual_rate, **options)
        wide = self.mean_error(8192, law, descent, individual_rate, **options)

        assert wide < 0.06
        assert wide < 0.5 * narrow

    @pytest.mark.long
    def test_have_the_moments_of_the_table_over_initialisations(self):
        """Many networks at once, written by hand; tolerances: 4.5 standard errors and 1/width."""
        seeds, members, width, law, gamma = 240, 3, 512, laws.Shifted(0.7), 2.0
        ensemble = wide_ensemble(8, law, 0, activation="erf")
        x, x_test, y = targets(4, 3), targets(3, 3, seed=1), targets(4, seed=2)
        k = kernels(ensemble, x), kernels(ensemble, x_test, x), kernels(ensemble, x_test)
        flow = gradient_flow(*k, y, members, gamma)
        rate, steps = 0.4 * flow.largest_stable_rate.mean, 25
        descent = gradient_descent(*k, y, members, gamma, rate=rate)
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(seeds, *shape, generator=generator, dtype=torch.float64)

        def draw_modulations():
            return law.mean + law.std * draw(members, 1, width)

        first, readout = draw(3, width), draw(width)
        post, pre = draw_modulations(), draw_modulations()
        parameters = [first, readout, post, pre]
        rates = [rate * gamma / members, rate * gamma / members, rate, rate]
        for parameter in parameters:
            parameter.requires_grad_()

        def outputs(inputs):
            z = math.sqrt(2 / 3) * inputs @ first
            hidden = post * torch.erf(pre * z[:, None])
            return math.sqrt(2 / width) * torch.einsum("smni,si->smn", hidden, readout)

        for _ in range(steps):
            loss = (outputs(x) - y).square().mean(-1).sum() / 2
            gradients = torch.autograd.grad(loss, parameters)
            for parameter, gradient, step in zip(parameters, gradients, rates, strict=True):
                parameter.data -= step * gradient
        with torch.no_grad():
            computed = outputs(x_test)  # (seed, member, test)

        def check(samples, expected):
            error = 4.5 * samples.std(0) / math.sqrt(seeds) + 0.02 * expected.abs()
            assert ((samples.mean(0) - expected).abs() < error).all()

        mean, covariance = descent.mean(steps), descent.covariance(steps)
        assert (descent.variance(steps) < 0.7 * descent.variance(0)).any()  # training shows
        check(computed.mean(1), mean)
        centred = computed - mean
        check(centred.square().mean(1), descent.variance(steps))
        ensemble_mean = centred.mean(1)
        check(ensemble_mean.square(), descent.ensemble_variance(steps))
        check(computed.var(1, correction=0), descent.diversity(steps))
        pairs = (centred.sum(1).square() - centred.square().sum(1)) / (members * (members - 1))
        check(pairs, covariance.cross.diagonal())
        check(centred[:, 0, 0] * centred[:, 0, 1], covariance.same[0, 1])

    def test_diverge_from_the_rate_that_the_theory_says(self):
        """At first: a finite width comes back later, from where its kernel has become smaller."""
        x, y = targets(6, 3), targets(6, 1, seed=2)
        k = kernels(wide_ensemble(8, laws.Shifted(0.7), 0), x)
        largest = gradient_flow(k, k, None, y, 3, 2.0).largest_stable_rate.mean
        losses = {0.8: [], 1.3: []}
        for part, computed in losses.items():
            ensemble = wide_ensemble(4096, laws.Shifted(0.7), 0)
            groups = ensemble.parameter_groups(part * largest, weight_decay=0.0, gamma=2.0)
            optimizer = torch.optim.SGD(groups)
            for _ in range(4):
                optimizer.zero_grad()
                loss = embens.objective(ensemble(x), y, half_squares)
                computed.append(loss.item())
                loss.backward()
                optimizer.step()

        assert losses[0.8] == sorted(losses[0.8], reverse=True)
        assert losses[1.3] == sorted(losses[1.3])
        assert losses[1.3][-1] > 3 * losses[1.3][0]


class TestPosterior:
    """Of a prior with noise, against the dense formula and against gradient flow with a ridge."""

    noise = 0.7

    def problem(self):
        net = networks.mlp(3, 8, 2, 1, bias_std=0.4, activation="erf")
        x = targets(9, 3)
        train, test = x[:5], x[5:]
        pairs = (train, train), (test, train), (test, test)
        parts = []
        for pair in pairs:
            tangents = kernels(net, *pair).ntk_shared.same
            zero = torch.zeros_like(tangents)
            # Separate members whose prior covariance is their tangent kernel.
            alone, nothing = MemberKernel(tangents, zero), MemberKernel(zero, zero)
            parts.append(Kernels(alone, nothing, alone))
        return parts, targets(5, 2)

    def test_it_is_the_dense_formula(self):
        (train, test_train, test), y = self.problem()
        inverse = torch.linalg.inv(train.nngp.same + self.noise**2 * torch.eye(5).double())
        mean, covariance = embens.theory.posterior(train, test_train, test, y, self.noise)
        close(mean, test_train.nngp.same @ inverse @ y)
        close(covariance, test.nngp.same - test_train.nngp.same @ inverse @ test_train.nngp.same.mT)

    def test_flow_with_a_ridge_and_noisy_targets_ends_there(self):
        (train, test_train, test), y = self.problem()
        mean, covariance = embens.theory.posterior(train, test_train, test, y, self.noise)
        settings = FlowSettings(jitter=self.noise**2)
        flow = gradient_flow(train, test_train, test, y, members=3, settings=settings)
        close(flow.mean(INF), mean)
        inverse = torch.linalg.inv(train.nngp.same + self.noise**2 * torch.eye(5).double())
        weights = test_train.nngp.same @ inverse
        of_noise = self.noise**2 * weights @ weights.mT
        close(flow.covariance(INF).same + of_noise, covariance)

    def test_invalid_arguments_raise(self):
        parts, y = self.problem()
        with pytest.raises(ValueError, match="noise must be a number > 0"):
            embens.theory.posterior(*parts, y, 0.0)
        with pytest.raises(ValueError, match="a row for each of the 5"):
            embens.theory.posterior(*parts, y[:4], 1.0)
