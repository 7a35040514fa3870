"""Recurrent layers: members against networks modulated by hand."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from cases import Recurrent
from embens.ensemble.layers import Modulated
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import embens

OPTIONS = {
    "time first": {},
    "batch first": {"batch_first": True},
    "both ways, two layers": {"bidirectional": True, "num_layers": 2},
}


class Both(nn.Module):
    """Returns all that a recurrent layer gives."""

    def __init__(self, kind: type, **options):
        super().__init__()
        self.input = nn.Linear(4, 6)
        self.core = kind(6, 5, **options)
        size = (options.get("proj_size") or 5) * (1 + options.get("bidirectional", False))
        self.output = nn.Linear(size, 3)

    def forward(self, x: Tensor):
        output, state = self.core(torch.tanh(self.input(x)))
        return self.output(output), output, state


def by_hand(reference: Both, ensemble, a: int, x: Tensor):
    """Return what member a gives, from the reference's own modules and the member's numbers."""
    numbers = {name: module.values[a] for name, module in ensemble.individuals.items()}
    hidden = torch.tanh(numbers["input.pre"] * reference.input(x))
    output, state = reference.core(numbers["core.post"] * hidden)
    return reference.output(numbers["output.post"] * output), output, state


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_members_are_networks_modulated_by_hand(kind, options):
    reference = Both(kind, **options).double()
    ensemble = embens.batch_ensemble(reference, 3)
    for x in (torch.randn(7, 3, 4).double(), torch.randn(7, 4).double()):
        outputs = ensemble(x)
        for a in range(3):
            mine = torch.utils._pytree.tree_map(lambda t, a=a: t[a], outputs)
            torch.testing.assert_close(mine, by_hand(reference, ensemble, a, x))
            torch.testing.assert_close(mine, ensemble.member(a)(x))
        assert not torch.allclose(outputs[1][0], outputs[1][1])


def test_a_member_has_torchs_own_layer():
    ensemble = embens.batch_ensemble(Both(nn.GRU), 2)
    assert isinstance(ensemble.network.core, Modulated)
    assert type(ensemble.member(0).core) is nn.GRU


def test_the_output_is_modulated_by_the_layer_that_takes_it_alone():
    sites = {(s.layer, s.kind) for s in embens.batch_ensemble(Both(nn.GRU), 2).plan.sites}
    assert sites == {("input", "pre"), ("core", "post"), ("output", "post")}
    with pytest.raises(ValueError, match="'core' matches none of the selected pre sites"):
        embens.embed(Both(nn.GRU), 2, pre={"core": embens.laws.Normal()})


def test_members_run_one_after_another_and_the_ensemble_says_why():
    ensemble = embens.batch_ensemble(Both(nn.LSTM, batch_first=True), 3)
    assert "not the first axis of the states of 'core'" in repr(ensemble)
    x = torch.randn(3, 7, 4)
    for chunk in (1, 2, 3):
        torch.testing.assert_close(ensemble(x, chunk=chunk)[0], ensemble(x)[0])


def test_no_mean_network_exists():
    net = nn.Sequential(nn.Linear(4, 6), Output(nn.LSTM(6, 5)))
    with pytest.raises(ValueError, match="no mean weight"):
        embens.embed(net, 3, pre=None, sites=["1.core"]).collapse()
    with pytest.raises(ValueError, match="not linear in the output of '0'"):
        embens.embed(net, 3, post=None, sites=["0"]).collapse()


def test_empirical_kernels_are_those_of_the_jacobian():
    ensemble = embens.batch_ensemble(Recurrent().double().eval(), 2)
    tokens = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(0))
    kernel = embens.finite.ntk(ensemble, tokens, outputs="trace").shared[0, 1]
    shared = list(ensemble.shared_parameters())
    jacobians = []
    for row in ensemble(tokens).flatten(0, 1).flatten():
        found = torch.autograd.grad(row, shared, retain_graph=True, allow_unused=True)
        found = [
            torch.zeros_like(p) if g is None else g for p, g in zip(shared, found, strict=True)
        ]
        jacobians.append(torch.cat([g.flatten() for g in found]))
    first, second = torch.stack(jacobians).unflatten(0, (2, 3, 3))
    torch.testing.assert_close(kernel, torch.einsum("icp,jcp->ij", first, second))


class Output(nn.Module):
    def __init__(self, core: nn.Module):
        super().__init__()
        self.core = core

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x)[0]


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.input, self.core = nn.Linear(4, 6), nn.LSTM(6, 5, batch_first=True)
        self.output = nn.Linear(5, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        hidden = torch.tanh(self.input(x))
        packed = pack_padded_sequence(hidden, lengths, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.core(packed)[0], batch_first=True)
        return self.output(output)


def test_packed_sequences_are_modulated_like_others():
    x, lengths = torch.randn(3, 7, 4), torch.tensor([7, 2, 5])
    ensemble = embens.batch_ensemble(Packed(), 2, example_input=(x, lengths))
    assert {(s.layer, s.kind) for s in ensemble.plan.sites} == {
        *(("input", "pre"), ("core", "post"), ("output", "post"))
    }
    outputs = ensemble(x, lengths)
    torch.testing.assert_close(outputs[1], ensemble.member(1)(x, lengths))
    alone = ensemble(x[1:2, :2], torch.tensor([2]))
    torch.testing.assert_close(outputs[:, 1:2, :2], alone)


def test_copies_files_and_gradients(tmp_path):
    reference, tokens = Recurrent(), torch.randint(11, (4, 6))
    ensemble = embens.batch_ensemble(reference, 3)
    outputs = ensemble(tokens)
    ensemble.save(tmp_path / "e.safetensors")
    loaded = embens.load(tmp_path / "e.safetensors", reference)
    for other in (copy.deepcopy(ensemble), pickle.loads(pickle.dumps(ensemble)), loaded):
        assert torch.equal(other(tokens), outputs)
    ensemble.backward(tokens, torch.zeros(4, dtype=torch.long))
    assert all(p.grad is not None and p.grad.any() for p in ensemble.parameters())
