"""Which regime an ensemble is in, how strongly its members are coupled, and why."""

import math

import pytest
import torch
from torch import nn

import embens
from embens import laws, networks
from embens.theory.blocks import kernels
from embens.theory.kernel import natural_gamma
from embens.theory.regime import Regime, RegimeReport, regime

SQRT2 = math.sqrt(2)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp(**options):
    return networks.mlp(5, 16, 2, 1, **({"weight_std": SQRT2} | options))


class TestReport:
    def test_is_its_regime_with_the_number_behind_it(self):
        report = RegimeReport(Regime.INDEPENDENT, 0.0, "why", exact=True)
        assert report == Regime.INDEPENDENT
        assert Regime.INDEPENDENT in [report]
        assert report != Regime.COLLECTIVE
        assert {Regime.INDEPENDENT: 1}[report] == 1
        assert (report.name, report.value) == ("INDEPENDENT", "independent")
        assert report == RegimeReport(Regime.INDEPENDENT, 0.0, "why", exact=True)
        assert report != RegimeReport(Regime.INDEPENDENT, 0.0, "other", exact=True)
        assert report != "independent"

    def test_reads_well(self):
        report = RegimeReport(Regime.COLLECTIVE, 0.123456, "because", exact=False)
        assert str(report) == "collective (coupling about 0.123): because"


def test_a_plain_network_raises_with_the_fix():
    with pytest.raises(TypeError, match="expected an ensemble, got Sequential"):
        regime(mlp())


class TestExactRegime:
    def test_is_independent_where_the_inputs_of_the_last_layer_are_centred(self):
        report = regime(embens.batch_ensemble(mlp(), 4))
        assert report == Regime.INDEPENDENT
        assert report.coupling == 0
        assert report.exact
        assert report.reason == "E[u] = 0 in the input of the last layer '4'"

    def test_is_collective_where_they_are_not(self):
        report = regime(embens.batch_ensemble(mlp(), 4, p=0.7))
        assert report == Regime.COLLECTIVE
        assert 0 < report.coupling < 1
        assert "E[u] ≠ 0 in the input of the last layer '4' (overlap 0.49)" in report.reason

    @pytest.mark.parametrize(("p", "coupling"), [(0.3, 0.011), (0.7, 0.081), (0.95, 0.508)])
    def test_has_the_couplings_of_the_theory_for_four_relu_layers(self, p, coupling):
        """Tabulated there for 20 other random inputs, on which they depend a little."""
        net = networks.mlp(20, 8, 4, 1, weight_std=SQRT2)
        ensemble = embens.batch_ensemble(net, 4, p=p, law=laws.Shifted)
        computed = regime(ensemble, randn(20, 20)).coupling
        assert computed == pytest.approx(coupling, rel=0.25)

    def test_has_the_ratio_of_largest_eigenvalues_and_so_sets_gamma(self):
        x = randn(12, 5)
        ensemble = embens.batch_ensemble(mlp(), 4, p=0.7)
        k = kernels(ensemble, x)
        same, cross = (
            torch.linalg.eigvalsh(m)[-1] for m in (k.ntk_shared.same, k.ntk_shared.cross)
        )
        r = regime(ensemble, x).coupling
        assert r == pytest.approx((cross / same).item())
        k = type(k)(k.nngp, k.ntk_shared, type(k.nngp)(0 * k.nngp.same, 0 * k.nngp.same))
        assert natural_gamma(k, 10) == pytest.approx(10 / (1 + 9 * r), rel=0.05)

    def test_is_full_coupling_where_members_are_equal(self):
        report = regime(embens.batch_ensemble(mlp(), 4, p=1.0))
        assert report == Regime.COLLECTIVE
        assert report.coupling == 1
        assert "members are one model" in report.reason

    def test_of_separate_networks_is_independent(self):
        report = regime(embens.independent(mlp(bias_std=1.0), 4))
        assert report == Regime.INDEPENDENT
        assert report.coupling == 0
        assert "separate networks" in report.reason

    def test_of_per_member_last_layers_is_independent_unless_they_are_copies(self):
        for net in (mlp(bias_std=0.5), nn.Sequential(nn.LayerNorm(5), mlp())):
            report = regime(embens.embed(net, 4, None, None, own="last"))
            assert report == Regime.INDEPENDENT
            assert "every member has separate last layers" in report.reason
        report = regime(embens.embed(mlp(), 4, None, None, own="last", own_weights="copied"))

        assert (report, report.coupling) == (Regime.COLLECTIVE, 1)
        assert "so members are one model" in report.reason

    def test_is_collective_where_the_last_layer_has_a_shared_bias(self):
        """Erratum 4; hidden biases do no harm."""
        report = regime(embens.batch_ensemble(mlp(bias_std=0.5), 4))
        assert report == Regime.COLLECTIVE
        assert 0 < report.coupling < 0.5
        assert report.reason == "the shared bias of the last layer '4' couples members"
        hidden = nn.Sequential(
            networks.Linear(5, 16, bias_std=1.0), nn.ReLU(), networks.Linear(16, 1)
        )
        assert regime(embens.batch_ensemble(hidden, 4)) == Regime.INDEPENDENT

    def test_of_torch_layers_ignores_a_bias_that_vanishes_with_the_width(self):
        net = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 1))
        report = regime(embens.batch_ensemble(net, 4))
        assert report == Regime.INDEPENDENT
        assert report.exact

    def test_is_collective_where_only_an_earlier_layer_is_centred(self):
        """Erratum 6."""
        post = {"2": laws.Normal(), "4": laws.Constant()}
        report = regime(embens.embed(mlp(), 4, pre=None, post=post))
        assert report == Regime.COLLECTIVE
        assert report.coupling > 0.01

    def test_is_collective_with_v_alone_for_relu_but_not_for_odd_activations(self):
        """Erratum 8: with symmetric v, E φ(vz) = 0 for odd φ."""
        relu = regime(embens.embed(mlp(), 4, pre=laws.Rademacher(), post=None))
        assert relu == Regime.COLLECTIVE
        assert "not modulated by u" in relu.reason
        for activation in ("erf", "tanh"):
            for law in (laws.Rademacher(), laws.Normal()):
                odd = regime(embens.embed(mlp(activation=activation), 4, pre=law, post=None))
                assert odd == Regime.INDEPENDENT
                assert odd.exact
                assert "average to 0 over v" in odd.reason
        shifted = embens.embed(mlp(activation="erf"), 4, pre=laws.Shifted(0.5), post=None)
        assert regime(shifted) == Regime.COLLECTIVE

    def test_is_collective_where_only_the_outputs_are_modulated(self):
        """A centred v on the output makes the mean of the kernel vanish, not the kernel."""
        pre = {"4": laws.Normal()}
        ensemble = embens.embed(
            mlp(), 4, pre=pre, post=None, sites="all", generator=torch.Generator().manual_seed(0)
        )
        report = regime(ensemble)

        assert report == Regime.COLLECTIVE
        assert report.coupling == pytest.approx(1)  # every pair is proportional

    def test_is_independent_with_input_and_output_modulations_as_well(self):
        assert regime(embens.embed(mlp(), 3, sites="all")) == Regime.INDEPENDENT

    def test_of_last_layer_dropout_is_that_of_its_law(self):
        assert regime(embens.last_layer_dropout(mlp(), 4, laws.Normal())) == Regime.INDEPENDENT
        shifted = regime(embens.last_layer_dropout(mlp(), 4, law=laws.Bernoulli(0.5)))
        assert shifted == Regime.COLLECTIVE
        assert shifted.coupling == pytest.approx(0.5)  # overlap, since all layers before are equal

    def test_of_joint_laws_is_that_of_their_pairs(self):
        def last(law, **options):
            return regime(embens.last_layer_dropout(mlp(**options), 4, law=law))

        assert last(laws.Masks(0.3)).coupling == pytest.approx(0.3)
        disjoint = last(laws.Disjoint())
        assert disjoint == Regime.INDEPENDENT
        assert "E[u_a u_b] = 0 in the input of the last layer" in disjoint.reason
        repelling = last(laws.Correlated(-0.2))
        assert repelling == Regime.COLLECTIVE
        assert repelling.coupling == pytest.approx(-0.2)
        assert "E[u_a u_b] ≠ 0" in repelling.reason
        assert last(laws.Correlated(1.0)).coupling == 1

    @pytest.mark.parametrize("readout", ["mean", "flatten"])
    def test_knows_convolutional_networks(self, readout):
        net = networks.cnn((4, 6), inputs=1, outputs=3, image=8, readout=readout)
        report = regime(embens.batch_ensemble(net, 3))
        assert report == Regime.INDEPENDENT
        assert report.exact
        report = regime(embens.batch_ensemble(net, 3, p=0.8))
        assert report == Regime.COLLECTIVE
        assert report.exact

    def test_says_where_the_given_inputs_are_wrong(self):
        with pytest.raises(ValueError, match=r"does not fit '0'.*got \(4, 3\)"):
            regime(embens.batch_ensemble(mlp(), 4), torch.zeros(4, 3))

    def test_leaves_the_ensemble_as_it_was(self):
        ensemble = embens.batch_ensemble(mlp(), 4, p=0.5)
        before = {n: t.clone() for n, t in ensemble.state_dict().items()}
        one, two = regime(ensemble), regime(ensemble)
        assert one == two
        after = ensemble.state_dict()
        assert all(torch.equal(t, after[n]) for n, t in before.items())


class TestRegimeFromLaws:
    """Of networks whose limit is not known."""

    def normed(self, last=None):
        return nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), last or nn.Linear(8, 2, bias=False)
        )

    def test_is_independent_where_the_last_inputs_are_centred(self):
        report = regime(embens.batch_ensemble(self.normed(), 4))
        assert report == Regime.INDEPENDENT
        assert not report.exact
        assert "from laws and structure alone" in report.reason
        assert "BatchNorm1d" in report.reason

    def test_is_the_overlap_where_they_are_not(self):
        report = regime(embens.batch_ensemble(self.normed(), 4, p=0.5))
        assert report == Regime.COLLECTIVE
        assert report.coupling == pytest.approx(0.25)
        assert "about 0.25" in str(report)

    def test_is_collective_with_a_shared_output_bias(self):
        last = networks.Linear(8, 2, bias_std=1.0)
        report = regime(embens.batch_ensemble(self.normed(last), 4))
        assert report == Regime.COLLECTIVE
        assert "the shared bias of the last layer '3' couples members" in report.reason

    def test_looks_at_the_last_layer_not_at_the_product(self):
        net = nn.Sequential(
            *(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU()),
            *(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)),
        )
        post = {"3": laws.Normal(), "5": laws.Shifted(0.5)}
        report = regime(embens.embed(net, 4, pre=None, post=post))

        assert report == Regime.COLLECTIVE
        assert report.coupling == pytest.approx(0.25)
        assert regime(embens.embed(net, 4, post=None)) == Regime.COLLECTIVE

    def test_of_norms_over_units_is_exact_where_they_have_a_rule(self):
        norm = nn.LayerNorm(8, elementwise_affine=False)
        net = nn.Sequential(nn.Linear(5, 8), norm, nn.ReLU(), nn.Linear(8, 2, bias=False))
        assert regime(embens.batch_ensemble(net, 4)).exact
        report = regime(embens.batch_ensemble(net, 4, p=0.5))
        assert report.exact
        assert 0 < report.coupling < 0.25

    def test_needs_all_last_layers_centred(self):
        class Heads(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.one, self.two = nn.Linear(5, 8), nn.Linear(8, 2), nn.Linear(8, 2)

            def forward(self, x):
                x = self.body(x).relu()
                return self.one(x) + self.two(x)

        centred = regime(embens.batch_ensemble(Heads(), 4))
        assert centred == Regime.INDEPENDENT
        assert "the last layers 'one', 'two'" in centred.reason
        post = {"one": laws.Normal(), "two": laws.Shifted(0.5)}
        half = regime(embens.embed(Heads(), 4, post=post))
        assert half == Regime.COLLECTIVE
        assert "E[u] ≠ 0 in the input of the last layer 'two'" in half.reason

    def test_reads_transformers_and_norms_with_statistics_of_their_own(self):
        from cases import Residual, Tokens

        for build in (Residual, Tokens):
            report = regime(embens.batch_ensemble(build(), 3))
            assert report == Regime.INDEPENDENT
            assert not report.exact
            assert regime(embens.batch_ensemble(build(), 3, p=0.5)) == Regime.COLLECTIVE

    def test_takes_masks_that_are_drawn_afresh(self):
        law = laws.Normal()
        assert regime(embens.mc_dropout(self.normed(), 3, law=law, fresh=True)) == (
            Regime.INDEPENDENT
        )
