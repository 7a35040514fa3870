"""The named families of embedded ensembles.

Each function sets laws, sites and trained parameters, and calls :mod:`embens.embed`, which holds
the first of them, ``batch_ensemble``. The reference is copied, never changed.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, Never

import torch
from torch import nn
from torch.nn.utils import parametrize

from embens import laws, synonyms
from embens.adapters import choose_low_rank
from embens.checks import check_choice, check_members, unknown_argument
from embens.embed import (
    Initialise,
    Sites,
    Source,
    build,
    check_module,
    embed,
)
from embens.ensemble.module import EmbeddedEnsemble
from embens.laws import Law
from embens.sites import Site, tensor_names
from embens.spec import EnsembleSpec, LowRankSite, PerMember

NEAR = 0.9
"""Overlap of members near a trained network at the start of :func:`adapt`."""

DEFAULT_RANK = 4
"""Rank of the matrices of low-rank members."""


def mc_dropout(
    reference: nn.Module,
    members: int = 8,
    law: Law | None = None,
    fresh: bool = True,
    *,
    sites: Sites = "hidden",
    own: str | Iterable[str] = (),
    example_input: Any = None,
    generator: torch.Generator | None = None,
    **unknown: Never,
) -> EmbeddedEnsemble:
    """Embed an MC-dropout ensemble: masks on the inputs of all but the first layers.

    Args:
        reference: Any module.
        members: Number of members.
        law: Distribution of the masks; None: ``laws.Bernoulli(0.9)``.
        fresh: Draw new masks at each pass. False: a fixed set of masks.
        sites: See :func:`embens.embed`.
        own: See :func:`embens.embed`.
        example_input: See :func:`embens.embed`.
        generator: See :func:`embens.embed`.
        **unknown: Any other name raises TypeError with a suggestion.

    Returns:
        The ensemble.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))
        >>> ensemble, x = mc_dropout(net, members=4), torch.ones(2, 4)
        >>> torch.equal(ensemble(x), ensemble(x))
        False
    """
    if unknown:
        raise unknown_argument(mc_dropout, unknown, synonyms.MC_DROPOUT)
    return embed(
        reference,
        members,
        pre=None,
        post=laws.Bernoulli(0.9) if law is None else law,
        sites=sites,
        own=own,
        trainable=False,
        fresh=fresh,
        example_input=example_input,
        generator=generator,
        family="mc_dropout",
    )


def masksembles(
    reference: nn.Module,
    members: int = 4,
    overlap: float = 0.5,
    *,
    sites: Sites = "hidden",
    example_input: Any = None,
    generator: torch.Generator | None = None,
    **unknown: Never,
) -> EmbeddedEnsemble:
    """Embed Masksembles: fixed masks that share a fraction of their ones.

    Args:
        reference: Any module.
        members: Number of members.
        overlap: Shared fraction of the ones of two masks, from equal members (1) towards disjoint
            ones. See :class:`embens.laws.Masks`.
        sites: See :func:`embens.embed`.
        example_input: See :func:`embens.embed`.
        generator: See :func:`embens.embed`.
        **unknown: Any other name raises TypeError with a suggestion.

    Returns:
        The ensemble.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> masksembles(net, members=4, overlap=0.5)(torch.zeros(2, 4)).shape
        torch.Size([4, 2, 3])
    """
    if unknown:
        raise unknown_argument(masksembles, unknown, synonyms.MASKSEMBLES)
    return embed(
        reference,
        members,
        pre=None,
        post=laws.Masks(overlap),
        sites=sites,
        trainable=False,
        example_input=example_input,
        generator=generator,
        family="masksembles",
    )


def last_layer_dropout(
    reference: nn.Module,
    members: int = 8,
    law: Law | None = None,
    *,
    example_input: Any = None,
    trainable: bool = False,
    generator: torch.Generator | None = None,
    **unknown: Never,
) -> EmbeddedEnsemble:
    """Embed a last-layer dropout ensemble: fixed masks on the input of the last layer.

    Everything before the last layer is computed once. ``ensemble.collapse()`` returns one network
    with the mean output.

    Args:
        reference: Any module.
        members: Number of members.
        law: Distribution of the masks; None: ``laws.Bernoulli(0.9)``. The paper's experiments use
            ``laws.Normal()``.
        example_input: See :func:`embens.embed`.
        trainable: Train the masks.
        generator: See :func:`embens.embed`.
        **unknown: Any other name raises TypeError with a suggestion.

    Returns:
        The ensemble.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble, x = last_layer_dropout(net, members=50), torch.ones(2, 4)
        >>> torch.allclose(ensemble.collapse()(x), ensemble(x).mean(0), atol=1e-6)
        True
    """
    if unknown:
        raise unknown_argument(last_layer_dropout, unknown, synonyms.LAST_LAYER_DROPOUT)
    return embed(
        reference,
        members,
        pre=None,
        post=laws.Bernoulli(0.9) if law is None else law,
        sites="last",
        trainable=trainable,
        example_input=example_input,
        generator=generator,
        family="last_layer_dropout",
    )


def low_rank(
    reference: nn.Module,
    members: int = 8,
    rank: int = DEFAULT_RANK,
    kind: Literal["multiplicative", "additive"] = "multiplicative",
    shared: Literal["trained", "frozen"] = "trained",
    *,
    scale: float | None = None,
    sites: Sites = "all",
    own: str | Iterable[str] = (),
    example_input: Any = None,
    generator: torch.Generator | None = None,
    **unknown: Never,
) -> EmbeddedEnsemble:
    r"""Embed members with weights that differ by matrices of low rank; biases are shared.

    Args:
        reference: Any module.
        members: Number of members.
        rank: Rank of the matrices. A layer with a smaller full rank uses that rank.
        kind: "multiplicative": :math:`W_a = W \circ (1 + B_a A_a)`, which contains BatchEnsemble;
            "additive": :math:`W_a = W + B_a A_a`, as in LoRA with :math:`\alpha = r`.
        shared: "trained", or "frozen" to train only the members' matrices.
        scale: Initial standard deviation of :math:`B_a A_a`, for the additive kind relative to the
            root mean square of :math:`W`. With 0 members begin as the reference and differ after
            the first steps. None: 0.5, or 0 for the additive kind.
        sites: See :func:`embens.embed`.
        own: See :func:`embens.embed`.
        example_input: See :func:`embens.embed`.
        generator: See :func:`embens.embed`.
        **unknown: Any other name raises TypeError with a suggestion.

    Returns:
        The ensemble.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble = low_rank(net, members=5, rank=2, kind="additive", shared="frozen")
        >>> ensemble(torch.zeros(2, 4)).shape, len(list(ensemble.individual_parameters()))
        (torch.Size([5, 2, 3]), 4)
    """
    if unknown:
        raise unknown_argument(low_rank, unknown, synonyms.LOW_RANK)
    source = Source(reference, members, example_input)
    check_choice("kind", kind, ("multiplicative", "additive"))
    check_choice("shared", shared, ("trained", "frozen"))
    if scale is None:
        scale = 0.5 if kind == "multiplicative" else 0.0
    if not math.isfinite(scale) or scale < 0:
        raise ValueError(f"scale must be finite and not negative, got {scale}.")
    separate_layers = source.choose_separate_layers(own)
    template = LowRankSite("", _check_rank(rank), kind, scale)
    low_rank_sites = choose_low_rank(source, sites, template, separate_layers)
    spec = source.make_spec(
        "low_rank",
        low_rank=low_rank_sites,
        separate_layers=separate_layers,
        frozen=shared == "frozen",
    )
    if sites in ("hidden", "all"):
        source.check_differences((), low_rank_sites, separate_layers)
    return build(reference, spec, generator=generator, flow=source.flow)


def _check_rank(rank: Any) -> int:
    is_integer = isinstance(rank, int) and not isinstance(rank, bool)
    if not is_integer or rank < 1:
        raise ValueError(f"rank must be a positive integer, got {rank!r}.")
    return rank


def independent(
    reference: nn.Module,
    members: int = 8,
    *,
    initialise: Initialise | None = None,
    generator: torch.Generator | None = None,
    **unknown: Never,
) -> EmbeddedEnsemble:
    """Make M separate networks behind the interface of an ensemble.

    The weights of the reference are not used.

    Args:
        reference: Any module.
        members: Number of members.
        initialise: Called with every module that holds parameters, to reinitialise them in place;
            None: the module's ``reset_parameters``.
        generator: Random generator of the weights.
        **unknown: Any other name raises TypeError with a suggestion.

    Returns:
        The ensemble.

    Raises:
        ValueError: If the reference has no parameters, or a parametrized layer.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble = independent(net, members=3)
        >>> list(ensemble.shared_parameters())
        []
    """
    if unknown:
        raise unknown_argument(independent, unknown, synonyms.INDEPENDENT)
    check_module(reference)
    members = check_members(members)
    if not any(True for _ in reference.parameters()):
        raise ValueError("the reference has no parameters, so its members could not differ.")
    per_member = []
    for name, module in reference.named_modules():
        if parametrize.is_parametrized(module):
            raise ValueError(
                f"{name or 'the reference'!r} is parametrized, so members cannot have separate "
                "copies. Remove the parametrization with "
                "torch.nn.utils.parametrize.remove_parametrizations."
            )
        tensors = tensor_names(module)
        if tensors:
            per_member.append(PerMember(name, tensors, drawn=True))
    spec = EnsembleSpec(
        "independent",
        members,
        per_member=tuple(per_member),
        separate=True,
    )
    return build(reference, spec, initialise, generator)


def adapt(
    reference: nn.Module,
    members: int = 8,
    by: Literal["low_rank", "modulations", "head"] = "low_rank",
    *,
    trunk: Literal["frozen", "trained"] = "frozen",
    head: Literal["drawn", "copied", "shared"] = "drawn",
    example_input: Any = None,
    generator: torch.Generator | None = None,
    **unknown: Never,
) -> EmbeddedEnsemble:
    r"""Embed an ensemble into a trained network, to fine-tune it; members begin near the network.

    The centred laws of :func:`embens.embed` and :func:`batch_ensemble` are for training from
    scratch. They destroy the features of a trained network.

    Args:
        reference: A trained network.
        members: Number of members.
        by: How members differ below their last layers. "low_rank": :math:`W + B_a A_a`, with
            :math:`B_a = 0` at first; "modulations": :math:`u, v \sim N(1, \varepsilon^2)` at the
            hidden sites, where :math:`(1 + \varepsilon^2)^{-L} = 0.9` for :math:`L` modulated
            inputs; "head": not at all.
        trunk: "frozen", or "trained" to train the shared weights as well.
        head: Last layers: "drawn" separately for each member (for a new task), "copied" from the
            network (for the task it knows), or "shared".
        example_input: See :func:`embens.embed`.
        generator: See :func:`embens.embed`.
        **unknown: Any other name raises TypeError with a suggestion.

    Returns:
        The ensemble.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble = adapt(net, members=2, head="copied")
        >>> x = torch.ones(2, 4)
        >>> torch.allclose(ensemble(x)[0], net(x))
        True
    """
    if unknown:
        raise unknown_argument(adapt, unknown, synonyms.ADAPT)
    source = Source(reference, members, example_input)
    check_choice("by", by, ("modulations", "low_rank", "head"))
    check_choice("trunk", trunk, ("trained", "frozen"))
    check_choice("head", head, ("drawn", "copied", "shared"))
    if by == "head" and head != "drawn" and members > 1:
        raise ValueError(
            f"by='head' with head={head!r} makes all members equal. Use head='drawn', or "
            "by='modulations' or 'low_rank'."
        )
    separate_layers: tuple[str, ...] = ()
    if head != "shared":
        separate_layers = source.choose_separate_layers("last")
    low_rank_sites: tuple[LowRankSite, ...] = ()
    sites: tuple[Site, ...] = ()
    if by == "low_rank":
        template = LowRankSite("", DEFAULT_RANK, "additive")
        low_rank_sites = choose_low_rank(source, "all", template, separate_layers)
    elif by == "modulations":
        sites = _sites_near_one(source, separate_layers)
    spec = source.make_spec(
        "adapt",
        sites,
        low_rank_sites,
        separate_layers=separate_layers,
        drawn=head == "drawn",
        frozen=trunk == "frozen",
        pretrained=True,
    )
    if by != "head":
        source.check_differences(sites, low_rank_sites, separate_layers)
    return build(reference, spec, generator=generator, flow=source.flow)


def _sites_near_one(source: Source, separate_layers: tuple[str, ...]) -> tuple[Site, ...]:
    """Return the hidden sites, with a law that gives members the overlap ``NEAR``."""
    one = laws.Normal(1.0)
    sites = source.choose_sites(one, one, "hidden", separate_layers=separate_layers)
    inputs = max(1, sum(site.kind == "post" for site in sites))
    near_one = laws.Normal(1.0, math.sqrt(NEAR ** (-1 / inputs) - 1))
    return tuple(replace(site, law=near_one) for site in sites)
