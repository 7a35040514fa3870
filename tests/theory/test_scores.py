"""Attention: against drawn wide networks, and the function of torch."""

from __future__ import annotations

import pytest
import torch
from theory.measured import assert_gradients_agree
from torch import nn
from torch.nn import functional as F

import embens
from embens import laws, theory
from embens.networks import Linear

pytestmark = pytest.mark.usefixtures("double")


class Attention(nn.Module):
    """A pre-norm transformer block on embedded tokens, with scores divided by the width."""

    def __init__(self, width: int, *, tied: bool, scale: float | None = None, **options):
        super().__init__()
        self.tied, self.scale = tied, scale or 1 / width
        self.tokens, self.positions = nn.Embedding(6, width), nn.Embedding(3, width)
        self.norm = nn.RMSNorm(width, elementwise_affine=False)
        self.query, self.key = Linear(width, width, **options), Linear(width, width, **options)
        self.value, self.out = Linear(width, width, **options), Linear(width, width, **options)
        self.up, self.head = Linear(width, width, **options), Linear(width, 1, **options)
        if tied:
            del self.key

    def forward(self, x):
        x = self.tokens(x) + self.positions(torch.arange(3))
        h = self.norm(x)
        queries = self.query(h)
        keys = queries if self.tied else self.key(h)
        scores = queries @ keys.transpose(-2, -1) * self.scale
        x = x + self.out(scores.softmax(-1) @ self.value(h))
        return self.head(torch.relu(self.up(x))[:, 0])


TOKENS = torch.tensor([[0, 1, 2], [3, 1, 0]])


@pytest.mark.parametrize("tied", [True, False])
def test_attention_on_embedded_tokens_has_these_kernels(tied):
    def draw(generator, width=384):
        torch.manual_seed(0 if generator is None else generator.initial_seed())
        net = Attention(width, tied=tied, generator=generator)
        return embens.embed(
            net,
            members=2,
            example_input=TOKENS,
            generator=generator,
            pre=None,
            post=laws.Shifted(0.8),
        )

    assert_gradients_agree(draw, TOKENS, seeds=16, bias=0.06)


def test_the_usual_scale_of_attention_is_refused():
    with pytest.raises(TypeError, match=r"multiplied by 0\.5; the limit is known for 1/width"):
        theory.kernels(Attention(4, tied=False, scale=0.5), TOKENS)


def test_the_function_of_attention_has_the_same_kernels():
    class Function(Attention):
        def forward(self, x):
            x = self.tokens(x) + self.positions(torch.arange(3))
            h = self.norm(x)
            q = self.query(h)
            mixed = F.scaled_dot_product_attention(q, q, self.value(h), scale=self.scale)
            return self.head(torch.relu(self.up(x + self.out(mixed)))[:, 0])

    ours = theory.kernels(Function(4, tied=True), TOKENS)
    theirs = theory.kernels(Attention(4, tied=True), TOKENS)
    torch.testing.assert_close(ours.ntk_shared.same, theirs.ntk_shared.same)


def test_correlated_queries_and_keys_raise():
    class Correlated(Attention):
        def forward(self, x):
            h = self.tokens(x)
            queries = self.query(h)
            weights = (queries @ torch.relu(queries).transpose(-2, -1) / 4).softmax(-1)
            return self.head((weights @ self.value(h)).mean(1))

    with pytest.raises(ValueError, match="queries and keys must be one stream"):
        theory.kernels(Correlated(4, tied=True), TOKENS)


class Heads(nn.Module):
    """A pre-norm block whose attention has several heads."""

    def __init__(self, width: int, heads: int = 2, **options):
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.tokens, self.positions = nn.Embedding(6, width), nn.Embedding(3, width)
        self.norm = nn.RMSNorm(width, elementwise_affine=False)
        self.query, self.key = Linear(width, width, **options), Linear(width, width, **options)
        self.value, self.out = Linear(width, width, **options), Linear(width, width, **options)
        self.up, self.head = Linear(width, width, **options), Linear(width, 1, **options)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    def forward(self, x):
        x = self.tokens(x) + self.positions(torch.arange(3))
        h = self.norm(x)
        n, t, width = h.shape
        q, k, v = (
            layer(h).view(n, t, self.heads, self.head_width).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(n, t, width))
        return self.head(torch.relu(self.up(x)).mean(1))

    def attend(self, q, k, v):
        scores = q @ q.transpose(-2, -1) / self.head_width
        return (scores + self.mask).softmax(-1) @ v


class Linearised(Heads):
    """Heads without a softmax, with the usual scale of scores."""

    def attend(self, q, k, v):
        return (q @ k.transpose(-2, -1)) * self.head_width**-0.5 @ v


class Filled(Heads):
    def attend(self, q, k, v):
        scores = (q @ q.transpose(-2, -1)) * (1 / self.head_width)
        hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v


class Causal(Heads):
    def attend(self, q, k, v):
        scale = 1 / self.head_width
        return F.scaled_dot_product_attention(q, q, v, is_causal=True, scale=scale)


class Kept(Heads):
    def attend(self, q, k, v):
        kept = torch.ones(3, 3, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, q, v, kept, scale=1 / self.head_width)


class Chosen(Heads):
    def attend(self, q, k, v):
        scores = q @ q.transpose(-2, -1) / self.head_width
        kept = torch.ones(3, 3, dtype=torch.bool).tril()
        return torch.where(kept, scores, -torch.inf).softmax(-1) @ v


class Hidden(Heads):
    def attend(self, q, k, v):
        scores = q @ q.transpose(-2, -1) / self.head_width
        hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)
        return torch.where(hidden, -torch.inf, scores).softmax(-1) @ v


class HeadMasks(Heads):
    """The first head sees earlier tokens, the second one later tokens."""

    def attend(self, q, k, v):
        scores = q @ q.transpose(-2, -1) / self.head_width
        return (scores + torch.stack([self.mask, self.mask.T])).softmax(-1) @ v


class Padded(Heads):
    """Tokens 0 are padding: no query sees them, and the mean leaves them out."""

    def forward(self, x):
        self_kept = x != 0
        x = self.tokens(x) + self.positions(torch.arange(3))
        h = self.norm(x)
        n, t, width = h.shape
        shape = n, t, self.heads, self.head_width
        q = self.query(h).view(shape).transpose(1, 2)
        v = self.value(h).view(shape).transpose(1, 2)
        scores = q @ q.transpose(-2, -1) / self.head_width
        weights = scores.masked_fill(~self_kept[:, None, None], -torch.inf).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(n, t, width))
        kept = self_kept.to(torch.get_default_dtype())
        mean = (torch.relu(self.up(x)) * kept[..., None]).sum(1) / kept.sum(1, keepdim=True)
        return self.head(mean)


class Plain(Heads):
    def attend(self, q, k, v):
        return (q @ q.transpose(-2, -1) / self.head_width).softmax(-1) @ v


@pytest.mark.parametrize("build", [Heads, Linearised, HeadMasks, Padded])
def test_wide_heads_have_these_kernels(build):
    heads = 16 if build is Linearised else 2  # random scores concentrate over heads

    def draw(generator, width=192):
        torch.manual_seed(0 if generator is None else generator.initial_seed())
        net = build(width, heads, generator=generator)
        return embens.embed(
            net, 2, None, laws.Shifted(0.8), example_input=TOKENS, generator=generator
        )

    assert_gradients_agree(draw, TOKENS, seeds=16, bias=0.06, width=32)


def test_heads_do_not_change_kernels():
    class Single(Heads):
        def forward(self, x):
            x = self.tokens(x) + self.positions(torch.arange(3))
            h = self.norm(x)
            q = self.query(h)
            weights = (q @ q.transpose(-2, -1) / 8).softmax(-1)
            return self.head(torch.relu(self.up(x + self.out(weights @ self.value(h)))).mean(1))

    ours, theirs = theory.kernels(Plain(8, 4), TOKENS), theory.kernels(Single(8), TOKENS)
    torch.testing.assert_close(ours.ntk_shared.same, theirs.ntk_shared.same, rtol=1e-12, atol=0)


@pytest.mark.parametrize("build", [Filled, Causal, Kept, Chosen, Hidden])
def test_every_way_to_write_a_causal_mask_has_the_same_kernels(build):
    ours, theirs = theory.kernels(build(8), TOKENS), theory.kernels(Heads(8), TOKENS)
    unmasked = theory.kernels(Plain(8), TOKENS)
    torch.testing.assert_close(ours.ntk_shared.same, theirs.ntk_shared.same, rtol=1e-12, atol=0)
    assert (unmasked.ntk_shared.same - theirs.ntk_shared.same).abs().max() > 1e-3


def test_equal_masks_of_heads_are_one_mask():
    class Repeated(Heads):
        def attend(self, q, k, v):
            scores = q @ q.transpose(-2, -1) / self.head_width
            return (self.mask.expand(2, 3, 3) + scores).softmax(-1) @ v

    ours, theirs = theory.kernels(Repeated(8), TOKENS), theory.kernels(Heads(8), TOKENS)
    torch.testing.assert_close(ours.ntk_shared.same, theirs.ntk_shared.same, rtol=1e-12, atol=0)


def test_padding_changes_nothing():
    """A padded input has the kernels of the shorter input."""

    class Short(Padded):
        def forward(self, x):
            x = self.tokens(x) + self.positions(torch.arange(2))
            h = self.norm(x)
            q = self.query(h)
            x = x + self.out((q @ q.transpose(-2, -1) / 8).softmax(-1) @ self.value(h))
            return self.head(torch.relu(self.up(x)).mean(1))

    padded = torch.tensor([[1, 2, 0], [3, 1, 0]])
    ours = theory.kernels(Padded(8, 1), padded)
    theirs = theory.kernels(Short(8), padded[:, :2])
    torch.testing.assert_close(ours.ntk_shared.same, theirs.ntk_shared.same, rtol=1e-12, atol=0)
    mixed = torch.cat([padded, TOKENS])
    blocks = theory.kernels(Padded(8, 1), mixed, block=2)
    whole = theory.kernels(Padded(8, 1), mixed)
    torch.testing.assert_close(blocks.ntk_shared.same, whole.ntk_shared.same)
    torch.testing.assert_close(whole.ntk_shared.same[:2, :2], ours.ntk_shared.same)


def test_modulated_queries_that_are_the_keys_stay_tied():
    """Signs change no product of a query with a key, so that attention is as without them."""

    def kernel(law):
        torch.manual_seed(0)
        net = Plain(8)
        sites = ["value"] if law is None else ["value", "query"]
        laws_of = {"query": laws.Signs(0.5), "value": laws.Constant(1.0)}
        ensemble = embens.embed(
            net, 2, {name: laws_of[name] for name in sites}, None, sites, TOKENS, trainable=False
        )
        return theory.kernels(ensemble, TOKENS).ntk_shared

    with_signs, without = kernel(True), kernel(None)
    torch.testing.assert_close(with_signs.same, without.same)
    torch.testing.assert_close(with_signs.cross, without.cross)


def test_linear_attention_is_a_product_of_three_kernels():
    """Without embeddings of positions or norms, by the formula of Hron et al. for one block."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            names = ("stem", "query", "key", "value", "out")
            for name in names:
                setattr(self, name, Linear(5 if name == "stem" else 8, 8, weight_std=1.3))
            self.head = Linear(8, 1)

        def forward(self, x):
            h = self.stem(x)
            q, k, v = (
                layer(h).view(-1, 3, 4, 2).transpose(1, 2)
                for layer in (self.query, self.key, self.value)
            )
            mixed = (q @ k.transpose(-2, -1) / 2**0.5) @ v
            return self.head(self.out(mixed.transpose(1, 2).flatten(2)).mean(1))

    x = torch.randn(3, 3, 5, generator=torch.Generator().manual_seed(0))
    w = 1.3**2
    stem = w * torch.einsum("isc,jtc->ijst", x, x) / 5
    k, theta = w * stem, w * stem + w * stem  # of queries, keys and values
    pairs = (k * k).sum((-2, -1), keepdim=True)
    slopes = 2 * (k * theta).sum((-2, -1), keepdim=True)
    mixed, tangents = k * pairs, theta * pairs + k * slopes
    nngp = (w * mixed).mean((-2, -1))
    ntk = (w * mixed + w * tangents).mean((-2, -1)) + nngp
    kernels = theory.kernels(Block(), x)
    torch.testing.assert_close(kernels.nngp.same, nngp, rtol=1e-12, atol=0)
    torch.testing.assert_close(kernels.ntk_shared.same, ntk, rtol=1e-12, atol=0)


REFUSED_HEADS = {
    "usual scale": (lambda s, q, k, v: F.scaled_dot_product_attention(q, k, v), "stay random"),
    "one random head": (
        lambda s, q, k, v: (q @ k.transpose(-2, -1)) * 0.3 @ v,
        "linear attention with scores multiplied by 0.3 has no rule",
    ),
    "empty row": (
        lambda s, q, k, v: F.scaled_dot_product_attention(
            q, q, v, torch.zeros(3, 3, dtype=torch.bool), scale=1 / s.head_width
        ),
        "must leave a key to every query",
    ),
    "slice of features": (
        lambda s, q, k, v: q[:, :, :, :1] @ k[:, :, :, :1].transpose(-2, -1) @ v,
        "'getitem' is not known",
    ),
    "shape": (
        lambda s, q, k, v: F.scaled_dot_product_attention(q, q, v, torch.zeros(4, 4)),
        r"x1 does not fit the network: its forward fails on inputs of shape \(1, 3\)",
    ),
    "operation": (lambda s, q, k, v: q.cumsum(1), "'cumsum' is not known"),
}


@pytest.mark.parametrize("name", REFUSED_HEADS)
def test_other_attention_is_refused_with_its_line(name):
    attend, message = REFUSED_HEADS[name]

    class Refused(Heads):
        pass

    Refused.attend = attend
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        theory.kernels(Refused(8), TOKENS)
    assert "test_scores.py" in str(raised.value)


def test_masks_that_do_not_broadcast_are_refused():
    class NoHeadAxis(Heads):
        def forward(self, x):
            self.hidden = (x == 0)[:, None]
            return super().forward(x)

        def attend(self, q, k, v):
            scores = q @ q.transpose(-2, -1) / self.head_width
            return scores.masked_fill(self.hidden, -torch.inf).softmax(-1) @ v

    message = r"shape \(3, 1, 3\) does not broadcast to scores of shape \(3, 2, 3, 3\)"
    with pytest.raises(ValueError, match=message):
        theory.kernels(NoHeadAxis(8), torch.tensor([[0, 1, 2], [3, 1, 4], [5, 1, 2]]))


def test_layers_of_each_head_are_refused():
    class PerHead(Heads):
        def __init__(self):
            super().__init__(8)
            self.inner = Linear(4, 4)

        def attend(self, q, k, v):
            return self.inner(v)

    with pytest.raises(TypeError, match=r"'inner' \(Linear\) acts on every head"):
        theory.kernels(PerHead(), TOKENS)


def test_heads_of_one_feature_are_refused():
    with pytest.raises(ValueError, match="one feature do not show whether"):
        theory.kernels(Plain(4, 4), TOKENS)


def test_attention_of_torch_is_refused_with_the_reason():
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.raises(TypeError, match=r"root of the width.*F\.scaled_dot_product_attention"):
        theory.kernels(nn.Sequential(Linear(5, 8), net, Linear(8, 1)), torch.zeros(2, 3, 5))
