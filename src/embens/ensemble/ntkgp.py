r"""Networks that train to draws of a posterior (NTKGP, He, Lakshminarayanan & Teh 2020).

.. math:: \tilde f(x) = f(x; \theta) + J(x; \theta^0) \theta^*, \quad \theta^0, \theta^* \sim N(0,1)

where :math:`J` is the Jacobian at the start :math:`\theta^0` and :math:`\theta^*` is 0 in the last
layers. At infinite width :math:`f` has the covariance :math:`\Sigma`, and the fixed second part has
the rest of the tangent kernel, :math:`\Theta - \Sigma`.
"""

import importlib
import threading
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from embens import reading
from embens.networks import Parametrized

_ALONE = threading.Lock()  # the code that members share holds the tensors of one at a time


class NTKGP(nn.Module):
    """A network of layers in the NTK parametrization, and its fixed second part.

    The network is not changed and held as code alone: it runs with the numbers of this module, one
    vector each, which begin as its parameters.
    """

    start: Tensor
    star: Tensor

    def __init__(self, network: nn.Module):
        super().__init__()
        for layer in (m for m in network.modules() if list(m.parameters(recurse=False))):
            if not isinstance(layer, Parametrized) or layer.parametrization != "ntk":
                raise ValueError(
                    "bayesian needs weights that are all N(0, 1), with their scale in the forward "
                    "pass: layers of embens.networks with parametrization='ntk'; got "
                    f"{type(layer).__name__}({layer.extra_repr()})"
                )
        names = [name for name, _ in network.named_parameters()]
        tied = len(list(network.named_parameters(remove_duplicate=False))) > len(names)
        if not names or tied or list(network.buffers()):
            raise ValueError("bayesian needs a network with parameters, none tied, and no buffers")
        last = reading.read(network).last
        self.held = [network]  # in a list, so that its parameters are not ours
        self.fixed = [name.rpartition(".")[0] not in last for name in names]
        flat = nn.utils.parameters_to_vector(network.parameters()).detach()
        self.trained = nn.Parameter(flat.clone())
        self.register_buffer("start", flat.clone())
        self.register_buffer("star", flat.clone())
        self.train(network.training)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all numbers anew."""
        self.start.copy_(self.trained.normal_())
        self.star.normal_()
        for keep, part in zip(self.fixed, self._apart(self.star).values(), strict=True):
            part.mul_(keep)

    def _apart(self, flat: Tensor) -> dict[str, Tensor]:
        """Return a vector as tensors by the names of the network's parameters."""
        items = list(self.held[0].named_parameters())
        parts = flat.split([p.numel() for _, p in items])
        return {n: part.view(p.shape) for (n, p), part in zip(items, parts, strict=True)}

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs of the network plus the fixed second part."""

        def call(flat: Tensor) -> Tensor:
            return torch.func.functional_call(self.held[0], self._apart(flat), args, kwargs)

        def both() -> Tensor:
            return call(self.trained) + torch.func.jvp(call, (self.start,), (self.star,))[1]

        if torch.compiler.is_compiling():
            return both()
        load_rules_of_jvp()
        with _ALONE:
            return both()

    def kl(self) -> Tensor:
        r"""Return :math:`\frac12 |\theta - \theta^0|^2`, summed over members."""
        return (self.trained - self.start).square().sum() / 2


@cache
def load_rules_of_jvp() -> None:
    """Import what torch.func.jvp imports at its first call, without its deprecation warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.func.jvp(torch.sqrt, (torch.ones(()),), (torch.ones(()),))
        importlib.import_module("torch._decomp.decompositions_for_jvp")
