"""Names and wildcards of layers."""

import pytest
import torch
from cases import Residual
from torch import nn

import embens
from embens.embed import Source
from embens.patterns import list_names, select_layers, select_modules


def make_source() -> Source:
    blocks = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU())
    return Source(nn.Sequential(nn.Linear(3, 3), blocks, nn.Linear(3, 2)), 2)


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        ("2", {"2"}),
        (["0", "1.*"], {"0", "1.0"}),
        (lambda name, module: module.out_features == 2, {"2"}),
    ],
)
def test_layers_are_selected_by_name_wildcard_or_predicate(sites, expected):
    assert select_layers(make_source(), sites) == expected


@pytest.mark.parametrize(
    ("sites", "error"),
    [("3", ValueError), (3, TypeError), ([], ValueError), (lambda name, module: False, ValueError)],
)
def test_a_selection_without_layers_raises(sites, error):
    with pytest.raises(error, match=r"layer|Name at least one"):
        select_layers(make_source(), sites)


def test_a_module_stands_for_the_layers_inside_it():
    assert select_modules(make_source(), "1") == {"1.0", "1.1"}


def test_modules_are_selected_by_wildcards_and_as_the_last():
    assert select_modules(make_source(), "[02]") == {"0", "2"}
    assert select_modules(make_source(), ["1.1", "last"]) == {"1.1", "2"}


def test_a_long_list_of_names_is_cut():
    assert list_names(["a", "b"]) == "'a', 'b'"
    assert list_names("abc", limit=2) == "'a', 'b', …"


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("heda", "own: 'heda' matches no layer; did you mean 'head'"),
        ("blocks.7.*", "matches no layer"),
        (3, "own must be 'last', or names"),
        ([3], "own must be 'last', or names"),
    ],
)
def test_invalid_names_raise(own, message):
    with pytest.raises((ValueError, TypeError), match=message):
        embens.embed(Residual(), 3, own=own)


def test_a_module_with_bare_parameters_raises():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.layer(x) * self.scale

    reference = nn.Sequential(nn.Linear(3, 3), Block())
    with pytest.raises(ValueError, match=r"'1' contains '1' \(Block\).* not a known layer"):
        embens.embed(reference, 3, own="1")
    embens.embed(reference, 3, own="1.*")
