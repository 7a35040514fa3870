"""Networks that are chains: layers and activations in ``nn.Sequential``, without code."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from embens.theory.moments import MEASURE, describe
from embens.theory.recursion import has_rule, propagate, steps, unknown_limit


def is_chain(network: nn.Module) -> bool:
    """Return True if a network is layers and activations in ``nn.Sequential``, without code."""
    if any(isinstance(module, nn.Embedding) for module in network.modules()):
        return False  # its inputs are tokens, which the walk over a graph reads
    if has_rule(network) and not isinstance(network, nn.Sequential):
        return True
    for module in network.children() if isinstance(network, nn.Sequential) else [network]:
        if isinstance(module, nn.Sequential):
            if not has_rule(module) or not is_chain(module):
                return False
        elif not has_rule(module) and any(True for _ in module.children()):
            return False
    return not isinstance(network, nn.Sequential) or _has_plain_forward(network)


def _has_plain_forward(network: nn.Sequential) -> bool:
    is_plain = type(network).forward is nn.Sequential.forward
    return is_plain or propagate.dispatch(type(network)) is not propagate.dispatch(nn.Sequential)


def split_chain(network: nn.Module) -> tuple[list[nn.Module], list[tuple[str, nn.Module]]]:
    """Return the modules before the first layer, and the named modules from it on."""
    named_modules = list(steps(network))
    first = len(named_modules)
    for index, (_, module) in enumerate(named_modules):
        if has_rule(module) and first_layer(module) is not None:
            first = index
            break
    for path, module in named_modules[:first]:
        if isinstance(module, _NormBase) or any(True for _ in module.parameters()):
            raise unknown_limit(module, path)
    for path, module in named_modules[first:]:
        if not has_rule(module):
            raise unknown_limit(module, path)
    if first == len(named_modules):
        raise TypeError(
            f"the network has no Linear or convolution: {network}. In the limit it must have one."
        )
    return [module for _, module in named_modules[:first]], named_modules[first:]


def require_separate_parameters(layers: list[tuple[str, nn.Module]]) -> None:
    """Raise where two layers have a parameter in common, so that their outputs are correlated.

    Args:
        layers: Names and modules, in order.
    """
    owners: dict[int, str] = {}
    for path, module in layers:
        for parameter in module.parameters():
            owner = owners.get(id(parameter))
            if owner is not None:
                what = "is used twice" if owner == path else f"shares a parameter with {owner!r}"
                raise TypeError(
                    f"{describe(module, path)} {what}, so outputs are correlated in a way that has "
                    f"no rule. {MEASURE}"
                )
        owners.update({id(parameter): path for parameter in module.parameters()})


def first_layer(module: nn.Module) -> Any:
    """Return the first Linear layer or convolution that a module is or contains, or None."""
    for part in module.modules():
        if isinstance(part, nn.Linear | _ConvNd):
            return part
    return None


def pixel_axes(layer: nn.Module) -> int:
    """Return the number of pixel axes of a layer's inputs."""
    return len(layer.kernel_size) if isinstance(layer, _ConvNd) else 0
