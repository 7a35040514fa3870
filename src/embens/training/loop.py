"""``embens.fit``: the plain loop around :func:`embens.objective`, and what belongs around that."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import torch

from embens.checks import Gamma, check_whole, suggest
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.export import evaluating
from embens.ensemble.rates import MakeOptimizer
from embens.objective import BatchKind, Criterion, Of
from embens.training import randomness
from embens.training.each import EachMember
from embens.training.history import History
from embens.training.settings import MakeScheduler, Metric, Settings
from embens.training.trainer import Trainer

_NO_SETTINGS = "ensemble train validation callbacks checkpoint every progress".split()


@suggest()
def fit(
    ensemble: EmbeddedEnsemble,
    train: Any,
    validation: Any = None,
    *,
    epochs: int,
    batch_size: int = 128,
    lr: float = 0.01,
    modulation_lr: float | None = None,
    weight_decay: float = 5e-4,
    modulation_weight_decay: float = 0.0,
    gamma: Gamma = None,
    criterion: Criterion | None = None,
    batch: BatchKind = "same",
    of: Of = "members",
    chunk: int | None = None,
    optimizer: MakeOptimizer | None = None,
    scheduler: MakeScheduler | None = None,
    callbacks: Sequence[Any] = (),
    metric: Metric = None,
    maximise: bool | None = None,
    patience: int | None = None,
    keep: str = "best",
    seed: int = 0,
    clip: float | None = None,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    compile: bool = False,
    schedule_by: Literal["epoch", "step"] = "epoch",
    each: EachMember | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int | None = None,
    progress: bool | None = None,
) -> History:
    r"""Train an ensemble in place.

    .. math::
        \Delta u_a = -\eta_u \frac{\partial L_a}{\partial u_a}, \qquad
        \Delta w = -\eta_w \frac{\gamma(M)}{M} \sum_a \frac{\partial L_a}{\partial w}

    The result depends on the arguments and the ensemble's weights alone; the global random
    generators are left as they were. Under ``torchrun`` all processes share each batch, and the
    result is that of one process, to rounding. If the run diverges, ``Divergence`` is raised and
    the ensemble has its last good weights.

    Args:
        ensemble: of any family; ``embens.independent(reference, members)`` are separate networks.
        train: tensors ``(inputs, targets)``, a ``Dataset`` of such pairs, or a ``DataLoader``;
            several inputs are ``((x, z), y)`` or ``({"a": x, "b": z}, y)``, with the names that the
            reference gives them. Numbers that are not finite are refused, unless the network and
            the criterion make finite losses of them.
        validation: the same, to be evaluated after each epoch.
        epochs: how many.
        batch_size: samples in a step, in all processes together; a loader has its own.
        lr: rate :math:`\eta_w`; see :meth:`~embens.EmbeddedEnsemble.parameter_groups` for what
            optimizers of the Adam kind make of gamma.
        modulation_lr: rate of the individual parameters; None: ``lr``.
        weight_decay: of the shared parameters.
        modulation_weight_decay: of the individual parameters.
        gamma: factor of the shared rate: a number, a function of M, or None for the natural value.
        criterion: a function of one member's outputs and the target; None: by the target, see
            :func:`embens.objective`.
        batch: "same": all members see the batch; "own": each has its own, drawn separately;
            "split": row i goes to member i mod M. In networks with an input for each member
            (``embens.mimo``) it is "own": tensors, data sets and the batches of a loader are dealt
            out to every member in another order.
        of: "members", or "mean" or "moments" for the loss of all members together; see
            :func:`embens.objective`.
        chunk: how many members to backpropagate at a time, to save memory; None: all.
        optimizer: a function from parameter groups to an optimizer, such as
            ``torch.optim.AdamW``; None: SGD with momentum 0.9.
        scheduler: a function from the optimizer to a torch scheduler, which makes a step after each
            epoch (``ReduceLROnPlateau`` by the metric; choose its mode for it); None: the
            paper's, constant for half the epochs, then linearly to 1 % (``linear_decay``).
        callbacks: objects with any of ``on_step``, ``on_epoch`` and ``on_end``, or functions of the
            ensemble and an epoch's record; see :mod:`embens.training.callbacks`, which has ``CSV``
            and ``Log``.
        metric: what is best on the validation data: "accuracy" (of the ensemble), "loss" (mean of
            the members'), or a function of ``(outputs, target)`` such as ``embens.metrics.nll``;
            None: "accuracy" for classes, otherwise "loss".
        maximise: whether more is better, for a function of your own.
        patience: stop after so many epochs without a better metric.
        keep: "best": with validation data, end with the weights of the best epoch; "last".
        seed: of the order of samples, and of whatever is random in the network and the data set.
        clip: the largest norm of a member's gradient, its own and γ/M times the shared one
            (:func:`embens.training.clip_gradients_`), so that it means the same for any M.
        accumulate: so many batches make a step, on the mean over their rows.
        autocast: ``torch.bfloat16``, or ``torch.float16`` with a gradient scaler, for the passes
            through the network; losses are computed in full precision.
        compile: run the network's steps through ``torch.compile``.
        schedule_by: "step": the scheduler makes a step after each step of the optimizer.
        each: rates, label smoothing, row weights and targets of each member's own, as an
            ``embens.EachMember``.
        checkpoint: a folder to keep checkpoints of this run in. If it has one, the run goes on
            from there and ends as if it had never stopped (a loader: from the last epoch). A
            checkpoint of another run (other arguments, laws or shapes) is refused; the data are
            compared by their number of rows alone. To train a finished ensemble further, call
            ``fit`` again with another folder.
        every: steps between checkpoints; None: one after each epoch.
        progress: show a progress bar; None: if the error stream is a terminal.

    Example:
        >>> from embens import batch_ensemble
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
        >>> history = fit(batch_ensemble(net, 4), (x, (x[:, 0] > 0).long()), epochs=20, lr=0.1)
        >>> history.epochs[-1]["ensemble_accuracy"] > 0.9
        True
    """
    given = locals()
    if not isinstance(ensemble, EmbeddedEnsemble):
        kind = type(ensemble).__name__
        hint = "Embed it first: embens.embed(network, members=…), or embens.independent(network, 1)"
        if kind in ("DistributedDataParallel", "DataParallel"):
            hint = "Pass its .module: fit itself averages over processes under torchrun"
        raise TypeError(f"fit expects an ensemble; got {kind}. {hint}.")
    if not any(p.requires_grad for p in ensemble.parameters()):
        raise ValueError("the ensemble has no parameter that requires a gradient")
    if ensemble.plan.heads is not None and batch == "same":
        given["batch"] = "own"
    settings = Settings(**{name: given[name] for name in given if name not in _NO_SETTINGS})
    settings.check(validation is not None)
    if every is not None:
        check_whole("every", every)
    with evaluating(ensemble), randomness.seeded(seed), torch.enable_grad():  # modes are kept
        run = Trainer(ensemble, train, validation, settings, callbacks, progress)
        return run.train(checkpoint, every)
