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

from embens.estimators.heads import Classes

if TYPE_CHECKING:
    from embens.ensemble import EmbeddedEnsemble
    from embens.estimators.pipeline import Fitted


class Raw(nn.Module):
    """From raw columns to the prediction."""

    def __init__(self, fitted: Fitted):
        super().__init__()
        self.centre = nn.Buffer(fitted.preprocessing.centre)
        self.scale = nn.Buffer(fitted.preprocessing.scale)
        self.ensemble = fitted.chosen.ensemble
        self.head, self.dtype = fitted.head, fitted.dtype

    def forward(self, numbers: Tensor, codes: Tensor | None = None) -> tuple[Tensor, ...]:
        scaled = ((numbers - self.centre) / self.scale).to(self.dtype)
        if codes is None:
            codes = torch.zeros(numbers.shape[0], 0, dtype=torch.int64)
        return self.head.summarise(self.ensemble(scaled, codes))


def to_onnx(estimator: Any, path: str | os.PathLike[str]) -> Path:
    """Write one ONNX file from raw columns to the prediction, checked with onnxruntime."""
    import onnx
    import onnxruntime

    if any(site.fresh for site in estimator.ensemble_.plan.sites):
        raise ValueError("masks that are drawn anew at each pass can't be exported")
    fitted, known, path = estimator.fitted_, estimator.preprocessing_, Path(path)
    module = Raw(fitted).eval()
    names = ["predicted_mean", "predicted_std"]
    notes: dict[str, list] = {
        "numeric": [known.names[j] for j in known.numeric],
        "categorical": [known.names[j] for j in known.categorical],
        "categories": [{name: i for i, name in enumerate(kept)} for kept in known.categories],
    }
    if isinstance(fitted.head, Classes):
        notes["classes"] = [classes.tolist() for classes in fitted.head.labels]
        count = len(fitted.head.labels)
        names = [f"probabilities_{k}" for k in range(count)] if count > 1 else ["probabilities"]
    steps = torch.linspace(-2, 2, 8, dtype=torch.float64)[:, None]
    rows = {"numbers": known.centre + steps * known.scale}  # in the range of the training part
    rows["numbers"][:1, :1] = float("nan")
    if known.categorical:
        codes = [torch.arange(8) % (len(kept) + 2) for kept in known.categories]
        rows["codes"] = torch.stack(codes, 1)
    row = torch.export.Dim("row")
    with _exporting(module.ensemble), torch.no_grad():
        program = torch.onnx.export(
            module,
            tuple(rows.values()),
            input_names=list(rows),
            output_names=names,
            dynamic_shapes=tuple({0: row} for _ in rows),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto  # made anew at each look
    for key, value in notes.items():
        model.metadata_props.add(key=key, value=json.dumps(value))
    onnx.save(model, str(path))
    few = {name: tensor[:5] for name, tensor in rows.items()}
    session = onnxruntime.InferenceSession(path)
    found = session.run(None, {name: tensor.numpy() for name, tensor in few.items()})
    with torch.no_grad():
        expected = module(*few.values())
    for ours, theirs in zip(expected, found, strict=True):
        theirs = torch.from_numpy(theirs).double()
        torch.testing.assert_close(theirs, ours.double(), rtol=1e-3, atol=1e-5)
    return path


@contextmanager
def _exporting(ensemble: EmbeddedEnsemble) -> Iterator[None]:
    logger = logging.getLogger("torch.onnx")
    level, chunk = logger.level, ensemble.chunk
    logger.setLevel(logging.ERROR)
    ensemble.chunk = 1  # several at once would make the number of rows a constant
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
        ensemble.chunk = chunk
