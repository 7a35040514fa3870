"""The named families: what they are made of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import ARCHITECTURES, HandAttention, Residual, Tied
from torch import nn

import embens
from embens import laws
from embens.embedding.families import NEAR


def mlp(*tail: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2), *tail
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_batch_ensemble_is_shifted_trainable_and_hidden():
    ensemble = embens.batch_ensemble(mlp(), 4, p=0.6)
    assert {s.law for s in ensemble.plan.sites} == {laws.Shifted(0.6)}
    assert all(s.trainable and s.hidden for s in ensemble.plan.sites)
    assert len(ensemble.plan.sites) == 4
    assert ensemble.overlap == pytest.approx(0.6**4)
    assert ensemble.natural_gamma == pytest.approx(4 / (1 + 3 * 0.6**4))
    assert embens.batch_ensemble(mlp(), 4).natural_gamma == 4
    assert embens.batch_ensemble(mlp(), 4, p=1.0).natural_gamma == 1


def test_a_batch_ensemble_has_another_law_on_request():
    for kind in (laws.Signs, laws.Shifted):
        ensemble = embens.batch_ensemble(mlp(), 4, p=0.6, law=kind)
        assert {s.law for s in ensemble.plan.sites} == {kind(0.6)}
    with pytest.raises(TypeError, match=r"expected a kind of law, such as laws\.Signs; got Normal"):
        embens.batch_ensemble(mlp(), 4, law=laws.Normal())


def test_fixed_masks_stay_and_are_no_parameters():
    ensemble = embens.mc_dropout(mlp(), 4, law=laws.Bernoulli(0.5))
    assert {(s.kind, s.trainable) for s in ensemble.plan.sites} == {("post", False)}
    assert list(ensemble.individual_parameters()) == []
    x = torch.randn(5, 3)
    assert torch.equal(ensemble(x), ensemble(x))
    masks = [b for n, b in ensemble.state_dict().items() if n.endswith("values")]
    assert len(masks) == 2
    assert all(set(m.unique().tolist()) == {0.0, 1.0} for m in masks)


def test_fresh_masks_are_drawn_at_each_pass_from_the_global_generator():
    ensemble = embens.mc_dropout(mlp(), 4, law=laws.Bernoulli(0.5), fresh=True)
    x = torch.randn(5, 3)
    assert not torch.equal(ensemble(x), ensemble(x))
    assert not torch.equal(ensemble.eval()(x), ensemble(x))
    results = []
    for chunk in (1, 2, None):
        torch.manual_seed(3)
        results.append(ensemble(x, chunk=chunk))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])
    a, b, *_ = ensemble(x)
    assert not torch.equal(a, b)
    with pytest.raises(ValueError, match="belong to no member"):
        ensemble.member(0)
    with pytest.raises(ValueError, match="drawn anew"):
        ensemble.collapse()


def test_a_generator_decides_the_modulations_and_leaves_the_global_one_alone():
    state = torch.get_rng_state()
    first = embens.batch_ensemble(mlp(), 4, generator=generator(5))
    after = torch.get_rng_state()
    second = embens.batch_ensemble(mlp(), 4, generator=generator(5))
    values = [list(e.individual_parameters()) for e in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))
    torch.set_rng_state(state)
    mlp()
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
def test_last_layer_dropout_collapses_to_the_mean(case):
    reference, x = case.build().double().eval(), case.inputs(generator())
    x = x.double() if x.is_floating_point() else x
    ensemble = embens.last_layer_dropout(reference, 5, example_input=x)
    if case.name == "encoder layer, time first":
        with pytest.raises(ValueError, match="not linear in the output of 'linear2'"):
            ensemble.collapse()
        return
    collapsed = ensemble.collapse()
    torch.testing.assert_close(collapsed(x), ensemble(x).mean(0), rtol=1e-10, atol=1e-12)
    assert not any(type(m).__module__.startswith("embens.mod") for m in collapsed.modules())
    assert {n for n, _ in collapsed.named_parameters()} == {
        n for n, _ in reference.named_parameters()
    } or case.name == "tied"


def test_output_and_input_modulations_of_the_last_layer_collapse_too():
    ensemble = embens.embed(mlp(), 5, sites=["4"]).double()
    x = torch.randn(7, 3).double()
    torch.testing.assert_close(ensemble.collapse()(x), ensemble(x).mean(0))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: embens.batch_ensemble(mlp(), 3), "multiply each other"),
        (lambda: embens.independent(mlp(), 3), "separate networks"),
        (
            lambda: embens.last_layer_dropout(mlp(nn.LogSoftmax(-1)), 3),
            "not linear in the output of '4'",
        ),
        (lambda: embens.embed(mlp(), 3, sites=["0"]), "not linear in the output of '0'"),
        (lambda: embens.batch_ensemble(Residual(), 3), "tensors of their own"),
    ],
)
def test_an_ensemble_without_a_mean_network_says_why(make, reason):
    with pytest.raises(ValueError, match=reason):
        make().collapse()


def test_two_heads_collapse_when_added_but_not_when_multiplied():
    class Heads(nn.Module):
        def __init__(self, join):
            super().__init__()
            self.trunk, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)
            self.join = join

        def forward(self, x):
            h = torch.relu(self.trunk(x))
            return self.join(self.a(h), 3 * self.b(h))

    x = torch.randn(5, 3)
    added = embens.last_layer_dropout(Heads(torch.add), 4)
    torch.testing.assert_close(added.collapse()(x), added(x).mean(0))
    for join in (torch.mul, lambda a, b: a * b, lambda a, b: a / (b.exp() + 1), torch.maximum):
        with pytest.raises(ValueError, match="not linear"):
            embens.last_layer_dropout(Heads(join), 4).collapse()


def test_independent_members_are_drawn_by_their_layers_own_initialisation():
    reference = mlp()
    ensemble = embens.independent(reference, 200, generator=generator())
    assert list(ensemble.shared_parameters()) == []
    weight = ensemble.individuals["2"].module.weight.detach()
    assert weight.shape == (200, 16, 16)
    bound = 1 / 16**0.5
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert not torch.equal(weight[0], weight[1])
    again = embens.independent(reference, 200, generator=generator())
    assert torch.equal(weight, again.individuals["2"].module.weight)


def test_independent_members_of_our_networks_keep_their_law():
    reference = embens.networks.mlp(inputs=50, width=50, depth=2, outputs=3, weight_std=1.5)
    ensemble = embens.independent(reference, 20, generator=generator())
    weight = ensemble.individuals["2"].module.weight.detach()
    assert weight.std().item() == pytest.approx(1.0, rel=0.02)
    x = torch.randn(4, 50)
    torch.testing.assert_close(ensemble(x)[3], ensemble.member(3)(x))


def test_independent_members_behave_like_separate_networks_with_their_own_statistics():
    ensemble = embens.independent(Residual(), 3)
    alone = [ensemble.member(a) for a in range(3)]
    x = torch.randn(4, 3, 6, 6)
    for _ in range(2):
        outputs = ensemble(x)
        for a in range(3):
            torch.testing.assert_close(outputs[a], alone[a](x), rtol=1e-4, atol=1e-5)
    for a in range(3):
        torch.testing.assert_close(
            ensemble.member(a).blocks[0].norm1.running_mean, alone[a].blocks[0].norm1.running_mean
        )


def test_unknown_initialisations_are_asked_for():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.factor

    reference = nn.Sequential(Scale(), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"'0' \(Scale\) anew is not known.*Pass initialise="):
        embens.independent(reference, 2)

    def initialise(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.normal_(p)

    ensemble = embens.independent(reference, 2, initialise=initialise)
    assert not torch.equal(*ensemble.individuals["0"].module.factor)


def test_attention_can_be_independent():
    ensemble = embens.independent(HandAttention(), 2)
    x = torch.randn(3, 4, 8)
    torch.testing.assert_close(ensemble(x)[1], ensemble.member(1)(x))


@pytest.mark.parametrize("a", [3, -4, 1.0, True, "0"])
def test_a_member_that_is_not_there_is_an_error(a):
    with pytest.raises((IndexError, TypeError), match=r"member"):
        embens.batch_ensemble(mlp(), 3).member(a)


def test_negative_members_count_from_the_end():
    ensemble = embens.batch_ensemble(mlp(), 3)
    x = torch.randn(2, 3)
    assert torch.equal(ensemble.member(-1)(x), ensemble.member(2)(x))


def test_a_member_is_made_of_torchs_own_modules_and_shares_nothing():
    for case in ARCHITECTURES:
        ensemble = embens.batch_ensemble(case.build(), 2)
        member = ensemble.member(0)
        foreign = {type(m).__module__ for m in member.modules()}
        assert not {m for m in foreign if m.startswith("embens") and m != "embens.networks"}, case
        mine = {p.data_ptr() for p in ensemble.parameters()}
        assert not mine & {p.data_ptr() for p in member.parameters()}


def test_the_arguments_that_the_api_lists_can_be_given_by_position():
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    assert embens.batch_ensemble(mlp(), 2, 0.5).plan.sites[0].law == laws.Shifted(0.5)
    assert embens.mc_dropout(mlp(), 2, laws.Ternary(), True).plan.sites[0].fresh
    assert embens.last_layer_dropout(mlp(), 2, laws.Ternary()).plan.sites[0].law == laws.Ternary()
    ensemble = embens.embed(mlp(), 2, None, laws.Rademacher(), "last")
    assert [s.layer for s in ensemble.plan.sites] == ["4"]
    criterion = nn.functional.cross_entropy
    first = embens.objective(ensemble(x), y, criterion)
    second = ensemble.objective(ensemble(x), y, criterion)
    assert torch.equal(first, second)


class TestJointLaws:
    def test_masksembles_have_frozen_masks_with_their_overlap(self):
        ensemble = embens.masksembles(mlp(), 4, 0.25, generator=generator())
        assert embens.masksembles(mlp()).members == 4
        for site in ensemble.plan.sites:
            assert (site.kind, site.law, site.trainable) == ("post", laws.Masks(0.25), False)
        assert not list(ensemble.individual_parameters())
        assert ensemble.overlap == 0.25 ** len(ensemble.plan.sites)

    def test_disjoint_masks_have_orthogonal_gradients_of_inner_weights(self):
        reference = nn.Sequential(
            *(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        )
        ensemble = embens.mc_dropout(reference, 4, laws.Disjoint(), generator=generator())
        weight, gradients = ensemble.network[2].layer.weight, []
        for output in ensemble(torch.randn(6, 5, generator=generator())):
            gradients.append(torch.autograd.grad(output.sum(), weight, retain_graph=True)[0])
        flat = torch.stack(gradients).flatten(1)
        products = flat @ flat.T
        assert (products.diagonal() > 0).all()
        assert torch.equal(products, products.diagonal().diag())

    @pytest.mark.parametrize("law", [laws.Masks(), laws.Disjoint(), laws.Correlated(-0.2)])
    def test_can_be_trained_frozen_or_fresh_and_saved(self, law, tmp_path):
        reference, x = mlp(), torch.randn(3, 3, generator=generator())
        for options in ({"trainable": True}, {"trainable": False}, {"fresh": True}):
            ensemble = embens.embed(reference, 3, None, law, generator=generator(), **options)
            ensemble.save(tmp_path / "saved")
            loaded = embens.load(tmp_path / "saved", reference)
            assert [s.law for s in loaded.plan.sites] == [s.law for s in ensemble.plan.sites]
            if "fresh" in options:
                assert not torch.equal(ensemble(x), ensemble(x))
            else:
                assert torch.equal(loaded(x), ensemble(x))
                assert bool(list(ensemble.individual_parameters())) == options["trainable"]

    @pytest.mark.parametrize("fresh", [False, True])
    def test_that_cannot_be_drawn_are_refused_with_the_name_of_the_layer(self, fresh):
        reference = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))
        with pytest.raises(ValueError, match=r"post modulations of '2'.*4 members and 3 units"):
            embens.mc_dropout(reference, 4, laws.Disjoint(), fresh=fresh)
        with pytest.raises(ValueError, match=r"post modulations of '2'.*rho must be at least"):
            embens.mc_dropout(reference, 4, laws.Correlated(-0.5), fresh=fresh)

    def test_whose_mean_is_zero_for_ever_say_so(self):
        law, x = laws.Correlated(-1 / 3), torch.randn(3, 5, generator=generator())
        reference = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2, bias=False))
        with pytest.warns(UserWarning, match=r"mean of the members is 0 for ever.*rho above"):
            ensemble = embens.last_layer_dropout(reference, 4, law)
        assert ensemble(x).mean(0).abs().max() < 1e-5
        embens.last_layer_dropout(reference, 4, law, trainable=True)  # these say nothing
        embens.last_layer_dropout(reference, 4, laws.Correlated(-0.2))
        embens.mc_dropout(mlp(), 4, law)

    def test_have_a_gamma_of_the_faster_mode(self):
        for rho, expected in ((0.5, 4 / 2.5), (0.0, 4.0), (-0.2, 4 / 1.2), (-1 / 3, 3.0)):
            reference = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
            ensemble = embens.embed(reference, 4, None, laws.Correlated(rho))
            assert ensemble.natural_gamma == pytest.approx(expected)


class TestOwnLayers:
    def test_are_whole_copies_that_the_rest_knows_nothing_of(self):
        reference = mlp()
        ensemble = embens.embed(reference, 3, None, None, own="last", generator=generator())
        x = torch.randn(5, 3)
        weight, bias = ensemble.network[4].module.weight, ensemble.network[4].module.bias
        features = reference[:4](x)
        for a, output in enumerate(ensemble(x)):
            torch.testing.assert_close(output, features @ weight[a].T + bias[a])
        assert [tuple(p.shape) for p in ensemble.individual_parameters()] == [(3, 2, 16), (3, 2)]
        assert torch.equal(ensemble.network[0].module.weight, reference[0].weight)
        assert not ensemble.plan.sites

    def test_are_drawn_by_the_generator_or_copied_or_drawn_by_a_function(self):
        def make(weights="drawn", seed=0):
            return embens.batch_ensemble(net, 3, own="last", generator=generator(seed))

        net = mlp()
        one, two, other = (make(seed=s).network[4].module.weight for s in (0, 0, 1))
        assert torch.equal(one, two)
        assert not torch.equal(one, other)
        assert one.flatten(1).unique(dim=0).shape[0] == 3
        assert one.abs().max() <= 0.25, "torch's own law"
        copied = embens.embed(net, 3, own="last", own_weights="copied")
        assert torch.equal(copied.network[4].module.weight[2], net[4].weight)
        zeros = embens.embed(net, 3, own="last", own_weights=lambda m: m.weight.data.zero_())
        assert not zeros.network[4].module.weight.any()
        with pytest.raises(ValueError, match="own_weights: unknown 'copy'; did you mean 'copied'"):
            embens.embed(net, 3, own="last", own_weights="copy")

    @pytest.mark.parametrize(
        ("own", "expected"),
        [
            ("last", {"head"}),
            ("blocks.1", {f"blocks.1.{n}" for n in ("conv1", "norm1", "conv2", "norm2", "skip")}),
            ("blocks.1.c*", {"blocks.1.conv1", "blocks.1.conv2"}),
            (["head", "stem"], {"head", "stem"}),
        ],
    )
    def test_are_named_by_layers_modules_and_wildcards(self, own, expected):
        ensemble = embens.embed(Residual(), 3, None, None, own=own)
        drawn = {o.module for o in ensemble.plan.own if o.drawn}
        assert drawn == expected
        x = torch.randn(2, 3, 6, 6)
        outputs = ensemble.eval()(x)
        for a in range(3):
            torch.testing.assert_close(outputs[a], ensemble.member(a)(x), rtol=1e-4, atol=1e-5)

    def test_have_no_sites(self):
        ensemble = embens.batch_ensemble(mlp(), 3, own="last")
        assert {(s.layer, s.kind) for s in ensemble.plan.sites} == {
            ("0", "pre"), ("2", "pre"), ("2", "post"),
        }  # fmt: skip
        for options in ({"post": {"4": laws.Normal()}}, {"sites": ["2", "4"]}):
            with pytest.raises(ValueError, match="'4' is a layer of each member's own"):
                embens.embed(mlp(), 3, own="last", **options)

    def test_a_network_of_one_layer_becomes_separate_ones(self):
        ensemble = embens.embed(nn.Linear(3, 2), 4, own="last", pre=None, post=None)
        assert not list(ensemble.shared_parameters())

    @pytest.mark.parametrize(
        ("own", "message"),
        [
            ("heda", "own: 'heda' matches no layer; did you mean 'head'"),
            ("blocks.7.*", "matches no layer"),
            ("", "own: .. matches no layer"),
            (3, "own must be 'last', or names"),
            ([3], "own must be 'last', or names"),
        ],
    )
    def test_that_are_not_there_get_an_error(self, own, message):
        with pytest.raises((ValueError, TypeError), match=message):
            embens.embed(Residual(), 3, own=own)

    def test_of_an_unknown_kind_get_an_error(self):
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

            def forward(self, x):
                return self.layer(x) * self.scale

        net = nn.Sequential(nn.Linear(3, 3), Block())
        with pytest.raises(ValueError, match=r"'1' holds '1' \(Block\), which is no known layer"):
            embens.embed(net, 3, own="1")
        embens.embed(net, 3, own="1.*")

    def test_that_share_a_weight_with_others_get_an_error(self):
        with pytest.raises(
            ValueError, match=r"'output' has a weight in common with 'embedding'.*shared"
        ):
            embens.embed(Tied(), 3, own="output")
        ensemble = embens.embed(Tied(), 3, None, None, own=["output", "embedding"])
        x = torch.randint(7, (3, 4))
        torch.testing.assert_close(ensemble(x)[1], ensemble.member(1)(x))
        member = ensemble.member(1)
        assert member.output.weight is member.embedding.weight

    def test_that_have_a_parametrization_get_an_error(self):
        net = mlp()
        torch.nn.utils.parametrizations.weight_norm(net[4])
        with pytest.raises(ValueError, match="own: '4' has a parametrization"):
            embens.embed(net, 3, own="last")

    @pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
    def test_at_the_end_collapse_to_the_mean(self, case):
        reference, x = case.build().double().eval(), case.inputs(generator())
        x = x.double() if x.is_floating_point() else x
        if case.name in ("encoder layer, time first", "tied"):
            return
        ensemble = embens.embed(reference, 5, None, None, own="last", example_input=x)
        torch.testing.assert_close(ensemble.collapse()(x), ensemble(x).mean(0))

    def test_elsewhere_do_not(self):
        with pytest.raises(ValueError, match="not linear in the output of '2'"):
            embens.embed(mlp(), 3, None, None, own="2").collapse()
        with pytest.raises(ValueError, match=r"the weights of '\d' and '\d' multiply each other"):
            embens.embed(mlp(), 3, own="last").collapse()

    def test_are_a_group_with_the_rate_and_decay_of_weights(self):
        ensemble = embens.batch_ensemble(mlp(), 4, p=0.5, own="last")
        shared, modulations, own = ensemble.parameter_groups(0.1, 0.5, 1e-3)
        assert {tuple(p.shape) for p in own["params"]} == {(4, 2, 16), (4, 2)}
        assert (own["lr"], own["weight_decay"], own["gamma_factor"]) == (0.1, 1e-3, 1.0)
        assert modulations["lr"] == 0.5
        assert shared["lr"] == pytest.approx(0.1), "gamma = M, because members are independent"

    def test_at_the_end_make_members_independent_unless_they_are_copies(self):
        drawn = embens.batch_ensemble(mlp(), 4, p=0.5, own="last")
        assert (drawn.overlap, drawn.natural_gamma) == (0, 4)
        copied = embens.embed(mlp(), 4, None, None, own="last", own_weights="copied")
        assert (copied.overlap, copied.natural_gamma) == (1, 1)
        hidden = embens.embed(mlp(), 4, None, None, own="2")
        assert (hidden.overlap, hidden.natural_gamma) == (1, 1)


class Odd(nn.Module):
    """A reference with two layers and a forward to choose."""

    def __init__(self, forward):
        super().__init__()
        self.first, self.last, self.run = nn.Linear(4, 4), nn.Linear(4, 2), forward

    def forward(self, x):
        return self.run(self, x)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.last = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, z):
        return self.last(torch.relu(self.a(x) + self.b(z)))


ODD = {
    "skips the first layers: 'add'": Odd(lambda m, x: m.last(m.first(x) + x)),
    "skips the first layers: 'cat'": Odd(lambda m, x: torch.cat([m.last(m.first(x)), x], 1)),
    "skips the first layers: 'mul'": Odd(
        lambda m, x: m.last(m.first(x)) * F.avg_pool1d(x, 4).sigmoid()
    ),
    "has 2 outputs": Odd(lambda m, x: (m.last(m.first(x)), m.first(x))),
    "called several times": Odd(lambda m, x: m.last(m.first(x[:, :4]) + m.first(x[:, 4:]))),
    "takes several inputs": TwoInputs(),
    "come before other layers": nn.Sequential(nn.Linear(3, 2), nn.ReLU()),
    "no plain sum": nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.ReLU(), nn.Linear(4, 2)),
    "pass example_input": Odd(lambda m, x: m.last(m.first(x)) if x.sum() > 0 else m.last(x)),
}


@pytest.mark.parametrize(("reason", "reference"), ODD.items(), ids=ODD)
def test_a_reference_that_can_not_take_an_input_for_every_member_is_refused(reason, reference):
    with pytest.raises(ValueError, match=f"an input for every member: .*{reason}"):
        embens.mimo(reference, 3)


def test_a_reference_is_read_from_an_example_where_its_code_does_not_tell():
    branches = Odd(lambda m, x: m.last(m.first(x if x.sum() > 0 else -x)))
    x = torch.ones(5, 4)
    ensemble = embens.mimo(branches, 3, example_input=x)
    expected = torch.stack([ensemble.member(a)(x) for a in range(3)])
    torch.testing.assert_close(ensemble(x), expected)
    skipping = Odd(lambda m, x: m.last(m.first(x) + (x if x.sum() > 0 else 0)))
    with pytest.raises(ValueError, match="skips the first layers"):
        embens.mimo(skipping, 3, example_input=x)
    with pytest.raises(ValueError, match="several inputs"):
        embens.mimo(TwoInputs(), 3, example_input=(torch.ones(2, 3), torch.ones(2, 3)))


def test_positions_are_shared_where_tokens_have_a_table_for_each_member():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(7, 4), nn.Embedding(5, 4)
            self.last = nn.Linear(4, 2)

        def forward(self, x):
            places = self.positions(torch.arange(5))
            return self.last(torch.tanh(self.tokens(x) + places).mean(1))

    ensemble = embens.mimo(Positions(), 3)
    assert ensemble.plan.heads.first == ("tokens",)
    x = torch.randint(7, (3, 6, 5))
    tables = ensemble.individuals["tokens"].tensors()["weight"]
    z = sum(table[rows] for table, rows in zip(tables, x, strict=True))
    z = torch.tanh(z + ensemble.network.positions.weight).mean(1)
    weight, bias = ensemble.individuals["last"].tensors().values()
    expected = torch.einsum("aoi,bi->abo", weight, z) + bias[:, None]
    torch.testing.assert_close(ensemble(x, batch="own"), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": 0}, "members must be at least 1"),
        ({"repetition": 1.5}, "repetition must be a fraction"),
        ({"repetition": -0.1}, "repetition must be a fraction"),
        ({"mix": "linar"}, "did you mean 'linear'"),
    ],
)
def test_bad_arguments_of_mimo_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        embens.mimo(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), **options)


def test_a_generator_decides_blocks_and_heads():
    reference = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    one, two = (embens.mimo(reference, 3, generator=torch.Generator().manual_seed(5)) for _ in "ab")
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


class TestJoin:
    def test_members_are_the_networks(self, tmp_path):
        layers = lambda: (nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))  # noqa: E731
        networks = [nn.Sequential(*layers()) for _ in range(3)]
        x = torch.randn(6, 4)
        for network in networks:
            network(torch.randn(9, 4))  # statistics of their own
            network.eval()
        ensemble = embens.join(networks)
        outputs = torch.stack([network(x) for network in networks])
        torch.testing.assert_close(ensemble(x), outputs)
        torch.testing.assert_close(ensemble.member(1)(x), outputs[1])
        ensemble.save(tmp_path / "file")
        torch.testing.assert_close(embens.load(tmp_path / "file", networks[0])(x), outputs)
        assert ensemble.plan.family == "independent"

    def test_networks_of_other_architectures_are_refused_by_name(self):
        def net(width=5, activation=nn.Tanh, dropout=0.1):
            layers = nn.Linear(4, width), activation(), nn.Dropout(dropout), nn.Linear(width, 2)
            return nn.Sequential(*layers)

        for other, name in (
            (net(6), "'0.out_features' is 6 there, not 5"),
            (net(activation=nn.ReLU), "'1' is ReLU there"),
            (net(dropout=0.2), r"'2.p' is 0.2"),
            (net().double(), "float64"),
        ):
            with pytest.raises(ValueError, match=rf"networks\[1\] is of another.*{name}"):
                embens.join([net(), other])
        with pytest.raises(TypeError, match="list of networks"):
            embens.join([])
        with pytest.raises(TypeError, match="list of networks"):
            embens.join(net())


def trained_cnn() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 8, 3)),
        *(nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
    )
    net(torch.randn(20, 3, 6, 6))  # running statistics that are not the initial ones
    return net.eval()


@pytest.mark.parametrize("by", ["modulations", "low_rank", "head"])
@pytest.mark.parametrize("trunk", ["trained", "frozen"])
@pytest.mark.parametrize("head", ["drawn", "copied", "shared"])
def test_adapted_members_begin_near_a_trained_network_and_train_what_was_asked(by, trunk, head):
    net, x = trained_cnn(), torch.randn(7, 3, 6, 6)
    if by == "head" and head != "drawn":
        with pytest.raises(ValueError, match="members would begin equal and stay so"):
            embens.adapt(net, 3, by=by, head=head)
        return
    ensemble = embens.adapt(net, 3, by=by, trunk=trunk, head=head, generator=generator())
    before, reference = ensemble(x), net(x)
    assert ensemble.plan.frozen == (trunk == "frozen")
    assert ensemble.plan.pretrained
    if head != "drawn":
        size = reference.std()
        assert (before - reference).abs().max() < (1e-5 if by == "low_rank" else size)
    for a in range(3):
        torch.testing.assert_close(ensemble.member(a)(x), before[a])
    shared = [p.detach().clone() for p in ensemble.shared_parameters()]
    embens.fit(ensemble, (x, torch.arange(7) % 5), epochs=2, batch_size=7, lr=0.1, progress=False)
    after = ensemble.eval()(x)
    assert all(not torch.allclose(after[a], before[a]) for a in range(3))
    assert not torch.allclose(after[0], after[1])
    same = [torch.equal(*pair) for pair in zip(ensemble.shared_parameters(), shared, strict=True)]
    assert all(same) == (trunk == "frozen")


def test_the_spread_of_adapted_members_falls_with_the_number_of_modulated_inputs():
    def spread(depth: int) -> float:
        hidden = [layer for _ in range(depth) for layer in (nn.Linear(9, 9), nn.ReLU())]
        net = nn.Sequential(*hidden, nn.Linear(9, 2))
        ensemble = embens.adapt(net, 4, by="modulations", head="copied")
        assert ensemble.overlap == pytest.approx(NEAR)
        return ensemble.plan.sites[0].law.std

    assert spread(2) > spread(3) > spread(9)
    assert spread(5) ** 2 == pytest.approx(NEAR ** (-1 / 4) - 1)


def test_matrices_of_low_rank_leave_layers_of_the_members_own_alone():
    net, x = mlp(), torch.randn(5, 3)
    ensemble = embens.low_rank(net, 3, kind="additive", shared="frozen", own="last")
    assert [site.layer for site in ensemble.plan.low_rank] == ["0", "2"]
    torch.testing.assert_close(ensemble(x)[1], ensemble.member(1)(x))
    features, head = net[:4](x), ensemble.member(1)[4]
    torch.testing.assert_close(ensemble(x)[1], head(features))
    assert not torch.equal(head.weight, net[4].weight)
