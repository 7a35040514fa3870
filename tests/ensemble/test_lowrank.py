"""Members whose weights differ by matrices of low rank."""

from __future__ import annotations

import pytest
import torch
from cases import ARCHITECTURES
from torch import nn

import embens
from embens.ensemble.lowrank import LowRank
from embens.reading import opened, parameter_layers

KINDS = ("multiplicative", "additive")
every_kind = pytest.mark.parametrize("kind", KINDS)
every_case = pytest.mark.parametrize("case", ARCHITECTURES, ids=str)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(case, kind, **options):
    reference, x = case.build().double().eval(), case.inputs(generator())
    x = x.double() if x.is_floating_point() else x
    ensemble = embens.low_rank(
        reference, 3, rank=2, kind=kind, example_input=x, generator=generator(1), **options
    )
    return reference, ensemble.eval(), x


def mlp(width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


@every_case
@every_kind
def test_a_member_s_weights_are_those_of_the_definition(case, kind):
    reference, ensemble, _ = build(case, kind, scale=0.7)
    layers, member = (parameter_layers(opened(m)) for m in (reference, ensemble.member(1)))
    changed = 0
    for name, module in ensemble.individuals.items():
        if not isinstance(module, LowRank):
            continue
        shared, mine = layers[name].weight, member[name].weight
        delta = (module.left[1] @ module.right[1]).reshape(shared.shape)
        expected = shared * (1 + delta) if kind == "multiplicative" else shared + delta
        torch.testing.assert_close(mine, expected)
        assert not torch.equal(mine, shared)
        changed += 1
    assert changed == len(ensemble.plan.low_rank) == len(layers)


@every_case
@every_kind
def test_every_batch_and_chunk_gives_what_the_members_give(case, kind):
    _, ensemble, x = build(case, kind, scale=0.7)
    alone = [ensemble.member(a) for a in range(3)]
    expected = torch.stack([member(x) for member in alone])
    for chunk in (None, 1, 2, 3):
        torch.testing.assert_close(ensemble(x, chunk=chunk), expected)
    if case.name == "unbatched conv":
        return
    if case.name != "encoder layer, time first":
        split = ensemble(x, batch="split")
        for i in range(len(x)):
            torch.testing.assert_close(split[i], alone[i % 3](x[i : i + 1])[0])
    own = torch.stack([x.flip(0), x, x.flip(0)])
    expected = torch.stack([member(mine) for member, mine in zip(alone, own, strict=True)])
    torch.testing.assert_close(ensemble(own, batch="own"), expected)


@every_case
@every_kind
def test_without_deviations_every_member_is_the_reference_but_the_factors_learn(case, kind):
    reference, ensemble, x = build(case, kind, scale=0)
    for chunk in (1, None):
        for output in ensemble(x, chunk=chunk):
            torch.testing.assert_close(output, reference(x))
    ensemble(x).square().sum().backward()
    left = [p for n, p in ensemble.named_parameters() if n.endswith("left")]
    assert all(not p.any() for p in left)
    assert any(not torch.equal(p.grad[0], p.grad[1]) for p in left), "members part"


@pytest.mark.parametrize("rows", [1, 2, 40, 300])
@pytest.mark.parametrize("parametrized", [False, True])
def test_both_ways_of_a_linear_layer_agree_for_any_number_of_rows(rows, parametrized):
    torch.manual_seed(0)
    width = 48
    net = mlp(width) if not parametrized else embens.networks.mlp(5, width, 2, 3, bias_std=0.3)
    ensemble = embens.low_rank(net.double(), 3, rank=3, kind="additive", scale=0.5)
    x = torch.randn(rows, 5).double()
    results = []
    for thin in (True, False):
        for module in ensemble.modules():
            if isinstance(module, LowRank):
                module._is_thin = lambda x, thin=thin: thin
        for chunk in (1, 3):
            outputs = ensemble(x, chunk=chunk)
            gradients = torch.autograd.grad(outputs.square().sum(), list(ensemble.parameters()))
            results.append([outputs, *gradients])
    for other in results[1:]:
        torch.testing.assert_close(results[0], other)


def test_few_rows_run_on_activations_and_many_build_the_weights(monkeypatch):
    calls = []
    run = LowRank._on_activations
    monkeypatch.setattr(LowRank, "_on_activations", lambda *a: calls.append(1) or run(*a))
    ensemble = embens.low_rank(mlp(80), 3, rank=3, kind="additive", sites=["0"])
    for rows, expected in ((100, 1), (200, 0)):
        for chunk in (3, 1):
            calls.clear()
            ensemble(torch.randn(rows, 5), chunk=chunk)
            assert len(calls) == expected * 3 // chunk


@every_kind
@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_the_scale_is_the_relative_size_of_deviations(kind, scale):
    net = mlp(200)
    ensemble = embens.low_rank(net, 50, rank=3, kind=kind, scale=scale, generator=generator())
    stack = torch.stack([ensemble.member(a)[0].weight for a in range(50)])
    size = net[0].weight
    deviation = (stack - size) / (size if kind == "multiplicative" else size.square().mean().sqrt())
    assert deviation.std().item() == pytest.approx(scale, rel=0.05)


def test_frozen_weights_have_no_gradient_and_are_in_no_group(tmp_path):
    ensemble = embens.low_rank(mlp(), 4, rank=2, kind="additive", shared="frozen")
    assert not any(p.requires_grad for p in ensemble.shared_parameters())
    (group,) = ensemble.parameter_groups(0.1)
    assert {id(p) for p in group["params"]} == {id(p) for p in ensemble.individual_parameters()}
    assert group["weight_decay"] == 0
    before = [p.clone() for p in ensemble.shared_parameters()]
    x, y = torch.randn(30, 5), torch.arange(30) % 3
    history = embens.fit(ensemble, (x, y), epochs=30, batch_size=30, lr=0.3)
    assert history.epochs[-1]["loss"] < 0.9 * history.epochs[0]["loss"]
    assert all(torch.equal(a, b) for a, b in zip(before, ensemble.shared_parameters(), strict=True))
    ensemble.save(tmp_path / "e")
    loaded = embens.load(tmp_path / "e", mlp())
    assert not any(p.requires_grad for p in loaded.shared_parameters())
    torch.testing.assert_close(loaded(x), ensemble(x))


def test_gamma_follows_from_what_weights_have_in_common():
    assert embens.low_rank(mlp(), 4, kind="additive").natural_gamma == 1
    ensemble = embens.low_rank(mlp(), 4, scale=0.5)
    assert ensemble.overlap == pytest.approx(1.25**-2)
    shared, factors = ensemble.parameter_groups(0.1, 0.3, 1e-2)
    assert (factors["lr"], factors["weight_decay"]) == (0.3, 0)
    assert shared["lr"] == pytest.approx(0.1 * ensemble.natural_gamma / 4)


def test_last_layers_of_low_rank_collapse_to_the_mean():
    for kind in KINDS:
        ensemble = embens.low_rank(mlp(), 4, rank=2, kind=kind, scale=0.5, sites="last")
        x = torch.randn(6, 5)
        torch.testing.assert_close(ensemble.collapse()(x), ensemble(x).mean(0))
    with pytest.raises(ValueError, match="multiply each other"):
        embens.low_rank(mlp(), 4, rank=2).collapse()


@pytest.mark.filterwarnings("ignore:this network can't run several")
def test_attention_with_masks_is_right_by_rows_of_any_number():
    """A mask of (time, time) is no batch, even where time is a multiple of the members."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
            y, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
            return self.head(y.mean(1))

    ensemble = embens.low_rank(Masked(), 3, rank=2).eval()
    for rows in (1, 2, 6):
        x = torch.randn(rows, 6, 8)
        for a, output in enumerate(ensemble(x, chunk=3)):
            torch.testing.assert_close(output, ensemble.member(a)(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be at least 1; got 0"),
        ({"rank": 1.5}, "rank must be a whole number"),
        ({"rank": True}, "rank must be a whole number"),
        ({"rank": 17}, r"rank: 17 is above the size of '0', a weight of \(16, 5\). Take"),
        ({"rank": 4}, r"rank: 4 is above the size of '4', a weight of \(3, 16\)"),
        ({"rank": 6, "kind": "additive"}, "above the size of '0'"),
        ({"rank": 4, "sites": "last"}, "rank: 4 is above the size of '4'"),
        ({"kind": "additve"}, "kind: unknown 'additve'; did you mean 'additive'"),
        ({"shared": "fixed"}, "shared: unknown 'fixed'"),
        ({"scale": -1.0}, "scale"),
        ({"scale": float("nan")}, "scale"),
        ({"sites": "hiden"}, "did you mean 'hidden'"),
    ],
)
def test_what_makes_no_sense_is_an_error(options, message):
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    with pytest.raises((ValueError, TypeError), match=message):
        embens.low_rank(net, 3, **options)


def test_a_rank_that_is_not_given_is_at_most_that_of_the_layer():
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    assert [s.rank for s in embens.low_rank(net, 3).plan.low_rank] == [4, 4, 3]
    some = embens.low_rank(net, 3, rank=5, sites=["0", "2"])
    assert [s.rank for s in some.plan.low_rank] == [5, 5]


def test_weights_that_are_not_parameters_are_refused():
    net = mlp()
    torch.nn.utils.parametrizations.weight_norm(net[0])
    with pytest.raises(ValueError, match=r"'0' \(ParametrizedLinear\) has no weight"):
        embens.low_rank(net, 3, rank=2)


def test_the_limit_is_refused_with_a_reason_and_the_regime_read_from_the_plan():
    net = embens.networks.mlp(5, 16, 2, 3)
    with pytest.raises(TypeError, match=r"'0' \(Linear\) differs between members by matrices"):
        embens.theory.kernels(embens.low_rank(net, 3, rank=2), torch.randn(4, 5))
    report = embens.theory.regime(embens.low_rank(net, 3, rank=2, scale=1.0))
    assert report == embens.theory.Regime.COLLECTIVE
    assert report.coupling == pytest.approx(1 / 8)
    assert embens.theory.regime(embens.low_rank(net, 3, kind="additive")).coupling == 1


@every_kind
def test_empirical_kernels_count_the_factors(kind):
    torch.manual_seed(0)
    net = mlp(8).double()
    ensemble, x = embens.low_rank(net, 2, rank=2, kind=kind, scale=0.5), torch.randn(4, 5).double()
    found = embens.finite.ntk(ensemble, x, outputs="trace")
    factors = list(ensemble.individual_parameters())
    rows = [
        torch.autograd.grad(value, factors, retain_graph=True) for value in ensemble(x)[1].flatten()
    ]
    flat = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).view(4, 3, -1)
    torch.testing.assert_close(found.individual[1], torch.einsum("icp,jcp->ij", flat, flat))
    assert embens.finite.nngp(ensemble, x).shape == (2, 2, 4, 4)
    report = embens.diagnose(ensemble, x, torch.arange(4) % 3)
    assert report.family == "low_rank"


def test_autocast_and_unbatched_rows():
    for kind in KINDS:
        ensemble = embens.low_rank(mlp(), 3, rank=2, kind=kind, scale=0.5)
        x = torch.randn(5)
        for a, output in enumerate(ensemble(x)):
            torch.testing.assert_close(output, ensemble.member(a)(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert ensemble(x).dtype == torch.bfloat16
