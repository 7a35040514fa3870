"""Networks, batches and training steps that the rows compare.

A training step is a forward pass, the loss and a backward pass, without an optimizer; gradients are
None before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import embens
from benchmarks.timing import Step


class Task:
    """A reference network and a batch.

    Args:
        make: builds the reference.
        x: inputs.
        classes: number of classes of the random labels.
        memory_format: memory format of images and networks.

    Attributes:
        reference: one network.
        x: inputs in the memory format.
        y: labels.
        step: a training step of the reference.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        x: Tensor,
        classes: int,
        memory_format: torch.memory_format = torch.contiguous_format,
    ):
        self.memory_format = memory_format
        self.make_reference = make
        self.x = x.to(memory_format=memory_format) if x.dim() == 4 else x
        self.y = torch.randint(classes, (len(x),))
        self.reference = self.make()
        self.step = network_step(self.reference, self)

    def make(self) -> nn.Module:
        """Return a new network with random weights."""
        return self.convert(self.make_reference())

    def convert(self, network: nn.Module) -> nn.Module:
        """Return a network in the memory format of the task."""
        return network.to(memory_format=self.memory_format)


def cnn_task(batch: int, memory_format: torch.memory_format = torch.contiguous_format) -> Task:
    """Return the paper's convolutional network on 32×32 images."""
    return Task(embens.networks.cnn, torch.randn(batch, 3, 32, 32), 100, memory_format)


def mlp_task(width: int, batch: int) -> Task:
    """Return a perceptron with three hidden layers, 54 inputs and 7 classes."""

    def make() -> nn.Sequential:
        modules: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise((54, width, width, width)):
            modules += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*modules, nn.Linear(width, 7))

    return Task(make, torch.randn(batch, 54), 7)


def transformer_task() -> Task:
    """Return a transformer on 16 sequences of 20 tokens."""
    return Task(Transformer, torch.randint(50, (16, 20)), 5)


class Transformer(nn.Module):
    """Two layers of torch's encoder, width 64, on tokens."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


# Training steps


def network_step(network: nn.Module, task: Task) -> Step:
    """Return a training step of a plain network."""
    clear = gradient_clearer(network)

    def step() -> None:
        clear()
        F.cross_entropy(network(task.x), task.y).backward()

    return step


def networks_step(networks: list[nn.Module], task: Task) -> Step:
    """Return a training step of separate networks, one after another."""
    clear = gradient_clearer(*networks)

    def step() -> None:
        clear()
        for network in networks:
            F.cross_entropy(network(task.x), task.y).backward()

    return step


def ensemble_step(ensemble: embens.EmbeddedEnsemble, task: Task, chunk: int | None = None) -> Step:
    """Return a training step of an ensemble: all members forward, then one backward pass."""
    clear = gradient_clearer(ensemble)

    def step() -> None:
        clear()
        ensemble.objective(ensemble(task.x, chunk=chunk), task.y).backward()

    return step


def chunked_step(ensemble: embens.EmbeddedEnsemble, task: Task, chunk: int = 1) -> Step:
    """Return a training step of ``ensemble.backward``, chunk by chunk."""
    clear = gradient_clearer(ensemble)

    def step() -> None:
        clear()
        ensemble.backward(task.x, task.y, chunk=chunk)

    return step


def peer_step(network: nn.Module, task: Task, members: int) -> Step:
    """Return a training step of a module whose outputs are ``(member, batch, class)``."""
    clear = gradient_clearer(network)

    def step() -> None:
        clear()
        F.cross_entropy(network(task.x).flatten(0, 1), task.y.repeat(members)).backward()

    return step


def gradient_clearer(*modules: nn.Module) -> Step:
    """Return a function that sets all gradients to None, like ``Optimizer.zero_grad``."""
    parameters = []
    for module in modules:
        parameters += module.parameters()

    def clear() -> None:
        for parameter in parameters:
            parameter.grad = None

    return clear
