r"""The merged executor: the definition of a member.

Member :math:`a` is the reference with other tensors: modulated weights
:math:`v_a u_a^\top \circ W`, low-rank or separate weights, and separate buffers
(:mod:`embens.ensemble.weights`). The executor keeps a copy of the reference for each member. A copy
has the user's classes and code and shares every tensor that does not differ. Before a pass the
executor puts the member's tensors into the copy. So control flow, hooks, tied weights, code that
mixes samples, and state in attributes behave as in a separate network, and recomputation in the
backward pass finds the member's weights.
"""

import threading
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from embens.checks import warn
from embens.ensemble.binding import private_arguments
from embens.ensemble.changes import BufferChange, StateGuard
from embens.ensemble.copies import Attributes, MemberCopy, structure_of
from embens.ensemble.outside import OutsideState, find_hidden, refuse_hidden
from embens.ensemble.parametrizations import computed_tensors
from embens.ensemble.separation import separate_buffer
from embens.ensemble.weights import member_tensors, modulations_by_layer
from embens.graph.reading import has_user_code
from embens.modes import constant_when_compiled

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble


class MergedExecutor:
    """Runs members one after another, each with its tensors.

    Args:
        ensemble: The ensemble.
    """

    def __init__(self, ensemble: "EmbeddedEnsemble"):
        self.ensemble = ensemble
        self.lock = threading.RLock()  # a copy holds the tensors of one pass at a time
        self.copies: list[MemberCopy] = []
        self.structure: list[Any] = []
        # Attributes that the user's code has set, by member and module, for copies yet to be made.
        self.attributes: list[dict[str, dict[str, Any]]] = []
        self.reference_attributes: Attributes | None = None
        self.changed_names: set[str] = set()  # attributes that the user's code has changed
        self.is_noted = True  # whether ``changed_names`` includes the changes of the latest pass
        self.outside: OutsideState | None = None  # None: the code is that of torch
        self.seen_modes: set[bool] = set()  # those of passes whose changes of state were compared
        self.hidden: list[str] | None = None  # tensors that the code finds in objects

    def begin(self) -> dict[str, Tensor]:
        """Prepare a pass; return the tensors of parametrized layers, evaluated once."""
        self._prepare_copies()
        if torch.compiler.is_compiling():
            self._warn_of_unseen_state()
            self._release_tensors()
        return computed_tensors(self.ensemble.reference)

    @constant_when_compiled
    def _prepare_copies(self) -> bool:
        """Renew the copies if modules or hooks of the reference changed; update their attributes.

        The compiler cannot look into copying, so it calls this function instead.
        """
        structure = structure_of(self.ensemble.reference)
        if structure != self.structure or len(self.copies) != self.ensemble.members:
            self._make_copies()
            self.structure = structure
        assert self.reference_attributes is not None
        for name, key, value in self.reference_attributes.changes():
            for copied in self.copies:
                copied.assign(name, key, value)
        return True

    @constant_when_compiled
    def _warn_of_unseen_state(self) -> bool:
        """Warn if no pass in this mode has shown which state the code of the members changes."""
        if self.ensemble.training not in self.seen_modes and has_user_code(self.ensemble.reference):
            warn(
                "the ensemble is compiled or exported before its first pass in this mode, so "
                "buffers and parameters that its forward changes are shared by all members. Call "
                "the ensemble once before."
            )
        return True

    @constant_when_compiled
    def _release_tensors(self) -> bool:
        """Take the tensors of the latest pass out of the copies.

        They are results with a gradient, which the compiler does not accept as parameters.
        """
        for copied in self.copies:
            copied.release()
        return True

    def _make_copies(self) -> None:
        attributes = self.member_attributes()
        self.ensemble.refresh_layers()
        self.copies = [MemberCopy(self.ensemble) for _ in range(self.ensemble.members)]
        if has_user_code(self.ensemble.reference):
            self.outside = OutsideState(self.ensemble.reference)
        self.reference_attributes = Attributes(self.ensemble.reference)
        self.hidden = None
        for copied, member_attributes in zip(self.copies, attributes, strict=True):
            copied.set_attributes(member_attributes)

    def restore_attributes(self, attributes: list[dict[str, dict[str, Any]]]) -> None:
        """Set the attributes of copies yet to be made, by member and module.

        Args:
            attributes: Attributes of each member, as :meth:`member_attributes` returns them.
        """
        self.attributes = attributes
        self.is_noted = False

    def member_attributes(self) -> list[dict[str, dict[str, Any]]]:
        """Return the attributes that the user's code has set, by member and module."""
        if self.copies:
            return [copied.changed_attributes() for copied in self.copies]
        return self.attributes or [{} for _ in range(self.ensemble.members)]

    @constant_when_compiled
    def changed_attributes(self) -> set[str]:
        """Return the names of attributes in which members may differ from the reference."""
        if not self.is_noted:
            self.is_noted = True
            for attributes in self.member_attributes():
                for values in attributes.values():
                    self.changed_names.update(values)
        return self.changed_names

    def check_hidden(self, tensors: Collection[str]) -> None:
        """Raise ValueError if the code finds a tensor of a member in an object or a set.

        Args:
            tensors: Names of the tensors that differ between members.
        """
        for name in self.hidden_names():
            if name in tensors:
                refuse_hidden(name)

    @constant_when_compiled
    def hidden_names(self) -> list[str]:
        """Return the names of tensors that the code may find in an object or a set."""
        if self.hidden is None:
            self.hidden = find_hidden(self.ensemble.reference)
        return self.hidden

    def run_members(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        values: dict[str, Tensor],
        *,
        per_member: bool = False,
    ) -> Iterator[Any]:
        """Yield the outputs of one member after another, with a member axis of size 1.

        Args:
            inputs: Positional arguments of the reference.
            kwargs: Keyword arguments of the reference.
            values: Values of all members in this pass, members first.
            per_member: Whether positional tensors have the members as their first axis.
        """
        computed = self.begin()
        for a in range(self.ensemble.members):
            member_inputs = inputs
            if per_member:
                member_inputs = tree_map_only(Tensor, lambda x, a=a: x[a], inputs)
            outputs = self.run(a, member_inputs, kwargs, values, computed)
            yield tree_map_only(Tensor, lambda x: x.unsqueeze(0), outputs)

    def run(
        self,
        a: int,
        args: tuple,
        kwargs: dict[str, Any],
        values: dict[str, Tensor],
        computed: Mapping[str, Tensor],
    ) -> Any:
        """Return the outputs of one member.

        Args:
            a: The member.
            args: Positional arguments of the reference.
            kwargs: Keyword arguments of the reference.
            values: Values of all members in this pass, members first. Buffers that turn out to
                differ between members are added.
            computed: What :meth:`begin` returned.
        """
        ensemble = self.ensemble
        member_values = {name: stack[a] for name, stack in values.items()}
        tensors = member_tensors(
            ensemble.reference, ensemble.layers, ensemble.spec, member_values, computed
        )
        self.check_hidden(tensors)
        scales = modulations_by_layer(ensemble.spec, member_values)
        copied = self.copies[a]
        args, kwargs = private_arguments(args, kwargs)
        if torch.compiler.is_compiling():
            copied.sync_modes()
            copied.scales = scales
            outputs = torch.func.functional_call(
                copied.module, {**computed, **tensors}, args, kwargs, tie_weights=False
            )
            refuse_hidden_tensors(outputs)
            return outputs
        with self.lock:
            copied.bind({**computed, **tensors}, scales)
            guard = StateGuard(copied, compare=a == 0)
            outside = self.outside if a == 0 else None
            marks = {} if outside is None else outside.marks()
            outputs = self._call(copied.module, args, kwargs)
            guard.check()
            if outside is not None:
                outside.warn_about_changes(marks)
            for name, buffer in guard.store_buffers(tensors).items():
                self._replace_buffer(a, name, buffer, values)
            for change in guard.buffer_changes():
                self._separate_buffer(a, change, values)
            self.is_noted = False
            self.seen_modes.add(ensemble.training)
        refuse_hidden_tensors(outputs)
        return outputs

    def _call(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a member; explain an error that a plain network does not have."""
        try:
            return module(*args, **kwargs)
        except ValueError as error:
            if "can't optimize a non-leaf Tensor" in str(error):
                raise RuntimeError(
                    "the forward of the reference makes an optimizer, but members share their "
                    "parameters. Use torch.autograd.grad and torch.func.functional_call, or train "
                    "outside of the forward."
                ) from error
            if "Cannot assign non-leaf Tensor" not in str(error):
                raise
            raise RuntimeError(
                "the forward of the reference assigns a weight of one layer to another layer, but "
                "the weights of a member are computed in each pass. Tie the weights in __init__."
            ) from error
        except RuntimeError as error:
            if "support the deepcopy protocol" in str(error):
                raise RuntimeError(
                    "the forward of the reference copies a tensor that was computed with "
                    "copy.deepcopy, as the weights of a member are. Copy layers in __init__, or "
                    "call them with other weights by torch.func.functional_call."
                ) from error
            if "requires_grad flags of leaf" not in str(error):
                raise
            raise RuntimeError(
                "the forward of the reference switches gradients of a parameter off, but the "
                "weights of a member are computed in each pass. Use detach() in the forward, or "
                "call requires_grad_ on ensemble.reference before the pass."
            ) from error

    def sync_modes(self) -> None:
        """Give all copies the training modes of the reference, whatever their code has set."""
        for copied in self.copies:
            copied.sync_modes()

    def _replace_buffer(self, a: int, name: str, buffer: Tensor, values: dict[str, Tensor]) -> None:
        """Store a buffer that a member's code has replaced, in a new stacked tensor.

        The old tensor stays as it is, because autograd may have saved it.
        """
        with torch.inference_mode(False):
            stack = values[name].clone()
        stack[a] = buffer
        self.ensemble.individual.add(name, stack)
        values[name] = stack
        for copied in self.copies:
            copied.replaced.add(name)

    def _separate_buffer(self, a: int, change: BufferChange, values: dict[str, Tensor]) -> None:
        """Make a shared buffer per-member after the code of one member has changed it."""
        stack = separate_buffer(self.ensemble, change.module, change.name, change.before)
        stack[a] = change.after
        full_name = f"{change.module}.{change.name}".lstrip(".")
        values[full_name] = stack
        for copied in self.copies:
            copied.add_separate(change.module, change.name, "_buffers")
            if change.is_replaced:
                copied.replaced.add(full_name)
        if not change.is_replaced:
            # The backward pass may run the code again (torch.utils.checkpoint) and must then find
            # the member's buffer.
            member = self.copies[a]
            slots = member.module.get_submodule(change.module)._buffers
            slots[change.name] = member.alias(full_name, stack[a])


def refuse_hidden_tensors(outputs: Any) -> None:
    """Raise TypeError if outputs hold tensors in objects that pytree cannot open.

    Args:
        outputs: Outputs of the reference.
    """
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            continue
        parts = tree_leaves(list(getattr(leaf, "__dict__", {}).values()))
        holds_tensors = any(isinstance(part, Tensor) for part in parts)
        if holds_tensors or hasattr(leaf, "__dataclass_fields__"):
            raise TypeError(
                f"the reference returns a {type(leaf).__name__}, whose tensors cannot be found. "
                "Return a tensor, tuple, list or dictionary, or register the class with "
                "torch.utils._pytree.register_dataclass."
            )
