r"""Weights of one member: the reference's, changed as the specification says.

In a modulated layer they are :math:`v_a u_a^\top \circ W` and :math:`v_a \circ b`. Low-rank members
multiply weights by, or add, a matrix of low rank. Separate tensors take the place of the
reference's.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from embens.sites import Layer
from embens.spec import EnsembleSpec, LowRankSite


def member_tensors(
    reference: nn.Module,
    layers: Mapping[str, Layer],
    spec: EnsembleSpec,
    values: Mapping[str, Tensor],
    computed: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the tensors of one member that differ from the reference's.

    Args:
        reference: The ensemble's copy of the reference.
        layers: Its parameter layers.
        spec: How members differ.
        values: The member's values, without the member axis.
        computed: Tensors of parametrized layers, evaluated once for all members.

    Returns:
        A dictionary from names such as ``"layer.weight"`` to tensors.
    """
    tensors = _MemberTensors(reference, computed)
    for item in spec.per_member:
        for key in item.tensors:
            name = f"{item.module}.{key}".lstrip(".")
            tensors.changed[name] = values[name]
    for site in spec.low_rank:
        product = values[f"{site.layer}.left"] @ values[f"{site.layer}.right"]
        _add_low_rank(tensors, layers[site.layer], site, product)
    for name, (pre, post) in modulations_by_layer(spec, values).items():
        if layers[name].mergeable:
            _modulate_layer(tensors, layers[name], pre, post)
    return tensors.changed


class _MemberTensors:
    """Tensors of a member, of which only the changed ones are stored.

    Args:
        reference: The reference.
        computed: Tensors of parametrized layers.
    """

    def __init__(self, reference: nn.Module, computed: Mapping[str, Tensor]):
        self.reference = reference
        self.computed = computed
        self.changed: dict[str, Tensor] = {}

    def get(self, layer: Layer, key: str) -> Tensor:
        """Return a tensor of the module of a layer."""
        name = f"{layer.module}.{key}".lstrip(".")
        if name in self.changed:
            return self.changed[name]
        if name in self.computed:
            return self.computed[name]
        return getattr(self.reference.get_submodule(layer.module), key)

    def set(self, layer: Layer, key: str, tensor: Tensor) -> None:
        """Change a tensor of the module of a layer."""
        self.changed[f"{layer.module}.{key}".lstrip(".")] = tensor


def _add_low_rank(
    tensors: _MemberTensors, layer: Layer, site: LowRankSite, product: Tensor
) -> None:
    """Change the weights of a layer by a matrix of low rank.

    Args:
        tensors: Tensors of the member, changed in place.
        layer: The layer.
        site: The low-rank site; its kind says whether weights are multiplied or added to.
        product: The matrix, with the columns of all weights side by side as in ``layer.matrix``.
    """
    first_column = 0
    for key in layer.weights:
        tensor = tensors.get(layer, key)
        weight = layer.part(tensor)
        columns = weight[0].numel()
        delta = product.narrow(1, first_column, columns).reshape(weight.shape)
        weight = weight * (1 + delta) if site.kind == "multiplicative" else weight + delta
        tensors.set(layer, key, layer.with_part(tensor, weight))
        first_column += columns


def _modulate_layer(
    tensors: _MemberTensors, layer: Layer, pre: Tensor | None, post: Tensor | None
) -> None:
    """Modulate the weights and biases of a layer; ``tensors`` are changed in place."""
    for key in layer.weights:
        # ``post`` scales the inputs of the layer, not the hidden state of a recurrent one.
        input_scale = None if key in layer.recurrent else post
        tensor = tensors.get(layer, key)
        weight = modulated_weight(layer, layer.part(tensor), pre, input_scale)
        tensors.set(layer, key, layer.with_part(tensor, weight))
    if pre is None:
        return
    for key in layer.biases:
        tensor = tensors.get(layer, key)
        tensors.set(layer, key, layer.with_part(tensor, layer.part(tensor) * pre))


def modulations_by_layer(
    spec: EnsembleSpec, values: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Return one member's modulations of each layer, one value per channel.

    Args:
        spec: How members differ.
        values: The member's values, without the member axis.

    Returns:
        ``pre`` and ``post`` by the name of the layer.
    """
    by_layer: dict[str, tuple[Tensor | None, Tensor | None]] = {}
    for site in spec.sites:
        value = values[site.key]
        if site.repeat > 1:
            value = value.repeat_interleave(site.repeat)
        pre, post = by_layer.get(site.layer, (None, None))
        by_layer[site.layer] = (value, post) if site.kind == "pre" else (pre, value)
    return by_layer


def modulated_weight(
    layer: Layer, weight: Tensor, pre: Tensor | None, post: Tensor | None
) -> Tensor:
    r"""Return one member's weight :math:`v u^\top \circ W`.

    Args:
        layer: The layer that the weight belongs to.
        weight: The weight, the rows of this layer only.
        pre: :math:`v` of one member, ``(out,)``, or None.
        post: :math:`u` of one member, ``(in,)``, or None.

    Returns:
        A tensor of the shape of the weight.

    Example:
        >>> from embens.sites import find_layers
        >>> layer = find_layers(nn.Linear(2, 3))[""]
        >>> v, u = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, -1.0])
        >>> modulated_weight(layer, torch.ones(3, 2), v, u)
        tensor([[ 1., -1.],
                [ 2., -2.],
                [ 3., -3.]])
    """
    scale = _weight_scale(layer, pre, post)
    if scale is None:
        return weight
    kernel_axes = weight.dim() - 2
    return weight * scale.reshape(*scale.shape, *(1,) * kernel_axes)


def _weight_scale(layer: Layer, pre: Tensor | None, post: Tensor | None) -> Tensor | None:
    """Return the factors for the first two axes of a weight; an axis without factors has size 1."""
    if pre is None and post is None:
        return None
    if layer.groups > 1:
        return _grouped_scale(layer, pre, post)
    if pre is None:
        assert post is not None
        scale = post.unsqueeze(0)
    elif post is None:
        scale = pre.unsqueeze(1)
    else:
        scale = torch.outer(pre, post)
    return scale.mT if layer.transposed else scale


def _grouped_scale(layer: Layer, pre: Tensor | None, post: Tensor | None) -> Tensor:
    """Return the factors of a grouped convolution's weight, ``(out, in / groups)`` or swapped."""
    assert layer.inputs is not None
    assert layer.outputs is not None
    groups = layer.groups
    example = pre if pre is not None else post
    assert example is not None
    scale = example.new_ones(groups, layer.outputs // groups, layer.inputs // groups)
    if pre is not None:
        scale = scale * pre.view(groups, -1, 1)
    if post is not None:
        scale = scale * post.view(groups, 1, -1)
    if layer.transposed:
        scale = scale.mT
    return scale.flatten(0, 1)
