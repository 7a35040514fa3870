"""Batches, chunks, and what is computed once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import ARCHITECTURES, Residual
from torch import nn
from torch.utils.checkpoint import checkpoint

import embens
from embens import laws


class Counted(nn.Module):
    """Counts its calls; the code can't be traced, so it is a black box."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.module(x) if bool(torch.isfinite(x).all()) else x


def counts(ensemble) -> list[int]:
    return [m.calls for m in ensemble.modules() if isinstance(m, Counted)]


def count_layer_calls(ensemble, x, **kwargs) -> dict[str, int]:
    calls: dict[str, int] = {}
    hooks = []
    for name, module in ensemble.network.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            plain = ".".join(p for p in name.split(".") if p not in ("layer", "module"))
            hooks.append(
                module.register_forward_hook(
                    lambda m, a, o, n=plain: calls.update({n: calls.get(n, 0) + 1})
                )
            )
    ensemble(x, **kwargs)
    for hook in hooks:
        hook.remove()
    return calls


def mlp(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
    )


def test_a_layer_before_the_first_modulation_runs_once():
    ensemble = embens.batch_ensemble(mlp(), 5)
    assert count_layer_calls(ensemble, torch.randn(4, 3), chunk=1) == {"0": 1, "3": 5, "5": 5}
    assert count_layer_calls(ensemble, torch.randn(4, 3), chunk=2) == {"0": 1, "3": 3, "5": 3}


def test_the_trunk_of_last_layer_dropout_runs_once_even_as_a_black_box():
    trunk = Counted(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    reference = nn.Sequential(trunk, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    for chunk in (1, 3, 7, None):
        ensemble = embens.last_layer_dropout(reference, 7)
        assert ensemble(torch.randn(2, 3, 6, 6), chunk=chunk).shape == (7, 2, 2)
        assert counts(ensemble) == [1]
        norm = next(m for m in ensemble.modules() if isinstance(m, nn.BatchNorm2d))
        assert norm.running_mean.shape == (4,)
        assert norm.num_batches_tracked == 1


def test_a_connection_around_the_first_modulation_is_computed_once():
    ensemble = embens.batch_ensemble(Residual(), 4).eval()
    with torch.no_grad():
        found = count_layer_calls(ensemble, torch.randn(2, 3, 6, 6), chunk=1)
    assert found["stem"] == 1
    assert found["blocks.0.conv1"] == 4

    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.skip = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1)
            self.conv, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 2)

        def forward(self, x):
            y = self.conv(F.relu(self.stem(x))) + F.avg_pool2d(self.skip(x), 3, 1, 1)
            return self.head(y.mean((2, 3)))

    ensemble = embens.embed(Skip(), 4, sites=["conv"])
    found = count_layer_calls(ensemble, torch.randn(2, 3, 6, 6), chunk=1)
    assert found == {"stem": 1, "skip": 1, "conv": 4, "head": 4}


def test_a_shared_result_that_is_changed_in_place_is_not_reused():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = self.a(x)
            h.view(-1).add_(1.0)
            return self.b(h)

    x = torch.randn(5, 3)
    ensemble = embens.last_layer_dropout(Net(), 3, example_input=x)
    expected = torch.stack([ensemble.member(a)(x) for a in range(3)])
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            torch.testing.assert_close(ensemble(x, chunk=1).clone(), expected)


def test_in_place_activations_give_the_same_as_plain_ones():
    def net(inplace):
        torch.manual_seed(0)
        act = nn.ReLU(inplace=inplace)
        return nn.Sequential(nn.Conv2d(3, 4, 3), act, nn.Conv2d(4, 4, 3), act, nn.Conv2d(4, 2, 1))

    x = torch.randn(2, 3, 8, 8)
    with torch.random.fork_rng():
        for family in (embens.batch_ensemble, embens.mc_dropout, embens.last_layer_dropout):
            results = []
            for inplace in (False, True):
                ensemble = family(net(inplace), 3, generator=torch.Generator().manual_seed(0))
                outputs = ensemble(x, chunk=1)
                outputs.square().sum().backward()
                grads = [p.grad for p in ensemble.parameters()]
                results.append([outputs.detach(), *grads])
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a, b)


def test_dropout_draws_separately_for_each_member_wherever_it_stands():
    torch.manual_seed(0)
    one = laws.Constant(1)
    x = torch.ones(64, 3)
    for pre in (one, None):
        ensemble = embens.embed(mlp(dropout=0.5), 3, pre=pre, post=one)
        for chunk in (1, 2, 3):
            a, b, c = ensemble.train()(x, chunk=chunk)
            assert not torch.equal(a, b)
            assert not torch.equal(b, c)
            assert not torch.equal(a, c)
            a, b, c = ensemble.eval()(x, chunk=chunk)
            torch.testing.assert_close(a, b)


def test_a_trunk_behind_dropout_is_shared_in_evaluation_mode_only():
    trunk = nn.Sequential(nn.Dropout(0.5), Counted(nn.Linear(3, 4)))
    ensemble = embens.last_layer_dropout(nn.Sequential(trunk, nn.ReLU(), nn.Linear(4, 2)), 3)
    x = torch.randn(5, 3)
    ensemble.train()(x, chunk=1)
    assert counts(ensemble) == [3]
    ensemble.eval()(x)
    assert counts(ensemble) == [4]


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
def test_the_chunk_never_changes_outputs_or_gradients(case):
    torch.manual_seed(0)
    reference = case.build().double()
    x = case.inputs(torch.Generator().manual_seed(1))
    x = x.double() if x.is_floating_point() else x
    ensemble = embens.batch_ensemble(reference, 5).eval()
    results = []
    for chunk in (1, 2, 3, 5, 50, None):
        ensemble.zero_grad()
        outputs = ensemble(x, chunk=chunk)
        outputs.square().sum().backward()
        results.append([outputs.detach(), *(p.grad for p in ensemble.parameters())])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_own_and_split_batches_go_to_the_right_members(rows, chunk):
    members = 3
    ensemble = embens.batch_ensemble(mlp(), members)
    alone = [ensemble.member(a) for a in range(members)]
    x = torch.randn(members, rows, 3)
    own = ensemble(x, batch="own", chunk=chunk)
    assert own.shape == (members, rows, 2)
    for a in range(members):
        torch.testing.assert_close(own[a], alone[a](x[a]))
    split = ensemble(x[0], batch="split", chunk=chunk)
    assert split.shape == (rows, 2)
    for i in range(rows):
        torch.testing.assert_close(split[i], alone[i % members](x[0, i : i + 1])[0])


def test_an_empty_batch_gives_empty_outputs():
    ensemble = embens.batch_ensemble(mlp(), 3)
    assert ensemble(torch.zeros(0, 3)).shape == (3, 0, 2)
    assert ensemble(torch.zeros(0, 3), batch="split").shape == (0, 2)


def test_a_wrong_batch_or_chunk_is_refused():
    ensemble = embens.batch_ensemble(mlp(), 3)
    with pytest.raises(ValueError, match="unknown 'splitt'; did you mean 'split'"):
        ensemble(torch.zeros(4, 3), batch="splitt")
    with pytest.raises(
        ValueError, match=r"expects inputs of shape \(3, batch, …\).*got \[\(4, 3\)"
    ):
        ensemble(torch.zeros(4, 3), batch="own")
    with pytest.raises(ValueError, match="same number of rows"):
        ensemble(torch.zeros(4, 3), torch.zeros(5, 3), batch="split")
    for chunk in (0, -1, 1.5, True):
        with pytest.raises((TypeError, ValueError), match="chunk must be"):
            ensemble(torch.zeros(4, 3), chunk=chunk)
    ensemble.chunk = 2
    assert ensemble(torch.zeros(4, 3)).shape == (3, 4, 2)


def test_an_error_inside_a_pass_leaves_the_ensemble_usable():
    ensemble = embens.batch_ensemble(mlp(), 3)
    weights = {k: v.clone() for k, v in ensemble.state_dict().items()}
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ensemble(torch.zeros(4, 5))
    assert ensemble(torch.zeros(4, 3)).shape == (3, 4, 2)
    assert all(isinstance(p, nn.Parameter) for p in ensemble.parameters())
    assert all(torch.equal(v, weights[k]) for k, v in ensemble.state_dict().items())


def test_a_modulated_layer_outside_a_pass_says_what_to_call():
    ensemble = embens.batch_ensemble(mlp(), 3)
    with pytest.raises(RuntimeError, match=r"outside a pass.*ensemble.member\(a\)"):
        ensemble.network(torch.zeros(4, 3))


class Recomputing(nn.Module):
    """A reference that checkpoints its own blocks."""

    def __init__(self, reentrant: bool = False):
        super().__init__()
        self.stem, self.head = nn.Linear(3, 6), nn.Linear(6, 2)
        self.block = nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.recompute = True

    def forward(self, x):
        x = self.stem(x)
        if self.recompute:
            return self.head(checkpoint(self.block, x, use_reentrant=False))
        return self.head(self.block(x))


def test_a_reference_that_recomputes_its_activations_has_the_gradients_of_one_that_does_not():
    ensemble = embens.batch_ensemble(Recomputing(), 3)
    x, target = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    results = []
    for recompute in (True, False):
        ensemble.network.recompute = recompute
        ensemble.zero_grad()
        embens.objective(ensemble(x), target).backward()
        results.append([p.grad.clone() for p in ensemble.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_memory_for_the_backward_pass_is_that_of_one_chunk():
    reference = embens.networks.cnn((8, 16), inputs=3, outputs=5, image=16)
    ensemble = embens.batch_ensemble(reference, 8)
    x, target = torch.randn(16, 3, 16, 16), torch.randint(5, (16,))

    def kept(run) -> int:
        alive = peak = 0

        class Saved:
            def __init__(self, tensor):
                nonlocal alive, peak
                self.tensor = tensor
                alive += tensor.numel()
                peak = max(peak, alive)

            def __del__(self):
                nonlocal alive
                alive -= self.tensor.numel()

        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            run()
        return peak

    single = kept(lambda: F.cross_entropy(reference(x), target).backward())
    whole = kept(lambda: ensemble.objective(ensemble(x), target).backward())
    stepwise = kept(lambda: ensemble.backward(x, target, chunk=1))
    assert stepwise < 2.5 * single < whole / 2


def test_a_split_batch_says_that_a_square_argument_is_dealt_out():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x, mask):
            return self.last(self.first(x) * mask)

    ensemble, x = embens.batch_ensemble(Masked(), 3), torch.randn(3, 3)
    with pytest.warns(UserWarning, match=r"deals out the rows of an argument of shape \(3, 3\)"):
        split = ensemble(x, mask=x, batch="split")
    torch.testing.assert_close(split, ensemble(x, mask=x)[range(3), range(3)])
