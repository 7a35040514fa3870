"""The diagnosis as a whole: its contents, and that the ensemble stays unchanged."""

from __future__ import annotations

import copy
import json
import math
from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from cases import ARCHITECTURES
from finite.diagnosed import X, Y, batch_ensemble, mlp, seeded
from torch import Tensor, nn

import embens
from embens import laws, networks
from embens.finite import Budget, diagnose
from embens.theory.regime import Regime


def test_regime_coupling_and_gamma_are_those_of_the_limit():
    report = diagnose(batch_ensemble(p=0.0), X, Y)
    assert report.regime == Regime.INDEPENDENT
    assert report.regime.exact
    assert (report.coupling, report.gamma) == (0.0, 8.0)
    shifted = batch_ensemble(p=0.9)
    report = diagnose(shifted, X, Y)
    assert report.regime == Regime.COLLECTIVE
    assert 0 < report.coupling < 1
    pace = 8 / (1 + 7 * report.coupling)  # THEORY: within a few per cent of the spectrum's
    assert report.gamma == pytest.approx(pace, rel=0.1)
    assert diagnose(batch_ensemble(p=1.0), X, Y).gamma == pytest.approx(1.0, rel=1e-6)


def test_the_cosines_are_those_of_gradient_cosines():
    ensemble = batch_ensemble(members=5)
    report = diagnose(ensemble, X, Y)
    expected = embens.finite.gradient_cosines(ensemble, X, Y)
    torch.testing.assert_close(report.cosines.float(), expected, atol=1e-5, rtol=0)
    pairs = torch.tensor([float(expected[a, b]) for a in range(5) for b in range(5) if a != b])
    assert report.cosine.mean == pytest.approx(float(pairs.mean()), abs=1e-5)
    assert report.cosine.rms == pytest.approx(float(pairs.square().mean().sqrt()), rel=1e-4)
    assert list(report.layers) == ["0", "2", "4"]
    assert sum(layer.share for layer in report.layers.values()) == pytest.approx(1)
    without = [
        float(sum(expected[b, c] for b in range(5) for c in range(5) if b != c and a not in (b, c)))
        / 12
        for a in range(5)
    ]
    mean = sum(without) / 5
    error = math.sqrt(4 / 5 * sum((w - mean) ** 2 for w in without))
    assert report.cosine_error == pytest.approx(error, rel=1e-3)


def test_the_effective_width_is_that_of_the_laws_tails():
    normal, signs = laws.Normal(), laws.Signs(0.0)
    report = diagnose(embens.embed(mlp(64), 8, normal, normal, generator=seeded()), X, Y)
    assert report.widths[0] == pytest.approx(64 * 5 / 53)
    assert report.to_dict()["widths"] == pytest.approx([64 * 5 / 53, 64])
    words = " ".join(str(report).split())
    assert "a member of width 64 fluctuates like a plain network of width 6.04;" in words
    report = diagnose(embens.embed(mlp(64), 8, signs, signs, generator=seeded()), X, Y)
    assert report.widths == pytest.approx([64, 64])
    assert "like a plain network of width 64;" in " ".join(str(report).split())


def test_the_effective_width_is_left_out_if_it_is_unknown():
    norm = nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
    for ensemble in (
        embens.batch_ensemble(norm, 4, generator=seeded()),
        embens.independent(mlp(), 4, generator=seeded()),
        embens.batch_ensemble(mlp(), 4, sites="all", generator=seeded()),
    ):
        report = diagnose(ensemble, X, Y)
        assert report.widths == []
        assert "fluctuates" not in str(report)


def test_regression_has_another_criterion():
    reference = networks.mlp(12, 64, 2, 1, generator=seeded())
    target = X[:, :1].sin()
    ensemble = embens.batch_ensemble(reference, 4, generator=seeded())
    report = diagnose(ensemble, X, target)
    with torch.no_grad():
        expected = F.mse_loss(ensemble(X)[0], target).item()
    assert report.losses[0].item() == pytest.approx(expected, rel=1e-4)
    assert report.warnings == []
    with pytest.raises(TypeError, match="pass criterion="):
        diagnose(batch_ensemble(), X, None)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_any_network_can_be_diagnosed(architecture):
    x = architecture.inputs(seeded())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        reference = architecture.build()
    ensemble = embens.embed(reference.eval(), 3, example_input=x, generator=seeded())

    def criterion(outputs: Tensor, target: object) -> Tensor:
        return outputs.square().mean()

    report = diagnose(ensemble, x, None, criterion=criterion)
    assert len(report.losses) == 3
    assert report.layers
    json.dumps(report.to_dict())


def test_inputs_by_name_and_outputs_with_logits_are_diagnosed_as_plain_ones():
    class Named(nn.Module):
        def __init__(self, encoder_with_a_long_name_0: nn.Module):
            super().__init__()
            self.encoder_with_a_long_name_0 = encoder_with_a_long_name_0

        def forward(self, ids, cache=None, mask=None):
            return {"logits": self.encoder_with_a_long_name_0(ids + mask)}

    network = mlp()
    plain, named = (
        embens.batch_ensemble(net, 3, generator=seeded(1)) for net in (network, Named(network))
    )
    tokens = UserDict(ids=X / 2, mask=X / 2)  # as a tokenizer returns them
    expected, report = diagnose(plain, X, Y), diagnose(named, tokens, Y)
    torch.testing.assert_close(report.cosines, expected.cosines)
    assert report.rates.largest_stable == pytest.approx(expected.rates.largest_stable, rel=1e-4)
    layers = [line for line in str(report).splitlines() if "share" in line]
    assert len({line.split()[0] for line in layers}) == len(report.layers) > 1


def test_the_ensemble_is_not_changed():
    reference = nn.Sequential(
        *(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5)),
        *(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4, bias=False)),
    )
    ensemble = embens.batch_ensemble(reference, 3, generator=seeded()).train()
    next(iter(ensemble.parameters())).grad = torch.ones(16, 12)
    before = copy.deepcopy(ensemble.state_dict())
    modes = [m.training for m in ensemble.modules()]
    state, own = torch.random.get_rng_state(), torch.Generator().manual_seed(3)
    diagnose(ensemble, X, Y, budget=Budget(generator=own))
    assert torch.equal(state, torch.random.get_rng_state())
    assert modes == [m.training for m in ensemble.modules()]
    for name, value in ensemble.state_dict().items():
        assert torch.equal(value, before[name]), name
    first, *others = ensemble.parameters()
    assert torch.equal(first.grad, torch.ones(16, 12))
    assert all(p.grad is None for p in others)


def test_it_is_the_same_every_time():
    ensemble = embens.mc_dropout(mlp(), 4, fresh=True)
    one, other = diagnose(ensemble, X, Y), diagnose(ensemble, X, Y)
    assert torch.equal(one.cosines, other.cosines)
    assert one.rates == other.rates
    state = torch.random.get_rng_state()
    diagnose(ensemble, X, Y)
    assert torch.equal(state, torch.random.get_rng_state())
    third = diagnose(ensemble, X, Y, budget=Budget(generator=seeded(9)))
    assert not torch.equal(one.cosines, third.cosines)


def test_values_without_an_axis_of_outputs_are_compared_sample_by_sample():
    reference = networks.mlp(12, 64, 2, 1, generator=seeded())
    ensemble = embens.batch_ensemble(reference, 4, generator=seeded())
    flat, column = (diagnose(ensemble, X, t) for t in (X[:, 0].sin(), X[:, :1].sin()))
    assert torch.equal(flat.losses, column.losses)
    assert flat.rates == column.rates
    with pytest.raises(ValueError, match="the shape of a member's outputs"):
        diagnose(ensemble, X, X[:, :2])


def test_classes_may_have_any_integer_dtype_and_a_trailing_axis():
    expected = diagnose(batch_ensemble(), X, Y)
    for target in (Y.int(), Y.to(torch.uint8), Y[:, None]):
        assert torch.equal(diagnose(batch_ensemble(), X, target).losses, expected.losses)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"wanted": "collective"}, ValueError, "wanted must be"),
        ({"criterion": "nll"}, TypeError, "must be a function of one member's outputs"),
        ({"criterion": lambda o, t: (o, t)}, TypeError, "tensor.*got tuple"),
        ({"gamma": -1}, ValueError, "gamma must be finite"),
        ({"optimizer": "Adm"}, ValueError, "did you mean 'Adam'"),
        ({"optimizer": 3}, TypeError, "a torch optimizer, its class or its name"),
    ],
)
def test_a_wrong_call_is_explained_before_any_work(options, error, message):
    with pytest.raises(error, match=message):
        diagnose(batch_ensemble(), X, Y, **options)
    with pytest.raises(ValueError, match="at least one sample"):
        diagnose(batch_ensemble(), X[:0], Y[:0])


def test_members_of_a_frozen_network_have_no_shared_gradients():
    ensemble = embens.adapt(mlp(), 3, by="low_rank", trunk="frozen", generator=seeded())
    report = diagnose(ensemble, X, Y)
    assert not report.layers
    assert "none: members share no trainable parameters" in str(report)


class TestSourceOfTheCoupling:
    """The coupling is exact where the limit is known, and measured elsewhere."""

    def report(self, reference, law):
        generator = torch.Generator().manual_seed(0)
        ensemble = embens.embed(reference, 4, pre=None, post=law, generator=generator)
        x = torch.randn(40, 4, generator=generator)
        return embens.diagnose(ensemble, x, torch.arange(40) % 3)

    def residual(self, norm):
        class Residual(nn.Module):
            def __init__(self):
                super().__init__()
                self.stem, self.branch = nn.Linear(4, 32), nn.Linear(32, 32)
                self.norm, self.head = norm, nn.Linear(32, 3)

            def forward(self, x):
                x = self.stem(x)
                return self.head(torch.relu(self.norm(x + self.branch(torch.relu(x)))))

        torch.manual_seed(0)
        return Residual()

    def test_is_exact_on_graphs_with_sums_and_norms(self):
        norm = nn.LayerNorm(32, elementwise_affine=False)
        report = self.report(self.residual(norm), laws.Signs(0.8))
        assert report.regime.exact
        assert "exact, from the infinite-width limit" in str(report)

    def test_is_measured_with_batch_norm(self):
        report = self.report(self.residual(nn.BatchNorm1d(32)), laws.Signs(0.8))
        assert report.regime.measured
        assert report.coupling == pytest.approx(report.cosine.mean)
        assert "measured on this network" in str(report)
        assert report.to_dict()["measured"] is True

    def test_is_zero_by_the_laws_without_a_limit(self):
        report = self.report(self.residual(nn.BatchNorm1d(32)), laws.Signs(0.0))
        assert report.coupling == 0
        assert not report.regime.measured
        assert "from the laws, which make it 0" in " ".join(str(report).split())

    @pytest.mark.parametrize("p", [0.0, 0.5])
    def test_is_exact_on_transformers(self, p):
        """Tokens are (n, token, feature); scores are divided by the width."""

        class Transformer(nn.Module):
            def __init__(self):
                super().__init__()
                self.stem, self.query, self.value = (nn.Linear(w, 16) for w in (5, 16, 16))
                self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 16)
                self.head = nn.Linear(16, 3)

            def forward(self, x):
                x = self.stem(x)
                h = self.norm(x)
                q, v = self.query(h), self.value(h)
                x = x + self.out(F.scaled_dot_product_attention(q, q, v, scale=1 / 16))
                return self.head(x.mean(1))

        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(6, 3, 5, generator=generator)
        ensemble = embens.embed(
            Transformer(), 4, None, laws.Signs(p), example_input=x, generator=generator
        )
        report = embens.diagnose(ensemble, x, torch.arange(6) % 3)
        assert report.regime.exact
        assert (report.coupling > 0) == (p > 0)


def test_arrays_are_converted():
    ensemble = batch_ensemble(p=0.0)
    expected = diagnose(ensemble, X, Y).to_dict()
    assert diagnose(ensemble, X.double().numpy(), Y.numpy()).to_dict() == expected
