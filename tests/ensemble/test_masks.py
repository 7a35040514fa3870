"""Fresh masks: their generator, and copies that continue with the same masks."""

import copy
import pickle

import torch
from torch import nn

import embens


def fresh(seed, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
    generator = torch.Generator().manual_seed(seed)
    return embens.mc_dropout(net, 3, generator=generator, **options)


def test_fresh_masks_are_those_of_the_generator():
    x = torch.ones(2, 4)
    first, second, third = fresh(0), fresh(0), fresh(1)
    for _ in range(2):
        outputs = first(x)
        torch.rand(5)  # the global generator does not matter
        assert torch.equal(second(x), outputs)
        assert not torch.equal(third(x), outputs)

    assert not torch.equal(first(x), outputs)


def test_copies_continue_with_the_same_masks(tmp_path):
    x, ensemble = torch.ones(2, 4), fresh(0)
    ensemble(x)
    ensemble.save(tmp_path / "e.safetensors")
    copies = [
        copy.deepcopy(ensemble),
        pickle.loads(pickle.dumps(ensemble)),
        ensemble.subset([0, 1, 2]),
        embens.load(tmp_path / "e.safetensors", ensemble.reference),
    ]
    expected = ensemble(x)

    for copied in copies:
        assert torch.equal(copied(x), expected)
