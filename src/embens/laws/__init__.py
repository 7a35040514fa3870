r"""Laws: distributions of modulations, with exact moments.

The infinite-width theory needs these expectations of a law:

- A post-activation modulation :math:`u` enters through ``mean`` and ``second_moment``.
- A pre-activation modulation :math:`v` appears inside the activation, :math:`\phi(v z)`. It enters
  through ``half_moment`` if :math:`\phi` is piecewise linear and through ``quadrature`` otherwise.
- Corrections at finite width also use ``kurtosis``.
- Pairs of members need ``pair_moment`` and ``pair_half_moment``. Members are independent unless the
  law is a :class:`Joint` law.

Laws are immutable values: frozen dataclasses that compare by their parameters. To define a law,
derive from :class:`Discrete` and define ``atoms``, or derive from :class:`Law` and define ``mean``,
``second_moment`` and ``sample``. Define ``half_moment`` and ``quadrature`` as well if you need the
theory of pre-activation modulations or of finite width. A law that is saved to files must be a
frozen dataclass; :func:`from_dict` finds it by its class name.
"""

from embens.laws.independent import (
    Bernoulli,
    Constant,
    Discrete,
    Normal,
    Rademacher,
    Shifted,
    Signs,
    Ternary,
    Uniform,
)
from embens.laws.joint import Correlated, Disjoint, Joint, Masks
from embens.laws.law import Law, from_dict, registered

__all__ = [
    "Bernoulli",
    "Constant",
    "Correlated",
    "Discrete",
    "Disjoint",
    "Joint",
    "Law",
    "Masks",
    "Normal",
    "Rademacher",
    "Shifted",
    "Signs",
    "Ternary",
    "Uniform",
    "from_dict",
    "registered",
]
