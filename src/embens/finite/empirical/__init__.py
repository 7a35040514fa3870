"""Empirical kernels: covariance and tangent kernel of the network at hand."""

from embens.finite.empirical.covariance import nngp
from embens.finite.empirical.kernels import FiniteKernel, ntk

__all__ = ["FiniteKernel", "nngp", "ntk"]
