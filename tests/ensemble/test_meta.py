"""Nothing is left on the CPU: on the meta device a tensor that was would fail."""

from __future__ import annotations

import pytest
import torch
from cases import ARCHITECTURES, Architecture
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import embens
from embens import laws

FAMILIES = {
    "batch ensemble": lambda net: embens.batch_ensemble(net, 3),
    "masks": lambda net: embens.mc_dropout(net, 3),
    "fresh masks": lambda net: embens.mc_dropout(net, 3, fresh=True),
    "last layer": lambda net: embens.last_layer_dropout(net, 3),
    "own last layers": lambda net: embens.embed(net, 3, own="last"),
    "masksembles": lambda net: embens.masksembles(net, 3),
    "disjoint": lambda net: embens.embed(net, 3, pre=None, post=laws.Disjoint()),
    "correlated": lambda net: embens.embed(net, 3, post=laws.Correlated(0.3)),
    "rank 1": lambda net: embens.rank1(net, 3),
    "low rank": lambda net: embens.low_rank(net, 3, rank=1),
    "adapters": lambda net: embens.low_rank(net, 3, rank=1, kind="additive", shared="frozen"),
    "networks": lambda net: embens.independent(net, 3),
    "heads": lambda net: embens.mimo(net, 3),
}


def check(family: str, case: Architecture) -> None:
    """Go through all that an ensemble does, without a number in it."""
    ensemble = FAMILIES[family](case.build().to("meta"))
    x = case.inputs(torch.Generator().manual_seed(0)).to("meta")
    assert all(t.is_meta for t in (*ensemble.parameters(), *ensemble.buffers()))
    outputs = ensemble(x)
    for chunk in (1, 2):
        assert ensemble(x, chunk=chunk).shape == outputs.shape
    target = torch.zeros_like(outputs[0])
    loss = ensemble.objective(outputs, target) + ensemble.kl()
    loss.backward()
    ensemble.backward(x, target, chunk=2)
    assert all(p.grad.is_meta for p in ensemble.parameters() if p.grad is not None)
    optimizer = torch.optim.SGD(ensemble.parameter_groups(0.1), momentum=0.9)
    optimizer.step()
    members: list[nn.Module] = [ensemble.subset([0, 2])]
    if family not in ("fresh masks", "heads"):
        members.append(ensemble.member(1))
    results = [*(member(x) for member in members), embens.predict(ensemble, x).members]
    assert all(v.is_meta for v in tree_leaves(results) if isinstance(v, Tensor))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_stays_on_the_device_of_its_reference(family):
    check(family, next(case for case in ARCHITECTURES if case.name == "reused"))


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
@pytest.mark.filterwarnings("ignore:this network can't run several:UserWarning")
def test_every_architecture_stays_on_its_device(case):
    for family in ("batch ensemble", "adapters"):
        check(family, case)


def test_an_ensemble_without_numbers_is_not_saved(tmp_path):
    ensemble = embens.batch_ensemble(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), 2)
    with pytest.raises(ValueError, match="no numbers to write: it is on the meta device"):
        ensemble.to("meta").save(tmp_path / "ensemble.safetensors")
