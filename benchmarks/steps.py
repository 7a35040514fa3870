"""Rows on training steps of embedded ensembles, beside other libraries and code by hand."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

import embens
from benchmarks import peers
from benchmarks.by_hand import Adapters, BatchEnsembleMLP, LastLayerDropout
from benchmarks.rows import Row
from benchmarks.tasks import (
    Task,
    chunked_step,
    cnn_task,
    ensemble_step,
    mlp_task,
    networks_step,
    peer_step,
    transformer_task,
)
from benchmarks.timing import Contestant, Step, compare
from embens.flops import count_flops

SHARED_FIRST_LAYER = "arithmetic, with the first layer computed once and modulations for free"


def cnn(rounds: int) -> list[Row]:
    """BatchEnsemble of the paper's CNN, contiguous."""
    return [_cnn("cnn", "contiguous", torch.contiguous_format, rounds)]


def cnn_channels_last(rounds: int) -> list[Row]:
    """BatchEnsemble of the paper's CNN, channels last."""
    return [_cnn("cnn-channels-last", "channels last", torch.channels_last, rounds)]


def _cnn(name: str, label: str, memory_format: torch.memory_format, rounds: int) -> Row:
    members = 8
    task = cnn_task(32, memory_format)
    ensemble = task.convert(embens.batch_ensemble(task.reference, members))
    contestants = [
        Contestant("embens", ensemble_step(ensemble, task), ours=True, bar=1.05),
        Contestant("embens, backward(chunk=1)", chunked_step(ensemble, task), ours=True),
        *_peers(task, members),
    ]
    title = f"BatchEnsemble M=8 of the paper's CNN, batch 32, {label}"
    row = Row(name, title, "8 × reference")
    return _measure(row, task, contestants, rounds, members)


def mlp(rounds: int) -> list[Row]:
    """BatchEnsemble of a wide perceptron."""
    members = 32
    task = mlp_task(512, 256)
    ensemble = embens.batch_ensemble(task.reference, members)
    tabm = peers.TabM(task.reference, members)
    contestants = [
        Contestant("embens", ensemble_step(ensemble, task), ours=True, bar=0.92),
        Contestant("embens, backward(chunk=1)", chunked_step(ensemble, task), ours=True),
        Contestant("embens, backward(chunk=4)", chunked_step(ensemble, task, 4), ours=True),
        Contestant("tabm", peer_step(tabm, task, members)),
        *_peers(task, members),
    ]
    title = "BatchEnsemble M=32 of an MLP 3×512, 54 inputs, batch 256"
    return [_measure(Row("mlp", title, "32 × reference"), task, contestants, rounds, members)]


def small(rounds: int) -> list[Row]:
    """BatchEnsemble of a small perceptron, where calls cost more than arithmetic."""
    members = 16
    task = mlp_task(64, 64)
    ensemble = embens.batch_ensemble(task.reference, members)
    by_hand = BatchEnsembleMLP(task.make(), members)
    tabm = peers.TabM(task.reference, members)
    contestants = [
        Contestant("embens", ensemble_step(ensemble, task), ours=True, bar=0.40),
        Contestant("by hand", peer_step(by_hand, task, members)),
        Contestant("tabm", peer_step(tabm, task, members)),
    ]
    title = "BatchEnsemble M=16 of an MLP 3×64, 54 inputs, batch 64, one thread"
    return [_measure(Row("small", title, "16 × reference"), task, contestants, rounds, members)]


def transformer(rounds: int) -> list[Row]:
    """BatchEnsemble of a small transformer, in float32 and under autocast."""
    members = 8
    task = transformer_task()
    ensemble = embens.batch_ensemble(task.reference, members)
    networks = [task.make() for _ in range(members)]
    contestants = [
        Contestant("embens", ensemble_step(ensemble, task), ours=True, bar=0.95),
        Contestant("embens, chunk=1", ensemble_step(ensemble, task, chunk=1), ours=True),
        Contestant("M networks in a loop", networks_step(networks, task)),
    ]
    title = "BatchEnsemble M=8 of a transformer, 2 layers of 64, 20 tokens, batch 16, one thread"
    row = Row("transformer", title, "8 × reference")
    return [_measure(row, task, contestants, rounds, members)]


def transformer_autocast(rounds: int) -> list[Row]:
    """BatchEnsemble of a small transformer in bfloat16."""
    task = transformer_task()
    ensemble = embens.batch_ensemble(task.reference, 8)
    one_by_one = _autocast(ensemble_step(ensemble, task, chunk=1))
    together = _autocast(ensemble_step(ensemble, task))
    row = Row(
        "transformer-autocast",
        "BatchEnsemble M=8 of the transformer under autocast to bfloat16, one thread",
        "members one after another",
    )
    contestants = [Contestant("embens", together, ours=True, bar=0.9)]
    return [_measure_steps(row, one_by_one, contestants, rounds)]


def _autocast(step: Step) -> Step:
    def cast_step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            step()

    return cast_step


def overhead(rounds: int) -> list[Row]:
    """Cost of the machinery where members bring nothing; the bar is tabm in the same run."""
    task = mlp_task(64, 32)
    one = embens.laws.Constant(1.0)
    ensemble = embens.embed(task.reference, members=1, pre=one, post=one)
    fixed = embens.embed(task.reference, members=1, pre=one, post=one, trainable=False)
    tabm = peers.TabM(task.reference, 1)
    torch_uncertainty = peers.TorchUncertainty(task.reference, 1)
    contestants = [
        Contestant("embens, trained modulations", ensemble_step(ensemble, task), ours=True),
        Contestant("embens, fixed modulations", ensemble_step(fixed, task), ours=True),
        Contestant("embens, backward", chunked_step(ensemble, task), ours=True),
        Contestant("by hand", peer_step(BatchEnsembleMLP(task.make(), 1), task, 1)),
        Contestant("tabm", peer_step(tabm, task, 1)),
        Contestant("torch-uncertainty", peer_step(torch_uncertainty, task, 1)),
    ]
    title = "M=1 with Constant(1) modulations, MLP 3×64, batch 32, one thread"
    row = _measure(Row("overhead", title, "reference"), task, contestants, rounds)
    _set_bar(row, "tabm", 1.0)
    return [row]


def last_layer(rounds: int) -> list[Row]:
    """Last-layer dropout, contiguous; the bar is the code by hand plus 2 %."""
    return [_last_layer("last-layer", "contiguous", torch.contiguous_format, rounds)]


def last_layer_channels_last(rounds: int) -> list[Row]:
    """Last-layer dropout, channels last."""
    name = "last-layer-channels-last"
    return [_last_layer(name, "channels last", torch.channels_last, rounds)]


def _last_layer(name: str, label: str, memory_format: torch.memory_format, rounds: int) -> Row:
    members = 50
    task = cnn_task(128, memory_format)
    ensemble = task.convert(embens.last_layer_dropout(task.reference, members))
    by_hand = LastLayerDropout(task.make(), members)
    contestants = [
        Contestant("embens", ensemble_step(ensemble, task), ours=True),
        Contestant("embens, backward(chunk=1)", chunked_step(ensemble, task), ours=True),
        Contestant("by hand", peer_step(by_hand, task, members)),
    ]
    title = f"Last-layer dropout M=50 of the paper's CNN, batch 128, {label}"
    row = _measure(Row(name, title, "reference"), task, contestants, rounds)
    row.limit_reason = "arithmetic of 50 heads on one trunk"
    _set_bar(row, "by hand", 1.02)
    return row


def _set_bar(row: Row, name: str, factor: float) -> None:
    """Set the bar of the first result to another result of the same run times a factor."""
    other = next(result for result in row.results if result.name == name)
    row.results[0] = replace(row.results[0], bar=factor * other.ratio)


def masks(rounds: int) -> list[Row]:
    """Masks that are drawn jointly for all members."""
    members = 8
    task = mlp_task(512, 256)
    dropout = embens.mc_dropout(task.reference, members)
    masksembles = embens.masksembles(task.reference, members)
    disjoint = embens.mc_dropout(task.reference, members, embens.laws.Disjoint())
    contestants = [
        Contestant("Masksembles", ensemble_step(masksembles, task), ours=True, bar=1.05),
        Contestant("disjoint masks", ensemble_step(disjoint, task), ours=True, bar=1.05),
    ]
    row = Row("masks", "Joint masks M=8, MLP 3×512, batch 256", "mc_dropout", 1.0)
    row.limit_reason = "the same arithmetic"
    return [_measure_steps(row, ensemble_step(dropout, task), contestants, rounds)]


def low_rank(rounds: int) -> list[Row]:
    """Members that differ by matrices of low rank."""
    members, rank = 8, 4
    task = mlp_task(512, 256)

    def step(kind: str, shared: str = "trained") -> Step:
        ensemble = embens.low_rank(task.reference, members, rank, kind=kind, shared=shared)
        return ensemble_step(ensemble, task)

    batch_ensemble = ensemble_step(embens.batch_ensemble(task.reference, members), task)
    adapters = Adapters(task.make(), members, rank)
    additive = step("additive")
    contestants = [
        Contestant("embens, additive", additive, ours=True, bar=1.25),
        Contestant("embens, additive, frozen", step("additive", "frozen"), ours=True),
        Contestant("embens, multiplicative", step("multiplicative"), ours=True),
        Contestant("adapters in a loop", peer_step(adapters, task, members)),
    ]
    title = "Low-rank members M=8 of rank 4, MLP 3×512, batch 256"
    row = Row("low-rank", title, "BatchEnsemble")
    row.limit = count_flops(additive) / count_flops(batch_ensemble)
    row.limit_reason = "arithmetic of the products"
    return [_measure_steps(row, batch_ensemble, contestants, rounds)]


def collapse(rounds: int) -> list[Row]:
    """Inference with the plain network that equals the ensemble mean."""
    task = cnn_task(128)
    ensemble = embens.last_layer_dropout(task.reference, members=50).eval()
    collapsed = ensemble.collapse().eval()

    def inference(network: nn.Module) -> Step:
        @torch.inference_mode()
        def step() -> Tensor:
            return network(task.x)

        return step

    contestants = [
        Contestant("embens, collapsed", inference(collapsed), ours=True, bar=1.02),
        Contestant("embens, 50 members", inference(ensemble), ours=True),
    ]
    title = "Inference with collapsed last-layer dropout, paper's CNN, batch 128"
    row = Row("collapse", title, "reference", 1.0, "the same layers")
    return [_measure_steps(row, inference(task.reference.eval()), contestants, rounds)]


def _peers(task: Task, members: int) -> list[Contestant]:
    """Return contestants that exist for any sequence of layers."""
    torch_uncertainty = task.convert(peers.TorchUncertainty(task.reference, members))
    stacked = peers.StackedNetworks(task.make, members)
    networks = [task.make() for _ in range(members)]
    return [
        Contestant("torch-uncertainty", peer_step(torch_uncertainty, task, members)),
        Contestant("stacked networks, vmap", peer_step(stacked, task, members)),
        Contestant("M networks in a loop", networks_step(networks, task)),
    ]


def _measure(row: Row, task: Task, contestants: list[Contestant], rounds: int, per: int = 1) -> Row:
    """Time contestants against the reference; the limit is the arithmetic of the first one."""
    row.limit = count_flops(contestants[0].step) / (per * count_flops(task.step))
    row.limit_reason = SHARED_FIRST_LAYER
    return _measure_steps(row, task.step, contestants, rounds, per)


def _measure_steps(
    row: Row, reference: Step, contestants: list[Contestant], rounds: int, per: int = 1
) -> Row:
    comparison = compare(reference, contestants, rounds=rounds, per=per)
    row.results = comparison.results
    row.reference = comparison.reference
    row.rounds = rounds
    return row
