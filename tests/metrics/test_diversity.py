import warnings

import numpy
import pytest
import torch

from embens import metrics


@pytest.fixture(params=range(3))
def case(request):
    generator = torch.Generator().manual_seed(request.param)
    shared = torch.randn(30, 3, generator=generator)
    outputs = shared + torch.randn(6, 30, 3, generator=generator)
    return outputs, torch.randint(3, (30,), generator=generator)


def outputs_of(correct):
    """Two-class outputs that are right on class 0 where told to be."""
    correct = torch.as_tensor(correct, dtype=torch.float32)
    return torch.stack([correct, 1 - correct], -1), torch.zeros(correct.shape[1], dtype=torch.int64)


def mean_over_pairs(matrix):
    members = len(matrix)
    return sum(matrix[a][b] for a in range(members) for b in range(members) if a != b) / (
        members * (members - 1)
    )


def test_correlation_is_the_mean_pearson_coefficient_over_pairs(case):
    outputs, target = case
    correct = (outputs.argmax(-1) == target).double()
    expected = mean_over_pairs(numpy.corrcoef(correct.numpy()))
    got = metrics.correctness_correlation(outputs, target).item()
    assert got == pytest.approx(expected, abs=1e-6)


def test_correlation_of_equal_members_is_one_and_of_opposite_ones_minus_one():
    row = [1, 1, 0, 1, 0]
    assert metrics.correctness_correlation(*outputs_of([row] * 7)) == pytest.approx(1)
    opposite = [1 - value for value in row]
    assert metrics.correctness_correlation(*outputs_of([row, opposite])) == pytest.approx(-1)


def test_correlation_leaves_out_members_that_are_always_or_never_right():
    rows = [[1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 1]]
    alone = metrics.correctness_correlation(*outputs_of(rows))
    joined = metrics.correctness_correlation(*outputs_of([*rows, [1] * 4, [0] * 4]))
    assert joined == pytest.approx(alone.item())
    assert joined == pytest.approx(mean_over_pairs(numpy.corrcoef(rows)))


@pytest.mark.parametrize(
    ("rows", "left"),
    [([[1, 1], [0, 0]], "0 of 2"), ([[1, 0], [0, 0], [1, 1]], "1 of 3"), ([[1, 0]], "1 of 1")],
)
def test_correlation_without_a_pair_is_nan_with_a_warning(rows, left):
    outputs, target = outputs_of(rows)
    with pytest.warns(RuntimeWarning, match=f"correctness_correlation is NaN: .* {left} members"):
        assert metrics.correctness_correlation(outputs, target).isnan()


def test_the_warning_points_at_the_caller():
    outputs, target = outputs_of([[1, 0]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metrics.correctness_correlation(outputs, target)
        metrics.disagreement(outputs)
    assert [warning.filename for warning in caught] == [__file__, __file__]


def test_correlation_does_not_mind_the_order_of_members(case):
    outputs, target = case
    torch.testing.assert_close(
        metrics.correctness_correlation(outputs.flip(0), target),
        metrics.correctness_correlation(outputs, target),
    )


def test_disagreement_is_the_mean_fraction_over_pairs(case):
    outputs, _ = case
    predicted = outputs.argmax(-1)
    matrix = [[(a != b).float().mean().item() for b in predicted] for a in predicted]
    assert metrics.disagreement(outputs).item() == pytest.approx(mean_over_pairs(matrix))


def test_disagreement_runs_from_zero_to_one():
    assert metrics.disagreement(torch.eye(3).expand(4, 3, 3)) == 0
    assert metrics.disagreement(torch.eye(3)[:, None, :]) == 1


def test_disagreement_of_one_member_is_nan_with_a_warning(case):
    with pytest.warns(RuntimeWarning, match="disagreement is NaN: .* outputs have 1 member"):
        assert metrics.disagreement(case[0][:1]).isnan()
