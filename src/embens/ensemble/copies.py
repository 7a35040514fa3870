"""Copies of the reference: one for each member, with the member's tensors and attributes.

A copy has the user's classes and code. It shares every tensor that does not differ between members.
Attributes that the user's code changes belong to the member; attributes that are changed on the
reference are passed on to all copies.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from embens.ensemble.parametrizations import (
    add_computed_slots,
    copy_with_plain_classes,
    has_state,
    parametrized_names,
)
from embens.graph.snapshots import PLAIN, STANDARD_ATTRIBUTES, snapshot
from embens.sites import Layer
from embens.spec import EnsembleSpec

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble

_ATOMIC = (*PLAIN, nn.Module, FunctionType, MethodType, type)
"""Values without contents, or whose contents are followed elsewhere."""

_OWNED = (nn.Module, MethodType)
"""Values that belong to one copy: its modules and their methods."""

_RECURRENT_LISTS = ("_flat_weights", "_flat_weight_refs")
"""Attributes of recurrent layers that list their weights; the layers update them."""

_MISSING = object()


class Attributes:
    """Attributes of the modules of a network, and whether they have changed since the last look.

    Args:
        root: The network.
    """

    def __init__(self, root: nn.Module):
        self.root = root
        self.values: dict[tuple[str, str], Any] = {}
        self.snapshots: dict[tuple[str, str], Any] = {}
        for _ in self.changes():  # notes the present values
            pass

    def changes(self) -> Iterator[tuple[str, str, Any]]:
        """Yield module, name and value of new, changed and removed attributes, and note them."""
        present = set()
        for name, module in self.root.named_modules():
            for key, value in list(vars(module).items()):
                if key in STANDARD_ATTRIBUTES:
                    continue
                present.add((name, key))
                if self._note(name, key, value):
                    yield name, key, value
        for name, key in self.values.keys() - present:
            del self.values[name, key]
            yield name, key, _MISSING

    def _note(self, name: str, key: str, value: Any) -> bool:
        """Return whether an attribute has changed, and remember its value."""
        is_same = self.values.get((name, key), _MISSING) is value
        if is_same and isinstance(value, _ATOMIC):
            return False
        contents = snapshot(value, set())
        is_same = is_same and self.snapshots[name, key] == contents
        self.values[name, key] = value
        self.snapshots[name, key] = contents
        return not is_same


class MemberCopy:
    """A copy of the reference that holds the tensors of one member.

    Args:
        ensemble: The ensemble.
        plain: Whether parametrized layers become plain ones with the weight as a parameter.
            Otherwise they keep their parameters, and the computed weight is in a buffer slot.

    Attributes:
        module: The copy.
        weights_table: Table of the computed weights of parametrized layers, "_parameters" or
            "_buffers".
        pairs: Prefix of the names in a module, the module of the reference, and its copy.
        separate: Module, name and table of the per-member tensors.
        scales: Modulations of layers that are scaled by hooks.
        aliases: Buffers of the member in the memory of the stacked ones, by name.
        replaced: Names of buffers that the code replaces by new tensors.
        calls: Number of calls in this pass of each layer whose parametrization has buffers.
        held_parameters: Attributes that hold parameters of the reference, besides their layers.
        initial: The attributes of the copy.
        changed: Attributes that the member's code has set.
    """

    def __init__(self, ensemble: "EmbeddedEnsemble", *, plain: bool = False):
        self.module = copy_with_plain_classes(ensemble.reference)
        self.weights_table = "_parameters" if plain else "_buffers"
        self.pairs: list[tuple[str, nn.Module, nn.Module]] = []
        self.separate: list[tuple[str, str, str]] = []
        self.scales: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        self.aliases: dict[str, Tensor] = {}
        self.replaced: set[str] = set()
        self.calls: dict[str, int] = {}
        self.changed: dict[tuple[str, str], Any] = {}
        for name, module in list(self.module.named_modules()):
            if not plain and has_state(module):
                self._count_calls(name, module)
            add_computed_slots(module, self.weights_table, plain=plain)
        copies = dict(self.module.named_modules())
        for name, module in ensemble.reference.named_modules():
            if name in copies:
                self.pairs.append((f"{name}." if name else "", module, copies[name]))
        for item in ensemble.spec.per_member:
            for key in item.tensors:
                stack = ensemble.individual[f"{item.module}.{key}".lstrip(".")]
                table = "_parameters" if isinstance(stack, nn.Parameter) else "_buffers"
                self.add_separate(item.module, key, table)
        self._make_gradients_dense(ensemble.spec)
        for name in {site.layer for site in ensemble.spec.sites}:
            if not ensemble.layers[name].mergeable:
                self._scale_by_hooks(ensemble.layers[name])
        if not plain:
            for prefix, _, copied in self.pairs:
                vars(copied)["zero_grad"] = _refuse_erasing(ensemble, prefix)
        self.held_parameters = self._find_held_parameters()
        self.initial = Attributes(self.module)

    def _make_gradients_dense(self, spec: EnsembleSpec) -> None:
        """Turn off sparse gradients, which cannot flow through a member's computed weight."""
        differing = {site.layer for site in (*spec.sites, *spec.low_rank)}
        differing |= {item.module for item in spec.per_member}
        for name, module in self.module.named_modules():
            if name in differing and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                module.sparse = False

    def _find_held_parameters(self) -> list[tuple[nn.Module, str, Any]]:
        """Return attributes that hold parameters of the reference, besides their layers."""
        owned = set()
        for _, module, _ in self.pairs:
            owned |= {id(parameter) for parameter in module._parameters.values()}
        owned.discard(id(None))
        held_parameters = []
        for _, module, copied in self.pairs:
            if type(module).__module__.startswith("torch.nn."):
                continue  # recurrent layers have lists of their weights, which they update
            for key, value in vars(module).items():
                is_attribute = key not in STANDARD_ATTRIBUTES
                if is_attribute and any(id(leaf) in owned for leaf in tree_leaves(value)):
                    held_parameters.append((copied, key, value))
        return held_parameters

    def add_separate(self, name: str, key: str, table: str) -> None:
        """Let a tensor of a module be per-member; :meth:`bind` puts the member's into its slot.

        Args:
            name: Name of the module.
            key: Name of the tensor.
            table: "_parameters" or "_buffers".
        """
        vars(self.module.get_submodule(name)).pop(key, None)
        self.separate.append((name, key, table))

    def sync_modes(self) -> None:
        """Copy the training mode of every module; torch.compile can follow this."""
        for _, module, copied in self.pairs:
            copied.training = module.training

    def assign(self, name: str, key: str, value: Any) -> None:
        """Set an attribute that was changed on the reference.

        Args:
            name: Name of the module.
            key: Name of the attribute.
            value: Its new value on the reference.
        """
        module = self.module.get_submodule(name)
        # The reference has a placeholder attribute for a per-member tensor; the copy has a slot.
        if key in module._parameters or key in module._buffers:
            return
        if value is _MISSING:
            vars(module).pop(key, None)
        else:
            vars(module)[key] = self._private(value)
        self.changed.pop((name, key), None)
        for _ in self.initial.changes():  # notes the new value, so that it is not the member's
            pass

    def _private(self, value: Any) -> Any:
        """Return a copy of a value in which modules of the reference are those of this copy."""
        memo: dict[int, Any] = {}
        for _, original, copied in self.pairs:
            memo[id(original)] = copied
            for tensor in (*original._parameters.values(), *original._buffers.values()):
                memo[id(tensor)] = tensor
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and not leaf.is_leaf:
                memo.setdefault(id(leaf), leaf.detach().clone())
        return copy.deepcopy(value, memo)

    def changed_attributes(self) -> dict[str, dict[str, Any]]:
        """Return the attributes that the member's code has set, by module."""
        held_keys = {key for _, key, _ in self.held_parameters}
        for name, key, value in self.initial.changes():
            # Modules, and containers of them, belong to this copy and are not passed on.
            is_attribute = key != "training" and value is not _MISSING
            is_attribute = is_attribute and key not in (*held_keys, *_RECURRENT_LISTS)
            if is_attribute and not any(isinstance(x, _OWNED) for x in tree_leaves(value)):
                self.changed[name, key] = value
        attributes: dict[str, dict[str, Any]] = {}
        for (name, key), value in self.changed.items():
            attributes.setdefault(name, {})[key] = value
        return attributes

    def set_attributes(self, attributes: Mapping[str, dict[str, Any]]) -> None:
        """Set attributes that :meth:`changed_attributes` returned.

        Args:
            attributes: Values by module and name.
        """
        modules = dict(self.module.named_modules())
        for name, values in attributes.items():
            if name in modules:
                vars(modules[name]).update(values)

    def bind(
        self,
        tensors: Mapping[str, Tensor],
        scales: dict[str, tuple[Tensor | None, Tensor | None]],
    ) -> None:
        """Put tensors into the parameter and buffer slots of the copy.

        Args:
            tensors: Tensors of the member that differ from those of the reference, by name.
            scales: Modulations of layers that are scaled by hooks, by layer.
        """
        self.scales = scales
        self.calls = dict.fromkeys(self.calls, 0)
        for prefix, module, copied in self.pairs:
            for table in ("_parameters", "_buffers"):
                slots = getattr(copied, table)
                for key, tensor in getattr(module, table).items():
                    slots[key] = tensors.get(prefix + key, tensor)
            slots = copied.__dict__[self.weights_table]
            for key in parametrized_names(module):
                slots[key] = tensors[prefix + key]
        if self.held_parameters:
            self._bind_held_parameters()
        for name, key, table in self.separate:
            slots = getattr(self.module.get_submodule(name), table)
            full_name = f"{name}.{key}".lstrip(".")
            slots[key] = tensors[full_name]
            if table == "_buffers":
                slots[key] = self.alias(full_name, tensors[full_name])
        for _, module, copied in self.pairs:
            for key, tensor in copied._parameters.items():
                if tensor is not None and not isinstance(tensor, nn.Parameter):
                    tensor._is_param = True  # isinstance(tensor, nn.Parameter) is then true
                    if not torch.is_grad_enabled() and not is_transformed():
                        _require_gradients(tensor, module._parameters.get(key))

    def alias(self, name: str, buffer: Tensor) -> Tensor:
        """Return a buffer of the member for its code to update.

        It shares the memory of the stacked buffer, but has a separate version counter. With a
        common counter, an update by one member would invalidate what autograd saved for others. A
        buffer that the code replaces is a copy, because autograd may have saved the old value.

        Args:
            name: Name of the buffer.
            buffer: The member's part of the stacked buffer.
        """
        if name in self.replaced:
            return buffer.clone()
        try:
            address = buffer.data_ptr()
        except RuntimeError:  # a tensor of torch.func
            return buffer
        alias = self.aliases.get(name)
        if alias is None or alias.data_ptr() != address or alias.dtype is not buffer.dtype:
            with torch.inference_mode(False):
                alias = buffer.data
            self.aliases[name] = alias
        return alias

    def _bind_held_parameters(self) -> None:
        """Put the member's tensors into attributes that hold parameters of the reference."""
        current: dict[int, Any] = {}
        for _, module, copied in self.pairs:
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    current[id(parameter)] = copied._parameters[key]
        for copied, key, value in self.held_parameters:
            vars(copied)[key] = tree_map(lambda leaf: current.get(id(leaf), leaf), value)

    def release(self) -> None:
        """Take the member's tensors out of the parameter and buffer slots of the copy."""
        for _, module, copied in self.pairs:
            copied._parameters.update(module._parameters)
            copied._buffers.update(module._buffers)
            for key in parametrized_names(module):
                getattr(copied, self.weights_table)[key] = None
        for name, key, table in self.separate:
            getattr(self.module.get_submodule(name), table).pop(key, None)

    def _count_calls(self, name: str, module: nn.Module) -> None:
        """Let a layer raise if it is called twice in a training pass.

        Its parametrization has buffers, which a plain network would update at each call. A member
        computes the weight once in a pass.
        """
        self.calls[name] = 0

        def count(module: nn.Module, args: tuple) -> None:
            self.calls[name] += 1
            if module.training and self.calls[name] > 1:
                raise RuntimeError(
                    f"{name!r} is called twice in a pass, and its parametrization changes a buffer "
                    "each time. Remove it with torch.nn.utils.parametrize."
                    "remove_parametrizations, or call the layer once."
                )

        module.register_forward_pre_hook(count)

    def _scale_by_hooks(self, layer: Layer) -> None:
        """Scale inputs and outputs of a layer that computes its weight itself."""
        module = self.module.get_submodule(layer.module)

        def scale_input(module: nn.Module, args: tuple) -> tuple:
            post = self.scales[layer.name][1]
            if post is None:
                return args
            return (args[0] * _along_channels(post, layer, args[0]), *args[1:])

        def scale_output(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            pre = self.scales[layer.name][0]
            return output if pre is None else output * _along_channels(pre, layer, output)

        module.register_forward_pre_hook(scale_input)
        module.register_forward_hook(scale_output)


def _refuse_erasing(ensemble: "EmbeddedEnsemble", prefix: str) -> Callable[..., None]:
    """Return a ``zero_grad`` for a module of a copy, which raises if gradients would be lost.

    Args:
        ensemble: The ensemble, whose parameters have the gradients.
        prefix: Beginning of the names of the parameters of the module.
    """

    def zero_grad(set_to_none: bool = True) -> None:
        parameters = dict(ensemble.reference.named_parameters())
        parameters |= ensemble.individual.tensors()
        for name, parameter in parameters.items():
            if name.startswith(prefix) and parameter.grad is not None:
                raise RuntimeError(
                    "the forward of the reference calls zero_grad(), which would erase the "
                    f"gradient of {name!r}. Call zero_grad() outside of the forward."
                )

    return zero_grad


def is_transformed() -> bool:
    """Return whether a transform of torch.func is running; ``requires_grad_`` then fails."""
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return functorch.peek_interpreter_stack() is not None


def _require_gradients(tensor: Tensor, original: Tensor | None) -> None:
    """Let code that enables gradients differentiate by a weight, as in a plain network.

    Args:
        tensor: Weight of a member, computed without gradients.
        original: The reference's parameter; None if members have separate ones.
    """
    is_number = tensor.is_floating_point() or tensor.is_complex()
    is_trained = original is None or original.requires_grad
    if is_number and is_trained and not tensor.is_inference():
        tensor.requires_grad_()


def _along_channels(values: Tensor, layer: Layer, x: Tensor) -> Tensor:
    return values.to(x.dtype).view(-1, *(1,) * layer.spatial)


def structure_of(reference: nn.Module) -> list[Any]:
    """Return the modules, hooks and parameter shapes of a network; copies are valid for these.

    Args:
        reference: The reference.
    """
    structure = []
    for module in reference.modules():
        hooks = (*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks)
        parameters = [(k, p.shape) for k, p in module._parameters.items() if p is not None]
        structure.append((id(module), hooks, parameters))
    return structure


def copy_attributes(attributes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return a deep copy of the attributes of a member, without autograd graphs.

    Args:
        attributes: Values by module and name.
    """
    memo: dict[int, Any] = {}
    for value in tree_leaves(attributes):
        if isinstance(value, Tensor) and not value.is_leaf:
            memo[id(value)] = value.detach().clone()
    return copy.deepcopy(attributes, memo)
