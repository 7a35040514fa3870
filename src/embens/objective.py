r"""The training objective: the sum over members of their losses, with its plain gradient.

.. math:: L = \sum_a L_a, \qquad L_a = \mathrm{criterion}(\mathrm{outputs}_a, \mathrm{target})

It is a function of tensors, so any other loss or penalty can be added to it, and any loop can use
it. Not here: the paper's :math:`\gamma(M)/M`, a factor of the shared rate
(:mod:`embens.ensemble.rates`).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from embens.checks import check_choice, find_gaps, name_rows, suggest

Criterion = Callable[[Any, Any], Tensor]
BatchKind = Literal["same", "own", "split"]
Of = Literal["members", "mean", "moments"]
OPTIONS = {"batch": get_args(BatchKind), "of": get_args(Of)}
IGNORED = -100  # the label that cross-entropy leaves out, as torch's does
FEW_CLASSES = 32  # up to here a softmax over the last but one axis is faster than over the last
MOVED = {
    "gamma": " any more: it is a factor of the shared rate. Pass it to ensemble."
    "parameter_groups(lr, gamma=…), or to embens.fit(gamma=…)."
}


@suggest(MOVED)
def objective(
    outputs: Any,
    target: Any,
    criterion: Criterion | None = None,
    *,
    batch: BatchKind = "same",
    of: Of = "members",
    members: int | None = None,
) -> Tensor:
    """Return the sum of the members' losses.

    Args:
        outputs: of an ensemble, ``(member, batch, …)``, or a dict or a tuple of such tensors.
        target: passed to the criterion with each member's outputs.
        criterion: a function of ``(outputs, target)`` of one member; a vector of losses is
            averaged. None: of the outputs, or of the ``logits`` among them, cross-entropy for whole
            numbers (-100: a row to leave out) and for rows of probabilities, squared error for
            other numbers. Targets ``(n,)`` meet outputs ``(n, 1)`` row by row in all losses of
            torch. One with an attribute ``over_members = True`` is called once, with the outputs
            of all members, and returns ``(member, batch, …)``.
        batch: how the ensemble was called. Of "own" batches the target has the members first as
            well; of a "split" one member a's loss is the mean over its rows a, a + M, ….
        of: "members": each has its own loss; "mean": the loss of the mean output takes the place of
            every member's; "moments": so does, for means and log-variances (:func:`gaussian_nll`),
            the loss of one normal law with the mean and variance of the members' mixture
            (Lakshminarayanan et al. 2017).
        members: how many there are; needed for a split batch.

    Example:
        >>> outputs, target = torch.zeros(4, 5, 2), torch.tensor([0, 1, 1, 0, 1])
        >>> round(objective(outputs, target).item(), 4)  # 4 log 2
        2.7726
    """
    loss = member_losses(outputs, target, criterion, batch=batch, of=of, members=members).sum()
    if loss.device.type == "cpu" and not torch.compiler.is_compiling():
        try:
            finite = math.isfinite(loss.item())
        except RuntimeError:  # under torch.func.vmap there is no one value
            return loss
        if not finite and (gaps := find_gaps("targets", target)):
            raise ValueError(f"{gaps}. Leave these rows out, or pass a criterion that does.")
    return loss


def member_losses(
    outputs: Any,
    target: Any,
    criterion: Criterion | None = None,
    *,
    batch: BatchKind = "same",
    of: Of = "members",
    members: int | None = None,
) -> Tensor:
    """Return the losses, ``(member,)``, of all members with rows; see :func:`objective`."""
    for name, value in (("batch", batch), ("of", of)):
        check_choice(name, value, OPTIONS[name])
    length = len(outputs) if isinstance(outputs, Tensor) else len(tree_leaves(outputs)[0])
    if batch == "split" and members is None:
        raise TypeError(
            "the outputs of a split batch don't say how many members there are; pass members="
        )
    if batch != "split" and members not in (None, length):
        raise ValueError(f"expected outputs ({members}, batch, …); their first axis has {length}")
    if criterion is None:
        outputs = logits_of(outputs)
        criterion = default_criterion(outputs, target, batch, of)
    if of != "members":
        if batch != "same":
            raise ValueError(f"of={of!r} needs members on the same rows; got batch={batch!r}")
        joint = _moments if of == "moments" else lambda o: o.mean(0)
        outputs = tree_map(lambda o: joint(o)[None], outputs)
        return member_losses(outputs, target, criterion).expand(length)
    criterion = squared_error if criterion is F.mse_loss else criterion
    if criterion in (squared_error, F.cross_entropy):
        _check_tensors(outputs, target)
    if batch == "same":
        if criterion is F.cross_entropy:
            return _cross_entropies(outputs, target)
        if criterion is squared_error:
            return (outputs - _like(target, outputs.shape[1:])).square().flatten(1).mean(1)
        if getattr(criterion, "over_members", False):
            losses = criterion(outputs, target)
            if losses.dim() < 2 or len(losses) != length:
                shape = tuple(losses.shape)
                raise ValueError(f"criterion: expected losses ({length}, batch, …); got {shape}")
            return losses.flatten(1).mean(1)
    elif batch == "own":
        for leaf in tree_leaves(target):
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) != length:
                raise ValueError(
                    f"batch='own' expects a target of shape ({length}, batch, …); got "
                    f"{tuple(leaf.shape)}. For one target of all members use batch='same'."
                )
    mine: Iterable[int | slice] = range(length)
    if batch == "split":
        mine = [slice(a, None, members) for a in range(min(members or 1, length))]
    pairs = ((_take(outputs, i), target if batch == "same" else _take(target, i)) for i in mine)
    if criterion is F.cross_entropy:
        return torch.cat([_cross_entropies(o[None], t) for o, t in pairs])
    losses = [criterion(o, _aligned(criterion, o, t)) for o, t in pairs]
    if not all(isinstance(loss, Tensor) for loss in losses):
        kind = type(losses[0]).__name__
        raise TypeError(f"criterion: expected a tensor, the loss alone; got {kind}")
    return torch.stack([loss.mean() if loss.dim() else loss for loss in losses])


def logits_of(outputs: Any) -> Any:
    """Return the logits among the outputs of a model of transformers; others as they are."""
    return outputs["logits"] if isinstance(outputs, Mapping) and "logits" in outputs else outputs


def default_criterion(
    outputs: Any, target: Any, batch: BatchKind = "same", of: Of = "members"
) -> Criterion:
    """Return the criterion that suits a target; for moments it is :func:`gaussian_nll`."""
    if of == "moments":
        return gaussian_nll
    _check_tensors(outputs, target)
    shape = outputs.shape if batch == "split" else outputs.shape[1:]
    if target.is_floating_point():
        rows = target.shape[1:] if batch == "own" else target.shape
        rows_of_classes = len(shape) == 2 and shape == rows and shape[1] > 1
        if not rows_of_classes or target.is_meta or (target < 0).any():
            return squared_error
        soft = ((target.detach().sum(-1) - 1).abs() < 1e-3).all()
        return F.cross_entropy if soft else squared_error
    if target.dtype == torch.bool or target.is_complex():
        raise TypeError(f"criterion: none for targets of {target.dtype}; pass target.long()")
    return F.cross_entropy


def _check_tensors(outputs: Any, target: Any) -> None:
    if not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
        kind = type(outputs if not isinstance(outputs, Tensor) else target).__name__
        raise TypeError(
            f"criterion: the default is for tensors; got a {kind}. Pass a function of (outputs, "
            "target) of one member."
        )


def ignored_label(criterion: Any) -> int | None:
    """Return the label that a cross-entropy leaves out; None for any other criterion."""
    options = getattr(criterion, "keywords", {})
    criterion = getattr(criterion, "func", criterion)
    if isinstance(criterion, nn.CrossEntropyLoss):
        return criterion.ignore_index
    return options.get("ignore_index", IGNORED) if criterion is F.cross_entropy else None


def check_labels(name: str, target: Any, classes: int, ignored: int = IGNORED) -> None:
    """Refuse labels that are no classes."""
    if not isinstance(target, Tensor) or target.is_floating_point():
        return
    bad = ((target < 0) | (target >= classes)) & (target != ignored)
    if bad.any():
        found = ", ".join(map(str, target[bad].unique().tolist()[:5]))
        raise ValueError(
            f"{name}: expected classes from 0 to {classes - 1}, one for each output; got {found} "
            f"in {name_rows(bad)}. {ignored} marks labels to leave out."
        )


def _check_classes(shape: torch.Size, target: Tensor) -> None:
    """Refuse what has no cross-entropy: one member's outputs of a shape, and their target."""
    if len(shape) < 2 or shape[1] < 2:
        raise ValueError(
            f"criterion: whole numbers are classes, of which members' outputs {tuple(shape)} have "
            "fewer than two. Pass target.float() for squared error, or a criterion."
        )
    expected = shape if target.is_floating_point() else (shape[0], *shape[2:])
    if target.shape != expected:
        raise ValueError(
            f"cross-entropy: expected targets of shape {tuple(expected)} for members' outputs "
            f"{tuple(shape)}; got {tuple(target.shape)}. Squeeze a column of classes."
        )


def squared_error(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of one member; ``(n,)`` meets ``(n, 1)`` row by row."""
    return (outputs - _like(target, outputs.shape)).square().mean()


def gaussian_nll(outputs: Tensor, target: Tensor) -> Tensor:
    r"""Return the negative log-likelihood of numbers under a member's normal laws, row by row.

    .. math:: \tfrac12 \big(s + (y - \mu)^2 e^{-s}\big), \qquad \mathrm{outputs} = (\mu, s)

    Outputs ``(…, 2)`` are a mean and the logarithm of a variance, as for ``embens.predict(…,
    task="gaussian")``. The constant :math:`\tfrac12 \log 2\pi` is left out, as in torch.
    """
    mean, logarithm = _split(outputs)
    return (logarithm + (mean - _like(target, mean.shape)).square() * (-logarithm).exp()) / 2


def _moments(outputs: Tensor) -> Tensor:
    """Return mean and log-variance of the mixture of members' normal laws."""
    means, logarithms = _split(outputs)
    variance = logarithms.exp().mean(0) + means.var(0, correction=0)
    return torch.stack([means.mean(0), variance.log()], -1)


def _split(outputs: Tensor) -> tuple[Tensor, Tensor]:
    if outputs.shape[-1] != 2:
        shape = tuple(outputs.shape)
        raise ValueError(f"expected outputs (…, 2), a mean and a log-variance; got {shape}")
    return outputs[..., 0], outputs[..., 1]


def _like(target: Tensor, shape: torch.Size) -> Tensor:
    if shape in (target.shape, (*target.shape, 1)) or target.shape == (*shape, 1):
        return target.reshape(shape)
    raise ValueError(
        f"criterion: expected targets of the shape of a member's outputs, {tuple(shape)}; got "
        f"{tuple(target.shape)}. For classes pass target.long()."
    )


def _aligned(criterion: Any, outputs: Any, target: Any) -> Any:
    """Return the target in the shape of the outputs where a loss of torch would broadcast it."""
    function = getattr(criterion, "func", criterion)
    home = getattr(function, "__module__", None) or type(function).__module__
    both = isinstance(outputs, Tensor) and isinstance(target, Tensor)
    if not both or not home.startswith("torch.nn."):
        return target
    if ignored_label(criterion) is not None:
        _check_classes(outputs.shape, target)
        return target
    numbers = target.is_floating_point() or target.numel() == outputs.numel()
    return _like(target, outputs.shape) if numbers else target


def _cross_entropies(outputs: Tensor, target: Tensor) -> Tensor:
    _check_classes(outputs.shape[1:], target)
    members, soft = len(outputs), target.is_floating_point()
    target = target if soft else target.long()
    targets = target.expand(members, *target.shape)
    if outputs.shape[2] <= FEW_CLASSES:  # members are torch's batch, their rows its positions
        outputs, targets = outputs.movedim(2, 1), targets.movedim(2, 1) if soft else targets
    else:
        outputs, targets = outputs.flatten(0, 1), targets.flatten(0, 1)
    try:
        losses = F.cross_entropy(outputs, targets, reduction="none").view(members, -1)
    except IndexError:
        check_labels("target", target, outputs.shape[1])
        raise
    return losses.mean(1) if soft else losses.sum(1) / (target != IGNORED).sum().clamp(min=1)


def _take(values: Any, index: int | slice) -> Any:
    return tree_map(lambda v: v[index] if isinstance(v, Tensor) and v.dim() else v, values)
