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

so :math:`\gamma/\gamma^*` is the speed of training relative to that with :math:`\gamma^*`.
Optimizers of the Adam kind get it as the factor of their rate. AdamW multiplies its decay by the
rate, so the decay is :math:`\lambda\gamma^*/\gamma`; Adam adds it to the gradient, so it is
:math:`\lambda M/\gamma`.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Never
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from embens import synonyms
from embens.checks import find_gaps, unknown_argument, warn
from embens.losses import FEW_CLASSES, BatchKind, Criterion, Of, check_labels, member_losses
from embens.optimizers import MakeOptimizer, OptimizerKind, measure_kind

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble
    from embens.spec import EnsembleSpec

Gamma = float | int | Callable[[int], float] | None

RATIO_TOLERANCE = 0.1  # relative change of the ratio of two learning rates that is not reported
ADAM_KIND = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
)
_DRIFTED: WeakSet[Optimizer] = WeakSet()
"""Optimizers with a warning about the ratio of their rates."""
_UNFIT: WeakSet[Optimizer] = WeakSet()
"""Optimizers with a warning about groups for another kind of optimizer."""


# Objective


def objective(
    outputs: Any,
    target: Any,
    criterion: Criterion | None = None,
    *,
    batch: BatchKind = "same",
    of: Of = "members",
    members: int | None = None,
    **unknown: Never,
) -> Tensor:
    """Return the sum of the members' losses.

    Args:
        outputs: Outputs of an ensemble, ``(member, batch, …)``, or a dictionary or tuple of them.
        target: Passed to the criterion with each member's outputs.
        criterion: A function of one member's ``(outputs, target)``; a vector of losses is averaged.
            None: cross-entropy for integer targets (-100 marks a row to leave out) and for rows of
            probabilities, squared error for other floating targets, of the outputs or of their
            ``"logits"``. Targets ``(n,)`` are compared with outputs ``(n, 1)`` row by row. A
            criterion with an attribute ``over_members = True`` is called once with the outputs of
            all members and returns ``(member, batch, …)``.
        batch: How the ensemble was called. For "own" the target has the members first as well; for
            "split" member a's loss is the mean over its rows a, a + M, ….
        of: "members": one loss per member; "mean": the loss of the mean output takes the
            place of every member's; "moments": so does the loss of one normal distribution with the
            mean and variance of the members' mixture, for means and log-variances
            (:func:`gaussian_nll`; Lakshminarayanan et al. 2017).
        members: Number of members; required for a split batch.
        **unknown: Any other name raises TypeError with a suggestion.

    Returns:
        A scalar.

    Example:
        >>> outputs, target = torch.zeros(4, 5, 2), torch.tensor([0, 1, 1, 0, 1])
        >>> round(objective(outputs, target).item(), 4)  # 4 log 2
        2.7726
    """
    if unknown:
        raise unknown_argument(objective, unknown, synonyms.CRITERION)
    options = {"batch": batch, "of": of, "members": members}
    # The usual case is a single reduction over all members and rows.
    is_plain = criterion is None and batch == "same" and of == "members"
    if is_plain and has_labels(outputs, target) and members in (None, len(outputs)):
        loss, _ = total_cross_entropy(outputs, target)
    else:
        loss = member_losses(outputs, target, criterion, **options).sum()
    if loss.device.type != "cpu" or torch.compiler.is_compiling():
        return loss  # reading the loss would wait for the device, or break the graph
    try:
        is_finite = math.isfinite(loss.item())
    except RuntimeError:  # under torch.func.vmap there is no single value
        return loss
    if is_finite:
        return loss
    gaps = find_gaps("targets", target)
    if gaps:
        raise ValueError(f"{gaps}. Remove these rows, or pass a criterion that does.")
    # The single reduction is NaN if all labels are ignored; the losses of the members are then 0.
    return member_losses(outputs, target, criterion, **options).sum()


def has_labels(outputs: Any, target: Any) -> bool:
    """Return whether :func:`total_cross_entropy` computes the objective of outputs and a target.

    It does for logits on the CPU with one integer label for each row and position.

    Args:
        outputs: Outputs of an ensemble, ``(member, batch, class, …)`` if they are logits.
        target: The target, ``(batch, …)``.

    Example:
        >>> has_labels(torch.zeros(4, 5, 2), torch.tensor([0, 1, 1, 0, 1]))
        True
    """
    if not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
        return False
    if target.dtype != torch.long or outputs.device.type != "cpu":
        return False
    if outputs.dim() < 3 or outputs.shape[2] < 2:
        return False
    return target.shape == (outputs.shape[1], *outputs.shape[3:])


def total_cross_entropy(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the members' cross-entropies, and the log-probabilities.

    One reduction over all rows is faster than one per member.

    Args:
        outputs: Logits ``(member, batch, class, …)``.
        target: Labels ``(batch, …)``.

    Returns:
        The sum, not finite if every label is ignored; log-probabilities ``(member, class, batch,
        …)``.

    Raises:
        ValueError: If a label is not a class.

    Example:
        >>> loss, _ = total_cross_entropy(torch.zeros(4, 5, 2), torch.tensor([0, 1, 1, 0, 1]))
        >>> round(loss.item(), 4)  # 4 log 2
        2.7726
    """
    members = len(outputs)
    targets = target.expand(members, *target.shape)
    try:
        if outputs.shape[2] <= FEW_CLASSES:
            log_probabilities = outputs.movedim(2, 1).log_softmax(1)
            return members * F.nll_loss(log_probabilities, targets), log_probabilities
        log_probabilities = outputs.log_softmax(2)
        loss = F.nll_loss(log_probabilities.flatten(0, 1), targets.flatten(0, 1))
    except IndexError:
        check_labels("target", target, outputs.shape[2])
        raise
    return members * loss, log_probabilities.movedim(2, 1)


# Learning rates


def gamma_for_coupling(members: int, coupling: float) -> float:
    r"""Return :math:`\gamma^* = M / (1 + (M-1) r)` for a coupling :math:`r`.

    The matrix of the cosines between members has the eigenvalue :math:`1 + (M-1) r` for the mean
    over members and :math:`1 - r` for differences between them. :math:`\gamma^*` is :math:`M` over
    the larger one, which is :math:`1 - r` for :math:`r < 0`.

    Args:
        members: Number of members :math:`M`.
        coupling: Mean cosine :math:`r` of the gradients of two members.

    Returns:
        The gradient scale.

    Example:
        >>> gamma_for_coupling(8, 0.0), gamma_for_coupling(8, 1.0)
        (8.0, 1.0)
    """
    return members / max(1 + (members - 1) * coupling, 1 - coupling)


def overlap(spec: "EnsembleSpec") -> float:
    r"""Return the product of the post laws' :math:`E[u_a u_b] / E[u^2]` over the hidden sites.

    Separately drawn last layers make it 0. Low-rank layers count with the fraction of the weights
    that members have in common.

    Args:
        spec: Spec of the ensemble.

    Returns:
        The coupling of two members, from 0 to 1.
    """
    if spec.individual_head or spec.separate:
        return 0.0
    product = 1.0
    for site in spec.sites:
        if site.kind == "post" and site.hidden:
            product *= site.law.overlap
    for low_rank in spec.low_rank:
        product /= 1 + low_rank.scale**2
    return product


def natural_gamma(spec: "EnsembleSpec") -> float:
    """Return the default gradient scale of an ensemble.

    In a subset with repeated members, the coupling is the mean over pairs, with 1 for a pair of
    equal members.

    Args:
        spec: Spec of the ensemble; the coupling is its overlap.

    Returns:
        The gradient scale, gamma* of this module.
    """
    coupling = overlap(spec)
    pairs = spec.members * (spec.members - 1)
    if spec.chosen and pairs:
        equal_pairs = sum(count * (count - 1) for count in Counter(spec.chosen).values())
        coupling = (equal_pairs + (pairs - equal_pairs) * coupling) / pairs
    return gamma_for_coupling(spec.members, coupling)


def gradient_factor(gamma: Gamma, members: int, natural: float) -> float:
    r"""Return :math:`\gamma(M)/M`.

    Args:
        gamma: A number, a function of M, or None for the natural value.
        members: Number of members :math:`M`.
        natural: The natural gamma.

    Returns:
        The factor of the shared gradient, at least 0.

    Raises:
        TypeError: If gamma is not a number.
        ValueError: If it is negative or not finite.

    Example:
        >>> gradient_factor(2.0, members=8, natural=8.0), gradient_factor(None, 8, 8.0)
        (0.25, 1.0)
    """
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


def kind_of_optimizer(optimizer: MakeOptimizer) -> OptimizerKind:
    """Return the kind of an optimizer; it is known for SGD, Adam and AdamW, otherwise measured.

    Args:
        optimizer: A class, or a function from parameter groups to an optimizer.

    Returns:
        The kind.

    Raises:
        TypeError: If it is neither, or its steps need a closure.

    Example:
        >>> kind_of_optimizer(torch.optim.AdamW)
        OptimizerKind(scale_free=True, decoupled=True)
    """
    factory = optimizer.func if isinstance(optimizer, functools.partial) else optimizer
    if factory is torch.optim.SGD:
        return OptimizerKind(False, False)
    if optimizer is torch.optim.Adam:
        return OptimizerKind(True, False)
    if optimizer is torch.optim.AdamW:
        return OptimizerKind(True, True)
    return measure_kind(optimizer)


@dataclass(frozen=True)
class SharedFactors:
    """Factors of the rates of the shared parameters.

    Attributes:
        rate: Factor of the learning rate.
        decay: Factor of the weight decay, which makes the decay of a step independent of gamma.
        fits_adam: Whether the factors are right for optimizers of the Adam kind.
    """

    rate: float
    decay: float
    fits_adam: bool


def shared_factors(spec: "EnsembleSpec", gamma: Gamma, optimizer: MakeOptimizer) -> SharedFactors:
    """Return the factors of learning rate and weight decay of the shared parameters.

    Args:
        spec: Spec of the ensemble.
        gamma: A number, a function of M, or None for the natural value.
        optimizer: Optimizer class that the factors are for, or a function from groups to an
            optimizer.

    Returns:
        The factors; both are 0 for ``gamma=0``.
    """
    natural = natural_gamma(spec)
    factor = gradient_factor(gamma, spec.members, natural)
    if factor == 0:
        return SharedFactors(0.0, 0.0, fits_adam=True)
    kind = kind_of_optimizer(optimizer)
    rate = factor
    if kind.scale_free:
        rate = factor * spec.members / natural
    # Decay that is added to the gradient is scaled by gamma / M, as the gradient is. Decoupled
    # decay is scaled by the rate.
    decay = 1 / factor
    if kind.decoupled:
        decay = 1 / rate
    # If the natural gamma is M, SGD and Adam have the same factors.
    return SharedFactors(rate, decay, fits_adam=kind.scale_free or natural == spec.members)


def parameter_groups(
    ensemble: "EmbeddedEnsemble",
    lr: float = 0.01,
    modulation_lr: float | None = None,
    weight_decay: float = 5e-4,
    *,
    gamma: Gamma = None,
    optimizer: MakeOptimizer = torch.optim.SGD,
    modulation_weight_decay: float = 0.0,
    **unknown: Never,
) -> list[dict[str, Any]]:
    r"""Return parameter groups for a torch optimizer.

    With them, one step on :func:`embens.objective` is the paper's update. Every group has its
    factor of the learning rate as ``gamma_factor``, for code that sets rates. A step with rates
    that have lost gamma raises ValueError (:func:`check_rates`).

    Args:
        ensemble: The ensemble.
        lr: Learning rate. That of the shared parameters is ``lr`` times :math:`\gamma(M)/M`,
            for optimizers of the Adam kind times :math:`\gamma/\gamma^*`.
        modulation_lr: Learning rate of modulations; None: ``lr``.
        weight_decay: Weight decay of shared parameters and per-member layers, in units of
            ``lr``, independent of gamma.
        gamma: A number (0: shared parameters do not move), a function of the number of
            members, or None for the natural value.
        optimizer: Optimizer class that the groups are for, or a function from groups to an
            optimizer.
        modulation_weight_decay: Weight decay of modulations.
        **unknown: Any other name raises TypeError with a suggestion.

    Returns:
        Up to three groups: shared parameters, modulations, per-member layers.

    Example:
        >>> from embens import batch_ensemble
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> groups = batch_ensemble(net, members=4).parameter_groups(lr=0.1, gamma=1)
        >>> [group["lr"] for group in groups]
        [0.025, 0.1]
    """
    if unknown:
        raise unknown_argument(parameter_groups, unknown, synonyms.RATES)
    _watch_optimizers()
    if modulation_lr is None:
        modulation_lr = lr
    for name, rate in (("lr", lr), ("modulation_lr", modulation_lr)):
        if not isinstance(rate, (Real, Tensor)) or not math.isfinite(rate) or rate < 0:
            raise ValueError(f"{name} must be finite and not negative, got {rate!r}.")
    spec = ensemble.spec
    factors = shared_factors(spec, gamma, optimizer)
    modulations, per_member = _individual_parameters(ensemble)
    shared = [] if spec.frozen else list(ensemble.shared_parameters())
    groups = []
    if shared:
        # ``full_lr`` is the rate without gamma, by which check_rates recognises that gamma is lost.
        group = _group(shared, lr * factors.rate, weight_decay * factors.decay, factors.rate)
        groups.append({**group, "full_lr": float(lr), "fits_adam": factors.fits_adam})
    if modulations:
        groups.append(_group(modulations, modulation_lr, modulation_weight_decay))
    if per_member:
        groups.append(_group(per_member, lr, weight_decay))
    return groups


def _individual_parameters(
    ensemble: "EmbeddedEnsemble",
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the modulations, and the parameters of per-member layers."""
    per_member_names = set()
    for item in ensemble.spec.per_member:
        per_member_names |= {f"{item.module}.{tensor}".lstrip(".") for tensor in item.tensors}
    modulations, per_member = [], []
    for attribute, parameter in ensemble.individual.named_parameters():
        if attribute.replace("/", ".") in per_member_names:
            per_member.append(parameter)
        else:
            modulations.append(parameter)
    return modulations, per_member


def _group(
    parameters: list[nn.Parameter], lr: float, weight_decay: float, gamma_factor: float = 1.0
) -> dict[str, Any]:
    """Return a parameter group, with its rate at the start for :func:`check_rates`."""
    return {
        "params": parameters,
        "lr": lr,
        "weight_decay": weight_decay,
        "gamma_factor": gamma_factor,
        "planned_lr": float(lr),
    }


@functools.cache
def _watch_optimizers() -> None:
    """Check the rates at every step of every optimizer, once groups with a gamma exist."""
    register_optimizer_step_pre_hook(check_rates)


def check_rates(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Raise ValueError if the learning rates of an optimizer have lost gamma.

    A scheduler that multiplies keeps the ratio of the groups' rates. Code that sets one rate for
    all groups, such as ``OneCycleLR(optimizer, max_lr=0.1)``, removes gamma. A ratio that changes
    gradually, as with ``CosineAnnealingLR(eta_min=…)``, is reported once in a warning, and so are
    groups for SGD in an optimizer of the Adam kind.

    Args:
        optimizer: Any optimizer; groups that :func:`parameter_groups` did not make are ignored.
        args: Positional arguments of the step; not used.
        kwargs: Keyword arguments of the step; not used.
    """
    if torch.compiler.is_compiling():
        return
    shared: dict[str, Any] = {}
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor) and group["lr"].device.type != "cpu":
            return  # reading it would wait for the device, which a CUDA graph forbids
        if "full_lr" in group:
            shared = group
            # OneCycleLR keeps max_lr in each group. So a rate without gamma is found even if there
            # is no second group to compare with.
            has_factor = group["planned_lr"] != group["full_lr"]
            if has_factor and group.get("max_lr") == group["full_lr"]:
                raise _lost_gamma(group["full_lr"], group)
            if not group["fits_adam"] and isinstance(optimizer, ADAM_KIND):
                _warn_of_kind(optimizer)
        elif shared and "planned_lr" in group:
            _compare_rates(optimizer, shared, group)


def _warn_of_kind(optimizer: Optimizer) -> None:
    """Warn once that the groups of an optimizer of the Adam kind are for SGD."""
    if optimizer in _UNFIT:
        return
    _UNFIT.add(optimizer)
    name = type(optimizer).__name__
    warn(
        f"the parameter groups are for SGD, but the optimizer is {name}, which needs another "
        "learning rate of the shared parameters. Pass the class to parameter_groups: "
        f"{name}(ensemble.parameter_groups(…, optimizer=torch.optim.{name}))."
    )


def _compare_rates(optimizer: Optimizer, shared: dict[str, Any], group: dict[str, Any]) -> None:
    """Raise or warn if the ratio of two rates is neither that of the start nor that of gamma."""
    for key in ("planned_lr", "gamma_factor"):
        # Products instead of ratios, as rates may be 0.
        actual = shared["lr"] * group[key]
        expected = group["lr"] * shared[key]
        if abs(actual - expected) <= RATIO_TOLERANCE * expected:
            return
    if optimizer in _DRIFTED:
        return
    if shared["lr"] == group["lr"]:
        raise _lost_gamma(shared["lr"], shared)
    _DRIFTED.add(optimizer)
    warn(
        f"the learning rates are {float(shared['lr']):g} for shared parameters and "
        f"{float(group['lr']):g} for others, not in the ratio of the plan "
        f"({float(shared['planned_lr']):g} and {float(group['planned_lr']):g}), so gamma changes. "
        "Use a scheduler that multiplies (eta_min=0), or rates per group that are multiples of "
        "group['gamma_factor']."
    )


def _lost_gamma(rate: Any, group: dict[str, Any]) -> ValueError:
    """Return the error for a group of shared parameters with a rate that ignores gamma."""
    return ValueError(
        f"the learning rate of the shared parameters is set to {float(rate):g} without gamma "
        f"(factor {group['gamma_factor']:.4g}): a scheduler or a loop overwrites group['lr'] of "
        "all groups. Set rates per group, as in OneCycleLR(optimizer, "
        "max_lr=[lr * group['gamma_factor'] for group in optimizer.param_groups], …)."
    )
