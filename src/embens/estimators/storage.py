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
from embens.estimators.choices import Options
from embens.estimators.heads import Classes, Gaussians, Head
from embens.estimators.pipeline import Chosen, Fitted
from embens.estimators.preprocessing import Preprocessing
from embens.files import Format, Refused, read_tensors, refusing, write_tensors
from embens.laws import Law, from_dict
from embens.training import History

FORMAT = Format("embens estimator", 3)
_HEADS: dict[str, type[Head]] = {head.__name__: head for head in (Classes, Gaussians)}


def save(estimator: Any, path: str | os.PathLike[str]) -> None:
    """Write the fitted estimator to one file, without pickle."""
    fitted, arguments = estimator.fitted_, estimator.get_params(deep=False)
    if not isinstance(arguments["random_state"], Integral):
        arguments["random_state"] = None  # a generator of numbers
    chosen = vars(fitted.chosen).copy()
    ensemble, diagnosis = chosen.pop("ensemble"), chosen["diagnosis"]
    if not isinstance(diagnosis, dict):
        chosen["diagnosis"] = json.loads(json.dumps(diagnosis.to_dict(), default=str))
    header = {
        "class": type(estimator).__name__,
        "arguments": arguments,
        "features": estimator.n_features_in_,
        "names": getattr(estimator, "feature_names_in_", None),
        "columns": vars(fitted.preprocessing),
        "head": {"kind": type(fitted.head).__name__, **vars(fitted.head)},
        "chosen": chosen,
        "plan": ensemble.plan.to_dict(),
        "history": dataclasses.asdict(fitted.run),
        "held_out": fitted.held_out,
    }
    tensors = {f"ensemble.{k}": v for k, v in ensemble.state_dict().items()}

    def to_json(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors[name := f"tensor.{len(tensors)}"] = value
            return {"tensor": name}
        if isinstance(value, Law):
            return value.to_dict()
        if not hasattr(value, "tolist"):
            raise TypeError(f"a file can't hold {value!r}; use joblib")
        if value.ndim == 0:
            return value.item()
        kind = "object" if value.dtype.kind == "O" else value.dtype.str
        return {"array": value.tolist(), "dtype": kind}

    write_tensors(path, FORMAT, json.loads(json.dumps(header, default=to_json)), tensors)


def load(path: str | os.PathLike[str], *kinds: type) -> Any:
    """Read an estimator, of one of some classes, that :func:`save` wrote."""
    import numpy as np

    header, tensors = read_tensors(path, FORMAT)

    def from_json(found: dict[str, Any]) -> Any:
        if found.keys() == {"tensor"}:
            return tensors[found["tensor"]]
        if found.keys() == {"array", "dtype"}:
            return np.array(found["array"], dtype=found["dtype"])
        return found

    with refusing(path):
        known = {kind.__name__: kind for kind in kinds}
        header = json.loads(json.dumps(header), object_hook=from_json)
        if header["class"] not in known:
            raise Refused(f"{path} holds a {header['class']}, not a {' or '.join(known)}")
        arguments = header["arguments"]
        if arguments["law"] is not None:
            arguments["law"] = from_dict(arguments["law"])
        estimator = known[header["class"]](**arguments)
        estimator.n_features_in_ = header["features"]
        if header["names"] is not None:
            estimator.feature_names_in_ = header["names"]
        estimator.fitted_ = _fitted(header, tensors, estimator)
        return estimator


def _fitted(header: dict[str, Any], tensors: dict[str, Tensor], options: Options) -> Fitted:
    known, chosen = Preprocessing(**header["columns"]), header["chosen"]
    head = _HEADS[header["head"].pop("kind")](**header["head"])
    width, depth = chosen["width"], int(options.depth)
    if width * (1 + (depth - 1) * width) > sum(t.numel() for t in tensors.values()):
        raise ValueError(f"depth {depth} and width {width} are more numbers than the file has")
    sizes = {"width": width, "dropout": chosen["dropout"]}
    reference = network.build(known, head.outputs, options, **sizes)
    weights = {k.removeprefix("ensemble."): v for k, v in tensors.items() if k[:9] == "ensemble."}
    dtype = next(t.dtype for t in weights.values() if t.is_floating_point())
    plan = Plan.from_dict(header["plan"])
    plan.check(reference, sum(t.numel() for t in weights.values()))
    ensemble = operate(reference.to(dtype), plan)
    check_tensors("the ensemble", weights, ensemble.state_dict())
    ensemble.load_state_dict(weights)
    run = History(**header["history"])
    return Fitted(known, head, Chosen(ensemble, **chosen), run, header["held_out"])
