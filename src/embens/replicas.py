"""Per-member copies of layers: which tensors they have, and their initial values."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from embens.sites import PerMember, is_within

Initialise = Callable[[nn.Module], None]


def tensor_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters and buffers that a module holds itself."""
    names = []
    for table in (module._parameters, module._buffers):
        names += [name for name, tensor in table.items() if tensor is not None]
    return tuple(names)


def stack_tensors(
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


def reinitialise_(
    network: nn.Module,
    names: Collection[str],
    initialise: Initialise | None,
    seed: int,
) -> None:
    """Draw new parameters for some modules and everything inside them, children first."""
    devices = {p.device for p in network.parameters() if p.device.type == "cuda"}
    modules = [(n, m) for n, m in network.named_modules() if is_within(n, names)]
    with torch.random.fork_rng(devices=list(devices)):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        for name, module in reversed(modules):
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
                    f"the parameters of {name or 'the reference'!r} ({type(module).__name__}) "
                    "cannot be reinitialised: it has no reset_parameters(). Pass initialise= (in "
                    "embed: own_weights=), a function that reinitialises one module in place."
                )
