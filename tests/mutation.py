"""Files of every kind that is read, to be mutated: how to read each, and its content.

Files of foreign formats have no checksum, and may be read as something else.
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


def mutate(content: bytes, generator: random.Random) -> bytes:
    """Return a damaged copy of a file."""
    kind = generator.randrange(8)
    place = generator.randrange(max(1, len(content)))
    if kind == 0:  # truncated
        return content[:place]
    if kind == 1:  # with random bytes in between
        return content[:place] + generator.randbytes(generator.randrange(1, 99)) + content[place:]
    if kind == 2:  # a pickle that executes code
        return pickle.dumps(Trap())
    if kind == 3:  # nested too deeply
        return content[:place] + b"[" * 5000 + content[place:]
    changed = bytearray(content)
    for _ in range(generator.choice([1, 1, 8])):
        place = generator.randrange(len(content))
        if kind == 7:
            changed[place] = ord("9")
        else:
            changed[place] ^= 1 << generator.randrange(8)
    return bytes(changed)


def are_equal(actual, expected) -> bool:
    """Compare contents of files, which may be nested; True is not 1, and NaN equals NaN."""
    if isinstance(expected, dict):
        if actual.keys() != expected.keys():
            return False
        return all(are_equal(actual[key], value) for key, value in expected.items())
    if isinstance(expected, (list, tuple)):
        return len(actual) == len(expected) and all(map(are_equal, actual, expected))
    if isinstance(expected, torch.Tensor):
        same_kind = actual.dtype == expected.dtype and actual.shape == expected.shape
        return same_kind and torch.equal(actual.nan_to_num(0.5), expected.nan_to_num(0.5))
    if isinstance(expected, bool) or isinstance(actual, bool):
        return actual is expected
    return actual == expected or (actual != actual and expected != expected)


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
    ensemble = embens.embed(networks.mlp(5, 4, 1), 2, pre=laws.Normal(), post=laws.Shifted(0.5))
    theory.write_kernels(path, ensemble, torch.randn(9, 5).double(), block=4)
    return lambda: dict(enumerate(theory.load_kernels(path).blocks)), [path]


def cells(folder):
    results = Results(folder)
    for key in "abcde":
        results.add({"key": key, "rows": [{"accuracy": 0.5, "seed": 3}], "seconds": 1.5})
    expected = dict(results.records)

    def read():
        records = Results(folder).records
        if len(records) < len(expected):  # damaged lines are left out, and measured again
            for key, record in records.items():
                assert record == expected[key]
            raise Refused(f"a cell of {results.path} is lost")
        return records

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
    """Read a kind of file with ``count`` mutations; return how many were refused, and megabytes."""
    read, paths = KINDS[kind](folder)
    expected = read()
    generator = random.Random(kind + os.environ.get("SEED", ""))
    refused = 0
    memory_before = peak_megabytes()
    for number in range(count):
        path = generator.choice(paths)
        content = path.read_bytes()
        path.write_bytes(mutate(content, generator))
        try:
            with warnings.catch_warnings(action="ignore"):
                assert are_equal(read(), expected), (number, path)
        except ERRORS as error:
            if not is_refusal(error, path, KINDS[kind]):
                raise AssertionError((number, path)) from error
            refused += 1
        path.write_bytes(content)
    assert not EXECUTED
    return {"refused": refused, "before": memory_before, "after": peak_megabytes()}


def is_refusal(error: Exception, path: Path, make) -> bool:
    """Return whether an error is one of ours and names the file; subclasses are foreign errors."""
    if type(error) not in ERRORS:
        return False
    if make not in OURS:
        return True
    names = {path.name, *(parent.name for parent in path.parents)}
    return bool(names & set(re.findall(r"[\w.-]+", str(error))))


def peak_megabytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def mutate_in_process(kind: str, folder: Path, count: int) -> dict[str, int]:
    """Do the same in another process, whose memory is measured alone."""
    return run_in_process("mutation.mutate_often", kind, folder, count)


def run_in_process(function: str, kind: str, folder: Path, count: int) -> dict[str, int]:
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
