r"""Fast prediction with weights that are merged once for a trained ensemble.

An ensemble computes the weights :math:`v_a u_a^\top \circ W` of member :math:`a` in every pass,
because training changes them. A fitted estimator does not change any more, so its predictions use
merged weights that are computed once. The product of the first layer is the same for all members if
only its outputs are modulated; it is computed once for all of them.
"""

from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from embens import EmbeddedEnsemble
from embens.tabular.groups import GroupedEnsemble


class MergedMembers:
    """The members of a trained ensemble as stacks of linear layers.

    Args:
        ensemble: An ensemble whose reference is a perceptron of
            :func:`embens.tabular.perceptron.build_network`. Its members differ from the outputs of
            the first layer on.
    """

    def __init__(self, ensemble: EmbeddedEnsemble):
        reference: Any = ensemble.reference
        first = _first_layer(reference)
        self.embedding = reference[:first]  # periodic inputs, if there are any
        self.weight = reference[first].weight.detach()
        self.bias = reference[first].bias.detach()
        # Modulations of the outputs of the first layer, (member, hidden unit).
        self.scales = torch.ones(ensemble.members, len(self.bias), dtype=self.bias.dtype)
        for site in ensemble.spec.sites:
            if site.layer == str(first):
                self.scales = ensemble.site_values(site).detach()
        self.layers = []
        for a in range(ensemble.members):
            member: Any = ensemble.member(a)
            self.layers.append(_merged_layers(member[first + 1 :]))

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the outputs ``(member, row, output)`` for encoded rows ``(row, input)``."""
        shared = linear(self.embedding(inputs), self.weight, self.bias)
        outputs = []
        for scale, layers in zip(self.scales, self.layers, strict=True):
            # Dropout is the identity in predictions, so only linear layers and ReLU remain.
            hidden = (shared * scale).relu_()
            for weight, bias in layers[:-1]:
                hidden = linear(hidden, weight, bias).relu_()
            # With few outputs, the transposed product is faster.
            weight, bias = layers[-1]
            outputs.append(torch.addmm(bias[:, None], weight, hidden.T))
        return torch.stack(outputs).mT


def _first_layer(reference: nn.Sequential) -> int:
    """Return the position of the first linear layer."""
    return next(k for k, layer in enumerate(reference) if isinstance(layer, nn.Linear))


def _merged_layers(modules: Any) -> list[tuple[Tensor, Tensor]]:
    """Return weights and biases of the linear layers of a member."""
    layers = []
    for module in modules:
        parts = [part for part in module.modules() if isinstance(part, nn.Linear)]
        if parts:  # several parts are the two halves of the outputs
            weight = torch.cat([part.weight.detach() for part in parts])
            bias = torch.cat([part.bias.detach() for part in parts])
            layers.append((weight, bias))
    return layers


def weight_versions(ensemble: EmbeddedEnsemble) -> list[tuple[int, int]]:
    """Return values that change when a tensor of the ensemble is replaced or changed in place."""
    tensors = chain(ensemble.parameters(), ensemble.buffers())
    # The version counter is private, but torch has no other sign of a change in place.
    return [(id(tensor), tensor._version) for tensor in tensors]


def can_merge(ensemble: EmbeddedEnsemble) -> bool:
    """Return whether all members share the first product, and differ from there on.

    Otherwise merged weights would repeat work that the ensemble does once for all members.
    """
    spec = ensemble.spec
    reference: Any = ensemble.reference
    linear_layers = [
        name for name, part in reference.named_modules() if isinstance(part, nn.Linear)
    ]
    first, second = linear_layers[:2]
    sites = {(site.layer, site.kind) for site in spec.sites}
    differs = (first, "pre") in sites or (second, "post") in sites
    return differs and (first, "post") not in sites and not spec.separate


Weights = tuple[list[tuple[int, int]], MergedMembers | None]
_weights_of_ensemble: WeakKeyDictionary[EmbeddedEnsemble, Weights] = WeakKeyDictionary()


@torch.no_grad()
def predict_members(ensemble: EmbeddedEnsemble | GroupedEnsemble, inputs: Tensor) -> Tensor:
    """Return the outputs of all members in evaluation mode, with merged weights where they help.

    Args:
        ensemble: A trained ensemble.
        inputs: Encoded rows ``(row, input)``.

    Returns:
        The outputs ``(member, row, output)``.
    """
    if isinstance(ensemble, GroupedEnsemble):
        groups: Any = ensemble.groups
        return torch.cat([predict_members(group, inputs) for group in groups])
    versions = weight_versions(ensemble)
    old_versions, merged = _weights_of_ensemble.get(ensemble, ([], None))
    if versions != old_versions:
        merged = None
        if can_merge(ensemble):
            merged = MergedMembers(ensemble)
        _weights_of_ensemble[ensemble] = (versions, merged)
    if merged is not None:
        return merged(inputs)
    ensemble.eval()
    return ensemble(inputs)
