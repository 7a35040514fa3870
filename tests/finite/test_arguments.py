"""Invalid samples and targets raise errors with a fix."""

from __future__ import annotations

import math

import pytest
import torch
from finite.diagnosed import X, Y, batch_ensemble, mlp

import embens
from embens.finite import diagnose

WRONG = [
    (lambda: (mlp(), X, Y), TypeError, "expected an ensemble, got Sequential"),
    (lambda: (batch_ensemble(), X[:0], Y[:0]), ValueError, "at least one sample"),
    (lambda: (batch_ensemble(), X, Y[:7]), ValueError, "same number of samples, got 60 and 7"),
    (lambda: (batch_ensemble(), X * math.nan, Y), ValueError, "expected finite values"),
    (lambda: (batch_ensemble(), X, Y + 9), ValueError, "from 0 to 3"),
    (lambda: (batch_ensemble(), X, Y[:, None, None]), ValueError, "targets of shape"),
]


MEASURES = (diagnose, embens.finite.gradient_cosines, embens.finite.gradient_norms)


@pytest.mark.parametrize("call", MEASURES, ids=["diagnose", "cosines", "norms"])
@pytest.mark.parametrize(("arguments", "error", "message"), WRONG)
def test_wrong_samples_are_explained(call, arguments, error, message):
    with pytest.raises(error, match=message):
        call(*arguments())


@pytest.mark.parametrize("call", MEASURES[1:], ids=["cosines", "norms"])
def test_measures_of_gradients_take_tensors_only(call):
    with pytest.raises(TypeError, match=r"expected a tensor.*got ndarray"):
        call(batch_ensemble(), X.numpy(), Y)


def test_diagnose_takes_arrays():
    of_arrays = diagnose(batch_ensemble(), X.numpy(), Y.numpy())

    assert of_arrays.to_dict().keys() == diagnose(batch_ensemble(), X, Y).to_dict().keys()


@pytest.mark.parametrize("call", MEASURES, ids=["diagnose", "cosines", "norms"])
def test_inference_mode_is_explained(call):
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        call(batch_ensemble(), X, Y)
