"""Which operations keep samples to themselves.

Members run together as one larger batch, which is right where every row of an operation's result
depends on the same row of its inputs alone. Known of an operation by its name and arguments, or of
a module of torch by its type; whatever is not known here is *unclear*, and is tried out with
numbers before it is trusted.
"""

from torch import nn

from embens.reading.attention import Attention

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
ALONG_AXES = frozenset("mean sum amax amin flatten".split())
"""Row by row, if every axis among the arguments is named and another than the first; a result has
fewer axes, so that it may meet others by broadcasting."""

CHANNELWISE_MODULES = (
    *(n for n in nn.modules.activation.__all__ if n != "MultiheadAttention"),
    *(*nn.modules.batchnorm.__all__, *nn.modules.instancenorm.__all__),
    *(*nn.modules.dropout.__all__, *nn.modules.pooling.__all__, *nn.modules.padding.__all__),
    *(*nn.modules.upsampling.__all__, "GroupNorm", "LocalResponseNorm", "Identity"),
)
_MODULES = (
    *(*CHANNELWISE_MODULES, *nn.modules.normalization.__all__, *nn.modules.conv.__all__),
    *("Linear", "Embedding", "PixelShuffle", "PixelUnshuffle", "ChannelShuffle"),
)
_ATTENTION = (Attention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def is_in_place(operation: str) -> bool:
    """Return whether an operation of this name changes its first argument."""
    augmented = operation.strip("_") in ("iadd", "isub", "imul", "itruediv", "setitem", "ipow")
    return augmented or (operation.endswith("_") and not operation.startswith("__"))


def is_row_by_row(operation: str, arguments: tuple) -> bool:
    """Return whether a function, with these other arguments, keeps samples to themselves."""
    if operation in ELEMENTWISE or operation in POOLING:
        return True
    if operation in ALONG_AXES:
        several = [a if isinstance(a, (tuple, list)) else (a,) for a in arguments]
        axes = [a for some in several for a in some if not isinstance(a, bool) and a is not None]
        return bool(axes) and all(isinstance(a, int) and a > 0 for a in axes)
    return False


def module_is_row_by_row(module: nn.Module) -> bool:
    """Return whether a module of torch that is not looked into keeps samples to themselves."""
    if isinstance(module, _ATTENTION):
        return time_first(module) is None
    if not type(module).__module__.startswith("torch.nn"):
        return False
    if isinstance(module, (nn.Softmax, nn.LogSoftmax, nn.Softmin)):
        return module.dim is not None and module.dim > 0
    if isinstance(module, nn.GLU):
        return module.dim != 0
    if isinstance(module, nn.Flatten):
        return module.start_dim > 0
    if isinstance(module, nn.Sequential):
        return all(map(module_is_row_by_row, module))
    return type(module).__name__ in _MODULES


def time_first(module: nn.Module) -> nn.Module | None:
    """Return the first part of a module whose batch is not the first axis, if there is one."""
    kinds = (Attention, nn.RNNBase)
    return next((m for m in module.modules() if isinstance(m, kinds) and not m.batch_first), None)
