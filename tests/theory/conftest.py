"""Fixtures of the theory tests."""

import pytest
import torch


@pytest.fixture
def double():
    """Create networks and inputs in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
