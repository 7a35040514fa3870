"""Keep estimators: one safetensors file with a JSON header, no pickle; or one ONNX file.

The former holds the ensemble, the preprocessing, the calibration, the arguments and the history;
nothing in it is ever executed. ``joblib`` works as well, with pickle's usual risks.
"""

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
    """From raw numbers to the prediction, by the names of its parts."""

    def __init__(self, fitted: Fitted):
        super().__init__()
        self.centre = nn.Buffer(fitted.preprocessing.centre)
        self.scale = nn.Buffer(fitted.preprocessing.scale)
        self.ensemble = fitted.ensemble
        self.head, self.dtype = fitted.head, fitted.dtype

    def forward(self, numbers: Tensor) -> dict[str, Tensor]:
        scaled = ((numbers - self.centre) / self.scale).clamp(-FAR, FAR).to(self.dtype)
        codes = torch.zeros(numbers.shape[0], 0, dtype=torch.int64)
        found = self.head.summarise(self.ensemble(scaled, codes))
        names = ["predicted_mean", "predicted_std"]
        if isinstance(self.head, Classes):
            several = [f"probabilities_{k}" for k in range(len(found))]
            names = several if len(found) > 1 else ["probabilities"]
        return dict(zip(names, found, strict=True))


def to_onnx(estimator: Any, path: str | os.PathLike[str]) -> Path:
    """Write one ONNX file from raw numbers to the prediction, checked with onnxruntime.

    Its input is ``numbers``, float64 ``(row, column)``, NaN where one is missing; of the names in
    the file's metadata, ``when:month`` and the like are parts of dates, which are seconds. Outputs
    are ``probabilities`` of a classifier (``probabilities_0``, … of several labels);
    ``predicted_mean`` and ``predicted_std`` of a regressor. Categorical columns are refused.
    """
    fitted, known = estimator.fitted_, estimator.preprocessing_
    if known.categorical:
        names = [known.names[j] for j in known.categorical]
        raise ValueError(f"ONNX files take numbers, and {names} are categorical; fit without them")
    if getattr(fitted.head, "transform", None) == "quantile":
        raise ValueError("ONNX can't have target_transform='quantile'; fit with another one")
    notes = {"numeric": known.inputs("none")[len(known.numeric) : 2 * len(known.numeric)]}
    if isinstance(fitted.head, Classes):
        notes["classes"] = [classes.tolist() for classes in fitted.head.labels]
    steps = torch.linspace(-2, 2, 8, dtype=torch.float64)[:, None]
    numbers = known.centre + steps * known.scale  # in the range of the training part
    numbers[:1, :1] = float("nan")
    return export.to_onnx(Raw(fitted), path, {"numbers": numbers}, notes=notes)
