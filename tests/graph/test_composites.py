"""Layers inside attentions, recurrent modules and black boxes have a place in the flow."""

from torch import nn

from embens.graph.reading import read_flow


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        h = self.embedding(x)
        return self.attention(h, h, h)[0]


def test_projections_of_an_attention_precede_its_output():
    flow = read_flow(Attending())
    names = {f"attention.{part}_proj" for part in "qkv"}
    assert flow.upstream["attention.out_proj"] == {"embedding", *names}
    assert flow.upstream["attention.q_proj"] == {"embedding"}
    assert flow.last == {"attention.out_proj"}


def test_levels_of_a_recurrent_module_follow_each_other():
    flow = read_flow(nn.LSTM(3, 4, num_layers=2, bidirectional=True))
    first = {"", "l0_reverse"}
    assert flow.first == first
    assert flow.upstream["l1"] == first
    assert flow.last == {"l1", "l1_reverse"}


def test_an_encoder_is_traced_and_not_guessed():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    flow = read_flow(nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoder(layer, 1)))
    assert flow.guesses == []
    assert flow.last == {"1.layers.0.linear2"}


class Unreadable(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.b(self.a(x)) if x.sum() > 0 else self.b(x)


def test_layers_of_a_black_box_are_guessed_in_their_order():
    flow = read_flow(Unreadable())
    assert flow.upstream == {"a": set(), "b": {"a"}}
    assert "the order of the layers" in flow.guesses[0]
