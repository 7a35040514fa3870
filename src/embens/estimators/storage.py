"""Save and load estimators: one safetensors file with a JSON header, no pickle.

The file holds the ensemble, the preprocessing, the calibration, the arguments and the history;
nothing in it is ever executed. ``joblib`` works as well, with pickle's usual risks.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from embens.embedding.families import operate
from embens.ensemble.plan import Plan
from embens.estimators.preprocessing import Preprocessing
from embens.files import write_atomically
from embens.laws import Law, from_dict
from embens.training import History

if TYPE_CHECKING:
    from embens.estimators.base import TableEnsemble

FORMAT = "embens estimator"
VERSION = 1
_TENSORS = ("temperature_", "scores_", "y_mean_", "y_std_")
_VALUES = (
    "multilabel_",
    "single_",
    "width_",
    "dropout_",
    "gamma_",
    "p_",
    "held_out_",
    "n_features_in_",
)


def save(estimator: TableEnsemble, path: str | os.PathLike[str]) -> None:
    """Write a fitted estimator to one file."""
    from safetensors.torch import save_file
    from sklearn.utils.validation import check_is_fitted

    check_is_fitted(estimator, "ensemble_")
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} does not exist")
    known = estimator.preprocessing_
    state = vars(estimator)
    tensors = {f"ensemble.{k}": v for k, v in estimator.ensemble_.state_dict().items()}
    numbers = {k: state[k] for k in _TENSORS if state.get(k) is not None}
    tensors |= {
        f"attribute.{k}": torch.as_tensor(v, dtype=torch.float64) for k, v in numbers.items()
    }
    tensors |= {f"columns.{k}": torch.as_tensor(getattr(known, k)) for k in _COLUMN_TENSORS}
    columns = {k: v for k, v in vars(known).items() if k not in _COLUMN_TENSORS}
    header = {
        "format": FORMAT,
        "version": VERSION,
        "class": type(estimator).__name__,
        "arguments": _arguments_to_json(estimator.get_params(deep=False)),
        "values": {k: state[k] for k in _VALUES if k in state},
        "names": list(state["feature_names_in_"]) if "feature_names_in_" in state else None,
        "classes": _classes_to_json(state.get("classes_")),
        "columns": columns,
        "history": dataclasses.asdict(estimator.run_),
        "diagnosis": _diagnosis_to_json(state.get("diagnosis_")),
        "plan": estimator.ensemble_.plan.to_json(),
    }
    tensors = {k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()}
    metadata = {"embens_estimator": json.dumps(header)}
    write_atomically(path, lambda name: save_file(tensors, name, metadata))


_COLUMN_TENSORS = ("centre", "scale", "edges", "scores")


def load(path: str | os.PathLike[str]) -> Any:
    """Read an estimator that ``save`` wrote."""
    import numpy as np
    from safetensors import SafetensorError, safe_open

    from embens import estimators

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("embens_estimator")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path.name} is not a whole safetensors file (truncated, or another format): {error}"
        ) from None
    if text is None:
        raise ValueError(
            f"{path.name} is no estimator's file; to read an ensemble use embens.load(path, "
            "reference)"
        )
    header = json.loads(text)
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise ValueError(
            f"{path.name} has format version {header.get('version')}, this embens reads {VERSION}; "
            "use a newer embens"
        )
    if header["class"] not in ("EmbeddedEnsembleClassifier", "EmbeddedEnsembleRegressor"):
        raise ValueError(f"{path.name} holds a {header['class']}, which embens does not know")
    kind = getattr(estimators, header["class"])
    estimator = kind(**_arguments_from_json(header["arguments"]))
    for name, value in header["values"].items():
        setattr(estimator, name, value)
    if header["names"] is not None:
        estimator.feature_names_in_ = np.array(header["names"], dtype=object)
    if header["classes"] is not None:
        estimator.classes_ = _classes_from_json(header["classes"])
    for name in _TENSORS:
        if f"attribute.{name}" in tensors:
            number = tensors[f"attribute.{name}"]
            setattr(estimator, name, float(number) if number.dim() == 0 else number)
    if header["class"] == "EmbeddedEnsembleRegressor" and "attribute.scores_" not in tensors:
        estimator.scores_ = None
    arrays = {k: tensors[f"columns.{k}"] for k in _COLUMN_TENSORS}
    arrays |= {k: arrays[k].numpy() for k in ("centre", "scale")}
    estimator.preprocessing_ = Preprocessing(**header["columns"], **arrays)
    estimator.run_ = History(**header["history"])
    estimator.diagnosis_ = header["diagnosis"]
    plan = Plan.from_json(header["plan"])
    weights = {k.removeprefix("ensemble."): v for k, v in tensors.items() if k[:9] == "ensemble."}
    reference = estimator._reference(estimator._make_head(False).outputs)
    kinds = {t.dtype for t in weights.values() if t.is_floating_point()}
    estimator.ensemble_ = operate(reference.to(kinds.pop()), plan)
    estimator.ensemble_.load_state_dict(weights)
    return estimator


def _diagnosis_to_json(diagnosis: Any) -> Any:
    if diagnosis is None or isinstance(diagnosis, dict):
        return diagnosis
    return json.loads(json.dumps(diagnosis.to_dict(), default=str))


def _arguments_to_json(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments as JSON can hold them; a generator of numbers as None."""
    found = {}
    for name, value in arguments.items():
        if isinstance(value, Law):
            value = value.to_dict()
        elif hasattr(value, "tolist"):
            value = value.tolist()
        elif name == "random_state" and not isinstance(value, int):
            value = None
        found[name] = value
    return found


def _arguments_from_json(arguments: dict[str, Any]) -> dict[str, Any]:
    law = arguments.get("law")
    return arguments if law is None else {**arguments, "law": from_dict(law)}


def _classes_to_json(classes: Any) -> Any:
    if classes is None:
        return None
    several = isinstance(classes, list)
    parts = classes if several else [classes]
    kinds = ["object" if c.dtype.kind == "O" else c.dtype.str for c in parts]
    return {"several": several, "dtypes": kinds, "values": [c.tolist() for c in parts]}


def _classes_from_json(data: dict[str, Any]) -> Any:
    import numpy as np

    pairs = zip(data["values"], data["dtypes"], strict=True)
    parts = [np.array(values, dtype=dtype) for values, dtype in pairs]
    return parts if data["several"] else parts[0]
