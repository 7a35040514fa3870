"""Cost of members in a large pretrained network: ``.venv-zoo/bin/python -m benchmarks.pretrained``.

The network is BERT of transformers, with random weights. It runs in the environment of
``make test-zoo``, with one thread.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import embens
from benchmarks import timing
from benchmarks.rows import Result, Row
from benchmarks.tasks import ensemble_step, gradient_clearer, transformer_task
from benchmarks.timing import Contestant, Step, compare

MEMBERS, RANK = 8, 4
ADAPTERS: dict[str, Any] = {"rank": RANK, "kind": "additive", "shared": "frozen"}
LAYERS = 12


class Bert:
    """BERT with a head for five classes, and a batch of 4 × 16 tokens.

    Args:
        layers: number of layers.
    """

    def __init__(self, layers: int):
        import transformers

        config = transformers.BertConfig(num_hidden_layers=layers, num_labels=5)
        self.reference = transformers.BertForSequenceClassification(config).eval()
        self.x: dict[str, Tensor] = {
            "input_ids": torch.randint(1000, (4, 16)),
            "attention_mask": torch.ones(4, 16, dtype=torch.long),
        }
        self.y = torch.randint(5, (4,))
        self.label = f"BERT, {layers} layers of 768"

    def embed(self) -> embens.EmbeddedEnsemble:
        """Return a BatchEnsemble of the network."""
        return embens.batch_ensemble(self.reference, MEMBERS, example_input=self.x)

    def step(self) -> Step:
        """Return a training step of the network."""
        clear = gradient_clearer(self.reference)

        def step() -> None:
            clear()
            F.cross_entropy(self.reference(**self.x).logits, self.y).backward()

        return step

    def adapter_step(self, chunk: int | None) -> Step:
        """Return a training step of LoRA adapters on all Linear layers."""
        ensemble = embens.low_rank(
            self.reference, MEMBERS, sites=is_linear, example_input=self.x, **ADAPTERS
        )
        clear = gradient_clearer(ensemble)

        def step() -> None:
            clear()
            outputs = ensemble(**self.x, chunk=chunk)
            embens.objective(outputs.logits, self.y).backward()

        return step


def is_linear(name: str, module: nn.Module) -> bool:
    """Return whether a layer has an adapter."""
    return isinstance(module, nn.Linear)


def embedding(bert: Bert, rounds: int) -> Row:
    """Time of embedding against a copy of the network."""
    title = f"Embedding {bert.label}, M={MEMBERS}"
    row = Row("pretrained-embed", title, "copy.deepcopy", 1.0, "one copy", rounds)
    contestants = [Contestant("embens", bert.embed, ours=True, bar=3.0)]
    return _measure(row, lambda: copy.deepcopy(bert.reference), contestants)


def parameters(bert: Bert) -> Row:
    """Parameters of the members against those of the network."""
    count = sum(p.numel() for p in bert.reference.parameters())
    individual = sum(p.numel() for p in bert.embed().individual_parameters())
    title = f"Individual parameters of {MEMBERS} members of {bert.label}"
    row = Row("pretrained-parameters", title, "parameters of the reference")
    row.results = [Result("embens", ours=True, ratio=individual / count, bar=0.015)]
    return row


def bert_adapters(bert: Bert, rounds: int) -> Row:
    """Training step of adapters of BERT against a full training step of one network."""
    row = Row(
        "pretrained-adapters",
        f"Training step of {MEMBERS} adapters of {bert.label}, 4 × 16 tokens",
        "reference",
        MEMBERS * 2 / 3,
        "no gradients of the weights, a third of the arithmetic",
        rounds,
    )
    contestants = [
        Contestant("embens", bert.adapter_step(None), ours=True, bar=6.5),
        Contestant("embens, chunk=1", bert.adapter_step(1), ours=True),
    ]
    return _measure(row, bert.step(), contestants)


def transformer_adapters(rounds: int) -> Row:
    """Training step of adapters of a small transformer against a loop over single adapters."""
    task = transformer_task()
    steps = []
    for _ in range(MEMBERS):
        single = embens.low_rank(task.reference, 1, **ADAPTERS)
        steps.append(ensemble_step(single, task, chunk=1))

    def loop() -> None:
        for step in steps:
            step()

    ensemble = embens.low_rank(task.reference, MEMBERS, **ADAPTERS)
    row = Row(
        "adapters",
        "Training step of 8 adapters, transformer, 2 layers of 64, 20 tokens, batch 16",
        "a loop over eight adapters",
        1.0,
        "the same arithmetic",
        rounds,
    )
    contestants = [
        Contestant("embens", ensemble_step(ensemble, task), ours=True, bar=0.8),
        Contestant("embens, chunk=1", ensemble_step(ensemble, task, chunk=1), ours=True),
    ]
    return _measure(row, loop, contestants)


def _measure(row: Row, reference: Step, contestants: list[Contestant]) -> Row:
    comparison = compare(reference, contestants, rounds=row.rounds)
    row.results = comparison.results
    row.reference = comparison.reference
    return row


def main() -> None:
    """Measure all rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of BERT")
    parser.add_argument("--patience", type=float, default=30)
    parser.add_argument("--write", action="store_true", help="store the results")
    options = parser.parse_args()
    if options.write and options.layers != LAYERS:
        parser.error(f"--write needs the {LAYERS} layers of BERT, got --layers {options.layers}.")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    timing.PATIENCE = options.patience
    bert = Bert(options.layers)
    rows = [
        transformer_adapters(2 * options.rounds),
        embedding(bert, options.rounds),
        parameters(bert),
        bert_adapters(bert, options.rounds),
    ]
    for row in rows:
        print(f"\n[{row.name}] {row}", flush=True)
        if options.write:
            row.write()


if __name__ == "__main__":
    main()
