"""The named families: laws, sites, what is trained, and special properties."""

import pytest
import torch
from cases import ARCHITECTURES, HandAttention, Residual
from torch import nn

import embens
from embens import laws
from embens.families import NEAR
from embens.sites import find_layers


def mlp(*tail: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2), *tail
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(case) -> tuple[nn.Module, torch.Tensor]:
    reference, x = case.build().double().eval(), case.inputs(generator())
    return reference, x.double() if x.is_floating_point() else x


every_case = pytest.mark.parametrize("case", ARCHITECTURES, ids=str)


# BatchEnsemble and dropout


def test_a_batch_ensemble_has_trainable_signs_at_hidden_sites():
    ensemble = embens.batch_ensemble(mlp(), 4, p=0.6)
    assert {site.law for site in ensemble.spec.sites} == {laws.Signs(0.6)}
    assert all(site.trainable and site.hidden for site in ensemble.spec.sites)
    assert len(ensemble.spec.sites) == 4
    assert ensemble.spec.family == "batch_ensemble"
    assert ensemble.overlap == pytest.approx(0.6**4)
    assert ensemble.natural_gamma == pytest.approx(4 / (1 + 3 * 0.6**4))
    assert embens.batch_ensemble(mlp(), 4).natural_gamma == 4
    assert embens.batch_ensemble(mlp(), 4, p=1.0).natural_gamma == 1


def test_a_batch_ensemble_takes_another_class_of_laws():
    ensemble = embens.batch_ensemble(mlp(), 4, p=0.6, law=laws.Shifted)
    assert {site.law for site in ensemble.spec.sites} == {laws.Shifted(0.6)}
    with pytest.raises(TypeError, match=r"a class of laws such as laws\.Signs, got Normal"):
        embens.batch_ensemble(mlp(), 4, law=laws.Normal())
    with pytest.raises(TypeError, match=r"a class of laws such as laws\.Signs, got 'signs'"):
        embens.batch_ensemble(mlp(), 4, law="signs")


def test_fixed_masks_stay_and_are_not_parameters():
    ensemble = embens.mc_dropout(mlp(), 4, law=laws.Bernoulli(0.5), fresh=False)
    assert {(site.kind, site.trainable) for site in ensemble.spec.sites} == {("post", False)}
    assert list(ensemble.individual_parameters()) == []
    x = torch.randn(5, 3)
    assert torch.equal(ensemble(x), ensemble(x))
    masks = [ensemble.site_values(site) for site in ensemble.spec.sites]
    assert len(masks) == 2
    for mask in masks:
        assert set(mask.unique().tolist()) == {0.0, 1.0}
        assert not mask.requires_grad


def test_fresh_masks_are_drawn_at_each_pass_from_the_global_generator():
    ensemble = embens.mc_dropout(mlp(), 4, law=laws.Bernoulli(0.5))
    x = torch.randn(5, 3)
    assert not torch.equal(ensemble(x), ensemble(x))
    assert not torch.equal(ensemble.eval()(x), ensemble(x))
    results = []
    for chunk in (1, 2, None):
        torch.manual_seed(3)
        results.append(ensemble(x, chunk=chunk))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])
    assert not torch.equal(results[0][0], results[0][1])
    assert not list(ensemble.individual_parameters())
    with pytest.raises(ValueError, match="belong to no member"):
        ensemble.member(0)
    with pytest.raises(ValueError, match="drawn at each pass"):
        ensemble.collapse()
    with pytest.raises(ValueError, match="drawn at each pass"):
        ensemble.site_values(ensemble.spec.sites[0])


def test_the_mean_over_fresh_masks_is_that_of_independent_draws():
    reference = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 1, bias=False)).double()
    ensemble = embens.mc_dropout(reference, 4000, law=laws.Bernoulli(0.5))
    x = torch.randn(1, 3, dtype=torch.float64)
    torch.manual_seed(0)
    outputs = ensemble(x).flatten()
    terms = reference[1].weight[0] * reference[0](x)[0]
    variance = 0.25 * terms.square().sum().item()

    assert abs(outputs.mean() - 0.5 * terms.sum()) < 4 * (variance / 4000) ** 0.5
    assert outputs.var().item() == pytest.approx(variance, rel=0.1)


def test_the_defaults_of_dropout_are_bernoulli_masks():
    assert embens.mc_dropout(mlp()).spec.sites[0].law == laws.Bernoulli(0.9)
    assert embens.mc_dropout(mlp()).spec.sites[0].fresh
    last = embens.last_layer_dropout(mlp())
    assert [(site.key, site.law) for site in last.spec.sites] == [("4.post", laws.Bernoulli(0.9))]
    assert not last.spec.sites[0].trainable


def test_listed_arguments_can_be_passed_by_position():
    assert embens.batch_ensemble(mlp(), 2, 0.5).spec.sites[0].law == laws.Signs(0.5)
    assert embens.mc_dropout(mlp(), 2, laws.Ternary(), False).spec.sites[0].law == laws.Ternary()
    assert embens.last_layer_dropout(mlp(), 2, laws.Ternary()).spec.sites[0].law == laws.Ternary()
    assert embens.masksembles(mlp(), 2, 0.25).spec.sites[0].law == laws.Masks(0.25)
    low_rank = embens.low_rank(mlp(), 2, 1, "additive", "frozen")
    assert low_rank.spec.low_rank[0].rank == 1
    assert low_rank.spec.frozen


@every_case
def test_last_layer_dropout_collapses_to_the_mean(case):
    reference, x = build(case)
    ensemble = embens.last_layer_dropout(reference, 5, laws.Normal(), example_input=x)
    if case.name == "encoder layer, time first":
        with pytest.raises(ValueError, match="not linear in the output of 'linear2'"):
            ensemble.collapse()
        return
    collapsed = ensemble.collapse()
    torch.testing.assert_close(collapsed(x), ensemble(x).mean(0), rtol=1e-10, atol=1e-12)
    for module in collapsed.modules():
        home = type(module).__module__
        assert not home.startswith("embens") or home == "embens.networks"


# Joint laws


def test_masksembles_have_fixed_masks_with_their_overlap():
    ensemble = embens.masksembles(mlp(), 4, 0.25, generator=generator())
    assert embens.masksembles(mlp()).members == 4
    for site in ensemble.spec.sites:
        assert (site.kind, site.law, site.trainable) == ("post", laws.Masks(0.25), False)
    assert not list(ensemble.individual_parameters())
    assert ensemble.overlap == 0.25 ** len(ensemble.spec.sites)


def test_disjoint_masks_have_orthogonal_gradients_of_inner_weights():
    ensemble = embens.mc_dropout(mlp(), 4, laws.Disjoint(), fresh=False, generator=generator())
    weight, gradients = ensemble.reference[2].weight, []
    for output in ensemble(torch.randn(6, 3, generator=generator())):
        gradients.append(torch.autograd.grad(output.sum(), weight, retain_graph=True)[0])
    flat = torch.stack(gradients).flatten(1)
    products = flat @ flat.T

    assert (products.diagonal() > 0).all()
    assert torch.equal(products, products.diagonal().diag())


@pytest.mark.parametrize("fresh", [False, True])
def test_joint_laws_that_cannot_be_drawn_raise_with_the_name_of_the_layer(fresh):
    reference = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"post modulations of '2'.*4 members and 3 units"):
        embens.mc_dropout(reference, 4, laws.Disjoint(), fresh=fresh)
    with pytest.raises(ValueError, match=r"post modulations of '2'.*rho must be at least"):
        embens.mc_dropout(reference, 4, laws.Correlated(-0.5), fresh=fresh)


def test_gamma_of_anticorrelated_members_is_that_of_the_faster_mode():
    reference = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
    for rho, expected in ((0.5, 4 / 2.5), (0.0, 4.0), (-0.2, 4 / 1.2), (-1 / 3, 3.0)):
        ensemble = embens.embed(reference, 4, None, laws.Correlated(rho))
        assert ensemble.natural_gamma == pytest.approx(expected)


# Independent networks


def test_independent_members_are_drawn_by_the_initialisation_of_their_layers():
    reference = mlp()
    ensemble = embens.independent(reference, 200, generator=generator())
    assert list(ensemble.shared_parameters()) == []
    assert ensemble.spec.separate
    weight = ensemble.individual["2.weight"].detach()
    assert weight.shape == (200, 16, 16)
    bound = 1 / 16**0.5
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert not torch.equal(weight[0], weight[1])
    again = embens.independent(reference, 200, generator=generator())
    assert torch.equal(weight, again.individual["2.weight"])


def test_independent_members_of_our_networks_keep_their_distribution():
    reference = embens.networks.mlp(inputs=50, width=50, depth=2, outputs=3, weight_std=1.5)
    ensemble = embens.independent(reference, 20, generator=generator())
    assert ensemble.individual["2.weight"].std().item() == pytest.approx(1.0, rel=0.02)
    x = torch.randn(4, 50)
    torch.testing.assert_close(ensemble(x)[3], ensemble.member(3)(x))


def test_independent_members_behave_like_separate_networks_with_their_statistics():
    ensemble = embens.independent(Residual(), 3)
    members = [ensemble.member(a) for a in range(3)]
    x = torch.randn(4, 3, 6, 6)
    for _ in range(2):
        outputs = ensemble(x)
        for a in range(3):
            torch.testing.assert_close(outputs[a], members[a](x), rtol=1e-4, atol=1e-5)
    for a in range(3):
        running_mean = ensemble.member(a).blocks[0].norm1.running_mean
        torch.testing.assert_close(running_mean, members[a].blocks[0].norm1.running_mean)


class Scale(nn.Module):
    """A module whose initialisation is unknown."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.factor


def test_modules_without_reset_parameters_need_an_initialisation():
    reference = nn.Sequential(Scale(), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"'0' \(Scale\) cannot be reinitialised.*initialise="):
        embens.independent(reference, 2)

    def initialise(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter)

    ensemble = embens.independent(reference, 2, initialise=initialise)
    first, second = ensemble.individual["0.factor"]
    assert not torch.equal(first, second)


def test_a_reference_without_parameters_has_no_independent_members():
    with pytest.raises(ValueError, match="has no parameters"):
        embens.independent(nn.ReLU(), 2)


def test_attention_can_be_independent():
    ensemble = embens.independent(HandAttention(), 2)
    x = torch.randn(3, 4, 8)
    torch.testing.assert_close(ensemble(x)[1], ensemble.member(1)(x))


@every_case
def test_independent_networks_have_every_parameter_separately(case):
    reference = case.build()
    ensemble = embens.independent(reference, 2)
    assert list(ensemble.shared_parameters()) == []
    count = sum(p.numel() for p in reference.parameters())
    assert sum(p.numel() for p in ensemble.parameters()) == 2 * count


def test_tied_weights_stay_tied_in_independent_networks():
    class TiedCoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.decoder.weight = self.encoder.weight

        def forward(self, x):
            return self.decoder(torch.tanh(self.encoder(x)))

    ensemble = embens.independent(TiedCoder(), 3)
    assert sum(p.numel() for p in ensemble.parameters()) == 3 * 16
    x = torch.randn(5, 4)
    for chunk in (1, 3):
        for a, output in enumerate(ensemble(x, chunk=chunk)):
            torch.testing.assert_close(output, ensemble.member(a)(x))
    member = ensemble.member(0)
    assert member.decoder.weight is member.encoder.weight


# Low-rank members


every_kind = pytest.mark.parametrize("kind", ["multiplicative", "additive"])


def build_low_rank(case, kind, **options):
    reference, x = build(case)
    ensemble = embens.low_rank(
        reference, 3, rank=2, kind=kind, example_input=x, generator=generator(1), **options
    )
    return reference, ensemble, x


@every_case
@every_kind
def test_weights_of_a_low_rank_member_are_those_of_the_definition(case, kind):
    reference, ensemble, x = build_low_rank(case, kind, scale=0.7)
    member = ensemble.member(1)
    layers = find_layers(reference)
    assert [site.layer for site in ensemble.spec.low_rank] == list(layers)
    for name, layer in layers.items():
        shared = layer.matrix(reference.get_submodule(layer.module))
        weight = layer.matrix(member.get_submodule(layer.module))
        left, right = ensemble.individual[f"{name}.left"], ensemble.individual[f"{name}.right"]
        delta = (left[1] @ right[1]).reshape(shared.shape)
        expected = shared * (1 + delta) if kind == "multiplicative" else shared + delta
        torch.testing.assert_close(weight, expected)
        assert not torch.equal(weight, shared)
    torch.testing.assert_close(ensemble(x)[1], member(x))


@every_kind
def test_without_deviations_members_equal_the_reference_but_the_factors_learn(kind):
    reference, x = mlp().double(), torch.randn(5, 3).double()
    ensemble = embens.low_rank(reference, 3, rank=2, kind=kind, scale=0)
    for output in ensemble(x):
        torch.testing.assert_close(output, reference(x))
    ensemble(x).square().sum().backward()
    gradients = []
    for site in ensemble.spec.low_rank:
        left = ensemble.individual[f"{site.layer}.left"]
        assert not left.any()
        gradients.append(left.grad)
    assert any(not torch.equal(gradient[0], gradient[1]) for gradient in gradients)


@pytest.mark.parametrize("rows", [1, 2, 40, 300])
@pytest.mark.parametrize("parametrization", ["torch", "ntk"])
def test_additive_members_agree_for_few_and_for_many_rows(rows, parametrization):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(5, 48), nn.Tanh(), nn.Linear(48, 3))
    if parametrization == "ntk":
        reference = embens.networks.mlp(5, 48, 2, 3, bias_std=0.3)
    ensemble = embens.low_rank(reference.double(), 3, rank=3, kind="additive", scale=0.5)
    x = torch.randn(rows, 5).double()
    expected = torch.stack([ensemble.member(a)(x) for a in range(3)])

    for chunk in (1, 3):
        torch.testing.assert_close(ensemble(x, chunk=chunk), expected)


@every_kind
@pytest.mark.parametrize("scale", [0.3, 1.0])
def test_the_scale_is_the_relative_size_of_deviations(kind, scale):
    reference = nn.Sequential(nn.Linear(5, 200), nn.Tanh(), nn.Linear(200, 3))
    ensemble = embens.low_rank(reference, 50, 3, kind, scale=scale, generator=generator())
    weights = torch.stack([ensemble.member(a)[0].weight for a in range(50)])
    weight = reference[0].weight
    size = weight if kind == "multiplicative" else weight.square().mean().sqrt()

    assert ((weights - weight) / size).std().item() == pytest.approx(scale, rel=0.05)


def test_frozen_weights_have_no_gradient_and_are_in_no_group(tmp_path):
    ensemble = embens.low_rank(mlp(), 4, rank=2, kind="additive", shared="frozen")
    assert not any(p.requires_grad for p in ensemble.shared_parameters())
    (group,) = ensemble.parameter_groups(0.1)
    assert {id(p) for p in group["params"]} == {id(p) for p in ensemble.individual_parameters()}
    assert group["weight_decay"] == 0
    ensemble.save(tmp_path / "ensemble")
    loaded = embens.load(tmp_path / "ensemble", mlp())
    assert not any(p.requires_grad for p in loaded.shared_parameters())
    x = torch.randn(30, 3)
    torch.testing.assert_close(loaded(x), ensemble(x))


def test_gamma_of_low_rank_members_follows_from_their_scale():
    reference = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    assert embens.low_rank(reference, 4, kind="additive").natural_gamma == 1
    ensemble = embens.low_rank(reference, 4, scale=0.5)
    assert ensemble.overlap == pytest.approx(1.25**-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be a positive integer, got 0"),
        ({"rank": 1.5}, "rank must be a positive integer, got 1.5"),
        ({"rank": True}, "rank must be a positive integer, got True"),
        ({"kind": "additve"}, "kind: unknown 'additve'; did you mean 'additive'"),
        ({"shared": "fixed"}, "shared: unknown 'fixed'"),
        ({"scale": -1.0}, "scale must be finite and not negative, got -1.0"),
        ({"scale": float("nan")}, "scale must be finite"),
        ({"sites": "hiden"}, "did you mean 'hidden'"),
    ],
)
def test_invalid_options_of_low_rank_raise(options, message):
    with pytest.raises(ValueError, match=message):
        embens.low_rank(mlp(), 3, **options)


def test_the_rank_is_at_most_that_of_the_layer():
    assert [site.rank for site in embens.low_rank(mlp(), 3).spec.low_rank] == [3, 4, 2]
    assert [site.rank for site in embens.low_rank(mlp(), 3, rank=17).spec.low_rank] == [3, 16, 2]


def test_low_rank_members_leave_per_member_layers_alone():
    reference, x = mlp(), torch.randn(5, 3)
    ensemble = embens.low_rank(reference, 3, kind="additive", shared="frozen", own="last")
    assert [site.layer for site in ensemble.spec.low_rank] == ["0", "2"]
    head = ensemble.member(1)[4]
    torch.testing.assert_close(ensemble(x)[1], head(reference[:4](x)))
    assert not torch.equal(head.weight, reference[4].weight)


def test_layers_without_a_weight_matrix_have_no_low_rank_members():
    reference = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"'0' \(Embedding\) has no weight matrix"):
        embens.low_rank(reference, 3, rank=2)


def test_low_rank_members_run_under_autocast_and_without_a_batch():
    for kind in ("multiplicative", "additive"):
        ensemble = embens.low_rank(mlp(), 3, rank=2, kind=kind, scale=0.5)
        x = torch.randn(3)
        for a, output in enumerate(ensemble(x)):
            torch.testing.assert_close(output, ensemble.member(a)(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert ensemble(x).dtype == torch.bfloat16


# Members near a trained network


def trained_cnn() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    net(torch.randn(20, 3, 6, 6))  # gives the norm its running statistics
    return net.eval()


@pytest.mark.parametrize("by", ["modulations", "low_rank", "head"])
@pytest.mark.parametrize("trunk", ["trained", "frozen"])
@pytest.mark.parametrize("head", ["drawn", "copied", "shared"])
def test_adapted_members_begin_near_the_network_and_train_what_was_asked(by, trunk, head):
    reference, x = trained_cnn(), torch.randn(7, 3, 6, 6)
    if by == "head" and head != "drawn":
        with pytest.raises(ValueError, match="makes all members equal"):
            embens.adapt(reference, 3, by=by, head=head)
        return
    ensemble = embens.adapt(reference, 3, by=by, trunk=trunk, head=head, generator=generator())
    before, expected = ensemble(x).detach(), reference(x)
    assert ensemble.spec.frozen == (trunk == "frozen")
    assert ensemble.spec.pretrained
    if head != "drawn":
        bound = 1e-5 if by == "low_rank" else expected.std()
        assert (before - expected).abs().max() < bound
    shared = [p.detach().clone() for p in ensemble.shared_parameters()]
    optimizer = torch.optim.SGD(ensemble.parameter_groups(lr=0.1), momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        ensemble.objective(ensemble(x), torch.arange(7) % 5).backward()
        optimizer.step()
    after = ensemble(x)
    for a in range(3):
        assert not torch.allclose(after[a], before[a])
    assert not torch.allclose(after[0], after[1])
    unchanged = []
    for parameter, start in zip(ensemble.shared_parameters(), shared, strict=True):
        unchanged.append(torch.equal(parameter, start))
    assert all(unchanged) == (trunk == "frozen")


def test_the_spread_of_adapted_members_falls_with_the_number_of_modulated_inputs():
    def spread(depth: int) -> float:
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(9, 9), nn.ReLU()]
        reference = nn.Sequential(*layers, nn.Linear(9, 2))
        ensemble = embens.adapt(reference, 4, by="modulations", head="copied")
        assert ensemble.overlap == pytest.approx(NEAR)
        return ensemble.spec.sites[0].law.std

    assert spread(2) > spread(3) > spread(9)
    assert spread(5) ** 2 == pytest.approx(NEAR ** (-1 / 4) - 1)


@pytest.mark.parametrize("option", ["by", "trunk", "head"])
def test_invalid_options_of_adapt_raise(option):
    with pytest.raises(ValueError, match=f"{option}: unknown 'other'"):
        embens.adapt(mlp(), 3, **{option: "other"})


def test_separate_networks_have_no_parametrized_layers():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="'0' is parametrized, so members cannot have separate"):
        embens.independent(nn.Sequential(layer, nn.Linear(3, 2)), 2)


def test_low_rank_members_leave_the_buffers_of_a_parametrized_reference():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    reference = nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 2)).train()
    before = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    embens.low_rank(reference, 2, rank=1)

    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, before[name])
