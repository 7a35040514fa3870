"""Ensembles of some of the members."""

import pickle

import pytest
import torch
from cases import FAMILIES, Residual, Tokens, sampled
from torch import nn

import embens


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


INPUTS = {
    "vision": (Residual, lambda: torch.randn(4, 3, 6, 6)),
    "tabular": (mlp, lambda: torch.randn(5, 3)),
    "text": (Tokens, lambda: torch.randint(11, (4, 5))),
}


@sampled("kind, family", list(INPUTS), list(FAMILIES))
def test_a_subset_has_the_members_that_were_asked_for(kind, family, tmp_path):
    make, make_input = INPUTS[kind]
    ensemble, x = FAMILIES[family](make(), members=3), make_input()
    ensemble(x)  # gives members different running statistics
    ensemble.eval()
    subset = ensemble.subset([2, 0, -1])
    assert subset.members == 3
    torch.testing.assert_close(subset(x), ensemble(x)[[2, 0, 2]], rtol=1e-5, atol=1e-5)
    for a, b in enumerate((2, 0, 2)):
        torch.testing.assert_close(subset.member(a).state_dict(), ensemble.member(b).state_dict())
    before = ensemble(x)
    with torch.no_grad():
        for parameter in subset.parameters():
            parameter.add_(1.0)
    assert torch.equal(ensemble(x), before)
    again = pickle.loads(pickle.dumps(subset))
    subset.save(tmp_path / "subset")
    loaded = embens.load(tmp_path / "subset", make()).eval()
    assert torch.equal(again(x), subset(x))
    assert torch.equal(loaded(x), subset(x))
    assert loaded.spec == again.spec == subset.spec
    assert loaded.subset([1]).spec.chosen == (0,)


def test_a_subset_can_be_trained():
    ensemble = embens.batch_ensemble(Residual(), 4).subset(range(3))
    x, y = torch.randn(4, 3, 6, 6), torch.arange(4) % 5
    optimizer = torch.optim.SGD(ensemble.parameter_groups(lr=0.1))
    first = ensemble.objective(ensemble(x), y)
    first.backward()
    optimizer.step()

    assert ensemble.objective(ensemble(x), y) < first
    assert ensemble.natural_gamma == 3.0


def test_repeated_members_are_fully_coupled_in_the_natural_gamma():
    ensemble = embens.batch_ensemble(mlp(), 3, p=0.5)
    r = ensemble.overlap
    pairs = torch.tensor([[1, 1, r], [1, 1, r], [r, r, 1]])
    assert ensemble.subset([1, 1, 0]).natural_gamma == pytest.approx(9 / pairs.sum().item())
    assert ensemble.subset([1, 1]).natural_gamma == 1.0


def test_invalid_subsets_raise():
    ensemble = embens.batch_ensemble(mlp(), 3)
    for members, error in (([3], IndexError), ([-4], IndexError), ([], ValueError)):
        with pytest.raises(error, match="member"):
            ensemble.subset(members)
    for members in ([True, False, True], "01", [0.0], 2):
        with pytest.raises(TypeError, match=r"must be an integer|must be a list of indices"):
            ensemble.subset(members)
    assert ensemble.subset(torch.tensor([0, 2])).members == 2


def test_a_subset_of_fresh_masks_has_fewer_members_and_none_twice():
    ensemble = embens.mc_dropout(mlp(), 4).subset([3, 1])
    assert ensemble(torch.ones(5, 3)).shape == (2, 5, 2)
    with pytest.raises(ValueError, match="cannot occur twice"):
        ensemble.subset([0, 0])


def test_a_single_index_raises():
    with pytest.raises(TypeError, match="members must be a list of indices, got 1"):
        embens.batch_ensemble(mlp(), 2).subset(1)
