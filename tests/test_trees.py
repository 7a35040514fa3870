"""Joining nested outputs, and counting rows."""

import numpy
import pytest
import torch

from embens.trees import batch_size, check_same_structure, gather, join_members


def test_gather_joins_tensors_at_every_place():
    outputs = []
    for a in range(3):
        outputs.append({"logits": torch.full((2, 4), float(a)), "rest": (torch.ones(5), None)})
    stacked = gather(outputs, torch.stack)
    assert stacked["logits"].shape == (3, 2, 4)
    assert stacked["logits"][:, 0, 0].tolist() == [0.0, 1.0, 2.0]
    assert stacked["rest"][0].shape == (3, 5)
    joined = gather(outputs, torch.cat)
    assert joined["logits"].shape == (6, 4)


def test_gather_joins_plain_tensors():
    assert gather([torch.zeros(1, 2), torch.ones(3, 2)], torch.cat).shape == (4, 2)


def test_leaves_that_are_not_tensors_are_kept_if_they_are_equal():
    assert gather([("a", 1), ("a", 2)], torch.stack) == ("a", None)


def test_objects_that_differ_between_members_are_left_out():
    class Cache:
        """As language models return it, with tensors in nested objects."""

    outputs = [(torch.zeros(1), Cache()), (torch.ones(1), Cache())]
    check_same_structure(outputs)
    assert gather(outputs, torch.cat)[1] is None


def test_arrays_that_differ_between_members_are_refused():
    with pytest.raises(TypeError, match="different values of type ndarray"):
        check_same_structure([numpy.zeros(2), numpy.ones(2)])


def test_batch_size_is_the_length_of_the_first_tensor_with_an_axis():
    assert batch_size(torch.zeros(5, 2)) == 5
    assert batch_size({"scale": torch.tensor(2.0), "x": torch.zeros(3, 1)}) == 3
    assert batch_size((None, [torch.zeros(7)], torch.zeros(2))) == 7


def test_batch_size_without_tensors_is_zero():
    assert batch_size(()) == 0
    assert batch_size([torch.tensor(1.0), "text"]) == 0


def test_outputs_of_another_structure_or_with_other_values_are_refused():
    y = torch.zeros(1)
    check_same_structure([(y, "a", None), (y + 1, "a", None)])
    for other in ([y, "a", None], (y, "a"), (y, y, None)):
        with pytest.raises(ValueError, match="different structures"):
            check_same_structure([(y, "a", None), other])
    with pytest.raises(TypeError, match="different values of type str"):
        check_same_structure([(y, "a"), (y, "b")])


def test_members_whose_outputs_differ_in_shape_cannot_be_joined():
    assert join_members([torch.zeros(2, 3), torch.zeros(1, 3)]).shape == (3, 3)
    with pytest.raises(ValueError, match=r"different shapes, \[\(3,\), \(4,\)\]"):
        join_members([torch.zeros(1, 3), torch.zeros(1, 4)])
