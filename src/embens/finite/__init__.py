"""Networks of finite width: empirical kernels, gradient geometry, diagnosis."""

from embens.finite.covariance import nngp
from embens.finite.dependence import ntk_drift, ntk_ratio, other_members_weight
from embens.finite.diagnose import diagnose
from embens.finite.diagnosis import Diagnosis, Finding
from embens.finite.geometry import GradientNorms, gradient_cosines, gradient_norms
from embens.finite.measurement import Budget
from embens.finite.tangent import FiniteKernel, ntk

__all__ = [
    "Budget",
    "Diagnosis",
    "Finding",
    "FiniteKernel",
    "GradientNorms",
    "diagnose",
    "gradient_cosines",
    "gradient_norms",
    "nngp",
    "ntk",
    "ntk_drift",
    "ntk_ratio",
    "other_members_weight",
]
