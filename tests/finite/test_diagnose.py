"""The diagnosis: healthy ensembles raise no alarm, each known trouble is found where it is."""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import math
import re
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import ARCHITECTURES
from torch import Tensor, nn

import embens
from embens import laws, metrics, networks
from embens.finite.diagnosis import command, measurement, stability
from embens.finite.diagnosis.diagnose import diagnose as diagnose_in_time
from embens.finite.diagnosis.findings import CHECKS, optimiser_class
from embens.finite.diagnosis.room import layer_overlaps, room, room_of
from embens.finite.empirical.samplewise import Samplewise
from embens.theory.regime import Regime

diagnose = partial(diagnose_in_time, seconds=3600)  # results don't depend on the machine
SOURCE = torch.Generator().manual_seed(7)
X, Y = torch.randn(60, 12, generator=SOURCE), torch.arange(60) % 4
IMAGES = torch.randn(12, 3, 8, 8, generator=SOURCE)
LABELS = torch.arange(12) % 4


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(width: int = 64, seed: int = 0, **kwargs) -> nn.Sequential:
    kwargs = {"weight_std": math.sqrt(2), **kwargs}
    return networks.mlp(12, width, 2, 4, generator=seeded(seed), **kwargs)


def cnn(**kwargs) -> nn.Sequential:
    return networks.cnn((16, 16), outputs=4, image=8, generator=seeded(), **kwargs)


def batch_ensemble(p: float = 0.0, members: int = 8, **kwargs) -> embens.EmbeddedEnsemble:
    return embens.batch_ensemble(mlp(**kwargs), members, p=p, generator=seeded(1))


def codes(ensemble: embens.EmbeddedEnsemble, **kwargs) -> list[str]:
    image = isinstance(next(iter(embens.reading.parameter_layers(ensemble).values())), nn.Conv2d)
    return diagnose(ensemble, *((IMAGES, LABELS) if image else (X, Y)), **kwargs).codes


def decayed(ensemble: embens.EmbeddedEnsemble) -> torch.optim.Optimizer:
    return torch.optim.SGD(ensemble.parameters(), lr=0.1, weight_decay=1e-4)


def grouped(ensemble: embens.EmbeddedEnsemble) -> torch.optim.Optimizer:
    return torch.optim.SGD(ensemble.parameter_groups(lr=0.1, weight_decay=1e-4))


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
    "one member": lambda: batch_ensemble(members=1),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_ensemble_raises_no_alarm(name):
    ensemble = HEALTHY[name]()
    assert codes(ensemble, optimizer=grouped(ensemble)) == []


TROUBLES = [
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
    ("decayed-modulations", batch_ensemble, {"optimizer": decayed}),
    ("cancelled-gamma", batch_ensemble, {"optimizer": "Adam"}),
    ("cancelled-gamma", batch_ensemble, {"optimizer": "SparseAdam"}),
    ("cancelled-gamma", batch_ensemble, {"optimizer": torch.optim.RMSprop, "gamma": 3.0}),
    ("decayed-modulations", batch_ensemble, {"optimizer": torch.optim.AdamW}),
    ("decayed-modulations", batch_ensemble, {"optimizer": "adamw"}),
    ("large-gamma", lambda: batch_ensemble(p=0.8), {"gamma": 8}),
    ("crowded", lambda: batch_ensemble(members=64, width=4), {}),
    ("no-gradient", lambda: embens.mc_dropout(dead(), 4), {}),
]
FINE = [
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
    ("shared-output-bias", lambda: frozen_bias(batch_ensemble(bias_std=0.5)), {}),
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
    ("large-gamma", lambda: batch_ensemble(p=0.99), {"gamma": 1}),
    ("large-gamma", batch_ensemble, {"gamma": 8}),
    ("decayed-modulations", batch_ensemble, {"optimizer": grouped}),
    ("decayed-modulations", lambda: embens.mc_dropout(mlp(), 4), {"optimizer": decayed}),
    (
        "decayed-modulations",
        lambda: embens.independent(mlp(), 4, generator=seeded()),
        {"optimizer": decayed},
    ),
    ("cancelled-gamma", batch_ensemble, {"optimizer": "SGD"}),
    ("cancelled-gamma", batch_ensemble, {"optimizer": torch.optim.Adam, "gamma": 1.0}),
    ("cancelled-gamma", batch_ensemble, {"optimizer": "LBFGS"}),
    ("decayed-modulations", batch_ensemble, {"optimizer": torch.optim.Adam}),
    ("large-gamma", lambda: batch_ensemble(p=0.8), {}),
    ("crowded", lambda: batch_ensemble(members=8), {}),
    (
        "crowded",
        lambda: embens.last_layer_dropout(mlp(width=16), 8, generator=seeded()),
        {},
    ),
    (
        "crowded",
        lambda: embens.batch_ensemble(
            networks.cnn(width=1 / 8, outputs=4, image=8, generator=seeded()), 16
        ),
        {},
    ),
    ("no-gradient", lambda: embens.mc_dropout(mlp(), 4), {}),
]


def dead() -> nn.Sequential:
    reference = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4, bias=False))
    nn.init.constant_(reference[0].bias, -100.0)
    return reference


def frozen_bias(ensemble: embens.EmbeddedEnsemble) -> embens.EmbeddedEnsemble:
    ensemble.network[4].layer.bias.requires_grad_(False)
    return ensemble


def called(make, options: dict) -> list[str]:
    ensemble = make()
    options = dict(options)
    if options.get("optimizer") in (decayed, grouped):
        options["optimizer"] = options["optimizer"](ensemble)
    return codes(ensemble, **options)


def case_name(value: object) -> str | None:
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(("code", "make", "options"), TROUBLES, ids=case_name)
def test_a_trouble_is_found(code, make, options):
    assert code in called(make, options)


@pytest.mark.parametrize(("code", "make", "options"), FINE, ids=case_name)
def test_a_trouble_is_not_found_where_it_is_not(code, make, options):
    assert code not in called(make, options)


def test_every_check_has_a_case_of_either_kind():
    checked = {check.__name__.replace("_", "-") for check in CHECKS}
    assert {code for code, *_ in TROUBLES} == {code for code, *_ in FINE} == checked


def test_a_finding_says_what_and_what_to_do():
    (finding,) = diagnose(batch_ensemble(p=0.5), X, Y, wanted="independent").warnings
    assert finding.code == "shifted-laws"
    assert "Shifted(p=0.5)" in finding.message
    assert "p=0" in finding.what_to_do
    assert finding.what_to_do in str(finding)


def test_modulated_inputs_spread_the_gradients_over_orders_of_magnitude():
    report = diagnose(embens.embed(cnn(), 16, sites="all", generator=seeded()), IMAGES, LABELS)
    spread = float(report.norms.max() / report.norms.min())
    hidden = diagnose(embens.embed(cnn(), 16, generator=seeded()), IMAGES, LABELS)
    assert spread > 3 * float(hidden.norms.max() / hidden.norms.min())
    (finding,) = [f for f in report.warnings if f.code == "input-modulations"]
    assert f"{spread:.3g}" in finding.message


# What is reported


def test_regime_coupling_and_gamma_are_those_of_the_limit():
    report = diagnose(batch_ensemble(p=0.0), X, Y)
    assert report.regime == Regime.INDEPENDENT
    assert report.exact
    assert (report.coupling, report.gamma) == (0.0, 8.0)
    shifted = batch_ensemble(p=0.9)
    report = diagnose(shifted, X, Y)
    assert report.regime == Regime.COLLECTIVE
    assert 0 < report.coupling < 1
    pace = 8 / (1 + 7 * report.coupling)  # THEORY: within a few per cent of the spectrum's
    assert report.gamma == pytest.approx(pace, rel=0.1)
    assert diagnose(batch_ensemble(p=1.0), X, Y).gamma == pytest.approx(1.0, rel=1e-6)


def test_the_pull_is_that_of_the_gradient_cosines():
    ensemble = batch_ensemble(members=5)
    report = diagnose(ensemble, X, Y)
    found = embens.finite.gradient_cosines(ensemble, X, Y)
    torch.testing.assert_close(report.cosines.float(), found, atol=1e-5, rtol=0)
    pairs = torch.tensor([float(found[a, b]) for a in range(5) for b in range(5) if a != b])
    assert report.pull.mean == pytest.approx(float(pairs.mean()), abs=1e-5)
    assert report.pull.rms == pytest.approx(float(pairs.square().mean().sqrt()), rel=1e-4)
    assert list(report.overlap) == ["0", "2", "4"]
    assert sum(o.share for o in report.overlap.values()) == pytest.approx(1)
    without = [
        float(sum(found[b, c] for b in range(5) for c in range(5) if b != c and a not in (b, c)))
        / 12
        for a in range(5)
    ]
    mean = sum(without) / 5
    error = math.sqrt(4 / 5 * sum((w - mean) ** 2 for w in without))
    assert report.pull_error == pytest.approx(error, rel=1e-3)


def test_separate_networks_don_t_pull_and_have_room_for_any_number():
    report = diagnose(embens.independent(mlp(), 3, generator=seeded()), X, Y)
    assert report.regime == Regime.INDEPENDENT
    assert report.overlap == {}
    assert math.isinf(report.room)
    assert "share no parameters" in str(report)


def test_regression_has_another_criterion():
    reference = networks.mlp(12, 64, 2, 1, generator=seeded())
    target = X[:, :1].sin()
    ensemble = embens.batch_ensemble(reference, 4, generator=seeded())
    report = diagnose(ensemble, X, target)
    with torch.no_grad():
        expected = F.mse_loss(ensemble(X)[0], target).item()
    assert report.losses[0].item() == pytest.approx(expected, rel=1e-4)
    assert report.codes == []
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
    assert report.overlap
    json.dumps(report.to_dict())


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
    diagnose(ensemble, X, Y, generator=own)
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
    third = diagnose(ensemble, X, Y, generator=seeded(9))
    assert not torch.equal(one.cosines, third.cosines)


def test_it_keeps_its_budget_of_memory():
    ensemble = batch_ensemble(members=8)
    numbers = 4 * sum(p.numel() for p in ensemble.shared_parameters())
    report = diagnose(ensemble, X, Y, memory=6 * numbers)
    assert len(report.losses) == 3
    assert report.rows < 60
    assert "the budget allowed 3 members" in report.notes[0]
    assert len(diagnose(ensemble, X, Y).losses) == 8


def test_it_keeps_its_budget_of_time(monkeypatch):
    clock = iter(range(0, 10**7, 5))
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: float(next(clock)))
    report = diagnose(batch_ensemble(members=8), X, Y, seconds=20)
    assert len(report.losses) < 8
    assert report.rows < 60
    assert any("the budget allowed" in note for note in report.notes)
    assert any("no stable rate" in note for note in report.notes)
    assert report.rates.largest_stable is None


class Attention(nn.Module):
    def __init__(self, width: int = 64, outputs: int = 10):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True)
        self.last = nn.Linear(width, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x)).mean(1))


def attention() -> tuple[embens.EmbeddedEnsemble, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ensemble = embens.batch_ensemble(Attention(), 4, generator=seeded()).eval()
    return ensemble, torch.randn(16, 3, 4, generator=seeded()), torch.arange(16) % 10


def test_attention_keeps_the_budget_of_memory_or_says_what_it_leaves_out(monkeypatch):
    ensemble, x, y = attention()
    held: list[int] = []
    rows = Samplewise.rows

    def counting(self, *args):
        found = rows(self, *args)
        held.append(sum(r.numel() * r.element_size() for r in found.values()))
        return found

    monkeypatch.setattr(Samplewise, "rows", counting)
    full = diagnose(ensemble, x, y).rates.largest_stable
    most = max(held)
    held.clear()
    tight = diagnose(ensemble, x, y, memory=8e6)
    assert 4 * max(held) < 8e6 / 2 < 4 * most  # of each of four members
    assert tight.rates.largest_stable == pytest.approx(full, rel=0.5)  # other, fewer samples
    tiny = diagnose(ensemble, x, y, memory=1e5)
    assert tiny.rates.largest_stable is None
    assert any("no stable rate" in note and "GB" in note for note in tiny.notes)


def test_a_dear_kernel_is_that_of_fewer_samples_and_outputs(monkeypatch):
    ensemble = batch_ensemble()
    full = diagnose(ensemble, X, Y).rates.largest_stable
    module = importlib.import_module("embens.finite.diagnosis.diagnose")
    monkeypatch.setattr(module, "_affordable", lambda rows, outputs, work: (6, 2))
    report = diagnose(ensemble, X, Y)
    assert "the stable rate is that of 6 samples, 2 outputs" in report.notes
    assert report.rates.largest_stable == pytest.approx(full, rel=0.6)


def test_values_without_an_axis_of_outputs_are_compared_sample_by_sample():
    reference = networks.mlp(12, 64, 2, 1, generator=seeded())
    ensemble = embens.batch_ensemble(reference, 4, generator=seeded())
    flat, column = (diagnose(ensemble, X, t) for t in (X[:, 0].sin(), X[:, :1].sin()))
    assert torch.equal(flat.losses, column.losses)
    assert flat.rates == column.rates
    with pytest.raises(ValueError, match="expected values of the outputs' shape"):
        diagnose(ensemble, X, X[:, :2])


def test_a_shared_output_bias_is_found_whatever_its_gradient_now_is():
    for seed in range(3):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            reference = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
        ensemble = embens.batch_ensemble(reference, 4, generator=seeded(seed))
        assert codes(ensemble) == ["shared-output-bias"]


@pytest.mark.parametrize("options", [{}, {"wanted": "independent"}, {"gamma": 8}])
def test_a_single_member_is_coupled_to_nobody(options):
    for p in (0.0, 0.9):
        assert codes(batch_ensemble(p=p, members=1, bias_std=0.5), **options) == []
    alone = embens.embed(mlp(), 1, post={"2": laws.Normal()}, generator=seeded())
    assert codes(alone, **options) == []


def test_classes_of_any_whole_dtype_and_with_an_axis_more_are_taken():
    expected = diagnose(batch_ensemble(), X, Y)
    for target in (Y.int(), Y.to(torch.uint8), Y[:, None]):
        assert torch.equal(diagnose(batch_ensemble(), X, target).losses, expected.losses)


def test_text_dict_and_picture(tmp_path):
    ensemble = batch_ensemble(p=0.99)
    picture = tmp_path / "diagnose.png"
    report = diagnose(ensemble, X, Y, gamma=8, plot=picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = str(report)
    for word in ("collective", "coupling", "pull", "room", "gamma", "rates", "warnings", "do:"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 100
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["regime"] == "collective"
    assert values["warnings"][0]["code"] == "large-gamma"
    assert values["room"] is None  # infinite
    assert len(values["cosines"]) == 8
    assert set(values["overlap"]) == {"0", "2", "4"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"wanted": "collective"}, ValueError, "wanted must be"),
        ({"seconds": "3"}, ValueError, "must be positive, a number; got '3'"),
        ({"memory": float("nan")}, ValueError, "must be positive"),
        ({"criterion": "nll"}, TypeError, "expected a function of one member's outputs"),
        ({"criterion": lambda o, t: (o, t)}, TypeError, "expected a tensor.*got tuple"),
        ({"seconds": 0}, ValueError, "must be positive"),
        ({"gamma": -1}, ValueError, "gamma must be finite"),
        ({"optimizer": "Adm"}, ValueError, "did you mean 'Adam'"),
        ({"optimizer": 3}, TypeError, "a torch optimiser, its class or its name"),
    ],
)
def test_a_wrong_call_is_explained_before_any_work(options, error, message):
    with pytest.raises(error, match=message):
        diagnose(batch_ensemble(), X, Y, **options)
    with pytest.raises(ValueError, match="at least one sample"):
        diagnose(batch_ensemble(), X[:0], Y[:0])


WRONG = [
    (lambda: (mlp(), X, Y), TypeError, "expected an ensemble; got Sequential"),
    (lambda: (batch_ensemble(), X.numpy(), Y), TypeError, "expected a tensor.*got ndarray"),
    (lambda: (batch_ensemble(), X[:0], Y[:0]), ValueError, "at least one sample"),
    (lambda: (batch_ensemble(), X, Y[:7]), ValueError, "same number of samples; got 60 and 7"),
    (lambda: (batch_ensemble(), X * math.nan, Y), ValueError, "expected finite numbers"),
    (lambda: (batch_ensemble(), X, Y + 9), ValueError, "expected classes from 0 to 3"),
    (lambda: (batch_ensemble(), X, Y[:, None, None]), ValueError, "a class for each"),
]
MEASURES = (diagnose, embens.finite.gradient_cosines, embens.finite.gradient_norms)


@pytest.mark.parametrize("call", MEASURES, ids=["diagnose", "cosines", "norms"])
@pytest.mark.parametrize(("arguments", "error", "message"), WRONG)
def test_wrong_samples_are_explained(call, arguments, error, message):
    with pytest.raises(error, match=message):
        call(*arguments())


@pytest.mark.parametrize("call", MEASURES, ids=["diagnose", "cosines", "norms"])
def test_inference_mode_is_explained(call):
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        call(batch_ensemble(), X, Y)


def test_an_optimiser_is_known_by_its_name():
    assert optimiser_class("adamw") is torch.optim.AdamW
    assert optimiser_class(torch.optim.SGD) is torch.optim.SGD


# Room


@pytest.mark.parametrize("chance", [0.05, 0.2])
@pytest.mark.parametrize("systematic", [0.0, 1e-9, 0.002])
def test_the_room_solves_its_equation(chance, systematic):
    others = room_of(chance, systematic) - 1
    assert math.sqrt(others) * chance == pytest.approx(0.4 * (1 + others * systematic), rel=1e-6)


def test_the_tightest_layer_that_matters_limits_the_room():
    def gram(cosine: float, size: float) -> Tensor:
        return size * torch.tensor([[1.0, cosine], [cosine, 1.0]], dtype=torch.float64)

    overlaps = layer_overlaps({"a": gram(0.1, 1), "b": gram(0.4, 0.5), "c": gram(1, 0.001)}, 0.0)
    assert room(overlaps) == (pytest.approx(2), "b")
    assert room({}) == (math.inf, None)


def test_the_interval_of_the_room_holds_what_many_members_tell():
    rooms = [diagnose(batch_ensemble(0, 16, width=32, seed=s), X, Y) for s in range(4)]
    truth = 4 / sum(1 / report.room for report in rooms)
    ends = [
        diagnose(batch_ensemble(0, 8, width=32, seed=seed), X, Y).room_interval
        for seed in range(12)
    ]
    assert sum(low <= truth <= high for low, high in ends) >= 5  # one standard error
    assert sum(truth / 4 < low < high < 4 * truth for low, high in ends) >= 5  # it says something
    few = diagnose(batch_ensemble(0, 2), X, Y)
    assert few.room_interval == (1.0, math.inf)
    assert "1 to any number" in str(few)


def test_the_room_grows_with_the_width():
    def mean_room(width: int) -> float:
        return sum(diagnose(batch_ensemble(0, 8, width=width, seed=s), X, Y).room for s in range(3))

    rooms = [mean_room(width) for width in (8, 32, 128)]
    assert rooms[0] < rooms[1] / 1.5 < rooms[2] / 3


def test_beyond_the_room_a_trained_ensemble_is_worse():
    pytest.importorskip("sklearn")
    digits = embens.data.digits().standardise().flatten()

    def made(width: int, members: int, seed: int) -> embens.EmbeddedEnsemble:
        generator = seeded(seed)
        reference = networks.mlp(
            64, width, 3, 10, weight_std=math.sqrt(2), parametrization="standard",
            generator=generator,
        )  # fmt: skip
        return embens.mc_dropout(reference, members, law=laws.Normal(), generator=generator)

    def accuracy(members: int) -> float:
        found = 0.0
        for seed in range(2):
            ensemble = made(8, members, seed)
            embens.fit(
                ensemble, tuple(digits.train), epochs=20, batch_size=64, lr=0.01, seed=seed,
                progress=False,
            )  # fmt: skip
            with torch.no_grad():
                outputs = ensemble.eval()(digits.test.inputs)
            found += metrics.ensemble_accuracy(outputs, digits.test.targets).item() / 2
        return found

    narrow, wide = (diagnose(made(w, 16, 0), *digits.train).room for w in (8, 64))
    assert 1.5 < narrow < 4.5
    assert wide > 8
    assert accuracy(round(narrow)) > accuracy(24) + 0.2


# Rates


def test_descent_is_stable_below_the_bound_and_not_above():
    reference = networks.mlp(12, 256, 1, 1, weight_std=math.sqrt(2), generator=seeded())
    x, y = X[:10].double(), X[:10, :1].sin().double()
    ensemble = embens.batch_ensemble(reference.double(), 4, generator=seeded(1))
    report = diagnose(ensemble, x, y)
    bound = report.rates.largest_stable

    def loss_after(factor: float) -> float:
        trained = copy.deepcopy(ensemble)
        rate = factor * bound
        groups = trained.parameter_groups(rate, weight_decay=0.0, gamma=report.gamma)
        optimizer = torch.optim.SGD(groups)
        for _ in range(12):
            optimizer.zero_grad()
            loss = embens.objective(trained(x), y, F.mse_loss)
            loss.backward()
            optimizer.step()
        return loss.item() / len(trained(x))

    start = float(report.losses.mean())
    assert loss_after(0.7) < 0.7 * start
    assert not loss_after(6) < 3 * start  # up to 4/λ a network may find a flatter place


def test_a_gamma_that_is_too_large_shrinks_the_stable_rate():
    report = diagnose(batch_ensemble(p=0.99), X, Y, gamma=8)
    assert report.rates.largest_stable_as_meant < 0.5 * report.rates.largest_stable


def test_modulations_need_a_larger_rate_in_the_standard_parametrization():
    def factor(parametrization: str, width: int) -> float:
        ensemble = batch_ensemble(parametrization=parametrization, width=width)
        return diagnose(ensemble, X, Y).rates.modulation_factor

    assert factor("standard", 256) > 1.5 * factor("standard", 64) > 3 * factor("ntk", 64)
    assert diagnose(embens.mc_dropout(mlp(), 4), X, Y).rates.modulation_factor is None


def test_the_curvature_of_cross_entropy_is_that_of_its_hessian():
    outputs = torch.randn(3, 4, generator=seeded(), dtype=torch.float64)
    target = torch.tensor([0, 1, 3])
    hessian = torch.autograd.functional.hessian(
        lambda o: F.cross_entropy(o.reshape(3, 4), target), outputs.flatten()
    )
    expected = float(torch.linalg.eigvalsh(hessian)[-1])
    found = stability.curvature(outputs, target, F.cross_entropy, steps=300)
    assert found == pytest.approx(expected, rel=1e-3)
    assert stability.curvature(outputs, target, lambda o, t: o.sum()) == 0.0


# The command


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    parser.set_defaults(parser=parser)
    return command.run(parser.parse_args(arguments))


@pytest.fixture
def saved(tmp_path) -> Path:
    batch_ensemble(p=0.99).save(tmp_path / "ensemble.safetensors")
    (tmp_path / "network.py").write_text(
        "from embens import networks\n"
        "def build():\n    return networks.mlp(12, 64, 2, 4, weight_std=2**0.5)\n"
        "number = 3\ndef wrong():\n    return 3\n"
    )
    numpy = pytest.importorskip("numpy")
    numpy.savez(tmp_path / "data.npz", x=X.numpy(), y=Y.numpy())
    numpy.savez(tmp_path / "other.npz", a=X.numpy())
    return tmp_path


OWN = "mlp(12, width=64, depth=2, outputs=4, weight_std=1.4142135623730951)"


def test_the_command_prints_text_or_numbers(saved, capsys):
    arguments = (str(saved / "ensemble.safetensors"), "--data", str(saved / "data.npz"))
    assert run(*arguments, "--reference", OWN, "--gamma", "8") == 0
    assert "8 times" not in (text := capsys.readouterr().out)
    assert "collective" in text
    assert "! gamma=8" in text
    reference = f"{saved / 'network.py'}:build"
    picture = saved / "out.png"
    assert run(*arguments, "--reference", reference, "--json", "--plot", str(picture)) == 0
    assert json.loads(capsys.readouterr().out)["regime"] == "collective"
    assert picture.exists()


def test_the_command_has_data_of_its_own(tmp_path, capsys):
    pytest.importorskip("sklearn")
    path = tmp_path / "e.safetensors"
    embens.batch_ensemble(networks.mlp(64, 16, 1, 10), 2).save(path)
    assert run(str(path), "--reference", "mlp(64, 16, 1, 10)") == 0
    embens.batch_ensemble(networks.cnn((4, 4), inputs=1, outputs=10, image=8), 2).save(path)
    assert run(str(path), "--reference", "cnn((4, 4), inputs=1, outputs=10, image=8)") == 0
    assert "2 members" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reference", "data", "message"),
    [
        ("mlp(12, width=64", "data.npz", "such as mlp(…)"),
        ("mpl(12)", "data.npz", "did you mean 'mlp'"),
        ("mlp(width=open('x'))", "data.npz", "literal values"),
        ("mlp(12, 32, 2, 4)", "data.npz", "which is another shape"),
        ("mlp(widht=3)", "data.npz", "widht"),
        ("no.such.module:build", "data.npz", "No module named"),
        ("nothing.py:build", "data.npz", "there is no file"),
        ("{folder}/network.py:builds", "data.npz", "has no 'builds'"),
        ("{folder}/network.py:wrong", "data.npz", "should return a torch.nn.Module"),
        (OWN, "nothing.npz", "there is no file"),
        (OWN, "other.npz", "expected arrays x and y"),
    ],
)
def test_a_wrong_command_is_explained(saved, capsys, reference, data, message):
    reference = reference.replace("{folder}", str(saved))
    with pytest.raises(SystemExit) as stop:
        run(
            *(str(saved / "ensemble.safetensors"), "--reference", reference),
            *("--data", str(saved / data)),
        )
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


# The how-to


def test_the_how_to_is_true(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    root = Path(__file__).parents[2]
    page = root / "docs" / "how-to" / "is-my-ensemble-an-ensemble.md"
    text = page.read_text()
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    for check in CHECKS:
        assert f"`{check.__name__.replace('_', '-')}`" in text


def test_the_example_runs_at_its_smallest(capsys):
    pytest.importorskip("sklearn")
    path = Path(__file__).parents[2] / "examples" / "how_many_members.py"
    main = runpy.run_path(str(path))["main"]
    (row,) = main(widths=(8,), members=(1, 2), epochs=1)
    assert row["room"] > 1
    assert 0 <= row[2] <= 1
    assert "| width | room | M=1 | M=2 |" in capsys.readouterr().out


def test_gaps_in_the_inputs_are_the_networks_own_affair():
    """A network that knows what NaN means is diagnosed; one that does not is not."""

    class Filled(torch.nn.Module):
        def forward(self, x):
            return torch.nan_to_num(x)

    x, target = torch.randn(20, 4), torch.arange(20) % 3
    x[::3, 1] = math.nan
    body = [torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3, bias=False)]
    report = embens.diagnose(
        embens.batch_ensemble(torch.nn.Sequential(Filled(), *body), 4), x, target
    )
    assert math.isfinite(report.pull.mean)
    with pytest.raises(ValueError, match="expected finite numbers"):
        embens.diagnose(embens.batch_ensemble(torch.nn.Sequential(*body), 4), x, target)
