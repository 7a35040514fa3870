"""Speed and memory of embedding, against the reference network and against other libraries.

    python -m benchmarks.embed                      all rows
    python -m benchmarks.embed --only cnn mlp       some of them
    python -m benchmarks.embed --sweep              how the chunk size matters

One row for each bar of the project. Contestants of a row do the same job on the same data in the
same memory format: forward, loss, backward (no optimiser), gradients started from none.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import embens
from benchmarks import peers, timing
from benchmarks.timing import Contestant, Result, Row, Step

FORMATS = {"": torch.contiguous_format, "-channels-last": torch.channels_last}


def one_network(network: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Return a training step of a plain network."""
    forget = timing.forgetting(network)

    def step() -> None:
        forget()
        F.cross_entropy(network(x), y).backward()

    return step


def one_graph(
    ensemble: embens.EmbeddedEnsemble, x: Tensor, y: Tensor, chunk: int | None = None
) -> Step:
    """Return a training step that runs all members, then goes backward."""
    forget = timing.forgetting(ensemble)

    def step() -> None:
        forget()
        ensemble.objective(ensemble(x, chunk=chunk), y).backward()

    return step


def in_chunks(ensemble: embens.EmbeddedEnsemble, x: Tensor, y: Tensor, chunk: int = 1) -> Step:
    """Return a training step that goes forward and backward chunk by chunk."""
    forget = timing.forgetting(ensemble)

    def step() -> None:
        forget()
        ensemble.backward(x, y, chunk=chunk)

    return step


def peer(network: nn.Module, x: Tensor, y: Tensor, members: int) -> Step:
    """Return a training step of a network with outputs (member, batch, class)."""
    forget = timing.forgetting(network)

    def step() -> None:
        forget()
        F.cross_entropy(network(x).flatten(0, 1), y.repeat(members)).backward()

    return step


def separate(networks: list[nn.Module], x: Tensor, y: Tensor) -> Step:
    """Return a training step of separate networks, one after another."""
    forget = timing.forgetting(*networks)

    def step() -> None:
        forget()
        for network in networks:
            F.cross_entropy(network(x), y).backward()

    return step


class Task:
    """A reference network and a batch; ``step`` is one training step of the reference."""

    def __init__(
        self,
        make: Callable[[], nn.Sequential],
        x: Tensor,
        classes: int,
        memory_format: torch.memory_format = torch.contiguous_format,
    ):
        self.format = memory_format
        self.make = lambda: self.placed(make())
        self.x = x.to(memory_format=memory_format) if x.dim() == 4 else x
        self.y = torch.randint(classes, (len(x),))
        self.reference = self.make()
        self.step = one_network(self.reference, self.x, self.y)

    def placed(self, network: nn.Module) -> nn.Module:
        """Return a network in the memory format of the task."""
        return network.to(memory_format=self.format)

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """The batch and its labels."""
        return self.x, self.y


def cnn_task(batch: int, memory_format: torch.memory_format) -> Task:
    """Return the paper's convolutional network on 32×32 images."""
    return Task(embens.networks.cnn, torch.randn(batch, 3, 32, 32), 100, memory_format)


def mlp_task(width: int, batch: int) -> Task:
    """Return a perceptron with three hidden layers on 54 inputs and 7 classes."""

    def make() -> nn.Sequential:
        modules: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise((54, width, width, width)):
            modules += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*modules, nn.Linear(width, 7))

    return Task(make, torch.randn(batch, 54), 7)


class Folded(nn.Module):
    """A BatchEnsemble of a perceptron written by hand, members in the batch."""

    def __init__(self, network: nn.Sequential, members: int):
        super().__init__()
        self.layers = nn.ModuleList([m for m in network if isinstance(m, nn.Linear)])
        self.members = members
        sizes = [layer.out_features for layer in self.layers][:-1]
        self.pre = nn.ParameterList([torch.randn(members, 1, size) for size in sizes])
        self.post = nn.ParameterList([torch.randn(members, 1, size) for size in sizes])

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        x = (first(x) * self.pre[0]).flatten(0, 1)
        for i, layer in enumerate(others):
            x = torch.relu(x).view(self.members, -1, layer.in_features)
            x = layer((x * self.post[i]).flatten(0, 1))
            if i + 1 < len(others):
                x = (x.view(self.members, -1, layer.out_features) * self.pre[i + 1]).flatten(0, 1)
        return x.view(self.members, -1, x.shape[-1])


class Transformer(nn.Module):
    """Two layers of torch's own encoder, 64 wide, on tokens."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


class Masked(nn.Module):
    """Last-layer dropout written by hand: the trunk once, then masks on its features."""

    def __init__(self, network: nn.Sequential, members: int):
        super().__init__()
        self.trunk, self.head = network[:-1], network[-1]
        self.register_buffer("masks", torch.randn(members, 1, self.head.in_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x) * self.masks)


# Rows


def cnn(rounds: int) -> Iterator[Row]:
    """BatchEnsemble of the paper's CNN, in both memory formats."""
    for suffix, memory_format in FORMATS.items():
        members = 8
        task = cnn_task(32, memory_format)
        ensemble = task.placed(embens.batch_ensemble(task.reference, members=members))
        contestants = [
            Contestant("embens", one_graph(ensemble, *task.data), ours=True),
            Contestant("embens, chunk=1", one_graph(ensemble, *task.data, chunk=1), ours=True),
            Contestant(
                "embens, backward (member by member)", in_chunks(ensemble, *task.data), True
            ),
            *rivals(task, members),
        ]
        row = Row(
            f"cnn{suffix}",
            f"paper's CNN, batch 32, BatchEnsemble M=8, both passes{suffix.replace('-', ' ')}",
            "8 × reference",
            bar=1.00,
            limit=timing.flops(contestants[1].step) / (members * timing.flops(task.step)),
            limit_reason="arithmetic with the first layer computed once, modulations free",
        )
        yield timed(row, task, contestants, rounds, members)


def mlp(rounds: int) -> Iterator[Row]:
    """BatchEnsemble of a wide perceptron."""
    members = 32
    task = mlp_task(512, 256)
    ensemble = embens.batch_ensemble(task.reference, members=members)
    contestants = [
        Contestant("embens", one_graph(ensemble, *task.data), ours=True),
        Contestant("embens, chunk=1", one_graph(ensemble, *task.data, chunk=1), ours=True),
        Contestant("embens, backward", in_chunks(ensemble, *task.data), ours=True),
        Contestant(
            "embens, backward, chunk=4", in_chunks(ensemble, *task.data, chunk=4), ours=True
        ),
        Contestant("tabm", peer(peers.TabM(task.reference, members), *task.data, members)),
        *rivals(task, members),
    ]
    row = Row(
        "mlp",
        "MLP 3×512, 54 inputs, batch 256, BatchEnsemble M=32, forward and backward",
        "32 × reference",
        bar=0.91,
        limit=timing.flops(contestants[1].step) / (members * timing.flops(task.step)),
        limit_reason="arithmetic with the first layer computed once, modulations free",
    )
    yield timed(row, task, contestants, rounds, members)


def small(rounds: int) -> Iterator[Row]:
    """BatchEnsemble of a small perceptron, where calls cost more than arithmetic; one thread."""
    members, threads = 16, torch.get_num_threads()
    task = mlp_task(64, 64)
    ensemble = embens.batch_ensemble(task.reference, members=members)
    contestants = [
        Contestant("embens", one_graph(ensemble, *task.data), ours=True),
        Contestant("embens, chunk=1", one_graph(ensemble, *task.data, chunk=1), ours=True),
        Contestant("by hand", peer(Folded(task.make(), members), *task.data, members)),
        Contestant("tabm", peer(peers.TabM(task.reference, members), *task.data, members)),
    ]
    row = Row(
        "small",
        "MLP 3×64, 54 inputs, batch 64, BatchEnsemble M=16, one thread, both passes",
        "16 × reference",
        bar=0.36,
        limit=timing.flops(contestants[1].step) / (members * timing.flops(task.step)),
        limit_reason="arithmetic with the first layer computed once, modulations free",
    )
    torch.set_num_threads(1)
    yield timed(row, task, contestants, rounds, members)
    torch.set_num_threads(threads)


def transformer(rounds: int) -> Iterator[Row]:
    """BatchEnsemble of a small transformer, in float32 and under autocast; one thread."""
    members, threads = 8, torch.get_num_threads()
    task = Task(Transformer, torch.randint(50, (16, 20)), 5)
    ensemble = embens.batch_ensemble(task.reference, members=members)
    contestants = [
        Contestant("embens", one_graph(ensemble, *task.data), ours=True),
        Contestant("embens, chunk=1", one_graph(ensemble, *task.data, chunk=1), ours=True),
        Contestant(
            "M networks in a loop", separate([task.make() for _ in range(members)], *task.data)
        ),
    ]
    row = Row(
        "transformer",
        "transformer, 2 layers of 64, 20 tokens, batch 16, BatchEnsemble M=8, both passes",
        "8 × reference",
        bar=0.90,
        limit=timing.flops(contestants[1].step) / (members * timing.flops(task.step)),
        limit_reason="arithmetic, modulations free",
    )
    torch.set_num_threads(1)
    yield timed(row, task, contestants, rounds, members)

    def cast(chunk: int | None) -> Step:
        step = one_graph(ensemble, *task.data, chunk=chunk)

        def run() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                step()

        return run

    row = Row(
        "transformer-autocast",
        "the same under autocast to bfloat16",
        "members one after another",
        bar=0.9,
        limit=1.0,
        limit_reason="the same arithmetic",
    )
    folded = [Contestant("embens", cast(None), ours=True)]
    row.results, row.reference = timing.compare(cast(1), folded, rounds=rounds)
    row.rounds = rounds
    yield row
    torch.set_num_threads(threads)


def last_layer(rounds: int) -> Iterator[Row]:
    """Last-layer dropout with many members on one trunk."""
    for suffix, memory_format in FORMATS.items():
        members = 50
        task = cnn_task(128, memory_format)
        ensemble = task.placed(embens.last_layer_dropout(task.reference, members=members))
        by_hand = Masked(task.make(), members)
        contestants = [
            Contestant("embens", one_graph(ensemble, *task.data), ours=True),
            Contestant("embens, chunk=1", one_graph(ensemble, *task.data, chunk=1), ours=True),
            Contestant(
                "embens, backward (member by member)", in_chunks(ensemble, *task.data), True
            ),
            Contestant("by hand: masks on the features", peer(by_hand, *task.data, members)),
        ]
        row = Row(
            f"last-layer{suffix}",
            f"last-layer dropout, M=50, paper's CNN, batch 128{suffix.replace('-', ' ')}",
            "reference",
            bar=1.05,
            limit=timing.flops(contestants[1].step) / timing.flops(task.step),
            limit_reason="arithmetic of 50 heads on one trunk; no other library shares the trunk",
        )
        yield timed(row, task, contestants, rounds, 1)


def mimo(rounds: int) -> Iterator[Row]:
    """A network with an input and an output for each member."""
    members, task = 4, cnn_task(32, torch.contiguous_format)
    ensemble = embens.mimo(task.reference, members=members)
    x = torch.stack([task.x[torch.randperm(32)] for _ in range(members)])
    y, forget = task.y.expand(members, -1), timing.forgetting(ensemble)

    def step() -> None:
        forget()
        ensemble.objective(ensemble(x, batch="own"), y, batch="own").backward()

    row = Row(
        "mimo",
        "MIMO, M=4, paper's CNN, batch 32",
        "reference",
        bar=1.15,
        limit=timing.flops(step) / timing.flops(task.step),
        limit_reason="arithmetic: four blocks of the first layer, four last layers",
    )
    yield timed(row, task, [Contestant("embens", step, ours=True)], rounds, 1)


def masks(rounds: int) -> Iterator[Row]:
    """Masks that are joint over members, against independent ones."""
    members, task = 8, mlp_task(512, 256)
    dropout = one_graph(embens.mc_dropout(task.reference, members), *task.data)
    disjoint = embens.mc_dropout(task.reference, members, embens.laws.Disjoint())
    found = [
        Contestant(name, one_graph(ensemble, *task.data), ours=True)
        for name, ensemble in (
            ("Masksembles", embens.masksembles(task.reference, members)),
            ("disjoint masks", disjoint),
        )
    ]
    row = Row(
        "masks",
        "Masksembles and disjoint masks, M=8, MLP 3×512, batch 256",
        "mc_dropout",
        bar=1.05,
        limit=1.0,
        limit_reason="the same products with other numbers",
    )
    row.results, row.reference = timing.compare(dropout, found, rounds=rounds, per=1)
    row.rounds = rounds
    yield row


def weights(rounds: int) -> Iterator[Row]:
    """Members whose weights differ by more than a vector on either side, against BatchEnsemble."""
    members, rank, task = 8, 4, mlp_task(512, 256)
    batch_ensemble = one_graph(embens.batch_ensemble(task.reference, members), *task.data)
    rank1 = embens.rank1(task.reference, members)
    forget = timing.forgetting(rank1)

    def drawn() -> None:
        forget()
        (rank1.objective(rank1(task.x), task.y) + rank1.kl() / 1000).backward()

    def low_rank(kind: str, shared: str = "trained") -> Step:
        options = {"rank": rank, "kind": kind, "shared": shared}
        return one_graph(embens.low_rank(task.reference, members, **options), *task.data)

    adapters = peers.Adapters(task.reference, members, rank)
    contestants = {
        ("low-rank", "additive low_rank of rank 4", 1.25): [
            Contestant("embens", low_rank("additive"), ours=True),
            Contestant("embens, shared='frozen'", low_rank("additive", "frozen"), ours=True),
            Contestant("embens, multiplicative", low_rank("multiplicative"), ours=True),
            Contestant("a loop over adapters", peer(adapters, *task.data, members)),
        ],
        ("rank1", "rank1", 1.3): [Contestant("embens", drawn, ours=True)],
    }
    for (name, what, bar), found in contestants.items():
        row = Row(
            name,
            f"{what}, M=8, MLP 3×512, batch 256",
            "BatchEnsemble",
            bar=bar,
            limit=timing.flops(found[0].step) / timing.flops(batch_ensemble),
            limit_reason="arithmetic of matrix products",
        )
        row.results, row.reference = timing.compare(batch_ensemble, found, rounds=rounds, per=1)
        row.rounds = rounds
        yield row


def collapse(rounds: int) -> Iterator[Row]:
    """One plain network that is the ensemble's mean."""
    task = cnn_task(128, torch.contiguous_format)
    ensemble = embens.last_layer_dropout(task.reference, members=50).eval()
    reference, collapsed = task.reference.eval(), ensemble.collapse().eval()

    def inference(network: nn.Module) -> Step:
        @torch.inference_mode()
        def step() -> Tensor:
            return network(task.x)

        return step

    row = Row(
        "collapse",
        "collapsed last-layer dropout, inference, paper's CNN, batch 128",
        "reference",
        bar=1.02,
        limit=timing.flops(inference(collapsed)) / timing.flops(inference(reference)),
        limit_reason="the same layers with other numbers",
    )
    contestants = [
        Contestant("embens, collapsed", inference(collapsed), ours=True),
        Contestant("embens, all 50 members", inference(ensemble)),
    ]
    row.results, row.reference = timing.compare(inference(reference), contestants, rounds=rounds)
    row.rounds = rounds
    yield row


def memory(rounds: int) -> Iterator[Row]:
    """What autograd holds for the backward pass; no timing, so no rounds."""
    members = 8
    task = cnn_task(32, torch.contiguous_format)
    ensemble = embens.batch_ensemble(task.reference, members=members)
    rival = peers.TorchUncertainty(task.reference, members)
    stacked = peers.Stacked(task.make, members)
    networks = [task.make() for _ in range(members)]

    def together() -> None:
        outputs = torch.stack([network(task.x) for network in networks])
        F.cross_entropy(outputs.flatten(0, 1), task.y.repeat(members)).backward()

    everything = [ensemble, rival, stacked, task.reference, *networks]
    parameters = [p for module in everything for p in module.parameters()]
    unit = timing.kept_bytes(task.step, parameters)

    def result(name: str, step: Step, ours: bool = False) -> Result:
        return Result(name, ours, timing.kept_bytes(step, parameters) / unit)

    graphs = [
        result("embens", one_graph(ensemble, *task.data), True),
        result("embens, chunk=1", one_graph(ensemble, *task.data, chunk=1), True),
        result("embens, chunk=8", one_graph(ensemble, *task.data, chunk=8), True),
        result("torch-uncertainty", peer(rival, *task.data, members)),
        result("stacked weights under vmap", peer(stacked, *task.data, members)),
        result("M networks, one graph", together),
    ]
    reference = f"{unit / 2**20:.1f} MiB, the largest sum of storages held at once, no parameters"
    yield Row(
        "memory",
        "memory kept for backward in one graph, paper's CNN, batch 32, M=8",
        "reference",
        bar=11.0,
        limit=8 - 7 * first_layer_share(task),
        limit_reason="M activations, those before the first modulation once",
        reference=reference,
        results=graphs,
    )
    steps = [
        result(f"embens, backward chunk={c}", in_chunks(ensemble, *task.data, chunk=c), True)
        for c in (1, 2, 4)
    ]
    yield Row(
        "memory-steps",
        "memory kept for backward, members one at a time, paper's CNN, batch 32, M=8",
        "reference",
        bar=2.0,
        limit=1.0,
        limit_reason="the activations of one member",
        reference=reference,
        results=[*steps, result("M networks in a loop", separate(networks, *task.data))],
    )


def first_layer_share(task: Task) -> float:
    """Return the part of the kept memory that belongs to the input of the first layer."""
    parameters = list(task.reference.parameters())
    return task.x.untyped_storage().nbytes() / timing.kept_bytes(task.step, parameters)


def overhead(rounds: int) -> Iterator[Row]:
    """What the wrapper costs where there is nothing to gain."""
    task = mlp_task(64, 32)
    ensemble = embens.embed(
        task.reference, members=1, pre=embens.laws.Constant(1.0), post=embens.laws.Constant(1.0)
    )
    frozen = embens.embed(
        task.reference,
        members=1,
        pre=embens.laws.Constant(1.0),
        post=embens.laws.Constant(1.0),
        trainable=False,
    )
    tabm, rival = peers.TabM(task.reference, 1), peers.TorchUncertainty(task.reference, 1)
    contestants = [
        Contestant("embens, trainable modulations", one_graph(ensemble, *task.data), ours=True),
        Contestant("embens, fixed modulations", one_graph(frozen, *task.data), ours=True),
        Contestant("embens, backward", in_chunks(ensemble, *task.data), ours=True),
        Contestant("tabm", peer(tabm, *task.data, 1)),
        Contestant("torch-uncertainty", peer(rival, *task.data, 1)),
    ]
    row = Row(
        "overhead",
        "wrapper at M=1, Constant(1), MLP 3×64, batch 32, forward and backward",
        "reference",
        bar=1.9,
        limit=timing.flops(contestants[0].step) / timing.flops(task.step),
        limit_reason="the same products; six multiplications more, and their gradients",
    )
    timed(row, task, contestants, rounds, 1)
    row.bar = next(result.ratio for result in row.results if result.name == "tabm")
    yield row


def rivals(task: Task, members: int) -> list[Contestant]:
    """Return what any network can be compared with."""
    rival = task.placed(peers.TorchUncertainty(task.reference, members))
    stacked = peers.Stacked(task.make, members)
    networks = [task.make() for _ in range(members)]
    return [
        Contestant("torch-uncertainty", peer(rival, *task.data, members)),
        Contestant("stacked weights under vmap", peer(stacked, *task.data, members)),
        Contestant("M networks in a loop", separate(networks, *task.data)),
    ]


def timed(row: Row, task: Task, contestants: list[Contestant], rounds: int, per: int) -> Row:
    """Fill a row by timing its contestants."""
    row.results, row.reference = timing.compare(task.step, contestants, rounds=rounds, per=per)
    row.rounds = rounds
    return row


ROWS: dict[str, Callable[[int], Iterator[Row]]] = {
    "cnn": cnn,
    "mlp": mlp,
    "small": small,
    "transformer": transformer,
    "last-layer": last_layer,
    "mimo": mimo,
    "masks": masks,
    "weights": weights,
    "collapse": collapse,
    "memory": memory,
    "overhead": overhead,
}


def sweep(rounds: int, only: list[str]) -> None:
    """Print how time depends on the chunk size, to choose the automatic one."""
    tasks = {
        "cnn": (cnn_task(32, torch.contiguous_format), embens.batch_ensemble, 8),
        "cnn-channels-last": (cnn_task(32, torch.channels_last), embens.batch_ensemble, 8),
        "mlp": (mlp_task(512, 256), embens.batch_ensemble, 32),
        "mlp-narrow": (mlp_task(64, 256), embens.batch_ensemble, 32),
        "mlp-small-batch": (mlp_task(512, 32), embens.batch_ensemble, 32),
        "last-layer": (cnn_task(128, torch.contiguous_format), embens.last_layer_dropout, 50),
    }
    for name, (task, family, members) in tasks.items():
        if only and not any(name.startswith(o) for o in only):
            continue
        ensemble = task.placed(family(task.reference, members=members))
        chunks = [c for c in (1, 2, 4, 8, 16, 32) if c < members]
        contestants = [Contestant("automatic", one_graph(ensemble, *task.data), ours=True)]
        for chunk in [*chunks, members]:
            graph = one_graph(ensemble, *task.data, chunk=chunk)
            contestants.append(Contestant(f"chunk={chunk}", graph))
            steps = in_chunks(ensemble, *task.data, chunk=chunk)
            contestants.append(Contestant(f"chunk={chunk}, backward", steps))
        per = 1 if name.startswith("last") else members
        results, reference = timing.compare(task.step, contestants, rounds=rounds, per=per)
        automatic = ensemble.chunk_size((task.x,))
        print(f"\n{name}: M={members}, × {per} reference; automatic is {automatic}\n  {reference}")
        for result in results:
            low, high = result.quartiles or (0.0, 0.0)
            print(f"  {result.name:<24} {result.ratio:.3f}   {low:.3f} to {high:.3f}", flush=True)


def main() -> None:
    """Run the rows that were asked for and keep their results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help=f"some of {', '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="three rounds, results not kept")
    parser.add_argument("--sweep", action="store_true", help="time chunk sizes instead")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--patience", type=float, default=60, help="seconds a row may wait for quiet"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    timing.PATIENCE = options.patience
    rounds = 3 if options.quick else options.rounds
    if options.sweep:
        sweep(rounds, options.only)
        return
    unknown = [name for name in options.only if name not in ROWS]
    if unknown:
        parser.error(f"unknown {', '.join(unknown)}; choose from {', '.join(ROWS)}")
    for name, run in ROWS.items():
        if options.only and name not in options.only:
            continue
        for row in run(rounds):
            print(f"\n{row}", flush=True)
            if not options.quick:
                timing.write(row)


if __name__ == "__main__":
    main()
