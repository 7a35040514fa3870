"""Factors of single layers, compared with the gradients of autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from embens import networks
from embens.finite.factors import (
    WeightUse,
    channel_rows,
    has_rule,
    is_norm,
    norm_rows,
    normalize,
    parameter_scale,
)

LAYERS = {
    "linear": (lambda: nn.Linear(3, 4), (2, 3)),
    "linear with positions": (lambda: nn.Linear(3, 4), (2, 5, 3)),
    "linear, ntk": (lambda: networks.Linear(3, 4, bias_std=0.5), (2, 3)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 2, stride=2), (2, 3, 6)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, padding=1, dilation=2), (2, 3, 6, 5)),
    "circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (2, 3, 4, 4)),
    "same padding": (lambda: nn.Conv2d(3, 4, 3, padding="same"), (2, 3, 4, 4)),
    "conv2d, ntk": (lambda: networks.Conv2d(3, 4, 3, bias_std=0.5), (2, 3, 6, 6)),
}

NORMS = {
    "layer": (lambda: nn.LayerNorm((3, 4)), (2, 5, 3, 4)),
    "rms": (lambda: nn.RMSNorm(4), (2, 3, 4)),
    "group": (lambda: nn.GroupNorm(2, 4), (2, 4, 3, 3)),
    "batch": (lambda: nn.BatchNorm2d(4).eval(), (2, 4, 3, 3)),
}


def sample_gradients(layer: nn.Module, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    """Return the gradients of each sample by autograd, ``(batch, number)``."""
    rows: dict[str, list[Tensor]] = {}
    for i in range(len(x)):
        product = (layer(x[i : i + 1]) * cotangent[i : i + 1]).sum()
        gradients = torch.autograd.grad(product, list(layer.parameters()))
        for (name, _), gradient in zip(layer.named_parameters(), gradients, strict=True):
            rows.setdefault(name, []).append(gradient.flatten())
    return {name: torch.stack(gradients) for name, gradients in rows.items()}


@pytest.mark.parametrize("name", LAYERS)
def test_factors_multiply_to_the_gradients_of_autograd(name):
    make, shape = LAYERS[name]
    layer = make().double()
    x = torch.randn(shape, dtype=torch.float64)
    cotangent = torch.randn_like(layer(x))
    expected = sample_gradients(layer, x, cotangent)

    use = WeightUse(layer, x, cotangent[None])
    products = torch.einsum("bkpc,bpf->bcf", use.outputs(2), use.inputs(2))
    weight = products.flatten(1) * parameter_scale(layer, "weight")
    bias = channel_rows(layer, cotangent[None], 2)[:, 0] * parameter_scale(layer, "bias")

    # Patches have their channels last, so the order of the weights differs.
    torch.testing.assert_close(weight.sort().values, expected["weight"].sort().values)
    torch.testing.assert_close(bias, expected["bias"])


def test_modulations_scale_both_factors():
    layer = nn.Conv2d(3, 4, 3).double()
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    u = torch.randn(3, dtype=torch.float64)
    v = torch.randn(4, dtype=torch.float64)
    cotangent = torch.randn(1, 2, 4, 3, 3, dtype=torch.float64)

    use = WeightUse(layer, x, cotangent, post=u, pre=v)

    scaled = WeightUse(layer, x * u[:, None, None], cotangent * v[:, None, None])
    torch.testing.assert_close(use.inputs(2), scaled.inputs(2))
    torch.testing.assert_close(use.outputs(2), scaled.outputs(2))


@pytest.mark.parametrize("name", NORMS)
def test_rows_of_norm_layers_are_the_gradients_of_autograd(name):
    make, shape = NORMS[name]
    layer = make().double()
    x = torch.randn(shape, dtype=torch.float64)
    cotangent = torch.randn(shape, dtype=torch.float64)
    expected = sample_gradients(layer, x, cotangent)

    weight_rows = norm_rows(layer, (cotangent * normalize(layer, x))[None], 2)[:, 0]
    torch.testing.assert_close(weight_rows, expected["weight"])
    if "bias" in expected:
        bias_rows = norm_rows(layer, cotangent[None], 2)[:, 0]
        torch.testing.assert_close(bias_rows, expected["bias"])


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Linear(2, 2), True),
        (nn.Embedding(3, 2), True),
        (nn.Embedding(3, 2, sparse=True), False),
        (nn.Conv2d(4, 4, 3, groups=2), False),
        (nn.ConvTranspose2d(2, 2, 3), False),
        (nn.LayerNorm(3), True),
        (nn.LSTM(2, 2), False),
        (nn.ReLU(), False),
    ],
)
def test_only_layers_that_are_linear_in_their_parameters_have_rules(layer, expected):
    assert has_rule(layer) is expected
    assert is_norm(layer) is isinstance(layer, nn.LayerNorm)
