"""Steps and epochs of a run: chunks, validation, the best weights, divergence."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from training import problem

import embens
from embens.training import Divergence, fit, linear_decay, trainer


def test_members_can_be_backpropagated_in_chunks():
    whole, chunked = problem.ensemble(members=5), problem.ensemble(members=5)
    first = fit(whole, problem.data(), epochs=2, batch_size=16)
    second = fit(chunked, problem.data(), epochs=2, batch_size=16, chunk=2)
    for name, tensor in problem.weights(whole).items():
        torch.testing.assert_close(chunked.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)
    for a, b in zip(first.members, second.members, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["accuracy"] == pytest.approx(b["accuracy"], abs=0.05)


def test_the_loss_of_the_mean_can_be_trained():
    ensemble = problem.ensemble()
    history = fit(ensemble, problem.data(), epochs=10, batch_size=16, lr=0.05, of="mean")
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]


def test_regression_has_losses_and_no_accuracies():
    x, _ = problem.data()
    ensemble = problem.ensemble(outputs=1)
    history = fit(
        ensemble,
        (x, x.sum(1, keepdim=True)),
        (x, x.sum(1, keepdim=True)),
        criterion=F.mse_loss,
        epochs=20,
        batch_size=16,
    )
    assert history.epochs[-1]["loss"] < 0.5 * history.epochs[0]["loss"]
    assert math.isnan(history.epochs[0]["ensemble_accuracy"])
    assert history.epochs[0]["metric"] == history.epochs[0]["validation_loss"]
    values = [row["metric"] for row in history.epochs]
    assert history.best_epoch == values.index(min(values)) + 1


def test_the_best_weights_are_kept_and_patience_stops():
    train, validation = problem.data(), problem.data(40, 9)
    kept = []

    def metric(outputs, target):
        kept.append(outputs.clone())
        return [0.3, 0.7, 0.7, 0.1, 0.9, 0.2][len(kept) - 1]

    ensemble = problem.ensemble()
    history = fit(
        ensemble, train, validation, epochs=6, lr=0.05, metric=metric, maximise=True, patience=2
    )
    assert history.stopped == "patience"
    assert history.best_epoch == 2
    assert [row["metric"] for row in history.epochs] == [0.3, 0.7, 0.7, 0.1]
    torch.testing.assert_close(ensemble(validation[0]), kept[1])
    kept.clear()
    ensemble = problem.ensemble()
    history = fit(ensemble, train, validation, epochs=6, metric=metric, maximise=False, keep="last")
    assert (history.stopped, history.best_epoch) == ("epochs", 4)
    torch.testing.assert_close(ensemble(validation[0]), kept[5])


def test_averaged_weights_are_the_recursion_written_by_hand():
    ensemble, means = problem.ensemble(), {}

    class Watch:
        def on_step(self, ensemble, record):
            for name, weight in problem.weights(ensemble).items():
                mean = means.setdefault(name, start[name].clone())
                mean += (weight - mean) / min(2 * 4, 1 + record["step"] / 9)

    start = problem.weights(ensemble)
    settings = {"epochs": 12, "batch_size": 16, "lr": 0.05, "average": 2.0}
    fit(ensemble, problem.data(), **settings, callbacks=[Watch()])
    for name, tensor in problem.weights(ensemble).items():
        torch.testing.assert_close(tensor, means[name])


def test_averaged_weights_are_what_is_judged_and_kept():
    train, validation, kept = problem.data(), problem.data(40, 9), []

    def metric(outputs, target):
        kept.append(outputs.clone())
        return [3, 1, 2, 4][len(kept) - 1]

    ensemble = problem.ensemble()
    settings = {"epochs": 4, "batch_size": 16, "lr": 0.05, "metric": metric, "maximise": False}
    fit(ensemble, train, validation, average=1.0, **settings)
    torch.testing.assert_close(ensemble(validation[0]), kept[1])
    plain, averaged = problem.ensemble(), kept[1]
    kept.clear()
    fit(plain, train, validation, **settings)
    assert (kept[1] - averaged).abs().max() > 0.01


def test_averages_keep_the_statistics_of_norm_layers():
    reference = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )
    plain, averaged = (embens.batch_ensemble(reference, 2, generator=g) for g in generators())
    settings = {"epochs": 2, "batch_size": 20}
    fit(plain, problem.data(), **settings)
    fit(averaged, problem.data(), **settings, average=1.0)
    for mine, other in zip(averaged.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, other)


def generators():
    return [torch.Generator().manual_seed(1) for _ in "ab"]


def test_time_ends_a_run_also_within_its_first_epoch_and_it_can_go_on(tmp_path):
    ensemble, settings = problem.ensemble(), {"epochs": 3, "batch_size": 16}
    train, validation = problem.data(), problem.data(40, 9)
    options = settings | {"checkpoint": tmp_path}
    history = fit(ensemble, train, validation, **options, time_limit=1e-9)
    assert (history.stopped, history.best_epoch, len(history.epochs)) == ("time", 1, 1)
    assert len(fit(ensemble, train, validation, **options).epochs) == 3
    last = fit(ensemble, train, **settings | {"epochs": 1}, time_limit=1e-9)
    assert last.stopped == "time"
    with pytest.raises(ValueError, match="time_limit must be a number above 0"):
        fit(ensemble, train, **settings, time_limit=0)


def test_an_average_needs_to_know_what_an_epoch_is():
    loader = DataLoader(TensorDataset(*problem.data()), 16)
    with pytest.raises(ValueError, match="average: this loader does not know"):
        fit(problem.ensemble(), (batch for batch in loader), epochs=1, average=1.0)
    with pytest.raises(ValueError, match="average must be a number above 0"):
        fit(problem.ensemble(), loader, epochs=1, average=-1.0)


def test_divergence_says_what_to_try_and_leaves_the_last_good_weights():
    x, y = problem.data()
    ensemble = problem.ensemble()
    seen = []

    def exploding(outputs, target):
        if outputs.requires_grad:
            seen.append(1)
        return F.cross_entropy(outputs, target) * (math.inf if len(seen) > 3 * 4 * 2 + 1 else 1)

    expected = problem.ensemble()
    each = partial(fit, criterion=lambda outputs, target: F.cross_entropy(outputs, target))
    each(expected, (x, y), epochs=2, batch_size=16, scheduler=linear_decay(2, hold=1.0))
    with pytest.raises(
        Divergence, match=r"epoch 3 at step 1: the loss is inf.*lower lr.*gamma"
    ) as e:
        fit(
            ensemble,
            (x, y),
            epochs=5,
            batch_size=16,
            criterion=exploding,
            scheduler=linear_decay(5, hold=1.0),
        )
    assert "weights from after epoch 2" in str(e.value)
    assert len(e.value.history.epochs) == 2
    problem.assert_equal(problem.weights(ensemble), problem.weights(expected))


def test_a_rate_that_is_far_too_high_ends_in_finite_weights(tmp_path):
    ensemble = problem.ensemble()
    before = problem.weights(ensemble)
    with pytest.raises(Divergence, match="diverged in epoch 1"):
        fit(ensemble, problem.data(), epochs=3, lr=1e12, batch_size=16, checkpoint=tmp_path)
    problem.assert_equal(problem.weights(ensemble), before)
    assert all(torch.isfinite(v).all() for v in ensemble.state_dict().values())
    assert not list(tmp_path.iterdir())


def test_validation_does_not_change_the_training():
    def run(validation):
        net = problem.reference(dropout=0.3)
        ensemble = embens.mc_dropout(net, 3, fresh=True, generator=torch.Generator().manual_seed(0))
        fit(ensemble, problem.data(), validation, epochs=3, batch_size=16, keep="last")
        return problem.weights(ensemble)

    problem.assert_equal(run(None), run(problem.data(20, 5)))


def test_a_loss_is_looked_at_after_some_steps_and_named_by_the_one_that_was_not_finite(monkeypatch):
    monkeypatch.setattr(trainer, "_CHECK_EVERY", 3)
    steps = []

    def exploding(outputs, target):
        steps.append(1)
        return F.cross_entropy(outputs, target) * (math.nan if len(steps) == 2 * 3 + 1 else 1)

    with pytest.raises(Divergence, match="epoch 1 at step 3: the loss is nan"):
        fit(problem.ensemble(), problem.data(), epochs=5, batch_size=4, criterion=exploding)
    assert len(steps) == 3 * 3  # three members, three steps


def test_what_refuses_numbers_that_are_not_finite_is_a_divergence_too():
    steps = []

    def refusing(outputs, target):
        steps.append(1)
        if len(steps) > 6:
            raise RuntimeError("all elements should be between 0 and 1")
        return F.cross_entropy(outputs, target) * (math.inf if len(steps) > 3 else 1)

    with pytest.raises(Divergence, match="epoch 1 at step 2: the loss is inf"):
        fit(problem.ensemble(), problem.data(), epochs=1, batch_size=4, criterion=refusing)


def test_the_default_criterion_is_chosen_once():
    """Labels that are yes or no for each class: some batches look like probabilities."""
    x, _ = problem.data()
    y = (x[:, :3] > 0.5).float()
    y[:8] = F.one_hot(torch.arange(8) % 3, 3).float()
    first, second = problem.ensemble(), problem.ensemble()
    loader = DataLoader(TensorDataset(x, y), 4)
    history = fit(first, loader, epochs=2)
    expected = fit(second, loader, epochs=2, criterion=F.cross_entropy)
    assert history.epochs[-1]["loss"] == pytest.approx(expected.epochs[-1]["loss"])
    problem.assert_equal(problem.weights(first), problem.weights(second))


def test_callbacks_see_each_epoch_and_leave_the_run_as_it_is():
    plain, watched = problem.ensemble(dropout=0.3), problem.ensemble(dropout=0.3)
    seen = []

    def callback(ensemble, record):
        assert ensemble is watched
        seen.append({**record, "noise": torch.rand(())})

    fit(plain, problem.data(), epochs=3)
    history = fit(watched, problem.data(), epochs=3, callbacks=[callback])
    problem.assert_equal(problem.weights(plain), problem.weights(watched))
    for row in seen:
        row.pop("noise")
    assert repr(seen) == repr(history.epochs)


@pytest.mark.parametrize("chunk", [None, 2])
def test_batches_that_are_accumulated_are_one_larger_batch(chunk):
    """Also where the last step has fewer batches, and the last batch fewer rows."""
    whole, parts = problem.ensemble(), problem.ensemble()
    first = fit(whole, problem.data(), epochs=3, batch_size=21, chunk=chunk)
    second = fit(parts, problem.data(), epochs=3, batch_size=7, accumulate=3, chunk=chunk)
    for name, tensor in problem.weights(whole).items():
        torch.testing.assert_close(parts.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)
    assert second.epochs[-1]["loss"] == pytest.approx(first.epochs[-1]["loss"], rel=1e-4)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [None, 2])
def test_autocast_trains_as_full_precision_to_its_rounding(kind, chunk):
    full, half = problem.ensemble(), problem.ensemble()
    seen = []
    hook = half.network[0].register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    options = {"epochs": 3, "batch_size": 16, "chunk": chunk}
    first = fit(full, problem.data(), problem.data(20, 5), **options)
    second = fit(half, problem.data(), problem.data(20, 5), **options, autocast=kind)
    hook.remove()
    assert set(seen) == {kind}
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    assert second.epochs[-1]["loss"] == pytest.approx(first.epochs[-1]["loss"], rel=0.03)
    assert second.epochs[-1]["loss"] != first.epochs[-1]["loss"]


def test_a_scheduler_can_make_a_step_at_each_step():
    rates = []

    class Rates:
        def on_step(self, ensemble, record):
            rates.append(record["modulation_lr"])

    scheduler = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    options = {"epochs": 2, "batch_size": 20, "scheduler": scheduler, "schedule_by": "step"}
    fit(problem.ensemble(), problem.data(), **options, lr=0.1, callbacks=[Rates()])
    assert rates == pytest.approx([0.1 * 0.5**k for k in range(6)])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    with pytest.raises(ValueError, match="ReduceLROnPlateau goes by a metric of epochs"):
        fit(problem.ensemble(), problem.data(), **options | {"scheduler": plateau})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.skipif(torch.__version__ < (2, 10), reason="compiling needs torch 2.10")  # type: ignore[operator]
@pytest.mark.parametrize("rows", [48, pytest.param(60, marks=pytest.mark.long)])  # 60: two shapes
def test_a_compiled_run_goes_on_to_the_same_bits(rows, tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain, whole, again = (problem.ensemble() for _ in range(3))
    options = {"train": problem.data(rows), "epochs": 2, "batch_size": 16}
    fit(plain, **options)
    fit(whole, **options, compile=True)
    for name, tensor in problem.weights(plain).items():
        torch.testing.assert_close(whole.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)

    class Stop(Exception):
        def on_step(self, ensemble, record):
            if record["step"] == 5:
                raise self

    run = partial(fit, **options, compile=True, checkpoint=tmp_path, every=1)
    with pytest.raises(Stop):
        run(problem.ensemble(), callbacks=[Stop()])
    torch._dynamo.reset()
    run(again)
    problem.assert_equal(problem.weights(again), problem.weights(whole))
    with pytest.raises(ValueError, match="all members at once"):
        fit(plain, problem.data(), epochs=1, compile=True, chunk=2)


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("loaded", [False, True])
def test_the_divergence_from_a_prior_is_added_for_each_row(chunk, loaded):
    """One step of a whole batch, against the objective written out."""
    x, y = problem.data(24)
    torch.manual_seed(0)
    mine, theirs = (embens.rank1(problem.reference(), 3) for _ in range(2))
    theirs.load_state_dict(mine.state_dict())
    for one, other in zip(mine.individuals.values(), theirs.individuals.values(), strict=True):
        noise = torch.randn_like(one.values)
        for module in (one, other):  # the same in every pass
            module.__class__ = type("Fixed", (type(one),), {"draw": property(lambda m: m.fixed)})
            module.fixed = lambda noise=noise: noise
    data = DataLoader(TensorDataset(x, y), 24) if loaded else (x, y)
    fit(
        mine, data, epochs=1, batch_size=24, lr=0.1, chunk=chunk, optimizer=partial(torch.optim.SGD)
    )
    optimizer = torch.optim.SGD(theirs.parameter_groups(0.1))
    (embens.objective(theirs(x), y) + theirs.kl() / 24).backward()
    optimizer.step()
    expected = problem.weights(theirs)
    torch.testing.assert_close(problem.weights(mine), expected, rtol=1e-4, atol=1e-6)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(zip(*problem.data(8), strict=True))


def test_a_divergence_needs_the_number_of_rows():
    with pytest.raises(TypeError, match="divided by the number of rows, which this loader"):
        fit(embens.rank1(problem.reference(), 3), DataLoader(Endless(), 8), epochs=1)


def test_a_run_that_time_ends_again_and_again_is_that_of_one_go(tmp_path):
    settings = {"epochs": 3, "batch_size": 16, "seed": 1, "progress": False}
    whole = problem.ensemble()
    history = fit(whole, problem.data(), **settings)
    for _ in range(50):
        again = problem.ensemble()
        told = fit(again, problem.data(), **settings, checkpoint=tmp_path, time_limit=1e-9)
        if told.stopped == "epochs":
            break
    assert (told.stopped, len(told.epochs)) == ("epochs", len(history.epochs))
    for mine, other in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, other)
