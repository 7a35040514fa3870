r"""``embens.snapshots``: from one run of one network to an ensemble of separate networks.

Members are networks that the run passes by, or draws of a normal law around its path. With
:math:`T` steps, :math:`M` cycles and :math:`t \in (0, 1]` the part of a cycle that is done, the
rate is :math:`\eta` times

* ``"cosine"``: :math:`\frac12 (1 + \cos \pi t')`, with :math:`t'` one step behind; a member at the
  end of each cycle (snapshot ensembles, Huang et al. 2017);
* ``"triangular"``: down from 1 to 0.01 in half a cycle and up again; a member at each minimum (fast
  geometric ensembles, Garipov et al. 2018);
* ``"swag"``: 1. The start and the weights after every epoch have the running mean
  :math:`\bar\theta`, the variances :math:`\Sigma`, and the last :math:`K` deviations from the mean
  of their time as columns of :math:`D`; members are draws (Maddox et al. 2019)

  .. math:: \theta = \bar\theta + \tfrac{1}{\sqrt 2} \Sigma^{1/2} z_1
            + \tfrac{1}{\sqrt{2 (K - 1)}} D z_2, \qquad z_1, z_2 \sim N(0, 1)
"""

import functools
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import update_bn

from embens.checks import check_choice, check_members, check_whole, suggest
from embens.embedding.families import join
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.export import evaluating
from embens.ensemble.rates import MakeOptimizer
from embens.objective import Criterion
from embens.training import parallel, randomness
from embens.training.batches import batches_of, map_tensors
from embens.training.loop import fit

SCHEDULES = ("cosine", "triangular", "swag")
LOWEST = 0.01  # of triangular rates
PASSED_ON = (  # to fit
    "epochs batch_size lr weight_decay criterion optimizer seed checkpoint every progress"
).split()


@suggest()
def snapshots(  # noqa: D417
    reference: nn.Module,
    train: Any,
    members: int = 5,
    *,
    epochs: int,
    schedule: str = "cosine",
    rank: int = 20,
    batch_size: int = 128,
    lr: float = 0.01,
    weight_decay: float = 5e-4,
    criterion: Criterion | None = None,
    optimizer: MakeOptimizer | None = None,
    callbacks: Sequence[Any] = (),
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int | None = None,
    progress: bool | None = None,
) -> EmbeddedEnsemble:
    """Train a network once and return an ensemble of the networks on its way.

    The run is :func:`embens.fit` of an ensemble of one member, which callbacks see.

    Args:
        reference: where the run begins, copied; "triangular" and "swag" are for a trained one.
        train: tensors, a data set, or a loader that knows its length.
        members: how many; the run has a cycle of the rate for each.
        epochs: of the whole run, at least one for each member; for "swag", which draws any number
            of members, at least two.
        schedule: "cosine", "triangular" or "swag"; see :mod:`embens.training.snapshots`.
        rank: of "swag": :math:`K`, the deviations that are kept. The statistics of norm layers of
            its members are those of the train data.
        lr: the largest rate; this and all that is not named here are as for ``fit``.
        seed: of the run and of the draws.
        checkpoint: a folder; a run that was stopped goes on from there, members included.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> x = torch.randn(64, 2)
        >>> ensemble = snapshots(net, (x, (x[:, 0] > 0).long()), members=3, epochs=6, lr=0.1)
        >>> ensemble(x).shape
        torch.Size([3, 64, 2])
    """
    given = locals()
    check_members(members)
    check_choice("schedule", schedule, SCHEDULES)
    check_whole("rank", rank, 2)
    swag = schedule == "swag"
    least = 2 if swag else members
    if check_whole("epochs", epochs) < least:
        why = "a law needs two deviations" if swag else f"{members} members need a cycle each"
        raise ValueError(f"epochs: expected at least {least}, as {why}; got {epochs}")
    ensemble = join([reference])
    if parallel.join(next(ensemble.parameters()).device).size > 1:
        raise ValueError("snapshots keeps members in one process; run it without torchrun")
    batches = batches_of(train, batch_size, seed=seed)
    steps = epochs * len(batches)
    if not swag and steps < 2 * members:
        raise ValueError(
            f"train: a cycle has at least two steps; {members} members got {steps} steps (0: the "
            "loader does not know its length). Take more epochs or smaller batches."
        )
    course = Course(schedule, steps, members, rank)
    keeper = _Keeper(ensemble, course)
    fit(
        *(ensemble, train),
        scheduler=functools.partial(LambdaLR, lr_lambda=functools.partial(rate, course)),
        schedule_by="step",
        callbacks=(keeper, *callbacks),
        **{name: given[name] for name in PASSED_ON},
    )
    states = keeper.states(ensemble, seed)
    joined = join([reference] * members)
    joined.load_state_dict({name: torch.cat([s[name] for s in states]) for name in states[0]})
    if swag:
        device = next(joined.parameters()).device
        moved = ([map_tensors(lambda v: v.to(device), b.inputs)] for b in batches.epoch(0))
        bind = joined.register_forward_pre_hook(lambda _, x, __: joined.bind(*x), with_kwargs=True)
        with randomness.seeded(seed), evaluating(joined):  # to have their modes again at the end
            update_bn(moved, joined)
        bind.remove()
    return joined


class Course(NamedTuple):
    """How the rate goes through a run; checkpoints know it."""

    schedule: str
    steps: int
    members: int
    rank: int = 20

    def cycle(self, step: int) -> tuple[int, int]:
        """Return how many steps of its cycle are done with a step, and how many there are."""
        number = step * self.members // self.steps
        begin, end = (-(-k * self.steps // self.members) for k in (number, number + 1))
        return step + 1 - begin, end - begin


def rate(course: Course, step: int) -> float:
    """Return the factor of the rate at a step, counted from 0."""
    if course.schedule == "swag":
        return 1.0
    done, length = course.cycle(step)
    if course.schedule == "cosine":
        return (1 + math.cos(math.pi * (done - 1) / length)) / 2
    return LOWEST + (1 - LOWEST) * abs(1 - 2 * done / length)


class _Keeper:
    """A callback that keeps the network at the lowest rate of every cycle.

    For "swag" it keeps mean, variances (times their number) and deviations of the path instead.
    """

    def __init__(self, ensemble: EmbeddedEnsemble, course: Course):
        self.course = course
        self.state: dict[str, Any] = {"found": []}
        if course.schedule == "swag":
            start = parameters_to_vector(ensemble.parameters()).detach().cpu()
            self.state = {"count": 1, "mean": start, "squares": 0 * start, "deviations": []}

    def on_step(self, ensemble: EmbeddedEnsemble, record: dict[str, Any]) -> None:
        done, length = self.course.cycle(record["step"] - 1)
        lowest = {"cosine": length, "triangular": length // 2}.get(self.course.schedule)
        if done == lowest:
            self.state["found"].append(_copy(ensemble))

    def on_epoch(self, ensemble: EmbeddedEnsemble, record: dict[str, Any]) -> None:
        if self.course.schedule != "swag":
            return
        state, latest = self.state, parameters_to_vector(ensemble.parameters()).detach().cpu()
        state["count"] += 1
        before = latest - state["mean"]
        state["mean"] = state["mean"] + before / state["count"]
        state["deviations"] = [*state["deviations"], latest - state["mean"]][-self.course.rank :]
        state["squares"] = state["squares"] + before * state["deviations"][-1]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def states(self, ensemble: EmbeddedEnsemble, seed: int) -> list[dict[str, Tensor]]:
        """Return the states of ensembles of one member each."""
        if self.course.schedule != "swag":
            return self.state["found"]
        mean, columns = self.state["mean"], torch.stack(self.state["deviations"])
        stds, drawn = (self.state["squares"] / self.state["count"]).clamp(min=0).sqrt(), []
        for a in range(self.course.members):
            generator = torch.Generator().manual_seed(randomness.combine(seed, a))
            own = stds * torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
            weights = torch.randn(len(columns), generator=generator, dtype=mean.dtype)
            low = weights @ columns / math.sqrt(len(columns) - 1)
            numbers = (mean + (own + low) / math.sqrt(2)).to(next(ensemble.parameters()).device)
            vector_to_parameters(numbers, ensemble.parameters())
            drawn.append(_copy(ensemble))
        return drawn


def _copy(ensemble: EmbeddedEnsemble) -> dict[str, Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in ensemble.state_dict().items()}
