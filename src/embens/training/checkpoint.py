"""Checkpoints of a run, from which it continues bit for bit.

A checkpoint is one safetensors file with a checksum. It is written atomically, and reading it
executes no code. A folder holds the last two checkpoints of one run; a lock file keeps other
processes out.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embens.checks import check_whole, warn
from embens.ensemble.attributes import (
    attribute_names,
    check_attributes,
    read_attributes,
    restore_attributes,
)
from embens.ensemble.separation import expand_buffers, separate_buffers
from embens.fields import Fields, refusal
from embens.files import Format, Refused, is_format, locked, read_tree, refusing, write_tree
from embens.training.callbacks import Callback
from embens.training.states import check_state

if TYPE_CHECKING:
    from embens.training.run import Run

FORMAT = Format("embens checkpoint", 6)
KEPT_FILES = 2
FILE_NAME = re.compile(r"step-\d{10}\.safetensors")
LONG_TENSOR = 1000
"""Tensors with at least this many elements identify a run by their shape only."""


class Checkpoint(Callback):
    """Save the state of the run, and continue from the last saved state.

    A run that was stopped at any moment, also by ``kill -9``, continues from its last checkpoint
    and ends with the same bits as an uninterrupted one. The data are compared by their number of
    rows only. With a ``DataLoader`` a run continues from the end of an epoch. A run with more
    ``epochs`` continues a finished or an interrupted one: completed epochs count, and the schedule
    is from then on that of the new number of epochs.

    Args:
        folder: Holds the checkpoints of this run only; created if needed.
        every: Steps between checkpoints; None: one per epoch.

    Raises:
        NotADirectoryError: If ``folder`` is a file.
        ValueError: When the run starts, if the folder has a checkpoint of a different run (other
            arguments, callbacks, laws or shapes).
        BlockingIOError: When the run starts, if another run uses the folder.

    Example:
        >>> callbacks = [Checkpoint("run-1", every=100)]
    """

    changes_training = True

    def __init__(self, folder: str | os.PathLike[str], every: int | None = None):
        self.folder = Path(folder)
        self.every = every
        if every is not None:
            check_whole("every", every)
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise NotADirectoryError(
                f"checkpoint: expected a folder; {str(folder)!r} is a file or a broken link."
            )
        self._identity: dict[str, Any] = {}
        self._refused: set[Path] = set()
        self._is_warned = False

    def settings(self) -> dict[str, Any]:
        """Return nothing: a run may continue with other checkpoints."""
        return {}

    def on_start(self, run: Run) -> None:
        """Lock the folder and restore the last checkpoint, if there is one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if run.world.rank == 0:
            lock = locked(self.folder / ".lock", f"the checkpoint folder {str(self.folder)!r}")
            run.cleanup.enter_context(lock)
        self._identity = json.loads(json.dumps(identify(run)))
        content = self.load_last(run)
        if content is None:
            return
        state = content["state"]
        completed = state["epoch"] + (state["step"] > 0)
        if run.epochs < completed:
            raise ValueError(
                f"epochs must be at least {completed}, the number that the checkpoints in "
                f"{str(self.folder)!r} have begun, got {run.epochs}. Use another folder to start "
                "again."
            )
        run.load_state_dict(state)
        restore_attributes(run.ensemble, content.get("attributes", []))

    def on_step(self, run: Run) -> None:
        """Save every ``every`` steps, and before an epoch is cut short."""
        if not run.train.resumable:
            return
        due = self.every is not None and run.steps % self.every == 0
        if due or run.stopped is not None:
            self.save(run)

    def on_epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Save after each epoch, unless checkpoints go by steps."""
        if run.interrupted:
            return
        by_steps = self.every is not None and run.train.resumable
        if not by_steps or run.stopped is not None:
            self.save(run)

    def save(self, run: Run) -> None:
        """Write a checkpoint, then remove all but the last two.

        Args:
            run: The state of the run.
        """
        run.check_objectives()
        state = run.state_dict()
        if run.world.rank > 0 or not run.has_finite_weights():
            return
        path = self.folder / f"step-{run.steps:010d}.safetensors"
        content = {"run": self._identity, "state": state, **self._attributes(run)}
        if path in self._refused:
            _set_aside(path)  # it may be a file of the user
        try:
            write_tree(path, FORMAT, content)
        except TypeError as error:
            raise TypeError(
                f"checkpoint: {error}; it is in the state of the optimizer, the scheduler or a "
                "callback. Use another one, or train without Checkpoint."
            ) from None
        self._refused.discard(path)
        files = [file for file in self._files() if file not in self._refused]
        for old in files[KEPT_FILES:]:
            if is_format(old, FORMAT):  # a file of the user may have such a name
                old.unlink(missing_ok=True)

    def _attributes(self, run: Run) -> dict[str, Any]:
        """Return what the forward of members keeps in attributes; warn if a file cannot hold it."""
        attributes = read_attributes(run.ensemble)
        names = attribute_names(attributes, unwritable=True)
        if not names:
            return {"attributes": attributes} if attributes else {}
        if not self._is_warned:
            self._is_warned = True
            warn(
                f"checkpoint: the forward of the reference keeps {', '.join(names)}, which a file "
                "cannot hold. A run that continues from this checkpoint starts without the "
                "attributes of its members. Keep tensors and numbers, or use register_buffer."
            )
        return {}

    def load_last(self, run: Run) -> dict[str, Any] | None:
        """Read the last readable checkpoint; warn about damaged files.

        Args:
            run: The state of the run.

        Returns:
            The content of the file; None if there is none.
        """
        template = run.state_dict(with_callbacks=False)  # in all processes
        for path in self._files():
            try:
                content = Fields(
                    read_tree(path, FORMAT), path.name, ["run", "state"], ["attributes"]
                )
                with refusing(path):
                    json.dumps(content.get("run"))  # raises if there are tensors
                self._check_identity(path, content.fields("run").values)
                with refusing(path):
                    _separate_buffers(run, template, content.get("state"))
                    check_state(run, template, content.get("state"), f"{path.name}: state")
                    check_step(path.name, content.get("state")["steps"])
                    if "attributes" in content.values:
                        check_attributes(
                            run.ensemble, content.get("attributes"), f"{path.name}: attributes"
                        )
            except Refused as error:
                warn(f"checkpoint refused: {error}")
                self._refused.add(path)
                continue
            return content.values
        return None

    def _check_identity(self, path: Path, saved: dict[str, Any]) -> None:
        for key in {**self._identity, **saved}:
            before, now = saved.get(key), self._identity.get(key)
            if before != now:
                raise ValueError(
                    f"{path} is of a different run: {key} was {json.dumps(before):.200}, now it is "
                    f"{json.dumps(now):.200}. Use the same arguments to continue it, or another "
                    "folder to start again."
                )

    def _files(self) -> list[Path]:
        """Return the checkpoints, last step first."""
        files = []
        for path in self.folder.glob("step-*.safetensors"):
            if FILE_NAME.fullmatch(path.name) and path.is_file():
                files.append(path)
        return sorted(files, reverse=True)


def _separate_buffers(run: Run, template: dict[str, Any], state: Any) -> None:
    """Separate the buffers that members had separately in a saved run, also in the template.

    Members get separate buffers when a forward changes them for the first time, which may be later
    than the good weights of the run.
    """
    weights = state.get("ensemble") if isinstance(state, dict) else None
    if not isinstance(weights, dict):
        return
    start = "individual."
    names = [key.removeprefix(start) for key in map(str, weights) if key.startswith(start)]
    separate_buffers(run.ensemble, names)
    template["ensemble"] = run.ensemble.state_dict()
    for name in ("best_weights", "good_weights"):
        if isinstance(state.get(name), dict):
            expand_buffers(run.ensemble, state[name])


def _set_aside(path: Path) -> None:
    """Give a file that was refused another name, which no file has."""
    for number in itertools.count(1):
        new_path = path.with_name(f"{path.name}.refused-{number}")
        if not os.path.lexists(new_path):
            os.rename(path, new_path)
            return


def check_step(name: str, steps: int) -> None:
    """Raise unless a checkpoint has the number of steps in its name.

    Args:
        name: Name of the file.
        steps: Number of steps in its content.
    """
    if name != f"step-{steps:010d}.safetensors":
        raise refusal(f"{name}: state.steps", "the number in the name of the file", steps)


def identify(run: Run) -> dict[str, Any]:
    """Return what identifies a run, as JSON: the same arguments give the same result."""
    ensemble = run.ensemble
    identity: dict[str, Any] = {"family": ensemble.spec.family, "members": ensemble.members}
    for name, value in run.arguments.items():
        if name != "epochs":  # a run may be extended
            identity[name] = describe(value)
    for callback in run.callbacks:
        if callback.changes_training:
            for name, value in callback.settings().items():
                identity[f"{type(callback).__name__}.{name}"] = describe(value)
    identity["options"] = {name: describe(value) for name, value in vars(run.options).items()}
    sites = ensemble.spec.sites
    identity["sites"] = [[s.layer, s.kind, repr(s.law), s.trainable, s.fresh] for s in sites]
    for name, tensor in ensemble.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"checkpoint: {name!r} is a {type(tensor).__name__}, and a file holds tensors. "
                "Keep it out of the state (no get_extra_state), or train without Checkpoint."
            )
        identity[f"shape of {name}"] = [list(tensor.shape), str(tensor.dtype)]
    identity["batches or rows"] = run.train.count
    return identity


def describe(value: Any) -> Any:
    """Describe a setting as JSON that is the same in every process.

    Functions are described by their names, modules by their ``repr`` and tensors.

    Example:
        >>> describe(functools.partial(nn.functional.mse_loss, reduction="sum"))
        ['torch.nn.functional.mse_loss', [], [['reduction', 'sum']]]
    """
    if isinstance(value, functools.partial):
        value = [value.func, value.args, sorted(value.keywords.items())]
    elif isinstance(value, nn.Module):
        value = [repr(value), *value.state_dict().values()]
    if isinstance(value, (tuple, list)):
        return [describe(element) for element in value]
    if isinstance(value, dict):
        return {str(name): describe(element) for name, element in value.items()}
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() < LONG_TENSOR else list(value.shape)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if value == value else "nan"  # JSON has no NaN
    if isinstance(value, torch.dtype):
        return str(value)
    name = getattr(value, "__qualname__", None)
    if name is not None:
        return f"{value.__module__}.{name}"
    return type(value).__name__
