"""Nested containers in files."""

import json
from collections import Counter

import pytest
import torch

from embens.files import (
    Format,
    pack,
    read_tree,
    unpack,
    write_tree,
)

KIND = Format("numbers", 1)


class TestTrees:
    TREE = {  # noqa: RUF012
        "a": [1, 2.5, "b", None, True, float("inf"), 0.1 + 0.2],
        3: (torch.arange(3), {"x": torch.zeros(2, dtype=torch.bfloat16)}),
        "c": Counter({1: 2}),
        "d": [],
    }

    def test_are_packed_without_loss(self):
        tensors: dict[str, torch.Tensor] = {}
        packed = json.loads(json.dumps(pack(self.TREE, tensors)))
        assert repr(unpack(packed, tensors)) == repr(self.TREE)

    def test_are_restored_from_files(self, path):
        write_tree(path, KIND, self.TREE)
        assert repr(read_tree(path, KIND)) == repr(self.TREE)

    def test_with_other_objects_raise(self):
        with pytest.raises(TypeError, match="got function"):
            pack({"f": pack}, {})
        with pytest.raises(ValueError, match="unknown kind of container 'dtype'"):
            unpack({"dtype": "save"}, {})
