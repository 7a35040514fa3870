"""Embedding: chosen sites, members against networks written by hand, warnings and errors."""

import copy

import pytest
import torch
from cases import ARCHITECTURES, Architecture, Held, Residual, Tied
from reference import member_by_hand, randomise_statistics
from torch import nn

import embens
from embens import laws
from embens.graph.reading import read_flow
from embens.graph.watching import watch_flow

MEMBERS = 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


def hooked_by_closure() -> nn.Sequential:
    """Return a network with a hook that works on the network itself, and not on its copies."""
    net = mlp()
    net.results = []
    net[0].register_forward_hook(lambda module, args, result: net.results.append(result))
    return net


def replaced_by_closure() -> nn.Sequential:
    net = mlp()
    net[2].forward = lambda x, layer=net[2]: x @ layer.weight.T
    return net


def build(case: Architecture) -> tuple[nn.Module, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        reference = case.build().double()
    randomise_statistics(reference, generator(1))
    inputs = case.inputs(generator(2))
    return reference, inputs.double() if inputs.is_floating_point() else inputs


def site_keys(ensemble) -> set[tuple[str, str]]:
    return {(site.layer, site.kind) for site in ensemble.spec.sites}


def assert_close(actual, expected, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


every_case = pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
hidden_and_all = pytest.mark.parametrize("sites", ["hidden", "all"])


# Members on every architecture


@every_case
@pytest.mark.parametrize("source", ["code", "example"])
def test_first_and_last_layers_are_those_of_the_data_flow(case, source):
    reference, x = build(case)
    flow = watch_flow(reference, x) if source == "example" else read_flow(reference)
    assert flow.first == case.first
    assert flow.last == case.last
    assert not flow.guesses


@every_case
@hidden_and_all
def test_every_member_equals_a_network_modulated_by_hand(case, sites):
    reference, x = build(case)
    reference.eval()
    ensemble = embens.embed(reference, MEMBERS, sites=sites, generator=generator(3))
    outputs = ensemble(x)
    for a in range(MEMBERS):
        expected = member_by_hand(reference, ensemble, a)(x)
        assert_close(outputs[a], expected)
        assert_close(ensemble.member(a)(x), expected)


@every_case
@hidden_and_all
def test_every_value_changes_its_member_and_no_other(case, sites):
    reference, x = build(case)
    ensemble = embens.embed(reference, MEMBERS, sites=sites, generator=generator(3)).eval()
    with torch.no_grad():
        before = ensemble(x)
        for site in ensemble.spec.sites:
            values = ensemble.site_values(site)
            assert values.shape == (MEMBERS, site.size)
            for index in range(site.size):
                saved = values[1, index].item()
                values[1, index] += 0.5
                change = (ensemble(x) - before).abs().flatten(1).amax(1)
                values[1, index] = saved
                assert change[1] > 1e-9
                assert change[0] == change[2] == 0


@every_case
def test_with_constant_one_every_member_is_the_reference(case):
    reference, x = build(case)
    one = laws.Constant(1)
    for training in (True, False):
        ensemble = embens.embed(reference, MEMBERS, pre=one, post=one, sites="all")
        expected = copy.deepcopy(reference).train(training)(x)
        for output in ensemble.train(training)(x):
            assert_close(output, expected, 1e-13)


@every_case
def test_the_reference_is_not_changed_and_its_weights_are_kept(case):
    reference, x = build(case)
    before = copy.deepcopy(reference)
    ensemble = embens.batch_ensemble(reference, MEMBERS)
    ensemble(x).square().sum().backward()
    assert str(reference) == str(before)
    for name, tensor in before.state_dict().items():
        assert torch.equal(reference.state_dict()[name], tensor)
    for name, parameter in reference.named_parameters():
        assert parameter.grad is None
        shared = ensemble.reference.get_parameter(name)
        assert shared is not parameter
        assert torch.equal(shared, parameter)


@every_case
def test_gradients_equal_those_of_members_by_hand(case):
    reference, x = build(case)
    if any(isinstance(module, nn.MultiheadAttention) for module in reference.modules()):
        pytest.skip("the attention written by hand scales weights, so gradients are scaled too")
    reference.eval()
    ensemble = embens.embed(reference, MEMBERS, generator=generator(3))
    ensemble(x).square().sum().backward()
    total = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
    for a in range(MEMBERS):
        by_hand = member_by_hand(reference, ensemble, a)
        by_hand(x).square().sum().backward()
        for name, parameter in by_hand.named_parameters():
            total[name] += parameter.grad

    for name, gradient in total.items():
        assert_close(ensemble.reference.get_parameter(name).grad, gradient, 1e-10)


def test_the_generator_decides_the_values_and_leaves_the_global_one_alone():
    reference = mlp()
    state = torch.get_rng_state()
    first, second = (embens.embed(reference, 3, generator=generator(5)) for _ in range(2))
    other = embens.embed(reference, 3, generator=generator(6))
    assert torch.equal(torch.get_rng_state(), state)
    x = torch.ones(5, 3)
    assert torch.equal(first(x), second(x))
    assert not torch.equal(first(x), other(x))


def test_a_generator_leaves_the_global_one_alone_when_layers_are_drawn():
    reference = mlp()
    state = torch.get_rng_state()
    embens.embed(reference, 3, own="last", generator=generator(5))
    assert torch.equal(torch.get_rng_state(), state)


# Sites

HIDDEN = {("0", "pre"), ("2", "post"), ("2", "pre"), ("4", "post")}
ALL = HIDDEN | {("0", "post"), ("4", "pre")}


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        ("hidden", HIDDEN),
        ("last", {("4", "post")}),
        ("all", ALL),
        ("2", {("2", "pre"), ("2", "post")}),
        (["0", "4"], {("0", "pre"), ("0", "post"), ("4", "pre"), ("4", "post")}),
        ("[02]", {("0", "pre"), ("0", "post"), ("2", "pre"), ("2", "post")}),
        (lambda name, module: module.out_features == 5, {("2", "pre"), ("2", "post")}),
    ],
)
def test_sites_are_chosen_by_word_name_wildcard_or_predicate(sites, expected):
    ensemble = embens.embed(mlp(), 2, sites=sites)
    assert site_keys(ensemble) == expected
    for site in ensemble.spec.sites:
        assert site.hidden == ((site.layer, site.kind) in HIDDEN)


def test_a_missing_law_leaves_its_side_out():
    assert site_keys(embens.embed(mlp(), 2, pre=None)) == {("2", "post"), ("4", "post")}
    assert site_keys(embens.embed(mlp(), 2, post=None)) == {("0", "pre"), ("2", "pre")}


def test_a_mapping_sets_laws_by_layer_and_leaves_other_layers_unmodulated():
    ensemble = embens.embed(
        mlp(), 2, pre={"0": laws.Rademacher()}, post={"*": laws.Normal(), "4": laws.Ternary()}
    )
    laws_by_site = {(site.layer, site.kind): site.law for site in ensemble.spec.sites}

    assert laws_by_site == {
        ("0", "pre"): laws.Rademacher(),
        ("2", "post"): laws.Normal(),
        ("4", "post"): laws.Ternary(),
    }


def test_trainable_is_set_by_side_and_by_site():
    ensemble = embens.embed(mlp(), 2, trainable={"pre": False, "post": {"2": True, "4": False}})
    trained = {site.key for site in ensemble.spec.sites if site.trainable}
    assert trained == {"2.post"}
    (parameter,) = ensemble.individual_parameters()
    assert parameter is ensemble.individual["2.post"]
    assert len(list(ensemble.shared_parameters())) == 6


def test_arguments_can_be_passed_by_position():
    x = torch.randn(5, 3)
    ensemble = embens.embed(mlp(), 2, None, laws.Rademacher(), "last", x, "0", False, generator(0))
    assert site_keys(ensemble) == {("4", "post")}
    assert not ensemble.spec.sites[0].trainable
    assert {item.module for item in ensemble.spec.per_member} == {"0"}


def test_an_embedding_has_no_input_to_modulate():
    reference = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    expected = {("0", "pre"), ("1", "pre"), ("1", "post")}
    assert site_keys(embens.embed(reference, 2, sites="all")) == expected


def test_a_single_layer_can_be_modulated_on_both_sides():
    ensemble = embens.embed(nn.Linear(3, 4), 2, sites="all")
    x = torch.randn(5, 3)
    torch.testing.assert_close(ensemble(x)[1], ensemble.member(1)(x))
    assert type(ensemble.member(1)) is nn.Linear


def test_a_full_name_takes_precedence_over_a_wildcard():
    reference = nn.Sequential()
    for name in ("fc[0]", "a*", "ab", "out"):
        reference.add_module(name, nn.Linear(4, 4))
    for name in ("fc[0]", "a*"):
        ensemble = embens.embed(reference, 2, sites=name)
        assert {site.layer for site in ensemble.spec.sites} == {name}
    ensemble = embens.embed(reference, 2, pre={"fc[0]": laws.Normal()}, post=None)

    assert [site.layer for site in ensemble.spec.sites] == ["fc[0]"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"members": 0}, ValueError, "members must be a positive integer, got 0"),
        ({"members": -2}, ValueError, "members must be a positive integer, got -2"),
        ({"members": 2.5}, TypeError, "members must be a positive integer, got 2.5"),
        ({"members": True}, TypeError, "members must be a positive integer, got True"),
        ({"sites": "hiden"}, ValueError, "'hiden' matches no layer; did you mean 'hidden'"),
        ({"sites": "fc*"}, ValueError, "'fc.' matches no layer. Candidates: '0', '2', '4'"),
        ({"sites": ["0", "7"]}, ValueError, "'7' matches no layer"),
        ({"sites": []}, ValueError, "sites is empty"),
        ({"sites": [3]}, TypeError, "names or wildcards"),
        ({"sites": lambda name, module: False}, ValueError, "selects no layer"),
        ({"pre": None, "post": None}, ValueError, "pre and post are both None"),
        ({"pre": "normal"}, TypeError, "pre must be a law or None.*got 'normal'"),
        ({"pre": 1.0}, TypeError, "pre must be a law or None.*got 1.0"),
        ({"pre": {"9": laws.Normal()}}, ValueError, "'9' matches none of the selected sites"),
        ({"pre": {"4": laws.Normal()}}, ValueError, "need sites='all'"),
        ({"post": {"2": "x"}}, TypeError, r"post\['2'\] must be a law or None"),
        ({"trainable": {"past": True}}, ValueError, "unknown 'past'; did you mean 'post'"),
        ({"trainable": "yes"}, TypeError, "must be True or False"),
        ({"trainable": {"pre": {"4": True}}}, ValueError, "'4' matches none"),
        ({"norm_affine": "none"}, ValueError, "norm_affine must be .*, got 'none'"),
        ({"own_weights": "copy"}, ValueError, "own_weights must be .*, got 'copy'"),
        ({"example_input": torch.zeros(2, 7)}, ValueError, "example_input"),
    ],
)
def test_invalid_arguments_raise_and_leave_the_reference_as_it_was(arguments, error, message):
    reference = mlp()
    before = copy.deepcopy(reference)

    with pytest.raises(error, match=message):
        embens.embed(reference, **{"members": 2, **arguments})
    assert str(reference) == str(before)
    for name, tensor in before.state_dict().items():
        assert torch.equal(reference.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (nn.ReLU, ValueError, "no parameter layer"),
        (lambda: nn.LSTM(3, 4), ValueError, "one layer has no hidden site"),
        (lambda: nn.Linear(3, 4), ValueError, "one layer has no hidden site"),
        (lambda: nn.Linear, TypeError, "Pass an instance, not the class"),
        (lambda: torch.zeros(3), TypeError, "must be a torch.nn.Module, got Tensor"),
        (
            lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)),
            ValueError,
            "has no shape yet. Call the reference once",
        ),
        (hooked_by_closure, ValueError, "a hook of '0' refers to the reference itself"),
        (replaced_by_closure, ValueError, "attribute 'forward' of '2' refers to the reference"),
        (lambda: embens.batch_ensemble(mlp(), 2), TypeError, "ensemble. Pass a plain network"),
        (
            lambda: nn.Sequential(embens.batch_ensemble(mlp(), 2)),
            TypeError,
            "contains, an ensemble",
        ),
        (lambda: torch.compile(mlp()), TypeError, "contains a OptimizedModule, which cannot be"),
        (lambda: nn.DataParallel(mlp()), TypeError, "contains a DataParallel, which cannot be"),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # imports of torch.compile
def test_references_that_cannot_be_embedded_raise(make, error, message):
    with pytest.raises(error, match=message):
        embens.embed(make(), 2)


# Data flow


def test_a_linear_layer_after_a_flatten_has_one_value_per_channel():
    reference = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 4, 2))
    for example in (None, torch.zeros(1, 3, 4, 4)):
        ensemble = embens.embed(reference, 2, example_input=example)
        site = next(site for site in ensemble.spec.sites if site.key == "3.post")
        assert (site.size, site.repeat) == (5, 4)
        with torch.no_grad():
            ensemble.individual["3.post"].copy_(torch.arange(10.0).view(2, 5))
        x = torch.randn(2, 3, 4, 4)
        hidden = torch.relu(reference[0](x) * ensemble.individual["0.pre"][1].view(-1, 1, 1))
        u = torch.arange(5.0, 10.0).view(-1, 1, 1)
        torch.testing.assert_close(ensemble(x)[1], reference[3]((hidden * u).flatten(1)))


class Flattened(nn.Module):
    """A convolution and a head with a function between them."""

    def __init__(self, flatten, features: int):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(features, 2)
        self.flatten = flatten

    def forward(self, x):
        return self.head(self.flatten(torch.relu(self.conv(x))))


@pytest.mark.parametrize(
    ("flatten", "size"),
    [
        (lambda x: x.flatten(1), 4),
        (lambda x: torch.flatten(x, 1), 4),
        (lambda x: x.view(x.size(0), -1), 4),
        (lambda x: x.reshape(x.shape[0], -1), 4),
        (lambda x: torch.cat([x, x], 1).flatten(1), 8),
    ],
)
def test_every_way_to_flatten_gives_one_value_per_channel(flatten, size):
    reference, x = Flattened(flatten, 4 * size), torch.randn(2, 3, 4, 4)
    for example in (None, x):
        ensemble = embens.embed(reference, 2, example_input=example)
        assert ensemble.individual["head.post"].shape == (2, size)
        torch.testing.assert_close(ensemble(x)[1], ensemble.member(1)(x))


def test_a_flatten_that_mixes_channels_is_reported_as_a_guess():
    reference = Flattened(lambda x: x.permute(0, 2, 3, 1).flatten(1), 16)
    with pytest.warns(UserWarning, match="16 input features of 'head'"):
        ensemble = embens.embed(reference, 2)
    assert ensemble.individual["head.post"].shape == (2, 16)


class Branching(nn.Module):
    """Code that torch.fx cannot trace, with layers registered in another order than called."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(4, 2), nn.Linear(3, 4)

    def forward(self, x):
        hidden = self.first(x)
        if hidden.sum() > 0:
            hidden = hidden * 2
        return self.last(torch.tanh(hidden))


def test_code_that_cannot_be_traced_is_read_from_an_example_or_guessed_with_a_warning():
    x = torch.randn(5, 3)
    with pytest.warns(UserWarning, match=r"could not be read completely.*pass example_input"):
        guessed = embens.embed(Branching(), 2)
    assert site_keys(guessed) == {("last", "pre"), ("first", "post")}
    ensemble = embens.embed(Branching(), 2, example_input=x)
    assert site_keys(ensemble) == {("first", "pre"), ("last", "post")}
    for a, output in enumerate(ensemble(x)):
        torch.testing.assert_close(output, ensemble.member(a)(x))


def test_a_part_that_cannot_be_traced_is_a_black_box():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x) if bool((x > 0).any()) else self.layer(-x)

    reference = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Odd(), nn.Tanh(), nn.Linear(4, 2))
    ensemble = embens.embed(reference, 3)
    assert len(ensemble.spec.sites) == 4
    x = torch.randn(5, 3)
    torch.testing.assert_close(ensemble(x)[2], ensemble.member(2)(x))


def test_tied_weights_stay_tied_and_every_use_has_its_own_modulation():
    ensemble = embens.embed(Tied(), 2)
    assert len(list(ensemble.shared_parameters())) == 3
    tokens = torch.randint(7, (2, 3))
    torch.testing.assert_close(ensemble(tokens)[1], ensemble.member(1)(tokens))


def test_a_weight_that_the_code_reads_itself_is_that_of_the_member():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.core = nn.Embedding(7, 6), nn.Linear(6, 6)

        def forward(self, tokens):
            hidden = torch.tanh(self.core(self.embedding(tokens)))
            return nn.functional.linear(hidden, self.embedding.weight)

    reference, tokens = Net(), torch.randint(7, (2, 3))
    ensemble = embens.embed(reference, 2, sites=["embedding"])
    weight = reference.embedding.weight * ensemble.individual["embedding.pre"][1]
    hidden = torch.tanh(reference.core(nn.functional.embedding(tokens, weight)))
    expected = nn.functional.linear(hidden, weight)
    torch.testing.assert_close(ensemble(tokens)[1], expected)
    torch.testing.assert_close(ensemble.member(1)(tokens), expected)


def test_layers_in_plain_lists_are_modulated():
    ensemble = embens.embed(Held(), 2)
    first, second = ensemble(torch.randn(3, 4))
    assert (first - second).abs().max() > 1e-3


def test_layers_with_hooks_or_parametrizations_are_modulated():
    reference = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    nn.utils.parametrizations.weight_norm(reference[0])
    reference[2].register_forward_hook(lambda module, args, output: output + args[0].sum())
    ensemble = embens.embed(reference, 2)
    x = torch.randn(5, 3)

    torch.testing.assert_close(ensemble(x)[1], ensemble.member(1)(x))
    assert ensemble.executor.startswith("merged")


def test_a_layer_that_is_never_called_is_no_site():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.head, self.unused = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(torch.tanh(self.used(x)))

    assert {site.layer for site in embens.embed(Net(), 2).spec.sites} == {"used", "head"}
    with pytest.raises(ValueError, match="'unused' names a layer that is never called"):
        embens.embed(Net(), 2, sites="unused")
    with pytest.raises(ValueError, match="'unused' names a layer that is never called"):
        embens.embed(Net(), 2, own="unused")


def test_several_inputs_keywords_and_nested_outputs_are_supported():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 2)

        def forward(self, x, y, scale=None):
            hidden = torch.tanh(self.a(x) + self.b(y))
            if scale is not None:
                hidden = hidden * scale
            return {"logits": self.head(hidden), "hidden": hidden, "extra": None}

    x, y = torch.randn(5, 3), torch.randn(5, 2)
    ensemble = embens.embed(Net(), 3, example_input=(x, y))
    for chunk in (1, 3):
        outputs = ensemble(x, y, scale=2.0, chunk=chunk)
        assert outputs["logits"].shape == (3, 5, 2)
        assert outputs["hidden"].shape == (3, 5, 4)
        assert outputs["extra"] is None
        expected = ensemble.member(2)(x, y, scale=2.0)["logits"]
        torch.testing.assert_close(outputs["logits"][2], expected)


# Warnings


def test_both_directions_of_the_first_level_are_first_layers():
    flow = read_flow(nn.GRU(3, 4, num_layers=2, bidirectional=True))
    assert (flow.first, flow.last) == ({"", "l0_reverse"}, {"l1", "l1_reverse"})


def test_fixed_modulations_that_cancel_in_the_mean_are_reported():
    law, x = laws.Correlated(-1 / 3), torch.randn(3, 5, generator=generator())
    reference = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2, bias=False))
    with pytest.warns(UserWarning, match=r"ensemble mean is identically zero.*rho above"):
        ensemble = embens.last_layer_dropout(reference, 4, law)
    assert ensemble(x).mean(0).abs().max() < 1e-5
    embens.last_layer_dropout(reference, 4, law, trainable=True)
    embens.last_layer_dropout(reference, 4, laws.Correlated(-0.2))
    embens.mc_dropout(mlp(), 4, law, fresh=False)


# Per-member layers


class TestPerMemberLayers:
    def test_every_member_has_a_separate_copy(self):
        reference = mlp()
        ensemble = embens.embed(reference, 3, None, None, own="last", generator=generator())
        x = torch.randn(5, 3)
        weight, bias = ensemble.individual["4.weight"], ensemble.individual["4.bias"]
        features = reference[:4](x)
        for a, output in enumerate(ensemble(x)):
            torch.testing.assert_close(output, features @ weight[a].T + bias[a])
        shapes = [tuple(p.shape) for p in ensemble.individual_parameters()]
        assert shapes == [(3, 2, 5), (3, 2)]
        assert torch.equal(ensemble.reference[0].weight, reference[0].weight)
        assert not ensemble.spec.sites

    def test_they_are_drawn_copied_or_initialised_by_a_function(self):
        reference = mlp()
        drawn = []
        for seed in (0, 0, 1):
            ensemble = embens.batch_ensemble(reference, 3, own="last", generator=generator(seed))
            drawn.append(ensemble.individual["4.weight"].detach())
        assert torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])
        assert drawn[0].flatten(1).unique(dim=0).shape[0] == 3
        assert drawn[0].abs().max() <= 5**-0.5  # the bound of nn.Linear
        copied = embens.embed(reference, 3, own="last", own_weights="copied")
        assert torch.equal(copied.individual["4.weight"][2], reference[4].weight)

        def zero_(module: nn.Module) -> None:
            nn.init.zeros_(module.weight)

        zeros = embens.embed(reference, 3, own="last", own_weights=zero_)
        assert not zeros.individual["4.weight"].any()

    @pytest.mark.parametrize(
        ("own", "expected"),
        [
            ("last", {"head"}),
            ("blocks.1", {f"blocks.1.{n}" for n in ("conv1", "norm1", "conv2", "norm2", "skip")}),
            ("blocks.1.c*", {"blocks.1.conv1", "blocks.1.conv2"}),
            (["head", "stem"], {"head", "stem"}),
        ],
    )
    def test_they_are_named_by_layers_modules_and_wildcards(self, own, expected):
        ensemble = embens.embed(Residual(), 3, None, None, own=own)
        assert {item.module for item in ensemble.spec.per_member if item.drawn} == expected
        x = torch.randn(2, 3, 6, 6)
        outputs = ensemble.eval()(x)
        for a in range(3):
            torch.testing.assert_close(outputs[a], ensemble.member(a)(x), rtol=1e-4, atol=1e-5)

    def test_they_have_no_sites(self):
        ensemble = embens.batch_ensemble(mlp(), 3, own="last")
        assert site_keys(ensemble) == {("0", "pre"), ("2", "pre"), ("2", "post")}
        for options in ({"post": {"4": laws.Normal()}}, {"sites": ["2", "4"]}):
            with pytest.raises(ValueError, match="'4' is a per-member layer"):
                embens.embed(mlp(), 3, own="last", **options)

    def test_a_network_of_one_layer_becomes_separate_networks(self):
        ensemble = embens.embed(nn.Linear(3, 2), 4, own="last", pre=None, post=None)
        assert not list(ensemble.shared_parameters())

    def test_layers_that_share_a_weight_are_separate_together_or_not_at_all(self):
        with pytest.raises(ValueError, match=r"'output' shares a weight with 'embedding'"):
            embens.embed(Tied(), 3, own="output")
        ensemble = embens.embed(Tied(), 3, None, None, own=["output", "embedding"])
        x = torch.randint(7, (3, 4))
        torch.testing.assert_close(ensemble(x)[1], ensemble.member(1)(x))
        member = ensemble.member(1)
        assert member.output.weight is member.embedding.weight

    def test_parametrized_layers_raise(self):
        reference = mlp()
        torch.nn.utils.parametrizations.weight_norm(reference[4])
        with pytest.raises(ValueError, match="own: '4' is parametrized"):
            embens.embed(reference, 3, own="last")

    def test_separately_drawn_last_layers_make_members_independent(self):
        drawn = embens.batch_ensemble(mlp(), 4, p=0.5, own="last")
        assert (drawn.overlap, drawn.natural_gamma) == (0, 4)
        copied = embens.embed(mlp(), 4, None, None, own="last", own_weights="copied")
        assert (copied.overlap, copied.natural_gamma) == (1, 1)
        hidden = embens.embed(mlp(), 4, None, None, own="2")
        assert (hidden.overlap, hidden.natural_gamma) == (1, 1)

    @pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"max_norm": 0.5}])
    def test_separate_embeddings_equal_those_of_the_members(self, options):
        reference = nn.Sequential(nn.Embedding(7, 4, **options), nn.Tanh(), nn.Linear(4, 2))
        ensemble = embens.embed(reference, 3, None, None, own="0")
        members = [ensemble.member(a) for a in range(3)]
        x = torch.randint(7, (5, 6))
        expected = torch.stack([member(x) for member in members])
        for chunk in (1, 2, 3):
            torch.testing.assert_close(ensemble(x, chunk=chunk), expected)
        ensemble(x).square().sum().backward()
        for a, member in enumerate(members):
            member.zero_grad()
            member(x).square().sum().backward()
            gradient = ensemble.individual["0.weight"].grad[a]
            torch.testing.assert_close(gradient, member[0].weight.grad)


# Norm layers


def norm_network(norm: type[nn.Module] = nn.BatchNorm2d, **kwargs) -> nn.Sequential:
    size = (2, 4) if norm is nn.GroupNorm else (4,)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), norm(*size, **kwargs), nn.SiLU(), nn.Flatten(), nn.Linear(16, 2)
    )


def batches(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 6, 3, 4, 4, generator=generator())


class TestNormLayers:
    @pytest.mark.parametrize("chunk", [1, 2, 3])
    @pytest.mark.parametrize("momentum", [0.1, None])
    def test_every_member_has_the_statistics_of_a_network_trained_alone(self, chunk, momentum):
        reference = norm_network(momentum=momentum)
        ensemble = embens.batch_ensemble(reference, 3, law=laws.Shifted)
        alone = [member_by_hand(reference, ensemble, a) for a in range(3)]
        for x in batches():
            outputs = ensemble(x, chunk=chunk)
            for a in range(3):
                torch.testing.assert_close(outputs[a], alone[a](x), rtol=1e-4, atol=1e-5)
        ensemble.eval()
        x = batches(1)[0]
        for a in range(3):
            torch.testing.assert_close(ensemble(x)[a], alone[a].eval()(x), rtol=1e-4, atol=1e-5)
            norm = ensemble.member(a)[1]
            assert type(norm) is nn.BatchNorm2d
            torch.testing.assert_close(norm.running_var, alone[a][1].running_var)
            assert norm.num_batches_tracked == 3

        assert not torch.allclose(alone[0][1].running_var, alone[1][1].running_var)
        assert ensemble.reference[1].weight.shape == (4,)

    def test_per_member_scales_and_shifts_start_from_the_reference(self):
        reference = norm_network()
        with torch.no_grad():
            reference[1].weight.uniform_(0.5, 2)
        ensemble = embens.embed(reference, 3, norm_affine="member")
        weight = ensemble.individual["1.weight"]
        assert isinstance(weight, nn.Parameter)
        assert weight.shape == (3, 4)
        assert torch.equal(weight[2], reference[1].weight)
        with torch.no_grad():
            weight[1] += 1
        x = batches(1)[0]
        ensemble.eval()
        for a in range(3):
            torch.testing.assert_close(ensemble(x)[a], ensemble.member(a)(x))

    @pytest.mark.parametrize("norm", [nn.GroupNorm, nn.InstanceNorm2d])
    @pytest.mark.parametrize("affine", ["shared", "member"])
    def test_norms_without_statistics_are_the_same_in_both_modes(self, norm, affine):
        kwargs = {"affine": True} if norm is nn.InstanceNorm2d else {}
        ensemble = embens.embed(norm_network(norm, **kwargs), 3, norm_affine=affine)
        x = batches(1)[0]
        outputs = ensemble(x)

        torch.testing.assert_close(ensemble.eval()(x), outputs)
        for a in range(3):
            torch.testing.assert_close(outputs[a], ensemble.member(a)(x))

    @pytest.mark.parametrize("affine", ["shared", "member"])
    def test_layer_norm_equals_that_of_the_members(self, affine):
        reference = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
        ensemble = embens.embed(reference, 3, norm_affine=affine)
        x = torch.randn(5, 3)
        for chunk in (1, 3):
            outputs = ensemble(x, chunk=chunk)
            for a in range(3):
                torch.testing.assert_close(outputs[a], ensemble.member(a)(x))

    def test_a_norm_before_the_first_modulation_is_shared(self):
        reference = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        ensemble = embens.batch_ensemble(reference, 3)
        ensemble(torch.randn(5, 3))
        norm = ensemble.reference[0]

        assert norm.running_mean.shape == (3,)
        assert norm.num_batches_tracked == 1
