"""Kernels of the networks of ``peer_networks`` by neural-tangents, and a file that stores them.

To renew the file, in the environment of ``make test-peers``::

    PYTHONPATH=.:tests python tests/theory/peer_kernels.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

FILE = Path(__file__).with_name("neural_tangents.json")


def load() -> dict[str, dict[str, list[list[float]]]]:
    """Return the stored kernels by network, ``"nngp"`` and ``"ntk"``."""
    return json.loads(FILE.read_text())


class Peer:
    """Builders of neural-tangents, with the laws of ``peer_networks``.

    Args:
        neural_tangents: The package.
    """

    def __init__(self, neural_tangents: Any):
        import jax

        self.jax = jax
        self.nt = neural_tangents
        self.stax = neural_tangents.stax

    def kernels(self, name: str, x: Any) -> dict[str, np.ndarray]:
        """Return NNGP and NTK of a network.

        Args:
            name: Name of the network.
            x: Its inputs, a numpy array in the layout of torch.
        """
        if x.ndim == 4:
            x = x.transpose(0, 2, 3, 1)
        if name == "embeddings":
            positions = np.broadcast_to(np.eye(3), (len(x), 3, 3))
            x = np.concatenate([np.eye(6)[x], positions], -1)
        *_, function = self.network(name)
        kernel = function(x, None, ("nngp", "ntk"))
        return {part: np.asarray(getattr(kernel, part)) for part in ("nngp", "ntk")}

    def dense(self, weight_std: float = 1.3, bias_std: float | None = 0.2) -> Any:
        return self.stax.Dense(8, W_std=weight_std, b_std=bias_std)

    def convolution(self, size: int = 3, stride: int = 1, padding: str = "SAME") -> Any:
        window = (size, size)
        return self.stax.Conv(8, window, (stride,) * 2, padding=padding, W_std=1.3, b_std=0.2)

    def activation(self, name: str) -> Any:
        stax, nn = self.stax, self.jax.nn
        numerical = {
            "tanh": self.jax.numpy.tanh,
            "sigmoid": nn.sigmoid,
            "silu": nn.silu,
            "softplus": nn.softplus,
        }
        if name in numerical:
            return stax.ElementwiseNumerical(numerical[name], deg=150)
        closed_forms = {
            "relu": stax.Relu,
            "leaky relu": lambda: stax.LeakyRelu(0.01),
            "abs": stax.Abs,
            "erf": stax.Erf,
            "sin": stax.Sin,
            "cos": stax.Cos,
            "gelu": stax.Gelu,
        }
        return closed_forms[name]()

    def branches(self, *branches: Any, join: Any) -> Any:
        stax = self.stax
        return stax.serial(stax.FanOut(len(branches)), stax.parallel(*branches), join)

    def residual(self, *branch: Any) -> Any:
        stax = self.stax
        return self.branches(stax.Identity(), stax.serial(*branch), join=stax.FanInSum())

    def attention(self, heads: int, *, linear: bool = False) -> Any:
        mechanism = self.stax.AttentionMechanism
        return self.stax.GlobalSelfAttention(
            8, 8, 8, heads, linear_scaling=not linear,
            attention_mechanism=mechanism.IDENTITY if linear else mechanism.SOFTMAX,
            W_key_std=1.0, W_query_std=1.0, W_value_std=1.2, W_out_std=1.1, b_std=None,
        )  # fmt: skip

    def network(self, name: str) -> Any:
        """Return the network as neural-tangents describes it."""
        stax, serial, dense = self.stax, self.stax.serial, self.dense
        relu, erf, norm, mean = stax.Relu(), stax.Erf(), stax.LayerNorm(), stax.GlobalAvgPool()
        branch1, branch2 = serial(dense(), relu), serial(dense(), erf)
        images = serial(
            self.convolution(), relu, stax.AvgPool((2, 2), (2, 2)), self.convolution(), relu,
            self.convolution(stride=2, padding="VALID"), relu,
        )  # fmt: skip
        residual = (dense(), self.residual(norm, dense(), erf, dense()), relu, dense())
        tokens = dense(), relu
        halved = serial(relu, dense(0.5 * 1.3, 0.5 * 0.2))
        builders = {
            "residual, layer norm": residual,
            # units are centred, so that both norms are one
            "residual, rms norm": residual,
            "sum with a factor": (dense(), self.residual(halved), erf, dense()),
            "gate": (
                dense(), relu, self.branches(branch1, branch2, join=stax.FanInProd()), dense(),
            ),
            "concatenation": (
                dense(), relu, self.branches(branch1, branch2, join=stax.FanInConcat(-1)), dense(),
            ),
            "split": (
                dense(), relu, self.branches(dense(), branch2, join=stax.FanInProd()), dense(),
            ),
            "images, mean": (images, mean, dense()),
            "images, flatten": (images, stax.Flatten(), dense()),
            "images, residual": (
                self.convolution(),
                self.residual(norm, self.convolution(), relu, self.convolution()),
                relu, mean, dense(),
            ),
            # groups are wide, and two layers without an activation between them need no Gaussians
            "images, groups": (
                self.convolution(), stax.LayerNorm(axis=(1, 2, 3)), relu, self.convolution(), relu,
                self.convolution(), self.convolution(1), relu, stax.Flatten(), dense(),
            ),
            "images, patches": (
                self.convolution(2, 2, "VALID"), self.residual(norm, self.attention(1)), dense(),
                erf, mean, dense(),
            ),
            "tokens, attention": (*tokens, self.attention(1), relu, mean, dense()),
            "tokens, heads": (*tokens, self.attention(4), relu, mean, dense()),
            "tokens, linear attention": (
                *tokens, self.attention(4, linear=True), relu, mean, dense(),
            ),
            "tokens, transformer": (
                dense(), self.residual(norm, self.attention(2)),
                self.residual(norm, dense(), erf, dense()), mean, dense(),
            ),
            # one layer on the one-hot vectors of a token and its position
            "embeddings": (dense(3.0, None), norm, dense(), erf, mean, dense()),
        }  # fmt: skip
        if name in builders:
            return serial(*builders[name])
        layer, activation = dense(1.0), self.activation(name)
        return serial(layer, activation, layer, activation, layer)


def write() -> None:
    """Compute all kernels and store them."""
    from theory.peer_networks import NETWORKS, inputs_of

    from benchmarks.peers import neural_tangents

    peer = Peer(neural_tangents())
    kernels = {}
    for name in NETWORKS:
        parts = peer.kernels(name, inputs_of(name).numpy())
        kernels[name] = {part: kernel.tolist() for part, kernel in parts.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(parts)}" for name, parts in kernels.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write()
