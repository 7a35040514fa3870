"""Arguments of calls: shapes of batches, and names that ensemble and reference share."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import embens
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


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.core, self.out = nn.GRU(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.core(x)[1][0])


def test_a_packed_sequence_is_one_argument():
    x = pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([3, 2]))
    assert bind_inputs(Recurrent(), x) == ((x,), {})
    ensemble = embens.batch_ensemble(Recurrent(), 3, example_input=x)
    target = torch.zeros(2, 3)
    loss = ensemble.backward(x, target)
    assert torch.allclose(loss, embens.objective(ensemble(x), target))


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
