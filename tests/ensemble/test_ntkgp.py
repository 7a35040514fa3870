"""Bayesian deep ensembles: members by hand, their prior, and their posterior after training."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import IN_NTK
from torch import Tensor, nn

import embens
from embens import networks, theory


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reference(width: int = 16, **options) -> nn.Module:
    options = {"bias_std": 0.3, "weight_std": 1.4, "activation": "erf"} | options
    return networks.mlp(3, width, 2, 1, **options)


def inputs(rows: int = 5, seed: int = 1) -> Tensor:
    return torch.randn(rows, 3, generator=seeded(seed))


def test_a_member_is_a_network_plus_its_jacobian_times_a_draw_without_last_layers():
    ensemble, x = embens.bayesian(reference(), 3, generator=seeded()).double(), inputs().double()
    for a in range(3):
        member, net = ensemble.member(a), reference().double()
        with torch.no_grad():
            member.trained.add_(0.1)  # the second part stays where it was
        expected = []
        for numbers in (member.start, member.trained):
            nn.utils.vector_to_parameters(numbers, net.parameters())
            expected.append(net(x).detach())
        nn.utils.vector_to_parameters(member.start, net.parameters())
        rows = []
        for row in x:
            gradients = torch.autograd.grad(net(row[None]).sum(), list(net.parameters()))
            rows.append(torch.cat([g.flatten() for g in gradients]) @ member.star)
        torch.testing.assert_close(member(x), expected[1] + torch.stack(rows)[:, None])
        torch.testing.assert_close(ensemble(x)[a], expected[0] + torch.stack(rows)[:, None])
        last = 16 + 1
        assert (member.star[-last:] == 0).all()
        assert (member.star[:-last] != 0).all()
    assert not torch.equal(ensemble(x)[0], ensemble(x)[1])


every_case = pytest.mark.parametrize("case", IN_NTK, ids=str)
LONG = [pytest.param(case, marks=pytest.mark.long) for case in IN_NTK[1:]]
COMPILED = [IN_NTK[0], *LONG]
unread = pytest.mark.filterwarnings("ignore:this network can't run several")  # has no batch


def build(case) -> tuple[embens.EmbeddedEnsemble, Tensor]:
    torch.manual_seed(0)
    ensemble = embens.bayesian(case.build(), 3, generator=seeded())
    with torch.no_grad():
        for parameter in ensemble.parameters():
            parameter.add_(0.1)
    return ensemble, case.inputs(seeded(1))


def gradients(ensemble, run) -> list[Tensor]:
    ensemble.zero_grad()
    run()
    return [p.grad.clone() for p in ensemble.parameters()]


@every_case
@unread
def test_members_are_the_rows_of_the_ensemble_for_any_batch(case):
    ensemble, x = build(case)
    outputs = ensemble(x)
    for a in range(3):
        torch.testing.assert_close(ensemble.member(a)(x), outputs[a])
    assert not torch.allclose(outputs[0], outputs[1])
    for chunk in (1, 2):
        torch.testing.assert_close(ensemble(x, chunk=chunk), outputs)
    torch.testing.assert_close(ensemble(x.expand(3, *x.shape), batch="own"), outputs)
    torch.testing.assert_close(ensemble.subset([2, 0])(x), outputs[[2, 0]])
    if case.name != "unbatched conv, ntk":
        torch.testing.assert_close(ensemble(x[:1]), outputs[:, :1])
        split = torch.stack([outputs[i % 3, i] for i in range(len(x))])
        torch.testing.assert_close(ensemble(x, batch="split"), split)


@every_case
@unread
def test_files_pickles_and_copies_hold_everything(case, tmp_path):
    ensemble, x = build(case)
    ensemble.save(tmp_path / "file")
    ensemble.save(tmp_path / "small", shared=False)
    loaded = [embens.load(tmp_path / name, case.build()) for name in ("file", "small")]
    other = embens.bayesian(case.build(), 3)
    other.load_state_dict(ensemble.state_dict())
    copied = (pickle.loads(pickle.dumps(ensemble)), copy.deepcopy(ensemble), other)
    for again in (*loaded, *copied):
        assert again.plan == ensemble.plan
        assert torch.equal(again(x), ensemble(x))
        assert again.kl() == ensemble.kl()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("case", COMPILED, ids=str)
@unread
def test_it_compiles_whole_and_chunks_have_its_gradients(case):
    ensemble, x = build(case)
    plain = gradients(ensemble, lambda: ensemble(x).square().mean(1).sum().backward())
    torch._dynamo.reset()
    compiled = torch.compile(ensemble, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), ensemble(x), rtol=1e-4, atol=1e-5)
    fast = gradients(ensemble, lambda: compiled(x).square().mean(1).sum().backward())
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
    target, criterion = torch.zeros(()), lambda outputs, target: outputs.square().mean(0).sum()
    parts = gradients(ensemble, lambda: ensemble.backward(x, target, criterion=criterion, chunk=2))
    torch.testing.assert_close(parts, plain, rtol=1e-4, atol=1e-5)


def test_an_onnx_file_is_refused_with_a_reason(tmp_path):
    pytest.importorskip("onnxscript")
    ensemble, x = build(IN_NTK[0])
    for network in (ensemble, ensemble.member(0)):
        with pytest.raises(ValueError, match="a derivative inside, which ONNX does not know"):
            embens.to_onnx(network, tmp_path / "file.onnx", x)
    assert not list(tmp_path.iterdir())


def test_threads_get_the_outputs_of_their_own_batches():
    ensemble, _ = build(IN_NTK[0])
    batches = [torch.randn(4, 5, generator=seeded(i)) for i in range(8)]
    expected = [ensemble(x) for x in batches]
    with ThreadPoolExecutor(4) as pool:
        for found, right in zip(pool.map(ensemble, 4 * batches), 4 * expected, strict=True):
            torch.testing.assert_close(found, right)


def test_layers_in_a_plain_list_have_the_members_numbers():
    (held,) = (case for case in IN_NTK if case.name == "held, ntk")
    ensemble, x = build(held)
    before = ensemble(x)
    with torch.no_grad():
        for stack in ensemble.individual_parameters():
            stack.mul_(2)
    first = ensemble.member(0)
    net, numbers = held.build(), first.trained.detach()
    nn.utils.vector_to_parameters(numbers, net.parameters())
    moved = net(x)
    nn.utils.vector_to_parameters(numbers / 2, net.parameters())
    torch.testing.assert_close(ensemble(x)[0] - before[0], moved - net(x))


def test_it_is_an_ensemble_like_any_other(tmp_path):
    net, x = reference(), inputs()
    before = copy.deepcopy(net.state_dict())
    ensemble = embens.bayesian(net, 4, generator=seeded())
    outputs = ensemble(x)
    for a in range(4):
        torch.testing.assert_close(ensemble.member(a)(x), outputs[a])
    ensemble.save(tmp_path / "file")
    other = reference(generator=seeded(7))
    assert torch.equal(embens.load(tmp_path / "file", other)(x), outputs)
    for again in (pickle.loads(pickle.dumps(ensemble)), copy.deepcopy(ensemble)):
        assert torch.equal(again(x), outputs)
    assert torch.equal(embens.bayesian(net, 4, generator=seeded())(x), outputs)
    own = x.expand(4, *x.shape).clone()
    torch.testing.assert_close(ensemble(own, batch="own"), outputs)
    torch.testing.assert_close(ensemble.subset([2])(x)[0], outputs[2])
    assert ensemble(x[:1]).shape == (4, 1, 1)
    kernel = embens.finite.ntk(ensemble, x, outputs="trace").individual
    assert kernel.shape == (4, 5, 5)
    assert "independent" in str(embens.diagnose(ensemble, x, x[:, :1]))
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    with pytest.raises(ValueError, match="shape"):
        embens.load(tmp_path / "file", reference(width=8))


def test_the_penalty_is_the_distance_from_the_start_and_the_only_decay():
    ensemble = embens.bayesian(reference(), 3)
    assert ensemble.kl() == 0
    (stack,) = ensemble.individual_parameters()
    with torch.no_grad():
        stack += 0.5
    assert ensemble.kl().item() == pytest.approx(stack.numel() * 0.125, rel=1e-5)
    (group,) = ensemble.parameter_groups(lr=0.1, weight_decay=0.1)
    assert group["weight_decay"] == 0
    x, start = inputs(), stack.detach() - 0.5
    target = ensemble(x).detach()  # nothing pulls but the penalty
    ensemble_step = {"epochs": 1, "lr": 0.2, "optimizer": torch.optim.SGD, "batch_size": 5}
    embens.fit(ensemble, (x, target[0]), each=embens.EachMember(targets=target), **ensemble_step)
    torch.testing.assert_close(stack - start, torch.full_like(start, 0.5 * (1 - 0.2 / 5)))


def test_its_limit_is_the_tangent_kernel_and_members_are_independent():
    net, x = reference(), inputs().double()
    k, plain = theory.kernels(embens.bayesian(net, 4), x), theory.kernels(net, x)
    torch.testing.assert_close(k.nngp.same, plain.ntk_shared.same)
    torch.testing.assert_close(k.ntk_individual.same, plain.ntk_shared.same)
    assert (k.nngp.cross == 0).all()
    assert theory.regime(embens.bayesian(net, 4)).regime is theory.Regime.INDEPENDENT
    separate = theory.kernels(embens.independent(net, 4), x)
    assert (k.nngp.same.diagonal() > separate.nngp.same.diagonal() * 1.2).all()


def test_outputs_at_the_start_have_the_covariance_of_the_limit():
    members, net, x = 150, reference(48, activation="relu"), inputs(3)
    with torch.no_grad():
        outputs = embens.bayesian(net, members, generator=seeded())(x)[..., 0].double()
    law = theory.kernels(embens.bayesian(net, 1), x).nngp.same
    found = outputs.mT @ outputs / members
    assert ((found - law).abs() < 4 * _errors(law, members)).all()
    without = theory.kernels(net, x).nngp.same
    assert ((found - without).abs() > 8 * _errors(without, members)).any()


def _errors(law: Tensor, members: int) -> Tensor:
    """Return the standard errors of a covariance that is estimated from normal draws."""
    return ((law.diagonal()[:, None] * law.diagonal() + law.square()) / members).sqrt()


class Trained:
    """Members that were trained on noisy targets of their own, and the kernels of the limit."""

    def __init__(self, width: int, members: int, noise: float = 0.7, steps: int = 40):
        ensemble = embens.bayesian(reference(width), members, generator=seeded())
        x, self.test = inputs(6), inputs(4, seed=2)
        self.y = torch.sin(2 * x[:, :1]) + 1.0
        noisy = self.y + noise * torch.randn(members, 6, 1, generator=seeded(3))
        pairs = (x, x), (self.test, x), (self.test, self.test)
        self.parts = [theory.kernels(ensemble, *pair) for pair in pairs]
        with torch.no_grad():
            first, start = (ensemble(z)[..., 0].double().mT for z in (x, self.test))
        moved, _ = theory.posterior(*self.parts, noisy[..., 0].double().mT - first, noise)
        self.expected = (start + moved).mT  # where the limit takes each member
        largest = torch.linalg.eigvalsh(self.parts[0].nngp.same)[-1].item()
        embens.fit(
            *(ensemble, (x, self.y)),
            epochs=steps,
            lr=1.6 * 6 / (largest / noise**2 + 1),
            each=embens.EachMember(targets=noisy),
            criterion=lambda outputs, target: (outputs - target).square() / (2 * noise**2),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
            optimizer=torch.optim.SGD,
        )
        with torch.no_grad():
            self.outputs = ensemble(self.test)[..., 0].double()
        self.mean, self.covariance = theory.posterior(*self.parts, self.y[:, 0], noise)

    @property
    def error(self) -> float:
        """How far members are from where the limit takes them, in standard deviations."""
        variance = self.covariance.diagonal().mean()
        return float(((self.outputs - self.expected).square().mean() / variance).sqrt())


def test_trained_members_are_draws_of_the_posterior():
    members = 24
    run = Trained(width=64, members=members)
    spread, error = run.covariance.diagonal(), run.error
    assert error < 0.3
    distance = (run.outputs.mean(0) - run.mean).abs()
    assert (distance < (3.5 / members**0.5 + error) * spread.sqrt()).all()
    difference = run.outputs.mT.cov() - run.covariance
    assert (difference.abs() < 3.5 * _errors(run.covariance, members)).all()


@pytest.mark.long
def test_the_error_of_the_posterior_falls_as_one_over_the_root_of_the_width():
    errors = [Trained(width, members=8, steps=100).error for width in (16, 64, 256)]
    assert errors[2] < 0.15
    for wide, narrow in ((errors[1], errors[0]), (errors[2], errors[1])):
        assert wide < 0.75 * narrow


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (networks.mlp(3, 8, 1, parametrization="standard"), "parametrization='ntk'; got Linear"),
        (nn.Linear(3, 1), "layers of embens.networks"),
        (nn.Sequential(networks.Linear(3, 4), nn.BatchNorm1d(4)), "got BatchNorm1d"),
        (nn.Sequential(nn.BatchNorm1d(3, affine=False), networks.Linear(3, 4)), "no buffers"),
        (nn.ReLU(), "a network with parameters"),
    ],
)
def test_other_networks_are_refused(net, message):
    with pytest.raises(ValueError, match=message):
        embens.bayesian(net, 3)
