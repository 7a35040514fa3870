"""One battery over every metric: shapes, types, edge cases and errors."""

import inspect
import typing

import jaxtyping
import pytest
import torch
from torch import Tensor

from embens import metrics

FUNCTIONS = [getattr(metrics, name) for name in metrics.__all__ if name != "Reliability"]
PAIRS = (metrics.correctness_correlation, metrics.disagreement)
LABELLED = [
    metrics.brier,
    metrics.correctness_correlation,
    metrics.ensemble_accuracy,
    metrics.expected_calibration_error,
    metrics.member_accuracy,
    metrics.member_nll,
    metrics.nll,
    metrics.reliability,
]
every = pytest.mark.parametrize("metric", FUNCTIONS, ids=lambda f: f.__name__)
labelled = pytest.mark.parametrize("metric", LABELLED, ids=lambda f: f.__name__)


def example(members=4, batch=20, classes=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    outputs = 2 * torch.randn(members, batch, classes, generator=generator, dtype=torch.float64)
    target = torch.arange(batch) % 2  # also marks samples of both kinds for ood_auroc
    return outputs.to(dtype), target


def tensors(result):
    return [result] if isinstance(result, Tensor) else list(result)


@every
def test_returns_the_shapes_it_promises(metric):
    outputs, target = example()
    hints = typing.get_type_hints(metric, localns=vars(jaxtyping))
    result = metric(outputs, target)
    if metric is metrics.reliability:
        assert [len(values) for values in result] == [15, 15, 15]
        return
    with jaxtyping.jaxtyped("context"):
        assert isinstance(outputs, hints["outputs"])
        assert isinstance(result, hints["return"])


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_computes_in_float32_at_least(metric, dtype):
    outputs, target = example(dtype=dtype)
    exact = tensors(metric(outputs.double(), target))
    for got, expected in zip(tensors(metric(outputs, target)), exact, strict=True):
        assert got.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(
            got.double(), expected, atol=2e-6, rtol=2e-5, equal_nan=metric is metrics.reliability
        )


@every
def test_gives_the_same_under_no_grad_and_leaves_its_arguments_alone(metric):
    outputs, target = example()
    before = outputs.clone(), target.clone()
    free = tensors(metric(outputs, target))
    outputs.requires_grad_()
    with torch.no_grad():
        fixed = tensors(metric(outputs, target))
    recorded = tensors(metric(outputs, target))
    for a, b, c in zip(free, fixed, recorded, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(a, c.detach(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(outputs, before[0])
    assert torch.equal(target, before[1])


@pytest.mark.parametrize("metric", [f for f in FUNCTIONS if f not in PAIRS])
@pytest.mark.parametrize(("members", "batch"), [(1, 20), (4, 2), (1, 2)])
def test_takes_a_single_member_and_a_small_batch(metric, members, batch):
    outputs, target = example(members, batch)
    for values in tensors(metric(outputs, target)):
        assert metric is metrics.reliability or values.isfinite().all()


@pytest.mark.parametrize("metric", [f for f in LABELLED if f not in PAIRS])
def test_takes_a_single_sample(metric):
    outputs, target = example(batch=1)
    for values in tensors(metric(outputs, target)):
        assert metric is metrics.reliability or values.isfinite().all()


@every
def test_gives_no_nan_where_probabilities_are_zero(metric):
    outputs = torch.tensor([1e4, -1e4, 3e38, -3e38]).outer(torch.tensor([1.0, -1.0]))
    outputs = outputs.expand(3, 4, 2) * torch.tensor([1.0, 1.0, -1.0])[:, None, None]
    for values in tensors(metric(outputs, torch.tensor([0, 0, 1, 1]))):
        assert metric is metrics.reliability or not values.isnan().any()


@every
@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda x: x.tolist(), TypeError, "got list; convert with torch.as_tensor"),
        (lambda x: x.argmax(-1), TypeError, "got torch.int64; pass the logits"),
        (lambda x: x[0], ValueError, r"got shape \(20, 2\); for a single model add the member"),
        (lambda x: x[None], ValueError, r"got shape \(1, 4, 20, 2\)"),
        (lambda x: x[:, :0], ValueError, r"got the empty shape \(4, 0, 2\); pass at least one"),
        (lambda x: x[:0], ValueError, r"got the empty shape \(0, 20, 2\)"),
        (lambda x: x[..., :1], ValueError, "got a single class .* for one logit z"),
        (lambda x: x / 0, ValueError, "got 160 values that are NaN or infinite"),
        (lambda x: x * torch.nan, ValueError, "look for a diverged run"),
    ],
)
def test_says_what_is_wrong_with_outputs(metric, spoil, error, message):
    outputs, target = example()
    with pytest.raises(error, match=f"outputs: expected finite logits .*{message}"):
        metric(spoil(outputs), target)


@labelled
@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda y: y.tolist(), TypeError, "got list; convert with torch.as_tensor"),
        (lambda y: y.float(), TypeError, r"got torch.float32; convert with target.long\(\)"),
        (lambda y: y.bool(), TypeError, "got torch.bool"),
        (lambda y: y[:, None], ValueError, r"got shape \(20, 1\); squeeze a column"),
        (lambda y: y[1:], ValueError, r"got shape \(19,\)"),
        (lambda y: y + 1, ValueError, "got indices from 1 to 2; .* an output for every class"),
        (lambda y: -100 * y, ValueError, "got indices from -100 to 0; leave out samples"),
    ],
)
def test_says_what_is_wrong_with_the_target(metric, spoil, error, message):
    outputs, target = example()
    expected = r"target: expected 20 class indices from 0 to 1, shape \(20,\)"
    with pytest.raises(error, match=f"{expected}, {message}"):
        metric(outputs, spoil(target))


@labelled
def test_takes_any_integer_type_of_target(metric):
    outputs, target = example()
    for dtype in (torch.uint8, torch.int32):
        for a, b in zip(
            tensors(metric(outputs, target)),
            tensors(metric(outputs, target.to(dtype))),
            strict=True,
        ):
            torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("metric", [f for f in FUNCTIONS if f not in LABELLED])
def test_needs_no_target_where_it_plays_no_part(metric):
    outputs, target = example()
    if metric is metrics.ood_auroc:
        return
    assert inspect.signature(metric).parameters["target"].default is None
    assert torch.equal(metric(outputs), metric(outputs, target))
