"""Speed and memory of empirical kernels, against naive routes and other libraries.

    python -m benchmarks.finite                     all rows
    python -m benchmarks.finite --only mlp          some of them

Contestants of a row compute the same kernel of the same network and samples; that they agree is
checked first. Neural-tangents is optional: without it its lines are left out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

import embens
from benchmarks import timing
from benchmarks.timing import Contestant, Result, Row, Step
from embens import finite, laws, networks

MEMBERS, SAMPLES = 15, 32


def paper_task() -> tuple[embens.EmbeddedEnsemble, Tensor, Tensor]:
    """Return the paper's CNN at quarter width, with images and classes."""
    ensemble = embens.batch_ensemble(networks.cnn(width=0.25), members=MEMBERS).eval()
    return ensemble, torch.randn(SAMPLES, 3, 32, 32), torch.randint(100, (SAMPLES,))


def one_gradient(ensemble: embens.EmbeddedEnsemble, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """Return a step of the naive route: the gradient of the next member and sample."""
    shared = list(ensemble.shared_parameters())
    pairs = itertools.cycle(itertools.product(range(ensemble.members), range(len(x))))

    def step() -> Tensor:
        a, i = next(pairs)
        loss = F.cross_entropy(ensemble(x[i : i + 1])[a], y[i : i + 1])
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, shared)])

    return step


def plain_members(ensemble: embens.EmbeddedEnsemble, x: Tensor, y: Tensor) -> Step:
    """Return a careful naive route: each member as a plain network, then one big product.

    Its gradients are those of the members' weights, not yet of the shared ones: a lower bound.
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


def recipe(network: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """Return the kernel by PyTorch's own tutorial: Jacobians of samples, contracted."""
    parameters = {k: v.detach() for k, v in network.named_parameters()}

    def output(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(network, parameters, (sample.unsqueeze(0),)).squeeze(0)

    def step() -> Tensor:
        jacobians = vmap(jacrev(output), (None, 0))(parameters, x).values()
        parts = [torch.einsum("ikf,jlf->ijkl", j.flatten(2), j.flatten(2)) for j in jacobians]
        return torch.stack(parts).sum(0)

    return step


def one_member(network: nn.Module) -> embens.EmbeddedEnsemble:
    """Return an ordinary network as an ensemble."""
    one = laws.Constant(1.0)
    return embens.embed(network, 1, pre=one, post=one, trainable=False).eval()


def check(ours: Tensor, theirs: Tensor) -> None:
    """Fail where two kernels differ by more than rounding."""
    error = (ours - theirs).abs().max() / theirs.abs().max()
    if not error < 1e-3:
        raise AssertionError(f"the contestants' kernels differ by {error:.1e}")


# Rows


def cnn(rounds: int) -> Iterator[Row]:
    """The paper's figure: the nll kernel of 15 members."""
    ensemble, x, y = paper_task()

    def ours() -> Tensor:
        return finite.ntk(ensemble, x, outputs="nll", target=y).shared

    gradient = one_gradient(ensemble, x, y)
    rows = torch.stack([gradient() for _ in range(2 * SAMPLES)]).view(2, SAMPLES, -1)
    check(ours()[:2, :2], torch.einsum("aip,bjp->abij", rows, rows))
    contestants = [
        Contestant("embens", ours, ours=True),
        Contestant("plain members, one gradient each", plain_members(ensemble, x, y)),
    ]
    row = Row(
        "finite-cnn",
        f"nll kernel, paper's CNN at quarter width, M={MEMBERS}, {SAMPLES} samples",
        f"{MEMBERS * SAMPLES} × autograd.grad for one member and sample, without their product",
        bar=0.1,
        limit=0.0,
        limit_reason="none known; the Gram matrix alone is about half of our time",
    )
    row.results, row.reference = timing.compare(
        gradient, contestants, rounds=rounds, per=MEMBERS * SAMPLES, seconds=0.01
    )
    row.rounds = rounds
    yield row


def ordinary(rounds: int) -> Iterator[Row]:
    """Ordinary networks, all pairs of outputs, against the recipe with torch.func."""
    tasks = {
        "mlp": (networks.mlp(64, 512, 3, 10, weight_std=2**0.5), torch.randn(20, 64)),
        "mlp-narrow": (networks.mlp(64, 64, 3, 10, weight_std=2**0.5), torch.randn(20, 64)),
        "cnn-one": (networks.cnn(width=0.25, outputs=10), torch.randn(8, 3, 32, 32)),
    }
    for name, (network, x) in tasks.items():
        ensemble = one_member(network)

        def ours(ensemble=ensemble, x=x) -> Tensor:
            return finite.ntk(ensemble, x).shared[0, 0]

        reference = recipe(network, x)
        check(ours(), reference())
        contestants = [Contestant("embens", ours, ours=True)]
        if name.startswith("mlp"):
            contestants += neural_tangents(network, x)
        row = Row(
            f"finite-{name}",
            f"kernel of one network ({name}), {len(x)} samples, 10 outputs, all pairs",
            "vmap(jacrev) and its contraction",
            bar=1.0,
            limit=0.0,
            limit_reason="none known",
        )
        row.results, row.reference = timing.compare(
            reference, contestants, rounds=rounds, seconds=0.1
        )
        row.rounds = rounds
        yield row


def neural_tangents(network: nn.Sequential, x: Tensor) -> list[Contestant]:
    """Return the peer's implementations on the same perceptron with the same weights."""
    try:
        nt, stax, jax = import_neural_tangents()
    except ImportError as error:
        print(f"neural-tangents left out: {error}")
        return []
    layers = [m for m in network if isinstance(m, networks.Linear)]
    modules: list = []
    for layer in layers:
        modules += [stax.Dense(layer.out_features, W_std=layer.weight_std, b_std=None), stax.Relu()]
    _, apply, _ = stax.serial(*modules[:-1])
    weights = [jax.numpy.asarray(m.weight.detach().mT.numpy()) for m in layers]
    parameters: list = []
    for weight in weights:
        parameters += [(weight, None), ()]
    samples = jax.numpy.asarray(x.numpy())
    expected, found = recipe(network, x)(), []
    for kind in ("JACOBIAN_CONTRACTION", "NTK_VECTOR_PRODUCTS", "STRUCTURED_DERIVATIVES"):
        function = jax.jit(
            nt.empirical_ntk_fn(
                apply, trace_axes=(), vmap_axes=0, implementation=nt.NtkImplementation[kind]
            )
        )

        def step(function=function):
            return function(samples, None, parameters[:-1]).block_until_ready()

        check(torch.from_numpy(jax.device_get(step()).copy()), expected)
        label = kind.lower().replace("_", " ")
        found.append(Contestant(f"neural-tangents, {label}, compiled", step))
    return found


def import_neural_tangents():
    """Import the peer, which is archived, on a jax that is newer than it knows.

    Its bridge to TensorFlow, which it imports always, is left out; two names that its structured
    derivatives look up in jax have moved.
    """
    name = "neural_tangents.experimental"
    sys.modules.setdefault(name, types.ModuleType(name))
    import jax
    from jax._src import source_info_util
    from jax.interpreters import ad

    ad.source_info_util = source_info_util
    ad.config = types.SimpleNamespace(jax_enable_checks=False)
    import neural_tangents as nt
    from neural_tangents import stax

    return nt, stax, jax


def memory(rounds: int) -> Iterator[Row]:
    """The most memory that a process holds, with everything it imports; no timing, no rounds."""
    program = (
        "import torch\n"
        "from benchmarks.finite import paper_task\n"
        "from embens import finite\n"
        "torch.set_num_threads(1)\n"
        "ensemble, x, y = paper_task()\n"
        "if {work}: finite.ntk(ensemble, x, outputs='nll', target=y)\n"
        "status = open('/proc/self/status').read()\n"
        "print(int(status.split('VmHWM:')[1].split()[0]) / 2**20)\n"
    )
    used = []
    for work in (True, False):
        run = subprocess.run(
            [sys.executable, "-c", program.format(work=work)],
            capture_output=True,
            text=True,
            check=True,
        )
        used.append(float(run.stdout))
    yield Row(
        "finite-memory",
        f"memory for the nll kernel, paper's CNN at quarter width, M={MEMBERS}, {SAMPLES} samples",
        "GiB, the peak of the whole process",
        bar=2.0,
        limit=used[1],
        limit_reason="the process with the network, before any kernel",
        reference="resident set, Linux",
        results=[Result("embens", True, used[0])],
    )


ROWS: dict[str, Callable[[int], Iterator[Row]]] = {
    "cnn": cnn,
    "ordinary": ordinary,
    "memory": memory,
}


def main() -> None:
    """Run the rows that were asked for and keep their results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], choices=ROWS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one round, results not kept")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--patience", type=float, default=60)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.threads == 1:  # before jax is imported
        os.environ.setdefault(
            "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        )
    torch.manual_seed(0)
    timing.PATIENCE = options.patience
    for name, run in ROWS.items():
        if options.only and name not in options.only:
            continue
        for row in run(1 if options.quick else options.rounds):
            print(f"\n{row}", flush=True)
            if not options.quick:
                timing.write(row)


if __name__ == "__main__":
    main()
