r"""The merged executor: the definition of a member.

Member :math:`a` is the reference with other tensors: modulated weights
:math:`v_a u_a^\top \circ W`, low-rank or separate weights, and its own buffers.
:func:`member_tensors` computes them. The executor keeps a copy of the reference for each member. A
copy has the user's classes and code and shares every tensor that does not differ. Before a pass the
member's tensors are put into its parameter slots. So control flow, hooks, tied weights, code that
mixes samples, and state in attributes behave as in a separate network, and recomputation in the
backward pass finds the member's weights.
"""

import copy
import threading
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map_only

from embens.graph.guards import PLAIN, STANDARD_ATTRIBUTES, snapshot
from embens.graph.reading import copy_module
from embens.modes import constant_when_compiled
from embens.sites import EnsembleSpec, Layer, modulate

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble

_TABLES = ("_parameters", "_buffers", "_modules", "parametrizations")
_MISSING = object()


def member_tensors(
    reference: nn.Module,
    layers: Mapping[str, Layer],
    spec: EnsembleSpec,
    values: Mapping[str, Tensor],
    computed: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the tensors of one member that differ from the reference's.

    Args:
        reference: the ensemble's copy of the reference.
        layers: its parameter layers.
        spec: how members differ.
        values: the member's values, without the member axis.
        computed: tensors of parametrized layers, evaluated once for all members.

    Returns:
        A dictionary from names such as ``"layer.weight"`` to tensors.
    """
    tensors: dict[str, Tensor] = {}

    def current(layer: Layer, tensor_name: str) -> tuple[str, Tensor]:
        name = f"{layer.module}.{tensor_name}".lstrip(".")
        if name in tensors:
            return name, tensors[name]
        if name in computed:
            return name, computed[name]
        return name, getattr(reference.get_submodule(layer.module), tensor_name)

    for item in spec.per_member:
        for tensor_name in item.tensors:
            name = f"{item.module}.{tensor_name}".lstrip(".")
            tensors[name] = values[name]
    for site in spec.low_rank:
        layer = layers[site.layer]
        name, tensor = current(layer, layer.weights[0])
        weight = layer.part(tensor)
        delta = (values[f"{site.layer}.left"] @ values[f"{site.layer}.right"]).view_as(weight)
        weight = weight * (1 + delta) if site.kind == "multiplicative" else weight + delta
        tensors[name] = layer.with_part(tensor, weight)
    for layer_name, (pre, post) in modulations_by_layer(spec, values).items():
        layer = layers[layer_name]
        if not layer.mergeable:
            continue
        for tensor_name in layer.weights:
            name, tensor = current(layer, tensor_name)
            weight = modulate(layer, layer.part(tensor), "weight", pre, post)
            tensors[name] = layer.with_part(tensor, weight)
        if pre is not None:
            for tensor_name in layer.biases:
                name, tensor = current(layer, tensor_name)
                bias = modulate(layer, layer.part(tensor), "bias", pre, None)
                tensors[name] = layer.with_part(tensor, bias)
    return tensors


def modulations_by_layer(
    spec: EnsembleSpec, values: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Return one member's ``(pre, post)`` of each modulated layer, one value per channel."""
    by_layer: dict[str, tuple[Tensor | None, Tensor | None]] = {}
    for site in spec.sites:
        value = values[site.key]
        if site.repeat > 1:
            value = value.repeat_interleave(site.repeat)
        pre, post = by_layer.get(site.layer, (None, None))
        by_layer[site.layer] = (value, post) if site.kind == "pre" else (pre, value)
    return by_layer


class MergedExecutor:
    """Runs members one after another, each with its own tensors.

    Args:
        ensemble: the ensemble.
    """

    def __init__(self, ensemble: "EmbeddedEnsemble"):
        self.ensemble = ensemble
        self.lock = threading.RLock()  # a copy holds the tensors of one pass at a time
        self.copies: list[MemberCopy] = []
        self.structure: list[Any] = []
        # Attributes that the user's code has set, by member and module, for copies yet to be made.
        self.attributes: list[dict[str, dict[str, Any]]] = []
        self.checked_modes: set[tuple[bool, ...]] = set()
        self.changes_inputs = False  # whether the user's code changes its inputs in place

    def begin(self) -> dict[str, Tensor]:
        """Prepare a pass; return the tensors of parametrized layers, evaluated once."""
        self._prepare_copies()
        return computed_tensors(self.ensemble.reference)

    @constant_when_compiled
    def _prepare_copies(self) -> bool:
        """Make the copies again if the reference has other modules or hooks.

        The compiler cannot look into copying, so it calls this function instead.
        """
        structure = _structure(self.ensemble.reference)
        if structure != self.structure or len(self.copies) != self.ensemble.members:
            self._make_copies()
            self.structure = structure
        return True

    def _make_copies(self) -> None:
        attributes = self.member_attributes()
        self.copies = [MemberCopy(self.ensemble) for _ in range(self.ensemble.members)]
        for copied, member_attributes in zip(self.copies, attributes, strict=True):
            copied.set_attributes(member_attributes)

    def member_attributes(self) -> list[dict[str, dict[str, Any]]]:
        """Return the attributes that the user's code has set, by member and module."""
        if self.copies:
            return [copied.changed_attributes() for copied in self.copies]
        return self.attributes or [{} for _ in range(self.ensemble.members)]

    def run(
        self,
        a: int,
        args: tuple,
        kwargs: dict[str, Any],
        values: dict[str, Tensor],
        computed: Mapping[str, Tensor],
    ) -> Any:
        """Return the outputs of one member.

        Args:
            a: the member.
            args: positional arguments of the reference.
            kwargs: keyword arguments of the reference.
            values: values of all members in this pass, members first. Buffers that turn out to
                differ between members are added.
            computed: what :meth:`begin` returned.
        """
        ensemble = self.ensemble
        chosen = {name: stack[a] for name, stack in values.items()}
        tensors = member_tensors(
            ensemble.reference, ensemble.layers, ensemble.spec, chosen, computed
        )
        scales = modulations_by_layer(ensemble.spec, chosen)
        copied = self.copies[a]
        if torch.compiler.is_compiling():
            copied.sync()
            copied.scales = scales
            return torch.func.functional_call(
                copied.module, {**computed, **tensors}, args, kwargs, tie_weights=False
            )
        with self.lock:
            copied.bind({**computed, **tensors}, scales)
            mode = tuple(module.training for module in copied.module.modules())
            is_new = mode not in self.checked_modes
            guard = StateGuard(copied, keep_values=is_new)
            outputs = self._call(copied, args, kwargs, is_new=is_new)
            self.checked_modes.add(mode)
            copied.store_buffers(tensors)
            guard.check_parameters()
            for name, key, before, after in guard.changed_buffers():
                stack = ensemble.separate_buffer(name, key, before)
                stack[a] = after
                values[f"{name}.{key}".lstrip(".")] = stack
                for other in self.copies:
                    other.add_separate(name, key, "_buffers")
        return outputs

    def _call(self, copied: "MemberCopy", args: tuple, kwargs: dict, *, is_new: bool) -> Any:
        """Call a copy so that changes of its inputs are not seen by other members.

        Copying inputs costs memory, so after the first pass of each mode it is done only if the
        code was seen to change them.
        """
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_unversioned = any(tensor.is_inference() for tensor in tensors)
        is_copied = is_new or self.changes_inputs or is_unversioned
        if is_copied:
            clones = {id(tensor): tensor.clone() for tensor in tensors}
            tensors = list(clones.values())
            args, kwargs = tree_map_only(Tensor, lambda x: clones[id(x)], (args, kwargs))
        versions = [_version(tensor) for tensor in tensors]
        outputs = copied.module(*args, **kwargs)
        if [_version(tensor) for tensor in tensors] != versions:
            self.changes_inputs = True
            if not is_copied:
                raise RuntimeError(
                    "the forward of the reference changes its input in place in some passes only. "
                    "Let it change a copy (x = x.clone())."
                )
        return outputs


class MemberCopy:
    """A copy of the reference that holds the tensors of one member.

    Args:
        ensemble: the ensemble.
    """

    def __init__(self, ensemble: "EmbeddedEnsemble"):
        reference = ensemble.reference
        self.module = copy_module(reference)
        for module in list(self.module.modules()):
            _remove_parametrizations(module)
        # Modules of the reference with their copies, and the attributes that both began with.
        self.pairs: list[tuple[str, nn.Module, nn.Module, dict[str, Any]]] = []
        # Pictures of lists, dictionaries and objects that the reference holds, by module and name.
        self.pictures: dict[tuple[str, str], Any] = {}
        copies = dict(self.module.named_modules())
        for name, module in reference.named_modules():
            if name in copies:
                prefix = f"{name}." if name else ""
                self.pairs.append((prefix, module, copies[name], dict(vars(module))))
                for key, value in _containers(module):
                    self.pictures[prefix, key] = snapshot(value, set())
        self.separate: list[tuple[str, str, str]] = []  # module, tensor, table
        for item in ensemble.spec.per_member:
            for key in item.tensors:
                stack = ensemble.individual[f"{item.module}.{key}".lstrip(".")]
                table = "_parameters" if isinstance(stack, nn.Parameter) else "_buffers"
                self.add_separate(item.module, key, table)
        differing = {site.layer for site in (*ensemble.spec.sites, *ensemble.spec.low_rank)}
        differing |= {item.module for item in ensemble.spec.per_member}
        for name in differing & set(copies):
            if isinstance(copies[name], nn.Embedding):
                # torch cannot take sparse gradients through the member's weight.
                copies[name].sparse = False
        self.scales: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        for name in {site.layer for site in ensemble.spec.sites}:
            if not ensemble.layers[name].mergeable:
                self._scale_by_hooks(ensemble.layers[name])

    def add_separate(self, name: str, key: str, table: str) -> None:
        """Make a tensor of a module one of the member's own."""
        vars(self.module.get_submodule(name)).pop(key, None)
        self.separate.append((name, key, table))

    def sync(self) -> None:
        """Copy attributes that were changed on the reference, such as the training mode."""
        if not torch.compiler.is_compiling():  # it cannot follow pictures of objects
            self._sync_containers()
        for _, module, copied, before in self.pairs:
            for key, value in vars(module).items():
                if key in _TABLES or before.get(key, _MISSING) is value:
                    continue
                before[key] = value
                # The placeholder of a tensor that members have separately is not an attribute.
                if key not in copied._parameters and key not in copied._buffers:
                    vars(copied)[key] = value

    def _sync_containers(self) -> None:
        """Copy lists, dictionaries and objects whose contents were changed on the reference."""
        for prefix, module, copied, before in self.pairs:
            for key, value in _containers(module):
                picture = snapshot(value, set())
                if self.pictures.get((prefix, key)) == picture:
                    continue
                self.pictures[prefix, key] = picture
                memo: dict[int, Any] = {id(original): own for _, original, own, _ in self.pairs}
                for tensor in (*self.module.parameters(), *self.module.buffers()):
                    memo[id(tensor)] = tensor
                vars(copied)[key] = copy.deepcopy(value, memo)
                before[key] = value

    def changed_attributes(self) -> dict[str, dict[str, Any]]:
        """Return the attributes in which the copy differs from the reference, by module."""
        attributes = {}
        for prefix, _, copied, before in self.pairs:
            changed = {}
            for key, value in vars(copied).items():
                if key in STANDARD_ATTRIBUTES or before.get(key, _MISSING) is value:
                    continue
                # Containers of modules hold the modules of this copy.
                if not any(isinstance(leaf, nn.Module) for leaf in tree_leaves(value)):
                    changed[key] = value
            if changed:
                attributes[prefix] = changed
        return attributes

    def set_attributes(self, attributes: Mapping[str, dict[str, Any]]) -> None:
        """Set attributes that :meth:`changed_attributes` returned."""
        for prefix, _, copied, _ in self.pairs:
            vars(copied).update(attributes.get(prefix, {}))

    def bind(
        self,
        tensors: Mapping[str, Tensor],
        scales: dict[str, tuple[Tensor | None, Tensor | None]],
    ) -> None:
        """Put tensors into the parameter and buffer slots of the copy."""
        self.sync()
        self.scales = scales
        for prefix, module, copied, _ in self.pairs:
            for table in ("_parameters", "_buffers"):
                slots = getattr(copied, table)
                for key, tensor in getattr(module, table).items():
                    slots[key] = tensors.get(prefix + key, tensor)
            slots = copied.__dict__["_parameters"]
            for key in parametrized_names(module):
                slots[key] = tensors[prefix + key]
        for name, key, table in self.separate:
            slots = getattr(self.module.get_submodule(name), table)
            slots[key] = tensors[f"{name}.{key}".lstrip(".")]

    def store_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep per-member buffers that the code replaced instead of updating them in place."""
        for name, key, table in self.separate:
            if table != "_buffers":
                continue
            new = self.module.get_submodule(name)._buffers[key]
            old = tensors[f"{name}.{key}".lstrip(".")]
            if new is None or new is old:
                continue
            if new.shape != old.shape:
                raise ValueError(
                    f"the buffer {key!r} of {name or 'the reference'!r} changed its shape from "
                    f"{tuple(old.shape)} to {tuple(new.shape)}. Register it with its final shape."
                )
            with torch.no_grad():
                old.copy_(new)

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


class StateGuard:
    """Finds shared parameters and buffers that the user's code changes in a pass.

    Args:
        copied: the copy that is about to run.
        keep_values: whether to keep values, so that changes which torch does not count are seen,
            and changes of buffers can be undone. This is done in the first pass of each mode.
    """

    def __init__(self, copied: MemberCopy, *, keep_values: bool):
        self.parameters: list[tuple[str, Tensor, int, Tensor | None]] = []
        self.buffers: list[tuple[str, nn.Module, str, Tensor, int, Tensor | None]] = []
        for prefix, module, copied_module, _ in copied.pairs:
            if getattr(module, "max_norm", None) is not None:
                continue  # an embedding that renormalises its rows does so for every member alike
            for key in module._parameters:
                parameter = copied_module._parameters.get(key)
                if parameter is not None:
                    saved = parameter.detach().clone() if keep_values else None
                    self.parameters.append((prefix + key, parameter, _version(parameter), saved))
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    saved = buffer.detach().clone() if keep_values else None
                    name = prefix.removesuffix(".")
                    version = _version(buffer)
                    self.buffers.append((name, copied_module, key, buffer, version, saved))

    def check_parameters(self) -> None:
        """Raise if the pass changed a parameter in place."""
        for name, parameter, version, saved in self.parameters:
            # Changes of ``parameter.data`` have no version.
            is_changed = saved is not None and not _is_equal(parameter.detach(), saved)
            if is_changed or _version(parameter) != version:
                raise RuntimeError(
                    f"the forward of the reference changes its parameter {name!r} in place, and "
                    "members share it. Make it a buffer (register_buffer)."
                )

    def changed_buffers(self) -> list[tuple[str, str, Tensor, Tensor]]:
        """Return module, name, old and new value of buffers that the pass changed."""
        changes = []
        for name, copied_module, key, buffer, version, saved in self.buffers:
            new = copied_module._buffers.get(key)
            is_changed = new is not buffer or _version(buffer) != version
            if not is_changed and saved is not None:
                # torch's batch_norm updates its statistics without counting a version.
                is_changed = not _is_equal(buffer, saved)
            if not is_changed:
                continue
            full_name = f"{name}.{key}".lstrip(".")
            if saved is None or new is None or new.shape != buffer.shape:
                raise RuntimeError(
                    f"the forward of the reference changes the buffer {full_name!r} in some passes "
                    "only, or changes its shape. Update it in every pass, with one shape."
                )
            changes.append((name, key, saved, new.detach().clone()))
        return changes


def _containers(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the attributes of a module that hold values of their own."""
    shared = (*PLAIN, Tensor, nn.Module, FunctionType, MethodType, type)
    containers = []
    for key, value in vars(module).items():
        if key not in STANDARD_ATTRIBUTES and not isinstance(value, shared):
            containers.append((key, value))
    return containers


def _along_channels(values: Tensor, layer: Layer, x: Tensor) -> Tensor:
    return values.to(x.dtype).view(-1, *(1,) * layer.spatial)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_equal(left: Tensor, right: Tensor) -> bool:
    if left.is_meta:
        return True
    return bool(((left == right) | ((left != left) & (right != right))).all())


def _structure(reference: nn.Module) -> list[Any]:
    """Return what has to stay as it is for copies to be valid: modules and hooks."""
    structure = []
    for module in reference.modules():
        hooks = (*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks)
        structure.append((id(module), hooks))
    return structure


def _remove_parametrizations(module: nn.Module) -> None:
    """Turn a copy of a parametrized module into a plain one with empty parameter slots.

    ``parametrize.remove_parametrizations`` would change the class that the copy shares with the
    reference.
    """
    names = parametrized_names(module)
    if names:
        del module._modules["parametrizations"]
        module.__class__ = type(module).__mro__[1]
        for name in names:
            module._parameters[name] = None


def computed_tensors(reference: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that parametrizations compute, by name."""
    tensors = {}
    for name, module in reference.named_modules():
        for key in parametrized_names(module):
            tensors[f"{name}.{key}".lstrip(".")] = getattr(module, key)
    return tensors


def parametrized_names(module: nn.Module) -> list[str]:
    """Return the names of the tensors that parametrizations of a module compute."""
    if not parametrize.is_parametrized(module):
        return []
    parametrizations: Any = module.parametrizations
    return list(parametrizations)


def copy_attributes(attributes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return a deep copy of the attributes of a member, without autograd graphs."""
    memo: dict[int, Any] = {}
    for value in tree_leaves(attributes):
        if isinstance(value, Tensor) and not value.is_leaf:
            memo[id(value)] = value.detach().clone()
    return copy.deepcopy(attributes, memo)


def plain_member(ensemble: "EmbeddedEnsemble", a: int) -> nn.Module:
    """Return a member as a plain network that shares no tensor with the ensemble."""
    values: dict[str, Tensor] = {}
    tied: dict[int, Tensor] = {}  # tied tensors of a member stay tied
    for name, stack in ensemble.sample_values().items():
        values[name] = tied.setdefault(id(stack), stack.detach()[a])
    with torch.no_grad():
        computed = computed_tensors(ensemble.reference)
        tensors = member_tensors(
            ensemble.reference, ensemble.layers, ensemble.spec, values, computed
        )
        scales = modulations_by_layer(ensemble.spec, values)
        attributes = ensemble.merged.member_attributes()[a]
        return plain_network(ensemble, {**computed, **tensors}, scales, attributes)


def plain_network(
    ensemble: "EmbeddedEnsemble",
    tensors: Mapping[str, Tensor],
    scales: dict[str, tuple[Tensor | None, Tensor | None]],
    attributes: Mapping[str, dict[str, Any]] | None = None,
) -> nn.Module:
    """Return a copy of the reference with some tensors replaced; all tensors are cloned.

    Args:
        ensemble: the ensemble.
        tensors: tensors to replace, by name.
        scales: modulations of layers that are scaled by hooks.
        attributes: attributes that the member's code has assigned, by module.
    """
    copied = MemberCopy(ensemble)
    copied.set_attributes(attributes or {})
    copied.bind(tensors, scales)
    trainable = {name: p.requires_grad for name, p in ensemble.reference.named_parameters()}
    clones: dict[int, Any] = {}
    for name, module in copied.module.named_modules():
        prefix = f"{name}." if name else ""
        for key, tensor in module._parameters.items():
            if tensor is not None and id(tensor) not in clones:
                flag = trainable.get(prefix + key, True)
                if prefix + key in ensemble.individual:
                    flag = ensemble.individual[prefix + key].requires_grad
                clones[id(tensor)] = nn.Parameter(tensor.detach().clone(), flag)
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in clones:
                clones[id(buffer)] = buffer.detach().clone()
    return copy_module(copied.module, clones)
