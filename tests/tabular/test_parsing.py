"""Saved estimators: each field is checked for its type, its range and its agreement with others."""

import copy
import functools

import numpy as np
import pytest
import torch
from tabular.problems import classifier, mixed_table, regressor

from embens.fields import FIX, Fields
from embens.files import Refused, read_tree, write_tree
from embens.tabular import load
from embens.tabular.parsing import read_arguments, read_history, read_sizes
from embens.tabular.storage import FORMAT


@functools.cache
def saved(kind, folder):
    """Save a small estimator; return its path and the tree in the file."""
    X, target = mixed_table(80)
    if kind == "classifier":
        model = classifier(max_epochs=1).fit(X, target > 0)
    else:
        model = regressor(max_epochs=1).fit(X, target)
    path = folder / f"{kind}.safetensors"
    model.save(path)
    return path, read_tree(path, FORMAT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


NAN = float("nan")
COLUMN = ("columns", "numeric", 0)
CATEGORIES = ("columns", "categorical", 0)
COMMON = [
    (("sizes", "width"), 10**9, "sizes.width must be an integer from 1 to"),
    (("sizes", "width"), 2**19, "weights do not fit into the"),
    (("sizes", "members"), 5, "sizes must be those of 4 members"),
    (("sizes", "members"), True, "sizes.members must be a value of type int, got True"),
    (("sizes", "p"), 2.0, "sizes.p must be a finite number from -1 to 1"),
    (("sizes", "dropout"), NAN, "sizes.dropout must be a value of type float, got nan"),
    (("arguments", "depth"), 10**9, "weights do not fit into the"),
    (("arguments", "depth"), "deep", "depth must be a positive integer, got 'deep'"),
    (("arguments", "family"), "random", "family must be one of"),
    (("arguments", "law"), {"law": "os.system"}, "arguments.law: the file uses an unknown law"),
    (("arguments", "random_state"), ["0"], "arguments.random_state must be a value of type"),
    (("arguments", "verbose"), None, "arguments.verbose must be a value of type"),
    (("arguments", "surprise"), 1, "arguments has an unknown field 'surprise'"),
    (("features",), 9, "features must be an integer from 5 to 5"),
    (("feature_names",), ["a"], "feature_names must be the names of the columns"),
    (("dtype",), "save", "dtype must be one of 'float32', 'float64', got 'save'"),
    ((*COLUMN, "position"), 99, r"numeric\[0\].position must be an integer from 0 to 4"),
    ((*COLUMN, "scale"), 0.0, r"numeric\[0\].scale must be a number above 0"),
    ((*COLUMN, "centre"), NAN, r"numeric\[0\].centre must be a finite number"),
    ((*COLUMN, "edges"), torch.zeros(3), "scores must be a tensor of float32 with 3 values"),
    ((*COLUMN, "edges"), torch.zeros(2, 2), "edges must be a tensor with 1 dimensions"),
    ((*COLUMN, "has_missing"), 1, "has_missing must be a value of type bool"),
    ((*CATEGORIES, "categories"), ["a", "a"], "categories has 'a' twice"),
    ((*CATEGORIES, "labels"), ["a"], r"statistics must be a tensor of shape \(6, 3, …\)"),
    ((*CATEGORIES, "statistics"), torch.zeros(2), "statistics must be a tensor with 3 dimens"),
    (("columns", "notes"), [1], "columns.notes must be a list of texts"),
    (("held_out", "members"), [0.5], "held_out.members must be a list of 4 losses"),
    (("history", "epochs"), [1], "history.epochs must be a list of rows"),
    (("history", "best_epoch"), 10**6, "history.best_epoch must be an integer from 1 to 1"),
    (("head", "temperature"), -1.0, "head.temperature must be above 0"),
    (("head", "scores"), torch.zeros(3, 7), "head.scores must be a tensor with 1 columns"),
    (("ensembles",), [torch.zeros(3)], "tree.ensembles must be a list of tensors of bytes"),
]
CLASSES = [
    (("head", "labels"), [("<U1000000000", ["a", "b"])], "labels must be classes of a plain type"),
    (("head", "labels"), [("V9", ["a", "b"])], "labels must be classes of a plain type"),
    (("head", "labels"), [("|b1", [True, True])], "labels must be sorted and unique classes"),
    (("head", "labels"), [("<U1", ["no", "yes"])], "labels must be classes of their type"),
    (("head", "labels"), [], "labels must be the classes of at least one label"),
    (("head", "labels"), [3], "labels must be a list of pairs"),
]
NUMBERS = [
    (("head", "targets"), 10**9, "weights do not fit into the|must be a tensor with"),
    (("head", "targets"), 0, "head.targets must be an integer of at least 1"),
    (("head", "loss"), "other", "head.loss must be one of"),
    (("head", "std"), torch.zeros(1).double(), "head.std must be above 0"),
]
CASES = [("classifier", *case) for case in COMMON + CLASSES]
CASES += [("regressor", *case) for case in NUMBERS]


@pytest.mark.parametrize(("kind", "path", "value", "message"), CASES)
def test_a_wrong_field_is_an_error_with_file_and_field(
    kind, path, value, message, folder, tmp_path
):
    _, tree = saved(kind, folder)
    tree = copy.deepcopy(tree)
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    forged = tmp_path / "forged.safetensors"
    write_tree(forged, FORMAT, tree)

    with pytest.raises(Refused, match=message) as caught:
        load(forged)
    assert str(caught.value).startswith("forged.safetensors")


@pytest.mark.parametrize("kind", ["classifier", "regressor"])
def test_an_unchanged_tree_is_read(kind, folder, tmp_path):
    path, tree = saved(kind, folder)
    write_tree(tmp_path / "copy", FORMAT, tree)
    X, _ = mixed_table(10)
    np.testing.assert_array_equal(load(tmp_path / "copy").predict(X), load(path).predict(X))


@pytest.mark.parametrize("name", ["sizes", "head", "columns", "arguments", "history"])
def test_a_missing_field_is_an_error(name, folder, tmp_path):
    _, tree = saved("classifier", folder)
    for field in tree[name]:
        rest = {key: value for key, value in tree[name].items() if key != field}
        write_tree(tmp_path / "forged", FORMAT, {**tree, name: rest})
        with pytest.raises(Refused, match=rf"{name}( |: .*){'has no field'} '{field}'"):
            load(tmp_path / "forged")


def test_parts_are_read_alone(folder):
    _, tree = saved("classifier", folder)
    sizes = read_sizes(Fields(dict(tree["sizes"]), "x"))
    assert vars(sizes) == tree["sizes"]
    assert read_history(Fields(dict(tree["history"]), "x")).stopped == "epochs"
    model = classifier()
    again = read_arguments(type(model), Fields(model.get_params(deep=False), "x"))
    assert again.get_params() == model.get_params()
    with pytest.raises(Refused, match=r"x\.lr must be") as caught:
        read_sizes(Fields({**tree["sizes"], "lr": -1.0}, "x"))
    assert str(caught.value).endswith(FIX)
