"""The same architectures built with other libraries, each as its documentation says."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn


def batch_ensemble_layers() -> ModuleType:
    """Load torch-uncertainty's layers alone: its package imports Lightning and torchvision."""
    name = "torch_uncertainty_batch_ensemble"
    if name not in sys.modules:
        package = importlib.util.find_spec("torch_uncertainty")
        if package is None or package.origin is None:
            raise ImportError(
                "torch-uncertainty is not installed; run the benchmarks by `make bench`"
            )
        path = Path(package.origin).parent / "layers" / "batch_ensemble.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class TorchUncertainty(nn.Module):
    """All layers replaced by BatchEnsemble layers, the batch repeated for the members."""

    def __init__(self, reference: nn.Sequential, members: int):
        super().__init__()
        layers = batch_ensemble_layers()
        modules = []
        for module in reference:
            if isinstance(module, nn.Conv2d):
                modules.append(layers.BatchConv2d.from_conv2d(module, members))
            elif isinstance(module, nn.Linear):
                modules.append(layers.BatchLinear.from_linear(module, members))
            else:
                modules.append(copy.deepcopy(module))
        self.network = nn.Sequential(*modules)
        self.members = members

    def forward(self, x: Tensor) -> Tensor:
        repeated = x.repeat(self.members, *(1,) * (x.dim() - 1))
        return self.network(repeated).unflatten(0, (self.members, -1))


class TabM(nn.Module):
    """All linear layers replaced by tabm's BatchEnsemble layers, with axes (batch, member, …)."""

    def __init__(self, reference: nn.Sequential, members: int):
        super().__init__()
        import tabm

        modules = [
            tabm.LinearBatchEnsemble.from_linear(m, k=members, scaling_init="normal")
            if isinstance(m, nn.Linear)
            else copy.deepcopy(m)
            for m in reference
        ]
        self.network = nn.Sequential(tabm.EnsembleView(k=members), *modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).transpose(0, 1)


class Stacked(nn.Module):
    """M networks whose parameters are stacked, run under ``torch.func.vmap``."""

    def __init__(self, make: Callable[[], nn.Module], members: int):
        super().__init__()
        networks = [make() for _ in range(members)]
        parameters, self.buffers_ = torch.func.stack_module_state(networks)
        self.names = list(parameters)
        self.stacks = nn.ParameterList(parameters.values())
        self.skeleton = [copy.deepcopy(networks[0]).to("meta")]  # a list: no part of this module

    def forward(self, x: Tensor) -> Tensor:
        def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.skeleton[0], (parameters, buffers), (x,))

        parameters = dict(zip(self.names, self.stacks, strict=True))
        return torch.func.vmap(call)(parameters, self.buffers_)


class Adapters(nn.Module):
    """A network with LoRA adapters for each member, one member after another, as with peft."""

    def __init__(self, reference: nn.Sequential, members: int, rank: int):
        super().__init__()
        self.reference = copy.deepcopy(reference)
        linear = [m for m in reference if isinstance(m, nn.Linear)]
        self.adapters = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(
                    nn.Linear(m.in_features, rank, bias=False),
                    nn.Linear(rank, m.out_features, bias=False),
                )
                for m in linear
            )
            for _ in range(members)
        )

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for adapters in self.adapters:
            y, mine = x, iter(adapters)  # type: ignore[arg-type]
            for module in self.reference:
                y = module(y) + next(mine)(y) if isinstance(module, nn.Linear) else module(y)
            outputs.append(y)
        return torch.stack(outputs)


def neural_tangents() -> ModuleType:
    """Load neural-tangents in float64, without its converter to TensorFlow, which nothing needs."""
    import jax

    jax.config.update("jax_enable_x64", True)
    sys.modules.setdefault(
        "neural_tangents.experimental", ModuleType("neural_tangents.experimental")
    )
    return importlib.import_module("neural_tangents")
