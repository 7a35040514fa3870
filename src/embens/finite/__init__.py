"""What a network of finite width does: empirical kernels, gradients, diagnosis."""

from embens.finite.advice import Cost, Proposal, advise
from embens.finite.dependence import ntk_drift, ntk_ratio, other_members_weight
from embens.finite.diagnosis.diagnose import diagnose
from embens.finite.diagnosis.measurement import Budget
from embens.finite.diagnosis.report import Diagnosis, Finding
from embens.finite.empirical.covariance import nngp
from embens.finite.empirical.kernels import FiniteKernel, ntk
from embens.finite.forecasting import Estimate, Forecast, forecast
from embens.finite.gradients import GradientNorms, gradient_cosines, gradient_norms
from embens.finite.scaling import ScalingLaw, scaling

__all__ = [
    "Budget",
    "Cost",
    "Diagnosis",
    "Estimate",
    "Finding",
    "FiniteKernel",
    "Forecast",
    "GradientNorms",
    "Proposal",
    "ScalingLaw",
    "advise",
    "diagnose",
    "forecast",
    "gradient_cosines",
    "gradient_norms",
    "nngp",
    "ntk",
    "ntk_drift",
    "ntk_ratio",
    "other_members_weight",
    "scaling",
]
