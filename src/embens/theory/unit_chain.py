"""Chains of layers whose kernels between members have a known variance at finite width.

Kernels are computed for pairs of an input of one member and an input of another one. Derivatives of
the outputs' tangent kernels by the kernels of a hidden layer are its
:class:`~embens.theory.unit_noise.Sensitivities`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from embens.theory import activations
from embens.theory.limit import Limit
from embens.theory.moments import MEASURE, PAIRS, Moments, Pass, State, describe
from embens.theory.pixels import AVERAGES, kernel_of_inputs, pixel_map
from embens.theory.placement import SHARED, Modulation
from embens.theory.recursion import has_rule, propagate
from embens.theory.unit_noise import Sensitivities, unit_variance
from embens.theory.walk import ALL_PAIRS
from embens.theory.weight_law import WeightLaw, weight_law

ALMOST_ONE = 1 - 1e-9
"""Factor of covariances between members, which keeps derivatives at equal units finite."""


@dataclass(frozen=True)
class _Layer:
    """An affine layer with the activation after it and the linear maps of pixels before it.

    Attributes:
        name: Name of the affine layer.
        module: The affine layer.
        law: Variances and gains of its weights.
        maps: Poolings and reshapes before it, with their names.
        post: Modulation of its inputs.
        pre: Modulation of its outputs.
        activation: Activation after it; None for the last layer.
    """

    name: str
    module: nn.Module
    law: WeightLaw
    maps: tuple[tuple[str, nn.Module], ...]
    post: Modulation | None
    pre: Modulation | None
    activation: nn.Module | None = None

    @property
    def width(self) -> int:
        """Number of units or channels."""
        return self.module.weight.shape[0]  # type: ignore[return-value]

    def map_pixels(self, kernel: Tensor, spatial: int) -> Tensor:
        """Apply poolings, reshapes and the layer's map of pixels, ``(pair, *pixel, *pixel)``."""
        layout = PAIRS if spatial else None
        state = State(
            Moments(kernel), layout=layout, spatial=spatial, poolings=ALL_PAIRS, facts=_PAIRED
        )
        for path, module in self.maps:
            state = propagate(module, state.replace(path=path))
        return pixel_map(self.module, state.replace(path=self.name))(state.covariance)

    def keeps_pixels(self) -> bool:
        """Return True if outputs of the layer have pixels."""
        return isinstance(self.module, _ConvNd)


_PAIRED = Pass(recording=[], tracked=False)
"""Facts of a pass in which the i-th input of one set meets the i-th input of the other."""


@dataclass(frozen=True)
class _Kernels:
    """Kernels of one layer for pairs of a member's input and another member's input.

    Attributes:
        first: Covariance within the first member.
        second: Covariance within the second member.
        between: Covariance between both.
        tangent_first: Tangent kernel within the first member.
        tangent_second: Tangent kernel within the second member.
        tangent: Tangent kernel between both.
    """

    first: Tensor
    second: Tensor
    between: Tensor
    tangent_first: Tensor
    tangent_second: Tensor
    tangent: Tensor

    def as_leaves(self) -> _Kernels:
        """Return kernels with the same values, by which derivatives can be taken."""
        leaves = []
        for kernel in _tensors(self):
            zero = torch.zeros_like(kernel).requires_grad_()
            leaves.append(kernel + zero)
        return _Kernels(*leaves)


def _tensors(values: _Kernels) -> tuple[Tensor, ...]:
    return tuple(getattr(values, field.name) for field in dataclasses.fields(values))


@dataclass(frozen=True)
class _Hidden:
    """A hidden layer of some pairs: before the activation, and after it with its modulation."""

    layer: _Layer
    post: Modulation | None
    before: _Kernels
    after: _Kernels


@dataclass(frozen=True)
class InterferingChain:
    """Layers of a network in ``nn.Sequential``; the last one has no activation."""

    layers: tuple[_Layer, ...]

    @property
    def hidden(self) -> tuple[_Layer, ...]:
        """Layers with an activation."""
        return self.layers[:-1]

    @classmethod
    def of(cls, limit: Limit) -> InterferingChain:
        """Read the layers of a network.

        Raises:
            TypeError: If layers and activations do not alternate.
            ValueError: If inputs or outputs are modulated.
        """
        _require_chain(limit)
        layers: list[_Layer] = []
        maps: list[tuple[str, nn.Module]] = []
        for path, module in limit.steps:
            if isinstance(module, nn.Linear | _ConvNd):
                if layers and layers[-1].activation is None:  # linear units
                    layers[-1] = dataclasses.replace(layers[-1], activation=nn.Identity())
                placement = limit.placements.get(module, SHARED)
                if placement.copies or placement.low_rank:
                    raise _no_formula(module, path, "its weights differ between members")
                layer = _Layer(
                    name=path,
                    module=module,
                    law=weight_law(module, finite=not layers, path=path),
                    maps=tuple(maps),
                    post=placement.post,
                    pre=placement.pre,
                )
                layers.append(layer)
                maps = []
            elif isinstance(module, (*AVERAGES, nn.Flatten, nn.Identity, _DropoutNd)):
                maps.append((path, module))
            elif _is_activation(module) and layers and not layers[-1].activation and not maps:
                layers[-1] = dataclasses.replace(layers[-1], activation=module)
            else:
                raise _no_formula(module, path, "layers and activations must alternate")
        return cls(tuple(layers))

    def variances(self, x1: Tensor, x2: Tensor) -> list[Tensor]:
        """Return the variance of each hidden layer for pairs of inputs, each ``(pair,)``."""
        with torch.enable_grad():
            hidden, outputs = self._run(x1, x2)
            sensitivities = _sensitivities(hidden, outputs)
        variances = []
        for part, sensitivity in zip(hidden, sensitivities, strict=True):
            before = _Kernels(*(_square_pixels(k.detach()) for k in _tensors(part.before)))
            assert part.layer.activation is not None
            variance = unit_variance(
                part.layer.activation,
                (before.first, before.second, before.between * ALMOST_ONE),
                before.tangent,
                sensitivity,
                part.layer.pre,
                part.post,
            )
            variances.append(variance / part.layer.width)
        return variances

    def _run(self, x1: Tensor, x2: Tensor) -> tuple[list[_Hidden], _Kernels]:
        """Pass pairs through the network; return its hidden layers and the outputs' kernels."""
        spatial = x1.dim() - 2
        kernels = self._inputs(x1, x2)
        hidden = []
        for layer, following in zip(self.layers[:-1], self.layers[1:], strict=True):
            kernels = _affine(layer, kernels, spatial)
            if not layer.keeps_pixels():
                spatial = 0
            after = _activate(layer, following.post, kernels, spatial).as_leaves()
            hidden.append(_Hidden(layer, following.post, kernels, after))
            kernels = after
        return hidden, _affine(self.layers[-1], kernels, spatial)

    def _inputs(self, x1: Tensor, x2: Tensor) -> _Kernels:
        first_layer = self.layers[0].module

        def gram(a: Tensor, b: Tensor) -> Tensor:
            state = State(Moments(), inputs=(a, b), poolings=ALL_PAIRS, facts=_PAIRED)
            return kernel_of_inputs(first_layer, state).covariance

        first, second, between = gram(x1, x1), gram(x2, x2), gram(x1, x2)
        zeros = [torch.zeros_like(kernel) for kernel in (first, second, between)]
        return _Kernels(first, second, between, *zeros)


def _affine(layer: _Layer, kernels: _Kernels, spatial: int) -> _Kernels:
    """Return the kernels after an affine layer; those before it include the modulation u."""
    law = layer.law
    mapped = [layer.map_pixels(kernel, spatial) for kernel in _tensors(kernels)]
    covariances = [law.weight_variance * k + law.bias_variance for k in mapped[:3]]
    tangents = []
    for covariance, tangent in zip(mapped[:3], mapped[3:], strict=True):
        tangents.append(law.gradients(covariance, 1.0) + law.weight_variance * tangent)
    return _Kernels(*covariances, *tangents)


def _activate(layer: _Layer, post: Modulation | None, k: _Kernels, spatial: int) -> _Kernels:
    """Return the kernels after an activation and the modulation u that follows it."""
    assert layer.activation is not None
    dual = activations.dual(layer.activation)
    pre = layer.pre
    law = None if pre is None else pre.marginal
    q1 = _diagonal(k.first, spatial)
    q2 = _diagonal(k.second, spatial)
    dual = dual.prepare(max(q1.max().item(), q2.max().item()) or 1.0, law)
    second_moment = 1.0 if post is None else post.second_moment
    pair_moment = 1.0 if post is None else post.pair_moment

    def align(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        ones = (1,) * spatial
        return first.reshape(*first.shape, *ones), second.reshape(len(second), *ones, *q2.shape[1:])

    first, slope_first, _ = dual.same(*align(q1, q1), k.first, law, with_h=False)
    second, slope_second, _ = dual.same(*align(q2, q2), k.second, law, with_h=False)
    c = k.between * ALMOST_ONE
    if pre is None or not pre.differs_between_members:
        between, slope, _ = dual.same(*align(q1, q2), c, law, with_h=False)
    else:
        between, slope = dual.joint(*align(q1, q2), c, pre.law, pre.members)
    return _Kernels(
        second_moment * first,
        second_moment * second,
        pair_moment * between,
        second_moment * slope_first * k.tangent_first,
        second_moment * slope_second * k.tangent_second,
        pair_moment * slope * k.tangent,
    )


def _sensitivities(hidden: list[_Hidden], outputs: _Kernels) -> list[Sensitivities]:
    """Return derivatives of the outputs' tangent kernels by the kernels of hidden layers."""
    after = [part.after for part in hidden]
    covariances = [(k.first, k.second, k.between) for k in after]
    by_kernels = _gradients(outputs.tangent, [k for parts in covariances for k in parts])
    by_tangents = _gradients(outputs.tangent, [k.tangent for k in after])
    by_first = _gradients(outputs.tangent_first, [k.tangent_first for k in after])
    by_second = _gradients(outputs.tangent_second, [k.tangent_second for k in after])
    sensitivities = []
    for index in range(len(hidden)):
        parts = [*by_kernels[3 * index : 3 * index + 3], by_first[index], by_second[index]]
        parts.append(by_tangents[index])
        sensitivities.append(Sensitivities(*(_square_pixels(part) for part in parts)))
    return sensitivities


def _gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    total = output.sum()
    gradients = torch.autograd.grad(
        total, inputs, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return list(gradients)


def _diagonal(kernel: Tensor, spatial: int) -> Tensor:
    """Return the entries of equal pixels, ``(pair, *pixel)``."""
    state = State(Moments(kernel), layout=PAIRS if spatial else None, spatial=spatial)
    return state.equal_pixels(kernel)


def _square_pixels(kernel: Tensor) -> Tensor:
    """Return a kernel with one axis for the pixels of each input, ``(pair, p, p)``."""
    pixels = round(kernel[0].numel() ** 0.5)
    return kernel.reshape(len(kernel), pixels, pixels)


def _is_activation(module: nn.Module) -> bool:
    kind = type(module)
    return activations.dual.dispatch(kind) is not activations.dual.dispatch(object)


def _require_chain(limit: Limit) -> None:
    if limit.separate:
        raise ValueError("members are separate networks, so nothing interferes.")
    if limit.conditional:
        raise ValueError(
            "interference needs exchangeable members; with modulated inputs or outputs members are "
            "not exchangeable. Use sites='hidden'."
        )
    if limit.walk is not None:
        raise TypeError(
            "interference is known for nn.Sequential only; this network's forward is custom code. "
            + MEASURE
        )


def _no_formula(module: nn.Module, path: str, reason: str) -> TypeError:
    known = "no rule" if not has_rule(module) else reason
    return TypeError(
        f"the interference at {describe(module, path)} is not known: {known}. It has a formula for "
        f"shared layers that alternate with activations in nn.Sequential. {MEASURE}"
    )
