"""Parameter layers and modulated weights."""

import pytest
import torch
from cases import Residual
from torch import nn

import embens
from embens import sites
from embens.sites import find_layers


class Swapped(nn.Module):
    """A linear layer whose weight is (in, out), as in GPT-2."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class Net(nn.Module):
    """A network with a layer that embens does not know."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 6), Swapped(6, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


@pytest.fixture
def registry(monkeypatch):
    """Undo registrations after the test."""
    monkeypatch.setattr(sites, "_KINDS", dict(sites._KINDS))


def test_layers_are_found_with_their_channels():
    layers = find_layers(Residual())
    assert (layers["stem"].inputs, layers["stem"].outputs, layers["stem"].spatial) == (3, 6, 2)
    assert layers["stem"].biases == ("bias",)
    assert layers["blocks.0.conv1"].biases == ()
    assert "blocks.0.norm1" not in layers


def test_an_attention_has_four_layers():
    layers = find_layers(nn.MultiheadAttention(8, 2))
    assert list(layers) == ["q_proj", "k_proj", "v_proj", "out_proj"]
    assert layers["k_proj"].rows == (8, 16)
    assert layers["k_proj"].weights == ("in_proj_weight",)
    separate = find_layers(nn.MultiheadAttention(8, 2, kdim=5, vdim=6))
    assert separate["k_proj"].weights == ("k_proj_weight",)
    assert (separate["k_proj"].inputs, separate["v_proj"].inputs) == (5, 6)


def test_an_embedding_has_no_input_channels():
    layers = find_layers(nn.ModuleList([nn.Embedding(7, 4)]))
    assert (layers["0"].channels("post"), layers["0"].channels("pre")) == (None, 4)


def test_a_recurrent_module_has_a_layer_for_each_level_and_direction():
    core = nn.LSTM(4, 5, num_layers=2, bidirectional=True, proj_size=3)
    layers = find_layers(nn.ModuleDict({"core": core}))

    assert list(layers) == ["core", "core.l0_reverse", "core.l1", "core.l1_reverse"]
    assert {layer.channels("pre") for layer in layers.values()} == {4 * 5}
    assert [layer.channels("post") for layer in layers.values()] == [4, 4, 2 * 3, 2 * 3]
    assert layers["core.l1"].weights == ("weight_ih_l1", "weight_hh_l1")
    assert layers["core.l1"].biases == ("bias_ih_l1", "bias_hh_l1")
    assert layers["core.l1"].matrix(core).shape == (20, 6 + 3)


def test_layers_that_compute_their_weight_are_not_mergeable():
    hooked = nn.utils.weight_norm
    with pytest.warns(FutureWarning, match="deprecated"):
        old_weight_norm = hooked(nn.Linear(3, 3))
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    modules = [nn.Linear(3, 3), nn.Embedding(5, 3, max_norm=1.0), old_weight_norm]
    modules += [parametrized, Scaled(3, 3), embens.networks.Linear(3, 3)]
    layers = find_layers(nn.ModuleList(modules))
    mergeable = [layer.mergeable for layer in layers.values()]
    assert mergeable == [True, False, False, True, False, True]


@pytest.mark.parametrize("weight", ["", "in out"])
def test_a_registered_layer_is_modulated(registry, weight):
    embens.register_layer(Swapped, lambda layer: tuple(layer.weight.shape), weight=weight)
    reference, x = Net(), torch.randn(4, 3)
    ensemble = embens.embed(reference, 3)
    sizes = {(site.layer, site.kind): site.size for site in ensemble.spec.sites}
    assert (sizes["second", "pre"], sizes["second", "post"]) == (5, 6)
    first = ensemble.individual["first.pre"][2]
    post, pre = ensemble.individual["second.post"][2], ensemble.individual["second.pre"][2]
    hidden = torch.tanh(reference.first(x) * first)
    hidden = torch.tanh(reference.second(hidden * post) * pre)
    expected = reference.head(hidden * ensemble.individual["head.post"][2])
    torch.testing.assert_close(ensemble(x)[2], expected)
    member = ensemble.member(2)
    assert type(member.second) is Swapped
    torch.testing.assert_close(member(x), expected)


def test_a_layer_can_be_registered_by_the_name_of_its_class(registry):
    sites.register_layer(f"{Swapped.__module__}.Swapped", lambda layer: tuple(layer.weight.shape))
    assert sites.is_layer(Swapped(3, 4))


def test_the_layer_of_gpt2_is_registered_by_name():
    class Conv1D(Swapped):
        pass

    Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"
    (layer,) = find_layers(Conv1D(3, 4)).values()
    assert (layer.inputs, layer.outputs, layer.transposed) == (3, 4, True)


def test_an_invalid_registration_raises():
    with pytest.raises(ValueError, match=r"weight.*'inout'"):
        embens.register_layer(Swapped, lambda layer: (1, 1), weight="inout")
    with pytest.raises(TypeError, match="channels must be a function of a layer"):
        embens.register_layer(Swapped, (1, 1))
