"""Export to ONNX: one file from raw columns to the prediction.

Inputs: ``numbers``, float64 ``(row, column)``, the numeric columns as they were fitted, NaN where
one is missing; and, if there are categorical columns, ``codes``, int64 ``(row, column)``, whose
meaning is in the file's metadata (``categories``: for each column a map from label to code;
``rare`` is the number of kept labels, missing one more). Outputs: ``probabilities`` of a classifier
(``probabilities_0``, … of several labels); ``predicted_mean`` and
``predicted_std`` of a regressor.

The file is checked against the estimator with onnxruntime before it is kept.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from embens.estimators.base import TableEnsemble


class Raw(nn.Module):
    """From raw columns to members' outputs."""

    def __init__(self, estimator: TableEnsemble):
        super().__init__()
        known = estimator.preprocessing_
        self.centre = nn.Buffer(torch.as_tensor(known.centre))
        self.scale = nn.Buffer(torch.as_tensor(known.scale))
        self.ensemble = estimator.ensemble_
        self.dtype = next(estimator.ensemble_.parameters()).dtype
        self.categorical = len(known.categorical)

    def run_members(self, numbers: Tensor, codes: Tensor | None) -> Tensor:
        """Return the members' outputs."""
        scaled = ((numbers - self.centre) / self.scale).to(self.dtype)
        if codes is None:
            codes = torch.zeros(numbers.shape[0], 0, dtype=torch.int64)
        return self.ensemble(scaled, codes)


class RawClassifier(Raw):
    """Mean probabilities of each label."""

    def __init__(self, estimator: Any):
        super().__init__(estimator)
        self.sizes = list(estimator._make_head(False).sizes)
        self.temperature = estimator.temperature_

    def forward(self, numbers: Tensor, codes: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return probabilities."""
        logits = self.run_members(numbers, codes) / self.temperature
        return tuple(part.softmax(-1).mean(0) for part in logits.split(self.sizes, dim=-1))


class RawRegressor(Raw):
    """Mean and standard deviation of the mixture."""

    def __init__(self, estimator: Any):
        super().__init__(estimator)
        self.targets = len(estimator.y_mean_)
        self.y_mean, self.y_std = nn.Buffer(estimator.y_mean_), nn.Buffer(estimator.y_std_)
        self.factor = nn.Buffer(estimator.temperature_)

    def forward(self, numbers: Tensor, codes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation."""
        from embens.estimators.heads import LOG_VARIANCES

        outputs = self.run_members(numbers, codes).to(torch.float64)
        means = outputs[..., : self.targets]
        mean = means.mean(0)
        epistemic = ((means - mean) ** 2).mean(0)
        aleatoric = outputs[..., self.targets :].clamp(*LOG_VARIANCES).exp().mean(0)
        variance = aleatoric * self.factor**2 + epistemic
        return self.y_mean + self.y_std * mean, self.y_std * variance.sqrt()


def to_onnx(estimator: TableEnsemble, path: str | os.PathLike[str]) -> Path:
    """Write a fitted estimator as ONNX, and check the file with onnxruntime."""
    import onnx
    from sklearn.base import is_classifier
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(estimator, "ensemble_")
    known = estimator.preprocessing_
    if any(site.fresh for site in estimator.ensemble_.plan.sites):
        raise ValueError("masks that are drawn anew at each pass can't be exported")
    classifier = is_classifier(estimator)
    module = RawClassifier(estimator) if classifier else RawRegressor(estimator)
    module.eval()
    outputs = ["predicted_mean", "predicted_std"]
    if isinstance(module, RawClassifier):
        count = len(module.sizes)
        outputs = [f"probabilities_{k}" for k in range(count)] if count > 1 else ["probabilities"]
    numbers, codes = _example(estimator)
    names = ["numbers", "codes"] if known.categorical else ["numbers"]
    arguments = (numbers, codes) if known.categorical else (numbers,)
    row = torch.export.Dim("row")
    path = Path(path)
    with _quiet(), torch.no_grad():
        module.ensemble.chunk = 1 if module.ensemble.plan.separate else None
        program = torch.onnx.export(
            module,
            arguments,
            input_names=names,
            output_names=outputs,
            dynamic_shapes=tuple({0: row} for _ in names),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    _annotate(model, estimator)
    onnx.save(model, str(path))
    _check(path, names, arguments, module)
    return path


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's own warnings and remarks to itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _example(estimator: TableEnsemble) -> tuple[Tensor, Tensor]:
    """Return raw rows in the range of the training part, some numbers missing."""
    known = estimator.preprocessing_
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(8, len(known.numeric), generator=generator, dtype=torch.float64)
    numbers = torch.as_tensor(known.centre) + spread * torch.as_tensor(known.scale)
    if len(known.numeric):
        numbers[0, 0] = float("nan")
    most = torch.tensor([len(kept) + 2 for kept in known.categories], dtype=torch.float64)
    codes = (torch.rand(8, len(most), generator=generator, dtype=torch.float64) * most).long()
    return numbers, codes


def _annotate(model: Any, estimator: TableEnsemble) -> None:
    """Write the meaning of inputs and outputs into the metadata."""
    known = estimator.preprocessing_
    notes = {
        "numeric": [known.names[j] for j in known.numeric],
        "categorical": [known.names[j] for j in known.categorical],
        "categories": [{name: i for i, name in enumerate(kept)} for kept in known.categories],
    }
    classes = getattr(estimator, "classes_", None)
    if classes is not None:
        parts = classes if isinstance(classes, list) else [classes]
        notes["classes"] = [c.tolist() for c in parts]
    for key, value in notes.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, json.dumps(value)


def _check(path: Path, names: list[str], arguments: tuple, module: nn.Module) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    feed = {n: a[:5].numpy() for n, a in zip(names, arguments, strict=True)}
    found = session.run(None, feed)
    with torch.no_grad():
        expected = module(*(a[:5] for a in arguments))
    for ours, theirs in zip(expected, found, strict=True):
        torch.testing.assert_close(
            torch.from_numpy(theirs).double(), ours.double(), rtol=1e-3, atol=1e-5
        )
