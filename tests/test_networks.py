import copy
import math
import pickle

import pytest
import torch
from torch import nn

from embens import networks
from embens.networks import ACTIVATIONS, PARAMETRIZATIONS, Conv2d, Linear, cnn, mlp

LAYERS = {
    "linear": lambda **law: Linear(40, 60, **law),
    "convolution": lambda **law: Conv2d(8, 12, 3, padding=1, **law),
    "strided convolution": lambda **law: Conv2d(8, 12, (2, 3), stride=2, **law),
}
INPUTS = {
    "linear": (5, 40),
    "convolution": (5, 8, 6, 6),
    "strided convolution": (5, 8, 6, 6),
}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def layers(network):
    return [module for module in network if isinstance(module, nn.Linear | nn.Conv2d)]


def assert_has_std(values, std):
    """Compare the root mean square of normal values with their deviation, in five errors."""
    error = std / math.sqrt(2 * values.numel())
    assert values.square().mean().sqrt().item() == pytest.approx(std, abs=5 * error)


@pytest.fixture(params=LAYERS)
def kind(request):
    return request.param


@pytest.fixture(params=PARAMETRIZATIONS)
def parametrization(request):
    return request.param


class TestEveryLayer:
    @pytest.fixture
    def layer(self, kind, parametrization):
        return LAYERS[kind](
            weight_std=1.5, bias_std=0.3, parametrization=parametrization, generator=generator()
        )

    @pytest.fixture
    def x(self, kind):
        return torch.randn(INPUTS[kind], generator=generator(1))

    def test_equals_the_plain_layer_with_its_effective_parameters(self, layer, x):
        plain = copy.deepcopy(layer)
        plain.__class__ = nn.Linear if isinstance(layer, nn.Linear) else nn.Conv2d
        with torch.no_grad():
            for parameter, value in zip(
                (plain.weight, plain.bias), layer.effective_parameters(), strict=True
            ):
                parameter.copy_(value)

        assert torch.equal(layer(x), plain(x))

    def test_is_linear_in_weight_and_bias_together(self, layer, x):
        assert layer.linear_in_parameters
        once = layer(x)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(3)
        torch.testing.assert_close(layer(x), 3 * once)

    def test_resamples_its_parameters(self, layer):
        again = copy.deepcopy(layer)
        again.reset_parameters(generator())
        assert torch.equal(again.weight, layer.weight)
        assert torch.equal(again.bias, layer.bias)
        again.reset_parameters(generator(1))
        assert not torch.equal(again.weight, layer.weight)
        assert not torch.equal(again.bias, layer.bias)

    def test_resamples_with_the_global_generator_by_default(self, layer):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layer.reset_parameters()
            first = layer.weight.clone()
            torch.manual_seed(0)
            layer.reset_parameters()
        assert torch.equal(layer.weight, first)

    def test_leaves_the_global_generator_alone_if_it_gets_a_generator(self, kind, parametrization):
        before = torch.get_rng_state()
        LAYERS[kind](parametrization=parametrization, generator=generator())
        assert torch.equal(torch.get_rng_state(), before)

    def test_survives_copies_and_pickles(self, layer, x):
        expected = layer(x)
        for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(again(x), expected)
            assert again.extra_repr() == layer.extra_repr()

    def test_shows_its_distribution(self, layer, parametrization):
        assert f"parametrization={parametrization!r}, weight_std=1.5, bias_std=0.3" in repr(layer)

    def test_has_the_state_of_the_plain_layer(self, layer):
        assert list(layer.state_dict()) == ["weight", "bias"]

    def test_keeps_its_dtype_when_resampled(self, layer, x):
        layer = layer.bfloat16()
        layer.reset_parameters(generator())
        assert layer.weight.dtype == layer(x.bfloat16()).dtype == torch.bfloat16

    def test_has_no_bias_by_default(self, kind, parametrization):
        layer = LAYERS[kind](parametrization=parametrization)
        assert layer.bias is None

    def test_has_the_same_gradients_by_functional_call(self, layer, x):
        parameters = {name: p.detach() for name, p in layer.named_parameters()}

        def loss(parameters):
            return torch.func.functional_call(layer, parameters, (x,)).square().sum()

        layer(x).square().sum().backward()
        torch.testing.assert_close(torch.func.grad(loss)(parameters)["weight"], layer.weight.grad)


class TestInitialisation:
    FAN_IN, FAN_OUT = 9 * 30, 9 * 50

    @pytest.mark.parametrize(
        ("parametrization", "weight_std", "bias_std"),
        [
            ("ntk", 1.0, 1.0),
            ("standard", 1.5 / math.sqrt(FAN_IN), 0.3),
            ("xavier", 1.5 * math.sqrt(2 / (FAN_IN + FAN_OUT)), 0.3),
        ],
    )
    def test_has_the_deviations_of_the_parametrization(self, parametrization, weight_std, bias_std):
        convolution = Conv2d(
            30,
            50,
            3,
            weight_std=1.5,
            bias_std=0.3,
            parametrization=parametrization,
            generator=generator(),
        )
        assert_has_std(convolution.weight.detach(), weight_std)
        assert_has_std(convolution.bias.detach(), bias_std)

    @pytest.mark.parametrize("name", ["ntk", "standard"])
    def test_gives_outputs_the_expected_variance(self, name):
        law = {"weight_std": 1.5, "bias_std": 0.5, "parametrization": name}
        linear = Linear(20, 40_000, **law, generator=generator())
        x = torch.randn(20, generator=generator(1))
        expected = math.sqrt(1.5**2 * x.square().mean().item() + 0.5**2)
        assert_has_std(linear(x).detach(), expected)

    def test_gives_the_same_function_in_two_parametrizations(self):
        x = torch.randn(6, 10, generator=generator(1))
        ntk, standard = (
            mlp(10, 30, 2, 4, weight_std=1.4, bias_std=0.2, parametrization=name, generator=g)
            for name, g in (("ntk", generator()), ("standard", generator()))
        )

        torch.testing.assert_close(ntk(x), standard(x))

    def test_raises_for_invalid_standard_deviations(self):
        with pytest.raises(ValueError, match=r"weight_std must be a number >= 0.*got -1"):
            Linear(2, 2, weight_std=-1)
        with pytest.raises(ValueError, match=r"bias_std must be a number >= 0.*got nan"):
            Conv2d(2, 2, 3, bias_std=math.nan)
        with pytest.raises(TypeError, match=r"weight_std must be a number >= 0, .*, got '1'"):
            mlp(weight_std="1")

    def test_raises_for_unknown_parametrizations(self):
        with pytest.raises(ValueError, match=r"parametrization: unknown 'standart'; did you m"):
            Linear(2, 2, parametrization="standart")


class TestMlp:
    def test_is_three_hidden_layers_of_the_paper_by_default(self):
        sizes = [(layer.in_features, layer.out_features) for layer in layers(mlp())]
        assert sizes == [(64, 512), (512, 512), (512, 512), (512, 1)]
        assert [type(module) for module in mlp()] == [Linear, nn.ReLU] * 3 + [Linear]

    def test_has_as_many_hidden_layers_as_its_depth(self):
        network = mlp(3, 5, 1, 2)
        assert network(torch.zeros(7, 3)).shape == (7, 2)
        assert len(layers(network)) == 2

    def test_preserves_a_relu_signal_with_weight_std_root_two(self):
        x = torch.randn(50, 64, generator=generator(1))
        network = mlp(64, 1024, 3, 2000, weight_std=math.sqrt(2), generator=generator())
        ratio = network(x).square().mean() / (2 * x.square().mean())
        # each layer adds a relative variance of Var(relu(z)^2) / E[relu(z)^2]^2 / width = 5 / width
        assert ratio.item() == pytest.approx(1, abs=5 * math.sqrt(3 * 5 / 1024))

    def test_repeats_itself_with_the_same_generator(self, parametrization):
        first, second = (
            mlp(4, 8, 2, 1, bias_std=1.0, parametrization=parametrization, generator=generator())
            for _ in range(2)
        )
        for expected, repeated in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(expected, repeated)
        assert not torch.equal(first[0].bias, first[2].bias)

    def test_has_biases_in_every_layer_or_in_none(self):
        assert all(layer.bias is None for layer in layers(mlp(4, 8)))
        assert all(layer.bias is not None for layer in layers(mlp(4, 8, bias_std=0.1)))

    def test_compiles_without_graph_breaks(self, parametrization):
        network = mlp(4, 8, 2, 3, bias_std=0.1, parametrization=parametrization)
        x = torch.randn(5, 4, generator=generator())
        compiled = torch.compile(network, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), network(x))

    @pytest.mark.parametrize("name", ["inputs", "width", "depth", "outputs"])
    def test_raises_for_sizes_that_are_not_positive_integers(self, name):
        with pytest.raises(ValueError, match=f"{name} must be a positive integer, got 0"):
            mlp(**{name: 0})
        with pytest.raises(TypeError, match=rf"{name} must be a positive integer, got 1\.5"):
            mlp(**{name: 1.5})
        with pytest.raises(TypeError, match=f"{name} must be a positive integer, got True"):
            mlp(**{name: True})


class TestActivations:
    FUNCTIONS = {  # noqa: RUF012
        "relu": lambda x: x.clamp(min=0),
        "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
        "abs": torch.abs,
        "erf": torch.erf,
        "sin": torch.sin,
        "cos": torch.cos,
        "identity": lambda x: x,
        "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "softplus": lambda x: torch.log1p(torch.exp(x)),
        "silu": lambda x: x * torch.sigmoid(x),
    }

    def test_have_the_promised_names(self):
        assert set(self.FUNCTIONS) == set(ACTIVATIONS)

    @pytest.mark.parametrize("name", ACTIVATIONS)
    def test_compute_the_function_of_their_name(self, name):
        network = mlp(4, 8, 2, activation=name)
        x = torch.linspace(-3, 3, 61, dtype=torch.float64)
        torch.testing.assert_close(network[1](x), self.FUNCTIONS[name](x), rtol=1e-12, atol=1e-12)
        assert type(network[3]) is type(network[1])

    def test_of_leaky_relu_take_a_slope(self):
        assert mlp(4, 8, activation="leaky_relu", activation_slope=0.2)[1].negative_slope == 0.2
        with pytest.raises(
            ValueError, match=r"activation_slope=0.2 applies to 'leaky_relu' only.*'relu'"
        ):
            mlp(4, 8, activation_slope=0.2)

    def test_may_be_modules_which_are_copied(self):
        prelu = nn.PReLU(init=0.7)
        network = mlp(4, 8, 2, activation=prelu)
        assert network[1] is not prelu
        assert network[1] is not network[3]
        assert network[3].weight.item() == pytest.approx(0.7)

    def test_with_unknown_names_raise(self):
        with pytest.raises(ValueError, match=r"activation: unknown 'rellu'; did you mean 'relu'"):
            mlp(activation="rellu")
        with pytest.raises(ValueError, match=r"activation: unknown '🦆'\. Candidates: 'relu', "):
            cnn(activation="🦆")

    def test_must_be_instances(self):
        with pytest.raises(TypeError, match=r"a name or a module such as .*, got .*Mish"):
            mlp(activation=nn.Mish)


class TestCnn:
    def test_is_the_network_of_the_paper_by_default(self):
        network = cnn(generator=generator())
        convolution, pool = [Conv2d, nn.ReLU], [nn.AvgPool2d]
        body = 3 * (convolution + pool) + convolution
        head = [nn.AdaptiveAvgPool2d, nn.Flatten, Linear]
        assert [type(module) for module in network] == body + head
        assert [layer.weight.shape[0] for layer in layers(network)] == [64, 128, 256, 512, 100]
        assert all(layer.parametrization == "xavier" for layer in layers(network))
        assert all(layer.bias is None for layer in layers(network))
        weight = layers(network)[1].weight.detach()
        assert_has_std(weight, math.sqrt(2 / (9 * 64 + 9 * 128)))

    @pytest.mark.parametrize("pool", ["average", "max"])
    @pytest.mark.parametrize(("readout", "features"), [("mean", 12), ("flatten", 12 * 4 * 4)])
    def test_has_outputs_for_every_pooling_and_readout(self, pool, readout, features):
        network = cnn((4, 8, 12), inputs=1, outputs=5, image=16, pool=pool, readout=readout)
        assert layers(network)[-1].in_features == features
        assert network(torch.zeros(2, 1, 16, 16)).shape == (2, 5)
        pools = [module for module in network if isinstance(module, nn.AvgPool2d | nn.MaxPool2d)]
        assert len(pools) == 2

    def test_needs_no_pooling_for_one_convolution(self):
        network = cnn((4,), outputs=2, image=7, readout="flatten")
        assert network(torch.zeros(1, 3, 7, 7)).shape == (1, 2)

    def test_reads_images_of_any_size_by_their_mean(self):
        assert cnn((4, 8), outputs=2)(torch.zeros(1, 3, 20, 14)).shape == (1, 2)

    @pytest.mark.parametrize(("width", "expected"), [(0.5, [2, 4]), (2, [8, 16]), (1e-3, [1, 1])])
    def test_multiplies_its_channels_by_the_width(self, width, expected):
        convolutions = layers(cnn((4, 8), width))[:-1]
        assert [layer.out_channels for layer in convolutions] == expected

    @pytest.mark.parametrize("readout", ["mean", "flatten"])
    def test_repeats_itself_with_the_same_generator(self, readout):
        first, second = (
            cnn((4, 8), readout=readout, parametrization="ntk", generator=generator())
            for _ in range(2)
        )
        x = torch.randn(2, 3, 32, 32, generator=generator(1))

        assert torch.equal(first(x), second(x))

    def test_compiles_without_graph_breaks(self):
        network = cnn((4, 8), outputs=3, parametrization="ntk")
        x = torch.randn(2, 3, 8, 8, generator=generator())
        compiled = torch.compile(network, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), network(x))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"channels": ()}, r"channels must contain one number per convolution, got none"),
            ({"channels": (4, 0)}, r"channels must be a positive integer, got 0"),
            ({"width": 0}, r"width must be a positive factor of the channels, got 0"),
            ({"width": -1.0}, r"width must be a positive factor of the channels, got -1\.0"),
            ({"width": math.inf}, r"width must be a positive factor of the channels, got inf"),
            ({"outputs": 0}, r"outputs must be a positive integer, got 0"),
            ({"pool": "mean"}, r"pool: unknown 'mean'.* Candidates: 'average', 'max'"),
            ({"readout": "flat"}, r"readout: unknown 'flat'; did you mean 'flatten'"),
            (
                {"readout": "flatten", "image": 28},
                r"divisible by 8, since 3 poolings.*got 28\. Use",
            ),
            ({"weight_std": -1.0}, r"weight_std must be a number >= 0.*got -1\.0"),
        ],
    )
    def test_raises_for_invalid_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            networks.cnn(**arguments)
