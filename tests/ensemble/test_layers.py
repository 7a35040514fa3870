"""Layers that stand in for those of the reference."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from embens.ensemble.layers import Once
from embens.ensemble.plan import SharedModule
from torch import nn

import embens


class Optional(nn.Module):
    """Code that asks whether it has a module, as much code does."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.extra, self.none = nn.Tanh(), nn.Sequential()

    def forward(self, x):
        if self.extra:
            x = self.extra(x)
        if self.none:
            raise AssertionError
        return self.last(self.first(x))


def test_what_is_computed_once_is_as_true_as_the_module_itself():
    ensemble = embens.last_layer_dropout(Optional(), 3)
    assert ensemble(torch.zeros(2, 4)).shape == (3, 2, 3)
    for inner in (nn.Linear(2, 2), nn.Sequential(), nn.Sequential(nn.ReLU())):
        assert bool(Once(inner, SharedModule("inner"))) == bool(inner)


class TestStochastic:
    """Rank-1 networks: numbers that every pass draws around trainable means."""

    @staticmethod
    def make(members=3, **options):
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        return embens.rank1(net.double(), members, **options)

    def test_every_pass_draws_also_in_evaluation_and_once_for_all_chunks(self):
        ensemble, x = self.make(), torch.randn(5, 4).double()
        assert not torch.equal(ensemble(x), ensemble(x))
        assert not torch.equal(ensemble.eval()(x), ensemble(x))
        results = []
        for chunk in (1, 2, None):
            torch.manual_seed(3)
            results.append(ensemble(x, chunk=chunk))
        torch.testing.assert_close(results[0], results[1])
        torch.testing.assert_close(results[0], results[2])
        assert not torch.equal(results[0][0], results[0][1])
        for batch, inputs in (("own", torch.stack([x] * 3)), ("split", x)):
            torch.manual_seed(3)
            outputs = ensemble(inputs, batch=batch)
            expected = results[0]
            if batch == "split":
                expected = torch.stack([results[0][i % 3, i] for i in range(5)])
            torch.testing.assert_close(outputs, expected)

    def test_numbers_are_means_and_deviations_times_noise(self):
        ensemble, x = self.make(), torch.randn(5, 4).double()
        means = torch.stack([ensemble.member(a)(x) for a in range(3)])
        with torch.no_grad():
            for name, p in ensemble.named_parameters():
                if name.endswith("log_std"):
                    p.fill_(-40.0)
        torch.testing.assert_close(ensemble(x), means)
        site = ensemble.network[4].post
        site.log_std.data.fill_(math.log(0.3))
        draws = torch.stack([self.numbers(ensemble, site, x) for _ in range(4000)])
        assert (draws.mean(0) - site.values).abs().max() < 5 * 0.3 / math.sqrt(len(draws))
        assert draws.std(0).mean().item() == pytest.approx(0.3, rel=0.02)

    @staticmethod
    def numbers(ensemble, site, x):
        run = ensemble.run((x,), chunk=3)
        run.count = 3
        return site.now(run).detach()

    def test_the_divergence_is_that_of_samples(self):
        ensemble = self.make(members=2, prior_std=0.3)
        with torch.no_grad():
            for p in ensemble.individual_parameters():
                p.add_(0.2 * torch.randn_like(p))
        total = 0.0
        for module in ensemble.individuals.values():
            q = torch.distributions.Normal(module.values, module.log_std.exp())
            prior = torch.distributions.Normal(1.0, 0.3)
            exact = torch.distributions.kl_divergence(q, prior).sum()
            torch.testing.assert_close(module.kl(), exact)
            total = total + exact
        torch.testing.assert_close(ensemble.kl(), total)
        samples = q.sample((20000,))
        ratios = (q.log_prob(samples) - prior.log_prob(samples)).sum((1, 2))
        error = 5 * ratios.std() / math.sqrt(20000)
        assert abs(ratios.mean() - module.kl()) < error
        assert embens.batch_ensemble(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))).kl() == 0

    def test_copies_pickles_and_compiled_graphs_draw_the_same(self):
        torch._dynamo.reset()
        ensemble, x = self.make(), torch.randn(5, 4).double()
        compiled = torch.compile(ensemble, fullgraph=True, backend="aot_eager")
        results = []
        twins = copy.deepcopy(ensemble), pickle.loads(pickle.dumps(ensemble)), compiled
        for twin in (ensemble, *twins):
            torch.manual_seed(1)
            outputs = twin(x)
            outputs.square().sum().backward()
            results.append(outputs)
        for other in results[1:]:
            torch.testing.assert_close(other, results[0])
        exported = torch.export.export(ensemble, (x,))
        torch.manual_seed(1)
        torch.testing.assert_close(exported.module()(x), results[0])

    def test_the_prediction_draws_as_many_as_are_asked_for_by_a_generator(self):
        ensemble, x = self.make(), torch.randn(30, 4).double()
        found = [
            embens.predict(
                ensemble, x, members=7, batch_size=n, generator=torch.Generator().manual_seed(0)
            ).members
            for n in (4, 30)
        ]
        assert found[0].shape == (7, 30, 2)
        torch.testing.assert_close(*found)

    def test_a_limit_is_refused_and_empirical_kernels_count_deviations(self):
        net = embens.networks.mlp(4, 8, 2).double()
        ensemble, x = embens.rank1(net, 2), torch.randn(3, 4).double()
        with pytest.raises(TypeError, match="drawn anew at each pass around trainable means"):
            embens.theory.kernels(ensemble, x)
        torch.manual_seed(0)
        found = embens.finite.ntk(ensemble, x, outputs="trace")
        torch.manual_seed(0)
        own = list(ensemble.individual_parameters())
        with ensemble.run((x,), chunk=1) as run:
            outputs = run.member(1, numbers=[stack[1] for stack in run.numbers])
        rows = [torch.autograd.grad(o, own, retain_graph=True) for o in outputs.flatten()]
        flat = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        torch.testing.assert_close(found.individual[1], flat @ flat.T)
        assert embens.diagnose(ensemble, x, torch.randn(3, 1).double()).family == "rank1"

    @pytest.mark.parametrize("std", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_prior_that_is_none_is_refused(self, std):
        with pytest.raises(ValueError, match="prior_std"):
            self.make(prior_std=std)
