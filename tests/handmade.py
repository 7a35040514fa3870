"""Members made by hand: plain copies of a reference with multiplied weights.

This is a road of its own to what a member is. It uses neither the executors nor
``ensemble.member``: weights are multiplied here, layer by layer, and put into a network like the
reference, which then runs alone.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from embens import networks
from embens.spec import EnsembleSpec

Scales = dict[str, tuple[Tensor | None, Tensor | None]]


class Scale(nn.Module):
    """A parametrization that multiplies a weight by a plain tensor, and adds another one."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.factor + self.shift


class HandMember:
    """One member as a plain network whose state lives on from pass to pass.

    Args:
        module: a network like the reference, which becomes the member.
        spec: how members differ.
    """

    def __init__(self, module: nn.Module, spec: EnsembleSpec):
        self.spec = spec
        self.module = module
        self.names = [name for name, _ in parameters_of(module)]
        self.layers = sorted({site.layer for site in (*self.spec.sites, *self.spec.low_rank)})
        self.scales: Scales = {}
        self.factors: dict[str, Scale] = {}
        for layer in self.layers:
            self._prepare(layer)
        for item in self.spec.per_member:
            module = self.module.get_submodule(item.module)
            for key in item.tensors:
                if key in module._parameters:
                    self._untie(module, key)

    def _prepare(self, layer: str) -> None:
        """Give a modulated layer weights of its own, or hooks where it computes its weight."""
        owner, keys = weights_of(self.module, layer)
        module = self.module.get_submodule(owner)
        if computes_weight(module):
            module.register_forward_pre_hook(lambda m, args: self._scale_input(layer, args))
            module.register_forward_hook(lambda m, args, y: self._scale_output(layer, y))
            return
        for key in keys:
            if parametrize.is_parametrized(module, key):
                self.factors[f"{owner}.{key}"] = Scale()
                parametrize.register_parametrization(
                    module, key, self.factors[f"{owner}.{key}"], unsafe=True
                )
            elif module._parameters.get(key) is not None:
                self._untie(module, key)

    def _untie(self, module: nn.Module, key: str) -> None:
        parameter = module._parameters[key]
        assert parameter is not None
        holders = 0
        for part in self.module.modules():
            holders += sum(p is parameter for p in part._parameters.values())
        if holders > 1:
            copied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            module._parameters[key] = copied

    def _scale_input(self, layer: str, args: tuple) -> tuple:
        post = self.scales[layer][1]
        return args if post is None else (args[0] * post, *args[1:])

    def _scale_output(self, layer: str, y: Tensor) -> Tensor:
        pre = self.scales[layer][0]
        return y if pre is None else y * pre

    def bind(self, shared: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> "Binding":
        """Set the weights of a pass.

        Args:
            shared: parameters of the reference by name.
            values: the member's values by name.

        Returns:
            The weights as functions of the arguments, and the leaves that now hold them.
        """
        weights = {name: shared[name] for name in self.names if name in shared}
        for item in self.spec.per_member:
            for key in item.tensors:
                name = join(item.module, key)
                if name in self.names:
                    weights[name] = values[name]
        binding = Binding()
        for site in self.spec.low_rank:
            owner, keys = weights_of(self.module, site.layer)
            product = values[f"{site.layer}.left"] @ values[f"{site.layer}.right"]
            for key in keys:
                if "bias" in key:
                    continue
                name = join(owner, key)
                if name in self.factors:
                    self._set_low_rank(self.factors[name], site.kind, product, binding)
                    continue
                rows = rows_of(self.module, site.layer, weights[name])
                weight = weights[name][rows]
                # The weights of a recurrent layer are side by side in the product.
                part, product = product.tensor_split([weight[0].numel()], dim=1)
                part = part.reshape(weight.shape)
                if site.kind == "multiplicative":
                    part = weight * part
                weights[name] = replace_rows(weights[name], rows, weight + part)
        self._modulate(weights, values, binding)
        parameters = dict(parameters_of(self.module))
        for name, weight in weights.items():
            binding.put(parameters[name], weight)
        return binding

    def _set_low_rank(self, scale: Scale, kind: str, product: Tensor, binding: "Binding") -> None:
        zero, one = torch.zeros(()), torch.ones(())
        if kind == "multiplicative":
            scale.factor, scale.shift = binding.leaf(1 + product), zero
        else:
            scale.factor, scale.shift = one, binding.leaf(product)

    def _modulate(
        self, weights: dict[str, Tensor], values: Mapping[str, Tensor], binding: "Binding"
    ) -> None:
        self.scales = {}
        for layer in self.layers:
            pre, post = modulations(self.spec, layer, values)
            owner, keys = weights_of(self.module, layer)
            module = self.module.get_submodule(owner)
            self.scales[layer] = (binding.leaf(pre), binding.leaf(post))
            if computes_weight(module):
                continue
            for key in keys:
                name = join(owner, key)
                if pre is None and post is None:
                    continue  # a low-rank layer
                if f"{owner}.{key}" in self.factors:
                    # Reading the weight would evaluate the parametrization.
                    shape = torch.Size((module.out_features, module.in_features))
                    factor = factor_of(module, key, shape, pre, post)
                    self.factors[f"{owner}.{key}"].factor = binding.leaf(factor)
                    self.factors[f"{owner}.{key}"].shift = torch.zeros(())
                elif name in weights:
                    rows = rows_of(self.module, layer, weights[name])
                    part = weights[name][rows]
                    factor = factor_of(module, key, part.shape, pre, post)
                    weights[name] = replace_rows(weights[name], rows, part * factor)


class Binding:
    """Weights as functions of leaves elsewhere, and the leaves of the member that hold them."""

    def __init__(self):
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def leaf(self, value: Tensor | None) -> Tensor | None:
        """Return a leaf with a value."""
        if value is None:
            return None
        leaf = value.detach().clone().requires_grad_()
        self.pairs.append((value, leaf))
        return leaf

    def put(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Copy a value into a parameter of the member."""
        with torch.no_grad():
            parameter.copy_(value)
        # The values in a weight may be trained although the weight is not.
        parameter.requires_grad_(value.requires_grad)
        parameter.grad = None
        self.pairs.append((value, parameter))

    def backward(self) -> None:
        """Send the gradients of the member's leaves back to the leaves elsewhere."""
        seen = set()
        for value, leaf in self.pairs:
            if leaf.grad is not None and value.requires_grad and id(leaf) not in seen:
                seen.add(id(leaf))
                value.backward(leaf.grad.to_dense(), retain_graph=True)


def parameters_of(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return all parameters by name; tied ones occur more than once, modules do not."""
    parameters = []
    for name, module in root.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                parameters.append((join(name, key), parameter))
    return parameters


def join(module: str, tensor: str) -> str:
    """Return the dotted name of a tensor."""
    return f"{module}.{tensor}" if module else tensor


def weights_of(root: nn.Module, layer: str) -> tuple[str, tuple[str, ...]]:
    """Return the module of a layer, and the names of its weights and biases, weights first."""
    owner, _, last = layer.rpartition(".")
    if last in ("q_proj", "k_proj", "v_proj"):
        attention = root.get_submodule(owner)
        if isinstance(attention, nn.MultiheadAttention):
            key = f"{last}_weight" if attention.in_proj_weight is None else "in_proj_weight"
            return owner, (key, "in_proj_bias")
    level = "l0"
    is_recurrent = isinstance(root.get_submodule(owner), nn.RNNBase)
    if is_recurrent and re.fullmatch(r"l\d+(_reverse)?", last):  # a level or a direction
        layer, level = owner, last
    if isinstance(root.get_submodule(layer), nn.RNNBase):
        parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return layer, tuple(f"{part}_{level}" for part in parts)
    return layer, ("weight", "bias")


def computes_weight(module: nn.Module) -> bool:
    """Return whether a layer does more with its weight than a plain one."""
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return False
    if "weight" not in module._parameters and not parametrize.is_parametrized(module, "weight"):
        return True  # a hook computes it
    if getattr(module, "max_norm", None) is not None:
        return True
    is_subclass = isinstance(module, nn.Linear) and not isinstance(module, networks.Linear)
    return is_subclass and type(module).forward is not nn.Linear.forward


def rows_of(root: nn.Module, layer: str, tensor: Tensor) -> slice:
    """Return the rows of a packed weight of attention that belong to a projection."""
    owner, _, last = layer.rpartition(".")
    module = root.get_submodule(owner)
    if last in ("q_proj", "k_proj", "v_proj") and isinstance(module, nn.MultiheadAttention):
        width = module.embed_dim
        if len(tensor) != width:
            place = ("q_proj", "k_proj", "v_proj").index(last)
            return slice(place * width, (place + 1) * width)
    return slice(None)


def replace_rows(tensor: Tensor, rows: slice, part: Tensor) -> Tensor:
    """Return a tensor with other rows."""
    if rows == slice(None):
        return part
    return torch.cat([tensor[: rows.start], part, tensor[rows.stop :]])


def modulations(
    spec: EnsembleSpec, layer: str, values: Mapping[str, Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Return v and u of a layer, one number per output and input."""
    pre = post = None
    for site in spec.sites:
        if site.layer == layer:
            value = values[f"{layer}.{site.kind}"]
            value = torch.stack([value] * site.repeat, dim=1).flatten()
            if site.kind == "pre":
                pre = value
            else:
                post = value
    return pre, post


def factor_of(
    module: nn.Module, key: str, shape: torch.Size, pre: Tensor | None, post: Tensor | None
) -> Tensor:
    """Return the factors of a weight or a bias, entry by entry of its first two axes."""
    example = pre if pre is not None else post
    if example is None:
        return torch.ones((), dtype=torch.float64)
    if "weight_hh" in key:
        post = None  # it multiplies the hidden state
    if "bias" in key:
        return example.new_ones(shape) if pre is None else pre
    is_transposed = "Transpose" in type(module).__name__ or isinstance(module, nn.Embedding)
    # Entry (i, j) of a grouped weight belongs to the j-th channel of the group of i.
    i = torch.arange(shape[0]).unsqueeze(1)
    j = torch.arange(shape[1]).unsqueeze(0)
    group = i * getattr(module, "groups", 1) // shape[0]
    outer, inner = i.expand(shape[:2]), group * shape[1] + j
    outputs, inputs = (inner, outer) if is_transposed else (outer, inner)
    factors = example.new_ones(shape[:2])
    if pre is not None:
        factors = factors * pre[outputs]
    if post is not None:
        factors = factors * post[inputs]
    return factors.reshape(*shape[:2], *[1] * (len(shape) - 2))
