"""Attention: against drawn wide networks, and the function of torch."""

from __future__ import annotations

import pytest
import torch
from theory.measured import average, expected
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

    k = expected(theory.kernels(draw(None, width=8), TOKENS))
    for part, (mean, error) in average(draw, TOKENS, seeds=16).items():
        if part.startswith("nngp"):
            continue
        scale = k[part.replace("cross", "same")].abs().mean()
        excess = ((mean - k[part]).abs() - 0.06 * scale).clamp(min=0)
        assert (excess <= 4 * error + 1e-12).all(), (part, mean, k[part], error)


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
