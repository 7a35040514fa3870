r"""Ensembles from a single training run: snapshots, fast geometric ensembles, SWAG.

The run has :math:`T` steps in :math:`M` cycles of the learning rate. With :math:`i = 1, \dots, c`
the step within a cycle of length :math:`c`, the rate is :math:`\eta` times

* snapshot ensembles (Huang et al. 2017): :math:`\frac12 (1 + \cos(\pi (i - 1) / c))`. A member is
  the network at the end of each cycle.
* fast geometric ensembles (Garipov et al. 2018): linearly from 1 down to 0.01 in the first half of
  the cycle, and up again in the second. A member is the network at each minimum. The run starts
  from a trained network.
* SWAG (Maddox et al. 2019): 1. The run starts from a trained network. Members are draws from a
  normal distribution fitted to the weights at the end of each epoch:

  .. math:: \theta = \bar\theta + \tfrac{1}{\sqrt 2} \Sigma^{1/2} z_1
            + \tfrac{1}{\sqrt{2 (K - 1)}} D z_2, \qquad z_1, z_2 \sim N(0, 1)

  with the running mean :math:`\bar\theta`, the diagonal of variances :math:`\Sigma`, and the last
  :math:`K` deviations from the running mean as the columns of :math:`D`. Statistics of batch norm
  are recomputed for each draw.

Differences from the papers: cycles may differ in length by one step when M does not divide T. The
lowest rate of fast geometric ensembles is a fixed fraction of the highest.
"""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import update_bn

from reproduction.systems.loop import Data, Rate, Recipe, constant, train_network
from reproduction.systems.separate import SeparateNetworks

LOWEST_RATE = 0.01
"""Lowest factor of the learning rate in a triangular cycle."""


def snapshot_ensemble(
    network: nn.Module, data: Data, members: int, recipe: Recipe
) -> SeparateNetworks:
    """Train one network with cosine cycles and keep it at the end of each.

    Args:
        network: Where the run starts; copied.
        data: Training inputs and targets.
        members: Number of cycles and members.
        recipe: Hyperparameters of the whole run; ``lr`` is the highest rate.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> x = torch.randn(64, 2)
        >>> data = (x, (x[:, 0] > 0).long())
        >>> snapshot_ensemble(network, data, 3, Recipe(epochs=6, batch_size=16))(x).shape
        torch.Size([3, 64, 2])
    """

    def rate(step: int, steps: int) -> float:
        position, length = cycle_position(step, steps, members)
        return cosine_rate(position, length)

    def is_end_of_cycle(position: int, length: int) -> bool:
        return position == length

    return _keep_networks(network, data, members, recipe, rate, is_end_of_cycle)


def fast_geometric_ensemble(
    network: nn.Module, data: Data, members: int, recipe: Recipe
) -> SeparateNetworks:
    """Continue training with triangular cycles and keep the network at each minimum.

    Args:
        network: Trained network, where the run starts; copied.
        data: Training inputs and targets.
        members: Number of cycles and members.
        recipe: Hyperparameters of the whole run; ``lr`` is the highest rate.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> x = torch.randn(64, 2)
        >>> data = (x, (x[:, 0] > 0).long())
        >>> fast_geometric_ensemble(network, data, 3, Recipe(epochs=6, batch_size=16))(x).shape
        torch.Size([3, 64, 2])
    """

    def rate(step: int, steps: int) -> float:
        position, length = cycle_position(step, steps, members)
        return triangular_rate(position, length)

    def is_middle_of_cycle(position: int, length: int) -> bool:
        return position == length // 2

    return _keep_networks(network, data, members, recipe, rate, is_middle_of_cycle)


def cycle_position(step: int, steps: int, cycles: int) -> tuple[int, int]:
    """Return the position of a step in its cycle, from 1, and the length of the cycle.

    Args:
        step: Step of the run, from 0.
        steps: Number of steps of the run.
        cycles: Number of cycles, of equal length up to one step.

    Example:
        >>> [cycle_position(step, steps=5, cycles=2) for step in range(5)]
        [(1, 3), (2, 3), (3, 3), (1, 2), (2, 2)]
    """
    cycle = step * cycles // steps
    begin = math.ceil(cycle * steps / cycles)
    end = math.ceil((cycle + 1) * steps / cycles)
    return step + 1 - begin, end - begin


def cosine_rate(position: int, length: int) -> float:
    """Return the factor of the learning rate in a cosine cycle.

    Args:
        position: Position in the cycle, from 1.
        length: Length of the cycle.
    """
    return (1 + math.cos(math.pi * (position - 1) / length)) / 2


def triangular_rate(position: int, length: int) -> float:
    """Return the factor of the learning rate in a triangular cycle.

    Args:
        position: Position in the cycle, from 1.
        length: Length of the cycle.
    """
    return LOWEST_RATE + (1 - LOWEST_RATE) * abs(1 - 2 * position / length)


def _keep_networks(
    network: nn.Module,
    data: Data,
    members: int,
    recipe: Recipe,
    rate: Rate,
    is_kept: Callable[[int, int], bool],
) -> SeparateNetworks:
    """Train a copy of a network and keep copies at selected positions of the cycles."""
    steps = recipe.steps(len(data[1]))
    if steps < 2 * members:
        raise ValueError(
            f"each of the {members} cycles needs at least two steps, got {steps} steps in all; "
            "use more epochs or smaller batches."
        )
    network = copy.deepcopy(network)
    snapshots = []

    def keep(finished_steps: int) -> None:
        position, length = cycle_position(finished_steps - 1, steps, members)
        if is_kept(position, length):
            snapshots.append(copy.deepcopy(network))

    train_network(network, data, recipe, rate=rate, after_step=keep)
    ensemble = SeparateNetworks(snapshots)
    ensemble.zero_grad()
    return ensemble


class WeightMoments:
    """Normal distribution fitted to a sequence of weight vectors.

    Args:
        weights: First vector of the sequence.
        rank: Number of deviations to keep, K.

    Attributes:
        mean: Mean of the sequence.
        deviations: The last K differences between a vector and the mean up to that vector.
    """

    def __init__(self, weights: Tensor, rank: int):
        self.rank = rank
        self.count = 1
        self.mean = weights.clone()
        self.deviations: list[Tensor] = []
        self._sum_of_squares = torch.zeros_like(weights)

    @property
    def variance(self) -> Tensor:
        """Variance of each weight over the sequence."""
        # Rounding can make a sum that is nearly zero negative.
        return self._sum_of_squares.clamp(min=0) / self.count

    def update(self, weights: Tensor) -> None:
        """Add a vector to the sequence."""
        # Welford's algorithm: the difference of the second moment and the squared mean would
        # lose most digits when weights hardly move.
        self.count += 1
        before = weights - self.mean
        self.mean = self.mean + before / self.count
        after = weights - self.mean
        self._sum_of_squares = self._sum_of_squares + before * after
        self.deviations.append(after)
        self.deviations = self.deviations[-self.rank :]

    def sample(self, generator: torch.Generator) -> Tensor:
        """Draw a weight vector; half of the covariance is diagonal, half of low rank."""
        mean = self.mean
        columns = torch.stack(self.deviations)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
        weights = torch.randn(len(columns), generator=generator, dtype=mean.dtype).to(mean.device)
        diagonal = self.variance.sqrt() * noise
        low_rank = weights @ columns / math.sqrt(len(columns) - 1)
        return mean + (diagonal + low_rank) / math.sqrt(2)


def swag(
    network: nn.Module, data: Data, members: int, recipe: Recipe, *, rank: int = 20
) -> SeparateNetworks:
    """Continue training at a constant rate, fit a normal distribution, and draw members.

    Args:
        network: Trained network, where the run starts; copied.
        data: Training inputs and targets.
        members: Number of draws.
        recipe: Hyperparameters of the run, with at least two epochs. The seed also determines the
            draws.
        rank: Number of deviations to keep, K, at least 2.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> x = torch.randn(64, 2)
        >>> data = (x, (x[:, 0] > 0).long())
        >>> swag(network, data, 3, Recipe(epochs=4, batch_size=16))(x).shape
        torch.Size([3, 64, 2])
    """
    if recipe.epochs < 2:
        raise ValueError(f"epochs must be at least 2 to have two deviations, got {recipe.epochs}.")
    if rank < 2:
        raise ValueError(f"rank must be at least 2, got {rank}.")
    network = copy.deepcopy(network)
    moments = WeightMoments(parameters_to_vector(network.parameters()).detach(), rank)
    steps_per_epoch = recipe.steps(len(data[1])) // recipe.epochs

    def collect(finished_steps: int) -> None:
        if finished_steps % steps_per_epoch == 0:
            moments.update(parameters_to_vector(network.parameters()).detach())

    train_network(network, data, recipe, rate=constant, after_step=collect)
    network.zero_grad()
    generator = torch.Generator().manual_seed(recipe.seed)
    inputs = data[0].to(moments.mean.device)
    networks = []
    for _ in range(members):
        member = copy.deepcopy(network)
        vector_to_parameters(moments.sample(generator), member.parameters())
        update_bn(inputs.split(recipe.batch_size), member)
        networks.append(member)
    return SeparateNetworks(networks)
