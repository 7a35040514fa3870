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

from torch import Tensor

from embens.ensemble.plan import Plan
from embens.ensemble.storage import check_tensors
from embens.ensemble.surgery import operate
from embens.estimators import network
from embens.estimators.choices import Sizes
from embens.estimators.pipeline import Fitted
from embens.estimators.preprocessing import Preprocessing
from embens.files import Format, Refused, read_tensors, refusing, write_tensors
from embens.laws import Law, from_dict
from embens.training import History

FORMAT = Format("embens estimator", 5)


def save(estimator: Any, path: str | os.PathLike[str]) -> None:
    """Write the fitted estimator to one file, without pickle."""
    ensemble, head, fitted = estimator.ensemble_, vars(estimator.head_).copy(), estimator.fitted_
    columns = vars(fitted.preprocessing).copy()
    tensors = {f"ensemble.{k}": v for k, v in ensemble.state_dict().items()}
    for part, values in (("columns", columns), ("head", head)):
        for k in [k for k, v in values.items() if isinstance(v, Tensor)]:
            tensors[f"{part}.{k}"] = values.pop(k)
    if "labels" in head:
        kinds = ["object" if c.dtype.kind == "O" else c.dtype.str for c in head["labels"]]
        head["labels"] = list(zip(kinds, head["labels"], strict=True))
    arguments = estimator.get_params(deep=False)
    if isinstance(weights := arguments.get("class_weight"), (dict, list)):  # keys of any type
        several = [weights] if isinstance(weights, dict) else weights
        arguments["class_weight"] = [list(pairs.items()) for pairs in several]
    if not isinstance(arguments["random_state"], Integral):
        arguments["random_state"] = None  # a generator of numbers
    header = {
        "class": type(estimator).__name__,
        "arguments": arguments,
        "features": estimator.n_features_in_,
        "names": getattr(estimator, "feature_names_in_", None),
        "head": head,
        "columns": columns,
        "sizes": fitted.sizes._asdict(),
        "held_out": fitted.held_out,
        "history": dataclasses.asdict(fitted.run),
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
        arguments, head = header["arguments"], header["head"]
        if arguments["law"] is not None:
            arguments["law"] = from_dict(arguments["law"])
        if isinstance(weights := arguments.get("class_weight"), list):
            labels = [dict(pairs) for pairs in weights]
            arguments["class_weight"] = labels[0] if head["single"] else labels
        estimator = known[header["class"]](**arguments)
        estimator.n_features_in_ = header["features"]
        if header["names"] is not None:
            estimator.feature_names_in_ = np.array(header["names"], dtype=object)
        if "labels" in head:
            head["labels"] = tuple(np.array(v, dtype=kind) for kind, v in head["labels"])
        estimator.fitted_ = _fitted(header, tensors, estimator)
        return estimator


def _fitted(header: dict[str, Any], tensors: dict[str, Tensor], estimator: Any) -> Fitted:
    parts: dict[str, dict[str, Any]] = {"ensemble": {}, "columns": {}, "head": {}}
    for name, tensor in tensors.items():
        part, _, key = name.partition(".")
        parts[part][key] = tensor
    known = Preprocessing(**header["columns"], **parts["columns"])
    head = estimator.head(**header["head"], **parts["head"])
    if len(known.statistics) != known.starts[-1]:
        raise ValueError(f"{len(known.statistics)} statistics for {known.starts[-1]} labels")
    sizes, depth = Sizes(**header["sizes"]), int(estimator.depth)
    if sizes.width * (1 + (depth - 1) * sizes.width) > sum(t.numel() for t in tensors.values()):
        raise ValueError(f"{depth} layers of {sizes.width} are more numbers than the file has")
    reference = network.build(known, head, estimator, sizes)
    weights = parts["ensemble"]
    dtype = next(t.dtype for t in weights.values() if t.is_floating_point())
    plan = Plan.from_dict(header["plan"])
    plan.check(reference, sum(t.numel() for t in weights.values()))
    ensemble = operate(reference.to(dtype), plan)
    check_tensors("the ensemble", weights, ensemble.state_dict())
    ensemble.load_state_dict(weights)
    history = History(**header["history"])
    return Fitted(known, head, ensemble, sizes, history, header["held_out"])
