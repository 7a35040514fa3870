"""Empirical kernels: covariance and tangent kernel of the network at hand."""
