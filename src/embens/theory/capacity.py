r"""Capacity: how many members fit into a network, in the linearised model.

Averaging :math:`M` members divides the variance over initialisations by :math:`M`. Sharing weights
adds an error, because at finite width kernels between members are random
(:mod:`embens.theory.interference`). This module computes both and compares them.

The weights of layer :math:`m` have the tangent kernel :math:`T^m`, within and between members. Its
random part is modelled by :math:`n_m` normal features,

.. math::
    \hat\Theta_{ab} = \frac\gamma M \sum_m \hat T^m_{ab} + \delta_{ab}\, \Theta^{ind}_a , \qquad
    \hat T^m_{ab} = \frac1{n_m} \sum_{j \le n_m} g^m_{aj}\, g^{m \top}_{bj} , \qquad
    \mathrm{Cov}(g^m_{aj}, g^m_{bj}) = T^m_{ab} .

The number of features makes the variance of :math:`\hat T^m_{ab}` equal to the interference of
layer :math:`m`. It is at most the number of weights; inner layers reach this bound. The kernel of a
perceptron's first layer is a product of the kernel of the inputs and a kernel of gradients. Only
the gradients are random, so only their kernel has random features.

Gradient flow on the squared loss is solved for a few draws of these features. The average over
outputs at initialisation has a closed form.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from embens.checks import check_members, check_whole, short_repr
from embens.ensemble import EmbeddedEnsemble
from embens.optim import Gamma
from embens.theory.blocks import kernels
from embens.theory.interference import interference, layer_names
from embens.theory.kernel import Kernels, MemberKernel, resolve_gamma
from embens.theory.limit import Limit
from embens.theory.problem import check_targets, covariance_root
from embens.theory.weight_law import weight_law

_PERCEPTRON_INPUTS = 16
_IMAGE_INPUTS = 4
_MANY_FEATURES = 40
"""A layer with more features for each member and train input counts as not random."""


@dataclass(frozen=True)
class BestMembers:
    """Predicted errors of ensembles for several member counts.

    Attributes:
        best: Number of members with the smallest error.
        members: Numbers of members that were compared.
        errors: Mean squared test error of the ensemble mean, ``(candidate,)``.
        bias: Part of ``errors`` that averaging over initialisations leaves.
        variance: Part of ``errors`` from the outputs at initialisation.
        separate: Error of as many separate, infinitely wide networks, ``(candidate,)``.
        features: Number of random features of each layer.

    Example:
        >>> bias, variance = torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.25])
        >>> separate = torch.tensor([0.75, 0.5])
        >>> report = BestMembers(2, (1, 2), bias + variance, bias, variance, separate, {"0": 64.0})
        >>> report.excess
        tensor([0.2500, 0.2500])
    """

    best: int
    members: tuple[int, ...]
    errors: Tensor
    bias: Tensor
    variance: Tensor
    separate: Tensor
    features: dict[str, float]
    __repr__ = short_repr

    @property
    def excess(self) -> Tensor:
        """Error that sharing adds to that of separate, infinitely wide networks."""
        return self.errors - self.separate


def best_members(
    ensemble: EmbeddedEnsemble,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    members: Sequence[int] = (1, 2, 4, 8, 16),
    gamma: Gamma = None,
    time: float = math.inf,
    draws: int = 4,
    generator: torch.Generator | None = None,
) -> BestMembers:
    r"""Predict the number of members with the smallest error, for the width of a network.

    Assumptions: the network is a perceptron or a convolutional network in ``nn.Sequential``.
    Training is linear: features do not change. All members are trained on the squared loss by
    gradient flow. The random part of each layer's kernel acts as independent normal features.

    Networks that learn features hold fewer or more members than predicted. Tails of the laws enter
    the variance between members, but not the fluctuation of the kernel within a member, for which
    see :func:`~embens.theory.effective_width`.

    Args:
        ensemble: An ensemble; its laws and widths matter, its number of members does not.
        train: Inputs ``(n, …)`` and targets ``(n,)`` or ``(n, k)``.
        test: The same for held-out data, ``(test, …)`` and ``(test,)`` or ``(test, k)``.
        members: Numbers of members to compare. The cost grows as ``(members * n)**3``.
        gamma: Gradient scale: a number, a function of M, or None for the natural scale.
        time: Duration of training in units of the rate, as in
            :func:`~embens.theory.gradient_flow`.
        draws: Number of draws of the features.
        generator: Source of randomness; None means a fixed seed.

    Returns:
        Predicted errors and the best number of members.

    Raises:
        TypeError: If the network has no formula for its interference.
        ValueError: If shapes do not fit, or a number of members is not positive.

    Example:
        >>> from embens import embed, laws, networks
        >>> net = networks.mlp(2, 256, depth=2, weight_std=2**0.5)
        >>> signs = embed(net, 4, pre=None, post=laws.Signs(0.0))
        >>> x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
        >>> train, test = (x[:10], x[:10, 0]), (x[10:], x[10:, 0])
        >>> report = best_members(signs, train, test, members=(1, 8))
        >>> report.best
        8
    """
    candidates = tuple(check_members(count) for count in members)
    if not candidates:
        raise ValueError("members must hold at least one number of members; got none.")
    check_whole("draws", draws)
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    problem = _Problem.of(ensemble, train, test, time)
    rows = [problem.errors(count, gamma, draws, generator) for count in candidates]
    bias, variance, separate = (torch.stack(column) for column in zip(*rows, strict=True))
    errors = bias + variance
    return BestMembers(
        best=candidates[int(errors.argmin())],
        members=candidates,
        errors=errors,
        bias=bias,
        variance=variance,
        separate=separate,
        features={name: block.features for name, block in problem.blocks.items()},
    )


@dataclass(frozen=True)
class LayerBlock:
    """Tangent kernel of one layer's weights.

    Attributes:
        kernel: Its limit, within and between members.
        features: Number of normal features with the same variance between members.
        inputs: Factor of the kernel that is not random, ``(n, n)``, or None.
    """

    kernel: MemberKernel
    features: float
    inputs: Tensor | None = None

    def draw(self, members: int, train: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw the kernel from its features.

        Args:
            members: Number of members.
            train: Number of inputs that are train data, which come first.
            generator: Source of randomness.

        Returns:
            The kernel of the train data ``(member, train, member, train)``, and that of the mean
            over members on test data with the train data ``(test, member, train)``.
        """
        count = max(1, round(self.features))
        kernel = self.kernel
        if self.inputs is not None:
            kernel = MemberKernel(kernel.same / self.inputs, kernel.cross / self.inputs)
        features = _draw_features(kernel, members, count, generator)
        train_features = features[:, :train]
        mean_features = features[:, train:].mean(0)
        of_train = torch.einsum("aif,bjf->aibj", train_features, train_features) / count
        of_test = torch.einsum("tf,bjf->tbj", mean_features, train_features) / count
        if self.inputs is None:
            return of_train, of_test
        of_train = of_train * self.inputs[:train, None, :train]
        return of_train, of_test * self.inputs[train:, None, :train]


def layer_blocks(ensemble: EmbeddedEnsemble, x: Tensor, *, count: int) -> dict[str, LayerBlock]:
    """Return the tangent kernel and the feature count of each layer.

    Args:
        ensemble: An ensemble.
        x: Inputs, ``(n, …)``.
        count: Number of inputs from which feature counts are computed.
    """
    blocks = {}
    indices = torch.linspace(0, len(x) - 1, min(count, len(x))).round().long().unique()
    names = layer_names(ensemble, x)
    for name in names:
        only = _with_one_trainable_layer(ensemble, name)
        kernel = kernels(only, x).ntk_shared
        variance = interference(only, x[indices], members=1, gamma=1.0)
        same = kernel.same.diagonal()[indices]
        cross = kernel.cross[indices][:, indices]
        expected = torch.outer(same, same) + cross**2
        # A layer has at most as many features as weights. Inner layers reach this number.
        features = float(only.reference.get_submodule(name).weight.numel())  # type: ignore[union-attr]
        if variance.sum() > 0:
            features = min(features, float(expected.sum() / variance.sum()))
        inputs = _first_factor(only, name, x) if name == names[0] else None
        blocks[name] = LayerBlock(kernel, features, inputs)
    return blocks


def _first_factor(ensemble: EmbeddedEnsemble, name: str, x: Tensor) -> Tensor | None:
    """Return the factor of the first layer's kernel that depends on the inputs alone, or None.

    The other factor is the kernel divided by this one. So the result is None if an entry is zero,
    as for orthogonal inputs.
    """
    inputs = Limit(ensemble, x).x1
    layer = ensemble.reference.get_submodule(name)
    if not isinstance(layer, nn.Linear):
        return None
    law = weight_law(layer, finite=True, path=name)
    factor = law.gradients(inputs @ inputs.mT / inputs.shape[1], 1.0)
    sizes = factor.diagonal().abs().sqrt()
    if (factor.abs() <= 1e-8 * torch.outer(sizes, sizes)).any():
        return None
    return factor


def _with_one_trainable_layer(ensemble: EmbeddedEnsemble, name: str) -> EmbeddedEnsemble:
    """Return a copy of an ensemble in which the weights of all other layers are frozen."""
    ensemble = copy.deepcopy(ensemble)
    ensemble.reference.requires_grad_(False)
    ensemble.reference.get_submodule(name).requires_grad_(True)
    return ensemble


def _few_inputs(x: Tensor) -> int:
    return _PERCEPTRON_INPUTS if x.dim() == 2 else _IMAGE_INPUTS


@dataclass(frozen=True)
class _Problem:
    """Kernels of train and test data together, train data first.

    Attributes:
        kernels: The limit.
        blocks: Tangent kernels of layers.
        train_targets: ``(n, k)``.
        test_targets: ``(test, k)``.
        time: Duration of training.
    """

    kernels: Kernels
    blocks: dict[str, LayerBlock]
    train_targets: Tensor
    test_targets: Tensor
    time: float

    @classmethod
    def of(
        cls,
        ensemble: EmbeddedEnsemble,
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
        time: float,
    ) -> _Problem:
        """Validate data and compute all kernels."""
        if not time > 0:
            raise ValueError(f"time must be a positive number or infinity; got {time!r}.")
        x_train, y_train = train
        x_test, y_test = test
        x = torch.cat([x_train, x_test])
        n = len(x_train)
        whole = kernels(ensemble, x)
        covariance = whole.nngp.same
        train_targets = check_targets(y_train, covariance[:n, :n]).reshape(n, -1)
        test_targets = check_targets(y_test, covariance[n:, n:]).reshape(len(x_test), -1)
        blocks = layer_blocks(ensemble, x, count=_few_inputs(x))
        return cls(whole, blocks, train_targets, test_targets, time)

    def errors(
        self, members: int, gamma: Gamma, draws: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return bias and variance of the ensemble, and the error of separate networks."""
        n = len(self.train_targets)
        train = Kernels.of_blocks([block[:n, :n] for block in self.kernels.blocks])
        scale = resolve_gamma(train, members, gamma) / members
        bias = variance = self.train_targets.new_zeros(())
        for _ in range(draws):
            train_kernel, test_kernel = self._draw(members, scale, generator)
            weights = self._responses(train_kernel, test_kernel)
            bias = bias + self._bias(weights) / draws
            variance = variance + self._variance(weights, members) / draws
        alone = self.kernels.ntk_shared.same + self.kernels.ntk_individual.same
        weights = self._responses(alone[None, :n, None, :n], alone[n:, None, :n])
        separate = self._bias(weights) + self._variance(weights, 1) / members
        return bias, variance, separate

    def _draw(
        self, members: int, scale: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw the tangent kernel.

        Returns:
            The kernel of the train data ``(member, n, member, n)``, and that of the ensemble mean
            on test data with the train data ``(test, member, n)``.
        """
        n = len(self.train_targets)
        train_kernel, test_kernel = self._mean_blocks(self.kernels.ntk_individual, members)
        for block in self.blocks.values():
            if block.features > _MANY_FEATURES * members * n:
                more_train, more_test = self._mean_blocks(block.kernel, members)
            else:
                more_train, more_test = block.draw(members, n, generator)
            train_kernel = train_kernel + scale * more_train
            test_kernel = test_kernel + scale * more_test
        return train_kernel, test_kernel

    def _mean_blocks(self, kernel: MemberKernel, members: int) -> tuple[Tensor, Tensor]:
        """Return a kernel that is not random, in the two shapes of :meth:`_draw`."""
        n = len(self.train_targets)
        train = MemberKernel(kernel.same[:n, :n], kernel.cross[:n, :n]).dense(members)
        mean, _ = kernel.modes(members)
        test_kernel = mean[n:, :n] / members
        return train.permute(0, 2, 1, 3), test_kernel[:, None].expand(-1, members, -1)

    def _responses(self, train_kernel: Tensor, test_kernel: Tensor) -> Tensor:
        """Return weights of the train residuals in the ensemble mean, ``(test, member, n)``."""
        test, members, n = test_kernel.shape
        size = members * n
        values, vectors = torch.linalg.eigh(train_kernel.reshape(size, size))
        cutoff = 1e-10 * values[-1]
        safe = values.clamp(min=cutoff)
        gains = torch.where(values > cutoff, -torch.expm1(-safe * self.time / n) / safe, 0.0)
        weights = (test_kernel.reshape(test, size) @ vectors * gains) @ vectors.mT
        return weights.reshape(test, members, n)

    def _bias(self, weights: Tensor) -> Tensor:
        mean = weights.sum(1) @ self.train_targets
        return (mean - self.test_targets).square().mean()

    def _variance(self, weights: Tensor, members: int) -> Tensor:
        """Return the variance of the ensemble mean over outputs at initialisation."""
        nngp = self.kernels.nngp
        test = len(weights)
        mean_weights = torch.eye(test).to(weights) / members
        mean_weights = mean_weights[:, None].expand(-1, members, -1)
        # The trained mean is linear in the initial outputs on train and test data.
        readout = torch.cat([-weights, mean_weights], 2)
        independent = torch.einsum("tai,ij,taj->t", readout, nngp.same - nngp.cross, readout)
        total = readout.sum(1)
        shared = torch.einsum("ti,ij,tj->t", total, nngp.cross, total)
        return (independent + shared).mean()


def _draw_features(
    kernel: MemberKernel, members: int, count: int, generator: torch.Generator
) -> Tensor:
    """Draw normal features of exchangeable members, ``(member, input, feature)``."""
    mean, deviation = kernel.modes(members)
    mean_root = covariance_root(mean / members)
    root = covariance_root(deviation)
    n = len(root)
    noise = torch.randn(members + 1, n, count, generator=generator, dtype=root.dtype)
    deviations = root @ noise[1:]
    return mean_root @ noise[0] + deviations - deviations.mean(0)
