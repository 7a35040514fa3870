r"""Bayesian deep ensembles (NTKGP; He, Lakshminarayanan & Teh 2020).

Each member is a network plus a fixed random function,

.. math:: \tilde f(x) = f(x; \theta) + \delta(x), \qquad
          \delta(x) = J(x; \theta^0)\,\theta^*, \qquad \theta^0, \theta^* \sim N(0, 1)

where :math:`J` is the Jacobian of the network at its initial parameters :math:`\theta^0`, and
:math:`\theta^*` is zero in the last layer. At infinite width :math:`f` has the covariance
:math:`\Sigma` (NNGP) at initialisation and :math:`\delta` has :math:`\Theta - \Sigma`, so
:math:`\tilde f` is a draw of a Gaussian process with the NTK :math:`\Theta`. Training on noisy
targets :math:`\tilde y_i = y_i + \sigma \epsilon_i` with the loss

.. math:: \frac{1}{2 \sigma^2} \sum_i (\tilde y_i - \tilde f(x_i))^2
          + \frac12 \|\theta - \theta^0\|^2

then turns it into a draw of the posterior of this process.

Differences from the paper: only its "NTKGP-param" method for regression with a known noise level,
and only networks in the NTK parametrization. The loss is divided by the number of samples.
"""

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from embens.networks import Parametrized
from reproduction.systems.layers import last_layer
from reproduction.systems.loop import Data, Rate, Recipe, constant, train
from reproduction.systems.separate import SeparateNetworks


class NTKGPMember(nn.Module):
    """Network plus the fixed function δ.

    Args:
        reference: Network of ``embens.networks`` layers with ``parametrization="ntk"``. It is
            copied, and the parameters of the copy are drawn from N(0, 1).
        last: Name of the last layer. None: the last one registered.
        generator: Source of the initial parameters and of the direction.

    Attributes:
        network: The trained network f.
        initial: A frozen copy of f that holds the initial parameters θ⁰.
        direction: A frozen copy of f that holds θ*.

    Shape:
        - input: ``(batch, …)``.
        - output: ``(batch, class)``.

    Example:
        >>> from embens import networks
        >>> member = NTKGPMember(networks.mlp(inputs=3, width=16, depth=2, outputs=1))
        >>> member(torch.randn(5, 3)).shape
        torch.Size([5, 1])
    """

    def __init__(
        self,
        reference: nn.Module,
        *,
        last: str | None = None,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        _check_parametrization(reference)
        if last is None:
            last = last_layer(reference)
        self.network = copy.deepcopy(reference)
        self.direction = copy.deepcopy(reference).requires_grad_(False)
        _draw_(self.network, generator)
        _draw_(self.direction, generator)
        for parameter in self.direction.get_submodule(last).parameters():
            parameter.zero_()
        # After the draw, since θ⁰ is where training starts.
        self.initial = copy.deepcopy(self.network).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return f(x) + δ(x), ``(batch, class)``."""
        return self.network(x) + self.delta(x)

    def delta(self, x: Tensor) -> Tensor:
        """Return δ(x) = J(x; θ⁰) θ*, ``(batch, class)``, without gradients."""
        names = [name for name, _ in self.initial.named_parameters()]

        def evaluate(*parameters: Tensor) -> Tensor:
            return functional_call(self.initial, dict(zip(names, parameters, strict=True)), (x,))

        start = tuple(self.initial.parameters())
        direction = tuple(self.direction.parameters())
        # Two reverse passes instead of forward mode: every activation supports them.
        _, product = torch.autograd.functional.jvp(evaluate, start, direction)
        assert isinstance(product, Tensor)
        return product

    def penalty(self) -> Tensor:
        """Return ½ ‖θ − θ⁰‖², the negative log-prior up to a constant."""
        total = torch.zeros((), device=next(self.parameters()).device)
        for parameter, start in zip(
            self.network.parameters(), self.initial.parameters(), strict=True
        ):
            total = total + (parameter - start).square().sum() / 2
        return total

    def loss(self, inputs: Tensor, target: Tensor, *, noise_std: float, rows: int) -> Tensor:
        """Return the training loss of a batch, divided by the number of samples.

        Args:
            inputs: Inputs of the batch, ``(batch, …)``.
            target: Noisy targets of the batch, ``(batch, class)``.
            noise_std: Standard deviation σ of the noise.
            rows: Number of samples in the training data.
        """
        squares = (self(inputs) - target).square().sum(-1).mean()
        return squares / (2 * noise_std**2) + self.penalty() / rows


def bayesian_deep_ensemble(
    reference: nn.Module,
    data: Data,
    members: int,
    recipe: Recipe,
    *,
    noise_std: float,
    rate: Rate = constant,
) -> SeparateNetworks:
    """Train members to draws of the GP posterior with the NTK.

    Args:
        reference: Network of ``embens.networks`` layers with ``parametrization="ntk"``.
        data: Inputs and targets ``(row, class)``.
        members: Number of members.
        recipe: Hyperparameters; its weight decay is not used, because the penalty replaces it. The
            seed also determines initial parameters, directions and noise.
        noise_std: Standard deviation σ of the noise on the targets.
        rate: Factor of the learning rate at each step.

    Returns:
        Ensemble of trained :class:`NTKGPMember` networks.

    Example:
        >>> from embens import networks
        >>> reference = networks.mlp(inputs=3, width=16, depth=1, outputs=1)
        >>> data = (torch.randn(20, 3), torch.randn(20, 1))
        >>> recipe = Recipe(epochs=3, lr=0.01)
        >>> ensemble = bayesian_deep_ensemble(reference, data, 2, recipe, noise_std=0.5)
        >>> ensemble(data[0]).shape
        torch.Size([2, 20, 1])
    """
    if not noise_std > 0:
        raise ValueError(f"noise_std must be positive, got {noise_std}.")
    inputs, target = data
    generator = torch.Generator().manual_seed(recipe.seed)
    networks = []
    for _ in range(members):
        member = NTKGPMember(reference, generator=generator)
        noise = torch.randn(target.shape, generator=generator, dtype=target.dtype)
        noisy_target = target + noise_std * noise.to(target.device)
        _train_member(member, (inputs, noisy_target), recipe, noise_std, rate)
        networks.append(member)
    return SeparateNetworks(networks)


def _train_member(
    member: NTKGPMember, data: Data, recipe: Recipe, noise_std: float, rate: Rate
) -> None:
    def loss(inputs: Tensor, target: Tensor) -> Tensor:
        return member.loss(inputs, target, noise_std=noise_std, rows=len(data[1]))

    optimizer = replace(recipe, weight_decay=0.0).optimizer(member.network.parameters())
    train(loss, optimizer, data, recipe, rate=rate)


@torch.no_grad()
def _draw_(network: nn.Module, generator: torch.Generator | None) -> None:
    """Draw all parameters of a network from N(0, 1)."""
    for parameter in network.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.copy_(values)


def _check_parametrization(network: nn.Module) -> None:
    for name, module in network.named_modules():
        has_parameters = len(list(module.parameters(recurse=False))) > 0
        if not has_parameters:
            continue
        if not isinstance(module, Parametrized) or module.parametrization != "ntk":
            raise ValueError(
                f"layer {name!r} must be an embens.networks layer with parametrization='ntk', "
                f"got {module}."
            )
