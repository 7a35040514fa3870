"""Keep estimators: one safetensors file with a JSON header, no pickle; or one ONNX file.

The former holds the ensemble, the preprocessing, the calibration, the arguments and the history;
nothing in it is ever executed. ``joblib`` works as well, with pickle's usual risks.
"""

from __future__ import annotations

import os
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embens.ensemble import export
from embens.ensemble.plan import Plan
from embens.ensemble.storage import check_tensors
from embens.ensemble.surgery import operate
from embens.estimators import network
from embens.estimators.choices import Sizes
from embens.estimators.heads import Classes
from embens.estimators.pipeline import Fitted
from embens.estimators.preprocessing import FAR, Preprocessing
from embens.files import Format, Refused, read_tree, refusing, write_tree
from embens.laws import from_dict
from embens.training import History

FORMAT = Format("embens estimator", 6)


def save(estimator: Any, path: str | os.PathLike[str]) -> None:
    """Write the fitted estimator to one file, without pickle."""
    ensemble, fitted = estimator.ensemble_, estimator.fitted_
    arguments, head = estimator.get_params(deep=False), vars(fitted.head).copy()
    if not isinstance(arguments["random_state"], Integral):
        arguments["random_state"] = None  # a generator of numbers
    if arguments["law"] is not None:
        arguments["law"] = arguments["law"].to_dict()
    if "labels" in head:
        head["labels"] = [(classes.dtype.str, classes) for classes in head["labels"]]
    tree = {
        "class": type(estimator).__name__,
        "arguments": arguments,
        "features": estimator.n_features_in_,
        "names": getattr(estimator, "feature_names_in_", None),
        "head": head,
        "columns": vars(fitted.preprocessing),
        "sizes": fitted.sizes._asdict(),
        "held_out": fitted.held_out,
        "history": vars(fitted.run),
        "plan": ensemble.plan.to_dict(),
        "weights": dict(ensemble.state_dict()),
    }
    write_tree(path, FORMAT, tree)


def load(path: str | os.PathLike[str], *kinds: type) -> Any:
    """Read an estimator, of one of some classes, that :func:`save` wrote."""
    tree = read_tree(path, FORMAT)
    with refusing(path):
        known = {kind.__name__: kind for kind in kinds}
        if tree["class"] not in known:
            raise Refused(f"{path} holds a {tree['class']}, not a {' or '.join(known)}")
        arguments, head = tree["arguments"], tree["head"]
        if arguments["law"] is not None:
            arguments["law"] = from_dict(arguments["law"])
        if "labels" in head:
            head["labels"] = tuple(np.array(v, dtype=kind) for kind, v in head["labels"])
        estimator = known[tree["class"]](**arguments)
        estimator.n_features_in_ = tree["features"]
        if tree["names"] is not None:
            estimator.feature_names_in_ = np.array(tree["names"], dtype=object)
        estimator.fitted_ = _fitted(tree, estimator)
        return estimator


def _fitted(tree: dict[str, Any], estimator: Any) -> Fitted:
    weights, known = tree["weights"], Preprocessing(**tree["columns"])
    head, sizes = estimator.head(**tree["head"]), Sizes(**tree["sizes"])
    if len(known.statistics) != known.starts[-1]:
        raise ValueError(f"{len(known.statistics)} statistics for {known.starts[-1]} labels")
    depth, numbers = int(estimator.depth), sum(t.numel() for t in weights.values())
    if sizes.width * (1 + (depth - 1) * sizes.width) > numbers:
        raise ValueError(f"{depth} layers of {sizes.width} are more numbers than the file has")
    reference = network.build(known, head, estimator, sizes)
    dtype = next(t.dtype for t in weights.values() if t.is_floating_point())
    plan = Plan.from_dict(tree["plan"])
    plan.check(reference, numbers)
    ensemble = operate(reference.to(dtype), plan)
    check_tensors("the ensemble", weights, ensemble.state_dict())
    ensemble.load_state_dict(weights)
    return Fitted(known, head, ensemble, sizes, History(**tree["history"]), tree["held_out"])


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
    """Write one ONNX file from raw columns to the prediction, checked with onnxruntime.

    Inputs: ``numbers``, float64 ``(row, column)``, the numeric columns as they were fitted, NaN
    where one is missing (``when:month`` and the like are parts of dates, which are seconds); and,
    if there are categorical columns, ``codes``, int64 ``(row, column)``, whose meaning is in the
    file's metadata (``categories``: for each column a map from label to code; one that is not there
    has the code after the last, missing one more; a column of many categories comes a second time).
    Outputs: ``probabilities`` of a classifier (``probabilities_0``, … of several labels);
    ``predicted_mean`` and ``predicted_std`` of a regressor.
    """
    fitted, known = estimator.fitted_, estimator.preprocessing_
    if getattr(fitted.head, "transform", None) == "quantile":
        raise ValueError("ONNX can't have target_transform='quantile'; fit with another one")
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
