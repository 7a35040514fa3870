r"""Fast prediction with weights that are merged once for a trained ensemble.

An ensemble computes the weights :math:`v_a u_a^\top \circ W` of member :math:`a` in every pass,
because training changes them. A fitted estimator does not change any more, so its predictions use
merged weights that are computed once. The product of the first layer is the same for all members if
only its outputs are modulated; it is computed once for all of them.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from embens import EmbeddedEnsemble
from embens.tabular.first_layer import EncodedFirstLayer, FirstLayer
from embens.tabular.groups import GroupedEnsemble
from embens.tabular.perceptron import Encoder


class MergedMembers:
    """The members of a trained ensemble as stacks of linear layers.

    Args:
        groups: Ensembles whose references are perceptrons of
            :func:`embens.tabular.perceptron.build_network`. Their members differ from the outputs
            of the first layer on.
        encoder: The encoder of the table.
    """

    def __init__(self, groups: Sequence[EmbeddedEnsemble], encoder: Encoder):
        embeddings, weights, biases = [], [], []
        # For each group: modulations of the outputs of the first layer, (member, hidden unit).
        self.scales = []
        # For each group and member: weights and biases of the layers after the first.
        self.layers = []
        for ensemble in groups:
            reference: Any = ensemble.reference
            first = _first_layer(reference)
            embeddings.append(reference[:first])  # periodic inputs, if there are any
            weights.append(reference[first].weight.detach())
            biases.append(reference[first].bias.detach())
            scales = torch.ones(ensemble.members, len(biases[-1]), dtype=biases[-1].dtype)
            for site in ensemble.spec.sites:
                if site.layer == str(first):
                    scales = ensemble.site_values(site).detach()
            self.scales.append(scales)
            members: list[Any] = [ensemble.member(a) for a in range(ensemble.members)]
            self.layers.append([_merged_layers(member[first + 1 :]) for member in members])
        self.first: FirstLayer | EncodedFirstLayer
        if FirstLayer.has_bins(encoder) and not any(len(part) for part in embeddings):
            self.first = FirstLayer(encoder, torch.cat(weights), torch.cat(biases))
        else:
            self.first = EncodedFirstLayer(encoder, embeddings, weights, biases)

    @torch.no_grad()
    def __call__(self, numbers: Tensor, codes: Tensor) -> Tensor:
        """Return the outputs of all members, ``(member, row, output)``."""
        hidden_of_groups = self.first(numbers, codes).chunk(len(self.layers), dim=1)
        outputs = []
        for shared, scales, members in zip(hidden_of_groups, self.scales, self.layers, strict=True):
            for scale, layers in zip(scales, members, strict=True):
                # Dropout is the identity in predictions: only linear layers and ReLU remain.
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


def weight_versions(*modules: nn.Module) -> list[tuple[int, int]]:
    """Return values that change when a tensor of a module is replaced or changed in place."""
    tensors = chain.from_iterable((*part.parameters(), *part.buffers()) for part in modules)
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
    differ_after_first = (first, "pre") in sites or (second, "post") in sites
    return differ_after_first and (first, "post") not in sites and not spec.separate


Weights = tuple[list[tuple[int, int]], MergedMembers | None]
_weights_of_ensemble: WeakKeyDictionary[nn.Module, Weights] = WeakKeyDictionary()


@torch.no_grad()
def predict_members(
    ensemble: EmbeddedEnsemble | GroupedEnsemble, encoder: Encoder, numbers: Tensor, codes: Tensor
) -> Tensor:
    """Return the outputs of all members in evaluation mode, with merged weights where they help.

    Args:
        ensemble: A trained ensemble.
        encoder: The encoder of its inputs.
        numbers: ``(row, number)``, before the encoder expands them.
        codes: ``(row, categorical column)``.

    Returns:
        The outputs ``(member, row, output)``.
    """
    versions = weight_versions(ensemble, encoder)
    old_versions, merged = _weights_of_ensemble.get(ensemble, ([], None))
    if versions != old_versions:
        groups: Any = getattr(ensemble, "groups", [ensemble])
        merged = None
        if all(can_merge(group) for group in groups):
            merged = MergedMembers(groups, encoder)
        _weights_of_ensemble[ensemble] = (versions, merged)
    if merged is not None:
        return merged(numbers, codes)
    ensemble.eval()
    return ensemble(encoder(numbers, codes))
