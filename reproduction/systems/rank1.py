r"""Rank-1 Bayesian neural networks (Dusenberry et al. 2020).

A rank-1 BNN is a BatchEnsemble whose modulations are random. Each modulation of each member has a
trainable mean and standard deviation, and is drawn at every pass by reparametrisation,

.. math:: u = \mu + \sigma\,\varepsilon, \quad \varepsilon \sim N(0, 1), \qquad
          L = \sum_a L_a + \frac1n \mathrm{KL}(q \,\|\, p), \qquad p = N(1, s^2)

with :math:`n` training samples. Shared weights are point estimates with weight decay.

Differences from the paper: by default only hidden sites are modulated, not all layers. Means are
drawn from the prior and standard deviations start at :math:`s`. The KL divergence is summed over
members, as the losses are. There is no annealing of the KL term. Noise is shared by all samples of
a batch.
"""

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call

import embens
from embens import laws
from reproduction.systems.loop import Criterion


class Rank1(nn.Module):
    """Ensemble with normally distributed modulations, redrawn at every pass.

    Passes in evaluation mode are random as well. ``ensemble`` is the embedded ensemble at the
    means of the modulations.

    Args:
        reference: Network to embed; copied.
        members: Number of members.
        prior_std: Standard deviation s of the prior N(1, s²).
        sites: Sites of the modulations; see ``embens.embed``.
        generator: Source of the initial means.

    Shape:
        - input: ``(batch, …)``.
        - output: ``(member, batch, class)``.

    Example:
        >>> reference = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> network = Rank1(reference, members=2)
        >>> x = torch.ones(5, 4)
        >>> network(x).shape
        torch.Size([2, 5, 3])
        >>> torch.equal(network(x), network(x))
        False
    """

    def __init__(
        self,
        reference: nn.Module,
        members: int = 4,
        prior_std: float = 0.1,
        *,
        sites: str = "hidden",
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        if not prior_std > 0:
            raise ValueError(f"prior_std must be positive, got {prior_std}.")
        law = laws.Normal(1.0, prior_std)
        self.prior_std = prior_std
        self.ensemble = embens.embed(
            reference, members, pre=law, post=law, sites=sites, generator=generator
        )
        modulations = {id(parameter) for parameter in self.ensemble.individual_parameters()}
        # Parallel lists: the names of the means in the ensemble, and the log standard deviations.
        self.names: list[str] = []
        self.log_stds = nn.ParameterList()
        for name, parameter in self.ensemble.named_parameters():
            if id(parameter) in modulations:
                self.names.append(name)
                log_std = torch.full_like(parameter, math.log(prior_std), requires_grad=False)
                self.log_stds.append(nn.Parameter(log_std))

    @property
    def members(self) -> int:
        """Number of members."""
        return self.ensemble.members

    def posterior(self) -> dict[str, torch.distributions.Normal]:
        """Return the distribution of the modulations, by the name of the mean in ``ensemble``."""
        distributions = {}
        for name, log_std in zip(self.names, self.log_stds, strict=True):
            mean = self.ensemble.get_parameter(name)
            distributions[name] = torch.distributions.Normal(mean, log_std.exp())
        return distributions

    def forward(self, x: Tensor) -> Tensor:
        """Draw modulations from torch's global generator and return the outputs.

        Args:
            x: Inputs, ``(batch, …)``.

        Returns:
            Outputs, ``(member, batch, class)``.
        """
        draws = {name: normal.rsample() for name, normal in self.posterior().items()}
        return functional_call(self.ensemble, draws, (x,))

    def kl(self) -> Tensor:
        """Return the KL divergence from the prior, summed over modulations and members."""
        divergences = []
        for name, log_std in zip(self.names, self.log_stds, strict=True):
            mean = self.ensemble.get_parameter(name)
            log_ratio = log_std - math.log(self.prior_std)
            distance = ((mean - 1) / self.prior_std).square()
            divergence = ((2 * log_ratio).exp() + distance - 1) / 2 - log_ratio
            divergences.append(divergence.sum())
        return torch.stack(divergences).sum()

    def loss(
        self, inputs: Tensor, target: Tensor, rows: int, criterion: Criterion | None = None
    ) -> Tensor:
        """Return the training loss: the sum of the members' losses plus KL / rows.

        Args:
            inputs: Inputs of a batch, ``(batch, …)``.
            target: Targets of the batch.
            rows: Number of samples in the training data.
            criterion: Loss of one member; see ``embens.objective``.
        """
        return embens.objective(self(inputs), target, criterion) + self.kl() / rows

    def parameter_groups(self, lr: float, weight_decay: float = 5e-4) -> list[dict]:
        """Return the parameter groups for SGD, with the ensemble's learning rates.

        Standard deviations train at the rate of the modulations, without weight decay.

        Args:
            lr: Learning rate; see ``EmbeddedEnsemble.parameter_groups``.
            weight_decay: Weight decay of shared parameters.
        """
        groups = self.ensemble.parameter_groups(lr=lr, weight_decay=weight_decay)
        groups.append({"params": list(self.log_stds), "lr": lr, "weight_decay": 0.0})
        return groups
