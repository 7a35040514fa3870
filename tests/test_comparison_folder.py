"""A folder continues the same comparison only."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from embens.comparison import compare
from embens.comparison_folder import open_folder


def data(seed: int = 0):
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()


PARTS = {"train": data(0), "validation": data(1), "test": data(2)}


def test_the_same_comparison_is_continued(tmp_path):
    folder = open_folder(tmp_path / "new" / "folder", ["one", "batch"], PARTS)
    assert open_folder(str(folder), ["one", "batch"], PARTS) == folder


@pytest.mark.parametrize("names", [["batch", "one"], ["one"], ["one", "wide"]])
def test_other_candidates_are_refused(names, tmp_path):
    open_folder(tmp_path, ["one", "batch"], PARTS)
    with pytest.raises(ValueError, match="other candidates"):
        open_folder(tmp_path, names, PARTS)


@pytest.mark.parametrize("content", ["{", "[1]", "\x00", "[" * 100_000])
def test_a_damaged_description_is_refused(content, tmp_path):
    open_folder(tmp_path, ["one"], PARTS)
    (tmp_path / "comparison.json").write_text(content)

    with pytest.raises(ValueError, match="is damaged"):
        open_folder(tmp_path, ["one"], PARTS)


def test_a_file_in_place_of_the_folder_is_an_error_before_any_training(tmp_path):
    (tmp_path / "file").write_text("precious")
    for folder in (tmp_path / "file", tmp_path / "file" / "within"):
        with pytest.raises(NotADirectoryError, match=r"A comparison needs a folder.*file'"):
            open_folder(folder, ["one"], PARTS)
    (tmp_path / "comparison.json").mkdir()
    with pytest.raises(ValueError, match="is damaged"):
        open_folder(tmp_path, ["one"], PARTS)

    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("part", PARTS)
def test_other_values_of_the_data_are_refused(part, tmp_path):
    open_folder(tmp_path, ["one"], PARTS)
    with pytest.raises(ValueError, match=f"other {part} data"):
        open_folder(tmp_path, ["one"], {**PARTS, part: data(9)})


def test_loaders_are_compared_by_their_number_of_batches(tmp_path):
    loader = DataLoader(TensorDataset(*data()), 5)
    open_folder(tmp_path, ["one"], {**PARTS, "train": loader})
    open_folder(tmp_path, ["one"], {**PARTS, "train": loader})
    other = DataLoader(TensorDataset(*data()), 10)
    with pytest.raises(ValueError, match="4 before, 2 now"):
        open_folder(tmp_path, ["one"], {**PARTS, "train": other})


def test_candidates_in_another_order_do_not_get_the_runs_of_each_other(tmp_path):
    candidates = {"one": nn.Linear(3, 2), "other": nn.Linear(3, 2)}
    arguments = {**PARTS, "epochs": 1, "folder": tmp_path, "progress": False}
    compare(candidates, **arguments)
    with pytest.raises(ValueError, match="other candidates"):
        compare(dict(reversed(candidates.items())), **arguments)
