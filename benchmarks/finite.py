"""Rows on empirical kernels, against naive code and other libraries.

Contestants compute the same kernel; their agreement is checked before they are timed.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

import embens
from benchmarks import peers
from benchmarks.rows import Result, Row
from benchmarks.timing import Contestant, Step, compare
from embens import finite, laws, networks

MEMBERS, SAMPLES = 15, 32
PEAK_MEMORY = """
import torch
from benchmarks.finite import paper_task
from embens import finite
torch.set_num_threads(1)
ensemble, x, y = paper_task()
if {with_kernel}:
    finite.ntk(ensemble, x, outputs="nll", target=y)
status = open("/proc/self/status").read()
print(int(status.split("VmHWM:")[1].split()[0]) / 2**20)
"""


def paper_task() -> tuple[embens.EmbeddedEnsemble, Tensor, Tensor]:
    """Return the paper's CNN at quarter width, images and labels."""
    ensemble = embens.batch_ensemble(networks.cnn(width=0.25), MEMBERS).eval()
    return ensemble, torch.randn(SAMPLES, 3, 32, 32), torch.randint(100, (SAMPLES,))


def finite_cnn(rounds: int) -> list[Row]:
    """The kernel of the negative log-likelihood of 15 members, as in the paper's figure."""
    ensemble, x, y = paper_task()

    def kernel() -> Tensor:
        return finite.ntk(ensemble, x, outputs="nll", target=y).shared

    gradient = next_gradient(ensemble, x, y)
    gradients = [gradient() for _ in range(2 * SAMPLES)]
    rows = torch.stack(gradients).view(2, SAMPLES, -1)
    check_agreement(kernel()[:2, :2], torch.einsum("aip,bjp->abij", rows, rows))
    contestants = [
        Contestant("embens", kernel, ours=True, bar=0.1),
        Contestant("plain members, one gradient each", plain_members_step(ensemble, x, y)),
    ]
    row = Row(
        "finite-cnn",
        f"nll kernel M={MEMBERS}, paper's CNN at quarter width, {SAMPLES} samples, one thread",
        f"{MEMBERS * SAMPLES} × autograd.grad for one member and sample, without their product",
        rounds=rounds,
    )
    comparison = compare(gradient, contestants, rounds=rounds, per=MEMBERS * SAMPLES, seconds=0.01)
    row.results = comparison.results
    row.reference = comparison.reference
    return [row]


def next_gradient(ensemble: embens.EmbeddedEnsemble, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """Return a function that computes the gradient of the next member and sample, naively."""
    shared = list(ensemble.shared_parameters())
    pairs = itertools.cycle(itertools.product(range(ensemble.members), range(len(x))))

    def step() -> Tensor:
        a, i = next(pairs)
        loss = F.cross_entropy(ensemble(x[i : i + 1])[a], y[i : i + 1])
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, shared)])

    return step


def plain_members_step(ensemble: embens.EmbeddedEnsemble, x: Tensor, y: Tensor) -> Step:
    """Return a careful naive computation: every member as a plain network, then one product.

    The gradients are those of the members' weights instead of the shared ones, so its time is a
    lower bound.
    """
    members = [ensemble.member(a) for a in range(ensemble.members)]

    def step() -> Tensor:
        rows = []
        for network in members:
            parameters = list(network.parameters())
            for i in range(len(x)):
                loss = F.cross_entropy(network(x[i : i + 1]), y[i : i + 1])
                gradients = torch.autograd.grad(loss, parameters)
                rows.append(torch.cat([g.flatten() for g in gradients]))
        matrix = torch.stack(rows)
        return matrix @ matrix.mT

    return step


def finite_mlp(rounds: int) -> list[Row]:
    """The kernel of one wide perceptron, all pairs of outputs."""
    network = networks.mlp(64, 512, 3, 10, weight_std=2**0.5)
    return [_one_network("finite-mlp", "MLP 3×512", network, torch.randn(20, 64), rounds)]


def finite_mlp_narrow(rounds: int) -> list[Row]:
    """The kernel of one narrow perceptron, all pairs of outputs."""
    network = networks.mlp(64, 64, 3, 10, weight_std=2**0.5)
    return [_one_network("finite-mlp-narrow", "MLP 3×64", network, torch.randn(20, 64), rounds)]


def finite_cnn_one(rounds: int) -> list[Row]:
    """The kernel of one CNN, all pairs of outputs."""
    network = networks.cnn(width=0.25, outputs=10)
    x = torch.randn(8, 3, 32, 32)
    return [_one_network("finite-cnn-one", "CNN at quarter width", network, x, rounds)]


def _one_network(name: str, label: str, network: nn.Module, x: Tensor, rounds: int) -> Row:
    one = laws.Constant(1.0)
    ensemble = embens.embed(network, 1, pre=one, post=one, trainable=False).eval()

    def kernel() -> Tensor:
        return finite.ntk(ensemble, x).shared[0, 0]

    reference = torch_func_step(network, x)
    check_agreement(kernel(), reference())
    contestants = [Contestant("embens", kernel, ours=True, bar=1.0)]
    if name != "finite-cnn-one":
        contestants += neural_tangents_contestants(network, x)
    comparison = compare(reference, contestants, rounds=rounds, seconds=0.1)
    return Row(
        name,
        f"NTK of one network ({label}), {len(x)} samples, all pairs of 10 outputs, one thread",
        "vmap(jacrev) and its contraction",
        rounds=rounds,
        reference=comparison.reference,
        results=comparison.results,
    )


def torch_func_step(network: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """Return the kernel of PyTorch's tutorial: Jacobians per sample, then their contraction."""
    parameters = {k: v.detach() for k, v in network.named_parameters()}

    def output(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(network, parameters, (sample.unsqueeze(0),)).squeeze(0)

    def step() -> Tensor:
        kernel = torch.zeros(())
        for jacobian in vmap(jacrev(output), (None, 0))(parameters, x).values():
            flat = jacobian.flatten(2)
            kernel = kernel + torch.einsum("ikf,jlf->ijkl", flat, flat)
        return kernel

    return step


def neural_tangents_contestants(network: nn.Sequential, x: Tensor) -> list[Contestant]:
    """Return neural-tangents' implementations for a perceptron with the same weights."""
    nt = peers.neural_tangents(double=False)
    import jax

    layers = [m for m in network if isinstance(m, networks.Linear)]
    modules: list = []
    parameters: list = []
    for layer in layers:
        dense = nt.stax.Dense(layer.out_features, W_std=layer.weight_std, b_std=None)
        modules += [dense, nt.stax.Relu()]
        weight = jax.numpy.asarray(layer.weight.detach().mT.numpy())
        parameters += [(weight, None), ()]
    _, apply, _ = nt.stax.serial(*modules[:-1])  # no activation after the last layer
    samples = jax.numpy.asarray(x.numpy())
    expected = torch_func_step(network, x)()
    contestants = []
    for kind in ("JACOBIAN_CONTRACTION", "NTK_VECTOR_PRODUCTS", "STRUCTURED_DERIVATIVES"):
        kernel = nt.empirical_ntk_fn(
            apply, trace_axes=(), vmap_axes=0, implementation=nt.NtkImplementation[kind]
        )
        function = jax.jit(kernel)

        def step(function: Callable = function) -> object:
            return function(samples, None, parameters[:-1]).block_until_ready()

        check_agreement(torch.from_numpy(jax.device_get(step()).copy()), expected)
        label = kind.lower().replace("_", " ")
        contestants.append(Contestant(f"neural-tangents, {label}", step))
    return contestants


def check_agreement(kernel: Tensor, expected: Tensor) -> None:
    """Raise if two kernels differ by more than rounding errors."""
    error = (kernel - expected).abs().max() / expected.abs().max()
    if not error < 1e-3:
        raise AssertionError(f"the kernels of two contestants differ by {error:.1e}.")


def finite_memory(rounds: int) -> list[Row]:
    """Peak memory of a process that computes the nll kernel; without rounds."""
    peaks = []
    for with_kernel in (True, False):
        program = PEAK_MEMORY.format(with_kernel=with_kernel)
        command = [sys.executable, "-c", program]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peaks.append(float(output))
    row = Row(
        "finite-memory",
        f"Peak memory of the nll kernel M={MEMBERS}, paper's CNN at quarter width, "
        f"{SAMPLES} samples",
        "GiB",
        peaks[1],
        "the process with the network, before any kernel",
        reference="resident set of the whole process, Linux",
    )
    row.results = [Result("embens", ours=True, ratio=peaks[0], bar=2.0)]
    return [row]
