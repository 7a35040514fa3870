"""The same architectures built with other libraries, following their documentation."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn


class TorchUncertainty(nn.Module):
    """BatchEnsemble layers of torch-uncertainty; the batch is repeated for the members."""

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


def batch_ensemble_layers() -> ModuleType:
    """Load torch-uncertainty's layers alone: the package imports Lightning and torchvision."""
    name = "torch_uncertainty_batch_ensemble"
    if name not in sys.modules:
        package = importlib.util.find_spec("torch_uncertainty")
        if package is None or package.origin is None:
            raise ImportError("torch-uncertainty is not installed. Use `make bench`.")
        path = Path(package.origin).parent / "layers" / "batch_ensemble.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class TabM(nn.Module):
    """BatchEnsemble layers of tabm, which have the axes ``(batch, member, feature)``."""

    def __init__(self, reference: nn.Sequential, members: int):
        super().__init__()
        import tabm

        modules: list[nn.Module] = [tabm.EnsembleView(k=members)]
        for module in reference:
            if isinstance(module, nn.Linear):
                layer = tabm.LinearBatchEnsemble.from_linear(
                    module, k=members, scaling_init="normal"
                )
                modules.append(layer)
            else:
                modules.append(copy.deepcopy(module))
        self.network = nn.Sequential(*modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).transpose(0, 1)


class StackedNetworks(nn.Module):
    """M separate networks with stacked parameters, run with ``torch.func.vmap``."""

    def __init__(self, make: Callable[[], nn.Module], members: int):
        super().__init__()
        networks = [make() for _ in range(members)]
        parameters, self.stacked_buffers = torch.func.stack_module_state(networks)
        self.names = list(parameters)
        self.stacks = nn.ParameterList(parameters.values())
        # In a list, so that it is not a submodule.
        self.skeleton = [copy.deepcopy(networks[0]).to("meta")]

    def forward(self, x: Tensor) -> Tensor:
        def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.skeleton[0], (parameters, buffers), (x,))

        parameters = dict(zip(self.names, self.stacks, strict=True))
        return torch.func.vmap(call)(parameters, self.stacked_buffers)


def neural_tangents(*, double: bool = True) -> ModuleType:
    """Import neural-tangents, which is archived, with a version of jax that is newer than it.

    Args:
        double: whether jax computes in float64.
    """
    if torch.get_num_threads() == 1:
        # It has to be set before jax is imported.
        flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        os.environ.setdefault("XLA_FLAGS", flags)
    import jax
    from jax._src import source_info_util
    from jax.interpreters import ad

    jax.config.update("jax_enable_x64", double)
    # Its converter to TensorFlow is imported always, and never needed.
    converter = "neural_tangents.experimental"
    sys.modules.setdefault(converter, ModuleType(converter))
    # Its structured derivatives look these two names up in a module where they no longer are.
    ad.source_info_util = source_info_util
    ad.config = types.SimpleNamespace(jax_enable_checks=False)
    return importlib.import_module("neural_tangents")
