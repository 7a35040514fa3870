"""Turn a reference network into an embedded ensemble: choose sites, copy, operate.

The reference is never changed. Its copy keeps every weight; layers at sites are replaced, wherever
the reference holds them, by modulated ones. Everything is checked before anything is built.

BatchNorm sees ``v · z``, whose scale differs from member to member, so that shared running
statistics would be wrong for all of them: by default every member has its own. Layers of the
members' own (``own=``) train at the rate of any weight and have no sites. Own last layers make a
network with many heads; own last blocks, with ``pre=None, post=None``, a TreeNet.
"""

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from embens import laws
from embens.checks import check_choice, check_members, check_number, check_whole, suggest
from embens.embedding.sharing import Sharing
from embens.embedding.sites import (
    Laws,
    Sites,
    Trainable,
    check_reference,
    choose_first,
    choose_low_rank,
    choose_own,
    choose_sites,
    is_within,
)
from embens.ensemble.module import EmbeddedEnsemble
from embens.ensemble.ntkgp import NTKGP
from embens.ensemble.own import Own, OwnState
from embens.ensemble.plan import Folding, Heads, LowRankSite, OwnTensors, Plan, Site
from embens.ensemble.surgery import operate
from embens.laws import Law
from embens.reading import Flow, opened, read
from embens.reading.flow import left_over

_NORMAL = laws.Normal()
NEAR = 0.9  # how alike members near a trained network begin: the overlap of all their laws
CONCENTRATION = 2.0  # of the members' shares in MixMo


@suggest()
def embed(
    reference: nn.Module,
    members: int = 8,
    pre: Laws = _NORMAL,
    post: Laws = _NORMAL,
    sites: Sites = "hidden",
    example_input: Any = None,
    trainable: Trainable = True,
    generator: torch.Generator | None = None,
    *,
    own: str | Iterable[str] = (),
    own_weights: str | Callable[[nn.Module], None] = "drawn",
    fresh: bool = False,
    norm_statistics: str = "member",
    norm_affine: str = "shared",
    family: str = "embed",
) -> EmbeddedEnsemble:
    r"""Embed an ensemble into a reference network.

    Member :math:`a` is the reference with weights :math:`v_a u_a^\top \circ W` and biases
    :math:`v_a \circ b`.

    Args:
        reference: any module; copied, never changed, its weights are kept.
        members: how many.
        pre: law of :math:`v`, which multiplies the output of a layer, bias included. None: absent.
            A mapping from layer names (or wildcards) to laws; a site it does not name has none.
        post: law of :math:`u`, which multiplies the input of a layer.
        sites: "hidden": outputs of all but the last layers and inputs of all but the first;
            "last": inputs of the last layers only; "all"; names or wildcards of layers, or a
            function of (name, module), for both sides of those layers.
        example_input: a batch, or a tuple of arguments, for code that torch.fx can't trace.
        trainable: False for fixed masks; ``{"pre": …, "post": …}``, each a bool or a mapping from
            layer names.
        own: layers of which every member has its own copy: names of layers, norm layers or modules
            that hold them, wildcards, or "last" for the last layers.
        own_weights: how these begin: "drawn" anew for each member by their ``reset_parameters``,
            "copied" from the reference, or a function that redraws one module in place.
        fresh: draw new masks at every pass.
        norm_statistics: "member", or "shared" running statistics, updated by members in turn.
        norm_affine: "shared" or "member" scale and shift of norm layers.
        generator: draws the modulations and the members' own layers.
        family: its name, for ``repr`` and files.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble = embed(net, members=5)
        >>> ensemble(torch.zeros(2, 4)).shape
        torch.Size([5, 2, 3])
    """
    known = _read(reference, members, example_input)
    for name, value in (("norm_statistics", norm_statistics), ("norm_affine", norm_affine)):
        check_choice(name, value, ("member", "shared"))
    if not callable(own_weights):
        check_choice("own_weights", own_weights, ("drawn", "copied"))
    apart = choose_own(own, *known)
    chosen = choose_sites(*known[1:], pre, post, sites, trainable, fresh, apart)
    begin = {"initialise": own_weights if callable(own_weights) else None, "generator": generator}
    norms, drawn = (norm_statistics, norm_affine), own_weights != "copied"
    ensemble = _embed(family, members, known, chosen, apart, drawn=drawn, norms=norms, **begin)
    cancel = all(not s.trainable and 1 + (members - 1) * s.law.overlap < 1e-9 for s in chosen)
    biased = any(getattr(known[1][n], "bias", None) is not None for n in known[2].last)
    if chosen and cancel and not biased and not ensemble.plan.not_collapsible:
        warnings.warn(
            "the mean of the members is 0 for ever: their frozen modulations of the last layer sum "
            "to 0, and no bias follows. Use a rho above -1/(M - 1), or trainable=True.",
            stacklevel=2,
        )
    return ensemble


_Known = tuple[nn.Module, dict[str, nn.Module], Flow]
"""A reference with attentions opened, its parameter layers and its data flow."""


def _read(reference: nn.Module, members: int, example_input: Any) -> _Known:
    reference, layers = check_reference(reference)
    check_members(members)
    return reference, layers, read(reference, example_input)


def _embed(
    family: str,
    members: int,
    known: _Known,
    sites: Iterable[Site | LowRankSite],
    own: tuple[str, ...] = (),
    *,
    drawn: bool = True,
    norms: tuple[str, str] = ("member", "shared"),
    initialise: Callable[[nn.Module], None] | None = None,
    generator: torch.Generator | None = None,
    **more: Any,
) -> EmbeddedEnsemble:
    """Make an ensemble whose members differ at sites and have some layers for themselves."""
    reference, _, flow = known
    plan = Sharing(reference, flow, sites, own, drawn=drawn, norms=norms).plan(family, members)
    return _build(reference, replace(plan, **more), own if drawn else (), initialise, generator)


def _build(
    reference: nn.Module,
    plan: Plan,
    drawn: Iterable[str],
    initialise: Callable[[nn.Module], None] | None,
    generator: torch.Generator | None,
) -> EmbeddedEnsemble:
    """Carry out a plan; every member's own tensors in some modules are drawn anew."""
    networks = []
    for _ in range(plan.members if drawn else 0):
        network = copy.deepcopy(reference, left_over(reference))
        _redraw_(network, drawn, initialise, int(torch.randint(2**62, (), generator=generator)))
        networks.append(network)
    ensemble = operate(reference, plan, generator)
    _take_over_(ensemble, networks)
    return ensemble


def _embed_as(family: str, given: dict[str, Any], **decided: Any) -> EmbeddedEnsemble:
    """Call :func:`embed` with what a family decides, and all that it was given and embed takes."""
    taken = {name: given[name] for name in inspect.signature(embed).parameters if name in given}
    options: dict[str, Any] = {**taken, **decided}
    return embed(**options, family=family)


@suggest()
def batch_ensemble(
    reference: nn.Module,
    members: int = 8,
    p: float = 0.0,
    *,
    law: Callable[[float], Law] = laws.Shifted,
    sites: Sites = "hidden",
    own: str | Iterable[str] = (),
    example_input: Any = None,
    generator: torch.Generator | None = None,
) -> EmbeddedEnsemble:
    """Embed a BatchEnsemble: trainable modulations, by default at the hidden sites.

    Their law has the mean ``p`` and second moment 1: N(p, 1 − p²), the paper's, or signs with
    ``law=laws.Signs``. ``p=0`` makes the members independent, ``p=1`` makes them equal at
    initialisation. For the other arguments see :func:`embed`.
    """
    if isinstance(law, Law):
        raise TypeError(f"law: expected a kind of law, such as laws.Signs; got {law}. See embed.")
    return _embed_as("batch_ensemble", locals(), pre=law(p), post=law(p))


@suggest()
def mc_dropout(
    reference: nn.Module,
    members: int = 8,
    law: Law | None = None,
    fresh: bool = False,
    *,
    sites: Sites = "hidden",
    own: str | Iterable[str] = (),
    example_input: Any = None,
    generator: torch.Generator | None = None,
) -> EmbeddedEnsemble:
    """Embed an MC-dropout ensemble: frozen masks on the inputs of all but the first layers.

    The law of the masks is ``Bernoulli(0.9)`` by default; with ``fresh`` every pass has new ones.
    For the other arguments see :func:`embed`.
    """
    post = laws.Bernoulli(0.9) if law is None else law
    return _embed_as("mc_dropout", locals(), pre=None, post=post, trainable=False)


@suggest()
def masksembles(
    reference: nn.Module,
    members: int = 4,
    overlap: float = 0.5,
    *,
    sites: Sites = "hidden",
    example_input: Any = None,
    generator: torch.Generator | None = None,
) -> EmbeddedEnsemble:
    """Embed Masksembles: frozen masks that have a share ``overlap`` of their ones in common.

    From equal members (1) towards disjoint ones; see :class:`embens.laws.Masks`, which scales the
    ones so that signals keep their size. For the other arguments see :func:`embed`.
    """
    law = laws.Masks(overlap)
    return _embed_as("masksembles", locals(), pre=None, post=law, trainable=False)


@suggest()
def last_layer_dropout(
    reference: nn.Module,
    members: int = 8,
    law: Law | None = None,
    *,
    example_input: Any = None,
    trainable: bool = False,
    generator: torch.Generator | None = None,
) -> EmbeddedEnsemble:
    """Embed a last-layer dropout ensemble: frozen masks on the inputs of the last layer only.

    Everything before is computed once; ``ensemble.collapse()`` is one network with the mean output.
    """
    post = laws.Normal() if law is None else law
    return _embed_as("last_layer_dropout", locals(), pre=None, post=post, sites="last")


@suggest()
def rank1(
    reference: nn.Module,
    members: int = 4,
    prior_std: float = 0.1,
    *,
    sites: Sites = "hidden",
    example_input: Any = None,
    generator: torch.Generator | None = None,
) -> EmbeddedEnsemble:
    r"""Embed a rank-1 Bayesian network: modulations that every pass draws around trainable means.

    Every number is :math:`N(\mu, \sigma^2)`, with :math:`\mu` and :math:`\sigma` of each member's
    own, drawn at every pass, in evaluation too, from the global generator. The prior is
    :math:`N(1, s^2)` with ``prior_std`` :math:`s`; ``fit`` adds the divergence from it,
    ``ensemble.kl()``, divided by the number of rows, to the objective. ``member(a)`` is the network
    at its means. For the other arguments see :func:`embed`.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble, x = rank1(net), torch.ones(2, 4)
        >>> bool((ensemble(x) == ensemble(x)).all()), bool(ensemble.kl() > 0)
        (False, True)
    """
    known = _read(reference, members, example_input)
    check_number("prior_std", prior_std, "finite and positive", lambda std: std > 0)
    law = laws.Normal(1.0, prior_std)
    chosen = choose_sites(*known[1:], law, law, sites, trainable=True, fresh=False)
    chosen = [replace(site, prior_std=prior_std) for site in chosen]
    return _embed("rank1", members, known, chosen, generator=generator)


@suggest()
def low_rank(
    reference: nn.Module,
    members: int = 8,
    *,
    rank: int | None = None,
    kind: Literal["multiplicative", "additive"] = "multiplicative",
    shared: Literal["trained", "frozen"] = "trained",
    scale: float | None = None,
    sites: Sites = "all",
    own: str | Iterable[str] = (),
    example_input: Any = None,
    generator: torch.Generator | None = None,
) -> EmbeddedEnsemble:
    r"""Embed members whose weights differ by matrices of low rank; biases are shared.

    The ``kind`` is "multiplicative", :math:`W_a = W \circ (1 + B_a A_a)`, which has BatchEnsemble
    in it, or "additive", :math:`W_a = W + B_a A_a`, as in LoRA with :math:`\alpha = r`. The
    ``rank`` is at most the size of the smallest layer among the sites; None: 4, or the full rank
    of layers that are smaller. With ``shared="frozen"`` only the members' numbers are trained.

    ``scale`` is the standard deviation of :math:`B_a A_a` at the start, for the additive kind
    relative to the root mean square of :math:`W`. With 0 members begin as the reference, and part
    in training. None: 0.5, and 0 for the additive kind. For other arguments see :func:`embed`.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble = low_rank(net, members=5, rank=2, kind="additive", shared="frozen")
        >>> ensemble(torch.zeros(2, 4)).shape, len(list(ensemble.individual_parameters()))
        (torch.Size([5, 2, 3]), 4)
    """
    known = _read(reference, members, example_input)
    check_choice("kind", kind, ("multiplicative", "additive"))
    check_choice("shared", shared, ("trained", "frozen"))
    if scale is None:
        scale = 0.5 if kind == "multiplicative" else 0.0
    check_number("scale", scale, "finite and not negative", lambda std: std >= 0)
    if rank is not None:
        check_whole("rank", rank, 1)
    apart, like = choose_own(own, *known), LowRankSite("", 4, kind, scale)
    chosen = choose_low_rank(*known[1:], sites, rank, like, apart)
    more = {"frozen": shared == "frozen", "generator": generator}
    return _embed("low_rank", members, known, chosen, apart, **more)


@suggest()
def independent(
    reference: nn.Module,
    members: int = 8,
    *,
    initialise: Callable[[nn.Module], None] | None = None,
    generator: torch.Generator | None = None,
) -> EmbeddedEnsemble:
    """Make M separate networks behind the same interface, each drawn anew.

    The weights of the reference are not used. ``initialise`` is called with every module that has
    parameters of its own and redraws them in place; by default the module's ``reset_parameters``.
    """
    reference, plan = _separate(reference, members)
    return _build(reference, plan, [""], initialise, generator)


@suggest()
def bayesian(
    reference: nn.Module, members: int = 8, *, generator: torch.Generator | None = None
) -> EmbeddedEnsemble:
    r"""Make M separate networks that train to draws of a posterior (NTKGP, He et al. 2020).

    A member is a network, drawn anew, plus a fixed function; see :mod:`embens.ensemble.ntkgp`. With
    targets of its own, :math:`y` plus noise of standard deviation :math:`\sigma`
    (``EachMember(targets=…)``), and the loss :math:`\sum_i (\tilde y_i - \tilde f(x_i))^2 / (2
    \sigma^2) + \frac12 |\theta - \theta^0|^2`, it ends, at infinite width, as a draw of
    ``embens.theory.posterior``. ``fit`` adds the last term, ``ensemble.kl()``, and no other weight
    decay. The reference has NTK layers of ``embens.networks``; its weights are not used.
    """
    network, plan = _separate(NTKGP(reference), members, "bayesian")
    return _build(network, plan, [""], None, generator)


def join(networks: Sequence[nn.Module]) -> EmbeddedEnsemble:
    """Make an ensemble of networks that one already has, copied; one may come repeatedly."""
    if not isinstance(networks, Sequence) or not networks:
        raise TypeError(f"join expects a list of networks; got {networks!r:.80}")
    reference, plan = _separate(networks[0], len(networks), drawn=False)
    networks = [reference, *map(opened, networks[1:])]
    first = _architecture(reference)
    for a, network in enumerate(networks):
        other = _architecture(network)
        different = [n for n in {**first, **other} if first.get(n) != other.get(n)]
        for name in (n for n in different if n not in plan.state):
            raise ValueError(
                f"networks[{a}] is of another architecture than networks[0]: {name or 'it'!r} is "
                f"{other.get(name)} there, not {first.get(name)}."
            )
    ensemble = operate(reference, plan)
    _take_over_(ensemble, networks)
    for a, network in enumerate(networks):
        places = [place.rpartition(".") for place in plan.state]
        kept = OwnState([(network.get_submodule(owner), name) for owner, _, name in places], 1)
        ensemble.state.values[a] = kept.values[0]
    return ensemble


def _architecture(network: nn.Module) -> dict[str, Any]:
    """Return what networks of one architecture have in common, by the names of its parts."""
    found: dict[str, Any] = {}
    for name, module in network.named_modules():
        found[name] = type(module).__name__
        options = {f"{name}.{k}".lstrip("."): v for k, v in vars(module).items() if k != "training"}
        found |= {k: v for k, v in options.items() if isinstance(v, (int, float, str, tuple))}
    tensors = (*network.named_parameters(), *network.named_buffers())
    return found | {name: (tuple(t.shape), t.dtype) for name, t in tensors}


def _separate(
    reference: nn.Module, members: int, family: str = "independent", *, drawn: bool = True
) -> tuple[nn.Module, Plan]:
    """Return a reference with attentions opened, and the plan of members that share nothing."""
    if not isinstance(reference, nn.Module):
        raise TypeError(f"the reference must be a torch.nn.Module; got {type(reference).__name__}")
    if not any(True for _ in reference.parameters()):
        raise ValueError("the reference has no parameters, so its members could not differ")
    reference = opened(reference)
    sharing = Sharing(reference, read(reference), separate=True, drawn=drawn)
    return reference, sharing.plan(family, check_members(members))


@suggest()
def mimo(
    reference: nn.Module,
    members: int = 4,
    repetition: float = 0.0,
    mix: str | None = None,
    *,
    example_input: Any = None,
    generator: torch.Generator | None = None,
) -> EmbeddedEnsemble:
    r"""Make a network with an input and an output for every member.

    (MIMO, Havasi et al. 2021; MixMo, Ramé et al. 2021.)

    First layers have a block of weights for every member, and one bias; their sum goes through one
    trunk to a last layer for every member. ``ensemble(x)`` costs one pass: the blocks are summed.
    In training every member has rows of its own, ``ensemble(x, batch="own")``, and ``fit`` draws
    them, a fraction ``repetition`` the same for all. All else is shared: :math:`\gamma^* = M`.

    The reference has one input and one output; its trunk and the bias of its first layers are kept.
    First and last layers are drawn anew, the blocks of first ones at :math:`1/\sqrt M` of their
    scale; of one member, which is the reference, nothing is.

    With ``mix="linear"`` members' shares in the sum are drawn at every pass in training,
    :math:`s_a = M \lambda_a` with :math:`\lambda` from a Dirichlet law of concentration 2, and the
    gradients of their losses weigh :math:`\lambda_a^{1/3}`, with the mean 1, as in the paper.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble = mimo(net, members=3)
        >>> ensemble(torch.zeros(2, 4)).shape, ensemble(torch.zeros(3, 2, 4), batch="own").shape
        (torch.Size([3, 2, 3]), torch.Size([3, 2, 3]))
    """
    reference, layers, flow = _read(reference, members, example_input)
    check_number("repetition", repetition, "a fraction from 0 to 1", lambda rho: 0 <= rho <= 1)
    check_choice("mix", mix, (None, "linear"))
    first = choose_first(reference, layers, flow, example_input)
    for call in flow.calls:  # whatever is random is drawn once for all members
        random = {n for n in call.upstream | call.result if n.startswith("random")}
        call.upstream, call.result = call.upstream - random, call.result - random
    last = choose_own("last", reference, layers, flow)
    plan = Sharing(reference, flow, own=last).plan("mimo", members)
    if plan.state:
        raise ValueError(
            "this reference can't have an input for every member: its code keeps attributes from "
            f"call to call ({plan.state[0]!r}); keep them in a buffer"
        )
    behind = {c.name for c in flow.calls if c.upstream & flow.last}
    own = [o for o in plan.own if o.module in behind or is_within(o.module, last)]
    own += [OwnTensors(name, ("weight",), drawn=True) for name in first]
    heads = Heads(first, float(repetition), CONCENTRATION if mix else None)
    after = {s.operation for s in flow.steps if any(layers & flow.last for layers in s.before)}
    plan = replace(
        plan,
        own=tuple(own),  # what the trunk keeps is common
        heads=heads,
        shared=tuple(replace(s, repeat=False) for s in plan.shared),
        folding=Folding("", tuple(sorted(after)), ("the trunk",), shares=True, border=last),
    )
    drawn = (*first, *last) if members > 1 else ()
    ensemble = _build(reference, plan, drawn, None, generator)
    with torch.no_grad():
        for name in first:
            ensemble.individuals[name].tensors()["weight"].mul_(members**-0.5)
    return ensemble


@torch.no_grad()
def _take_over_(ensemble: EmbeddedEnsemble, networks: Sequence[nn.Module]) -> None:
    """Give every member the tensors of its own that one of these networks has."""
    for name, own in ensemble.individuals.items():
        if isinstance(own, Own):
            for tensor, stack in own.tensors().items():
                for a, network in enumerate(networks):
                    stack[a] = getattr(network.get_submodule(name), tensor)


def _redraw_(
    network: nn.Module,
    names: Iterable[str],
    initialise: Callable[[nn.Module], None] | None,
    seed: int,
) -> None:
    """Draw the parameters of some modules, and of all inside them, children before parents."""
    devices = [p.device for p in network.parameters() if p.device.type == "cuda"]
    modules = [(n, m) for n, m in network.named_modules() if is_within(n, names)]
    with torch.random.fork_rng(devices=set(devices)):
        torch.manual_seed(seed)
        for name, module in reversed(modules):
            of_attention = getattr(module, "_reset_parameters", None)
            reset = getattr(module, "reset_parameters", of_attention)
            has_own = any(True for _ in module.parameters(recurse=False))
            if initialise is not None:
                if has_own:
                    initialise(module)
            elif reset is not None:
                reset()
            elif has_own:
                raise ValueError(
                    f"how to draw the parameters of {name or 'the reference'!r} "
                    f"({type(module).__name__}) anew is not known: it has no reset_parameters(). "
                    "Pass initialise= (own_weights= of embed), a function that redraws one module "
                    "in place."
                )


@suggest()
def adapt(
    reference: nn.Module,
    members: int = 8,
    *,
    by: Literal["low_rank", "modulations", "head"] = "low_rank",
    trunk: Literal["frozen", "trained"] = "frozen",
    head: Literal["drawn", "copied", "shared"] = "drawn",
    example_input: Any = None,
    generator: torch.Generator | None = None,
) -> EmbeddedEnsemble:
    r"""Embed an ensemble into a trained network, to fine-tune it: members begin near the network.

    The function of the network is kept at the start. The centred laws of :func:`embed` and
    :func:`batch_ensemble` forget what it has learnt; they are for training from scratch.

    Below their last layers members differ ``by`` "low_rank", :math:`W + B_a A_a` with
    :math:`B_a = 0` at first; by "modulations", :math:`u, v \sim N(1, \varepsilon^2)` at the hidden
    sites, where :math:`(1 + \varepsilon^2)^{-L}` = ``NEAR`` for :math:`L` modulated inputs; or not
    at all, "head". A "frozen" ``trunk`` is not trained, and the members' numbers are all that has
    to be kept (``save_pretrained``). Last layers are the members' own, "drawn" anew (for a new
    task) or "copied" (for one that the network knows), or "shared" by all.
    """
    known = _read(reference, members, example_input)
    check_choice("by", by, ("modulations", "low_rank", "head"))
    check_choice("trunk", trunk, ("trained", "frozen"))
    check_choice("head", head, ("drawn", "copied", "shared"))
    if by == "head" and head != "drawn" and members > 1:
        raise ValueError(
            f"by='head' with head={head!r}: members would begin equal and stay so. Use "
            "head='drawn', or by='modulations' or 'low_rank'."
        )
    apart = choose_own("last" if head != "shared" else (), *known)
    differing: Sequence[Site | LowRankSite] = ()
    if by == "low_rank":
        like = LowRankSite("", 4, "additive")
        differing = choose_low_rank(*known[1:], "all", None, like, apart)
    elif by == "modulations":
        law = laws.Normal(1.0)
        chosen = choose_sites(*known[1:], law, law, "hidden", True, False, apart)
        inputs = max(1, sum(site.kind == "post" for site in chosen))
        law = laws.Normal(1.0, math.sqrt(NEAR ** (-1 / inputs) - 1))
        differing = [replace(site, law=law) for site in chosen]
    more: dict[str, Any] = {"frozen": trunk == "frozen", "drawn": head == "drawn"}
    more |= {"pretrained": True, "generator": generator}
    return _embed("adapt", members, known, differing, apart, **more)
