"""Arguments of calls: shapes of batches, and names that ensemble and reference share."""

import pytest
import torch
from torch import nn

from embens.ensemble.binding import bind_inputs, check_rows, separate_arguments


class Scaled(nn.Module):
    def forward(self, x, *, scale=1.0):
        return x * scale


class Chunked(nn.Module):
    def forward(self, x, batch=None, chunk=None):
        return x


def test_inputs_are_a_tuple_a_dictionary_or_a_single_value():
    x = torch.ones(5, 3)
    assert bind_inputs(Scaled(), x) == ((x,), {})
    assert bind_inputs(Scaled(), [x]) == ((x,), {})
    assert bind_inputs(Scaled(), {"scale": 2.0, "x": x}) == ((x,), {"scale": 2.0})


def test_a_dictionary_that_does_not_fit_raises():
    with pytest.raises(TypeError, match=r"inputs 'y' do not fit the reference, which takes \(x"):
        bind_inputs(Scaled(), {"y": torch.ones(5, 3)})


def test_arguments_of_the_reference_are_passed_on():
    lengths, kwargs = torch.ones(5), {}
    assert separate_arguments(Chunked(), lengths, "words", kwargs) == ("same", None)
    assert kwargs == {"batch": lengths, "chunk": "words"}


def test_arguments_of_the_ensemble_stay_with_the_ensemble():
    kwargs = {}
    assert separate_arguments(Scaled(), "own", 2, kwargs) == ("own", 2)
    assert kwargs == {}


def test_an_integer_chunk_of_both_raises():
    with pytest.raises(TypeError, match="chunk=2 may be meant for the ensemble or for the ref"):
        separate_arguments(Chunked(), "same", 2, {})


@pytest.mark.parametrize(
    ("inputs", "batch", "message"),
    [
        ((torch.ones(4, 5),), "own", r"expects inputs of shape \(3, batch, …\)"),
        ((torch.ones(6, 2), torch.ones(5)), "split", "expects equal numbers of rows"),
        ((1.0,), "split", "needs a tensor among the positional inputs"),
        ((torch.ones(3, 5),), "splt", "did you mean 'split'"),
    ],
)
def test_batches_of_the_wrong_shape_raise(inputs, batch, message):
    with pytest.raises(ValueError, match=message):
        check_rows(inputs, batch, members=3)
