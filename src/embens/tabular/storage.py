"""Save estimators to one safetensors file, load them, and export them to ONNX.

A saved file has the ensemble, the encoding of the columns, the calibrated head, the arguments and
the history. Nothing in it is executed when it is read. ``joblib`` works as well, with the usual
risks of pickle.
"""

import importlib.util
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

import embens
from embens.fields import Fields
from embens.files import (
    Format,
    Refused,
    check_output,
    read_tree,
    refusing,
    write_atomically,
    write_tree,
)
from embens.modes import evaluating
from embens.tabular import parsing
from embens.tabular.bins import MAX_SCALED
from embens.tabular.groups import GroupedEnsemble
from embens.tabular.perceptron import Encoder, build_network
from embens.tabular.pipeline import Fitted
from embens.tabular.targets import ClassHead

FORMAT = Format("embens estimator", 11)
NAMES = (
    "class",
    "arguments",
    "features",
    "feature_names",
    "head",
    "columns",
    "sizes",
    "dtype",
    "held_out",
    "remarks",
    "history",
    "ensembles",
)
"""Fields of a file."""
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def save(estimator: Any, path: str | os.PathLike[str]) -> None:
    """Write a fitted estimator to one file."""
    check_is_fitted(estimator, "fitted_")
    fitted = estimator.fitted_
    arguments = estimator.get_params(deep=False)
    if not isinstance(arguments["random_state"], Integral):
        arguments["random_state"] = None  # a random generator
    if arguments["law"] is not None:
        arguments["law"] = arguments["law"].to_dict()
    head = dict(vars(fitted.head))
    if "labels" in head:  # arrays become lists, so keep their types
        head["labels"] = [(label.dtype.str, label) for label in head["labels"]]
    preprocessing = fitted.preprocessing
    ensembles: Any = [fitted.ensemble]
    if isinstance(fitted.ensemble, GroupedEnsemble):
        ensembles = fitted.ensemble.groups
    tree = {
        "class": type(estimator).__name__,
        "arguments": arguments,
        "features": estimator.n_features_in_,
        "feature_names": getattr(estimator, "feature_names_in_", None),
        "head": head,
        "columns": {
            "names": preprocessing.names,
            "numeric": [dict(vars(column)) for column in preprocessing.numeric],
            "categorical": [dict(vars(column)) for column in preprocessing.categorical],
            "notes": preprocessing.notes,
        },
        "sizes": dict(vars(fitted.sizes)),
        "dtype": str(fitted.dtype).removeprefix("torch."),
        "held_out": fitted.held_out,
        "remarks": fitted.remarks,
        "history": dict(vars(fitted.run)),
        "ensembles": [_ensemble_to_bytes(ensemble) for ensemble in ensembles],
    }
    write_tree(path, FORMAT, tree)


def load(path: str | os.PathLike[str], classes: list[type]) -> Any:
    """Read an estimator that :func:`save` wrote.

    Args:
        path: The file.
        classes: The estimator classes that are accepted.

    Raises:
        embens.files.Refused: if the file is damaged or holds something else.
    """
    path = Path(path)
    tree = Fields(read_tree(path, FORMAT), f"{path.name}: tree", NAMES)
    with refusing(path):
        class_by_name = {kind.__name__: kind for kind in classes}
        if tree.get("class") not in class_by_name:
            names = " or ".join(class_by_name)
            raise Refused(f"{path} holds an {tree.get('class')}, not an {names}")
        kind = class_by_name[tree.text("class")]
        estimator = parsing.read_arguments(kind, tree.fields("arguments"))
        fitted = _load_fitted(tree, estimator)
        features = len(fitted.preprocessing.names)
        estimator.n_features_in_ = tree.whole("features", least=features, most=features)
        if tree.get("feature_names") is not None:
            names = tree.texts("feature_names")
            if names != fitted.preprocessing.names:
                raise tree.fail("feature_names", "the names of the columns")
            estimator.feature_names_in_ = np.array(names, dtype=object)
        estimator.fitted_ = fitted
        return estimator


def _load_fitted(tree: Fields, estimator: Any) -> Fitted:
    """Return the fitted parts; the network is built from the arguments, then filled."""
    preprocessing = parsing.read_columns(tree.fields("columns"))
    head = parsing.read_head(estimator.head_class, tree.fields("head"))
    sizes = parsing.read_sizes(tree.fields("sizes"))
    dtype = DTYPES[tree.text("dtype", DTYPES)]
    bins = estimator.numerical_embedding in ("piecewise", "both")
    encoder = Encoder(preprocessing, bins=bins).to(dtype)
    ensembles = []
    for content in tree.items("ensembles"):
        if not isinstance(content, Tensor) or content.dtype != torch.uint8 or content.dim() != 1:
            raise tree.fail("ensembles", "a list of tensors of bytes")
        # The file must be larger than the network that is built for it, or a damaged header could
        # make us allocate any amount of memory.
        weights = sizes.width * (1 + (int(estimator.depth) - 1) * sizes.width + head.outputs)
        if weights > content.numel():
            raise ValueError(
                f"{weights} weights do not fit into the {content.numel()} bytes of the file"
            )
        reference = build_network(encoder, head, estimator, sizes).to(dtype)
        try:
            ensembles.append(_ensemble_from_bytes(content, reference))
        except Refused as error:
            raise Refused(f"{tree.place}.{error}") from None
    if not ensembles:
        raise tree.fail("ensembles", "a list of at least one ensemble")
    ensemble = ensembles[0]
    if len(ensembles) > 1:
        ensemble = GroupedEnsemble(ensembles)
    if ensemble.members != sizes.members:
        raise tree.fail("sizes", f"those of {ensemble.members} members")
    history = parsing.read_history(tree.fields("history"))
    held_out = parsing.read_held_out(tree, ensemble.members)
    remarks = tree.texts("remarks")
    fitted = Fitted(preprocessing, encoder, head, ensemble, sizes, history, held_out, remarks)
    _check_prediction(fitted)
    return fitted


@torch.no_grad()
def _check_prediction(fitted: Fitted) -> None:
    """Predict a row of zeros, which raises if the parts do not belong together."""
    columns = fitted.preprocessing
    numbers = torch.zeros(1, columns.width, dtype=fitted.dtype)
    codes = torch.zeros(1, len(columns.categorical), dtype=torch.int64)
    with evaluating(fitted.ensemble):
        outputs = fitted.ensemble(fitted.encoder(numbers, codes))
        for output in fitted.head.summarise(outputs):
            if len(output) != 1:
                raise ValueError(f"one row has {len(output)} predictions")


def _ensemble_to_bytes(ensemble: embens.EmbeddedEnsemble) -> Tensor:
    """Return the file of an ensemble as a tensor of bytes, which becomes a part of our file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ensemble")
        ensemble.save(path)
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)


def _ensemble_from_bytes(content: Tensor, reference: nn.Module) -> embens.EmbeddedEnsemble:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ensemble")
        path.write_bytes(content.numpy().tobytes())
        return embens.load(path, reference)


class RawPredictor(nn.Module):
    """From raw numbers to the prediction of a fitted estimator.

    Shape:
        numbers, float64 ``(row, column)``, become a tuple of tensors ``(row, …)``.
    """

    def __init__(self, fitted: Fitted):
        super().__init__()
        columns = fitted.preprocessing.numeric
        centre = torch.tensor([column.centre for column in columns], dtype=torch.float64)
        scale = torch.tensor([column.scale for column in columns], dtype=torch.float64)
        self.centre = nn.Buffer(centre)
        self.scale = nn.Buffer(scale)
        self.encoder = fitted.encoder
        self.ensemble = fitted.ensemble
        self.head = fitted.head
        self.dtype = fitted.dtype

    def forward(self, numbers: Tensor) -> tuple[Tensor, ...]:
        scaled = ((numbers - self.centre) / self.scale).clamp(-MAX_SCALED, MAX_SCALED)
        codes = torch.zeros(numbers.shape[0], 0, dtype=torch.int64)
        inputs = self.encoder(scaled.to(self.dtype), codes)
        return self.head.summarise(self.ensemble(inputs))


def to_onnx(estimator: Any, path: str | os.PathLike[str]) -> None:
    """Write an ONNX file that maps raw numbers to predictions; see the method of estimators."""
    check_is_fitted(estimator, "fitted_")
    fitted = estimator.fitted_
    check_output(path)
    check_exportable(fitted)
    names = ["predicted_mean", "predicted_std"]
    metadata = {"numeric": [column.name for column in fitted.preprocessing.numeric]}
    if isinstance(fitted.head, ClassHead):
        names = ["probabilities"]
        if not fitted.head.single:
            names = [f"probabilities_{k}" for k in range(len(fitted.head.labels))]
        metadata["classes"] = [label.tolist() for label in fitted.head.labels]
    network = RawPredictor(fitted)
    # Examples within the range of the training rows, one of them with a missing value.
    steps = torch.linspace(-2, 2, 8, dtype=torch.float64)[:, None]
    example = network.centre + steps * network.scale
    example[0, 0] = float("nan")
    with evaluating(network), torch.no_grad(), quiet_export():
        expected = network(example)
        program: Any = torch.onnx.export(
            torch.export.export(
                network, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},)
            ),
            input_names=["numbers"],
            output_names=names,
            dynamo=True,
            verbose=False,
        )
    model = program.model_proto
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=json.dumps(value))
    content = model.SerializeToString()
    check_onnx(content, example, expected)
    write_atomically(path, content)


@contextmanager
def quiet_export() -> Iterator[None]:
    """Hide the warnings of torch's exporter; the check with onnxruntime decides."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)


def check_exportable(fitted: Fitted) -> None:
    """Raise ValueError if an estimator cannot be written as an ONNX file."""
    for library in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(library) is None:
            raise ModuleNotFoundError(
                f"to_onnx needs {library}. Install it with pip install 'embens[onnx]'."
            )
    if fitted.preprocessing.categorical:
        names = [column.name for column in fitted.preprocessing.categorical]
        raise ValueError(
            f"An ONNX file takes only numbers, but the columns {names} are categorical. Fit "
            "without them."
        )
    if getattr(fitted.head, "transform", None) == "quantile":
        raise ValueError(
            "target_transform='quantile' cannot be exported to ONNX. Fit with 'log' or 'none'."
        )


def check_onnx(content: bytes, example: Tensor, expected: tuple[Tensor, ...]) -> None:
    """Raise AssertionError if an ONNX model does not reproduce the expected outputs.

    The model is run on all rows of the example and on one row.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for rows in (len(example), 1):
        outputs = session.run(None, {"numbers": example[:rows].numpy()})
        for output, tensor in zip(outputs, expected, strict=True):
            torch.testing.assert_close(
                torch.from_numpy(output), tensor[:rows], rtol=1e-4, atol=1e-4
            )
