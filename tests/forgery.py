"""Files with a valid checksum and something wrong: changed fields, swapped and reshaped tensors.

A forged file is refused with an error that names it, or read as something that works: a changed
weight or name is no error. Nothing may crash, hang, execute code or fill the memory.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import resource
import warnings
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from mutation import are_equal, run_in_process
from torch import optim
from training import problem

import embens
from embens import laws, networks, theory
from embens.ensemble import saving
from embens.files import Refused, read_tensors, read_tree, write_tensors
from embens.tabular import EmbeddedEnsembleClassifier, EmbeddedEnsembleRegressor, load, storage
from embens.theory import archive
from embens.training import (
    Autocast,
    Checkpoint,
    ClipGradients,
    Divergence,
    EarlyStopping,
    KeepBest,
    ScheduleEveryStep,
    WeightAveraging,
    checkpoint,
    fit,
)

VALUES = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 10**9, 2**53, 10**40, -(10**9)),
    *(0.5, -0.5, 1e300, float("nan"), float("inf"), float("-inf")),
    *("", "a", "os.system", "__class__", "weight", "x" * 500, "\ud800", "\x00"),
    *([], {}, [[]], [1, 2], {"a": 1}, {"tensor": "0"}, {"dict": [["a", 1], ["a", 2]]}, {"list": 3}),
]


def containers(values, found=None):
    """Return all dictionaries and lists in parsed JSON that hold something."""
    found = [] if found is None else found
    if isinstance(values, (dict, list)):
        if values:
            found.append(values)
        for value in values.values() if isinstance(values, dict) else values:
            containers(value, found)
    return found


def change_header(header, generator):
    """Change one field of parsed JSON in place."""
    inside = generator.choice(containers(header))
    keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
    key = generator.choice(keys)
    how = generator.randrange(10)
    if how == 0:
        del inside[key]
    elif how == 1 and isinstance(inside, dict):
        inside["surprise"] = generator.choice(VALUES)
    elif how == 1:
        inside.append(copy.deepcopy(inside[key]))
    elif how == 2:
        inside[key] = [inside[key]]
    elif how == 3:
        nested = inside[key]
        for _ in range(150):
            nested = [nested]
        inside[key] = nested
    elif how == 4 and isinstance(inside[key], (int, float)) and not isinstance(inside[key], bool):
        inside[key] = generator.choice([inside[key] + 1, -inside[key], inside[key] * 10**6, 0.5])
    elif how == 5:
        inside[key] = copy.deepcopy(inside[generator.choice(keys)])
    else:
        inside[key] = copy.deepcopy(generator.choice(VALUES))


def leaves(values, path=()):
    """Yield the container, the key and the path of every value in parsed JSON.

    Elements of a list have the same path, and entries of packed dictionaries that of their name.
    """
    is_entry = isinstance(values, list) and len(values) == 2 and isinstance(values[0], str)
    if isinstance(values, dict):
        places = [(key, key) for key in values]
    elif is_entry:
        places = [(0, "name"), (1, values[0])]
    elif isinstance(values, list):
        places = [(index, "item") for index in range(len(values))]
    else:
        return
    for key, name in places:
        yield values, key, (*path, name)
        yield from leaves(values[key], (*path, name))


def change_leaf(header, generator):
    """Change one field of parsed JSON in place, by a small step; rare fields are as likely."""
    by_path = {}
    for container, key, path in leaves(header):
        by_path.setdefault(path, []).append((container, key))
    container, key = generator.choice(by_path[generator.choice(list(by_path))])
    old = container[key]
    if isinstance(old, bool) or old is None:
        new = [not old, 0, 1, None, "true", []]
    elif isinstance(old, int):
        new = [old + 1, old - 1, -old, 10**6, float(old), True, str(old), None, [old]]
    elif isinstance(old, float):
        new = [-old, 0.0, 1e308, float("nan"), float("inf"), True, str(old), None, [old]]
    elif isinstance(old, str):
        new = ["", f"{old}x", f"../{old}", "/etc/passwd", old.upper(), "a\nb", None, 3, [old]]
    elif isinstance(old, list):
        new = [[], old[:-1], old + old[:1], old[::-1], {}, None, 0]
    else:
        new = [{}, dict(list(old.items())[1:]), {**old, "surprise": 1}, [], None, 0]
    container[key] = copy.deepcopy(generator.choice(new))


def change_tensors(tensors, generator):
    """Change one tensor in place, or exchange two."""
    name, other = generator.choice(list(tensors)), generator.choice(list(tensors))
    tensor = tensors[name]
    how = generator.randrange(9)
    if how == 0:
        tensors[name], tensors[other] = tensors[other], tensor
    elif how == 1:
        del tensors[name]
    elif how == 2:
        tensors[generator.choice(["surprise", name + ".x", "999"])] = tensor
    elif how == 3:
        dtypes = [torch.float64, torch.float16, torch.int64, torch.bool, torch.uint8]
        tensors[name] = tensor.to(generator.choice(dtypes))
    elif how == 4:
        tensors[name] = tensor[:-1] if tensor.dim() else tensor.expand(2)
    elif how == 5:
        tensors[name] = tensor.flatten()
    elif how == 6:
        tensors[name] = tensor.mT if tensor.dim() > 1 else tensor[None]
    elif how == 7 and tensor.is_floating_point():
        tensors[name] = torch.full_like(tensor, generator.choice([torch.nan, torch.inf, 0.0, 1e30]))
    else:
        tensors[name] = torch.empty(0, dtype=tensor.dtype)


def forge_tensors(path, kind, generator):
    """Forge a safetensors file of embens."""
    header, tensors = read_tensors(path, kind)
    part = generator.random()
    if part < 0.35:
        change_leaf(header, generator)
    elif part < 0.7 or not tensors:
        change_header(header, generator)
    else:
        change_tensors(tensors, generator)
    try:
        write_tensors(path, kind, header, tensors)
    except UnicodeError:  # a text that no file can hold
        write_tensors(path, kind, {}, tensors)


def forge_kernels(path, generator):
    """Forge an archive of kernels: its arrays, their headers, and its own header."""
    with zipfile.ZipFile(path) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    header = json.loads(contents.pop("embens.json"))
    name = generator.choice(list(contents))
    how = generator.randrange(6)
    if how == 0:
        change_header(header, generator)
    elif how == 1:
        text = contents[name].replace(b"(9, 9)", generator.choice([b"(99999999, 9)", b"(3, 27)"]))
        contents[name] = text
    elif how == 2:
        descr = generator.choice([b"'<i8'", b"'|O8'", b"'>f8'", b"'<c8'"])
        contents[name] = contents[name].replace(b"'<f8'", descr)
    elif how == 3:
        other = generator.choice(list(contents))
        contents[name], contents[other] = contents[other], contents[name]
    elif how == 4:
        contents.pop(name)
    else:
        contents[name] = contents[name][: generator.randrange(len(contents[name]))]
    digest = archive.hashlib.sha256(str(header.get("fingerprint")).encode(errors="replace"))
    for key, content in contents.items():  # a valid checksum, as far as there can be one
        digest.update(archive._array_title(key.removesuffix(".npy"), np.dtype("<f8"), (9, 9)))
        digest.update(content[128:])
    if how != 0:
        header["sha256"] = digest.hexdigest()
    with zipfile.ZipFile(path, "w") as file:
        for key, content in contents.items():
            file.writestr(key, content)
        file.writestr("embens.json", json.dumps(header))


# Kinds: each returns the file, a function that forges it, and a function that reads and uses it.


def ensemble(folder, make, net=problem.reference, shared=True):
    path, again = folder / "ensemble.safetensors", folder / "again.safetensors"
    make(net()).save(path, shared=shared)

    def use():
        loaded = embens.load(path, net())
        loaded.save(again, shared=shared)
        assert are_equal(plain_numbers(again), plain_numbers(path)), "read as something else"
        if loaded.members < 1000:
            assert loaded(torch.zeros(2, 4)).shape == (loaded.members, 2, 3)

    def plain_numbers(file):
        """Return header and tensors; parameters of laws may be whole numbers."""
        header, tensors = read_tensors(file, saving.FORMAT)
        return [json.loads(json.dumps(header), parse_int=float), tensors]

    return path, lambda generator: forge_tensors(path, saving.FORMAT, generator), use


def members_only(folder):
    return ensemble(folder, lambda net: embens.batch_ensemble(net, 3), shared=False)


def adapters_only(folder):
    options = {"rank": 2, "kind": "additive", "shared": "frozen"}
    return ensemble(folder, lambda net: embens.low_rank(net, 3, **options), shared=False)


def fresh_masks(folder):
    return ensemble(folder, lambda net: embens.mc_dropout(net, 3))


def joint_masks(folder):
    return ensemble(folder, lambda net: embens.masksembles(net, 4).subset([0, 2]))


def norms(folder):
    return ensemble(folder, lambda net: embens.independent(net, 2), net=problem.Normalised)


def modulated(folder):
    return ensemble(folder, lambda net: embens.batch_ensemble(net, 3))


def low_rank(folder):
    return ensemble(folder, lambda net: embens.low_rank(net, 3, rank=2).subset([0, 2]))


def separate(folder):
    return ensemble(folder, lambda net: embens.independent(net, 2))


def estimator(folder, kind, target):
    path = folder / "model.safetensors"
    x, _ = problem.data(60)
    kind(members=2, max_epochs=1, tune=False, random_state=0).fit(x.numpy(), target).save(path)

    def use():
        assert len(load(path).predict(x[:3].numpy())) == 3

    return path, lambda generator: forge_tensors(path, storage.FORMAT, generator), use


def classifier(folder):
    return estimator(folder, EmbeddedEnsembleClassifier, problem.data(60)[1].numpy())


def regressor(folder):
    return estimator(folder, EmbeddedEnsembleRegressor, problem.data(60)[0][:, 0].numpy())


class WatchedCheckpoint(Checkpoint):
    """Keeps the state of a run that was resumed."""

    def on_start(self, run):
        super().on_start(run)
        self.loaded = copy.deepcopy(run.state_dict())


def resumed(folder, callbacks=lambda: [WeightAveraging(1.0)], net=problem.reference, **options):
    def run():
        made = embens.batch_ensemble(net(), 3, generator=torch.Generator().manual_seed(1))
        watched = WatchedCheckpoint(folder, every=2)
        every = [*callbacks(), watched]
        fit(made, problem.data(40), epochs=2, batch_size=20, callbacks=every, **options)
        return watched.loaded

    run()
    (folder / "step-0000000004.safetensors").unlink()
    (path,) = folder.glob("step-*.safetensors")

    def use():
        loaded, content = None, path.read_bytes()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                loaded = run()
            except Divergence:
                pass  # weights or rates that are too large
            finally:
                for file in folder.iterdir():
                    file.unlink()
                path.write_bytes(content)  # a longer run has removed it
        for warning in caught:
            if "checkpoint refused" in str(warning.message):
                raise Refused(str(warning.message))
        if loaded is not None:
            saved = read_tree(path, checkpoint.FORMAT)["state"]
            # A run may be extended, and may have been saved without numpy.
            saved.update({name: loaded[name] for name in ("epochs", "stopped", "random")})
            assert are_equal(loaded, saved), "read as something else"

    return path, lambda generator: forge_tensors(path, checkpoint.FORMAT, generator), use


def one_cycle(folder):
    scheduler = partial(optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=4)
    return resumed(folder, lambda: [ScheduleEveryStep()], scheduler=scheduler)


def warm_up(folder):
    def scheduler(optimizer):
        parts = [optim.lr_scheduler.LinearLR(optimizer), optim.lr_scheduler.StepLR(optimizer, 1)]
        return optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[1])

    return resumed(folder, scheduler=scheduler, optimizer=optim.NAdam, lr=1e-3)


def plateau(folder):
    scheduler = partial(optim.lr_scheduler.ReduceLROnPlateau, patience=0)
    options = {"validation": problem.data(20, 5), "optimizer": optim.Adafactor, "lr": 1e-2}
    return resumed(folder, lambda: [KeepBest(), EarlyStopping(5)], scheduler=scheduler, **options)


def float16(folder):
    callbacks = [Autocast(torch.float16), ClipGradients(0.5)]
    return resumed(folder, lambda: callbacks, net=problem.Normalised, optimizer=optim.RMSprop)


def kernels(folder):
    path = folder / "k.npz"
    made = embens.embed(networks.mlp(5, 4, 1), 2, pre=laws.Normal(), post=laws.Shifted(0.5))
    theory.write_kernels(path, made, torch.randn(9, 5).double(), block=4)
    return path, lambda generator: forge_kernels(path, generator), lambda: theory.load_kernels(path)


def by_name(*kinds):
    return {kind.__name__: kind for kind in kinds}


KINDS = by_name(modulated, low_rank, separate, classifier, regressor, resumed, kernels)
MORE_ENSEMBLES = by_name(members_only, adapters_only, fresh_masks, joint_masks, norms)
MORE_RUNS = by_name(one_cycle, warm_up, plateau, float16)
ALL = {**KINDS, **MORE_ENSEMBLES, **MORE_RUNS}
RUNS = {"resumed", *MORE_RUNS}


def forge_often(kind: str, folder: Path, count: int) -> dict[str, int]:
    """Forge a file many times; return the number of refusals and the memory in megabytes."""
    path, forge, use = ALL[kind](folder)
    use()
    original = path.read_bytes()
    generator = random.Random(kind + os.environ.get("SEED", ""))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for number in range(count):
        forge(generator)
        try:
            with warnings.catch_warnings():
                if kind not in RUNS:
                    warnings.simplefilter("ignore")
                use()
        except Refused as error:
            if path.name not in str(error):
                raise AssertionError((kind, number)) from error
            refused += 1
        except ValueError as error:
            # The second one is right: the file says that a column had dates.
            if not re.search("is of a different run|it had dates in fit", str(error)):
                raise AssertionError((kind, number)) from error
            refused += 1
        except Exception as error:
            raise AssertionError((kind, number)) from error
        path.write_bytes(original)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"refused": refused, "before": before // 1024, "after": after // 1024}


def forge_in_process(kind: str, folder: Path, count: int) -> dict[str, int]:
    """Do the same in another process, whose memory is measured alone."""
    return run_in_process("forgery.forge_often", kind, folder, count)
