r"""The training objective and the paper's gradient scale :math:`\gamma(M)`.

The objective is the sum over members of their losses,

.. math:: L = \sum_a L_a, \qquad L_a = \mathrm{criterion}(\mathrm{outputs}_a, \mathrm{target}) .

Its gradient is the plain one, so any other loss or penalty can be added. The paper's update

.. math::
    \Delta w = -\eta \frac{\gamma(M)}{M} \sum_a \frac{\partial L_a}{\partial w} - \eta \lambda w,
    \qquad \Delta u_a = -\eta_u \frac{\partial L_a}{\partial u_a}

is then gradient descent with the rate :math:`\eta\gamma/M` and the weight decay
:math:`\lambda M/\gamma` for the shared parameters, with any momentum (:func:`parameter_groups`).

**Optimizers of the Adam kind** take the same step for a gradient and for any multiple of it, so
their rate cannot be :math:`\eta\gamma/M`. If the members' gradients :math:`g_a` have one norm and
the pairwise cosine :math:`r`, a step of SGD changes a member's loss by

.. math::
    -\eta \frac{\gamma}{M} \Big\langle g_a, \sum_b g_b \Big\rangle
    = -\eta \frac{\gamma}{\gamma^*} |g|^2, \qquad \gamma^* = \frac{M}{1 + (M-1) r} ,

so :math:`\gamma/\gamma^*` is the pace relative to the natural one. Optimizers of the Adam kind get
this pace as the factor of their rate. AdamW multiplies its decay by the rate, so the decay is
:math:`\lambda\gamma^*/\gamma`; Adam adds it to the gradient, so it is :math:`\lambda M/\gamma`.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from embens.checks import check_choice, find_gaps, name_rows, warn

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble
    from embens.sites import EnsembleSpec

Criterion = Callable[[Any, Any], Tensor]
BatchKind = Literal["same", "own", "split"]
Of = Literal["members", "mean", "moments"]
Gamma = float | int | Callable[[int], float] | None
MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]

BATCH_KINDS = ("same", "own", "split")
LOSSES_OF = ("members", "mean", "moments")
IGNORED = -100  # the label that cross-entropy leaves out, as in torch
RATIO_TOLERANCE = 0.1  # relative change of the ratio of two learning rates that is not reported
FEW_CLASSES = 32  # up to here a softmax over the last but one axis is faster than over the last


# Objective


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
        outputs: outputs of an ensemble, ``(member, batch, …)``, or a dictionary or tuple of them.
        target: passed to the criterion with each member's outputs.
        criterion: a function of one member's ``(outputs, target)``; a vector of losses is averaged.
            None: cross-entropy for integer targets (-100 marks a row to leave out) and for rows of
            probabilities, squared error for other floating targets, of the outputs or of their
            ``"logits"``. Targets ``(n,)`` are compared with outputs ``(n, 1)`` row by row. A
            criterion with an attribute ``over_members = True`` is called once with the outputs of
            all members and returns ``(member, batch, …)``.
        batch: how the ensemble was called. For "own" the target has the members first as well; for
            "split" member a's loss is the mean over its rows a, a + M, ….
        of: "members": one loss per member; "mean": the loss of the mean output takes the
            place of every member's; "moments": so does the loss of one normal distribution with the
            mean and variance of the members' mixture, for means and log-variances
            (:func:`gaussian_nll`; Lakshminarayanan et al. 2017).
        members: number of members; required for a split batch.

    Returns:
        A scalar.

    Example:
        >>> outputs, target = torch.zeros(4, 5, 2), torch.tensor([0, 1, 1, 0, 1])
        >>> round(objective(outputs, target).item(), 4)  # 4 log 2
        2.7726
    """
    options = {"batch": batch, "of": of, "members": members}
    is_plain = criterion is None and batch == "same" and of == "members"
    if is_plain and has_labels(outputs, target) and members in (None, len(outputs)):
        loss = total_cross_entropy(outputs, target)
    else:
        loss = member_losses(outputs, target, criterion, **options).sum()
    if loss.device.type != "cpu" or torch.compiler.is_compiling():
        return loss
    try:
        is_finite = math.isfinite(loss.item())
    except RuntimeError:  # under torch.func.vmap there is no single value
        return loss
    if is_finite:
        return loss
    gaps = find_gaps("targets", target)
    if gaps:
        raise ValueError(f"{gaps}. Remove these rows, or pass a criterion that does.")
    return member_losses(outputs, target, criterion, **options).sum()


def has_labels(outputs: Any, target: Any) -> bool:
    """Return whether outputs and target are tensors on the CPU, with integer targets."""
    are_tensors = isinstance(outputs, Tensor) and isinstance(target, Tensor)
    return are_tensors and target.dtype == torch.long and outputs.device.type == "cpu"


def member_losses(
    outputs: Any,
    target: Any,
    criterion: Criterion | None = None,
    *,
    batch: BatchKind = "same",
    of: Of = "members",
    members: int | None = None,
) -> Tensor:
    """Return the losses of all members that have rows, ``(member,)``; see :func:`objective`."""
    length = _check_batch(outputs, batch, of, members)
    if criterion is None:
        outputs = logits_of(outputs)
        criterion = default_criterion(outputs, target, batch, of)
    if of != "members":
        joint = _mixture_moments if of == "moments" else _mean_over_members
        outputs = tree_map(lambda output: joint(output).unsqueeze(0), outputs)
        return member_losses(outputs, target, criterion).expand(length)
    if criterion is F.mse_loss:
        criterion = squared_error
    if criterion is squared_error or criterion is F.cross_entropy:
        _check_tensors(outputs, target)
    if batch == "same":
        if criterion is F.cross_entropy:
            return _cross_entropies(outputs, target)
        if criterion is squared_error:
            return (outputs - _match(target, outputs.shape[1:])).square().flatten(1).mean(1)
        if getattr(criterion, "over_members", False):
            return _losses_over_members(criterion, outputs, target, length)
    if batch == "own":
        _check_own_target(target, length)
    return _losses_one_by_one(outputs, target, criterion, batch, length, members)


def _check_batch(outputs: Any, batch: str, of: str, members: int | None) -> int:
    """Validate the options; return the length of the first axis of the outputs."""
    if batch not in BATCH_KINDS or of not in LOSSES_OF:
        check_choice("batch", batch, BATCH_KINDS)
        check_choice("of", of, LOSSES_OF)
    if of != "members" and batch != "same":
        raise ValueError(f"of={of!r} needs members on the same rows, got batch={batch!r}.")
    length = len(outputs) if isinstance(outputs, Tensor) else len(tree_leaves(outputs)[0])
    if batch == "split" and members is None:
        raise TypeError("a split batch does not tell the number of members. Pass members=.")
    if batch != "split" and members not in (None, length):
        raise ValueError(
            f"outputs must be ({members}, batch, …), got a first axis of size {length}."
        )
    return length


def _check_own_target(target: Any, length: int) -> None:
    for leaf in tree_leaves(target):
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) != length:
            raise ValueError(
                f"batch='own' expects a target of shape ({length}, batch, …), got "
                f"{tuple(leaf.shape)}. For one target of all members use batch='same'."
            )


def _losses_over_members(criterion: Any, outputs: Any, target: Any, length: int) -> Tensor:
    losses = criterion(outputs, target)
    if losses.dim() < 2 or len(losses) != length:
        raise ValueError(
            f"the criterion must return losses ({length}, batch, …), got {tuple(losses.shape)}."
        )
    return losses.flatten(1).mean(1)


def _losses_one_by_one(
    outputs: Any, target: Any, criterion: Any, batch: str, length: int, members: int | None
) -> Tensor:
    """Call the criterion for one member after another."""
    indices: list[int | slice] = list(range(length))
    if batch == "split":
        assert members is not None
        indices = [slice(a, None, members) for a in range(min(members, length))]
    losses = []
    for index in indices:
        member_outputs = _take(outputs, index)
        member_target = target if batch == "same" else _take(target, index)
        if criterion is F.cross_entropy:
            losses.append(_cross_entropies(member_outputs.unsqueeze(0), member_target)[0])
            continue
        loss = criterion(member_outputs, _aligned(criterion, member_outputs, member_target))
        if not isinstance(loss, Tensor):
            raise TypeError(f"the criterion must return a tensor, got {type(loss).__name__}.")
        losses.append(loss.mean() if loss.dim() else loss)
    return torch.stack(losses)


def logits_of(outputs: Any) -> Any:
    """Return the ``"logits"`` of a model output of transformers; other outputs unchanged."""
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return outputs["logits"]
    return outputs


def default_criterion(
    outputs: Any, target: Any, batch: BatchKind = "same", of: Of = "members"
) -> Criterion:
    """Return the criterion that suits a target; see :func:`objective`."""
    if of == "moments":
        return gaussian_nll
    _check_tensors(outputs, target)
    shape = outputs.shape if batch == "split" else outputs.shape[1:]
    if target.is_floating_point():
        target_shape = target.shape[1:] if batch == "own" else target.shape
        has_classes = len(shape) == 2 and shape == target_shape and shape[1] > 1
        if not has_classes or target.is_meta or (target < 0).any():
            return squared_error
        sums_to_one = ((target.detach().sum(-1) - 1).abs() < 1e-3).all()
        return F.cross_entropy if sums_to_one else squared_error
    if target.dtype == torch.bool or target.is_complex():
        raise TypeError(
            f"there is no default criterion for targets of {target.dtype}. Pass target.long()."
        )
    return F.cross_entropy


def _check_tensors(outputs: Any, target: Any) -> None:
    for value in (outputs, target):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the default criterion needs tensors, got {type(value).__name__}. Pass a function "
                "of one member's (outputs, target)."
            )


def ignored_label(criterion: Any) -> int | None:
    """Return the label that a cross-entropy leaves out, or None for other criteria."""
    options = getattr(criterion, "keywords", {})
    criterion = getattr(criterion, "func", criterion)
    if isinstance(criterion, nn.CrossEntropyLoss):
        return criterion.ignore_index
    if criterion is F.cross_entropy:
        return options.get("ignore_index", IGNORED)
    return None


def check_labels(name: str, target: Any, classes: int, ignored: int = IGNORED) -> None:
    """Raise ValueError for integer labels that are not classes."""
    if not isinstance(target, Tensor) or target.is_floating_point():
        return
    invalid = ((target < 0) | (target >= classes)) & (target != ignored)
    if invalid.any():
        labels = ", ".join(str(label) for label in target[invalid].unique().tolist()[:5])
        raise ValueError(
            f"{name}: labels must be from 0 to {classes - 1}, one for each output, got {labels} in "
            f"{name_rows(invalid)}. {ignored} marks labels to leave out."
        )


def _check_classes(shape: torch.Size, target: Tensor) -> None:
    """Raise if one member's outputs and a target have no cross-entropy."""
    if len(shape) < 2 or shape[1] < 2:
        raise ValueError(
            "integer targets imply cross-entropy, which needs at least two outputs, got members' "
            f"outputs of shape {tuple(shape)}. Pass target.float() for squared error, or a "
            "criterion."
        )
    expected = shape if target.is_floating_point() else (shape[0], *shape[2:])
    if target.shape != expected:
        raise ValueError(
            f"cross-entropy needs targets of shape {tuple(expected)} for members' outputs "
            f"{tuple(shape)}, got {tuple(target.shape)}. Squeeze a column of classes."
        )


def squared_error(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of one member.

    Args:
        outputs: ``(batch, …)``.
        target: of the same shape; ``(n,)`` is compared with ``(n, 1)`` row by row.
    """
    return (outputs - _match(target, outputs.shape)).square().mean()


def gaussian_nll(outputs: Tensor, target: Tensor) -> Tensor:
    r"""Return the negative log-likelihood of targets under a member's normal distributions.

    .. math:: \tfrac12 \big(s + (y - \mu)^2 e^{-s}\big), \qquad \mathrm{outputs} = (\mu, s)

    The constant :math:`\tfrac12 \log 2\pi` is left out, as in torch.

    Args:
        outputs: ``(batch, 2)``, a mean and the logarithm of a variance.
        target: ``(batch,)``.

    Returns:
        Losses ``(batch,)``.
    """
    mean, log_variance = _mean_and_log_variance(outputs)
    error = mean - _match(target, mean.shape)
    return (log_variance + error.square() * (-log_variance).exp()) / 2


def _mean_over_members(outputs: Tensor) -> Tensor:
    return outputs.mean(0)


def _mixture_moments(outputs: Tensor) -> Tensor:
    """Return mean and log-variance of the mixture of the members' normal distributions."""
    means, log_variances = _mean_and_log_variance(outputs)
    variance = log_variances.exp().mean(0) + means.var(0, correction=0)
    return torch.stack([means.mean(0), variance.log()], -1)


def _mean_and_log_variance(outputs: Tensor) -> tuple[Tensor, Tensor]:
    if outputs.shape[-1] != 2:
        raise ValueError(
            f"outputs must be (…, 2), a mean and a log-variance, got {tuple(outputs.shape)}."
        )
    return outputs[..., 0], outputs[..., 1]


def _match(target: Tensor, shape: torch.Size) -> Tensor:
    """Return a target in the shape of one member's outputs, up to a last axis of size 1."""
    if shape in (target.shape, (*target.shape, 1)) or target.shape == (*shape, 1):
        return target.reshape(shape)
    raise ValueError(
        f"targets must have the shape of a member's outputs, {tuple(shape)}, got "
        f"{tuple(target.shape)}. For classes pass target.long()."
    )


def _aligned(criterion: Any, outputs: Any, target: Any) -> Any:
    """Return the target in the shape of the outputs where a loss of torch would broadcast it."""
    function = getattr(criterion, "func", criterion)
    home = getattr(function, "__module__", None) or type(function).__module__
    are_tensors = isinstance(outputs, Tensor) and isinstance(target, Tensor)
    if not are_tensors or not home.startswith("torch.nn."):
        return target
    if ignored_label(criterion) is not None:
        _check_classes(outputs.shape, target)
        return target
    if target.is_floating_point() or target.numel() == outputs.numel():
        return _match(target, outputs.shape)
    return target


def total_cross_entropy(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the sum of the members' cross-entropies.

    One reduction over all rows is faster than one per member. It is not finite if every label is
    ignored.
    """
    _check_classes(outputs.shape[1:], target)
    members = len(outputs)
    targets = target.expand(members, *target.shape)
    if outputs.shape[2] > FEW_CLASSES:
        outputs, targets = outputs.flatten(0, 1), targets.flatten(0, 1)
    else:
        outputs = outputs.movedim(2, 1)
    try:
        return members * F.cross_entropy(outputs, targets)
    except IndexError:
        check_labels("target", target, outputs.shape[1])
        raise


def _cross_entropies(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of each member on the same target."""
    _check_classes(outputs.shape[1:], target)
    members = len(outputs)
    is_soft = target.is_floating_point()
    if not is_soft:
        target = target.long()
    targets = target.expand(members, *target.shape)
    if outputs.shape[2] <= FEW_CLASSES:
        # Members become torch's batch and their rows its positions.
        outputs = outputs.movedim(2, 1)
        targets = targets.movedim(2, 1) if is_soft else targets
    else:
        outputs, targets = outputs.flatten(0, 1), targets.flatten(0, 1)
    try:
        losses = F.cross_entropy(outputs, targets, reduction="none").view(members, -1)
    except IndexError:
        check_labels("target", target, outputs.shape[1])
        raise
    if is_soft:
        return losses.mean(1)
    return losses.sum(1) / (target != IGNORED).sum().clamp(min=1)


def _take(values: Any, index: int | slice) -> Any:
    """Return one member's part of nested tensors with the members first."""

    def take(value: Any) -> Any:
        return value[index] if isinstance(value, Tensor) and value.dim() else value

    return tree_map(take, values)


# Learning rates


def gamma_for_coupling(members: int, coupling: float) -> float:
    r"""Return :math:`\gamma^* = M / (1 + (M-1) r)` for a coupling :math:`r`.

    With :math:`r < 0` the differences between members are faster than their mean, and bind instead.
    """
    return members / max(1 + (members - 1) * coupling, 1 - coupling)


def natural_gamma(spec: "EnsembleSpec") -> float:
    """Return the default gradient scale of an ensemble.

    In a subset with repeated members, the coupling is the mean over pairs, with 1 for a pair of
    equal members.
    """
    coupling = spec.overlap
    pairs = spec.members * (spec.members - 1)
    if spec.chosen and pairs:
        equal_pairs = sum(count * (count - 1) for count in Counter(spec.chosen).values())
        coupling = (equal_pairs + (pairs - equal_pairs) * coupling) / pairs
    return gamma_for_coupling(spec.members, coupling)


def gradient_factor(gamma: Gamma, members: int, natural: float) -> float:
    r"""Return :math:`\gamma(M)/M` for a number, a function of M, or None (the natural value)."""
    value: Any = gamma
    if gamma is None:
        value = natural
    elif callable(gamma):
        value = gamma(members)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"gamma must be a number, a function of the number of members, or None, got {gamma!r}."
        )
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"gamma must be finite and not negative, got {value}.")
    return float(value) / members


@dataclass(frozen=True)
class OptimizerKind:
    """How an optimizer uses gradients and weight decay.

    Attributes:
        scale_free: whether it takes the same step for a gradient and for any multiple of it.
        decoupled: whether a scale-free optimizer multiplies its decay by the learning rate instead
            of adding it to the gradient.
    """

    scale_free: bool
    decoupled: bool


def kind_of_optimizer(optimizer: MakeOptimizer) -> OptimizerKind:
    """Return the kind of an optimizer; unknown ones are tried on a small parameter."""
    made = optimizer.func if isinstance(optimizer, functools.partial) else optimizer
    if made is torch.optim.SGD:
        return OptimizerKind(False, False)
    if optimizer is torch.optim.Adam:
        return OptimizerKind(True, False)
    if optimizer is torch.optim.AdamW:
        return OptimizerKind(True, True)
    short, long = _tenth_step(optimizer, 1.0), _tenth_step(optimizer, 8.0)
    size = float(short.norm())
    if size == 0 or float((long - short).norm()) > 0.01 * size:
        return OptimizerKind(False, False)
    plain, decayed = _tenth_step(optimizer, 1e6), _tenth_step(optimizer, 1e6, decay=0.5)
    return OptimizerKind(True, float((decayed - plain).norm()) > 0.01 * size)


def _tenth_step(optimizer: MakeOptimizer, scale: float, decay: float = 0.0) -> Tensor:
    """Return the tenth step on fixed gradients; some optimizers begin with other steps."""
    start = torch.linspace(1.0, 2.0, 6).reshape(2, 3)
    parameter = nn.Parameter(start.clone())
    groups = [{"params": [parameter], "lr": 0.01, "weight_decay": decay}]
    trial = optimizer(groups) if callable(optimizer) else optimizer
    if not callable(optimizer) or not isinstance(trial, Optimizer):
        raise TypeError(
            "optimizer must be a class or a function from parameter groups to an optimizer, such "
            f"as torch.optim.Adam or partial(torch.optim.SGD, momentum=0.9), got {trial!r}."
        )
    before = start
    for step in range(10):
        before = parameter.detach().clone()
        parameter.grad = scale * torch.cos(start * (3.0 + step) * 2)
        try:
            trial.step()
        except TypeError as error:
            raise TypeError(
                f"{type(trial).__name__} cannot take plain steps ({error}). Optimizers that need a "
                "closure need a hand-written training loop."
            ) from None
    return parameter.detach() - before


def shared_factors(
    spec: "EnsembleSpec", gamma: Gamma, optimizer: MakeOptimizer
) -> tuple[float, float]:
    """Return the factors of learning rate and weight decay of the shared parameters."""
    natural = natural_gamma(spec)
    factor = gradient_factor(gamma, spec.members, natural)
    if factor == 0:
        return 0.0, 0.0
    kind = kind_of_optimizer(optimizer)
    rate = factor
    if kind.scale_free:
        rate = factor * spec.members / natural
    return rate, 1 / (rate if kind.decoupled else factor)


def parameter_groups(
    ensemble: "EmbeddedEnsemble",
    lr: float,
    modulation_lr: float | None,
    weight_decay: float,
    *,
    gamma: Gamma,
    optimizer: MakeOptimizer,
    modulation_weight_decay: float,
) -> list[dict[str, Any]]:
    """Return parameter groups; see :meth:`embens.EmbeddedEnsemble.parameter_groups`.

    Every group has its factor of the learning rate as ``gamma_factor``, for code that sets rates.
    A step with rates that have lost gamma is refused (:func:`check_rates`).
    """
    _watch_optimizers()
    if modulation_lr is None:
        modulation_lr = lr
    for name, rate in (("lr", lr), ("modulation_lr", modulation_lr)):
        if not isinstance(rate, (Real, Tensor)) or not math.isfinite(rate) or rate < 0:
            raise ValueError(f"{name} must be finite and not negative, got {rate!r}.")
    spec = ensemble.spec
    rate_factor, decay_factor = shared_factors(spec, gamma, optimizer)
    separate = set()
    for item in spec.per_member:
        separate |= {f"{item.module}.{tensor}".lstrip(".") for tensor in item.tensors}
    modulations, per_member = [], []
    for attribute, parameter in ensemble.individual.named_parameters():
        is_separate = attribute.replace("/", ".") in separate
        (per_member if is_separate else modulations).append(parameter)
    shared = [] if spec.frozen else list(ensemble.shared_parameters())
    groups: list[dict[str, Any]] = []
    if shared:
        groups.append(
            {
                "params": shared,
                "lr": lr * rate_factor,
                "weight_decay": weight_decay * decay_factor,
                "gamma_factor": rate_factor,
                "planned_lr": float(lr * rate_factor),
                "full_lr": float(lr),
            }
        )
    if modulations:
        groups.append(
            {
                "params": modulations,
                "lr": modulation_lr,
                "weight_decay": modulation_weight_decay,
                "gamma_factor": 1.0,
                "planned_lr": float(modulation_lr),
            }
        )
    if per_member:
        groups.append(
            {
                "params": per_member,
                "lr": lr,
                "weight_decay": weight_decay,
                "gamma_factor": 1.0,
                "planned_lr": float(lr),
            }
        )
    return groups


@functools.cache
def _watch_optimizers() -> None:
    """Check the rates at every step of every optimizer, once groups with a gamma exist."""
    register_optimizer_step_pre_hook(check_rates)


def check_rates(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Raise ValueError if the learning rates of an optimizer have lost gamma.

    A scheduler that multiplies keeps the ratio of the groups' rates. Code that sets one rate for
    all groups, such as ``OneCycleLR(optimizer, max_lr=0.1)``, removes gamma. A ratio that changes
    gradually, as with ``CosineAnnealingLR(eta_min=…)``, is reported once in a warning.

    Args:
        optimizer: any optimizer; groups that :func:`parameter_groups` did not make are ignored.
        args: of its step, not used.
        kwargs: of its step, not used.
    """
    if torch.compiler.is_compiling():
        return
    shared: dict[str, Any] = {}
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor) and group["lr"].device.type != "cpu":
            return  # reading it would wait for the device, which a CUDA graph forbids
        if "full_lr" in group:
            shared = group
            is_overwritten = group["planned_lr"] != group["full_lr"] == group.get("max_lr")
            if is_overwritten:
                raise _lost_gamma(group["full_lr"], group)
        elif shared and "planned_lr" in group:
            _compare_rates(shared, group)


def _compare_rates(shared: dict[str, Any], group: dict[str, Any]) -> None:
    """Compare the ratio of two rates with that of the plan and that of gamma."""
    if shared.get("has_drifted"):
        return
    for key in ("planned_lr", "gamma_factor"):
        # Products instead of ratios, as rates may be 0.
        actual, expected = shared["lr"] * group[key], group["lr"] * shared[key]
        if abs(actual - expected) <= RATIO_TOLERANCE * expected:
            return
    if shared["lr"] == group["lr"]:
        raise _lost_gamma(shared["lr"], shared)
    shared["has_drifted"] = True
    warn(
        f"the learning rates are {float(shared['lr']):g} for shared parameters and "
        f"{float(group['lr']):g} for others, not in the ratio of the plan "
        f"({float(shared['planned_lr']):g} and {float(group['planned_lr']):g}), so gamma changes. "
        "Use a scheduler that multiplies (eta_min=0), or rates per group that are multiples of "
        "group['gamma_factor']."
    )


def _lost_gamma(rate: Any, group: dict[str, Any]) -> ValueError:
    return ValueError(
        f"the learning rate of the shared parameters is set to {float(rate):g} without gamma "
        f"(factor {group['gamma_factor']:.4g}): a scheduler or a loop overwrites group['lr'] of "
        "all groups. Set rates per group, as in OneCycleLR(optimizer, "
        "max_lr=[lr * group['gamma_factor'] for group in optimizer.param_groups], …)."
    )
