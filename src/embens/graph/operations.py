"""Names of operations, sorted by what is known of them.

A traced graph calls functions and methods of torch by name. The sets say what an operation of a
name does: to the axis of the channels, to the dependence on a layer's output, to memory and to the
random state. Names are those of torch without the underscores around them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

RANDOM_MODULES = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


ELEMENTWISE = frozenset(
    "relu leaky_relu elu selu celu gelu silu mish softplus hardtanh hardswish hardsigmoid relu6 "
    "tanh sigmoid logsigmoid abs erf sin cos exp log sqrt rsqrt square pow clamp clamp_min "
    "clamp_max softsign tanhshrink dropout dropout1d dropout2d dropout3d alpha_dropout "
    "feature_alpha_dropout add sub mul div truediv iadd isub imul itruediv radd rsub rmul neg "
    "contiguous clone to float double half bfloat16 type_as detach".split()
)


POOLING = frozenset(
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d boolean_dispatch".split()
)


# Operations and modules that keep axis 1 as the axis of channels.
CHANNELWISE = (
    ELEMENTWISE
    | POOLING
    | frozenset(name for name in nn.modules.activation.__all__ if name != "MultiheadAttention")
    | frozenset(
        (
            *nn.modules.batchnorm.__all__,
            *nn.modules.instancenorm.__all__,
            *nn.modules.dropout.__all__,
            *nn.modules.pooling.__all__,
            *nn.modules.padding.__all__,
            *nn.modules.upsampling.__all__,
            *("GroupNorm", "LocalResponseNorm", "Identity"),
        )
    )
    | frozenset(
        "prelu lp_pool1d lp_pool2d batch_norm group_norm instance_norm local_response_norm "
        "interpolate upsample pad data real".split()
    )
)


# Operations whose result is affine in whatever their argument was affine in.
AFFINE = frozenset(
    "add sub iadd isub radd rsub neg flatten view reshape squeeze unsqueeze permute transpose "
    "movedim swapaxes getitem mean sum cat concat stack contiguous clone to float double type_as "
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
    "dropout expand chunk split unbind select narrow Identity Flatten Unflatten AvgPool1d "
    "AvgPool2d AvgPool3d AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d Dropout "
    "PixelShuffle pixel_shuffle Upsample unflatten T mT H data real".split()
)


FLATTENING = frozenset("flatten Flatten view reshape mean amax squeeze".split())


SHAPE_QUERIES = frozenset("shape size dim ndim numel len dtype device".split())


DTYPE_QUERIES = frozenset("dtype device layout".split())
TENSOR_QUERIES = frozenset(
    "requires_grad is_cuda is_meta layout is_sparse is_leaf is_floating_point is_complex "
    "names __len__ __hash__".split()
)


RANDOM_FUNCTIONS = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu bernoulli "
    "rand_like randn_like gumbel_softmax rand randn normal uniform multinomial".split()
)


IN_PLACE_OPERATORS = frozenset(
    "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift "
    "setitem delitem".split()
)


VIEWS = frozenset(
    "getitem view view_as reshape flatten unflatten squeeze unsqueeze permute transpose t movedim "
    "swapaxes chunk split unbind select narrow expand expand_as detach contiguous getattr".split()
)


# Operations that may return their input, in evaluation mode or if there is nothing to do.
ALIASING = (
    VIEWS
    | RANDOM_FUNCTIONS
    | frozenset("to float double half bfloat16 type_as bool int long cpu pos".split())
    | frozenset("pixel_shuffle pixel_unshuffle".split())
)


ALIASING_MODULES = (nn.Flatten, nn.Unflatten, nn.Identity, *RANDOM_MODULES)


_PACKAGES = frozenset("torch _operator builtins math".split())
"""Packages whose functions are known by their names."""


def is_in_place(operation: str) -> bool:
    """Return whether an operation of this name changes its first argument."""
    if operation.strip("_") in IN_PLACE_OPERATORS:
        return True
    return operation.endswith("_") and not operation.startswith("__")


def changed_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the values that an operation changes: its first argument, or ``out=``.

    Args:
        name: Name of the operation.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    changed = []
    if is_in_place(name) or kwargs.get("inplace"):
        changed = tree_leaves(args[0] if args else next(iter(kwargs.values())))
    if kwargs.get("out") is not None:
        changed += tree_leaves(kwargs["out"])
    return changed


def operation_name(target: Any) -> str:
    """Return the name of the target of a torch.fx node.

    Functions of other packages get their full names: one that is called ``normalize`` may do
    something else than that of torch.
    """
    if isinstance(target, str):
        return target
    name = getattr(target, "__name__", str(target))
    module = getattr(target, "__module__", None) or "torch"
    is_custom = module.startswith("torch._ops.") and module != "torch._ops.aten"
    if is_custom or module.partition(".")[0] not in _PACKAGES:
        return f"{module}.{name}"
    return name
