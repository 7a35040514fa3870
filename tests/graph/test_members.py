"""What the suffix of a folded network calls, against layers of the members."""

import os
import platform
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import embens
from embens.graph import members
from embens.graph.members import (
    blocks_of,
    low_rank_linear,
    low_rank_weights,
    member_embedding,
    member_linear,
    modulated_linear,
    repeat_rows,
    scale_members,
    split_members,
    unfold_members,
)

COUNT, ROWS = 3, 4


def rows_of(is_shared: bool, *shape: int) -> torch.Tensor:
    return torch.randn(ROWS if is_shared else COUNT * ROWS, *shape)


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("bias", ["none", "shared", "separate"])
def test_linear_layers_are_those_of_the_members(is_shared, bias):
    x, weights = rows_of(is_shared, 2, 5), torch.randn(COUNT, 6, 5)
    biases = {"none": None, "shared": torch.randn(6), "separate": torch.randn(COUNT, 6)}[bias]
    outputs = member_linear(x, weights, biases, COUNT, is_shared)
    for a, block in enumerate(blocks_of(x, COUNT, is_shared)):
        own = biases[a] if bias == "separate" else biases
        expected = nn.functional.linear(block, weights[a], own)
        torch.testing.assert_close(outputs.chunk(COUNT)[a], expected)


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("rows", [1, 50])
def test_low_rank_layers_are_those_of_the_members(is_shared, rows):
    x = torch.randn(rows if is_shared else COUNT * rows, 5)
    weight, bias = torch.randn(6, 5), torch.randn(6)
    left, right = torch.randn(COUNT, 6, 2), torch.randn(COUNT, 2, 5)
    outputs = low_rank_linear(x, weight, bias, left, right, COUNT, is_shared)
    weights = low_rank_weights(weight, left, right, "additive")
    torch.testing.assert_close(outputs, member_linear(x, weights, bias, COUNT, is_shared))


@pytest.mark.parametrize("is_shared", [True, False])
def test_embeddings_are_those_of_the_members(is_shared):
    tokens = torch.randint(7, (ROWS if is_shared else COUNT * ROWS, 2))
    tables = torch.randn(COUNT, 7, 5)
    outputs = member_embedding(tokens, tables, COUNT, is_shared).chunk(COUNT)
    for a, block in enumerate(blocks_of(tokens, COUNT, is_shared)):
        torch.testing.assert_close(outputs[a], tables[a][block])


def random(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def by_hand(x, weight, bias, pre, post):
    """Return the outputs of all members, one after another."""
    outputs = []
    for a, rows in enumerate(x.unflatten(0, (COUNT, -1))):
        member_weight, member_bias = weight, bias
        if post is not None:
            member_weight = member_weight * post[a].repeat_interleave(2)
        if pre is not None:
            member_weight = pre[a][:, None] * member_weight
            member_bias = None if bias is None else pre[a] * bias
        outputs.append(F.linear(rows, member_weight, member_bias))
    return torch.cat(outputs)


@pytest.mark.parametrize("ratio", [0.0, 1e9], ids=["weights", "activations"])
@pytest.mark.parametrize("axes", [(), (4,)], ids=["rows", "tokens"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("sides", ["both", "pre", "post"])
def test_a_modulated_layer_has_the_weights_of_its_member(monkeypatch, ratio, axes, has_bias, sides):
    monkeypatch.setattr(members, "MERGING_RATIO", ratio)
    x, weight = random(COUNT * ROWS, *axes, 6), random(4, 6)
    bias = random(4) if has_bias else None
    pre = random(COUNT, 4) if sides != "post" else None
    post = random(COUNT, 3) if sides != "pre" else None
    leaves = [leaf for leaf in (x, weight, bias, pre, post) if leaf is not None]

    outputs = modulated_linear(x, weight, bias, pre, post, 2, COUNT, False)
    expected = by_hand(x, weight, bias, pre, post)
    torch.testing.assert_close(outputs, expected)
    direction = torch.randn_like(outputs)
    torch.testing.assert_close(
        torch.autograd.grad(outputs, leaves, direction),
        torch.autograd.grad(expected, leaves, direction),
    )


def test_weights_of_one_member_are_merged(monkeypatch):
    monkeypatch.setattr(members, "MERGING_RATIO", 0.0)
    x, weight, bias = random(ROWS, 6), random(4, 6), random(4)
    pre, post = random(1, 4), random(1, 6)
    outputs = modulated_linear(x, weight, bias, pre, post, 1, 1, False)
    torch.testing.assert_close(outputs, pre * F.linear(x * post, weight, bias))


def test_a_shared_input_is_repeated_for_each_member():
    x, weight, pre = random(ROWS, 6), random(4, 6), random(COUNT, 4)
    outputs = modulated_linear(x, weight, None, pre, None, 1, COUNT, True)
    repeated = modulated_linear(repeat_rows(x, COUNT), weight, None, pre, None, 1, COUNT, False)
    torch.testing.assert_close(outputs, repeated)
    assert unfold_members(outputs, COUNT).shape == (COUNT, ROWS, 4)


def test_channels_before_positions_are_scaled():
    x, values = random(COUNT * ROWS, 4, 2, 3), random(COUNT, 4)
    scaled = scale_members(x, values, COUNT, 2, 1, False).unflatten(0, (COUNT, -1))
    for a in range(COUNT):
        expected = x.unflatten(0, (COUNT, -1))[a] * values[a][:, None, None]
        torch.testing.assert_close(scaled[a], expected)


def test_chunks_have_the_values_of_their_members():
    values = random(5, 2)
    parts = split_members(values, [2, 2, 1])
    for part, expected in zip(parts, values.split(2), strict=True):
        torch.testing.assert_close(part, expected)


def test_buffers_of_a_chunk_change_in_place():
    counters = torch.zeros(3)
    for part in split_members(counters, [2, 1]):
        part.add_(1)
    assert counters.tolist() == [1, 1, 1]


def test_gradients_do_not_depend_on_the_chunk():
    network = embens.networks.mlp(6, width=5, depth=2, outputs=2)
    ensemble = embens.batch_ensemble(network, 5).double()
    x = torch.randn(ROWS, 6, dtype=torch.float64)
    direction = torch.randn(5, ROWS, 2, dtype=torch.float64)
    gradients = []
    for chunk in (5, 2, 1):
        outputs = ensemble(x, chunk=chunk)
        gradients.append(torch.autograd.grad(outputs, list(ensemble.parameters()), direction))
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], gradients[2])


STEPS = """
import resource
import torch
from torch import nn
import embens

{first}
torch.set_num_threads(1)
layers = []
for _ in range(5):
    layers += [nn.Linear(64, 64), nn.ReLU()]
ensemble = embens.batch_ensemble(nn.Sequential(*layers), members=8)
x = torch.randn(320, 64)


def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ensemble.zero_grad()
    ensemble(x).square().mean().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


faults = [page_faults() for _ in range(80)]
print(sum(faults[10:]))
"""


def page_faults(first: str = "") -> int:
    """Return the page faults of 70 training steps in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC", "LD_PRE"))}
    code = STEPS.format(first=first)
    arguments = [sys.executable, "-c", code]
    result = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    return int(result.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are unaffected")
def test_a_training_step_reuses_the_memory_of_the_one_before():
    without = page_faults("embens.graph.members.keep_freed_memory = lambda: None")

    # A busy system may take pages away during some of the steps.
    assert page_faults() < without / 4


def folded_of(ensemble: embens.EmbeddedEnsemble, x: torch.Tensor) -> members.Folded:
    folded, _ = ensemble.foldings.find((x,), {})
    assert folded is not None
    return folded


def test_members_of_a_last_layer_run_together_whatever_the_size_of_the_images():
    trunk = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    ensemble = embens.last_layer_dropout(nn.Sequential(*trunk, nn.Linear(4, 2)), members=8)
    for size in (8, 64):
        x = torch.randn(64, 3, size, size)
        assert folded_of(ensemble, x).default_chunk([x], members=8) == 8


def test_chunks_count_the_tokens_of_sequences():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    ensemble = embens.batch_ensemble(nn.Sequential(nn.Linear(4, 8), encoder), members=8)
    chunks = []
    for tokens in (1, 10_000):
        x = torch.zeros(5, tokens, 4)
        chunks.append(folded_of(ensemble, x).default_chunk([x], members=8))

    assert chunks == [8, 1]
