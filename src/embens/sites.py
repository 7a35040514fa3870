r"""Parameter layers and the sites of their modulations.

Member :math:`a` of an ensemble is the reference with other weights. In a modulated layer they are

.. math:: W_a = v_a u_a^\top \circ W, \qquad b_a = v_a \circ b ,

where ``post`` (:math:`u`) multiplies the input of the layer and ``pre`` (:math:`v`) its output. A
*site* is one side of one layer. A :class:`Layer` says where a layer keeps its weights and which of
their axes are inputs and outputs; :func:`register_layer` adds kinds of layers.
"""

import copy
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from embens.laws import Law

if TYPE_CHECKING:
    from embens.spec import PerMember

Side = Literal["pre", "post"]
Channels = Callable[[Any], tuple[int | None, int | None]]

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


_STANDARD_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


# Layers


@dataclass(frozen=True)
class Layer:
    """One parameter layer of a reference.

    Attributes:
        name: The name of the layer and its sites. It is the name of the module; projections of an
            ``nn.MultiheadAttention`` called ``attention`` are ``attention.q_proj`` and so on.
        module: The name of the module that holds the tensors.
        weights: Names of the weights in that module.
        biases: Names of the biases in that module.
        inputs: Number of input channels; None if the inputs are indices.
        outputs: Number of output channels; None if the output can't be modulated.
        spatial: Number of axes that follow the channels in inputs and outputs.
        groups: Number of groups of a convolution.
        transposed: Whether weights have the axes ``(in, out, …)`` instead of ``(out, in, …)``.
        rows: Start and end of its rows in the packed weights of attention; None for whole tensors.
        recurrent: Names of the weights that multiply the hidden state instead of the input.
        mergeable: Whether scaled weights and biases have the effect of scaled inputs and outputs.
            False for layers that compute their weight in the forward; these are scaled by hooks.
    """

    name: str
    module: str
    weights: tuple[str, ...] = ("weight",)
    biases: tuple[str, ...] = ()
    inputs: int | None = None
    outputs: int | None = None
    spatial: int = 0
    groups: int = 1
    transposed: bool = False
    rows: tuple[int, int] | None = None
    recurrent: tuple[str, ...] = ()
    mergeable: bool = True

    def channels(self, side: Side) -> int | None:
        """Return the number of channels on one side of the layer.

        Args:
            side: "pre" (the output) or "post" (the input).

        Returns:
            The number of channels; None if this side cannot be modulated.
        """
        if side == "pre":
            return self.outputs
        return self.inputs

    def part(self, tensor: Tensor) -> Tensor:
        """Return the rows of a weight or bias that belong to this layer.

        Args:
            tensor: A tensor of the module of the layer.

        Returns:
            A view of the rows; the whole tensor unless the module packs several layers.
        """
        if self.rows is None or tensor.shape[0] == self.outputs:
            return tensor
        return tensor[self.rows[0] : self.rows[1]]

    def with_part(self, tensor: Tensor, part: Tensor) -> Tensor:
        """Return a weight or bias with other rows in the place of this layer's.

        Args:
            tensor: A tensor of the module of the layer.
            part: The new rows, with the shape of :meth:`part`.

        Returns:
            A new tensor, or ``part`` if it is the whole tensor.
        """
        if self.rows is None or tensor.shape[0] == self.outputs:
            return part
        return torch.cat([tensor[: self.rows[0]], part, tensor[self.rows[1] :]])

    def matrix(self, module: nn.Module) -> Tensor:
        """Return the weights of the layer side by side, the first axis against all others.

        Args:
            module: The module of the layer.

        Returns:
            The weights, ``(rows, columns)``.
        """
        if parametrize.is_parametrized(module):
            # Evaluating a parametrization in training mode may change its buffers.
            module = copy.deepcopy(module).eval()
        parts = [self.part(getattr(module, name)).flatten(1) for name in self.weights]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@dataclass(frozen=True)
class LayerKind:
    """The channels and the weight layout of one class of layers.

    Attributes:
        channels: Function of a layer that returns its input and output channels.
        weight: Order of the first two axes of its weight, "out in" or "in out"; "" if the layer is
            not linear in its weight.
    """

    channels: Channels
    weight: str = ""


_KINDS: dict[type | str, LayerKind] = {
    nn.Linear: LayerKind(lambda layer: (layer.in_features, layer.out_features), "out in"),
    _ConvTransposeNd: LayerKind(lambda layer: (layer.in_channels, layer.out_channels), "in out"),
    _ConvNd: LayerKind(lambda layer: (layer.in_channels, layer.out_channels), "out in"),
    nn.Embedding: LayerKind(lambda layer: (None, layer.embedding_dim), "in out"),
    nn.RNNBase: LayerKind(lambda layer: (layer.input_size, len(layer.weight_ih_l0)), "out in"),
    "transformers.pytorch_utils.Conv1D": LayerKind(
        lambda layer: tuple(layer.weight.shape), "in out"
    ),
}
"""Kinds by class, or by the full name of a class of a library that need not be installed."""

_STOCK_MODULES = ("torch.nn.modules.", "embens.networks", "transformers.pytorch_utils")
"""Python modules whose layers are known to be linear in weight and bias."""


def register_layer(kind: type | str, channels: Channels, *, weight: str = "") -> None:
    """Register a class of layers, so that its inputs and outputs become sites.

    Args:
        kind: A module class, or its full name ``"package.module.Class"``.
        channels: A function of a layer that returns its input and output channels, the
            sizes of the last axes of its input and output.
        weight: The order of the axes of ``layer.weight``, ``"out in"`` or ``"in out"``, for layers
            whose output is linear in ``layer.weight`` and ``layer.bias``. Members then have plain
            layers with other weights. ``""``: members scale inputs and outputs with hooks.

    Raises:
        TypeError: If ``channels`` is not callable.
        ValueError: If ``weight`` is not one of the three values.

    Example:
        >>> import torch
        >>> class Swapped(nn.Module):  # x @ weight, as in GPT-2
        ...     def __init__(self, inputs, outputs):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.randn(inputs, outputs))
        ...
        ...     def forward(self, x):
        ...         return x @ self.weight
        >>> register_layer(Swapped, lambda layer: layer.weight.shape, weight="in out")
    """
    if weight not in ("", "out in", "in out"):
        raise ValueError(f"weight must be '', 'out in' or 'in out', got {weight!r}.")
    if not callable(channels):
        raise TypeError(f"channels must be a function of a layer, got {channels!r}.")
    _KINDS[kind] = LayerKind(channels, weight)


def kind_of(module: nn.Module) -> LayerKind | None:
    """Return the kind of a parameter layer, or None if the module is not one.

    Args:
        module: Any module.
    """
    for cls in type(module).__mro__:
        kind = _KINDS.get(cls) or _KINDS.get(f"{cls.__module__}.{cls.__qualname__}")
        if kind is not None:
            return kind
    return None


def is_elementwise_dropout(module: nn.Module) -> bool:
    """Return whether a dropout layer declares that it treats every value as torch's does.

    Tracing looks into other subclasses of ``nn.Dropout``, as their code may do anything.
    """
    return isinstance(module, nn.Dropout) and getattr(module, "is_elementwise", False)


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is a parameter layer or an attention.

    Args:
        module: Any module.
    """
    return kind_of(module) is not None or isinstance(module, nn.MultiheadAttention)


def find_layers(reference: nn.Module) -> dict[str, Layer]:
    """Return the parameter layers of a network by name, in the order of registration.

    Args:
        reference: Any module. A module that is registered twice is listed once.

    Returns:
        A dictionary from names to layers. An attention contributes four layers, ``q_proj``,
        ``k_proj``, ``v_proj`` and ``out_proj``. A recurrent module called ``core`` contributes one
        layer for each level and direction: ``core``, ``core.l0_reverse``, ``core.l1``, ….

    Example:
        >>> layers = find_layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
        >>> {name: (layer.inputs, layer.outputs) for name, layer in layers.items()}
        {'0': (2, 3), '2': (3, 1)}
    """
    layers: dict[str, Layer] = {}
    for name, module in reference.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            for projection in _attention_layers(name, module):
                layers[projection.name] = projection
        elif isinstance(module, nn.RNNBase):
            for level in _recurrent_layers(name, module):
                layers[level.name] = level
        elif name not in layers and kind_of(module) is not None:
            layers[name] = _layer(name, module)
    return layers


def _layer(name: str, module: nn.Module) -> Layer:
    kind = kind_of(module)
    assert kind is not None
    inputs, outputs = kind.channels(module)
    biases = ()
    if getattr(module, "bias", None) is not None:
        biases = ("bias",)
    return Layer(
        name,
        name,
        biases=biases,
        inputs=inputs,
        outputs=outputs,
        spatial=len(module.kernel_size) if isinstance(module, _ConvNd) else 0,
        groups=module.groups if isinstance(module, _ConvNd) else 1,
        transposed=kind.weight == "in out",
        mergeable=_is_mergeable(module, kind),
    )


def _is_mergeable(module: nn.Module, kind: LayerKind) -> bool:
    """Return whether scaling weight and bias has the effect of scaling input and output."""
    # Reading the weight would evaluate a parametrization, which may have side effects.
    is_computed = parametrize.is_parametrized(module, "weight")
    if not kind.weight or (module._parameters.get("weight") is None and not is_computed):
        return False
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return False  # rows are renormalised after scaling
    if not isinstance(module, (nn.Linear, _ConvNd, nn.Embedding)):
        return True  # registered with the order of its axes
    for method in ("forward", "_conv_forward"):
        # A user's subclass may compute something that is not linear in the weight.
        owners = [cls for cls in type(module).__mro__ if method in vars(cls)]
        if owners and not owners[0].__module__.startswith(_STOCK_MODULES):
            return False
    return True


def _attention_layers(name: str, module: nn.MultiheadAttention) -> list[Layer]:
    """Return the four projections of an attention."""
    width = module.embed_dim
    input_widths = {"q_proj": width, "k_proj": module.kdim, "v_proj": module.vdim}
    layers = []
    for index, (projection, inputs) in enumerate(input_widths.items()):
        rows = (index * width, (index + 1) * width)
        packed = module.in_proj_weight is not None
        layers.append(
            Layer(
                f"{name}.{projection}".lstrip("."),
                name,
                weights=("in_proj_weight",) if packed else (f"{projection}_weight",),
                biases=() if module.in_proj_bias is None else ("in_proj_bias",),
                inputs=inputs,
                outputs=width,
                rows=rows,
            )
        )
    out_name = f"{name}.out_proj".lstrip(".")
    biases = () if module.out_proj.bias is None else ("bias",)
    layers.append(Layer(out_name, out_name, biases=biases, inputs=width, outputs=width))
    return layers


def _recurrent_layers(name: str, module: nn.RNNBase) -> list[Layer]:
    """Return the levels and directions of an RNN, LSTM or GRU.

    The output of such a layer are its gates before their activation functions. ``pre`` multiplies
    them, so it scales both weights and both biases. ``post`` multiplies the input, not the hidden
    state.
    """
    suffixes = ["", "_reverse"] if module.bidirectional else [""]
    layers = []
    for level in range(module.num_layers):
        for suffix in suffixes:
            key = f"l{level}{suffix}"
            gates, inputs = getattr(module, f"weight_ih_{key}").shape
            layers.append(
                Layer(
                    name if key == "l0" else f"{name}.{key}".lstrip("."),
                    name,
                    weights=(f"weight_ih_{key}", f"weight_hh_{key}"),
                    biases=(f"bias_ih_{key}", f"bias_hh_{key}") if module.bias else (),
                    inputs=inputs,
                    outputs=gates,
                    recurrent=(f"weight_hh_{key}",),
                )
            )
    return layers


# Sites


@dataclass(frozen=True)
class Site:
    """One modulated side of one layer.

    Attributes:
        layer: Name of the layer.
        kind: "pre" (the layer's output) or "post" (its input).
        law: Distribution of the initial values.
        size: Number of values per member.
        repeat: Number of consecutive features per value, for a Linear layer after a Flatten.
        trainable: Whether the values are parameters; otherwise they are fixed.
        fresh: Whether new values are drawn at every pass.
        hidden: Whether it is one of the paper's hidden sites.
    """

    layer: str
    kind: Side
    law: Law
    size: int
    repeat: int = 1
    trainable: bool = True
    fresh: bool = False
    hidden: bool = True

    @property
    def key(self) -> str:
        """The name of its values, such as "layer.pre"."""
        return f"{self.layer}.{self.kind}"


def match(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that match a name or wildcard.

    Args:
        pattern: A name or a wildcard.
        names: The names to choose from.

    Returns:
        The matching names in their order; a full name matches itself alone.
    """
    names = list(names)
    if pattern in names:
        return [pattern]
    return fnmatch.filter(names, pattern)


def is_within(name: str, outer: Iterable[str]) -> bool:
    """Return whether a module is one of some modules, or lies inside one.

    Args:
        name: Name of a module.
        outer: Names of modules.
    """
    return any(name == o or not o or name.startswith(o + ".") for o in outer)


# Layers of an embedded reference


def tensor_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters and buffers that a module holds itself.

    Args:
        module: Any module; those inside it do not count.
    """
    names = []
    for table in (module._parameters, module._buffers):
        names += [name for name, tensor in table.items() if tensor is not None]
    return tuple(names)


def weight_shapes(
    reference: nn.Module, layers: Mapping[str, Layer], names: Iterable[str]
) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of the weights of some layers; layers that are gone are left out.

    Args:
        reference: The network.
        layers: Its layers by name.
        names: Names of the layers.
    """
    shapes = {}
    for name in names:
        layer = layers.get(name)
        if layer is None:
            continue
        module = reference.get_submodule(layer.module)
        weights = [module._parameters.get(weight_name) for weight_name in layer.weights]
        shapes[name] = [tuple(weight.shape) for weight in weights if weight is not None]
    return shapes


def check_layers(
    reference: nn.Module,
    layers: Mapping[str, Layer],
    expected: Mapping[str, list[tuple[int, ...]]],
) -> None:
    """Raise ValueError if a layer in which members differ is gone or has another shape.

    Args:
        reference: The network.
        layers: Its layers by name.
        expected: Shapes of the weights when the ensemble was made, by layer.
    """
    shapes = weight_shapes(reference, layers, expected)
    for name, before in expected.items():
        after = shapes.get(name)
        if after == before:
            continue
        layer = layers.get(name)
        if layer and parametrize.is_parametrized(reference.get_submodule(layer.module)):
            continue  # the weight is computed; it is a parameter no more
        raise ValueError(
            f"the layer {name!r} was changed after embedding: its weights had the shapes {before}, "
            f"now {after or 'it is no parameter layer'}. Embed the changed reference."
        )


def release_tensors(reference: nn.Module, items: Iterable["PerMember"]) -> None:
    """Remove tensors from the reference, because every member has separate ones.

    Args:
        reference: The network, changed in place.
        items: Modules and their per-member tensors.

    Raises:
        ValueError: If an attribute of a module holds such a tensor.
    """
    _refuse_held_tensors(reference, items)
    for item in items:
        for name in item.tensors:
            release_tensor(reference, item.module, name)


def release_tensor(reference: nn.Module, module: str, name: str) -> None:
    """Remove a tensor from the reference, because every member has a separate one.

    A placeholder without memory stays, as code may test whether the attribute is None.

    Args:
        reference: The network, changed in place.
        module: Name of the module that holds the tensor.
        name: Name of the parameter or buffer.
    """
    owner = reference.get_submodule(module)
    for table in (owner._parameters, owner._buffers):
        if name not in table:
            continue
        tensor = table.pop(name)
        assert tensor is not None
        owner._non_persistent_buffers_set.discard(name)
        placeholder = torch.empty_like(tensor, device="meta", requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            placeholder = nn.Parameter(placeholder, tensor.requires_grad)
        vars(owner)[name] = placeholder


def _refuse_held_tensors(reference: nn.Module, items: Iterable["PerMember"]) -> None:
    """Raise ValueError if an attribute of a module holds a tensor that becomes per-member."""
    separate = {}
    for item in items:
        for key in item.tensors:
            tensor = getattr(reference.get_submodule(item.module), key)
            separate[id(tensor)] = f"{item.module}.{key}".lstrip(".")
    for name, module in reference.named_modules():
        if type(module).__module__.startswith("torch.nn."):
            continue  # recurrent layers have lists of their weights, which they update
        for key, value in vars(module).items():
            if key in _STANDARD_ATTRIBUTES:
                continue
            full_name = f"{name}.{key}".lstrip(".")
            for leaf in tree_leaves(value):
                # The module of a per-member tensor holds its placeholder under the same name.
                if separate.get(id(leaf), full_name) != full_name:
                    raise ValueError(
                        f"the attribute {key!r} of {name or 'the reference'!r} holds the parameter "
                        f"{separate[id(leaf)]!r}, which members have separately. Read it from its "
                        "layer."
                    )


def check_placeholders(reference: nn.Module, items: Iterable["PerMember"]) -> None:
    """Raise ValueError if a module with per-member tensors was replaced after embedding.

    Args:
        reference: The network of an ensemble.
        items: Modules and their per-member tensors.
    """
    for item in items:
        module = reference.get_submodule(item.module)
        for name in item.tensors:
            if name in module._parameters or name in module._buffers:
                raise ValueError(
                    f"the layer {item.module!r} was changed after embedding, but members have "
                    f"separate versions of its {name!r}. Embed the changed reference."
                )
