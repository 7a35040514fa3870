"""Each known problem is reported where it exists, and only there."""

from __future__ import annotations

import re

import pytest
import torch
from finite.diagnosed import IMAGES, LABELS, X, Y, batch_ensemble, cnn, mlp, seeded
from torch import nn

import embens
from embens import laws
from embens.finite import diagnose
from embens.finite.diagnosis import Diagnosis, Finding
from embens.finite.findings import CHECKS, ignores_gradient_scale, optimizer_class
from embens.finite.geometry import off_diagonal


def reported_codes(ensemble: embens.EmbeddedEnsemble, **kwargs) -> list[str]:
    image = any(isinstance(module, nn.Conv2d) for module in ensemble.modules())
    x, y = (IMAGES, LABELS) if image else (X, Y)
    report = diagnose(ensemble, x, y, **kwargs)
    return [finding.code for finding in report.warnings]


def sgd_with_decay(ensemble: embens.EmbeddedEnsemble) -> torch.optim.Optimizer:
    return torch.optim.SGD(ensemble.parameters(), lr=0.1, weight_decay=1e-4)


def sgd_with_groups(ensemble: embens.EmbeddedEnsemble) -> torch.optim.Optimizer:
    return torch.optim.SGD(ensemble.parameter_groups(lr=0.1, weight_decay=1e-4))


def repelling_members() -> embens.EmbeddedEnsemble:
    law = laws.Correlated(-1 / 8)
    return embens.embed(mlp(), 8, pre=None, post=law, generator=seeded())


def network_with_norm() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(12, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.ReLU(),
        nn.Linear(16, 4),
    )


def with_values_of_the_first_member(ensemble: embens.EmbeddedEnsemble) -> embens.EmbeddedEnsemble:
    with torch.no_grad():
        for values in ensemble.individual_parameters():
            values.copy_(values[:1].expand_as(values))
    return ensemble


def with_frozen_bias(ensemble: embens.EmbeddedEnsemble) -> embens.EmbeddedEnsemble:
    ensemble.reference[4].bias.requires_grad_(False)
    return ensemble


HEALTHY = {
    "centred, ntk": batch_ensemble,
    "centred, standard": lambda: batch_ensemble(parametrization="standard"),
    "shifted, as was wanted": lambda: batch_ensemble(p=0.9),
    "odd activations, v alone": lambda: embens.embed(
        mlp(activation="tanh"), 8, post=None, generator=seeded()
    ),
    "paper's cnn": lambda: embens.batch_ensemble(cnn(), 4, generator=seeded(1)),
    "last-layer dropout": lambda: embens.last_layer_dropout(mlp(), 8, generator=seeded()),
    "fixed masks": lambda: embens.mc_dropout(mlp(), 8, generator=seeded()),
    "fresh masks": lambda: embens.mc_dropout(mlp(), 8, fresh=True),
    "separate networks": lambda: embens.independent(mlp(), 4, generator=seeded()),
    "masksembles": lambda: embens.masksembles(mlp(), 8, generator=seeded()),
    "disjoint masks": lambda: embens.mc_dropout(mlp(), 4, laws.Disjoint(), generator=seeded()),
    "repelling members": repelling_members,
    "one member": lambda: batch_ensemble(members=1),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_ensemble_has_no_findings(name):
    ensemble = HEALTHY[name]()
    assert reported_codes(ensemble, optimizer=sgd_with_groups(ensemble)) == []


PROBLEMS = [
    (
        "crowded-last-layer",
        lambda: embens.last_layer_dropout(mlp(), 64, laws.Normal(), generator=seeded()),
        {},
    ),
    ("equal-members", lambda: embens.masksembles(mlp(), 8, overlap=1.0), {}),
    ("equal-members", lambda: embens.mc_dropout(mlp(), 8, laws.Correlated(1.0)), {}),
    ("shifted-laws", repelling_members, {"wanted": "independent"}),
    ("shifted-laws", lambda: embens.masksembles(mlp(), 8), {"wanted": "independent"}),
    ("equal-members", lambda: batch_ensemble(p=1.0), {}),
    ("equal-members", lambda: batch_ensemble(p=-1.0), {}),
    ("equal-members", lambda: batch_ensemble(p=1 - 1e-9), {}),
    ("equal-members", lambda: batch_ensemble(p=0.999), {"wanted": "independent"}),
    ("equal-members", lambda: batch_ensemble(p=1.0, members=64), {}),
    ("equal-members", lambda: embens.embed(mlp(), 4, laws.Constant(), laws.Constant(2.0)), {}),
    ("equal-members", lambda: embens.mc_dropout(mlp(), 4, laws.Constant(0.0)), {}),
    ("equal-members", lambda: embens.mc_dropout(mlp(), 4, laws.Bernoulli(1.0), fresh=True), {}),
    ("equal-members", lambda: embens.last_layer_dropout(mlp(), 4, laws.Normal(1.0, 0.0)), {}),
    ("equal-members", lambda: embens.embed(cnn(), 4, None, laws.Constant(), sites="all"), {}),
    ("equal-members", lambda: embens.batch_ensemble(network_with_norm(), 4, p=1.0), {}),
    ("equal-members", lambda: with_values_of_the_first_member(batch_ensemble()), {}),
    ("shifted-laws", lambda: batch_ensemble(p=0.5), {"wanted": "independent"}),
    (
        "uncentred-last-layer",
        lambda: embens.embed(mlp(), 8, post={"2": laws.Normal()}, generator=seeded()),
        {},
    ),
    (
        "uncentred-last-layer",
        lambda: embens.embed(mlp(), 8, post=None, generator=seeded()),
        {"wanted": "independent"},
    ),
    (
        "uncentred-last-layer",
        lambda: embens.embed(
            mlp(), 8, post={"2": laws.Normal(), "4": laws.Shifted(0.9)}, generator=seeded()
        ),
        {},
    ),
    ("shared-output-bias", lambda: batch_ensemble(bias_std=0.5), {}),
    (
        "input-modulations",
        lambda: embens.embed(cnn(), 4, sites="all", generator=seeded()),
        {},
    ),
    ("output-modulations", lambda: embens.embed(mlp(), 8, sites="all", generator=seeded()), {}),
    (
        "converging-modulations",
        lambda: embens.last_layer_dropout(mlp(), 8, trainable=True, generator=seeded()),
        {},
    ),
    ("large-gamma", lambda: batch_ensemble(p=0.99), {"gamma": 8.0}),
    ("large-gamma", lambda: batch_ensemble(p=0.99), {"gamma": lambda members: members}),
    ("decayed-modulations", batch_ensemble, {"optimizer": sgd_with_decay}),
    ("cancelled-gamma", batch_ensemble, {"optimizer": "Adam"}),
    ("cancelled-gamma", batch_ensemble, {"optimizer": "SparseAdam"}),
    ("cancelled-gamma", batch_ensemble, {"optimizer": torch.optim.RMSprop, "gamma": 3.0}),
    ("decayed-modulations", batch_ensemble, {"optimizer": torch.optim.AdamW}),
    ("decayed-modulations", batch_ensemble, {"optimizer": "adamw"}),
    ("large-gamma", lambda: batch_ensemble(p=0.8), {"gamma": 8}),
]


FINE = [
    ("equal-members", lambda: embens.masksembles(mlp(), 8, generator=seeded()), {}),
    ("large-gamma", repelling_members, {}),
    ("equal-members", lambda: batch_ensemble(p=0.99), {}),
    ("equal-members", lambda: embens.mc_dropout(mlp(), 4, laws.Bernoulli(0.9), fresh=True), {}),
    ("equal-members", lambda: batch_ensemble(p=1.0, members=1), {}),
    ("equal-members", lambda: embens.embed(mlp(), 4, pre=laws.Shifted(0.9), post=None), {}),
    ("shifted-laws", lambda: batch_ensemble(p=0.5), {}),
    ("shifted-laws", batch_ensemble, {"wanted": "independent"}),
    ("uncentred-last-layer", batch_ensemble, {"wanted": "independent"}),
    ("uncentred-last-layer", lambda: batch_ensemble(p=0.5), {}),
    (
        "uncentred-last-layer",
        lambda: embens.embed(mlp(activation="tanh"), 8, post=None, generator=seeded()),
        {"wanted": "independent"},
    ),
    ("shared-output-bias", batch_ensemble, {}),
    ("shared-output-bias", lambda: batch_ensemble(p=0.5, bias_std=0.5), {}),
    ("shared-output-bias", lambda: with_frozen_bias(batch_ensemble(bias_std=0.5)), {}),
    ("input-modulations", lambda: embens.embed(cnn(), 4, generator=seeded()), {}),
    (
        "input-modulations",
        lambda: embens.embed(mlp(), 4, sites="all", generator=seeded()),
        {},
    ),
    ("output-modulations", lambda: embens.embed(mlp(), 8, generator=seeded()), {}),
    (
        "converging-modulations",
        lambda: embens.embed(
            mlp(), 8, pre={"0": laws.Normal()}, post={"4": laws.Normal()}, generator=seeded()
        ),
        {},
    ),
    ("converging-modulations", lambda: embens.last_layer_dropout(mlp(), 8), {}),
    ("crowded-last-layer", lambda: embens.last_layer_dropout(mlp(), 16, laws.Normal()), {}),
    ("crowded-last-layer", lambda: embens.last_layer_dropout(mlp(), 64), {}),
    ("crowded-last-layer", lambda: embens.mc_dropout(mlp(), 64, laws.Normal(), fresh=False), {}),
    ("large-gamma", lambda: batch_ensemble(p=0.99), {"gamma": 1}),
    ("large-gamma", batch_ensemble, {"gamma": 8}),
    ("decayed-modulations", batch_ensemble, {"optimizer": sgd_with_groups}),
    ("decayed-modulations", lambda: embens.mc_dropout(mlp(), 4), {"optimizer": sgd_with_decay}),
    (
        "decayed-modulations",
        lambda: embens.independent(mlp(), 4, generator=seeded()),
        {"optimizer": sgd_with_decay},
    ),
    ("cancelled-gamma", batch_ensemble, {"optimizer": "SGD"}),
    ("cancelled-gamma", batch_ensemble, {"optimizer": torch.optim.Adam, "gamma": 1.0}),
    ("cancelled-gamma", batch_ensemble, {"optimizer": "LBFGS"}),
    ("decayed-modulations", batch_ensemble, {"optimizer": torch.optim.Adam}),
    ("large-gamma", lambda: batch_ensemble(p=0.8), {}),
    ("equal-members", lambda: embens.adapt(mlp(), 4, head="copied"), {}),
]


def reported_codes_of_case(make, options: dict) -> list[str]:
    ensemble = make()
    options = dict(options)
    if options.get("optimizer") in (sgd_with_decay, sgd_with_groups):
        options["optimizer"] = options["optimizer"](ensemble)
    return reported_codes(ensemble, **options)


def case_name(value: object) -> str | None:
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(("code", "make", "options"), PROBLEMS, ids=case_name)
def test_a_problem_is_reported(code, make, options):
    assert code in reported_codes_of_case(make, options)


@pytest.mark.parametrize(("code", "make", "options"), FINE, ids=case_name)
def test_a_problem_is_not_reported_where_there_is_none(code, make, options):
    assert code not in reported_codes_of_case(make, options)


def test_every_check_has_a_case_of_either_kind():
    assert {code for code, *_ in PROBLEMS} == {code for code, *_ in FINE} == set(CHECKS)


def test_a_finding_has_a_message_and_a_fix():
    (finding,) = diagnose(batch_ensemble(p=0.5), X, Y, wanted="independent").warnings
    assert finding.code == "shifted-laws"
    assert "Shifted(p=0.5)" in finding.message
    assert "p=0" in finding.fix
    assert finding.fix in str(finding)


def findings_with_code(report: Diagnosis, code: str) -> list[Finding]:
    return [finding for finding in report.warnings if finding.code == code]


def test_modulated_inputs_spread_the_gradients_over_orders_of_magnitude():
    all_sites = embens.embed(cnn(), 16, sites="all", generator=seeded())
    hidden_sites = embens.embed(cnn(), 16, generator=seeded())

    report = diagnose(all_sites, IMAGES, LABELS)
    report_of_hidden = diagnose(hidden_sites, IMAGES, LABELS)

    spread = float(report.norms.max() / report.norms.min())
    spread_of_hidden = float(report_of_hidden.norms.max() / report_of_hidden.norms.min())
    assert spread > 3 * spread_of_hidden
    (finding,) = findings_with_code(report, "input-modulations")
    assert f"{spread:.3g}" in finding.message


def ensemble_with_output_bias(width: int, members: int) -> embens.EmbeddedEnsemble:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 4))
    return embens.batch_ensemble(reference, members, law=laws.Shifted, generator=seeded())


def test_output_bias_of_a_wide_network_is_not_reported():
    report = diagnose(ensemble_with_output_bias(width=256, members=8), X, Y)

    assert findings_with_code(report, "shared-output-bias") == []


def test_output_bias_of_a_narrow_network_is_reported_with_its_strength():
    members = 16
    ensemble = ensemble_with_output_bias(width=16, members=members)
    (finding,) = findings_with_code(diagnose(ensemble, X, Y), "shared-output-bias")
    words = re.search(r"the 15 others together.* ([\d.]+) times as strongly", str(finding))
    assert words is not None
    strength = float(words[1])

    products = inner_products(ensemble)
    ensemble.reference[2].bias.requires_grad_(False)
    products_through_bias = products - inner_products(ensemble)
    norms = products.diagonal().sqrt()
    cosines_through_bias = products_through_bias / norms / norms[:, None]
    mean = off_diagonal(cosines_through_bias).mean().item()
    assert strength > 1
    assert strength == pytest.approx((members - 1) * mean, rel=0.05)


def inner_products(ensemble: embens.EmbeddedEnsemble) -> torch.Tensor:
    """Return the inner products of the members' shared gradients."""
    norms = embens.finite.gradient_norms(ensemble, X, Y).total
    return embens.finite.gradient_cosines(ensemble, X, Y) * norms * norms[:, None]


def test_equal_members_are_one_model_and_say_why():
    report = diagnose(batch_ensemble(p=1.0), X, Y)
    assert report.one_model
    assert report.gamma == 1.0
    (finding,) = report.warnings
    assert "all 8 members are one model (Shifted(p=1.0)" in finding.message
    assert "Members are one model" in str(report)


def test_almost_equal_members_are_nearly_one_model():
    report = diagnose(batch_ensemble(p=0.9999), X, Y)

    assert "nearly one model" in report.warnings[0].message


@pytest.mark.parametrize("options", [{}, {"wanted": "independent"}, {"gamma": 8}])
def test_a_single_member_has_no_coupling(options):
    for p in (0.0, 0.9):
        assert reported_codes(batch_ensemble(p=p, members=1, bias_std=0.5), **options) == []
    alone = embens.embed(mlp(), 1, post={"2": laws.Normal()}, generator=seeded())
    assert reported_codes(alone, **options) == []


def test_an_optimizer_is_known_by_its_name():
    assert optimizer_class("adamw") is torch.optim.AdamW
    assert optimizer_class(torch.optim.SGD) is torch.optim.SGD


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Adam", True), ("RMSprop", True), ("SGD", False), ("LBFGS", False), ("SparseAdam", True)],
)
def test_optimizers_of_the_adam_kind_ignore_the_scale_of_gradients(name, expected):
    assert ignores_gradient_scale(optimizer_class(name)) is expected
