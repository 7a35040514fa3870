"""Attention in the folded form against torch's attention with the weights of each member."""

import itertools
import math

import pytest
import torch
from torch import nn

import embens
from embens import laws
from embens.graph import members

ROWS, TIMES, SOURCES, WIDTH, HEADS = 3, 4, 5, 8, 2


class Attending(nn.Module):
    """Attention that returns its weights as well."""

    def __init__(self, **options):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)

    def forward(
        self,
        x,
        memory,
        key_padding_mask=None,
        need_weights=True,
        attn_mask=None,
        average_attn_weights=True,
        is_causal=False,
    ):
        values = memory[..., : self.attention.vdim]
        keys = memory[..., : self.attention.kdim]
        outputs, weights = self.attention(
            self.query(x),
            keys,
            values,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        return (outputs, weights) if need_weights else (outputs, None)


def causal() -> torch.Tensor:
    return torch.triu(torch.full((TIMES, SOURCES), -math.inf, dtype=torch.float64), 1)


def padding() -> torch.Tensor:
    mask = torch.zeros(ROWS, SOURCES, dtype=torch.bool)
    mask[1, 3:] = True
    return mask


def each_head() -> torch.Tensor:
    return torch.randn(ROWS * HEADS, TIMES, SOURCES)


MODULES = {
    "plain": {},
    "no bias": {"bias": False},
    "other widths": {"kdim": 6, "vdim": 5},
    "bias of keys": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
}
CALLS = {
    "weights": dict,
    "weights of heads": lambda: {"average_attn_weights": False},
    "no weights": lambda: {"need_weights": False},
    "masked": lambda: {"attn_mask": causal()},
    "masked by booleans": lambda: {"attn_mask": causal() < 0, "need_weights": False},
    "causal, no weights": lambda: {
        "attn_mask": causal(),
        "is_causal": True,
        "need_weights": False,
    },
    "padded": lambda: {"key_padding_mask": padding()},
    "padded, no weights": lambda: {"key_padding_mask": padding(), "need_weights": False},
    "padded and masked": lambda: {"key_padding_mask": padding(), "attn_mask": causal() < 0},
}


@pytest.mark.parametrize(
    ("module", "call"),
    list(itertools.product(MODULES.values(), CALLS.values())),
    ids=[f"{m}, {c}" for m, c in itertools.product(MODULES, CALLS)],
)
def test_members_are_attentions_with_their_weights(module, call):
    torch.manual_seed(0)
    reference = Attending(**module).double()
    x = torch.randn(ROWS, TIMES, WIDTH, dtype=torch.float64)
    memory = torch.randn(ROWS, SOURCES, WIDTH, dtype=torch.float64)
    ensemble = embens.embed(reference, 3, sites="all", example_input=(x, memory))
    assert len([s for s in ensemble.spec.sites if "attention" in s.layer]) == 8
    options = call()
    alone = [ensemble.member(a)(x, memory, **options) for a in range(3)]
    for chunk in (1, 2, 3):
        outputs, weights = ensemble(x, memory, chunk=chunk, **options)
        for a in range(3):
            torch.testing.assert_close(outputs[a], alone[a][0])
            if alone[a][1] is not None:
                torch.testing.assert_close(weights[a], alone[a][1])
    has_common_mask = "attn_mask" in options  # its first axis is not the batch
    assert (ensemble.executor == "folded") is not has_common_mask


def test_a_mask_for_every_head_runs_merged():
    x, memory = torch.randn(ROWS, TIMES, WIDTH), torch.randn(ROWS, SOURCES, WIDTH)
    ensemble = embens.embed(Attending(), 3, example_input=(x, memory))
    mask = each_head()
    expected = [ensemble.member(a)(x, memory, attn_mask=mask)[0] for a in range(3)]
    outputs, _ = ensemble(x, memory, attn_mask=mask)
    assert ensemble.executor.startswith("merged")
    torch.testing.assert_close(outputs, torch.stack(expected))


@pytest.mark.parametrize("batch_first", [True, False])
def test_an_encoder_is_folded_if_the_batch_is_first(batch_first):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, 0.0, batch_first=batch_first)
    ensemble = embens.embed(nn.Sequential(layer), 3)
    x = torch.randn(ROWS, TIMES, WIDTH)
    for a, output in enumerate(ensemble(x)):
        torch.testing.assert_close(output, ensemble.member(a)(x))
    assert (ensemble.executor == "folded") is batch_first


def test_dropout_of_attention_is_drawn_for_each_member():
    one = laws.Constant(1)
    x = torch.randn(ROWS, TIMES, WIDTH)
    reference = Attending(dropout=0.5)
    ensemble = embens.embed(reference, 2, pre=one, post=one, example_input=(x, x))
    (first, second), _ = ensemble.train()(x, x, chunk=2, need_weights=False)
    assert not torch.equal(first, second)
    (first, second), _ = ensemble.eval()(x, x, chunk=2, need_weights=False)
    torch.testing.assert_close(first, second)


def test_sequences_without_a_batch_run_merged():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, 0.0, batch_first=True)
    ensemble = embens.embed(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer), 3)
    x = torch.randn(TIMES, WIDTH)
    for a, output in enumerate(ensemble(x)):
        torch.testing.assert_close(output, ensemble.member(a)(x))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ratio", [0.0, 1e9], ids=["weights", "activations"])
def test_projections_of_one_value_are_those_of_the_members(monkeypatch, ratio, bias, count):
    monkeypatch.setattr(members, "MERGING_RATIO", ratio)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, 0.0, bias=bias, batch_first=True).double()
    normal = laws.Normal(1.0, 0.5)
    ensemble = embens.embed(nn.Sequential(layer), 3, pre=normal, post=normal, sites="all")
    x = torch.randn(ROWS, TIMES, WIDTH, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(3, ROWS, TIMES, WIDTH, dtype=torch.float64)
    outputs = ensemble(x, chunk=count)
    assert ensemble.executor == "folded"
    gradients = torch.autograd.grad(outputs, [x, *ensemble.parameters()], direction)

    values = ensemble.sample_values()
    alone = torch.cat(list(ensemble.merged.run_members((x,), {}, values)))
    expected = torch.autograd.grad(alone, [x, *ensemble.parameters()], direction)
    torch.testing.assert_close(outputs, alone)
    torch.testing.assert_close(gradients, expected)
