"""What members of a large network of others cost: `.venv-zoo/bin/python -m benchmarks.pretrained`.

BERT of transformers, 12 layers of 768, random; an adapter is a matrix of low rank added to each
weight of a frozen network. In an environment of its own, which `make test-zoo` builds; one thread.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

import embens
from benchmarks import timing
from benchmarks.embed import Task, Transformer, one_graph
from benchmarks.timing import Contestant, Result, Row

MEMBERS, RANK = 8, 4
ADDED = {"rank": RANK, "kind": "additive", "shared": "frozen"}


def is_linear(name: str, module: nn.Module) -> bool:
    """Return whether a layer has an adapter."""
    return isinstance(module, nn.Linear)


def large(rounds: int, layers: int) -> Iterator[Row]:
    """Embedding and training of BERT."""
    import transformers

    config = transformers.BertConfig(num_hidden_layers=layers, num_labels=5)
    reference = transformers.BertForSequenceClassification(config).eval()
    x = {"input_ids": torch.randint(1000, (4, 16)), "attention_mask": torch.ones(4, 16).long()}
    y, name = torch.randint(5, (4,)), f"BERT, {layers} layers of 768"

    def embed() -> embens.EmbeddedEnsemble:
        return embens.batch_ensemble(reference, MEMBERS, example_input=x)

    row = Row("pretrained-embed", f"embedding {name}, M=8", "copy.deepcopy", 3.0, 1.0, "one copy")
    ours = [Contestant("embens", embed, ours=True)]
    row.results, row.reference = timing.compare(
        lambda: copy.deepcopy(reference), ours, rounds=rounds
    )
    row.rounds = rounds
    yield row

    ensemble, forget = embed(), timing.forgetting(reference)
    count = sum(p.numel() for p in reference.parameters())
    own = sum(p.numel() for p in ensemble.individual_parameters()) / count
    row = Row(
        "pretrained-numbers", f"numbers of 8 members of {name}", "its parameters", 0.015, 0, ""
    )
    row.results = [Result("embens", True, own)]
    yield row

    def step() -> None:
        forget()
        F.cross_entropy(reference(**x).logits, y).backward()

    members = embens.low_rank(reference, MEMBERS, sites=is_linear, example_input=x, **ADDED)
    mine = timing.forgetting(members)

    def train(chunk: int | None) -> None:
        mine()
        embens.objective(members(**x, chunk=chunk).logits, y).backward()

    row = Row("pretrained-adapters", f"8 adapters of {name}, 4 × 16 words", "reference", 6.5, 5.33,
              "no gradients of weights")  # fmt: skip
    ours = [Contestant("embens", lambda: train(None), ours=True)]
    ours.append(Contestant("embens, chunk=1", lambda: train(1), ours=True))
    row.results, row.reference = timing.compare(step, ours, rounds=rounds)
    row.rounds = rounds
    yield row


def small(rounds: int) -> Iterator[Row]:
    """Adapters of a small transformer, against a loop over them."""
    task = Task(Transformer, torch.randint(50, (16, 20)), 5)
    alone = [embens.low_rank(task.reference, 1, **ADDED) for _ in range(MEMBERS)]
    steps = [one_graph(one, *task.data, chunk=1) for one in alone]
    ensemble = embens.low_rank(task.reference, MEMBERS, **ADDED)
    row = Row("adapters", "8 adapters, transformer, 2 layers of 64, 20 tokens, batch 16",
              "a loop over eight adapters", 0.8, 1.0, "the same arithmetic")  # fmt: skip
    ours = [Contestant("embens", one_graph(ensemble, *task.data), ours=True)]
    ours.append(Contestant("embens, chunk=1", one_graph(ensemble, *task.data, chunk=1), ours=True))
    row.results, row.reference = timing.compare(
        lambda: [step() for step in steps], ours, rounds=rounds
    )
    row.rounds = rounds
    yield row


def main() -> None:
    """Run all rows and keep their results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12, help="of BERT; others are not kept")
    parser.add_argument("--patience", type=float, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    timing.PATIENCE = options.patience
    rows = [small(2 * options.rounds), large(options.rounds, options.layers)]
    for row in (row for some in rows for row in some):
        print(row, flush=True)
        if options.layers == 12:
            timing.write(row)


if __name__ == "__main__":
    main()
