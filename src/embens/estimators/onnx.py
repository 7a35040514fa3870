"""Export to ONNX: one file from raw columns to the prediction.

Inputs: ``numbers``, float64 ``(row, column)``, the numeric columns as they were fitted, NaN where
one is missing (``when:month`` and the like are parts of dates, which are seconds); and, if there
are categorical columns, ``codes``, int64 ``(row, column)``, whose meaning is in the file's metadata
(``categories``: for each column a map from label to code; one that is not there has the code after
the last, missing one more; a column of many categories comes a second time). Outputs:
``probabilities`` of a classifier (``probabilities_0``, … of several labels); ``predicted_mean`` and
``predicted_std`` of a regressor.

The file is checked against the estimator with onnxruntime before it is kept.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embens.ensemble import export
from embens.estimators.heads import Classes
from embens.estimators.preprocessing import FAR

if TYPE_CHECKING:
    from embens.estimators.pipeline import Fitted


class Raw(nn.Module):
    """From raw columns to the prediction, by the names of its parts."""

    def __init__(self, fitted: Fitted):
        super().__init__()
        self.centre = nn.Buffer(fitted.preprocessing.centre)
        self.scale = nn.Buffer(fitted.preprocessing.scale)
        self.ensemble = fitted.ensemble
        self.head, self.dtype = fitted.head, fitted.dtype

    def forward(self, numbers: Tensor, codes: Tensor | None = None) -> dict[str, Tensor]:
        scaled = ((numbers - self.centre) / self.scale).clamp(-FAR, FAR).to(self.dtype)
        if codes is None:
            codes = torch.zeros(numbers.shape[0], 0, dtype=torch.int64)
        found = self.head.summarise(self.ensemble(scaled, codes))
        if not isinstance(self.head, Classes):
            return dict(zip(("predicted_mean", "predicted_std"), found, strict=True))
        several = len(found) > 1
        return {
            f"probabilities_{k}" if several else "probabilities": p for k, p in enumerate(found)
        }


def to_onnx(estimator: Any, path: str | os.PathLike[str]) -> Path:
    """Write one ONNX file from raw columns to the prediction, checked with onnxruntime."""
    fitted, known = estimator.fitted_, estimator.preprocessing_
    if getattr(fitted.head, "transform", None) == "quantile":
        raise ValueError(
            "ONNX has no operation for target_transform='quantile'; fit with another one"
        )
    labels = [*known.categories, *known.labels]
    columns = [*range(len(known.categorical)), *known.counted]
    starts = [*[0] * len(known.categorical), *known.starts[:-1]]
    notes: dict[str, list] = {
        "numeric": known.inputs("none")[len(known.numeric) : 2 * len(known.numeric)],
        "categorical": [known.names[known.categorical[j]] for j in columns],
        "categories": [
            {name: i for i, name in enumerate(names, first)}
            for names, first in zip(labels, starts, strict=True)
        ],
    }
    if isinstance(fitted.head, Classes):
        notes["classes"] = [classes.tolist() for classes in fitted.head.labels]
    steps = torch.linspace(-2, 2, 8, dtype=torch.float64)[:, None]
    rows = {"numbers": known.centre + steps * known.scale}  # in the range of the training part
    rows["numbers"][:1, :1] = float("nan")
    if known.categorical:
        codes = [torch.arange(8) % (len(names) + 2) for names in labels]
        rows["codes"] = torch.stack(codes, 1) + torch.tensor(starts)
    return export.to_onnx(Raw(fitted), path, rows, notes=notes)
