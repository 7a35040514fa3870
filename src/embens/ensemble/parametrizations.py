"""Layers that compute their weight from other parameters (``torch.nn.utils.parametrize``).

In the members' copies of the reference, such a layer has its class from before parametrization. The
weight is computed once and put into a slot of each copy.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from embens.graph.reading import copy_module


def computed_tensors(reference: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that parametrizations compute.

    Args:
        reference: Any module.

    Returns:
        Tensors by their names in the network.
    """
    tensors = {}
    for name, module in reference.named_modules():
        for key in parametrized_names(module):
            tensors[f"{name}.{key}".lstrip(".")] = getattr(module, key)
    return tensors


def evaluated_tensors(reference: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that parametrizations compute in evaluation mode, without changing state.

    In training mode some parametrizations update their buffers, as spectral norm does.

    Args:
        reference: Any module.

    Returns:
        Tensors by their names in the network.
    """
    if not any(parametrized_names(module) for module in reference.modules()):
        return {}
    buffers = {id(buffer): buffer.detach().clone() for buffer in reference.buffers()}
    return computed_tensors(copy_module(reference, buffers).eval())


def parametrized_names(module: nn.Module) -> list[str]:
    """Return the names of the tensors that parametrizations of a module compute.

    Args:
        module: Any module.
    """
    if not parametrize.is_parametrized(module):
        return []
    parametrizations = module.get_submodule("parametrizations")
    return [name for name, _ in parametrizations.named_children()]


def has_state(module: nn.Module) -> bool:
    """Return whether parametrizations of a module have buffers, which they may update.

    Args:
        module: Any module.
    """
    if not parametrize.is_parametrized(module):
        return False
    parametrizations: Any = module.parametrizations
    for part in parametrizations.modules():
        # The placeholder of a per-member buffer is a plain attribute.
        for value in (*part._buffers.values(), *vars(part).values()):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                return True
    return False


def copy_with_plain_classes(reference: nn.Module) -> nn.Module:
    """Return a copy of a network in which parametrized modules have their original classes.

    ``parametrize.remove_parametrizations`` would change the class that a copy shares with the
    reference. So each parametrized module is replaced by a new object, which gets a copy of its
    attributes.

    Args:
        reference: Any module.
    """
    parametrized = [module for module in reference.modules() if parametrized_names(module)]
    if not parametrized:
        return copy_module(reference)
    plain_modules: dict[int, nn.Module] = {}
    for module in parametrized:
        # torch replaces the class of a parametrized module by a subclass.
        original_class: Any = type(module).__mro__[1]
        plain_module = object.__new__(original_class)
        nn.Module.__init__(plain_module)
        plain_modules[id(module)] = plain_module
    # One call copies the network and the attributes, so that both refer to the same modules.
    holder: Any = nn.Module()
    holder.reference = reference
    holder.attributes = [vars(module) for module in parametrized]
    copied: Any = copy_module(holder, plain_modules)
    for plain_module, attributes in zip(plain_modules.values(), copied.attributes, strict=True):
        vars(plain_module).update(attributes)
    return copied.reference


def add_computed_slots(module: nn.Module, table: str, *, plain: bool) -> None:
    """Give a copy of a parametrized module slots for its computed tensors.

    Args:
        module: The copy, of the original class.
        table: "_parameters" or "_buffers".
        plain: Whether to remove the parametrizations with their parameters.
    """
    names = parametrized_names(module)
    if names and plain:
        del module._modules["parametrizations"]
    for name in names:
        getattr(module, table)[name] = None
