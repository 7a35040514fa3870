"""Files of every kind that is read, to be mutated: how to read each, and what it then holds."""

from __future__ import annotations

import pytest
import torch
from training import problem

import embens
from embens import laws, networks, theory
from embens.experiments.results import Results
from embens.training.checkpoint import Checkpoints
from embens.training.checkpoint import read as read_checkpoint

EXECUTED: list[str] = []


class Trap:
    """Leaves a mark if it is unpickled."""

    def __reduce__(self):
        return EXECUTED.append, ("trap",)


def mutate(content: bytes, generator) -> bytes:
    """Return a file with something wrong."""
    import pickle

    how, changed = generator.randrange(8), bytearray(content)
    place = generator.randrange(max(1, len(content)))
    if how == 0:
        return content[:place]
    if how == 1:
        return content[:place] + generator.randbytes(generator.randrange(1, 99)) + content[place:]
    if how == 2:
        return pickle.dumps(Trap())
    if how == 3:
        return content[:place] + b"[" * 5000 + content[place:]
    for _ in range(generator.choice([1, 1, 8])):
        place = generator.randrange(len(content))
        changed[place] = changed[place] ^ (1 << generator.randrange(8)) if how < 7 else 57
    return bytes(changed)


def same(found, expected) -> bool:
    if isinstance(expected, dict):
        keys = found.keys() == expected.keys()
        return keys and all(same(found[k], v) for k, v in expected.items())
    return torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected


def ensemble(folder):
    path = folder / "ensemble.safetensors"
    embens.batch_ensemble(problem.reference(), 3).save(path)
    return lambda: dict(embens.load(path, problem.reference()).state_dict()), [path]


def estimator(folder):
    pytest.importorskip("narwhals")
    from embens.estimators import EmbeddedEnsembleClassifier, load

    path, (x, y) = folder / "model.safetensors", problem.data(40)
    model = EmbeddedEnsembleClassifier(members=2, max_epochs=1, random_state=0)
    model.fit(x.numpy(), y.numpy()).save(path)
    return lambda: torch.from_numpy(load(path).predict_proba(x.numpy())), [path]


def checkpoint(folder):
    path = Checkpoints(folder, {"a": 1}).save(7, {"x": torch.randn(30), "y": [1, 2.5, "z"]})
    return lambda: read_checkpoint(path), [path]


def _kernels(path):
    made = embens.embed(networks.mlp(5, 4, 1), 2, pre=laws.Normal(), post=laws.Shifted(0.5))
    theory.write_kernels(path, made, torch.randn(9, 5).double(), block=4)
    paths = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return lambda: dict(enumerate(theory.load_kernels(path).blocks)), sorted(paths)


def kernels_npz(folder):
    return _kernels(folder / "k.npz")


def kernels_zarr(folder):
    pytest.importorskip("zarr")
    return _kernels(folder / "k.zarr")


def cells(folder):
    results = Results(folder)
    for key in "abcde":
        results.add({"key": key, "rows": [{"accuracy": 0.5, "seed": 3}], "seconds": 1.5})
    expected = dict(results.records)

    def read():
        found = Results(folder).records
        if len(found) < len(expected):  # a line that is damaged is not there, and measured again
            assert all(found[k] == expected[k] for k in found)
            raise ValueError("a cell is lost")
        return found

    return read, [results.path]


KINDS = {f.__name__: f for f in (ensemble, estimator, checkpoint, kernels_npz, kernels_zarr, cells)}
