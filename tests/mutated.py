"""Files of every kind that is read, to be mutated: how to read each, and what it then holds.

Files of formats that are not ours have no checksum, and may be read as something else.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from training import problem

import embens
from embens import laws, networks, theory
from embens.files import Refused, read_tree
from embens.training import Checkpoint
from embens.training.checkpoint import FORMAT
from reproduction.datasets import cifar100
from reproduction.grid.results import Results
from reproduction.report import page
from reproduction.storage import DamagedFileError

EXECUTED: list[str] = []


class Trap:
    """Leaves a mark if it is unpickled."""

    def __reduce__(self):
        return EXECUTED.append, ("trap",)


def mutate(content: bytes, generator) -> bytes:
    """Return a file with something wrong."""
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
    from embens.tabular import EmbeddedEnsembleClassifier, load

    path, (x, y) = folder / "model.safetensors", problem.data(40)
    model = EmbeddedEnsembleClassifier(members=2, max_epochs=1, random_state=0)
    model.fit(x.numpy(), y.numpy()).save(path)
    return lambda: torch.from_numpy(load(path).predict_proba(x.numpy())), [path]


def checkpoint(folder):
    ensemble = embens.batch_ensemble(problem.reference(), 3)
    embens.fit(ensemble, problem.data(40), epochs=1, callbacks=[Checkpoint(folder)])
    (path,) = folder.glob("*.safetensors")

    def read():
        tree = read_tree(path, FORMAT)
        return {"parts": sorted(tree), "bytes": path.read_bytes()}

    return read, [path]


def kernels(folder):
    path = folder / "k.npz"
    made = embens.embed(networks.mlp(5, 4, 1), 2, pre=laws.Normal(), post=laws.Shifted(0.5))
    theory.write_kernels(path, made, torch.randn(9, 5).double(), block=4)
    return lambda: dict(enumerate(theory.load_kernels(path).blocks)), [path]


def cells(folder):
    results = Results(folder)
    for key in "abcde":
        results.add({"key": key, "rows": [{"accuracy": 0.5, "seed": 3}], "seconds": 1.5})
    expected = dict(results.records)

    def read():
        found = Results(folder).records
        if len(found) < len(expected):  # a line that is damaged is not there, and measured again
            assert all(found[k] == expected[k] for k in found)
            raise Refused(f"a cell of {results.path} is lost")
        return found

    return read, [results.path]


def manifest(folder):
    from tests.reproduction.report import results

    results.make(folder, "widths")
    paths = sorted(p for p in folder.rglob("*") if p.suffix in (".json", ".csv"))
    return lambda: json.dumps(page.collect(folder)), paths


def cifar(folder):
    from tests.reproduction.problem import write_cifar

    write_cifar(folder, 5, 3)
    return lambda: cifar100(folder) and None, sorted(folder.iterdir())


OURS = (ensemble, estimator, checkpoint, kernels, cells, manifest)
KINDS = {function.__name__: function for function in (*OURS, cifar)}
ERRORS = (Refused, DamagedFileError, ValueError, FileNotFoundError)


def mutate_often(kind: str, folder: Path, count: int) -> dict[str, int]:
    """Read a kind of file with so many mutations; return how many were refused, and megabytes."""
    read, paths = KINDS[kind](folder)
    expected, generator = read(), random.Random(kind)
    refused, before = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        path = generator.choice(paths)
        content = path.read_bytes()
        path.write_bytes(mutate(content, generator))
        try:
            with warnings.catch_warnings(action="ignore"):
                assert same(read(), expected), (number, path)
        except ERRORS as error:
            names = {p.name for p in (path, *path.parents)}
            named = names & set(re.findall(r"[\w.-]+", str(error))) or KINDS[kind] not in OURS
            if type(error) not in ERRORS or not named:  # a subclass is of another library
                raise AssertionError((number, path)) from error
            refused += 1
        path.write_bytes(content)
    assert not EXECUTED
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"refused": refused, "before": before // 1024, "after": after // 1024}


def mutate_apart(kind: str, folder: Path, count: int) -> dict[str, int]:
    """Do the same in another process, whose memory is its own."""
    return run_apart("mutated.mutate_often", kind, folder, count)


def run_apart(function: str, kind: str, folder: Path, count: int) -> dict[str, int]:
    """Call a function ``module.name`` of the tests in another process."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    module = function.split(".")[0]
    script = f"import sys, json, pathlib, {module}; kind, folder, count = sys.argv[1:]; "
    script += f"print(json.dumps({function}(kind, pathlib.Path(folder), int(count))))"
    command = [sys.executable, "-c", script, kind, str(folder), str(count)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])
