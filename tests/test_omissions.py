"""Warnings about parts of a reference in which members do not differ."""

import pytest
import torch
from torch import nn

import embens
from embens import laws


class Unknown(nn.Module):
    """A layer of a class that is not registered."""

    def __init__(self, name: str, size: int):
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.randn(size, size)))

    def forward(self, x):
        return x @ getattr(self, self.name)


def test_layers_of_unknown_type_are_named_in_a_warning():
    reference = nn.Sequential(nn.Linear(3, 4), Unknown("weight", 4), nn.Linear(4, 2))
    with pytest.warns(UserWarning, match=r"do not differ in '1'.*Unknown.*register_layer"):
        ensemble = embens.embed(reference, 3)
    assert {site.layer for site in ensemble.spec.sites} == {"0", "2"}


class Signals(nn.Module):
    """A recurrent layer on the input."""

    def __init__(self):
        super().__init__()
        self.core = nn.GRU(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.core(x)[0][:, -1])


class TestEqualWeights:
    """A warning names what is left out if members differ in less than half of the weights."""

    def test_bare_parameters_are_named(self):
        reference = nn.Sequential(nn.Linear(3, 9), Unknown("matrix", 9), nn.Linear(9, 2))
        with pytest.warns(UserWarning, match=r"'1.matrix'\. Keep") as caught:
            embens.embed(reference, 3)

        assert caught[0].filename == __file__

    @pytest.mark.parametrize("family", ["mc_dropout", "masksembles"])
    def test_recurrent_weights_without_masks_are_named(self, family):
        with pytest.warns(UserWarning, match=r"'core.weight_hh_l0'.*batch_ensemble") as caught:
            getattr(embens, family)(Signals(), 3)

        assert caught[0].filename == __file__

    @pytest.mark.parametrize(
        "make",
        [
            lambda: embens.batch_ensemble(Signals(), 3),
            lambda: embens.low_rank(Signals(), 3, rank=1),
            lambda: embens.adapt(Signals(), 3),
            lambda: embens.adapt(Signals(), 3, by="head"),
            lambda: embens.last_layer_dropout(Signals(), 3),
            lambda: embens.mc_dropout(Signals(), 3, sites=["head"]),
            lambda: embens.mc_dropout(Signals(), 3, sites=lambda name, module: name == "head"),
            lambda: embens.embed(Signals(), 3, None, {"head": laws.Normal()}),
            lambda: embens.embed(Signals(), 3, None, None, own=["core", "head"]),
            lambda: embens.mc_dropout(nn.Sequential(nn.Linear(99, 3), nn.ReLU(), nn.Linear(3, 2))),
            lambda: embens.embed(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 99)), 3, post=None),
            lambda: embens.embed(
                nn.Sequential(nn.Linear(9, 5), Unknown("matrix", 5), nn.Linear(5, 9)), 3
            ),
            lambda: embens.last_layer_dropout(
                nn.Sequential(nn.Linear(3, 4), Unknown("weight", 4), nn.Linear(4, 2)), 3
            ),
        ],
        ids=range(13),
    )
    def test_there_is_no_warning_where_members_differ_or_the_choice_is_explicit(self, make):
        make()  # warnings are errors
