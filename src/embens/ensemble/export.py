"""Out of Python: networks as ONNX files, and ensembles for ``torch.export``.

A file is checked with onnxruntime before it is kept: it gives what the network gives on the rows of
the example, on more of them, and on one.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from embens.ensemble.ntkgp import NTKGP
from embens.ensemble.plan import Plan
from embens.ensemble.wrapping import Wrapper
from embens.files import write_atomically

if TYPE_CHECKING:
    from onnx import ModelProto

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2}


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode; afterwards every part has the mode that it had."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def to_onnx(
    network: nn.Module,
    path: str | os.PathLike[str],
    example: Any,
    *,
    notes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a network to an ONNX file that takes any number of rows, checked with onnxruntime.

    The network is an ensemble, a member, a collapsed network or any other; it is exported in
    evaluation mode, and left as it was. The example is a batch, a tuple of arguments, or a mapping
    from their names; tensors with as many rows as the first take any number. Inputs have the names
    of the arguments. The output is called ``output``; several are ``output_0``, …, or have the keys
    of a dict. ``notes`` go into the file's metadata, as JSON. If anything fails, the file is as it
    was before.
    """
    for library in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(library) is None:
            raise ModuleNotFoundError(f"to_onnx needs {library}: pip install 'embens[onnx]'")
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} does not exist")
    parts: list[Any] = list(network.modules())
    ensembles = [part for part in parts if isinstance(part.__dict__.get("plan"), Plan)]
    if any(isinstance(part, NTKGP) for part in parts):
        raise ValueError(
            "networks of embens.bayesian can't be exported: they have a derivative inside, which "
            "ONNX does not know. Keep them with ensemble.save(path)."
        )
    sites = [site for ensemble in ensembles for site in ensemble.plan.sites if site.random]
    if sites:
        means = "Export the means: embens.join([ensemble.member(a) for a in range(M)])."
        raise ValueError(
            "numbers that are drawn anew at each pass can't be exported: a file would keep one "
            f"draw. {means if sites[0].prior_std else 'Use fresh=False for fixed masks.'}"
        )
    between = _BetweenTensors(network, example)
    batches, errors = list(between.batches()), []
    quiet = warnings.catch_warnings(action="ignore")  # the check tells what matters
    with evaluating(network), torch.no_grad(), quiet, ExitStack() as afterwards:
        logger = logging.getLogger("torch.onnx")
        afterwards.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        for ensemble in ensembles:
            afterwards.callback(setattr, ensemble, "chunk", ensemble.chunk)
        expected = [between(*batch) for batch in batches]
        for rows in (torch.export.Dim("batch"), torch.export.Dim.AUTO):
            try:
                model = between.convert(batches[0], rows)
                for key, value in (notes or {}).items():
                    model.metadata_props.add(key=key, value=json.dumps(value))
                write_atomically(path, functools.partial(_save, model, batches, expected))
                return path
            except OSError:
                raise
            except Exception as error:  # of torch, of its exporter, or of onnxruntime
                errors.append(error)
            for ensemble in ensembles:
                ensemble.chunk = 1  # a larger graph, which asks less of the code
    raise ValueError(
        f"this {type(network).__name__} could not be written as an ONNX file for any number of "
        "rows: " + str(errors[0].__cause__ or errors[0]).strip().split("\n\n")[0]
    ) from errors[0]


class _BetweenTensors(nn.Module):
    """A network as a function from tensors to tensors.

    What else is in the example stays as it is; what else the network returns is left out.
    """

    def __init__(self, network: nn.Module, example: Any):
        super().__init__()
        self.network = network
        named = isinstance(example, Mapping)
        args = () if named else example if isinstance(example, tuple) else (example,)
        self.signature = _signature(network)
        bound = self.signature.bind(*args, **(example if named else {}))
        self.leaves, self.tree = tree_flatten_with_path(dict(bound.arguments))
        self.tensors = {_name(keys): x for keys, x in self.leaves if isinstance(x, Tensor)}
        sizes = [x.shape[0] if x.dim() else 0 for x in self.tensors.values()]
        if not sizes or not sizes[0]:
            shapes = {name: tuple(x.shape) for name, x in self.tensors.items()}
            raise ValueError(f"example: expected a row or more; got {shapes}")
        self.count, self.is_batch = sizes[0], [size == sizes[0] for size in sizes]
        self.names: list[str] = []

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, Tensor) else x for _, x in self.leaves]
        bound = inspect.BoundArguments(self.signature, tree_unflatten(leaves, self.tree))
        found, _ = tree_flatten_with_path(self.network(*bound.args, **bound.kwargs))
        tensors = tuple(x for _, x in found if isinstance(x, Tensor))
        names = [_name(keys) for keys, x in found if isinstance(x, Tensor)]
        taken = {*self.tensors, ""}
        self.names = [f"output_{n}".rstrip("_") if n.isdigit() or n in taken else n for n in names]
        return tensors

    def batches(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the example with two rows or more, with more of them, and with one."""
        for size in (max(2, self.count), 2 * self.count + 1, 1):
            index = torch.arange(size) % self.count
            yield tuple(
                x[index.to(x.device)] if mine else x
                for x, mine in zip(self.tensors.values(), self.is_batch, strict=True)
            )

    def convert(self, batch: tuple[Tensor, ...], rows: Any) -> ModelProto:
        """Return the ONNX model, in which the axis of the rows is dynamic."""
        shapes = tuple({0: rows} if mine else None for mine in self.is_batch)
        program = torch.onnx.export(
            torch.export.export(self, batch, dynamic_shapes=(shapes,)),
            input_names=list(self.tensors),
            output_names=self.names,
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        model = program.model_proto  # a new one each time
        graph = model.graph
        symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
        for value in (*graph.input, *graph.output, *graph.value_info):
            for size in value.type.tensor_type.shape.dim:
                if symbol and size.dim_param:
                    size.dim_param = re.sub(rf"\b{symbol}\b", "batch", size.dim_param)
        return model


def _signature(network: nn.Module) -> inspect.Signature:
    """Return the parameters of a network; of an ensemble, those of its reference."""
    while isinstance(network, Wrapper) or isinstance(network.__dict__.get("plan"), Plan):
        network = network.inner() if isinstance(network, Wrapper) else network.network  # type: ignore
    return inspect.signature(network.forward)


def _name(keys: tuple) -> str:
    return re.sub(r"\W+", "_", keystr(keys)).strip("_")


def _save(
    model: ModelProto,
    batches: Sequence[tuple[Tensor, ...]],
    expected: Sequence[tuple[Tensor, ...]],
    path: Path,
) -> None:
    """Write a file and check that it gives what is expected of every batch."""
    import onnx
    import onnxruntime

    onnx.save(model, str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for batch, outputs in zip(batches, expected, strict=True):
        names = [node.name for node in model.graph.input]
        feed = dict(zip(names, (x.cpu().numpy() for x in batch), strict=True))
        for ours, theirs in zip(outputs, session.run(None, feed), strict=True):
            close = _TOLERANCE.get(ours.dtype, 0.0)
            size = float(ours.abs().amax()) if ours.numel() else 0.0
            torch.testing.assert_close(
                torch.from_numpy(theirs), ours.cpu(), rtol=close, atol=close * size, equal_nan=True
            )
