"""From a reference and laws to an ensemble: choose sites, write the spec, draw the values.

Everything is validated before anything is built. The reference is copied, never changed; its
weights are kept.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Never

import torch
from torch import Tensor, nn

from embens import synonyms
from embens.adapters import sample_factors
from embens.checks import check_choice, check_members, unknown_argument, warn
from embens.ensemble.module import EmbeddedEnsemble
from embens.graph.reading import Flow, copy_reference, has_user_code, read_flow
from embens.graph.snapshots import HOOKS
from embens.graph.tracing import shows_all_layers
from embens.graph.watching import watch_flow
from embens.laws import Law, Normal, Signs
from embens.norm_statistics import separate_norms
from embens.omissions import (
    warn_about_cancelling_members,
    warn_about_equal_weights,
    warn_about_guesses,
)
from embens.patterns import list_names, refuse_modulated, select_layers, select_modules
from embens.sites import NORMS, Side, Site, find_layers, is_within, match, tensor_names
from embens.spec import EnsembleSpec, LowRankSite, PerMember

Laws = Law | Mapping[str, Law | None] | None
Sites = str | Iterable[str] | Callable[[str, nn.Module], bool]
Initialise = Callable[[nn.Module], None]
Trainable = bool | Mapping[str, "bool | Mapping[str, bool]"]

SIDES: tuple[Side, Side] = ("pre", "post")
_NORMAL = Normal()


def embed(
    reference: nn.Module,
    members: int = 8,
    pre: Laws = _NORMAL,
    post: Laws = _NORMAL,
    sites: Sites = "hidden",
    example_input: Any = None,
    own: str | Iterable[str] = (),
    trainable: Trainable = True,
    generator: torch.Generator | None = None,
    *,
    own_weights: str | Initialise = "drawn",
    fresh: bool = False,
    norm_affine: str = "shared",
    family: str = "embed",
    **unknown: Never,
) -> EmbeddedEnsemble:
    r"""Embed an ensemble into a reference network.

    Member :math:`a` is the reference with weights :math:`v_a u_a^\top \circ W` and biases
    :math:`v_a \circ b`.

    Args:
        reference: Any module. It is copied, never changed, and its weights are kept.
        members: Number of members.
        pre: Law of :math:`v`, which multiplies the output of a layer, bias included. None: absent.
            A mapping from names or wildcards of layers to laws modulates only those layers.
        post: Law of :math:`u`, which multiplies the input of a layer.
        sites: "hidden" for the outputs of all but the last layers and the inputs of all but the
            first; "last" for the inputs of the last layers; "all"; names or wildcards of layers; or
            a function of (name, module), for both sides of those layers.
        example_input: A batch, a tuple of positional arguments or a dictionary of keyword
            arguments, for code that torch.fx cannot trace.
        own: Layers of which every member has a separate copy: names of layers, norm layers or
            modules that hold them, wildcards, or "last" for the last layers.
        trainable: False for fixed masks; or ``{"pre": …, "post": …}``, each a bool or a mapping
            from layer names to bools.
        generator: Random generator for modulations and per-member layers.
        own_weights: Initial values of per-member layers: "drawn" separately for each member by
            their ``reset_parameters``, "copied" from the reference, or a function that
            reinitialises one module in place.
        fresh: Draw new modulations at every pass.
        norm_affine: "shared", or "member" for per-member scales and shifts of norm layers.
        family: Name of the family, for ``repr`` and files.
        **unknown: Any other name raises TypeError with a suggestion.

    Returns:
        The ensemble. Its outputs are ``(member, batch, …)``.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble = embed(net, members=5)
        >>> ensemble(torch.zeros(2, 4)).shape
        torch.Size([5, 2, 3])
    """
    if unknown:
        raise unknown_argument(embed, unknown, synonyms.EMBED)
    source = Source(reference, members, example_input)
    if norm_affine not in ("shared", "member"):
        raise ValueError(f"norm_affine must be 'shared' or 'member', got {norm_affine!r}.")
    if not callable(own_weights) and own_weights not in ("drawn", "copied"):
        raise ValueError(
            f"own_weights must be 'drawn', 'copied' or a function, got {own_weights!r}."
        )
    separate_layers: tuple[str, ...] = ()
    if own != ():
        separate_layers = source.choose_separate_layers(own)
    modulated_sites = source.choose_sites(pre, post, sites, trainable, fresh, separate_layers)
    spec = source.make_spec(
        family,
        modulated_sites,
        separate_layers=separate_layers,
        drawn=own_weights != "copied",
        norm_affine=norm_affine == "member",
    )
    if not is_selection(sites, pre, post):
        source.check_differences(modulated_sites, separate_layers=separate_layers)
    if modulated_sites and not any(site.trainable for site in modulated_sites):
        warn_about_cancelling_members(source, modulated_sites)
    initialise = own_weights if callable(own_weights) else None
    return build(reference, spec, initialise, generator, flow=source.flow)


def batch_ensemble(
    reference: nn.Module,
    members: int = 8,
    p: float = 0.0,
    *,
    law: Callable[[float], Law] = Signs,
    sites: Sites = "hidden",
    own: str | Iterable[str] = (),
    example_input: Any = None,
    generator: torch.Generator | None = None,
    **unknown: Never,
) -> EmbeddedEnsemble:
    """Embed a BatchEnsemble: trainable modulations, by default at the hidden sites.

    Args:
        reference: Any module.
        members: Number of members.
        p: Mean of the modulations; their second moment is 1. At initialisation members are
            independent for 0 and equal for 1.
        law: A class of laws with one parameter: ``laws.Signs``, or ``laws.Shifted``, the paper's
            N(p, 1 − p²).
        sites: See :func:`embens.embed`.
        own: See :func:`embens.embed`.
        example_input: See :func:`embens.embed`.
        generator: See :func:`embens.embed`.
        **unknown: Any other name raises TypeError with a suggestion.

    Returns:
        The ensemble.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> batch_ensemble(net, members=4, p=0.5)(torch.zeros(2, 4)).shape
        torch.Size([4, 2, 3])
    """
    if unknown:
        raise unknown_argument(batch_ensemble, unknown, synonyms.BATCH_ENSEMBLE)
    if isinstance(law, Law):
        raise TypeError(f"law must be a class of laws such as laws.Signs, got {law}. See embed.")
    if not callable(law):
        raise TypeError(f"law must be a class of laws such as laws.Signs, got {law!r}.")
    return embed(
        reference,
        members,
        pre=law(p),
        post=law(p),
        sites=sites,
        own=own,
        example_input=example_input,
        generator=generator,
        family="batch_ensemble",
    )


class Source:
    """A reference with its layers and its data flow, from which sites are chosen.

    Args:
        reference: The user's module.
        members: Number of members.
        example_input: See :func:`embed`.

    Attributes:
        layers: Parameter layers by name.
        modules: All modules by name.
        flow: How data flow from layer to layer.
        used: Names of the layers that the forward calls.
    """

    def __init__(self, reference: nn.Module, members: int, example_input: Any = None):
        check_module(reference)
        self.reference = reference
        if type(members) is not int or members < 1:
            members = check_members(members)  # raises, or converts an integer of numpy
        self.members = members
        self.layers = find_layers(reference)
        if not self.layers:
            raise ValueError(
                "the reference has no parameter layer (Linear, Conv*, ConvTranspose*, Embedding, "
                "RNN or attention), so there is nothing to modulate."
            )
        self.modules = dict(reference.named_modules())
        self.is_watched = example_input is not None
        if self.is_watched:
            self.flow = watch_flow(reference, example_input)
        else:
            self.flow = read_flow(reference)
            unseen = [name for name in self.layers if name not in self.flow.upstream]
            if unseen and not shows_all_layers(reference):
                self.flow.guesses.append(f"that {unseen[0]!r} is never called")
        self.used = [name for name in self.layers if name in self.flow.upstream]

    # Modulated sites

    def choose_sites(
        self,
        pre: Laws,
        post: Laws,
        sites: Sites,
        trainable: Trainable = True,
        fresh: bool = False,
        separate_layers: Collection[str] = (),
    ) -> tuple[Site, ...]:
        """Return the modulated sites in the order of the layers.

        Modules of ``separate_layers`` are left out; the other arguments are those of
        :func:`embed`.
        """
        selected, hidden = self.select(sites)
        if separate_layers and is_selection(sites, pre, post):
            refuse_modulated(self, separate_layers, sites, (pre, post))
        trainable_sides = _flags_by_side(trainable)
        modulated_sites = []
        for side, law in zip(SIDES, (pre, post), strict=True):
            names = []
            for name in self.used:
                is_selected = (name, side) in selected and not is_within(name, separate_layers)
                if is_selected and self.layers[name].channels(side) is not None:
                    names.append(name)
            laws = _spread_over_sites(law, names, side, "a law or None", (Law, type(None)))
            names = [name for name in names if laws.get(name) is not None]
            label = f"trainable[{side!r}]"
            flags = _spread_over_sites(
                trainable_sides[side], names, label, "True or False", (bool,)
            )
            for name in names:
                site = self._make_site(name, side, laws[name])
                is_trainable = flags.get(name, True) and not fresh
                is_hidden = (name, side) in hidden
                modulated_sites.append(
                    replace(site, trainable=is_trainable, fresh=fresh, hidden=is_hidden)
                )
        if not modulated_sites and not separate_layers:
            self._refuse_no_sites(pre, post, sites)
        order = {name: index for index, name in enumerate(self.layers)}
        return tuple(sorted(modulated_sites, key=lambda site: (order[site.layer], site.kind)))

    def _make_site(self, name: str, side: Side, law: Law) -> Site:
        """Return a site with one value per channel; after a Flatten it covers many features."""
        size = self.layers[name].channels(side)
        assert size is not None
        repeat = 1
        if side == "post":
            repeat = self.flow.repeat.get(name, 1)
        return Site(name, side, law, size // repeat, repeat)

    def select(self, sites: Sites) -> tuple[set[tuple[str, Side]], set[tuple[str, Side]]]:
        """Return the selected sites and the hidden sites, as pairs of a layer and a side.

        Args:
            sites: See :func:`embed`.
        """
        first, last = self.flow.first, self.flow.last
        hidden: set[tuple[str, Side]] = {(name, "pre") for name in self.used if name not in last}
        hidden |= {(name, "post") for name in self.used if name not in first}
        every: set[tuple[str, Side]] = {(name, side) for name in self.used for side in SIDES}
        if sites == "hidden":
            return hidden, hidden
        if sites == "all":
            return every, hidden
        if sites == "last":
            return {(name, "post") for name in last if (name, "post") in hidden}, hidden
        names = select_layers(self, sites)
        return {site for site in every if site[0] in names}, hidden

    def _refuse_no_sites(self, pre: Laws, post: Laws, sites: Sites) -> None:
        if pre is None and post is None:
            raise ValueError("no site is modulated: pre and post are both None.")
        raise ValueError(
            f"no site is modulated: sites={sites!r} selects none. A network with one layer has no "
            "hidden site; use sites='all'."
        )

    # Separate layers

    def choose_separate_layers(self, own: str | Iterable[str]) -> tuple[str, ...]:
        """Return the modules of which every member has a separate copy.

        Args:
            own: See :func:`embed`.

        Returns:
            Names of modules, in the order of registration.
        """
        if own == "last" and own not in self.modules:
            names = self.last_modules()
        else:
            names = select_modules(self, own)
        for name in names:
            self._check_separate_layer(name, names)
        return tuple(name for name in self.modules if name in names)

    def last_modules(self) -> set[str]:
        """Return the names of the modules that hold the last layers."""
        names = set()
        for layer_name in self.flow.last:
            owner = self.layers[layer_name].module
            parent = owner.rpartition(".")[0]
            # The output projection of an attention stands for the whole attention.
            is_projection = isinstance(self.modules[parent], nn.MultiheadAttention)
            names.add(parent if is_projection else owner)
        return names

    def _check_separate_layer(self, name: str, names: Collection[str]) -> None:
        """Raise ValueError if members cannot have separate copies of a layer."""
        module = self.modules[name]
        has_children = any(True for _ in module.children())
        if has_children and not isinstance(module, nn.MultiheadAttention):
            # Other layers have children only if they are parametrized.
            raise ValueError(
                f"own: {name!r} is parametrized, so members cannot have separate copies. Remove "
                "the parametrization with torch.nn.utils.parametrize.remove_parametrizations."
            )
        parameters = {id(parameter) for parameter in module.parameters()}
        for other_name, other_module in self.modules.items():
            if is_within(other_name, names):
                continue
            if parameters & {id(p) for p in other_module._parameters.values()}:
                raise ValueError(
                    f"own: {name!r} shares a weight with {other_name!r}. Name both or neither (in "
                    "adapt: head='shared')."
                )

    # Specification

    def make_spec(
        self,
        family: str,
        sites: tuple[Site, ...] = (),
        low_rank: tuple[LowRankSite, ...] = (),
        *,
        separate_layers: Sequence[str] = (),
        drawn: bool = True,
        norm_affine: bool = False,
        frozen: bool = False,
        pretrained: bool = False,
    ) -> EnsembleSpec:
        """Return the spec, with per-member statistics of norm layers where members differ.

        Args:
            family: Name of the family.
            sites: Modulated sites.
            low_rank: Layers with low-rank members.
            separate_layers: Modules of which every member has a separate copy.
            drawn: Whether these copies are initialised separately.
            norm_affine: Whether norm layers have per-member scales and shifts.
            frozen: Whether the shared parameters are not trained.
            pretrained: Whether the members begin near a trained reference.

        Returns:
            The specification.
        """
        if self.flow.guesses:
            warn_about_guesses(self.flow.guesses, is_watched=self.is_watched)
        per_member: tuple[PerMember, ...] = ()
        if separate_layers:
            per_member = per_member_items(self, separate_layers, drawn)
        differing = {site.layer for site in (*sites, *low_rank)}
        differing |= {name for name in self.layers if is_within(name, separate_layers)}
        if any(isinstance(module, NORMS) for module in self.modules.values()):
            per_member += separate_norms(self, differing, separate_layers, norm_affine)
        last_layers = {self.layers[name].module for name in self.flow.last}
        has_individual_head = drawn and bool(last_layers) and bool(separate_layers)
        for name in last_layers:
            has_individual_head = has_individual_head and is_within(name, separate_layers)
        return EnsembleSpec(
            family,
            self.members,
            sites,
            low_rank,
            per_member,
            frozen=frozen,
            pretrained=pretrained,
            individual_head=has_individual_head,
        )

    def check_differences(
        self,
        sites: Sequence[Site] = (),
        low_rank: Sequence[LowRankSite] = (),
        separate_layers: Sequence[str] = (),
    ) -> None:
        """Warn if members have the same weights in most of the network.

        Args:
            sites: Modulated sites.
            low_rank: Layers with low-rank members.
            separate_layers: Modules of which every member has a separate copy.
        """
        modulated = set()
        for site in sites:
            layer = self.layers[site.layer]
            if not layer.recurrent:  # modulated inputs leave recurrent weights as they are
                modulated.add(layer.module)
        for name, parameter in self.reference.named_parameters(remove_duplicate=False):
            owner = name.rpartition(".")[0]
            if parameter.dim() < 2 or owner in modulated or is_within(owner, separate_layers):
                continue
            warn_about_equal_weights(self, sites, low_rank, separate_layers)
            return


# Building


def build(
    reference: nn.Module,
    spec: EnsembleSpec,
    initialise: Initialise | None = None,
    generator: torch.Generator | None = None,
    *,
    flow: Flow | None = None,
) -> EmbeddedEnsemble:
    """Return the ensemble that a spec makes of a reference, which is not changed.

    Args:
        reference: The user's module.
        spec: The specification.
        initialise: Reinitialises one module in place; None: its ``reset_parameters``.
        generator: Random generator of all values.
        flow: The data flow of the reference, if it was read already.

    Returns:
        The ensemble.
    """
    values: dict[str, Tensor] = {}
    if spec.per_member:
        values = stack_separate_tensors(reference, spec, initialise, generator)
    layers = find_layers(reference)
    modules = dict(reference.named_modules())
    for site in spec.sites:
        example = next(modules[layers[site.layer].module].parameters())
        if site.fresh:
            # Values are drawn at each pass; this raises early if the law cannot be drawn.
            sample_site(site, spec.members, example, torch.Generator())
            continue
        sample = sample_site(site, spec.members, example, generator)
        values[site.key] = nn.Parameter(sample) if site.trainable else sample
    for low_rank in spec.low_rank:
        layer = layers[low_rank.layer]
        weight = layer.matrix(modules[layer.module])
        factors = sample_factors(low_rank, spec.members, weight, generator)
        values.update({name: nn.Parameter(factor) for name, factor in factors.items()})
    ensemble = EmbeddedEnsemble(copy_reference(reference), spec, values, flow)
    if generator is not None and any(site.fresh for site in spec.sites):
        from embens.ensemble.masks import seed_masks

        seed_masks(ensemble, generator)
    return ensemble


def sample_site(
    site: Site,
    members: int,
    example: Tensor,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw the values of a site.

    Args:
        site: The site.
        members: Number of members.
        example: A tensor with the type and the device of the values.
        generator: Random generator of the values.

    Returns:
        The values, ``(member, size)``.
    """
    try:
        return site.law.sample(
            (members, site.size),
            generator,
            dtype=example.dtype,
            device=example.device,
        )
    except ValueError as error:
        raise ValueError(f"the {site.kind} modulations of {site.layer!r}: {error}") from None


# Tensors of separate layers


def per_member_items(source: "Source", names: Iterable[str], drawn: bool) -> tuple[PerMember, ...]:
    """Return the parts of some modules that hold tensors, for a spec.

    Args:
        source: The reference.
        names: Modules of which every member has a separate copy.
        drawn: Whether the copies are initialised separately.
    """
    items = []
    for name in names:
        for part_name, part in source.modules[name].named_modules():
            tensors = tensor_names(part)
            if tensors:
                items.append(PerMember(f"{name}.{part_name}".strip("."), tensors, drawn))
    return tuple(items)


def stack_separate_tensors(
    reference: nn.Module,
    spec: EnsembleSpec,
    initialise: Initialise | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Return the per-member tensors of a spec.

    Args:
        reference: The user's module.
        spec: The specification.
        initialise: Reinitialises one module in place; None: its ``reset_parameters``.
        generator: Random generator of drawn tensors.

    Returns:
        Tensors ``(member, …)`` by name.
    """
    networks = []
    drawn_modules = [item.module for item in spec.per_member if item.drawn]
    if drawn_modules:
        for _ in range(spec.members):
            network = copy_reference(reference)
            seed = int(torch.randint(2**62, (), generator=generator))
            _reinitialise(network, drawn_modules, initialise, seed)
            networks.append(network)
    values: dict[str, Tensor] = {}
    stacks: dict[int, Tensor] = {}
    for item in spec.per_member:
        sources = networks if item.drawn else [reference] * spec.members
        values.update(_stack_tensors(reference, item, sources, stacks))
    return values


def _stack_tensors(
    reference: nn.Module,
    item: PerMember,
    sources: Sequence[nn.Module],
    stacks: dict[int, Tensor],
) -> dict[str, Tensor]:
    """Return the per-member tensors of a module, members first.

    Args:
        reference: The user's module.
        item: The module and its tensors.
        sources: One network per member, from which tensors are taken.
        stacks: Stacks by the ``id`` of the reference's tensor, so that tied tensors stay tied.
    """
    values = {}
    for name in item.tensors:
        original = getattr(reference.get_submodule(item.module), name)
        if id(original) not in stacks:
            tensors = [getattr(s.get_submodule(item.module), name).detach() for s in sources]
            stack = torch.stack(tensors)
            if isinstance(original, nn.Parameter):
                stack = nn.Parameter(stack, original.requires_grad)
            stacks[id(original)] = stack
        values[f"{item.module}.{name}".lstrip(".")] = stacks[id(original)]
    return values


def _reinitialise(
    network: nn.Module, names: Collection[str], initialise: Initialise | None, seed: int
) -> None:
    """Draw new parameters for some modules and everything inside them, children first.

    Args:
        network: The network that holds the modules, changed in place.
        names: Names of the modules.
        initialise: Reinitialises one module in place; None: its ``reset_parameters``.
        seed: Seed of torch's global generators during the initialisation.
    """
    devices = {p.device for p in network.parameters() if p.device.type == "cuda"}
    modules = [(n, m) for n, m in network.named_modules() if is_within(n, names)]
    with torch.random.fork_rng(devices=list(devices)):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        for name, module in reversed(modules):
            _reset_parameters(name, module, initialise)


def _reset_parameters(name: str, module: nn.Module, initialise: Initialise | None) -> None:
    has_parameters = any(True for _ in module.parameters(recurse=False))
    # nn.MultiheadAttention calls its method _reset_parameters.
    reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    if initialise is not None:
        if has_parameters:
            initialise(module)
    elif reset is not None:
        reset()
    elif has_parameters:
        raise ValueError(
            f"the parameters of {name or 'the reference'!r} ({type(module).__name__}) cannot be "
            "reinitialised: it has no reset_parameters(). Pass initialise= (in embed: "
            "own_weights=), a function that reinitialises one module in place."
        )


# Small helpers


def is_selection(sites: Sites, pre: Laws, post: Laws) -> bool:
    """Return whether the user named the layers in which members differ.

    The other layers are then equal on purpose, so :func:`embed` does not warn about them.

    Args:
        sites: See :func:`embed`.
        pre: See :func:`embed`.
        post: See :func:`embed`.
    """
    if not isinstance(sites, str) or sites not in ("hidden", "all"):
        return True
    is_own_only = pre is None and post is None
    return is_own_only or isinstance(pre, Mapping) or isinstance(post, Mapping)


def check_module(reference: Any) -> None:
    """Raise if a reference cannot be embedded.

    Args:
        reference: The argument that the user passed.
    """
    if not isinstance(reference, nn.Module):
        hint = " Pass an instance, not the class." if isinstance(reference, type) else ""
        raise TypeError(
            f"the reference must be a torch.nn.Module, got {type(reference).__name__}.{hint}"
        )
    # The reference of an ensemble has meta tensors in place of per-member tensors. A network that
    # is on the meta device as a whole is allowed.
    has_memory = any(not parameter.is_meta for parameter in reference.parameters())
    for name, module in reference.named_modules():
        if "/" in name:
            raise ValueError(
                f"the name of the module {name!r} contains a slash, which files of ensembles use "
                "between names. Rename the module."
            )
        kind = type(module).__name__
        is_wrapper = kind.endswith(("DataParallel", "OptimizedModule"))
        if is_wrapper or isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"the reference contains a {kind}, which cannot be embedded. Embed the module "
                "inside it, then wrap or compile the ensemble."
            )
        if isinstance(module, EmbeddedEnsemble):
            raise TypeError("the reference is, or contains, an ensemble. Pass a plain network.")
        attributes = vars(module).values()
        if has_memory and any(isinstance(x, Tensor) and x.is_meta for x in attributes):
            raise ValueError(
                "the reference is that of another ensemble, whose members have separate tensors of "
                f"{name!r}. Pass ensemble.member(a), or the original network."
            )
    for name, argument in inspect.signature(reference.forward).parameters.items():
        if name in ("batch", "chunk") and argument.kind is argument.KEYWORD_ONLY:
            raise ValueError(
                f"the forward of the reference has a keyword-only argument {name!r}, a name that "
                "calls of the ensemble use. Rename it, or let it be passed by position."
            )
    has_hooks = any(vars(module)[table] for module in reference.modules() for table in HOOKS)
    is_replaced = any("forward" in vars(module) for module in reference.modules())
    if has_hooks or is_replaced or has_user_code(reference):
        from embens.graph.captures import check_captures

        check_captures(reference)
    for name, parameter in reference.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"the parameter {name!r} has no shape yet. Call the reference once on a batch."
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            warn(
                f"the parameter {name!r} has hooks, which torch does not copy with a network. "
                "Register them on the parameter of ensemble.reference."
            )


def _flags_by_side(trainable: Trainable) -> dict[str, Any]:
    """Return ``trainable`` for each side."""
    if not isinstance(trainable, Mapping):
        return dict.fromkeys(SIDES, trainable)
    for key in trainable:
        check_choice("trainable", key, SIDES)
    return {side: trainable.get(side, True) for side in SIDES}


def _spread_over_sites(
    value: Any,
    names: list[str],
    label: str,
    expected: str,
    types: tuple[type, ...],
) -> dict[str, Any]:
    """Spread one value, or a mapping from names and wildcards to values, over sites."""
    if not isinstance(value, Mapping):
        if not isinstance(value, types):
            raise TypeError(f"{label} must be {expected}, or a mapping to it, got {value!r}.")
        return dict.fromkeys(names, value)
    spread: dict[str, Any] = {}
    for pattern, item in value.items():
        if not isinstance(item, types):
            raise TypeError(f"{label}[{pattern!r}] must be {expected}, got {item!r}.")
        matches = match(pattern, names) if isinstance(pattern, str) else []
        if not matches:
            raise ValueError(
                f"{label}: {pattern!r} matches none of the selected sites {list_names(names)}. "
                "(Inputs of first layers and outputs of last layers need sites='all'.)"
            )
        for name in matches:
            # A full name takes precedence over a wildcard.
            if name == pattern or name not in spread:
                spread[name] = item
    return spread
