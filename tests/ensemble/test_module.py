"""An ensemble is an ordinary module: everything that torch does with modules works."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import cases
import pytest
import torch
import torch.nn.functional as F
from cases import ARCHITECTURES, Residual, Tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

import embens


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def vision() -> tuple[nn.Module, torch.Tensor]:
    return Residual(), torch.randn(4, 3, 6, 6)


def tabular() -> tuple[nn.Module, torch.Tensor]:
    return mlp(), torch.randn(5, 3)


def text() -> tuple[nn.Module, torch.Tensor]:
    return Tokens(), torch.randint(11, (4, 5))


FAMILIES = {
    "independent regime": lambda r: embens.batch_ensemble(r, 3),
    "collective regime": lambda r: embens.batch_ensemble(r, 3, p=0.8),
    "mc dropout": lambda r: embens.mc_dropout(r, 3),
    "last-layer dropout": lambda r: embens.last_layer_dropout(r, 3),
    "independent": lambda r: embens.independent(r, 3),
    "mimo": lambda r: embens.mimo(r, 3),
    **{name: partial(family, members=3) for name, family in cases.FAMILIES.items()},
}
everywhere = pytest.mark.parametrize("make", [tabular, vision, text])
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def gradients(ensemble, run) -> list[torch.Tensor]:
    ensemble.zero_grad()
    run()
    return [p.grad.clone() for p in ensemble.parameters()]


def assert_same(a, b, tolerance: float = 1e-5) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@everywhere
@every_family
def test_state_dict_round_trips_into_another_ensemble(make, family):
    reference, x = make()
    first, second = family(reference).eval(), family(reference).eval()
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))


@everywhere
@every_family
def test_copies_and_pickles_are_equal_and_separate(make, family):
    reference, x = make()
    ensemble = family(reference).eval()
    expected = ensemble(x).detach()
    for twin in (copy.deepcopy(ensemble), pickle.loads(pickle.dumps(ensemble))):
        assert torch.equal(twin(x), expected)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert torch.equal(ensemble(x), expected)
        target = torch.zeros(len(x), dtype=torch.long)
        embens.objective(twin(x), target).backward()
        assert all(p.grad is None for p in ensemble.parameters())


@everywhere
@every_family
def test_dtype_and_device_move_everything(make, family):
    reference, x = make()
    ensemble = family(reference).eval()
    expected = ensemble(x)
    double = copy.deepcopy(ensemble).to(torch.float64)
    outputs = double(x.double() if x.is_floating_point() else x)
    assert outputs.dtype == torch.float64
    torch.testing.assert_close(outputs.float(), expected, rtol=1e-4, atol=1e-5)
    meta = copy.deepcopy(ensemble).to("meta")
    assert all(t.device.type == "meta" for t in (*meta.parameters(), *meta.buffers()))
    assert meta(x.to("meta")).shape == expected.shape


@everywhere
@every_family
def test_autocast_gives_the_dtype_that_the_reference_gives(make, family):
    reference, x = make()
    ensemble = family(reference).eval()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = ensemble(x)
        assert outputs.dtype == reference(x).dtype == torch.bfloat16
    torch.testing.assert_close(outputs.float(), ensemble(x), rtol=0.1, atol=0.1)
    outputs.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in ensemble.parameters())


def test_bfloat16_weights_stay_bfloat16_throughout():
    ensemble = embens.batch_ensemble(mlp().bfloat16(), 3)
    seen = []
    for module in ensemble.modules():
        module.register_forward_hook(lambda m, a, o: seen.append(o.dtype))
    ensemble(torch.randn(5, 3, dtype=torch.bfloat16), chunk=1)
    assert set(seen) == {torch.bfloat16}


@everywhere
@every_family
def test_functional_call_uses_the_given_tensors(make, family):
    reference, x = make()
    ensemble, other = family(reference).eval(), family(reference).eval()
    state = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    torch.testing.assert_close(torch.func.functional_call(ensemble, state, (x,)), other(x))
    grads = torch.func.grad(lambda p: torch.func.functional_call(ensemble, p, (x,)).square().sum())(
        {k: v.detach() for k, v in ensemble.named_parameters()}
    )
    plain = gradients(ensemble, lambda: ensemble(x).square().sum().backward())
    assert_same(grads.values(), plain, 1e-4)


@everywhere
@pytest.mark.parametrize("reentrant", [False, True])
def test_an_ensemble_can_be_checkpointed_as_a_whole(make, reentrant):
    reference, x = make()
    ensemble = embens.batch_ensemble(reference, 3).eval()
    if reentrant:
        if not x.is_floating_point():
            pytest.skip("reentrant checkpoints need an input with a gradient")
        x.requires_grad_()
    plain = gradients(ensemble, lambda: ensemble(x).square().sum().backward())
    again = gradients(
        ensemble,
        lambda: checkpoint(ensemble, x, use_reentrant=reentrant).square().sum().backward(),
    )
    assert_same(plain, again)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("make", "family"),
    [
        *((tabular, family) for family in FAMILIES.values()),
        (vision, FAMILIES["independent regime"]),
        (vision, FAMILIES["last-layer dropout"]),
        (text, FAMILIES["collective regime"]),
        (text, FAMILIES["last-layer dropout"]),
        *((text, FAMILIES[name]) for name in cases.FAMILIES),
        *((vision, FAMILIES[name]) for name in cases.FAMILIES),
    ],
)
def test_the_whole_graph_compiles_forward_and_backward(make, family):
    reference, x = make()
    torch._dynamo.reset()
    ensemble = family(reference).eval()
    compiled = torch.compile(ensemble, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), ensemble(x), rtol=1e-4, atol=1e-5)
    target = torch.zeros(len(x), dtype=torch.long)
    plain = gradients(ensemble, lambda: embens.objective(ensemble(x), target).backward())
    fast = gradients(ensemble, lambda: embens.objective(compiled(x), target).backward())
    assert_same(plain, fast, 1e-4)
    plain = gradients(ensemble, lambda: ensemble(x).square().sum().backward())
    fast = gradients(ensemble, lambda: compiled(x).square().sum().backward())
    assert_same(plain, fast, 1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_default_compiler_gives_the_same_numbers():
    torch._dynamo.reset()
    reference, x = tabular()
    ensemble = embens.batch_ensemble(reference, 3)
    compiled = torch.compile(ensemble, fullgraph=True)
    target = torch.zeros(len(x), dtype=torch.long)
    plain = gradients(ensemble, lambda: ensemble.objective(ensemble(x), target).backward())
    fast = gradients(ensemble, lambda: ensemble.objective(compiled(x), target).backward())
    assert_same(plain, fast)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@everywhere
@every_family
def test_it_exports_to_one_graph(make, family):
    reference, x = make()
    ensemble = family(reference).eval()
    exported = torch.export.export(ensemble, (x,))
    torch.testing.assert_close(exported.module()(x), ensemble(x), rtol=1e-4, atol=1e-5)


def test_an_export_leaves_the_ensemble_as_it_was():
    reference, x = tabular()
    ensemble = embens.batch_ensemble(reference, 3)
    target = torch.zeros(5, dtype=torch.long)
    before = gradients(ensemble, lambda: ensemble.objective(ensemble(x), target).backward())
    torch.export.export(ensemble, (x,))
    after = gradients(ensemble, lambda: ensemble.objective(ensemble(x), target).backward())
    assert_same(before, after)
    copy.deepcopy(ensemble)


def test_train_and_eval_reach_every_module():
    ensemble = embens.batch_ensemble(Residual(0.5), 3)
    for mode in (True, False):
        ensemble.train(mode)
        assert {m.training for m in ensemble.modules()} == {mode}
    assert embens.batch_ensemble(Residual().eval(), 3).training is False


def test_channels_last_is_kept():
    reference, x = vision()
    x = x.to(memory_format=torch.channels_last)
    ensemble = embens.batch_ensemble(reference.to(memory_format=torch.channels_last), 3).eval()
    torch.testing.assert_close(ensemble(x)[1], ensemble.member(1)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
def test_shared_and_individual_parameters_are_all_parameters_and_none_twice(case):
    ensemble = embens.batch_ensemble(case.build(), 3)
    shared = [id(p) for p in ensemble.shared_parameters()]
    individual = [id(p) for p in ensemble.individual_parameters()]
    assert sorted(shared + individual) == sorted(id(p) for p in ensemble.parameters())
    groups = ensemble.parameter_groups(lr=0.1, modulation_lr=0.5)
    assert [g["lr"] for g in groups] == [0.1, 0.5]
    assert [g["weight_decay"] for g in groups] == [5e-4, 0.0]
    torch.optim.SGD(groups).step()


WORKER = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, sys.argv[1])
from cases import FAMILIES, bayesian
import embens
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
reference = torch.nn.Sequential(
    torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(),
    torch.nn.Linear(8, 2))
x, y = torch.randn(8, 3), torch.randint(2, (8,))
named = (embens.batch_ensemble, embens.last_layer_dropout, embens.independent, embens.mimo)
for family in (*named, bayesian, *FAMILIES.values()):
    torch.manual_seed(0)
    ensemble = family(reference, 3, generator=torch.Generator().manual_seed(1))
    wrapped = DistributedDataParallel(ensemble)
    rows = slice(rank * 4, rank * 4 + 4)
    ensemble.objective(wrapped(x[rows]), y[rows]).backward()
    split = [p.grad.clone() for p in ensemble.parameters()]
    ensemble.zero_grad()
    embens.objective(wrapped(x[rows]), y[rows]).backward()
    for a, p in zip(split, ensemble.parameters()):
        torch.testing.assert_close(a, p.grad)
    ensemble.zero_grad()
    ensemble.objective(ensemble(x), y).backward()
    for a, p in zip(split, ensemble.parameters()):
        torch.testing.assert_close(a, p.grad)
dist.barrier()
dist.destroy_process_group()
print("agreed")
"""


def test_two_processes_under_ddp_have_the_gradients_of_one(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, str(script), str(Path(__file__).parents[1])],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("agreed") == 2


@everywhere
@every_family
def test_a_subset_has_the_members_that_were_asked_for(make, family, tmp_path):
    reference, x = make()
    ensemble = family(reference)
    ensemble(x)  # running statistics of the members' own
    ensemble.eval()
    some = ensemble.subset([2, 0, -1])
    assert some.members == 3
    assert_same([some(x)], [ensemble(x)[[2, 0, 2]]])
    for a, b in enumerate((2, 0, 2)):
        assert_same(some.member(a).state_dict().values(), ensemble.member(b).state_dict().values())
    before = ensemble(x)
    with torch.no_grad():
        for tensor in some.parameters():
            tensor.add_(1.0)
    assert torch.equal(ensemble(x), before), "a subset shares nothing with the ensemble"
    again = pickle.loads(pickle.dumps(some))
    some.save(tmp_path / "some")
    loaded = embens.load(tmp_path / "some", make()[0]).eval()
    assert torch.equal(again(x), some(x))
    assert torch.equal(loaded(x), some(x))
    assert loaded.plan == again.plan == some.plan
    assert loaded.subset([1]).plan.subset.members == (0,)  # of the first ensemble


def test_a_subset_is_trained_like_any_ensemble():
    ensemble = embens.batch_ensemble(Residual(), 4).subset(range(3))
    x, y = torch.randn(4, 3, 6, 6), torch.arange(4) % 5
    optimizer = torch.optim.SGD(ensemble.parameter_groups(lr=0.1))
    first = ensemble.objective(ensemble(x), y)
    first.backward()
    optimizer.step()
    assert ensemble.objective(ensemble(x), y) < first
    assert ensemble.natural_gamma == 3.0


def test_members_that_come_twice_count_as_one_in_the_natural_gamma():
    ensemble = embens.batch_ensemble(mlp(), 3, p=0.5)
    r = ensemble.overlap
    pairs = torch.tensor([[1, 1, r], [1, 1, r], [r, r, 1]])
    assert ensemble.subset([1, 1, 0]).natural_gamma == pytest.approx(9 / pairs.sum().item())
    assert ensemble.subset([1, 1]).natural_gamma == 1.0


def test_a_subset_of_members_that_are_not_there_is_an_error():
    ensemble = embens.batch_ensemble(mlp(), 3)
    for wrong, kind in (([3], IndexError), ([-4], IndexError), ([], ValueError)):
        with pytest.raises(kind, match="member"):
            ensemble.subset(wrong)
    for wrong in ([True, False, True], "01", [0.0], 2):
        with pytest.raises(TypeError, match=r"whole number|not iterable"):
            ensemble.subset(wrong)
    assert ensemble.subset(torch.tensor([0, 2])).members == 2


def test_fewer_fresh_masks_are_drawn_for_a_subset_and_none_of_them_twice():
    ensemble = embens.mc_dropout(mlp(), 4, fresh=True).subset([3, 1])
    assert ensemble(torch.ones(5, 3)).shape == (2, 5, 2)
    with pytest.raises(ValueError, match="can't come twice"):
        ensemble.subset([0, 0])


def test_the_repr_shows_laws_and_sites():
    text = repr(embens.batch_ensemble(mlp(), 3, p=0.5))
    assert "Shifted(p=0.5)" in text
    assert "members=3" in text
    assert "batch_ensemble" in text


def test_an_objective_without_gradients_is_the_sum_of_the_losses():
    reference, x = tabular()
    ensemble = embens.batch_ensemble(reference, 3)
    target = torch.zeros(5, dtype=torch.long)
    with torch.no_grad():
        value = embens.objective(ensemble(x), target)
    losses = [F.cross_entropy(o, target) for o in ensemble(x)]
    torch.testing.assert_close(value, torch.stack(losses).sum().detach())


@pytest.mark.skipif(torch.__version__ >= (2, 10), reason="every ensemble compiles whole")
def test_an_older_torch_names_the_one_that_is_needed():
    ensemble = embens.batch_ensemble(embens.networks.mlp(4, 8, 2), 3)
    x = torch.ones(5, 4)
    with pytest.raises(Exception, match="compiling_or_exporting_an_ensemble_needs_torch_2_10"):
        torch.compile(ensemble, fullgraph=True, backend="eager")(x)
    compiled = torch.compile(ensemble, backend="eager")
    torch.testing.assert_close(compiled(x), ensemble(x))
