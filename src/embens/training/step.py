"""One step of ``fit``: forward, backward, update.

Losses are checked for NaN and infinity only every :data:`CHECK_INTERVAL` steps, because each check
waits for the device. A divergence is therefore noticed a few steps late, and the ensemble gets the
weights of the last epoch.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from embens.inference import floating_dtype
from embens.sources import note_dtypes, note_features
from embens.training import processes
from embens.training.batches import Minibatch
from embens.training.passes import explain_batch_norm
from embens.training.run import Run

CHECK_INTERVAL = 64
"""Steps between checks for losses that are not finite."""


def take_step(run: Run, minibatches: list[Minibatch]) -> None:
    """Make one step on the mean over the rows of the batches.

    Args:
        run: The run; its weights, counters and tally change.
        minibatches: One batch, or several whose gradients are accumulated.
    """
    for parameter in run.parameters:
        parameter.grad = None
    try:
        objective = _accumulate_gradients(run, minibatches)
    except (RuntimeError, ValueError) as error:
        if run.steps == 0:
            # Nothing is trained yet: undo what the pass has changed, such as norm statistics.
            run.ensemble.load_state_dict(run.good_weights)
        # The user's code may raise because values are not finite: then it is a divergence.
        run.check_objectives()
        if isinstance(error, RuntimeError):
            inputs = [batch.inputs for batch in minibatches]
            note_dtypes(error, inputs, floating_dtype(run.ensemble))
            note_features(error, minibatches[0].inputs, run.ensemble.reference)
        raise
    objective = _average_processes(run, minibatches, objective)
    scaler = run.passes.scaler
    scaler.unscale_(run.optimizer)
    run.notify("on_gradients")
    if run.gradient_norms is None:
        run.gradient_norms = (gradient_norm(run.shared), gradient_norm(run.individual))
    is_skipped = _update_weights(run, scaler)
    run.step += 1
    run.steps += 1
    if run.options.schedule_every == "step" and not is_skipped:
        run.scheduler.step()
    run.last_objective = objective
    run.unchecked_objectives.append(objective)
    if run.step % CHECK_INTERVAL == 0:
        run.check_objectives()


def _average_processes(run: Run, minibatches: list[Minibatch], objective: Tensor) -> Tensor:
    """Average gradients and objective over the processes of a run, weighted by rows."""
    if run.world.size == 1:
        return objective
    rows = sum(batch.rows for batch in minibatches)
    totals = [batch.total for batch in minibatches if batch.total is not None]
    total = sum(totals) if len(totals) == len(minibatches) else None
    return processes.average_(run.world, objective, run.parameters, rows, total)


def _update_weights(run: Run, scaler: torch.amp.GradScaler) -> bool:
    """Make a step of the optimizer; return whether the scaler of half precision skipped it."""
    if not scaler.is_enabled():
        run.optimizer.step()
        return False
    without_state = [p for p in run.parameters if not run.optimizer.state.get(p)]
    scale = scaler.get_scale()
    scaler.step(run.optimizer)
    scaler.update()
    is_skipped = scaler.get_scale() < scale  # lower after gradients that were not finite
    if is_skipped:
        # If torch's fused SGD skips its first step, momentum buffers stay uninitialised memory.
        for parameter in without_state:
            run.optimizer.state.pop(parameter, None)
    return is_skipped


def _accumulate_gradients(run: Run, minibatches: list[Minibatch]) -> Tensor:
    """Add the gradients of some batches, weighted by their rows; return their objective."""
    rows = sum(batch.rows for batch in minibatches)
    inspect = run.train.tensors is None  # tensors were checked before the first step
    objectives = []
    for batch in minibatches:
        if batch.weight is not None and run.world.size > 1:
            raise ValueError("sample weights need one process; got several, of torchrun.")
        weight = batch.rows / rows if rows > 0 else 1.0
        name = f"train: batch {run.step + 1}"
        try:
            objective, result = run.passes.train(batch, weight, name, inspect)
        except ValueError as error:
            explain_batch_norm(error, f"{name} has {batch.rows} rows")
            raise
        objectives.append(objective)
        # A small split batch has rows for fewer members.
        if result.losses is not None:
            run.last_members = len(result.losses)
        if batch.rows > 0:
            run.tally.add(result)
    return sum(objectives[1:], objectives[0])


def gradient_norm(parameters: Sequence[Tensor]) -> float:
    """Return the norm of all gradients together; NaN if there are none.

    Args:
        parameters: Parameters with or without a gradient.

    Example:
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> gradient_norm([weight])
        5.0
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return math.nan
    return float(torch.nn.utils.get_total_norm(gradients))
