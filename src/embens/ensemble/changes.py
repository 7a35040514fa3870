"""Changes of parameters and buffers by the user's code.

A shared buffer that a pass updates becomes per-member. A pass that changes a parameter raises an
error, and so does one that registers, removes or reshapes a tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embens.ensemble.copies import MemberCopy


@dataclass
class BufferChange:
    """A shared buffer that a pass has changed."""

    module: str
    name: str
    before: Tensor
    after: Tensor
    is_replaced: bool


class StateGuard:
    """Finds parameters and buffers that the user's code changes in a pass.

    Args:
        copied: The copy that is about to run.
        compare: Whether to compare the values of parameters, which finds changes of
            ``parameter.data``. Members run the same code, so one member of each pass suffices.
    """

    def __init__(self, copied: MemberCopy, *, compare: bool):
        self.copied = copied
        self.modules: list[tuple[str, nn.Module, dict, dict]] = []
        self.children: list[list[nn.Module | None]] = []
        self.marks: dict[str, tuple[int, int]] = {}  # version and address of parameters
        self.gradients: dict[str, tuple[Tensor, int]] = {}  # gradients and their versions
        self.saved: dict[str, Tensor] = {}  # values of shared buffers
        shared_buffers = {}
        for prefix, module, _ in copied.pairs:
            shared_buffers[prefix] = module._buffers
        for name, module in copied.module.named_modules():
            prefix = f"{name}." if name else ""
            parameters, buffers = dict(module._parameters), dict(module._buffers)
            self.modules.append((prefix, module, parameters, buffers))
            self.children.append(list(module._modules.values()))
            # An embedding with ``max_norm`` rescales the rows of its weight in the forward.
            is_compared = getattr(module, "max_norm", None) is None
            for key, parameter in parameters.items():
                if parameter is None:
                    continue
                if is_compared:
                    self.marks[prefix + key] = mark_of(parameter)
                if parameter.is_leaf and parameter.grad is not None:
                    self.gradients[prefix + key] = (parameter.grad, parameter.grad._version)
            for key, buffer in buffers.items():
                if buffer is not None and shared_buffers.get(prefix, {}).get(key) is buffer:
                    self.saved[prefix + key] = buffer.detach().clone()
        self.compared = self._compared_parameters() if compare else {}
        self.sums = {name: _sums(parameter) for name, parameter in self.compared.items()}

    def _compared_parameters(self) -> dict[str, Tensor]:
        """Return the parameters whose values can be compared; those of torch.func have none."""
        compared = {}
        for prefix, _, parameters, _ in self.modules:
            for key, parameter in parameters.items():
                _, address = self.marks.get(prefix + key, (0, 0))
                if address:
                    compared[prefix + key] = parameter
        return compared

    def check(self) -> None:
        """Raise if the pass changed parameters, or registered or removed tensors or modules."""
        for (prefix, module, parameters, buffers), children in zip(
            self.modules, self.children, strict=True
        ):
            _check_names(prefix, "parameter", parameters, module._parameters)
            _check_names(prefix, "buffer", buffers, module._buffers)
            if list(module._modules.values()) != children:
                owner = prefix.removesuffix(".") or "the reference"
                raise RuntimeError(
                    f"the forward of the reference changes the modules of {owner!r}. Register all "
                    "modules in __init__."
                )
            for key, buffer in buffers.items():
                if buffer is None and module._buffers[key] is not None:
                    check_buffer(prefix + key, None, module._buffers[key])
            for key, parameter in parameters.items():
                if module._parameters[key] is not parameter:
                    _refuse_parameter(prefix + key)
                mark = self.marks.get(prefix + key)
                if mark is not None and mark != mark_of(parameter):
                    _refuse_parameter(prefix + key)
                if prefix + key in self.gradients:
                    _check_gradient(prefix + key, parameter, *self.gradients[prefix + key])
        for name, sums in self.sums.items():
            if not _is_equal(_sums(self.compared[name]), sums):
                _refuse_parameter(name)

    def buffer_changes(self) -> list[BufferChange]:
        """Return the shared buffers that the pass changed."""
        changes = []
        names: dict[int, str] = {}  # names of buffers that were changed in place, by ``id``
        for prefix, module, _, buffers in self.modules:
            for key, buffer in buffers.items():
                saved = self.saved.get(prefix + key)
                if saved is None:
                    continue
                new = module._buffers[key]
                if new is buffer and _is_equal(buffer, saved):
                    continue
                check_buffer(prefix + key, saved, new)
                if new is buffer and names.setdefault(id(buffer), prefix + key) != prefix + key:
                    raise RuntimeError(
                        f"the forward of the reference changes the buffer {prefix + key!r}, which "
                        f"is also registered as {names[id(buffer)]!r}. Register it once."
                    )
                assert new is not None
                name = prefix.removesuffix(".")
                after = new.detach().clone()
                changes.append(BufferChange(name, key, saved, after, new is not buffer))
        return changes

    def store_buffers(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Store per-member buffers that the code replaced by new tensors in the stacked tensors.

        Args:
            tensors: The member's tensors by name. Buffers that the code has replaced before are
                overwritten.

        Returns:
            Buffers that were replaced for the first time, by name. Autograd may have saved their
            old values, so the caller stores them in new tensors.
        """
        first_time = {}
        for name, key, table in self.copied.separate:
            full_name = f"{name}.{key}".lstrip(".")
            if table != "_buffers":
                continue
            new = self.copied.module.get_submodule(name)._buffers[key]
            old = tensors[full_name]
            # ``buffer.data = …`` gives an alias other memory.
            is_alias = new is self.copied.aliases.get(full_name)
            if new is old or (is_alias and new is not None and mark_of(new)[1] == mark_of(old)[1]):
                continue
            check_buffer(full_name, old, new)
            assert new is not None
            if full_name in self.copied.replaced:
                with torch.no_grad():
                    old.copy_(new)
            else:
                first_time[full_name] = new.detach()
        return first_time


def check_buffer(name: str, before: Tensor | None, after: Tensor | None) -> None:
    """Raise if a buffer has got another shape or type, or was set to None.

    Args:
        name: Name of the buffer.
        before: The buffer before the pass.
        after: The buffer after the pass.
    """
    if before is None:
        raise RuntimeError(
            f"the forward of the reference changes the buffer {name!r}, which is None. Register it "
            "with its final shape and type."
        )
    if after is None:
        raise RuntimeError(
            f"the forward of the reference changes the buffer {name!r} to None. Update it in place."
        )
    if (after.shape, after.dtype) != (before.shape, before.dtype):
        raise RuntimeError(
            f"the forward of the reference changes the buffer {name!r} from {_kind(before)} to "
            f"{_kind(after)}. Register it with its final shape and type."
        )


def _kind(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)} and {tensor.dtype}"


def _check_names(prefix: str, kind: str, before: dict, after: dict) -> None:
    for key in after:
        if key not in before:
            raise RuntimeError(
                f"the forward of the reference registers the {kind} {prefix + key!r}. Register it "
                "in __init__."
            )
    for key in before:
        if key not in after:
            raise RuntimeError(
                f"the forward of the reference removes the {kind} {prefix + key!r}. Keep it."
            )


def _refuse_parameter(name: str) -> None:
    raise RuntimeError(
        f"the forward of the reference changes its parameter {name!r}, and members share it. Make "
        "it a buffer (register_buffer), or change it outside of the forward."
    )


def _check_gradient(name: str, parameter: Tensor, before: Tensor, version: int) -> None:
    """Raise if a gradient was removed or set to zero; code may add to gradients."""
    after = parameter.grad
    if after is before and before._version == version:
        return
    if after is None or not after.any():
        raise RuntimeError(
            f"the forward of the reference erases the gradient of {name!r}, to which other members "
            "have added. Call zero_grad() outside of the forward."
        )


def mark_of(tensor: Tensor) -> tuple[int, int]:
    """Return version and address of a tensor; most changes alter one of them.

    Args:
        tensor: Any tensor.
    """
    version = 0 if tensor.is_inference() else tensor._version
    try:
        return version, tensor.data_ptr()
    except RuntimeError:  # a tensor of torch.func, or another one without memory
        return version, 0


def _sums(tensor: Tensor) -> Tensor:
    """Return sums over the rows and columns of a tensor, which show a change of its values.

    They take much less memory than a copy. A sum with weights that depend on the column detects
    entries that change places. Tensors with one axis, and integers, are copied.
    """
    value = tensor.detach()
    if value.is_complex():
        value = torch.view_as_real(value)
    if value.dim() < 2 or not value.is_floating_point():
        return value.clone()
    rows = value.flatten(1)
    columns = torch.arange(rows.shape[1], dtype=torch.float64, device=rows.device)
    return torch.cat(
        [
            rows.sum(0, dtype=torch.float64),
            rows.sum(1, dtype=torch.float64),
            torch.mv(rows, torch.cos(columns).to(rows.dtype)).double(),
        ]
    )


def _is_equal(before: Tensor, after: Tensor) -> bool:
    if before.is_meta:
        return True
    if before.layout is not torch.strided:
        before, after = before.to_sparse().coalesce(), after.to_sparse().coalesce()
        same_places = torch.equal(before.indices(), after.indices())
        return same_places and _is_equal(before.values(), after.values())
    return bool(((before == after) | ((before != before) & (after != after))).all())
