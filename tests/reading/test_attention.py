"""Attention for several members at once does what torch's own does for each."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from embens.reading.attention import Attention
from torch import nn

import embens
from embens import laws

ROWS, TIMES, SOURCES, WIDTH, HEADS = 3, 4, 5, 8, 2


class Attending(nn.Module):
    """Attention with its weights beside its output; options of a call are arguments."""

    def __init__(self, **options):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)

    def forward(self, x, memory, **options):
        values = memory[..., : self.attention.vdim]
        keys = memory[..., : self.attention.kdim]
        return self.attention(self.query(x), keys, values, **options)


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
def test_members_are_torchs_attention_with_their_weights(module, call):
    torch.manual_seed(0)
    reference = Attending(**module).double()
    x = torch.randn(ROWS, TIMES, WIDTH, dtype=torch.float64)
    memory = torch.randn(ROWS, SOURCES, WIDTH, dtype=torch.float64)
    ensemble = embens.embed(reference, 3, sites="all", example_input=(x, memory))
    assert len([s for s in ensemble.plan.sites if "attention" in s.layer]) == 8
    options = call()
    alone = [ensemble.member(a)(x, memory, **options) for a in range(3)]
    for chunk in (1, 2, 3):
        outputs, weights = ensemble(x, memory, chunk=chunk, **options)
        for a in range(3):
            torch.testing.assert_close(outputs[a], alone[a][0])
            if alone[a][1] is not None:
                torch.testing.assert_close(weights[a], alone[a][1])


def test_a_mask_for_every_head_goes_member_by_member():
    x, memory = torch.randn(ROWS, TIMES, WIDTH), torch.randn(ROWS, SOURCES, WIDTH)
    ensemble = embens.embed(Attending(), 3, example_input=(x, memory))
    mask = each_head()
    expected = [ensemble.member(a)(x, memory, attn_mask=mask)[0] for a in range(3)]
    with pytest.warns(UserWarning, match="can't run several"):
        outputs, _ = ensemble(x, memory, attn_mask=mask)
    torch.testing.assert_close(outputs, torch.stack(expected))


@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_encoder_is_folded_where_the_batch_is_first_and_right_where_not(batch_first):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, 0.0, batch_first=batch_first)
    ensemble = embens.embed(layer, 3)
    assert bool(ensemble.plan.folding.impossible) is not batch_first
    x = torch.randn(ROWS, TIMES, WIDTH)
    for a, output in enumerate(ensemble(x)):
        torch.testing.assert_close(output, ensemble.member(a)(x))


def test_dropout_of_attention_draws_for_each_member():
    one = laws.Constant(1)
    x = torch.randn(ROWS, TIMES, WIDTH)
    reference = Attending(dropout=0.5)
    ensemble = embens.embed(reference, 2, pre=one, post=one, example_input=(x, x))
    (first, second), _ = ensemble.train()(x, x, chunk=2, need_weights=False)
    assert not torch.equal(first, second)
    (first, second), _ = ensemble.eval()(x, x, chunk=2, need_weights=False)
    torch.testing.assert_close(first, second)


def test_sequences_without_a_batch_are_right_and_never_folded():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, 0.0, batch_first=True)
    ensemble = embens.embed(nn.Sequential(nn.Linear(WIDTH, WIDTH), layer), 3)
    x = torch.randn(TIMES, WIDTH)
    for a, output in enumerate(ensemble(x)):
        torch.testing.assert_close(output, ensemble.member(a)(x))


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 5}, {"add_bias_kv": True}])
def test_members_are_drawn_by_the_law_of_torchs_attention_and_are_one(options):
    attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
    opened = Attention(attention)
    torch.manual_seed(3)
    opened.reset_parameters()
    torch.manual_seed(3)
    drawn = nn.MultiheadAttention(WIDTH, HEADS, **options).state_dict()
    back = opened.plain()
    assert type(back) is nn.MultiheadAttention
    assert back.state_dict().keys() == drawn.keys()
    for name, tensor in back.state_dict().items():
        torch.testing.assert_close(tensor, drawn[name], rtol=0, atol=0)


def test_an_attention_of_another_kind_is_refused_with_what_to_do():
    class Mine(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x)[0]

    with pytest.raises(TypeError, match=r"a Mine with a forward .* four Linear layers"):
        embens.batch_ensemble(nn.Sequential(nn.Linear(8, 8), Mine(8, 2), nn.Linear(8, 2)), 3)


def test_attentions_with_tied_projections_are_refused_and_one_that_is_called_twice_is_not():
    class Twice(nn.Module):
        def __init__(self, tied: bool):
            super().__init__()
            self.a, self.b = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
            self.b = self.b if tied else self.a
            self.b.in_proj_weight, self.head = self.a.in_proj_weight, nn.Linear(8, 3)

        def forward(self, x):
            x = self.a(x, x, x)[0]
            return self.head(self.b(x, x, x)[0].mean(1))

    with pytest.raises(ValueError, match="tied projections"):
        embens.batch_ensemble(Twice(tied=True), 3)
    ensemble, x = embens.batch_ensemble(Twice(tied=False), 3), torch.randn(2, 5, 8)
    assert ensemble.network.a is ensemble.network.b
    torch.testing.assert_close(ensemble(x)[1], ensemble.member(1)(x))


def test_a_causal_hint_without_its_mask_and_weights_that_are_read_are_refused():
    class Reading(Attending):
        def forward(self, x):
            return self.attention(self.query(x), x, x)[0] * self.attention.in_proj_weight.mean()

    x = torch.randn(ROWS, TIMES, WIDTH)
    ensemble = embens.embed(Attending(), 2, example_input=(x, x))
    with pytest.raises(RuntimeError, match="hint about attn_mask"):
        ensemble(x, x, is_causal=True)
    with pytest.raises(ValueError, match="reads the in_proj_weight"):
        embens.embed(Reading(), 2, example_input=x)
