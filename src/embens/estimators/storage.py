"""Save and load estimators: one safetensors file with a JSON header, no pickle.

The file holds the ensemble, the preprocessing, the calibration, the arguments and the history;
nothing in it is ever executed. ``joblib`` works as well, with pickle's usual risks.
"""

from __future__ import annotations

import dataclasses
import json
import os
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from embens.ensemble.plan import Plan
from embens.ensemble.storage import check_tensors
from embens.ensemble.surgery import operate
from embens.estimators import network
from embens.estimators.choices import Options
from embens.estimators.heads import Classes, Gaussians, Head
from embens.estimators.pipeline import Chosen, Fitted
from embens.estimators.preprocessing import Preprocessing
from embens.files import Format, Refused, read_tensors, refusing, write_tensors
from embens.laws import Law, from_dict
from embens.training import History

FORMAT = Format("embens estimator", 2)
_COLUMNS = ("centre", "scale", "edges", "scores")
_TENSORS = ("temperature_", "scores_", "y_mean_", "y_std_")
_VALUES = "multilabel_ single_ width_ dropout_ gamma_ p_ held_out_ n_features_in_".split()


def save(estimator: Any, path: str | os.PathLike[str]) -> None:
    """Write the fitted estimator to one file, without pickle."""
    ensemble, head = estimator.ensemble_, estimator.head_
    tensors = {f"ensemble.{k}": v for k, v in ensemble.state_dict().items()}
    columns = vars(estimator.preprocessing_).copy()
    tensors |= {f"columns.{k}": columns.pop(k) for k in _COLUMNS}
    for k in _TENSORS:
        if (value := getattr(estimator, k, None)) is not None:
            tensors[f"attribute.{k}"] = torch.as_tensor(value, dtype=torch.float64)
    arguments, diagnosis = estimator.get_params(deep=False), estimator.diagnosis_
    if not isinstance(diagnosis, dict):
        diagnosis = json.loads(json.dumps(diagnosis.to_dict(), default=str))
    if isinstance(weights := arguments.get("class_weight"), (dict, list)):  # keys of any type
        several = [weights] if isinstance(weights, dict) else weights
        arguments["class_weight"] = [list(pairs.items()) for pairs in several]
    if not isinstance(arguments["random_state"], Integral):
        arguments["random_state"] = None  # a generator of numbers
    header = {
        "class": type(estimator).__name__,
        "arguments": arguments,
        "values": {k: getattr(estimator, k) for k in _VALUES if hasattr(estimator, k)},
        "names": getattr(estimator, "feature_names_in_", None),
        "classes": _classes_to_json(head),
        "columns": columns,
        "history": dataclasses.asdict(estimator.run_),
        "diagnosis": diagnosis,
        "plan": ensemble.plan.to_dict(),
    }
    write_tensors(path, FORMAT, json.loads(json.dumps(header, default=_to_json)), tensors)


def _to_json(value: Any) -> Any:
    if isinstance(value, Law):
        return value.to_dict()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a file can't hold {value!r}; use joblib")


def load(path: str | os.PathLike[str], *kinds: type) -> Any:
    """Read an estimator, of one of some classes, that :func:`save` wrote."""
    import numpy as np

    header, tensors = read_tensors(path, FORMAT)
    with refusing(path):
        known = {kind.__name__: kind for kind in kinds}
        if header["class"] not in known:
            raise Refused(f"{path} holds a {header['class']}, not a {' or '.join(known)}")
        if unknown := header["values"].keys() - set(_VALUES):
            raise ValueError(f"an estimator has no attributes {', '.join(sorted(unknown))}")
        arguments = header["arguments"]
        if arguments["law"] is not None:
            arguments["law"] = from_dict(arguments["law"])
        if isinstance(weights := arguments.get("class_weight"), list):
            labels = [dict(pairs) for pairs in weights]
            arguments["class_weight"] = labels if header["classes"]["several"] else labels[0]
        estimator = known[header["class"]](**arguments)
        estimator.n_features_in_ = header["values"]["n_features_in_"]
        if header["names"] is not None:
            estimator.feature_names_in_ = np.array(header["names"], dtype=object)
        estimator.fitted_ = _fitted(header, tensors, estimator)
        return estimator


def _fitted(header: dict[str, Any], tensors: dict[str, Tensor], options: Options) -> Fitted:
    values = header["values"]
    columns: dict[str, Any] = {k: tensors[f"columns.{k}"] for k in _COLUMNS}
    known = Preprocessing(**header["columns"], **columns)
    head = _head(header, {k: tensors.get(f"attribute.{k}") for k in _TENSORS})
    width, dropout, depth = values["width_"], values["dropout_"], int(options.depth)
    if width * (1 + (depth - 1) * width) > sum(t.numel() for t in tensors.values()):
        raise ValueError(f"depth {depth} and width {width} are more numbers than the file has")
    reference = network.build(known, head.outputs, options, width=width, dropout=dropout)
    weights = {k.removeprefix("ensemble."): v for k, v in tensors.items() if k[:9] == "ensemble."}
    dtype = next(t.dtype for t in weights.values() if t.is_floating_point())
    plan = Plan.from_dict(header["plan"])
    plan.check(reference, sum(t.numel() for t in weights.values()))
    ensemble = operate(reference.to(dtype), plan)
    check_tensors("the ensemble", weights, ensemble.state_dict())
    ensemble.load_state_dict(weights)
    gamma, p = values["gamma_"], values["p_"]
    chosen = Chosen(ensemble, header["diagnosis"], gamma, p, width, dropout)
    return Fitted(known, head, chosen, History(**header["history"]), values["held_out_"])


def _head(header: dict[str, Any], tensors: dict[str, Any]) -> Head:
    import numpy as np

    classes, temperature = header["classes"], tensors["temperature_"]
    if classes is None:
        mean, single = tensors["y_mean_"], header["values"]["single_"]
        scales = (mean, tensors["y_std_"], temperature, tensors["scores_"])
        return Gaussians(len(mean), *scales, single=single)
    pairs = zip(classes["values"], classes["dtypes"], strict=True)
    labels = tuple(np.array(values, dtype=dtype) for values, dtype in pairs)
    return Classes(labels, float(temperature), single=not classes["several"])


def _classes_to_json(head: Head) -> Any:
    if not isinstance(head, Classes):
        return None
    kinds = ["object" if c.dtype.kind == "O" else c.dtype.str for c in head.labels]
    values = [c.tolist() for c in head.labels]
    return {"several": not head.single, "dtypes": kinds, "values": values}
