"""Features of a frozen trunk, computed once for separate last layers.

An ensemble of :func:`embens.adapt` with ``by="head"`` has one frozen trunk and a last layer for
each member. Its training needs the inputs of the last layer only, which are the same in every
epoch.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from embens.ensemble import EmbeddedEnsemble
from embens.modes import evaluating
from embens.spec import EnsembleSpec, PerMember
from embens.training.batches import AnySource, map_tensors
from embens.training.callbacks import Callback
from embens.training.options import Options


class CacheFeatures(Callback):
    """Compute the features of a frozen trunk once, and train the last layers on them.

    The features are those of evaluation mode, without dropout or updates of BatchNorm. The run, and
    callbacks, see an ensemble of the last layers, which share their weights with the ensemble that
    was passed to ``fit``. All features of the training data are kept in memory.

    Raises:
        ValueError: If the ensemble is not one of ``embens.adapt(network, by="head")``, or if
            anything follows its last layer.

    Example:
        >>> callbacks = [CacheFeatures()]
    """

    changes_training = True

    def setup(self, options: Options) -> None:
        """Set ``options.cache_features``."""
        options.cache_features = True


def separate_heads(ensemble: EmbeddedEnsemble) -> tuple[EmbeddedEnsemble, str]:
    """Return the last layers as an ensemble that shares their weights, and the layer's name.

    Args:
        ensemble: With a frozen trunk, and separate weights in one layer only.

    Returns:
        An ensemble of the last layers, and the name of the layer in the reference.

    Raises:
        ValueError: If the members differ in anything else.
    """
    spec = ensemble.spec
    is_head = spec.frozen and spec.individual_head and len(spec.per_member) == 1
    if not is_head or spec.sites or spec.low_rank:
        raise ValueError(
            "CacheFeatures needs a frozen trunk and one last layer for each member: "
            f"embens.adapt(network, by='head'); got {spec.family!r} with other members."
        )
    (item,) = spec.per_member
    layer = copy.deepcopy(ensemble.reference.get_submodule(item.module))
    values = {}
    for key in item.tensors:
        stack = ensemble.individual[f"{item.module}.{key}".lstrip(".")]
        values[key] = stack
        vars(layer).pop(key, None)  # the placeholder of a separate tensor
        layer.register_parameter(key, nn.Parameter(stack.detach()[0].clone()))
    head_spec = EnsembleSpec(
        spec.family,
        spec.members,
        per_member=(PerMember("", item.tensors, drawn=True),),
        separate=True,
    )
    return EmbeddedEnsemble(layer, head_spec, values), item.module


@torch.no_grad()
def compute_features(
    ensemble: EmbeddedEnsemble, heads: EmbeddedEnsemble, layer: str, source: AnySource
) -> tuple[Any, ...]:
    """Return the features, targets and weights of all rows, in the order of the data.

    Args:
        ensemble: The ensemble.
        heads: Its last layers.
        layer: Name of the last layer.
        source: The data.

    Returns:
        Features ``(row, …)`` and targets ``(row, …)``, and sample weights ``(row,)`` if there are
        any.

    Raises:
        ValueError: If anything follows the last layer.
    """
    trunk = ensemble.member(0).eval()
    captured: list[Tensor] = []
    trunk.get_submodule(layer).register_forward_pre_hook(
        lambda module, args: captured.append(args[0])
    )
    device = next(ensemble.parameters()).device
    features, targets, weights = [], [], []
    with evaluating(ensemble), evaluating(heads):
        for batch in source.epoch(0):
            args, kwargs = ensemble.bind(map_tensors(lambda x: x.to(device), batch.inputs))
            captured.clear()
            trunk(*args, **kwargs)
            if len(captured) != 1:
                raise ValueError(f"CacheFeatures needs one call of {layer!r}, got {len(captured)}.")
            if not features:
                _compare(ensemble(*args, **kwargs), heads(captured[0]), layer)
            features.append(captured[0])
            targets.append(batch.target)
            if batch.weight is not None:
                weights.append(batch.weight)
    if weights:
        return torch.cat(features), torch.cat(targets), torch.cat(weights)
    return torch.cat(features), torch.cat(targets)


def _compare(outputs: Any, from_features: Tensor, layer: str) -> None:
    """Raise if an ensemble does more than its last layers do with the features."""
    is_same = isinstance(outputs, Tensor) and outputs.shape == from_features.shape
    if not is_same or not torch.allclose(outputs, from_features, rtol=1e-3, atol=1e-4):
        raise ValueError(
            f"CacheFeatures: the outputs are not those of the last layer {layer!r}; other "
            "operations follow it, or depend on the batch. Train without CacheFeatures."
        )
