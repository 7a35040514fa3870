"""Ordinary networks against neural-tangents, where it is installed (``make test-peers``)."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from embens import networks, theory
from embens.networks import Conv2d, Linear

jax = pytest.importorskip("jax", reason="neural-tangents is a peer: run `make test-peers`")
peers = pytest.importorskip("benchmarks.peers")
nt = peers.neural_tangents()
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def double():
    jax.config.update("jax_enable_x64", True)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_agrees(network: nn.Module, x: torch.Tensor, kernel_function, y) -> None:
    ours = theory.kernels(network, x)
    theirs = kernel_function(y, None, ("nngp", "ntk"))
    for mine, other in ((ours.nngp, theirs.nngp), (ours.ntk_shared, theirs.ntk)):
        expected = torch.from_numpy(jax.device_get(other).copy())
        # its angles near 0 are roots of rounding errors; ours are exact there
        off = ~torch.eye(len(x), dtype=torch.bool)
        torch.testing.assert_close(mine.same[off], expected[off], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(mine.same.diagonal(), expected.diagonal(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("bias", [0.0, 0.4])
@pytest.mark.parametrize("name", ["relu", "leaky_relu", "abs", "erf", "sin", "cos", "gelu"])
def test_perceptrons_agree(name, bias):
    stax = nt.stax
    activation = {
        "relu": stax.Relu(),
        "leaky_relu": stax.LeakyRelu(0.01),
        "abs": stax.Abs(),
        "erf": stax.Erf(),
        "sin": stax.Sin(),
        "cos": stax.Cos(),
        "gelu": stax.Gelu(),
    }[name]
    dense = stax.Dense(8, W_std=1.3, b_std=bias or None)
    *_, kernel = stax.serial(dense, activation, dense, activation, dense)
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    net = networks.mlp(5, 8, 2, activation=name, weight_std=1.3, bias_std=bias)
    assert_agrees(net, x, kernel, x.numpy())


@pytest.mark.parametrize("readout", ["mean", "flatten"])
def test_convolutional_networks_agree(readout):
    stax = nt.stax
    x = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    last = stax.GlobalAvgPool() if readout == "mean" else stax.Flatten()
    *_, kernel = stax.serial(
        stax.Conv(8, (3, 3), padding="SAME", W_std=1.3), stax.Relu(), stax.AvgPool((2, 2), (2, 2)),
        stax.Conv(8, (3, 3), padding="SAME", W_std=1.3), stax.Relu(),
        stax.Conv(8, (3, 3), (2, 2), padding="VALID", W_std=1.3), stax.Relu(),
        last, stax.Dense(1, W_std=1.3),
    )  # fmt: skip
    law = {"weight_std": 1.3}
    pool = [nn.AdaptiveAvgPool2d(1)] if readout == "mean" else []
    net = nn.Sequential(
        Conv2d(2, 8, 3, padding=1, **law), nn.ReLU(), nn.AvgPool2d(2),
        Conv2d(8, 8, 3, padding=1, **law), nn.ReLU(), Conv2d(8, 8, 3, stride=2, **law), nn.ReLU(),
        *pool, nn.Flatten(), Linear(8, 1, **law),
    )  # fmt: skip
    assert_agrees(net, x, kernel, x.permute(0, 2, 3, 1).numpy())


class Residual(nn.Module):
    """A residual perceptron with a norm on each branch."""

    def __init__(self):
        super().__init__()
        law = {"weight_std": 1.3, "bias_std": 0.2}
        self.stem, self.head = Linear(5, 8, **law), Linear(8, 1, **law)
        self.up, self.down = Linear(8, 8, **law), Linear(8, 8, **law)
        self.norm = nn.LayerNorm(8, eps=1e-12, elementwise_affine=False)

    def forward(self, x):
        x = self.stem(x)
        return self.head(torch.relu(x + self.down(torch.erf(self.up(self.norm(x))))))


class Joined(Residual):
    """Two branches of equal width, concatenated or multiplied."""

    def __init__(self, *, product: bool):
        super().__init__()
        self.product = product
        if not product:
            self.head = Linear(16, 1, weight_std=1.3, bias_std=0.2)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        first, second = F.relu(self.up(x)), torch.erf(self.down(x))
        if self.product:
            return self.head(first * second)
        return self.head(torch.cat([first, second], dim=1))


def dense(stax):
    return stax.Dense(8, W_std=1.3, b_std=0.2)


def test_residual_networks_with_norms_agree():
    stax = nt.stax
    branch = stax.serial(stax.LayerNorm(), dense(stax), stax.Erf(), dense(stax))
    block = stax.serial(stax.FanOut(2), stax.parallel(stax.Identity(), branch), stax.FanInSum())
    *_, kernel = stax.serial(dense(stax), block, stax.Relu(), dense(stax))
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    assert_agrees(Residual(), x, kernel, x.numpy())


@pytest.mark.parametrize("product", [False, True])
def test_joined_branches_agree(product):
    stax = nt.stax
    branches = stax.parallel(
        stax.serial(dense(stax), stax.Relu()), stax.serial(dense(stax), stax.Erf())
    )
    join = stax.FanInProd() if product else stax.FanInConcat(-1)
    *_, kernel = stax.serial(
        dense(stax), stax.Relu(), stax.FanOut(2), branches, join, dense(stax)
    )  # fmt: skip
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    assert_agrees(Joined(product=product), x, kernel, x.numpy())


class Attention(nn.Module):
    """Attention with queries that are the keys and scores divided by the width."""

    def __init__(self):
        super().__init__()
        self.stem, self.query = Linear(5, 8, weight_std=1.3), Linear(8, 8)
        self.value, self.out = Linear(8, 8, weight_std=1.2), Linear(8, 8, weight_std=1.1)
        self.head = Linear(8, 1, weight_std=1.3)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        queries = self.query(x)
        weights = (queries @ queries.transpose(-2, -1) / 8).softmax(-1)
        return self.head(torch.relu(self.out(weights @ self.value(x))).mean(1))


def test_attention_agrees():
    stax = nt.stax
    attention = stax.GlobalSelfAttention(
        8, 8, 8, 1, linear_scaling=True,
        W_key_std=1.0, W_query_std=1.0, W_value_std=1.2, W_out_std=1.1, b_std=None,
    )  # fmt: skip
    *_, kernel = stax.serial(
        stax.Dense(8, W_std=1.3), stax.Relu(), attention, stax.Relu(),
        stax.GlobalAvgPool(), stax.Dense(1, W_std=1.3),
    )  # fmt: skip
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    assert_agrees(Attention(), x, kernel, x.numpy())
