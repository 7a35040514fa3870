"""States of checkpoints: each field is checked before any of it is used."""

import copy
import functools
from functools import partial

import pytest
import torch
from torch import optim
from training import problem

from embens.fields import FIX
from embens.files import Refused
from embens.training import Autocast, Callback, WeightAveraging, fit
from embens.training.states import check_like, check_state

PLACE = "step-0000000003.safetensors: state"


class Watch(Callback):
    """Keep the run with its state at the start, and the state after three steps."""

    def on_start(self, run):
        self.run = run
        self.template = copy.deepcopy(run.state_dict())

    def on_step(self, run):
        if run.steps == 3:
            self.state = copy.deepcopy(run.state_dict())


@functools.cache
def watched():
    watch = Watch()
    options = {"epochs": 2, "batch_size": 30, "optimizer": optim.Adam}
    scheduler = partial(optim.lr_scheduler.MultiStepLR, milestones=[1, 2])
    callbacks = [WeightAveraging(1.0), Autocast(torch.bfloat16), watch]
    fit(problem.ensemble(), problem.data(), **options, scheduler=scheduler, callbacks=callbacks)
    return watch


def check(state):
    check_state(watched().run, watched().template, state, PLACE)


def edited(path, value):
    state = copy.deepcopy(watched().state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return state


def test_the_state_of_a_run_is_accepted():
    check(watched().state)
    check(watched().template)


WEIGHT = "reference.0.weight"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("epoch",), True, "epoch must be an integer from 0 to 2, got True"),
        (("epoch",), 3, "epoch must be an integer from 0 to 2, got 3"),
        (("epochs",), 0.5, "epochs must be an integer of at least 0, got 0.5"),
        (("step",), -1, "step must be an integer from 0 to 2"),
        (("steps",), 1.0, "steps must be an integer of at least 0"),
        (("seconds",), float("nan"), "seconds must be a finite number"),
        (("best_epoch",), 5, "best_epoch must be an integer from 1 to 1"),
        (("best_value",), "good", "best_value must be a number"),
        (("stopped",), 3, "stopped must be a text"),
        (("criterion",), "os.system", "criterion must be one of"),
        (("gradient_norms",), (1.0,), "gradient_norms must be two values"),
        (("records",), [], "records must be a list of 1 epochs"),
        (("records", 0), 3, r"records\[0\] must be a dictionary"),
        (("records", 0, "epoch"), 7, r"records\[0\]\.epoch must be an integer from 1 to 1"),
        (("records", 0, "loss"), "low", r"records\[0\]\.loss must be a number"),
        (("ensemble",), {}, "ensemble must be a dictionary with the names"),
        (("ensemble", WEIGHT), torch.zeros(2), r"weight must be a tensor of torch.float32 and"),
        (("ensemble", WEIGHT), torch.zeros(16, 4).double(), r"weight must be a tensor of torch.fl"),
        (("ensemble", WEIGHT), torch.full((16, 4), torch.nan), "weight must be a tensor of finite"),
        (("good_weights", WEIGHT), 3, "good_weights.reference.0.weight must be a tensor"),
        (("best_weights",), {}, "best_weights must be a dictionary"),
        (("optimizer",), None, "optimizer must be a dictionary"),
        (("optimizer", "param_groups"), [], "param_groups must be a list of 2 values"),
        (("optimizer", "param_groups", 0, "lr"), float("nan"), "lr must be a finite number"),
        (("optimizer", "param_groups", 0, "lr"), "fast", "lr must be a finite number, got 'fast'"),
        (("optimizer", "state", 99), {}, "index of a parameter must be known, got 99"),
        (("optimizer", "state", 0), 3, "state.0 must be a dictionary"),
        (("optimizer", "state", 0, "exp_avg"), torch.zeros(3), "exp_avg must be a tensor of shape"),
        (("optimizer", "state", 0, "exp_avg"), torch.zeros(1), "exp_avg must be a tensor of shape"),
        (("optimizer", "state", 0, "exp_avg"), torch.zeros(16, 4).int(), "and torch.float32"),
        (("optimizer", "state", 0, "step"), torch.tensor(1), "step must be one number"),
        (("good_weights",), None, "good_weights must be the weights of the last epoch"),
        (("step",), 0, "good_weights must be the weights of the last epoch"),
        (("optimizer", "state", 0, "exp_avg"), None, "exp_avg must be like that of the first"),
        (("optimizer", "state", 0, "step"), torch.zeros(16), "step must be one number"),
        (("optimizer", "state", 0, "step"), torch.tensor(-1.0), "step must be a value that"),
        (("optimizer", "param_groups", 0, "eps"), 1e300, r"eps must be numbers of at most 1e\+30"),
        (("optimizer", "surprise"), 1, "optimizer must be a dictionary with"),
        (("scheduler", "last_epoch"), 0.5, "last_epoch must be an integer"),
        (("scheduler", "last_epoch"), 99, "last_epoch must be an integer from 0 to 3"),
        (("scheduler", "step"), "text", "scheduler must be the attributes of a scheduler"),
        (("scheduler", "base_lrs"), [0.1], "base_lrs must be a list of 2 values"),
        (("scheduler",), {}, "scheduler has no field"),
        (("scaler",), {"scale": 2.0}, "scaler must be a dictionary with the names"),
        (("tally", "loss"), torch.zeros(7).double(), r"tally.loss must be a tensor"),
        (("random", "torch"), torch.zeros(9, dtype=torch.uint8), "random.torch must be the state"),
        (("random", "torch"), "seed", "random.torch must be the state of a generator"),
        (("random", "python"), [3, [1, 2], None], "random.python must be the state"),
        (("random", "python"), [3, [-1] * 625, None], "random.python must be the state"),
        (("random", "numpy"), ["MT19937", [1], 0, 0, 0.0], "random.numpy must be the state"),
        (("random", "numpy", 2), 0.5, "random.numpy must be the state of a generator"),
        (("random", "numpy"), None, "random.numpy must be the state of a generator, got None"),
        (("random", "cuda"), [torch.zeros(3)], "random.cuda must be the states of generators"),
        (("random", "os"), 1, "random has an unknown field 'os'"),
        (("generators",), [1, 2, 3], "generators must be a list of"),
        (("callbacks",), [], "callbacks must be with a state of WeightAveraging"),
        (("random", "python", 0), 2, "random.python must be the state of a generator"),
        (("random", "python", 2), "x", "random.python must be the state of a generator"),
        (("random", "python", 1, 3), 2**40, "random.python must be the state of a generator"),
        (("callbacks",), [["WeightAveraging"]], r"callbacks\[0\] must be a pair"),
        (("callbacks",), [["WeightAveraging", {}]], r"callbacks\[0\]\[1\] must be a dictionary"),
        (("surprise",), 1, "has an unknown field 'surprise'"),
    ],
)
def test_a_wrong_field_is_an_error_with_its_name_its_value_and_the_fix(path, value, message):
    with pytest.raises(Refused, match=message) as caught:
        check(edited(path, value))
    assert str(caught.value).startswith(PLACE)
    assert str(caught.value).endswith(FIX)


@pytest.mark.parametrize("name", ["epoch", "ensemble", "optimizer", "random", "callbacks"])
def test_a_missing_field_is_an_error(name):
    state = dict(watched().state)
    del state[name]
    with pytest.raises(Refused, match=f"has no field '{name}'"):
        check(state)


@pytest.mark.parametrize(
    ("value", "template"),
    [(1, True), (True, 1), ("1", 1), (None, "a"), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (0, None)],
)
def test_values_of_another_kind_are_not_alike(value, template):
    check_like(template, template, "x")
    with pytest.raises(Refused, match=r"^x"):
        check_like(value, template, "x")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("records", 0, "member_loss"), 0.5),
        (("records", 0, "member_loss"), [0.5]),
        (("records", 0, "loss"), [0.5, 0.5, 0.5]),
        (("optimizer", "param_groups", 0, "lr"), -1.0),
        (("optimizer", "param_groups", 0, "params", 0), 7),
    ],
)
def test_columns_rates_and_indices_have_their_meaning(path, value):
    with pytest.raises(Refused, match=str(path[-2] if path[-1] == 0 else path[-1])):
        check(edited(path, value))


def test_functions_of_a_schedule_are_not_read_from_a_file():
    watch = Watch()
    fit(problem.ensemble(), problem.data(), epochs=2, batch_size=30, callbacks=[watch])
    check_state(watch.run, watch.template, watch.state, PLACE)
    watch.state["scheduler"]["lr_lambdas"][0] = 3
    with pytest.raises(Refused, match="lr_lambdas"):
        check_state(watch.run, watch.template, watch.state, PLACE)


class Remembering(optim.lr_scheduler.LRScheduler):
    """A scheduler of a user that keeps a list of all rates."""

    def __init__(self, optimizer):
        self.rates = []
        super().__init__(optimizer)

    def get_lr(self):
        self.rates.append(0.9 ** len(self.rates))
        return [self.rates[-1] * rate for rate in self.base_lrs]


def state_of(scheduler):
    watch = Watch()
    options = {"batch_size": 30, "scheduler": scheduler, "callbacks": [watch]}
    fit(problem.ensemble(), problem.data(), epochs=2, **options)
    return watch


def test_a_scheduler_of_a_user_may_keep_a_list_that_grows():
    watch = state_of(Remembering)
    assert len(watch.state["scheduler"]["rates"]) > len(watch.template["scheduler"]["rates"])
    check_state(watch.run, watch.template, watch.state, PLACE)


def warm_up(optimizer):
    schedulers = [optim.lr_scheduler.LinearLR(optimizer), optim.lr_scheduler.StepLR(optimizer, 1)]
    return optim.lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[1])


one_cycle = partial(optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=8)


@pytest.mark.parametrize(
    ("scheduler", "path", "value"),
    [
        (warm_up, ("_schedulers", 0, "last_epoch"), [1]),
        (warm_up, ("_schedulers", 1, "step"), 3),
        (warm_up, ("_schedulers", 1), {}),
        (warm_up, ("_schedulers",), []),
        (one_cycle, ("_anneal_func_type",), 3),
        (one_cycle, ("_schedule_phases", 0, "end_step"), "late"),
        (one_cycle, ("cycle_momentum",), 1),
    ],
)
def test_attributes_inside_of_a_schedule_have_their_types(scheduler, path, value):
    watch = state_of(scheduler)
    check_state(watch.run, watch.template, watch.state, PLACE)
    inner = watch.state["scheduler"]
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(Refused, match=str(path[0])):
        check_state(watch.run, watch.template, watch.state, PLACE)
