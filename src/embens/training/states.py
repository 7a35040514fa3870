"""Checks of the state that a checkpoint holds, before any of it is used.

A checkpoint may be damaged or forged. Its state is compared with that of the run at its start: the
same names, types and shapes. Counters that grow during a run have to lie in their range.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embens.fields import MOST, Fields, is_finite, is_whole, refusal
from embens.training.passes import DEFAULT_CRITERIA

if TYPE_CHECKING:
    from embens.training.run import Run

SCALAR_STATES = {"step", "mu_product", "eta", "mu"}
"""States of torch's optimizers that are one number for each parameter."""
CHANGING_ATTRIBUTES = {
    "last_epoch",
    "_step_count",
    "_last_lr",
    "_is_initial",
    "_get_lr_called_within_step",
    "num_bad_epochs",
    "cooldown_counter",
    "T_cur",
    "T_i",
}
"""Attributes of torch's schedulers that change during a run; the others are settings."""
LARGEST = 1e30
"""Settings of optimizers that are larger would overflow in float32."""
REDUCED_STATES = {"row_var", "col_var"}
"""States of Adafactor with the shape of their parameter, but 1 on some axes."""


def check_state(run: Run, template: dict[str, Any], state: Any, place: str) -> None:
    """Raise unless a state can be restored in a run.

    Args:
        run: The run at its start.
        template: Its ``state_dict``.
        state: The state of the file.
        place: Name of the file and of the field, for error messages.

    Raises:
        embens.files.Refused: if a field is missing, unknown, of another type or shape, or out of
            range.
    """
    fields = Fields(state, place, template)
    _check_progress(run, fields)
    for name in ("scaler", "tally", "generators"):
        check_like(fields.get(name), template[name], f"{place}.{name}")
    _check_weights(run, template["ensemble"], fields, "ensemble")
    if (fields.get("good_weights") is None) != (fields.get("step") == 0):
        raise fields.fail("good_weights", "the weights of the last epoch, inside of an epoch only")
    for name in ("best_weights", "good_weights"):
        if fields.get(name) is not None:
            _check_weights(run, template["ensemble"], fields, name)
    _check_optimizer(run, template["optimizer"], fields.fields("optimizer"))
    schedule = fields.fields("scheduler")
    _check_scheduler(run.scheduler, template["scheduler"], schedule, fields.get("steps"))
    _check_random(fields.fields("random", ["torch", "python"], ["cuda", "numpy"]))
    _check_callbacks(run, fields)


def check_like(value: Any, template: Any, place: str) -> None:
    """Raise unless a value has the types, names, lengths and shapes of a template.

    Args:
        value: Read from a file.
        template: What it is compared with. Its values may differ.
        place: Name of the file and of the field, for error messages.

    Example:
        >>> check_like({"lr": "fast"}, {"lr": 0.1}, "x.safetensors: state")
        Traceback (most recent call last):
        embens.files.tensors.Refused: x.safetensors: state.lr must be a finite number, got 'fast'...
    """
    if isinstance(template, Tensor):
        expected = f"a tensor of {template.dtype} and shape {tuple(template.shape)}"
        is_tensor = isinstance(value, Tensor) and value.dtype == template.dtype
        if not is_tensor or value.shape != template.shape:
            raise refusal(place, expected, value)
    elif isinstance(template, Mapping):
        fields = Fields(value, place)
        if fields.values.keys() != template.keys():
            raise refusal(place, f"a dictionary with the names {list(template)}", list(value))
        for name, part in template.items():
            check_like(value[name], part, f"{place}.{name}")
    elif isinstance(template, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(template):
            raise refusal(place, f"a list of {len(template)} values", value)
        for index, part in enumerate(template):
            check_like(value[index], part, f"{place}[{index}]")
    elif isinstance(template, bool) or template is None or isinstance(template, str):
        if type(value) is not type(template):
            raise refusal(place, f"a value of type {type(template).__name__}", value)
    elif isinstance(template, int):
        if not is_whole(value) or abs(value) > MOST:
            raise refusal(place, "an integer", value)
    elif not is_finite(value) and value != template:  # a limit may be infinite
        raise refusal(place, "a finite number", value)


def _check_progress(run: Run, fields: Fields) -> None:
    """Check the counters and the records of the epochs."""
    # A run may be extended, so these are the epochs of the saved run, not of this one.
    epoch = fields.whole("epoch", least=0, most=fields.whole("epochs", least=0))
    steps_in_epoch = run.steps_per_epoch or sys.maxsize  # 0 if the length of a loader is unknown
    fields.whole("step", least=0, most=steps_in_epoch)
    fields.whole("steps", least=0)
    fields.number("seconds", low=0)
    if fields.get("best_epoch") is not None:
        fields.whole("best_epoch", least=1, most=max(epoch, 1))
    if not _is_number(fields.get("best_value")):
        raise fields.fail("best_value", "a number")
    if fields.get("stopped") is not None:
        fields.text("stopped")
    if fields.get("criterion") is not None:
        fields.text("criterion", DEFAULT_CRITERIA)
    norms = fields.get("gradient_norms")
    if norms is not None and not (_are_numbers(norms) and len(norms) == 2):
        raise fields.fail("gradient_norms", "two values")
    records = fields.items("records")
    if len(records) != epoch:
        raise fields.fail("records", f"a list of {epoch} epochs")
    for index, values in enumerate(records):
        record = Fields(values, f"{fields.place}.records[{index}]")
        record.whole("epoch", least=index + 1, most=index + 1)
        for name, value in record.values.items():
            if not isinstance(name, str) or not (_is_number(value) or _are_numbers(value)):
                raise record.fail(name, "a number, or a list of them")
            is_list = isinstance(value, (list, tuple))
            if is_list != ("member_" in name) or (is_list and len(value) != run.ensemble.members):
                raise record.fail(name, "one value, or one for each member")
        for name in ("loss", "member_loss"):
            if name not in record.values:
                raise record.fail(name, "a column of the history")


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, which may be NaN or infinite."""
    return isinstance(value, float) or is_whole(value)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(_is_number(value) for value in values)


def _check_weights(run: Run, template: dict[str, Tensor], fields: Fields, name: str) -> None:
    """Check the tensors of an ensemble; parameters of a checkpoint are always finite."""
    weights = fields.get(name)
    place = f"{fields.place}.{name}"
    check_like(weights, template, place)
    for key, tensor in run.ensemble.state_dict(keep_vars=True).items():
        if isinstance(tensor, nn.Parameter) and not bool(weights[key].isfinite().all()):
            raise refusal(f"{place}.{key}", "a tensor of finite values", weights[key])


def _check_optimizer(run: Run, template: dict[str, Any], fields: Fields) -> None:
    """Check the groups of an optimizer, and the state of each parameter."""
    check_like(fields.get("param_groups"), template["param_groups"], f"{fields.place}.param_groups")
    for index, group in enumerate(template["param_groups"]):
        saved = Fields(fields.get("param_groups")[index], f"{fields.place}.param_groups[{index}]")
        if saved.items("params") != list(group["params"]):
            raise saved.fail("params", f"the indices {group['params']}")
        if isinstance(saved.get("lr"), float):
            saved.number("lr", low=0)
        for name, value in saved.values.items():
            for number in value if isinstance(value, (list, tuple)) else [value]:
                if is_finite(number) and abs(number) > LARGEST:
                    raise saved.fail(name, f"numbers of at most {LARGEST:g}")
    if list(fields.values) != list(template):
        raise refusal(fields.place, f"a dictionary with {list(template)}", list(fields.values))
    parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
    states = fields.fields("state")
    is_stock = type(run.optimizer).__module__.startswith("torch.optim")
    # The first state of each number of axes: stock optimizers have the same for all of these.
    firsts: dict[int, dict[str, Any]] = {}
    types: dict[str, type] = {}
    for index, values in states.values.items():
        if not is_whole(index) or not 0 <= index < len(parameters):
            raise refusal(f"{states.place}: the index of a parameter", "known", index)
        state = Fields(values, f"{states.place}.{index}")
        if not is_stock:
            continue
        first = firsts.setdefault(parameters[index].dim(), state.values)
        if state.values.keys() != first.keys():
            raise refusal(state.place, f"a dictionary with {list(first)}", list(state.values))
        for name, value in state.values.items():
            if isinstance(value, Tensor) and not _fits(name, value, parameters[index]):
                parameter = parameters[index]
                expected = f"a tensor of shape {tuple(parameter.shape)} and {parameter.dtype}"
                if name in SCALAR_STATES:
                    expected = "one number"
                raise state.fail(name, expected)
            expected_type = types.setdefault(name, type(value))
            if type(value) is not expected_type or isinstance(value, (bool, str)):
                raise state.fail(name, f"like that of the first parameter, {expected_type}")
            if name in SCALAR_STATES and not _is_possible(name, value):
                raise state.fail(name, "a value that an optimizer can reach")


def _fits(name: str, value: Tensor, parameter: Tensor) -> bool:
    """Return whether a state of an optimizer has the shape and type that belong to a parameter."""
    if name in SCALAR_STATES:
        return value.numel() == 1 and value.is_floating_point()
    if value.dtype != parameter.dtype:
        return False
    if name not in REDUCED_STATES:
        return value.shape == parameter.shape
    if value.dim() != parameter.dim():
        return False
    sizes = zip(value.shape, parameter.shape, strict=True)
    return all(size in (1, expected) for size, expected in sizes)


def _is_possible(name: str, value: Any) -> bool:
    """Return whether a scalar state can occur; others may lead to divisions by zero."""
    if not isinstance(value, (int, float, Tensor)):
        return False
    value = float(value)
    if name == "step":
        return 0 <= value <= MOST
    if name == "mu_product":
        return 0 <= value < 1
    return math.isfinite(value)


def _check_scheduler(scheduler: Any, template: dict[str, Any], fields: Fields, steps: int) -> None:
    """Check the attributes of a scheduler; they must not hide its methods.

    The attributes of a user's scheduler may have any type and change it during a run.
    """
    for name in fields.values:
        if not isinstance(name, str) or (name not in template and hasattr(type(scheduler), name)):
            raise refusal(fields.place, "the attributes of a scheduler", name)
    if type(scheduler).__module__.startswith("torch.optim"):
        _check_schedule(fields.values, template, fields.place)
        fields.whole("last_epoch", least=0, most=steps)


def _check_schedule(values: Any, template: Mapping[str, Any], place: str) -> None:
    """Check the attributes of a stock scheduler, which may contain other schedulers.

    Args:
        values: Read from a file.
        template: The attributes at the start of a run.
        place: Name of the file and of the field, for error messages.
    """
    fields = Fields(values, place, template)
    for name, expected in template.items():
        if name == "best":  # infinite at the start
            if not _is_number(fields.get(name)):
                raise fields.fail(name, "a number")
        elif name in CHANGING_ATTRIBUTES:
            check_like(fields.get(name), expected, f"{place}.{name}")
        else:
            _check_setting(fields.get(name), expected, f"{place}.{name}")


def _check_setting(value: Any, expected: Any, place: str) -> None:
    """Check a setting of a scheduler: texts are equal, and positive numbers stay positive."""
    if isinstance(expected, Counter):
        if not isinstance(value, Counter) or not all(map(is_whole, [*value, *value.values()])):
            raise refusal(place, "integers with their counts", value)
    elif isinstance(expected, Mapping):
        _check_schedule(value, expected, place)
    elif isinstance(expected, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(expected):
            raise refusal(place, f"a list of {len(expected)} values", value)
        for index, part in enumerate(expected):
            _check_setting(value[index], part, f"{place}[{index}]")
    else:
        check_like(value, expected, place)
        if isinstance(expected, str) and value != expected:
            raise refusal(place, repr(expected), value)
        if not isinstance(expected, str) and is_finite(expected) and expected > 0 and value <= 0:
            raise refusal(place, "above 0", value)


def _check_random(fields: Fields) -> None:
    """Check the states of the global generators by restoring them in new generators."""
    try:
        torch.Generator().set_state(fields.get("torch"))
    except (TypeError, RuntimeError):
        raise fields.fail("torch", "the state of a generator") from None
    try:
        version, words, gauss = fields.items("python")
        generator = random.Random()
        generator.setstate((version, tuple(words), gauss))
        # Python drops the upper bits of words, and keeps any object as the next normal value.
        is_changed = generator.getstate() != (version, tuple(words), gauss)
        if is_changed or not _is_number(gauss or 0.0):
            raise ValueError
    except (TypeError, ValueError, IndexError, OverflowError):
        raise fields.fail("python", "the state of a generator") from None
    if "cuda" in fields.values:
        for state in fields.items("cuda"):
            if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.dim() != 1:
                raise fields.fail("cuda", "the states of generators")
    numpy = sys.modules.get("numpy")
    if "numpy" not in fields.values or numpy is None:
        return
    try:
        generator = numpy.random.RandomState()
        generator.set_state(tuple(fields.items("numpy")))
        name, words, *rest = generator.get_state()
        if [name, words.tolist(), *rest] != fields.items("numpy"):
            raise ValueError  # numpy has rounded a value
    except (TypeError, ValueError, IndexError, OverflowError):
        raise fields.fail("numpy", "the state of a generator") from None


def _check_callbacks(run: Run, fields: Fields) -> None:
    """Check that the states of callbacks are pairs of a name and a dictionary."""
    library_states = {}
    missing: Counter[str] = Counter()
    for callback in run.callbacks:
        if type(callback).__module__.startswith("embens."):
            state = callback.state_dict()
            library_states[type(callback).__name__] = state
            if state:
                missing[type(callback).__name__] += 1
    for index, pair in enumerate(fields.items("callbacks")):
        place = f"{fields.place}.callbacks[{index}]"
        if not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], str):
            raise refusal(place, "a pair of a name and a dictionary", pair)
        name, state = pair
        missing[name] -= 1
        Fields(state, place)
        if name in library_states:
            check_like(state, library_states[name], f"{place}[1]")
    for name, count in missing.items():
        if count > 0:
            raise fields.fail("callbacks", f"with a state of {name}")
