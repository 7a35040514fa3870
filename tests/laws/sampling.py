"""Samples of laws and their standard errors."""

import math

import pytest
import torch

SAMPLES = 200_000


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def assert_agrees(samples, expected):
    """Compare a sample mean with its expectation, within five standard errors."""
    error = samples.std().item() / math.sqrt(samples.numel())
    assert samples.mean().item() == pytest.approx(expected, rel=1e-12, abs=5 * error + 1e-12)
