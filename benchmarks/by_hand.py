"""Ensembles written by hand, as a user would without a library."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BatchEnsembleMLP(nn.Module):
    """BatchEnsemble of a perceptron, with the members concatenated in the batch.

    Args:
        network: a sequence of Linear layers with ReLU between them.
        members: number of members.
    """

    def __init__(self, network: nn.Sequential, members: int):
        super().__init__()
        self.layers = nn.ModuleList([m for m in network if isinstance(m, nn.Linear)])
        self.members = members
        self.pre, self.post = nn.ParameterList(), nn.ParameterList()
        for layer in self.layers[:-1]:
            self.pre.append(torch.randn(members, 1, layer.out_features))
            self.post.append(torch.randn(members, 1, layer.out_features))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)  # the same for all members
        for pre, post, layer in zip(self.pre, self.post, self.layers[1:], strict=True):
            x = torch.relu(x.view(-1, *x.shape[-2:]) * pre) * post
            x = layer(x.flatten(0, 1)).view(self.members, -1, layer.out_features)
        return x


class LastLayerDropout(nn.Module):
    """Last-layer dropout: the trunk runs once, masks multiply its features.

    Args:
        network: a sequence that ends with a Linear layer.
        members: number of members.
    """

    def __init__(self, network: nn.Sequential, members: int):
        super().__init__()
        self.trunk = network[:-1]
        self.head = network[-1]
        self.register_buffer("masks", torch.randn(members, 1, self.head.in_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x) * self.masks)


class Adapters(nn.Module):
    """A network with a LoRA adapter for each member; members run one after another, as in peft.

    Args:
        reference: a sequence of Linear layers and activations.
        members: number of members.
        rank: rank of the adapters.
    """

    def __init__(self, reference: nn.Sequential, members: int, rank: int):
        super().__init__()
        self.layers = reference
        self.adapters = nn.ModuleList()
        for _ in range(members):
            adapters = nn.ModuleDict()
            for name, module in reference.named_children():
                if isinstance(module, nn.Linear):
                    down = nn.Linear(module.in_features, rank, bias=False)
                    up = nn.Linear(rank, module.out_features, bias=False)
                    adapters[name] = nn.Sequential(down, up)
            self.adapters.append(adapters)

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for adapters in self.adapters:
            y = x
            for name, module in self.layers.named_children():
                if name in adapters:
                    y = module(y) + adapters[name](y)
                else:
                    y = module(y)
            outputs.append(y)
        return torch.stack(outputs)
