"""Networks and ensembles as ONNX files.

A file is checked with onnxruntime before it is kept: on the rows of the example, on more rows, and
on one row it has to return what the network returns.
"""

import functools
import importlib.util
import inspect
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from embens.checks import check_values
from embens.files import check_output, write_atomically
from embens.modes import evaluating
from embens.spec import EnsembleSpec

if TYPE_CHECKING:
    from onnx import ModelProto

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2}


def to_onnx(
    network: nn.Module,
    path: str | os.PathLike[str],
    example: Any,
    *,
    notes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a network to an ONNX file that takes any number of rows.

    Args:
        network: An ensemble, a member, a collapsed network or any other module. It is exported in
            evaluation mode.
        path: The file. If the export fails, an existing file stays as it was.
        example: A batch, a tuple of arguments, or a dictionary of them. Tensors with as many rows
            as the first take any number of rows. Inputs have the names of the arguments.
        notes: Values for the metadata of the file, stored as JSON.

    Returns:
        The path. The output is called ``output``; several are ``output_0``, …, or have the keys of
        a dictionary.

    Raises:
        OSError: If no file can be written there, for example because it is a folder.
        ValueError: If the network cannot be exported.

    Example:
        >>> import tempfile
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> to_onnx(net, f"{tempfile.mkdtemp()}/net.onnx", torch.zeros(5, 4)).name
        'net.onnx'
    """
    for library in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(library) is None:
            raise ModuleNotFoundError(f"to_onnx needs {library}: pip install 'embens[onnx]'")
    check_output(path)
    check_values("to_onnx", network)
    ensembles: list[Any] = [part for part in network.modules() if _is_ensemble(part)]
    for ensemble in ensembles:
        if any(site.fresh for site in ensemble.spec.sites):
            raise ValueError(
                "modulations that are drawn at each pass cannot be exported: a file would keep one "
                "draw. Use fresh=False for fixed masks."
            )
    return _export(network, Path(path), example, notes or {}, ensembles)


def _is_ensemble(module: nn.Module) -> bool:
    return isinstance(vars(module).get("spec"), EnsembleSpec)


def _export(
    network: nn.Module,
    path: Path,
    example: Any,
    notes: Mapping[str, Any],
    ensembles: list[Any],
) -> Path:
    function = _TensorFunction(network, example)
    batches = list(function.batches())
    errors: list[Exception] = []
    quiet = warnings.catch_warnings(action="ignore")  # the check tells what matters
    with evaluating(network), torch.no_grad(), quiet, ExitStack() as cleanup:
        for library in ("torch.onnx", "onnxscript"):
            logger = logging.getLogger(library)
            cleanup.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        for ensemble in ensembles:
            cleanup.callback(setattr, ensemble, "chunk", ensemble.chunk)
            ensemble.chunk = ensemble.members
        expected = [function(*batch) for batch in batches]
        for rows in (torch.export.Dim("batch"), torch.export.Dim.AUTO):
            try:
                model = function.convert(batches[0], rows)
                for key, value in notes.items():
                    model.metadata_props.add(key=key, value=json.dumps(value))
                write_atomically(path, functools.partial(_save, model, batches, expected))
                return path
            except OSError:
                raise
            except Exception as error:  # of torch, of its exporter, or of onnxruntime
                errors.append(error)
            for ensemble in ensembles:
                ensemble.chunk = 1  # a larger graph, which needs less of the exporter
    reason = str(errors[0].__cause__ or errors[0]).strip().split("\n\n")[0]
    raise ValueError(
        f"this {type(network).__name__} could not be written as an ONNX file for any number of "
        f"rows: {reason}"
    ) from errors[0]


class _TensorFunction(nn.Module):
    """A network as a function from tensors to tensors.

    Other arguments of the example stay as they are; other outputs are left out.
    """

    def __init__(self, network: nn.Module, example: Any):
        super().__init__()
        self.network = network
        reference: Any = network.reference if _is_ensemble(network) else network
        self.signature = inspect.signature(reference.forward)
        if isinstance(example, Mapping):
            bound = self.signature.bind(**example)
        elif isinstance(example, tuple):
            bound = self.signature.bind(*example)
        else:
            bound = self.signature.bind(example)
        self.leaves, self.tree = tree_flatten_with_path(dict(bound.arguments))
        self.tensors = {_name(keys): x for keys, x in self.leaves if isinstance(x, Tensor)}
        sizes = [x.shape[0] if x.dim() else 0 for x in self.tensors.values()]
        if not sizes or not sizes[0]:
            shapes = {name: tuple(x.shape) for name, x in self.tensors.items()}
            raise ValueError(f"example must have at least one row, got shapes {shapes}.")
        self.count = sizes[0]
        self.is_batch = [size == self.count for size in sizes]
        self.names: list[str] = []

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(x, Tensor) else x for _, x in self.leaves]
        bound = inspect.BoundArguments(self.signature, tree_unflatten(leaves, self.tree))
        outputs, _ = tree_flatten_with_path(self.network(*bound.args, **bound.kwargs))
        used_names = {*self.tensors, ""}
        self.names = []
        for keys, value in outputs:
            if isinstance(value, Tensor):
                name = _name(keys)
                needs_prefix = name.isdigit() or name in used_names
                self.names.append(f"output_{name}".rstrip("_") if needs_prefix else name)
        return tuple(value for _, value in outputs if isinstance(value, Tensor))

    def batches(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the example with two rows or more, with more of them, and with one."""
        for size in (max(2, self.count), 2 * self.count + 1, 1):
            index = torch.arange(size) % self.count
            batch = []
            for tensor, is_batch in zip(self.tensors.values(), self.is_batch, strict=True):
                batch.append(tensor[index.to(tensor.device)] if is_batch else tensor)
            yield tuple(batch)

    def convert(self, batch: tuple[Tensor, ...], rows: Any) -> "ModelProto":
        """Return the ONNX model, in which the axis of the rows is dynamic."""
        shapes = tuple({0: rows} if is_batch else None for is_batch in self.is_batch)
        program = torch.onnx.export(
            torch.export.export(self, batch, dynamic_shapes=(shapes,)),
            input_names=list(self.tensors),
            output_names=self.names,
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        model = program.model_proto
        graph = model.graph
        symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
        for value in (*graph.input, *graph.output, *graph.value_info):
            for size in value.type.tensor_type.shape.dim:
                if symbol and size.dim_param:
                    size.dim_param = re.sub(rf"\b{symbol}\b", "batch", size.dim_param)
        return model


def _name(keys: tuple) -> str:
    return re.sub(r"\W+", "_", keystr(keys)).strip("_")


def _save(
    model: "ModelProto",
    batches: Sequence[tuple[Tensor, ...]],
    expected: Sequence[tuple[Tensor, ...]],
    path: Path,
) -> None:
    """Write a file and compare its outputs with the expected ones for every batch."""
    import onnx
    import onnxruntime

    onnx.save(model, str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [node.name for node in model.graph.input]
    for batch, outputs in zip(batches, expected, strict=True):
        arrays = [tensor.cpu().numpy() for tensor in batch]
        results = session.run(None, dict(zip(names, arrays, strict=True)))
        for output, result in zip(outputs, results, strict=True):
            tolerance = _TOLERANCE.get(output.dtype, 0.0)
            size = float(output.abs().amax()) if output.numel() else 0.0
            torch.testing.assert_close(
                torch.from_numpy(result),
                output.cpu(),
                rtol=tolerance,
                atol=tolerance * size,
                equal_nan=True,
            )
