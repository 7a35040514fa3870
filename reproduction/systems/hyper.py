r"""Ensembles over hyperparameters (Wenzel et al. 2020) and greedy selection (Caruana et al. 2004).

* Hyper-deep ensembles: networks that differ in their hyperparameters and in their initialisation.
  Candidates with random hyperparameters are trained from one initialisation, and a greedy selection
  on held-out data keeps the best combination. Each distinct choice is trained again from several
  initialisations, and a second selection makes the ensemble.
* Hyper-batch ensembles: members of one embedded ensemble that differ in their hyperparameters.

Differences from the paper: dropout rates do not vary. The greedy selection makes a fixed number of
choices instead of stopping at the first without an improvement. In a hyper-batch ensemble the
members' hyperparameters are given and fixed; the paper adapts them in training with a
hyperparameter-conditional network. Shared weights see the sum of the members' losses.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import embens
from embens import metrics
from reproduction.systems.loop import Data, Recipe, train, train_network
from reproduction.systems.separate import SeparateNetworks, redraw

Metric = Callable[[Tensor, Tensor], Tensor]
"""Score of an ensemble, lower is better: a function of ``(member, batch, class)`` and targets."""


def select(outputs: Tensor, target: Tensor, size: int, metric: Metric | None = None) -> list[int]:
    """Choose members greedily, with replacement.

    Each step adds the member that makes the ensemble of all choices so far best. Under a metric
    that is convex in the mean prediction, such as the default ones, the choice is never worse than
    the best single member.

    Args:
        outputs: Outputs of the candidates on held-out data, ``(member, batch, class)``.
        target: Targets of the held-out data.
        size: Number of choices; a member may be chosen several times.
        metric: Score to minimise, for example ``embens.metrics.brier``. None: log loss of the mean
            probability for integer targets, squared error of the mean output otherwise.

    Returns:
        Indices of the chosen members, in the order of the choices. Of equally good members the
        first is chosen.

    Example:
        >>> target = torch.tensor([0.0, 0.0])
        >>> outputs = torch.tensor([[[3.0], [3.0]], [[1.0], [1.0]], [[-1.5], [-1.5]]])
        >>> select(outputs, target, size=3)
        [1, 2, 1]
    """
    if size < 1:
        raise ValueError(f"size must be a positive integer, got {size}.")
    if not outputs.isfinite().all():
        raise ValueError("outputs must be finite, got NaN or infinite values.")
    if metric is None and target.is_floating_point():
        metric = squared_error
    elif metric is None:
        metric = metrics.nll
    # Ties and small differences are decided in double precision.
    outputs = outputs.double()
    choices: list[int] = []
    for _ in range(size):
        scores = [float(metric(outputs[[*choices, a]], target)) for a in range(len(outputs))]
        if any(math.isnan(score) for score in scores):
            raise ValueError("metric must return numbers, got NaN.")
        choices.append(scores.index(min(scores)))
    return choices


def squared_error(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of the mean output.

    Args:
        outputs: Outputs, ``(member, batch, class)``.
        target: Targets, ``(batch, class)`` or ``(batch,)`` for one class.
    """
    mean = outputs.mean(0)
    return (mean - target.reshape(mean.shape)).square().mean()


def random_recipes(
    recipe: Recipe, count: int, *, spread: float = 10.0, generator: torch.Generator | None = None
) -> list[Recipe]:
    """Draw hyperparameters around a recipe.

    Learning rate and weight decay are multiplied by log-uniform factors between ``1 / spread`` and
    ``spread``; label smoothing is uniform on [0, 0.2].

    Args:
        recipe: Centre of the search.
        count: Number of recipes.
        spread: Largest factor.
        generator: Source of randomness.

    Example:
        >>> recipes = random_recipes(Recipe(epochs=3, lr=0.1), 5)
        >>> all(0.01 <= recipe.lr <= 1.0 for recipe in recipes)
        True
    """
    recipes = []
    for _ in range(count):
        lr_draw, decay_draw, smoothing_draw = torch.rand(3, generator=generator).tolist()
        varied = replace(
            recipe,
            lr=recipe.lr * spread ** (2 * lr_draw - 1),
            weight_decay=recipe.weight_decay * spread ** (2 * decay_draw - 1),
            label_smoothing=0.2 * smoothing_draw,
        )
        recipes.append(varied)
    return recipes


def hyper_deep_ensemble(
    reference: nn.Module,
    train_data: Data,
    validation_data: Data,
    members: int,
    recipes: Sequence[Recipe],
    *,
    generator: torch.Generator | None = None,
) -> SeparateNetworks:
    """Train networks with different hyperparameters and select the best combination.

    Args:
        reference: Network whose initialisation all candidates of the first round share; copied.
        train_data: Training inputs and targets.
        validation_data: Held-out inputs and targets, for the two selections.
        members: Number of members.
        recipes: Hyperparameters of the candidates; see :func:`random_recipes`.
        generator: Source of the initialisations in the second round.

    Returns:
        Ensemble of the chosen networks; a network may occur several times.

    Example:
        >>> reference = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x = torch.randn(60, 2)
        >>> data = (x, (x[:, 0] > 0).long())
        >>> recipes = random_recipes(Recipe(epochs=2, batch_size=20), 3)
        >>> hyper_deep_ensemble(reference, data, data, 2, recipes)(x).shape
        torch.Size([2, 60, 2])
    """
    candidates = []
    for recipe in recipes:
        network = copy.deepcopy(reference)
        train_network(network, train_data, recipe)
        candidates.append(network)
    choices = _select_networks(candidates, validation_data, members)

    stratified = []
    for index in sorted(set(choices)):
        for network in redraw(reference, members, generator):
            train_network(network, train_data, recipes[index])
            stratified.append(network)
    choices = _select_networks(stratified, validation_data, members)
    return SeparateNetworks([stratified[index] for index in choices])


@torch.no_grad()
def _select_networks(networks: list[nn.Module], data: Data, size: int) -> list[int]:
    inputs, target = data
    ensemble = SeparateNetworks(networks).eval()
    device = next(ensemble.parameters()).device
    return select(ensemble(inputs.to(device)), target.to(device), size)


@dataclass(frozen=True)
class MemberSettings:
    """Hyperparameters of the members of an embedded ensemble, one value per member.

    Attributes:
        rates: Factors of the learning rate of individual parameters.
        weight_decay: Weight decay of individual parameters.
        label_smoothing: Label smoothing of cross-entropy.

    Example:
        >>> MemberSettings(rates=(1.0, 0.3), weight_decay=(0.0, 0.01), label_smoothing=(0.0, 0.1))
        MemberSettings(rates=(1.0, 0.3), weight_decay=(0.0, 0.01), label_smoothing=(0.0, 0.1))
    """

    rates: Sequence[float]
    weight_decay: Sequence[float]
    label_smoothing: Sequence[float]


def hyper_batch_ensemble(
    ensemble: embens.EmbeddedEnsemble, data: Data, recipe: Recipe, settings: MemberSettings
) -> None:
    """Train an embedded ensemble for classification with per-member hyperparameters, in place.

    Args:
        ensemble: Ensemble whose individual parameters are modulations, such as a BatchEnsemble.
        data: Training inputs and class indices.
        recipe: Hyperparameters of the run and of the shared parameters.
        settings: Hyperparameters of the members.

    Example:
        >>> reference = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> ensemble = embens.batch_ensemble(reference, members=2)
        >>> x = torch.randn(60, 2)
        >>> settings = MemberSettings((1.0, 0.3), (0.0, 0.01), (0.0, 0.1))
        >>> recipe = Recipe(epochs=2, lr=0.01)
        >>> hyper_batch_ensemble(ensemble, (x, (x[:, 0] > 0).long()), recipe, settings)
    """
    for name, values in vars(settings).items():
        if len(values) != ensemble.members:
            raise ValueError(
                f"{name} must have one value per member ({ensemble.members}), got {len(values)}."
            )
    ensemble.train()
    loss = partial(_sum_of_losses, ensemble, settings)
    # A factor of the gradient is a factor of the learning rate, since SGD is linear in it.
    handles = []
    for parameter in ensemble.individual_parameters():
        factors = torch.tensor(settings.rates, dtype=parameter.dtype, device=parameter.device)
        factors = factors.view(-1, *[1] * (parameter.dim() - 1))
        handles.append(parameter.register_hook(partial(torch.mul, factors)))
    groups = ensemble.parameter_groups(lr=recipe.lr, weight_decay=recipe.weight_decay)
    try:
        train(loss, recipe.optimizer(groups), data, recipe)
    finally:
        for handle in handles:
            handle.remove()


def _sum_of_losses(
    ensemble: embens.EmbeddedEnsemble, settings: MemberSettings, inputs: Tensor, target: Tensor
) -> Tensor:
    """Return the members' losses, each with its label smoothing and weight decay, as a sum."""
    individual = list(ensemble.individual_parameters())
    outputs = ensemble(inputs)
    total = outputs.new_zeros(())
    for a in range(ensemble.members):
        criterion = partial(F.cross_entropy, label_smoothing=settings.label_smoothing[a])
        total = total + embens.objective(outputs[a : a + 1], target, criterion)
        for parameter in individual:
            total = total + settings.weight_decay[a] * parameter[a].square().sum() / 2
    return total
