"""The ensemble: one network, many members, an ordinary ``nn.Module``.

:func:`embens.embed` and the families make it. Axis order is ``(member, batch, …)``. An ensemble
consists of a copy of the reference, a spec, and the values of the members, stacked with the members
first. How it runs is derived from these: folded (:mod:`embens.graph.folding`) where the reference
can be traced into row-wise operations, otherwise merged (:mod:`embens.ensemble.merged`).
:class:`Foldings` chooses the executor of each call and keeps the folded forms.
"""

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from embens import optim
from embens.ensemble import accumulation, collapsing, export, extraction, saving, subsets
from embens.ensemble.binding import bind_inputs, check_rows, separate_arguments
from embens.ensemble.guarded_module import GuardedModule
from embens.ensemble.merged import MergedExecutor
from embens.ensemble.outside import refuse_hidden_tensors
from embens.ensemble.separation import match_buffers
from embens.graph.domains import Unfoldable
from embens.graph.folding import ModuleState, fold
from embens.graph.guards import Guard, Unwatchable
from embens.graph.members import Folded, FoldedPass
from embens.graph.reading import Flow, detached_state, has_user_code
from embens.graph.snapshots import HOOKS
from embens.modes import constant_when_compiled
from embens.sites import (
    Site,
    check_layers,
    check_placeholders,
    find_layers,
    release_tensors,
    weight_shapes,
)
from embens.spec import EnsembleSpec
from embens.trees import check_same_structure, gather, join_members

MOST_FOLDINGS = 16
"""Number of folded forms that are kept, for different modes, arguments and attributes."""

_PLAIN = (bool, int, float, str, type(None))


class MemberTensors(nn.Module):
    """Tensors of all members, stacked along the first axis, by dotted name."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Register a parameter or a buffer; dots in its name become slashes.

        Args:
            name: Dotted name.
            tensor: The tensor, members first.
        """
        attribute = name.replace(".", "/")
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(attribute, tensor)
        else:
            self.register_buffer(attribute, tensor)

    def __getitem__(self, name: str) -> Tensor:
        return getattr(self, name.replace(".", "/"))

    def __contains__(self, name: str) -> bool:
        attribute = name.replace(".", "/")
        return attribute in self._parameters or attribute in self._buffers

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by dotted name."""
        tensors = {}
        for table in (self._parameters, self._buffers):
            for attribute, tensor in table.items():
                tensors[attribute.replace("/", ".")] = tensor
        return tensors


class EmbeddedEnsemble(GuardedModule):
    """M members in one network; made by :func:`embens.embed` and the families.

    Args:
        reference: The reference. The ensemble takes it over; pass a copy.
        spec: How members differ.
        values: Stacked values of the members by name; parameters are trained, tensors are not.
        flow: The data flow of the reference, if it was read already.

    Attributes:
        reference: The ensemble's copy of the reference.
        spec: How members differ.
        individual: Stacked values of the members.
        layers: Parameter layers of the reference by name.
        chunk: Number of members that run together; None: chosen for the network and the batch. It
            changes results by rounding only.

    Example:
        >>> from embens import batch_ensemble
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble = batch_ensemble(net, members=4)
        >>> outputs = ensemble(torch.zeros(5, 4))
        >>> outputs.shape, ensemble.executor
        (torch.Size([4, 5, 3]), 'folded')
        >>> ensemble.objective(outputs, torch.zeros(5, dtype=torch.int64)).backward()
        >>> [tuple(parameter.shape) for parameter in ensemble.shared_parameters()]
        [(8, 4), (8,), (3, 8), (3,)]
        >>> [tuple(parameter.shape) for parameter in ensemble.individual_parameters()]
        [(4, 8), (4, 8)]
        >>> [(site.key, ensemble.site_values(site).shape) for site in ensemble.spec.sites]
        [('0.pre', torch.Size([4, 8])), ('2.post', torch.Size([4, 8]))]
        >>> args, kwargs = ensemble.bind(torch.zeros(5, 4))
        >>> len(args), kwargs
        (1, {})
    """

    def __init__(
        self,
        reference: nn.Module,
        spec: EnsembleSpec,
        values: Mapping[str, Tensor],
        flow: Flow | None = None,
    ):
        super().__init__()
        self.spec = spec
        self.chunk: int | None = None
        self.reference = reference
        self.training = reference.training
        self.layers = find_layers(reference)
        differing = [site.layer for site in (*spec.sites, *spec.low_rank)]
        self.weight_shapes = weight_shapes(reference, self.layers, differing)
        # State of the generator of fresh masks; None: torch's global generator.
        self.generator_state: Tensor | None
        self.register_buffer("generator_state", None)
        self.individual = MemberTensors()
        for name, tensor in values.items():
            self.individual.add(name, tensor)
        if spec.per_member:
            if has_user_code(reference):
                refuse_hidden_tensors(reference, spec.per_member)
            release_tensors(reference, spec.per_member)
        if spec.frozen:
            for parameter in reference.parameters():
                parameter.requires_grad_(False)
        self.register_load_state_dict_post_hook(_ignore_added_counters)
        self._derive(flow)

    # Facts

    @property
    def members(self) -> int:
        """Number of members."""
        return self.spec.members

    @property
    def overlap(self) -> float:
        r"""Product of the post laws' :math:`E[u_a u_b] / E[u^2]` over the hidden sites."""
        return optim.overlap(self.spec)

    @property
    def natural_gamma(self) -> float:
        r"""Default gradient scale :math:`M / (1 + (M-1) r)` with the overlap :math:`r`."""
        return optim.natural_gamma(self.spec)

    @property
    def executor(self) -> str:
        """Executor of the members, "folded" or "merged", and the reason if it is merged.

        Before the first call it is determined for an input with two axes.
        """
        from embens.ensemble.description import describe_executor

        return describe_executor(self)

    def site_values(self, site: Site) -> Tensor:
        """Return the modulations of a site.

        Args:
            site: One of ``spec.sites``. Fresh sites have no values between passes.

        Returns:
            The values, ``(member, size)``.

        Raises:
            ValueError: If the site is fresh.
        """
        if site.fresh:
            raise ValueError(
                f"the values of {site.key!r} are drawn at each pass. Use fresh=False for fixed "
                "values."
            )
        return self.individual[site.key]

    def individual_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the per-member parameters, members first.

        Yields:
            Parameters ``(member, …)``.
        """
        yield from self.individual.parameters()

    def shared_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that all members share.

        Yields:
            Parameters with the shapes of the reference's.
        """
        yield from self.reference.parameters()

    # Methods that are defined in files of their own; each takes the ensemble as its first argument.

    parameter_groups = optim.parameter_groups
    backward = accumulation.backward
    member = extraction.member
    subset = subsets.subset
    collapse = collapsing.collapse
    to_onnx = export.to_onnx
    save = saving.save
    save_pretrained = saving.save_pretrained

    # Running and training

    def forward(
        self,
        x: Any = ...,
        /,
        *inputs: Any,
        batch: optim.BatchKind = "same",
        chunk: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run all members.

        Args:
            x: First argument of the reference, unless all of them are passed by name.
            *inputs: Further positional arguments of the reference.
            batch: "same": every member sees the inputs; "own": positional tensors have the members
                as their first axis; "split": row i of every tensor goes to member i mod M.
            chunk: Number of members that run together, instead of ``self.chunk``.
            **kwargs: Keyword arguments of the reference.

        Returns:
            The outputs with the members as a new first axis, ``(member, batch, …)``; for "split"
            those of the reference, ``(batch, …)``.

        Example:
            >>> from embens import batch_ensemble
            >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
            >>> ensemble = batch_ensemble(net, members=2)
            >>> ensemble(torch.zeros(6, 4)).shape
            torch.Size([2, 6, 3])
            >>> ensemble(torch.zeros(2, 6, 4), batch="own").shape
            torch.Size([2, 6, 3])
            >>> ensemble(torch.zeros(6, 4), batch="split").shape
            torch.Size([6, 3])
        """
        # x is not part of *inputs, so that torch.export takes the same dynamic_shapes as for other
        # modules. Its default is ..., because None is a valid argument.
        if x is not ...:
            inputs = (x, *inputs)
        if not isinstance(batch, str) or chunk is not None:
            batch, chunk = separate_arguments(self.reference, batch, chunk, kwargs)
        if batch == "same":
            return self.run(inputs, kwargs, chunk, per_member=False)
        check_rows(inputs, batch, self.members)
        if batch == "own":
            return self.run(inputs, kwargs, chunk, per_member=True)
        from embens.ensemble.splitting import run_split

        return run_split(self, inputs, kwargs, chunk)

    def bind(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments for the inputs of a data set.

        Args:
            inputs: A tuple or list of positional arguments, a dictionary of keyword arguments, or
                a single argument.

        Returns:
            Positional and keyword arguments.
        """
        return bind_inputs(self.reference, inputs)

    def objective(
        self,
        outputs: Any,
        target: Any,
        criterion: optim.Criterion | None = None,
        *,
        batch: optim.BatchKind = "same",
        of: optim.Of = "members",
    ) -> Tensor:
        """Return the sum of the members' losses; see :func:`embens.objective`.

        Args:
            outputs: Outputs of the ensemble, ``(member, batch, …)``.
            target: Classes or values, ``(batch, …)``.
            criterion: A function of one member's outputs and the target; None: by the target.
            batch: How the ensemble was called.
            of: "members": one loss per member; "mean": the loss of the mean output; "moments": the
                loss of a normal distribution with the mixture's mean and variance.

        Returns:
            A scalar.
        """
        return optim.objective(outputs, target, criterion, batch=batch, of=of, members=self.members)

    # Execution

    def run(self, inputs: tuple, kwargs: dict, chunk: int | None, *, per_member: bool) -> Any:
        """Run all members on arguments that are already bound.

        Args:
            inputs: Positional arguments of the reference.
            kwargs: Its keyword arguments.
            chunk: Number of members that run together; None: the ensemble's.
            per_member: Whether positional tensors have the members as their first axis.

        Returns:
            Outputs of all members, ``(member, batch, …)``.
        """
        outputs = list(self._run_chunks(inputs, kwargs, chunk, per_member=per_member))
        if len(outputs) == 1:
            return outputs[0]
        check_same_structure(outputs)
        return gather(outputs, join_members)

    def _run_chunks(
        self, inputs: tuple, kwargs: dict, chunk: int | None, *, per_member: bool
    ) -> Iterator[Any]:
        """Yield the outputs of each chunk of members, members first."""
        folded, arguments = self.foldings.find(inputs, kwargs, per_member=per_member)
        values = self.sample_values()
        if folded is None:
            yield from self.merged.run_members(inputs, kwargs, values, per_member=per_member)
            return
        folded_pass = FoldedPass(folded, arguments, values, self.members, per_member=per_member)
        if per_member:
            # The chunk size depends on the size of one member's batch.
            arguments = [argument[0] for argument in arguments]
        yield from folded_pass.run_chunks(self.chunks(folded, arguments, chunk))

    def chunks(
        self, folded: Folded, arguments: list[Tensor], chunk: int | None
    ) -> list[tuple[int, int]]:
        """Divide the members into chunks that run together.

        Args:
            folded: The folded network.
            arguments: Tensor arguments of one member.
            chunk: Number of members of a chunk; None: the ensemble's.

        Returns:
            First member and number of members of each chunk.
        """
        size = self.chunk if chunk is None else chunk
        if size is None:
            size = folded.default_chunk(arguments, self.members)
        elif isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"chunk must be a positive integer, got {size!r}.")
        starts = range(0, self.members, size)
        return [(start, min(size, self.members - start)) for start in starts]

    def sample_values(self) -> dict[str, Tensor]:
        """Return the values of all members for one pass; fresh modulations are drawn.

        Returns:
            Tensors ``(member, …)`` by name.
        """
        values = self.individual.tensors()
        fresh_sites = [site for site in self.spec.sites if site.fresh]
        if not fresh_sites:
            return values
        from embens.ensemble.masks import draw_masks

        values.update(draw_masks(self, fresh_sites))
        return values

    @property
    def merged(self) -> MergedExecutor:
        """The merged executor, which is built when it is first used."""
        if self._merged is None:
            self._merged = MergedExecutor(self)
        return self._merged

    def changed_attributes(self) -> set[str]:
        """Return the names of attributes in which members may differ from the reference.

        Returns:
            Names that the code of a member has assigned in a merged pass.
        """
        if self._merged is None:
            return set()
        return self._merged.changed_attributes()

    def reset_attributes(self) -> None:
        """Give all members the attributes of the reference, as before the first pass.

        Members keep the attributes that their forward sets, such as the hidden state of a recurrent
        network between calls.

        Example:
            >>> from embens import batch_ensemble
            >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
            >>> batch_ensemble(net, members=4).reset_attributes()
        """
        if self._merged is not None:
            self._derive(self.flow)

    def refresh_layers(self) -> None:
        """Find the layers again after modules of the reference were replaced.

        Raises:
            ValueError: If a layer in which members differ is gone or has another shape.
        """
        layers = find_layers(self.reference)
        check_layers(self.reference, layers, self.weight_shapes)
        if self.spec.per_member:
            check_placeholders(self.reference, self.spec.per_member)
        self.layers = layers

    # State

    def train(self, mode: bool = True) -> "EmbeddedEnsemble":
        """Set the mode of all modules, including those whose mode a member's code has changed."""
        super().train(mode)
        if self._merged is not None:
            self._merged.sync_modes()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "EmbeddedEnsemble":
        # Traced code may have asked for the type or the device of a parameter.
        self.foldings.clear()
        return super()._apply(fn, recurse)

    def _derive(self, flow: Flow | None = None) -> None:
        """Start without folded forms and merged copies; the next call derives them again."""
        self.flow = flow
        self.foldings = Foldings(self)
        self._merged: MergedExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("flow", "foldings", "_merged"):
            state.pop(name)
        if self._merged is not None:
            state["member_attributes"] = self._merged.member_attributes()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        member_attributes = state.pop("member_attributes", None)
        super().__setstate__(state)
        self._derive()
        if member_attributes is not None:
            self.merged.restore_attributes(member_attributes)

    def __deepcopy__(self, memo: dict[int, Any]) -> "EmbeddedEnsemble":
        memo.update(detached_state(self.reference))
        if self._merged is not None:
            for member_copy in self._merged.copies:
                memo.update(detached_state(member_copy.module))
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        start = f"{prefix}individual."
        saved = [key.removeprefix(start) for key in state_dict if key.startswith(start)]
        if set(saved) != set(self.individual.state_dict()):
            match_buffers(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        from embens.ensemble.description import describe_ensemble

        return describe_ensemble(self)


class Modes(NamedTuple):
    """Facts about a call on which its folded form depends.

    Attributes:
        per_member: Whether positional tensors have the members as their first axis.
        has_gradients: Whether gradients are recorded.
        autocast: The type that autocast uses on the CPU; None if it is off.
    """

    per_member: bool
    has_gradients: bool
    autocast: torch.dtype | None


class Foldings:
    """The folded forms of an ensemble, one for each kind of call.

    Args:
        ensemble: The ensemble.

    Attributes:
        kept: Folded forms for different modes, arguments and attributes, the latest last.
        reason: Why the arguments of the latest call exclude folding; "" if they do not.
    """

    def __init__(self, ensemble: EmbeddedEnsemble):
        self.ensemble = ensemble
        self.kept: list[Folding] = []
        self._preview: Folding | None = None
        self.reason = ""
        self._argument_names: list[str] | None = None

    def clear(self) -> None:
        """Forget all folded forms."""
        self.kept = []
        self._preview = None

    def forget(self, folding: "Folding") -> None:
        """Forget one folded form, so that the next call is folded again.

        Args:
            folding: One of ``kept``.
        """
        self.kept = [item for item in self.kept if item is not folding]

    def find(
        self, inputs: tuple, kwargs: dict, *, per_member: bool = False
    ) -> tuple[Folded | None, list[Tensor]]:
        """Return the folded network for a call.

        Args:
            inputs: Positional arguments of the reference.
            kwargs: Its keyword arguments.
            per_member: Whether positional tensors have the members as their first axis.

        Returns:
            The folded network and its tensor arguments; None if the call runs merged.
        """
        call = self._bind(inputs, kwargs)
        reason = _why_not_foldable(call, kwargs, per_member=per_member)
        if reason != self.reason:  # torch.compile would run the assignment after each call
            self.reason = reason
        if call is None or reason:
            return None, []
        tensors, constants = call
        arguments = list(tensors.values())
        member_axes = 1 if per_member else 0
        ranks = {name: tensor.dim() - member_axes for name, tensor in tensors.items()}
        modes = (per_member, torch.is_grad_enabled(), _autocast_type())
        if torch.compiler.is_compiling():
            index = self._index(ranks, constants, modes)
            return self.kept[index].folded, arguments
        folding = self._find_or_make(ranks, constants, Modes(*modes))
        if not folding.is_checked:
            from embens.ensemble.crosscheck import check_folding

            check_folding(self.ensemble, folding, inputs, kwargs, arguments)
        return folding.folded, arguments

    def preview(self, ranks: dict[str, int]) -> "Folding":
        """Return the folded form that ``print`` shows before the first call.

        Args:
            ranks: Number of axes of each tensor argument.
        """
        modes = Modes(per_member=False, has_gradients=True, autocast=None)
        if self._preview is None or not self._preview.fits(ranks, {}, modes, set()):
            self._preview = Folding(self.ensemble, ranks, {}, modes)
        return self._preview

    @constant_when_compiled
    def _index(
        self,
        ranks: dict[str, int],
        constants: dict[str, Any],
        modes: tuple[bool, bool, torch.dtype | None],
    ) -> int:
        """Return the index of a folding in ``kept``.

        torch.compile cannot follow torch.fx, so it takes the result as a constant. It passes plain
        tuples only.
        """
        folding = self._find_or_make(ranks, constants, Modes(*modes))
        return self.kept.index(folding)

    def _find_or_make(
        self, ranks: dict[str, int], constants: dict[str, Any], modes: Modes
    ) -> "Folding":
        """Return the folding for one kind of call, which is made on the first such call."""
        changed = self.ensemble.changed_attributes()
        for folding in self.kept:
            if folding.fits(ranks, constants, modes, changed):
                return folding
        folding = Folding(self.ensemble, ranks, constants, modes, changed)
        latest = self.kept[-(MOST_FOLDINGS - 1) :]
        self.kept = [*latest, folding]
        if folding.folded is None:
            _ = self.ensemble.merged  # torch.compile cannot build it
        return folding

    def _bind(self, inputs: tuple, kwargs: dict) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return tensor arguments and plain values by name; None if there are any others."""
        if self._argument_names is None:
            self._argument_names = _argument_names(self.ensemble.reference)
        names = self._argument_names
        if len(inputs) > len(names):
            return None
        if kwargs and not kwargs.keys().isdisjoint(names[: len(inputs)]):
            return None  # an argument is passed twice; the merged call raises the usual error
        arguments = dict(zip(names, inputs, strict=False)) | kwargs
        tensors, constants = {}, {}
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                if not torch.compiler.is_compiling() and not _is_plain_tensor(value):
                    return None
                tensors[name] = value
            elif isinstance(value, _PLAIN):
                constants[name] = value
            else:
                return None
        if not tensors or not set(arguments) <= set(names):
            return None
        return tensors, constants


class Folding:
    """The folded form for one kind of call, or the reason why there is none.

    Args:
        ensemble: The ensemble.
        ranks: Number of axes of each tensor argument, by name.
        constants: Other arguments of the call by name.
        modes: Further facts about the call.
        changed: Attributes in which members differ from the reference.

    Attributes:
        state: Detects changes of the reference's modules, which make the folded form invalid.
        guard: Detects changes of other Python values that user code reads; None: not needed.
        folded: The folded network; None: such calls run merged.
        reason: Why they run merged.
        is_checked: Whether one member was compared with a plain network, or no comparison is
            needed.
    """

    def __init__(
        self,
        ensemble: EmbeddedEnsemble,
        ranks: dict[str, int],
        constants: dict[str, Any],
        modes: Modes,
        changed: Collection[str] = (),
    ):
        self.ranks = ranks
        self.constants = constants
        self.modes = modes
        self.changed = set(changed)
        self.state = ModuleState(ensemble.reference)
        self.guard: Any = None
        self.folded: Folded | None = None
        self.reason = ""
        self.is_checked = True  # torch's modules need no comparison
        ensemble.refresh_layers()
        try:
            _refuse_parametrizations(ensemble.reference)
            self.folded = fold(
                ensemble.reference,
                ensemble.layers,
                ensemble.spec,
                ranks,
                {**_default_arguments(ensemble.reference), **constants},
                per_member_inputs=modes.per_member,
            )
            if has_user_code(ensemble.reference):
                self.guard = Guard(ensemble.reference)
                self.guard.refuse_reading(changed)
                self.is_checked = False
        except (Unfoldable, Unwatchable) as error:
            self.folded = None
            self.reason = str(error)

    def fits(
        self,
        ranks: dict[str, int],
        constants: dict[str, Any],
        modes: Modes,
        changed: Collection[str] = (),
    ) -> bool:
        """Return whether the folding is valid for a call.

        Args:
            ranks: Number of axes of each tensor argument.
            constants: Other arguments.
            modes: Further facts about the call.
            changed: Attributes in which members differ from the reference.
        """
        if ranks != self.ranks or modes != self.modes or constants != self.constants:
            return False
        if changed != self.changed:
            return False
        for name, value in constants.items():
            if type(value) is not type(self.constants[name]):  # True equals 1
                return False
        if self.state.change():
            return False
        return self.guard is None or self.guard.holds()


def _ignore_added_counters(ensemble: EmbeddedEnsemble, keys: Any) -> None:
    """Ignore counters that BatchNorm adds to a state without a version.

    Such a state is a plain dictionary, for example from a safetensors file. BatchNorm assumes that
    it comes from an old torch and adds ``num_batches_tracked``, even if the counter is per-member.

    Args:
        ensemble: The ensemble whose state was loaded.
        keys: Missing and unexpected keys, as ``load_state_dict`` returns them; changed in place.
    """
    added = []
    for item in ensemble.spec.per_member:
        if "num_batches_tracked" in item.tensors:
            added.append(f"reference.{item.module}.num_batches_tracked")
    for key in list(keys.unexpected_keys):
        if key.endswith(tuple(added)):
            keys.unexpected_keys.remove(key)


def _why_not_foldable(
    call: tuple[dict[str, Tensor], dict[str, Any]] | None,
    kwargs: dict[str, Any],
    *,
    per_member: bool,
) -> str:
    """Return why the arguments or global hooks exclude folding; "" if they do not.

    Args:
        call: What :meth:`Foldings._bind` returned.
        kwargs: The keyword arguments among them.
        per_member: Whether positional tensors have the members as their first axis.
    """
    if call is None:
        return "its arguments are not tensors or plain values with fixed names"
    if _has_global_hooks():
        return "a hook of all modules is registered"
    if per_member and any(isinstance(value, Tensor) for value in kwargs.values()):
        return "keyword arguments are the same for all members"
    first_tensor, *later_tensors = call[0].values()
    batch_axis = 1 if per_member else 0
    rows = first_tensor.shape[batch_axis] if first_tensor.dim() > batch_axis else 0
    for tensor in later_tensors:
        if tensor.dim() > batch_axis and tensor.shape[batch_axis] != rows:
            return "its arguments have different numbers of rows"
    return ""


def _argument_names(reference: nn.Module) -> list[str]:
    """Return the argument names of a forward; none if it takes ``*args`` or ``**kwargs``."""
    parameters = inspect.signature(reference.forward).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return []
    return [p.name for p in parameters]


def _default_arguments(reference: nn.Module) -> dict[str, Any]:
    parameters = inspect.signature(reference.forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _refuse_parametrizations(reference: nn.Module) -> None:
    for name, module in reference.named_modules():
        if parametrize.is_parametrized(module):
            raise Unfoldable(f"{name or 'the reference'!r} is parametrized")


def _autocast_type() -> torch.dtype | None:
    """Return the type that autocast uses on the CPU, or None if it is off."""
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return None


def _has_global_hooks() -> bool:
    """Return whether a hook of all modules is registered, such as those of some profilers."""
    registered = vars(nn.modules.module)
    return any(registered[f"_global{hooks}"] for hooks in HOOKS)


def _is_plain_tensor(x: Tensor) -> bool:
    """Return whether a tensor has no attributes set by the user and no overridden operations."""
    if type(x) in (Tensor, nn.Parameter):
        return not vars(x)
    function = type(x).__torch_function__
    is_disabled = function is torch._C._disabled_torch_function_impl
    return is_disabled or function.__func__ is Tensor.__torch_function__.__func__
