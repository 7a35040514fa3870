"""The ensemble: one network, many members, an ordinary module.

Made by :func:`embens.embed` and the named families. Axis order is ``(member, batch, …)``.
"""

from __future__ import annotations

import copy
import inspect
import math
import operator
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from embens.checks import Gamma, check_choice, check_number, check_whole, suggest
from embens.ensemble import rates, storage
from embens.ensemble.export import to_onnx
from embens.ensemble.folding import FoldingChoice
from embens.ensemble.heads import InputHeads, draw_shares, weigh
from embens.ensemble.layers import Modulation, Stochastic
from embens.ensemble.ntkgp import NTKGP
from embens.ensemble.own import Own, OwnState, iterates
from embens.ensemble.plan import Plan
from embens.ensemble.run import Current, Run
from embens.ensemble.wrapping import Individual, Wrapper, plain, walk
from embens.files import write_tensors
from embens.objective import MOVED, OPTIONS, BatchKind, Criterion, Of, objective
from embens.reading.attention import Attention
from embens.reading.flow import left_over

FOLDED_BYTES = {"cpu": 2**21, "cuda": 2**28}
"""The largest activation of a folded chunk, by device: on a CPU it should stay in the cache."""


class EmbeddedEnsemble(nn.Module):
    """M members in one network.

    Attributes:
        network: the reference's copy with its modulated layers.
        plan: what makes it an ensemble: sites, laws, what is shared.
        chunk: how many members run together; None: chosen for the network and the batch. It never
            changes the results beyond rounding, nor the order of members.
    """

    def __init__(self, network: nn.Module, plan: Plan):
        super().__init__()
        self.network = network
        self.plan = plan
        self.chunk: int | None = None
        self.training = network.training
        self.current = Current()
        self.individuals: dict[str, Individual] = {}
        slot = 0
        for name, module in walk(network):
            if isinstance(module, Individual | Wrapper | Attention):
                module.current = self.current
            if isinstance(module, Individual):
                self.individuals[name], module.slot = module, slot
                slot += len(module.tensors())
        modules = dict(walk(network))
        places = [place.rpartition(".") for place in plan.state]
        self.state = OwnState([(modules[owner], name) for owner, _, name in places], plan.members)
        self.iterated = [m for m in network.modules() if iterates(m) and not plan.separate]
        self.folding = FoldingChoice(self)

    def __deepcopy__(self, memo: dict) -> EmbeddedEnsemble:
        memo.update(left_over(self))
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    @property
    def members(self) -> int:
        """How many members there are."""
        return self.plan.members

    @property
    def reference(self) -> nn.Module:
        """The copy of the reference network."""
        return self.network

    @property
    def spec(self) -> Plan:
        """What the user asked for: members, sites and laws, per-member layers, low ranks."""
        return self.plan

    def individual_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of which every member has its own (trainable modulations)."""
        tensors = {id(t): t for t in self._stacks(Individual)}  # some are tied
        yield from (t for t in tensors.values() if isinstance(t, nn.Parameter))

    def _stacks(self, kind: type[Individual]) -> list[Tensor]:
        modules = (m for m in self.individuals.values() if isinstance(m, kind))
        return [t for m in modules for t in m.tensors().values()]

    def shared_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that all members share (the reference's)."""
        individual = {id(p) for p in self.individual_parameters()}
        yield from (p for p in self.parameters() if id(p) not in individual)

    @suggest()
    def parameter_groups(
        self,
        lr: float = 0.01,
        modulation_lr: float | None = None,
        weight_decay: float = 5e-4,
        *,
        gamma: Gamma = None,
        optimizer: rates.MakeOptimizer = torch.optim.SGD,
        modulation_weight_decay: float = 0.0,
    ) -> list[dict[str, Any]]:
        r"""Return the groups for a torch optimizer: shared parameters, modulations, own layers.

        With them one step on :func:`embens.objective` is the paper's (``embens.ensemble.rates``).

        The rate of the shared parameters is ``lr`` times :math:`\gamma(M)/M`, for optimizers of the
        Adam kind times :math:`\gamma/\gamma^*`; that of modulations is ``modulation_lr`` (None:
        ``lr``). ``weight_decay`` is of shared parameters and of members' own layers, in units of
        ``lr``, whatever gamma is. ``gamma`` is a number (0: nothing shared moves), a function of
        the number of members, or None for the natural value. ``optimizer`` is what the groups are
        for, a class or a function from groups to an optimizer.
        """
        modulation_lr = lr if modulation_lr is None else modulation_lr
        for name, value in (("lr", lr), ("modulation_lr", modulation_lr)):
            check_number(name, value, "finite and not negative", lambda rate: rate >= 0)
        factor, decay = rates.shared_factors(self, gamma, optimizer)
        stacks = set(map(id, self._stacks(Own)))
        shared = [] if self.plan.frozen else list(self.shared_parameters())
        individual = list(self.individual_parameters())
        own = [p for p in individual if id(p) in stacks]
        modulations = [p for p in individual if id(p) not in stacks]
        own_decay = weight_decay * (not self.plan.has_prior)
        names = ("params", "lr", "weight_decay", "gamma_factor")
        groups = (
            (shared, lr * factor, weight_decay * decay, factor),
            (modulations, modulation_lr, modulation_weight_decay, 1.0),
            (own, lr, own_decay, 1.0),
        )
        return [dict(zip(names, group, strict=True)) for group in groups if group[0]]

    # Running

    if TYPE_CHECKING:  # what a network with one output gives; with several, trees of tensors

        def __call__(
            self, *inputs: Any, batch: BatchKind = "same", chunk: int | None = None, **kwargs: Any
        ) -> Tensor: ...

    def forward(
        self,
        x: Any = ...,
        /,
        *inputs: Any,
        batch: BatchKind = "same",
        chunk: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run all members.

        Args:
            x: the first input of the reference, unless all of them have names.
            *inputs: more of them.
            batch: "same": every member sees the inputs; "own": tensors among the inputs have the
                members as their first axis; "split": row i of every tensor goes to member i mod M.
            chunk: how many members run together, instead of ``self.chunk``.
            **kwargs: passed on; tensors with a row for each sample go with the samples.

        Returns:
            The outputs with the members as a new first axis; for "split" those of the reference.
        """
        inputs = inputs if x is ... else (x, *inputs)
        with self.run(inputs, kwargs, batch=batch, chunk=chunk) as run:
            if batch == "split":
                return run.split()
            outputs = run.outputs()
            return outputs if run.shares is None else weigh(outputs, run.shares)

    def run(
        self,
        inputs: tuple,
        kwargs: dict[str, Any] | None = None,
        *,
        batch: BatchKind = "same",
        chunk: int | None = None,
        cut: bool = False,
    ) -> Run:
        """Return a pass that is about to begin, for those who look at single members."""
        self._check_batch(inputs, kwargs, batch)
        size = self.chunk_size(inputs or (kwargs,), chunk)
        run = Run(self, inputs, kwargs or {}, batch=batch, chunk=size, cut=cut)
        if self.plan.heads is not None and batch == "own" and self.training:
            run.shares = draw_shares(self.members, self.plan.heads.mix, next(self.parameters()))
        return run

    def chunk_size(self, inputs: tuple, chunk: int | None = None) -> int:
        """Return how many members run together on these inputs."""
        chunk = self.chunk if chunk is None else chunk
        if chunk is not None:
            return min(check_whole("chunk", chunk), self.members)
        if self.members == 1 or self.folding.reason:
            return 1
        x = inputs[0] if inputs else None
        if not isinstance(x, Tensor):
            x = next((v for v in tree_leaves(inputs) if isinstance(v, Tensor)), None)
        if x is None or torch.compiler.is_compiling() or self.plan.heads is not None:
            return self.members
        rows, positions = self.plan.widths
        numbers = max(
            len(x) * rows if x.dim() else 1, x.numel() * positions // self.plan.input_channels
        )
        size = numbers * (x.itemsize if x.is_floating_point() else 4)
        budget = FOLDED_BYTES.get(x.device.type, FOLDED_BYTES["cuda"])
        most = max(1, min(self.members, budget // max(1, size)))
        return math.ceil(self.members / math.ceil(self.members / most))  # chunks of one size

    def _check_batch(self, inputs: tuple, kwargs: dict | None, batch: BatchKind) -> None:
        if self.plan.heads is not None:
            if batch == "split":
                raise ValueError(
                    "batch='split' has no meaning here: every row takes an input of each member. "
                    "Use batch='own' with inputs (member, batch, …)."
                )
            if sum(isinstance(x, Tensor) for x in tree_leaves((inputs, kwargs))) != 1:
                raise ValueError("a network with a block for each member takes one tensor")
        if batch == "same":
            return
        check_choice("batch", batch, OPTIONS["batch"])
        shapes = [tuple(x.shape) for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        if not shapes:
            raise ValueError(f"batch={batch!r} needs a tensor among the positional inputs")
        firsts = {shape[:1] for shape in shapes}
        if batch == "own" and firsts != {(self.members,)}:
            raise ValueError(
                f"batch='own' expects inputs of shape ({self.members}, batch, …), a batch for each "
                f"member; got {shapes}. For one batch of all members use batch='same' or 'split'."
            )
        if len(firsts) > 1:
            raise ValueError(f"batch='split' expects the same number of rows; got shapes {shapes}")

    # Training

    def bind(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call for inputs as data have them.

        A tuple or a list are several inputs, a dict has them by name, all else is the only one.
        """
        if not isinstance(inputs, Mapping):
            return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}
        signature = inspect.signature(self.network.forward)
        try:
            bound = signature.bind(**inputs)
        except TypeError as error:
            names = ", ".join(map(repr, inputs))
            raise TypeError(
                f"inputs {names} of a reference that takes {signature}: {error}"
            ) from None
        return bound.args, bound.kwargs

    @suggest(MOVED)
    def objective(
        self,
        outputs: Any,
        target: Any,
        criterion: Criterion | None = None,
        *,
        batch: BatchKind = "same",
        of: Of = "members",
    ) -> Tensor:
        """Return the sum of the members' losses; see :func:`embens.objective`."""
        return objective(outputs, target, criterion, batch=batch, of=of, members=self.members)

    def backward(
        self,
        *inputs_and_target: Any,
        criterion: Criterion | None = None,
        chunk: int = 1,
        **kwargs: Any,
    ) -> Tensor:
        """Run forward and backward chunk by chunk and accumulate the objective's gradients.

        Gives the gradients of ``self.objective(self(x), target).backward()`` with the memory of one
        chunk: what members share is backpropagated once, at the end.

        Takes the reference's inputs, then the target; a tuple or a dict in the place of the inputs
        has several of them, as for :func:`embens.fit`. Returns the objective, detached.
        """
        *inputs, target = inputs_and_target
        args, named = self.bind(inputs[0] if len(inputs) == 1 else inputs)
        losses: list[Tensor] = []

        def loss_of(outputs: Any) -> Tensor:
            loss = objective(outputs, target, criterion)
            losses.append(loss.detach())
            return loss

        with torch.enable_grad(), self.run(args, named | kwargs, chunk=chunk, cut=True) as run:
            run.backward(loss_of)
        return torch.stack(losses).sum()

    def kl(self) -> Tensor:
        """Return the divergence of the members' numbers from their prior, summed over members.

        It is 0 but for :func:`embens.rank1` and :func:`embens.bayesian`. :func:`embens.fit` adds
        ``kl() / rows`` to the objective, with the rows of the training data; so should a loop of
        your own.
        """
        owners = (m.inner() if isinstance(m, Own) else m for m in self.individuals.values())
        divergences = [m.kl() for m in owners if isinstance(m, (Stochastic, NTKGP))]
        return torch.stack(divergences).sum() if divergences else torch.zeros(())

    @property
    def overlap(self) -> float:
        r"""The product of the post laws' :math:`E[u_a u_b] / E u^2` over the hidden sites.

        Last layers that were drawn for each member make it 0; matrices of low rank count by the
        share of the weights that members have in common at the start.
        """
        if self.plan.own_last:
            return 0.0
        common = math.prod(1 / (1 + s.scale**2) for s in self.plan.low_rank)
        posts = [s.law for s in self.plan.sites if s.kind == "post" and s.hidden]
        return common * math.prod(law.overlap for law in posts)

    @property
    def natural_gamma(self) -> float:
        r"""The default gradient scale :math:`M / (1 + (M-1) r)`, with ``r`` the overlap.

        Where members are repeated, ``r`` is the mean over pairs, with 1 for two of the same.
        """
        overlap, pairs = self.overlap, self.members * (self.members - 1)
        if self.plan.subset is not None and pairs:
            twins = sum(n * (n - 1) for n in Counter(self.plan.subset.members).values())
            overlap = (twins + (pairs - twins) * overlap) / pairs
        return rates.gamma_of(self.members, overlap)

    # Out again

    def member(self, a: int) -> nn.Module:
        """Return member ``a`` as a plain module with the same outputs.

        Its layers are torch's own with that member's weights; only a layer whose weight can't hold
        its modulations (hooks, a parametrization, a forward of its own) keeps a small wrapper.
        """
        a = self._find(a)
        if any(s.fresh for s in self.plan.sites):
            raise ValueError(
                "masks that are drawn anew at each pass belong to no member; use fresh=False for a "
                "fixed set"
            )
        with self.state.of(a):
            return plain(self.network, a)

    def _find(self, a: Any) -> int:
        """Return the index of a member, which may be counted from the end."""
        if isinstance(a, bool) or not hasattr(a, "__index__"):
            raise TypeError(f"a member is a whole number; got {a!r}")
        if not -self.members <= (a := operator.index(a)) < self.members:
            raise IndexError(f"member {a} of an ensemble of {self.members}")
        return a % self.members

    def subset(self, members: Iterable[int]) -> EmbeddedEnsemble:
        """Return an ensemble of some of the members, which shares no tensor with this one.

        They are in the order that is given; one that comes twice has twice the weight in means.
        """
        chosen = [self._find(a) for a in members]
        if not chosen:
            raise ValueError("members: expected at least one member; got none")
        plan = self.plan.select(chosen)
        if plan.repeats and any(s.fresh for s in plan.sites):
            raise ValueError("a member whose masks are drawn anew at each pass can't come twice")
        memo: dict[int, Any] = {}
        for stack in (t for t in self._stacks(Individual) if t.numel()):
            rows = stack.detach()[chosen]
            parameter = isinstance(stack, nn.Parameter)
            memo[id(stack)] = nn.Parameter(rows, stack.requires_grad) if parameter else rows
        for heads in (m for m in self.individuals.values() if isinstance(m, InputHeads)):
            memo[id(heads)] = heads.plain(None, memo)
        network = copy.deepcopy(self.network, memo)
        for module in network.modules():
            if isinstance(module, Modulation):
                module.members = plan.members
        ensemble = EmbeddedEnsemble(network, plan)
        ensemble.chunk = self.chunk
        ensemble.state.values = [copy.deepcopy(self.state.values[a]) for a in chosen]
        return ensemble

    def collapse(self) -> nn.Module:
        """Return one plain network whose output is the mean of the members' outputs."""
        if self.plan.not_collapsible:
            raise ValueError(
                f"this ensemble can't be collapsed: {self.plan.not_collapsible}. Only where the "
                "output is linear in the modulations (last-layer dropout) is the mean of the "
                "members one network."
            )
        return plain(self.network, None)

    def to_onnx(self, path: str | os.PathLike[str], example: Any) -> Path:
        """Write all members to one ONNX file, outputs as here; see :func:`embens.to_onnx`."""
        return to_onnx(self, path, example)

    def save(self, path: str | os.PathLike[str], *, shared: bool = True) -> None:
        """Write the ensemble to one file, masks and laws included; see :func:`embens.load`.

        With ``shared=False`` without the parameters that members share, for a network that stays
        as it was: loading takes them from the reference, and refuses one with other weights.
        """
        header, (common, rest) = {"plan": self.plan.to_dict()}, self.state_parts()
        if not shared:
            header["shared"] = storage.fingerprints(common)
        write_tensors(path, storage.FORMAT, header, self.state_dict() if shared else rest)

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        shared: bool | None = None,
        base: str = "",
        results: Mapping[str, float] | None = None,
    ) -> None:
        """Write a folder with the ensemble and a model card, for ``embens.load(folder, …)``.

        ``base`` says where the reference comes from, ``results`` are numbers for the card. The file
        has the shared parameters if ``shared``; None: unless they were frozen.
        """
        shared = not self.plan.frozen if shared is None else shared
        base = base or getattr(getattr(self.network, "config", None), "_name_or_path", "")
        (folder := Path(folder)).mkdir(parents=True, exist_ok=True)
        self.save(folder / storage.FILE, shared=shared)
        (folder / storage.CARD).write_text(storage.card(self, base, results or {}, shared))

    def state_parts(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the shared parameters in the state, and everything else in it."""
        common, parts = {id(p) for p in self.shared_parameters()}, ({}, {})
        for name, tensor in self.state_dict(keep_vars=True).items():
            parts[id(tensor) not in common][name] = tensor
        return parts

    def extra_repr(self) -> str:
        shared = sum(p.numel() for p in self.shared_parameters())
        own = sum(p.numel() for p in self.individual_parameters())
        recompute = ", recompute" if self.plan.recompute else ""
        why = self.folding.reason and f", one member after another because {self.folding.reason}"
        return (
            f"{self.plan.family}, members={self.members}, shared parameters={shared:,}, "
            f"individual parameters={own:,}{recompute}{why}"
        )


if torch.__version__ < (2, 10):  # type: ignore[operator]
    _forward = EmbeddedEnsemble.forward

    @torch.compiler.disable
    def compiling_or_exporting_an_ensemble_needs_torch_2_10(self, *inputs, **options):
        """Run all members uncompiled; the compiler names this function where that won't do."""
        return _forward(self, *inputs, **options)

    EmbeddedEnsemble.forward = compiling_or_exporting_an_ensemble_needs_torch_2_10  # type: ignore
