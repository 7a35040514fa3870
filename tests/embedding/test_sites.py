"""Which sites are chosen, and what is said of a choice that makes no sense."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import embens
from embens import laws


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


def chosen(ensemble) -> set[tuple[str, str]]:
    return {(s.layer, s.kind) for s in ensemble.plan.sites}


def sites_of(**kwargs) -> set[tuple[str, str]]:
    return chosen(embens.embed(mlp(), 2, **kwargs))


HIDDEN = {("0", "pre"), ("2", "post"), ("2", "pre"), ("4", "post")}
ALL = HIDDEN | {("0", "post"), ("4", "pre")}


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        ("hidden", HIDDEN),
        ("last", {("4", "post")}),
        ("all", ALL),
        ("2", {("2", "pre"), ("2", "post")}),
        (["0", "4"], {("0", "pre"), ("0", "post"), ("4", "pre"), ("4", "post")}),
        ("[02]", {("0", "pre"), ("0", "post"), ("2", "pre"), ("2", "post")}),
        (lambda name, module: module.out_features == 5, {("2", "pre"), ("2", "post")}),
    ],
)
def test_sites_are_chosen_by_name_wildcard_predicate_or_word(sites, expected):
    assert sites_of(sites=sites) == expected


def test_a_missing_law_leaves_its_side_out():
    assert sites_of(pre=None) == {("2", "post"), ("4", "post")}
    assert sites_of(post=None) == {("0", "pre"), ("2", "pre")}


def test_a_mapping_sets_laws_layer_by_layer_and_leaves_the_rest_unmodulated():
    ensemble = embens.embed(
        mlp(), 2, pre={"0": laws.Rademacher()}, post={"*": laws.Normal(), "4": laws.Ternary()}
    )
    found = {(s.layer, s.kind): s.law for s in ensemble.plan.sites}
    assert found == {
        ("0", "pre"): laws.Rademacher(),
        ("2", "post"): laws.Normal(),
        ("4", "post"): laws.Ternary(),
    }


def test_trainable_goes_by_side_and_by_site():
    ensemble = embens.embed(mlp(), 2, trainable={"pre": False, "post": {"2": True, "4": False}})
    found = {(s.layer, s.kind): s.trainable for s in ensemble.plan.sites}
    assert found == {
        ("0", "pre"): False,
        ("2", "pre"): False,
        ("2", "post"): True,
        ("4", "post"): False,
    }
    assert len(list(ensemble.individual_parameters())) == 1
    assert len(list(ensemble.shared_parameters())) == 6


def test_an_embedding_has_no_input_to_modulate():
    reference = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    assert chosen(embens.embed(reference, 2, sites="all")) == {
        ("0", "pre"),
        ("1", "pre"),
        ("1", "post"),
    }


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"members": 0}, ValueError, "members must be at least 1; got 0"),
        ({"members": -2}, ValueError, "at least 1; got -2"),
        ({"members": 2.5}, TypeError, "whole number; got 2.5"),
        ({"members": True}, TypeError, "whole number; got True"),
        ({"sites": "hiden"}, ValueError, "'hiden' matches no layer; did you mean 'hidden'"),
        ({"sites": "fc*"}, ValueError, "'fc.' matches no layer. Candidates: '0', '2', '4'"),
        ({"sites": ["0", "7"]}, ValueError, "'7' matches no layer"),
        ({"sites": []}, ValueError, "sites is empty"),
        ({"sites": [3]}, TypeError, "names or wildcards"),
        ({"sites": lambda name, module: False}, ValueError, "true of no parameter layer"),
        ({"pre": None, "post": None}, ValueError, "pre and post are both None"),
        ({"pre": "normal"}, TypeError, "pre must be a law or None.*got 'normal'"),
        ({"pre": 1.0}, TypeError, "laws.Normal"),
        ({"pre": {"9": laws.Normal()}}, ValueError, "'9' matches none of the selected pre sites"),
        ({"pre": {"4": laws.Normal()}}, ValueError, "only among sites='all'"),
        ({"post": {"2": "x"}}, TypeError, r"post\['2'\] must be a law or None"),
        ({"trainable": {"past": True}}, ValueError, "unknown 'past'; did you mean 'post'"),
        ({"trainable": "yes"}, TypeError, "must be True or False"),
        ({"trainable": {"pre": {"4": True}}}, ValueError, "'4' matches none"),
        ({"norm_statistics": "own"}, ValueError, "norm_statistics: unknown 'own'"),
        ({"norm_affine": "none"}, ValueError, "norm_affine: unknown 'none'"),
        ({"example_input": torch.zeros(2, 7)}, ValueError, "could not be called on example_input"),
    ],
)
def test_a_bad_choice_is_refused_and_the_reference_stays_as_it_was(kwargs, error, message):
    reference = mlp()
    before = copy.deepcopy(reference.state_dict())
    kinds = [type(m) for m in reference.modules()]
    with pytest.raises(error, match=message):
        embens.embed(reference, **{"members": 2, **kwargs})
    assert [type(m) for m in reference.modules()] == kinds
    assert all(torch.equal(before[k], v) for k, v in reference.state_dict().items())


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        (nn.ReLU(), ValueError, "no parameter layer"),
        (nn.LSTM(3, 4), ValueError, "one layer has no hidden site"),
        (nn.Linear(3, 4), ValueError, "one layer has no hidden site"),
        (nn.Linear, TypeError, "Pass an instance, not the class"),
        (torch.zeros(3), TypeError, "must be a torch.nn.Module; got Tensor"),
        (nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)), ValueError, "without a shape yet"),
        (embens.batch_ensemble(mlp(), 2), TypeError, "an ensemble; pass a plain network"),
        (nn.Sequential(embens.batch_ensemble(mlp(), 2)), TypeError, "contains, an ensemble"),
        (lambda: torch.compile(mlp()), TypeError, "inside the OptimizedModule"),
        (nn.DataParallel(mlp()), TypeError, "the module inside the DataParallel"),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch.compile's own imports
def test_a_reference_that_cannot_be_embedded_is_refused_with_a_reason(reference, error, message):
    if not isinstance(reference, (nn.Module, type)) and callable(reference):
        reference = reference()
    with pytest.raises(error, match=message):
        embens.embed(reference, 2)


def test_one_layer_can_be_modulated_on_all_sides():
    ensemble = embens.embed(nn.Linear(3, 4), 2, sites="all")
    x = torch.randn(5, 3)
    torch.testing.assert_close(ensemble(x)[1], ensemble.member(1)(x))
    assert type(ensemble.member(1)) is nn.Linear


def test_a_layer_whose_name_looks_like_a_wildcard_is_called_by_it():
    reference = nn.Sequential()
    for name in ("fc[0]", "a*", "ab", "out"):
        reference.add_module(name, nn.Linear(4, 4))
    assert {s.layer for s in embens.embed(reference, 2, sites="fc[0]").plan.sites} == {"fc[0]"}
    assert {s.layer for s in embens.embed(reference, 2, sites="a*").plan.sites} == {"a*"}
    chosen = embens.embed(reference, 2, pre={"fc[0]": laws.Normal()}, post=None)
    assert [s.layer for s in chosen.plan.sites] == ["fc[0]"]
