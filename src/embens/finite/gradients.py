r"""Gradients of single members: how they point, and how long they are.

Members meet in the shared parameters :math:`w` alone. A step along
:math:`-\sum_b g_b`, with :math:`g_b = \partial L_b / \partial w`, changes the loss of member
:math:`a` by

.. math::
    -\langle g_a, g_a \rangle - \sum_{b \ne a} \langle g_a, g_b \rangle ,

so the cosines of :math:`g_a` and :math:`g_b` say how strongly members pull on each other: they
fall with the width as :math:`N^{-1/2}` where members are independent (layers in the middle as
:math:`N^{-1}`), and stay where they are not. The paper's figure has :math:`N^{-1}`; the first and
the last layer, in which members have the inputs or the loss in common, do not allow it.

How single members are run, and how layers are named, is in :mod:`embens.finite.members`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embens.ensemble import EmbeddedEnsemble
from embens.finite.checks import check_call, prepared
from embens.finite.members import flat, member_gradients, norm_of
from embens.objective import Criterion

if TYPE_CHECKING:
    from jaxtyping import Float


def gradient_cosines(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    criterion: Criterion = nn.functional.cross_entropy,
    *,
    by_layer: bool = False,
) -> Float[Tensor, "member member"] | dict[str, Float[Tensor, "member member"]]:
    r"""Return the cosines between the members' gradients of the shared parameters.

    .. math::
        \cos_{ab} = \frac{\langle g_a, g_b \rangle}{|g_a|\,|g_b|}, \qquad
        g_a = \frac{\partial L_a}{\partial w}

    Args:
        ensemble: of any family. Separate networks share nothing: the identity.
        x: a batch, or a tuple of the reference's arguments.
        target: passed to the criterion with each member's outputs.
        criterion: a function of one member's outputs and the target; a vector is averaged.
        by_layer: return a dict from layer to the cosines of that layer's gradients alone.

    A gradient that vanishes has the cosine 0 with all others; the diagonal is 1.

    Example:
        >>> from embens import batch_ensemble
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> x, y = torch.randn(5, 4), torch.tensor([0, 1, 1, 0, 1])
        >>> gradient_cosines(batch_ensemble(net, 3, p=1.0), x, y).round(decimals=4)
        tensor([[1., 1., 1.],
                [1., 1., 1.],
                [1., 1., 1.]])
    """
    check_call(ensemble, x, target, criterion)
    criterion, target = prepared(criterion, target)
    grams = shared_grams(ensemble, x, target, criterion)
    dtype = working_dtype(ensemble)
    if by_layer:
        return {layer: cosines(gram).to(dtype) for layer, gram in grams.items()}
    return cosines(total_gram(grams, ensemble.members)).to(dtype)


def gradient_norms(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    criterion: Criterion = nn.functional.cross_entropy,
) -> GradientNorms:
    """Return the norms of the gradients of each member's loss, layer by layer.

    The result is a mapping from layer to ``(member,)``, for the shared parameters; ``.individual``
    is the same for the modulations, ``.total`` joins the layers. Arguments as in
    :func:`gradient_cosines`.

    Example:
        >>> from embens import batch_ensemble
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> norms = gradient_norms(batch_ensemble(net, 3), torch.randn(5, 4), torch.zeros(5).long())
        >>> list(norms), norms["0"].shape, list(norms.individual)
        (['0', '2'], torch.Size([3]), ['0.pre', '2.post'])
        >>> torch.allclose(norms.total**2, norms["0"] ** 2 + norms["2"] ** 2)
        True
    """
    check_call(ensemble, x, target, criterion)
    criterion, target = prepared(criterion, target)
    shared: dict[str, list[float]] = defaultdict(list)
    individual: dict[str, list[float]] = defaultdict(list)
    for member in member_gradients(ensemble, x, target, criterion):
        for found, norms in ((member.shared, shared), (member.individual, individual)):
            for layer, gradients in found.items():
                norms[layer].append(norm_of(gradients))
    dtype = working_dtype(ensemble)
    return GradientNorms(
        {layer: torch.tensor(v, dtype=dtype) for layer, v in shared.items()},
        {site: torch.tensor(v, dtype=dtype) for site, v in individual.items()},
        ensemble.members,
    )


@dataclass(frozen=True, eq=False)
class GradientNorms(Mapping[str, Tensor]):
    """Norms of the members' gradients: a mapping from layer to ``(member,)``.

    Attributes:
        shared: of the shared parameters, layer by layer; what the mapping itself shows.
        individual: of the modulations, site by site (``"4.post"``).
        members: how many.
    """

    shared: dict[str, Tensor]
    individual: dict[str, Tensor]
    members: int

    @property
    def total(self) -> Float[Tensor, " member"]:
        """Norm of the gradient of all shared parameters together."""
        return _joined(self.shared, self.members)

    @property
    def total_individual(self) -> Float[Tensor, " member"]:
        """Norm of the gradient of all individual parameters together."""
        return _joined(self.individual, self.members)

    @property
    def matrix(self) -> Float[Tensor, "member layer"]:
        """The norms of the shared parameters, a column for each layer."""
        columns = list(self.shared.values())
        return torch.stack(columns, 1) if columns else torch.zeros(self.members, 0)

    def __getitem__(self, layer: str) -> Tensor:
        return self.shared[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shared)

    def __len__(self) -> int:
        return len(self.shared)


def _joined(norms: dict[str, Tensor], members: int) -> Tensor:
    if not norms:
        return torch.zeros(members)
    return torch.stack(list(norms.values())).square().sum(0).sqrt()


def working_dtype(ensemble: nn.Module) -> torch.dtype:
    """Return the dtype of an ensemble's parameters, or float32 where they have less."""
    parameter = next(ensemble.parameters(), torch.zeros(()))
    return torch.promote_types(parameter.dtype, torch.float32)


def cosines(gram: Float[Tensor, "member member"]) -> Float[Tensor, "member member"]:
    """Return the cosines that belong to a Gram matrix; see :func:`gradient_cosines`."""
    norms = gram.diagonal().clamp(min=0).sqrt()
    scale = torch.where(norms > 0, 1 / norms, 0.0)
    result = (gram * scale * scale[:, None]).clamp(-1, 1)
    result.fill_diagonal_(1.0)
    return result


def total_gram(grams: Mapping[str, Tensor], members: int) -> Tensor:
    """Return the sum over layers."""
    return sum(grams.values(), torch.zeros(members, members, dtype=torch.float64))


def shared_grams(
    ensemble: EmbeddedEnsemble, x: Any, target: Any, criterion: Criterion
) -> dict[str, Float[Tensor, "member member"]]:
    """Return the inner products of the members' shared gradients, layer by layer, in float64."""
    rows: dict[str, list[Tensor]] = defaultdict(list)
    for member in member_gradients(ensemble, x, target, criterion):
        for layer, gradients in member.shared.items():
            rows[layer].append(flat(gradients))
    return {layer: gram_of(vectors) for layer, vectors in rows.items()}


def gram_of(vectors: Sequence[Tensor]) -> Tensor:
    """Return the inner products of vectors, in float64; a part of their entries at a time."""
    count = len(vectors)
    gram = torch.zeros(count, count, dtype=torch.float64)
    for parts in zip(*(v.split(2**16) for v in vectors), strict=True):
        block = torch.stack([p.double().cpu() for p in parts])
        gram += block @ block.T
    return gram


def off_diagonal(matrix: Tensor) -> Tensor:
    """Return the entries between different members, ``(member, member - 1)``."""
    count = len(matrix)
    if count < 2:
        raise ValueError(f"a pair of members needs at least two of them; got {count}")
    return matrix[~torch.eye(count, dtype=torch.bool)].reshape(count, count - 1)
