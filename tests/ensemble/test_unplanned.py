"""What users do with an ensemble besides training: wrapping, copying, and changing its parts."""

import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import embens


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.out(self.norm(torch.tanh(self.b(torch.tanh(self.a(x))))))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.core, self.out = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        if x.sum() > 1e9:
            x = -x
        return self.out(self.core(x)[0][:, -1])


def test_the_first_call_can_be_recomputed_in_the_backward_pass():
    x = torch.randn(5, 6)
    ensemble = embens.batch_ensemble(Net(), 3)
    again = embens.batch_ensemble(Net(), 3)
    again.load_state_dict(ensemble.state_dict())
    checkpoint(ensemble, x, use_reentrant=False).square().sum().backward()
    again(x).square().sum().backward()
    for parameter, other in zip(ensemble.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.filterwarnings("ignore:the data flow of")
def test_an_ensemble_of_recurrent_networks_can_be_pickled_after_a_call():
    x = torch.randn(5, 4, 6)
    ensemble = embens.batch_ensemble(Recurrent(), 2, example_input=x)
    expected = ensemble(x)
    assert torch.equal(pickle.loads(pickle.dumps(ensemble))(x), expected)


@pytest.mark.parametrize("is_called", [False, True])
def test_a_bias_that_is_removed_is_missing_in_every_member(is_called):
    x = torch.randn(5, 6)
    ensemble = embens.batch_ensemble(Net(), 2).eval()
    if is_called:
        ensemble(x)
    ensemble.reference.a.bias = None
    members = [ensemble.member(a) for a in range(2)]
    outputs = ensemble(x)
    for a, member in enumerate(members):
        assert member.a.bias is None
        torch.testing.assert_close(outputs[a], member(x))


def test_the_reference_of_an_ensemble_is_refused():
    ensemble = embens.batch_ensemble(Net(), 2)
    with pytest.raises(ValueError, match=r"that of another ensemble.*'norm'.*ensemble\.member"):
        embens.batch_ensemble(ensemble.reference, 2)
