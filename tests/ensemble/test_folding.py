"""Members as one larger batch: right wherever it is done, and not done where it would be wrong."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F
from embens.ensemble.run import Way
from torch import nn

import embens
from embens import laws


class Mixing(nn.Module):
    """Two layers with something between them that may look across the batch."""

    def __init__(self, mix, outputs: int = 3):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, outputs)
        self.mix = mix

    def forward(self, x, mask=None):
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.out(self.mix(h) if mask is None else h * mask)


def own_statistics(h):
    return (h - h.mean(0)) / (h.std(0, unbiased=False) + 0.1)


def if_any_is_large(h):
    return h * 2 if bool((h > 0.5).any()) else -h


MIXING = {
    "batch statistics by hand": own_statistics,
    "first row": lambda h: h - h[0],
    "mean over the batch": lambda h: h + h.mean(0),
    "mean of everything": lambda h: h / h.abs().mean(),
    "sorted over the batch": lambda h: h + h.sort(0).values,
    "rolled": lambda h: h + h.roll(1, 0),
    "similarities": lambda h: (h @ h.T).softmax(-1) @ h,
    "size of the batch": lambda h: h / h.shape[0],
    "length of the batch": lambda h: h / len(h),
    "cumulated over the batch": lambda h: h.cumsum(0),
    "softmax over the batch": lambda h: h.softmax(0),
    "positions in the batch": lambda h: h + torch.arange(len(h))[:, None] / 10,
    "functional batch norm": lambda h: F.batch_norm(h, None, None, training=True),
}
KEEPING = {
    "views by the size": lambda h: h.view(h.size(0), 2, 3).flatten(1),
    "a buffer of zeros": lambda h: torch.zeros(len(h), 6) + h,
    "einsum": lambda h: torch.einsum("bi,bj->bi", h, h),
    "transposed twice": lambda h: h.T.T,
    "split and joined": lambda h: torch.cat(h.chunk(2, -1), -1),
    "rows as samples": lambda h: h.reshape(-1, 3).tanh().reshape(-1, 6),
}


def ensembles(mix, **options):
    reference = Mixing(mix)
    yield embens.embed(reference, 3, **options)
    yield embens.embed(reference, 3, example_input=torch.randn(5, 4), **options)


def passes(ensemble, x, **options) -> int:
    """Return how often the network is called in a pass."""
    calls: list[int] = []
    hook = ensemble.network.register_forward_hook(lambda *_: calls.append(1))
    ensemble(x, **options)
    hook.remove()
    return len(calls)


def member_by_member(ensemble, x, **kwargs):
    return torch.stack([ensemble.member(a)(x, **kwargs) for a in range(ensemble.members)])


@pytest.mark.parametrize("mix", MIXING.values(), ids=MIXING)
@pytest.mark.parametrize("law", [laws.Normal(), laws.Constant(1)], ids=str)
@pytest.mark.filterwarnings("ignore:the data flow of")
def test_a_reference_that_mixes_samples_runs_member_by_member_and_says_why_once(mix, law):
    def check(ensemble, *batches):
        for x in batches:
            expected = member_by_member(ensemble, x)
            torch.testing.assert_close(ensemble(x), expected, rtol=1e-3, atol=1e-3)

    for ensemble in ensembles(mix, pre=law, post=law):
        with pytest.warns(UserWarning, match="can't run several members at once") as seen:
            check(ensemble, torch.zeros(5, 4), *(torch.randn(rows, 4) for rows in (5, 2, 7)))
        assert len(seen) == 1
        with torch.no_grad():
            for modulation in ensemble.individuals.values():
                modulation.values.normal_()  # members that were equal differ now
        check(ensemble, torch.randn(5, 4))


@pytest.mark.filterwarnings("ignore:the data flow of")
def test_code_that_looks_at_values_is_never_folded():
    for ensemble in ensembles(if_any_is_large):
        for x in (torch.zeros(5, 4), *torch.randn(20, 5, 4)):
            torch.testing.assert_close(ensemble(x), member_by_member(ensemble, x))
        assert "looks at values" in repr(ensemble)


class Asking(nn.Module):
    """Asks something of a mask of its input, to take a shorter way."""

    def __init__(self, asks, mixes: bool = False):
        super().__init__()
        self.a, self.out, self.asks, self.mixes = nn.Linear(4, 6), nn.Linear(6, 3), asks, mixes

    def forward(self, x, mask):
        h = torch.tanh(self.a(x))
        if not self.asks(mask):
            h = h * mask[:, :1] + (h.mean(0) if self.mixes else 0)
        return self.out(h)


ASKING = {
    "all": lambda mask: mask.all(),
    "equal to one": lambda mask: torch.all(mask == 1),
    "not any": lambda mask: not (~mask.bool()[:, :3]).any(),
    "counted": lambda mask: mask.sum() == mask.numel(),
}
LOOKING = {
    "a sum": lambda mask: mask.sum() > 10,
    "all after a sum over the batch": lambda mask: (mask.cumsum(0) > 3).all(),
    "an item": lambda mask: mask[0, 0].item(),
}
ASKED = [torch.ones(4, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [0, 1, 1]]).repeat(2, 1)]


@pytest.mark.parametrize("asks", ASKING.values(), ids=ASKING)
def test_code_that_asks_whether_all_of_an_input_is_so_is_folded(asks):
    x = torch.randn(4, 4)
    ensemble = embens.embed(Asking(asks), 3, example_input=(x, ASKED[0]))
    for mask in ASKED:
        torch.testing.assert_close(ensemble(x, mask), member_by_member(ensemble, x, mask=mask))
        assert not ensemble.folding.reason
        ways = {way for known in ensemble.folding.known.values() for way in known.values()}
        assert ways
        assert Way.EACH not in ways


@pytest.mark.parametrize("asks", LOOKING.values(), ids=LOOKING)
def test_other_questions_are_looks_at_values(asks):
    x = torch.randn(4, 4)
    ensemble = embens.embed(Asking(asks), 3, example_input=(x, ASKED[0]))
    for mask in ASKED:
        torch.testing.assert_close(ensemble(x, mask), member_by_member(ensemble, x, mask=mask))
    assert "looks at values" in ensemble.folding.reason


@pytest.mark.parametrize("order", [ASKED, ASKED[::-1]], ids=["full first", "full last"])
def test_the_code_of_another_answer_is_tried_out_by_itself(order):
    x = torch.randn(4, 4)
    asks = ASKING["all"]
    ensemble = embens.embed(Asking(asks, mixes=True), 3, example_input=(x, ASKED[0]))
    with pytest.warns(UserWarning, match="can't run several members at once"):
        outputs = [ensemble(x, mask) for mask in order]
    for mask, members in zip(order, outputs, strict=True):
        torch.testing.assert_close(members, member_by_member(ensemble, x, mask=mask))


@pytest.mark.parametrize("mix", KEEPING.values(), ids=KEEPING)
@pytest.mark.filterwarnings("ignore:the data flow of")
def test_code_that_keeps_samples_apart_in_ways_that_are_not_known_is_folded(mix):
    for ensemble in ensembles(mix):
        for x in (torch.randn(5, 4), torch.randn(1, 4)):
            torch.testing.assert_close(ensemble(x), member_by_member(ensemble, x))
            assert passes(ensemble, x) == 1


def test_a_mode_is_tried_out_by_itself():
    class Net(Mixing):
        def forward(self, x):
            h = torch.tanh(self.b(torch.tanh(self.a(x))))
            return self.out(own_statistics(h) if self.training else h)

    ensemble = embens.embed(Net(torch.tanh), 3).eval()
    x = torch.randn(5, 4)
    torch.testing.assert_close(ensemble(x), member_by_member(ensemble, x))
    ensemble.train()
    with pytest.warns(UserWarning, match="can't run several"):
        outputs = ensemble(x)
    torch.testing.assert_close(outputs, ensemble(x, chunk=1))


def test_a_number_of_rows_is_tried_out_by_itself():
    mix = lambda h: own_statistics(h) if len(h) > 6 else h  # noqa: E731
    ensemble = embens.embed(Mixing(mix), 3, example_input=torch.randn(2, 4))
    x = torch.randn(2, 4)
    torch.testing.assert_close(ensemble(x), member_by_member(ensemble, x))
    x = torch.randn(8, 4)
    with pytest.warns(UserWarning, match="can't run several"):
        outputs = ensemble(x)
    torch.testing.assert_close(outputs, member_by_member(ensemble, x))


MASKS = {
    "a row for each sample": lambda rows: torch.rand(rows, 6),
    "one row": lambda rows: torch.rand(1, 6),
    "no rows": lambda rows: torch.rand(6),
    "a number": lambda rows: torch.tensor(0.5),
}


@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("rows", [1, 5, 6])
def test_tensors_passed_by_keyword_go_with_the_samples_where_they_belong_to_them(make, rows):
    ensemble = embens.embed(Mixing(torch.tanh), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            x, mask = torch.randn(rows, 4), make(rows)
            torch.testing.assert_close(
                ensemble(x, mask=mask), member_by_member(ensemble, x, mask=mask)
            )


class Masked(nn.Module):
    """Attention with masks of both kinds, over as many steps as there are samples."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens, padding=None, mask=None):
        h = self.encoder(self.embedding(tokens), mask=mask, src_key_padding_mask=padding)
        return self.head(h.mean(1))


@pytest.mark.parametrize("rows", [2, 5])
def test_attention_masks_are_told_apart_by_what_they_do(rows):
    tokens = torch.randint(9, (rows, 5))
    ensemble = embens.embed(Masked(), 3, example_input=tokens)
    padding = torch.rand(rows, 5) > 0.6
    padding[:, 0] = False
    causal = torch.triu(torch.full((5, 5), float("-inf")), 1)
    for kwargs in ({}, {"padding": padding}, {"mask": causal}):
        outputs = ensemble(tokens, **kwargs)
        torch.testing.assert_close(outputs, member_by_member(ensemble, tokens, **kwargs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own: masks of two types
        both = {"padding": padding, "mask": causal}
        torch.testing.assert_close(
            ensemble(tokens, **both), member_by_member(ensemble, tokens, **both)
        )


def test_outputs_without_samples_run_member_by_member():
    class Loss(Mixing):
        def forward(self, x):
            y = super().forward(x)
            return {"logits": y, "loss": y.square().mean()}

    ensemble = embens.embed(Loss(lambda h: h), 3, example_input=torch.randn(5, 4))
    x = torch.randn(5, 4)
    outputs = ensemble(x)
    assert outputs["loss"].shape == (3,)
    for a in range(3):
        torch.testing.assert_close(outputs["loss"][a], ensemble.member(a)(x)["loss"])


@pytest.mark.parametrize("case", ["mlp", "cnn", "transformer"])
def test_well_known_code_is_folded_without_trying_out(case):
    reference, x = {
        "mlp": lambda: (embens.networks.mlp(4, 8, 3), torch.randn(5, 4)),
        "cnn": lambda: (embens.networks.cnn((4, 6), image=8), torch.randn(5, 3, 8, 8)),
        "transformer": lambda: (__import__("cases").Tokens(), torch.randint(11, (3, 5))),
    }[case]()
    ensemble = embens.embed(reference, 4)
    assert not ensemble.plan.folding.impossible
    assert not ensemble.plan.folding.unclear
    with ensemble.run((x,), chunk=4) as run:
        assert ensemble.folding.choose(run) is not Way.EACH


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("statistics", ["member", "shared"])
def test_batch_statistics_are_those_of_one_member(training, statistics):
    torch.manual_seed(0)
    reference = nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64, 2)),
    ).double()
    x = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    results = []
    for chunk in (1, 2, 4):
        ensemble = embens.embed(
            *(reference, 4), norm_statistics=statistics, generator=torch.Generator().manual_seed(1)
        ).train(training)
        outputs = [ensemble(x, chunk=chunk) for _ in range(2)]
        results.append([*outputs, *ensemble.buffers()])
    for other in results[1:]:
        for left, right in zip(results[0], other, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", [embens.batch_ensemble, embens.independent])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_split_and_own_batches_are_folded_too(family, rows):
    torch.manual_seed(0)
    reference = nn.Sequential(
        *(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    )
    ensemble = family(reference, 3)
    alone = [ensemble.member(a) for a in range(3)]
    x = torch.randn(rows, 4)
    outputs = ensemble(x, batch="split")
    assert passes(ensemble, x, batch="split") == (1 if rows % 3 == 0 else min(rows, 3))
    for i in range(rows):
        torch.testing.assert_close(outputs[i], alone[i % 3](x[i : i + 1])[0])
    own = torch.randn(3, rows, 4)
    torch.testing.assert_close(
        ensemble(own, batch="own"), torch.stack([alone[a](own[a]) for a in range(3)])
    )
    assert passes(ensemble, own, batch="own") == 1


def test_split_batches_with_batch_statistics_have_those_of_one_member():
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    for family in (embens.batch_ensemble, embens.independent):
        ensemble = family(reference, 3)
        alone = [ensemble.member(a) for a in range(3)]
        x = torch.randn(7, 4)
        outputs = ensemble(x, batch="split")
        for a in range(3):
            torch.testing.assert_close(outputs[a::3], alone[a](x[a::3]))


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def hidden(self, x):
        return self.b(self.a(x).relu()).relu()


def network(run, **parts):
    """Return a network with this forward, and with some parts more."""

    class Net(Base):
        def forward(self, *args, **kwargs):
            return run(self, *args, **kwargs)

    net = Net()
    for name, part in parts.items():
        if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
            net.register_buffer(name, part)
        else:
            setattr(net, name, part)
    return net


def ranked(s, x):
    h = s.hidden(x)
    total = h.sum(1)
    return s.c(h + (total.unsqueeze(1) - total).relu().mean(1).unsqueeze(1))


def gated(s, x):
    h = s.hidden(x)
    return s.c(h + s.gate * (h - h.mean(0)))


SURPRISES = {
    "positions of a table": (
        lambda s, x: s.c((s.hidden(x) + s.table(s.ids)).relu()),
        {"table": nn.Embedding(4, 8), "ids": torch.arange(4)},
        (torch.randn(5, 4, 6),),
    ),
    "learned queries": (
        lambda s, x: s.c(s.hidden(x) + s.lin(s.queries).mean(0)),
        {"lin": nn.Linear(8, 8), "queries": nn.Parameter(torch.randn(4, 8))},
        (torch.randn(5, 6),),
    ),
    "prototypes": (
        lambda s, x, support: -(s.hidden(x)[:, None] - s.hidden(support)).square().sum(2),
        {},
        (torch.randn(8, 6), torch.randn(5, 6)),
    ),
    "prototypes as many as samples": (
        lambda s, x, support: -(s.hidden(x)[:, None] - support).square().sum(2),
        {},
        (torch.randn(8, 6), torch.randn(8, 8)),
    ),
    "only in evaluation": (
        lambda s, x: s.c(s.hidden(x) if s.training else s.hidden(x) - s.hidden(x).mean(0)),
        {},
        (torch.randn(8, 6),),
    ),
    "ranked by broadcasting": (ranked, {}, (torch.randn(8, 6),)),
    "attention between samples": (
        lambda s, x: s.c(F.scaled_dot_product_attention(*[s.hidden(x)] * 3)),
        {},
        (torch.randn(8, 6),),
    ),
    "halves of the batch": (
        lambda s, x: s.wide(torch.cat(s.hidden(x).chunk(2), 1)),
        {"wide": nn.Linear(16, 3)},
        (torch.randn(8, 6),),
    ),
    "rolled flat": (lambda s, x: s.c(s.hidden(x) + s.hidden(x).roll(8)), {}, (torch.randn(8, 6),)),
    "gated along the batch": (
        lambda s, x: s.c(s.glu(s.hidden(x))),
        {"glu": nn.GLU(0)},
        (torch.randn(8, 6),),
    ),
    "one row, as wide as there are members": (
        lambda s, x: s.last(s.hidden(x)[:, :4] + s.hidden(x)[:, :4].sum(1)),
        {"last": nn.Linear(4, 3)},
        (torch.randn(1, 6),),
    ),
    "a constant among the outputs": (
        lambda s, x: (s.c(s.hidden(x)), s.code),
        {"code": nn.Parameter(torch.randn(4, 8))},
        (torch.randn(8, 6),),
    ),
    "more rows than four": (
        lambda s, x: s.c(s.hidden(x) - (s.hidden(x).mean(0) if len(x) > 4 else 0.0)),
        {},
        (torch.randn(2, 6),),
    ),
    "a branch that starts at zero": (
        gated,
        {"gate": nn.Parameter(torch.zeros(1))},
        (torch.randn(8, 6),),
    ),
}


@pytest.mark.parametrize(("run", "parts", "inputs"), SURPRISES.values(), ids=SURPRISES)
@pytest.mark.parametrize("read_from", ["code", "example"])
@pytest.mark.filterwarnings("ignore:the data flow of", "ignore:this network can't run several")
def test_no_surprise_is_folded_wrongly(run, parts, inputs, read_from):
    torch.manual_seed(0)
    options = {"example_input": inputs} if read_from == "example" else {}
    ensemble = embens.embed(network(run, **parts), 4, **options).eval()
    for turn in range(2):
        expected = [ensemble.member(a)(*inputs) for a in range(4)]
        for chunk in (None, 2, 4):
            outputs = ensemble(*inputs, chunk=chunk)
            for a, alone in enumerate(expected):
                mine = tuple(o[a] for o in outputs) if isinstance(outputs, tuple) else outputs[a]
                torch.testing.assert_close(mine, alone, rtol=1e-4, atol=1e-4)
        if turn == 0:
            with torch.no_grad():
                for parameter in ensemble.parameters():
                    parameter.add_(0.3)


@pytest.mark.filterwarnings("ignore:this network can't run several")
def test_other_arguments_and_shapes_are_tried_out_by_themselves():
    def centred(s, x, centre=False):
        h = s.hidden(x)
        return s.c(h - h.mean(0) if centre or (h.dim() > 2 and h.shape[1] > 6) else h)

    ensemble = embens.embed(network(centred), 4, example_input=torch.randn(8, 6)).eval()

    def check(*args, **kwargs):
        expected = torch.stack([ensemble.member(a)(*args, **kwargs) for a in range(4)])
        torch.testing.assert_close(ensemble(*args, **kwargs), expected, rtol=1e-4, atol=1e-4)

    x = torch.randn(8, 6)
    check(x)
    check(x, True)
    check(x, centre=False)
    check(x, centre=True)
    check(torch.randn(3, 5, 6))
    check(torch.randn(3, 9, 6))


@pytest.mark.filterwarnings("ignore:this network can't run several")
def test_a_mix_by_chance_is_found_in_training():
    def mixed(s, x):
        h = s.hidden(x)
        weight = torch.rand(h.shape[0], 1)
        return s.c(weight * h + (1 - weight) * h.flip(0))

    x = torch.randn(8, 6)
    ensemble = embens.embed(network(mixed), 4, example_input=x).train()
    ensemble(x, chunk=4)[0].sum().backward()
    for parameter in ensemble.individual_parameters():
        assert not parameter.grad[1:].any()


class Centred(Base):
    """Keeps a running mean by assignment, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        h = self.hidden(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return self.c(h - self.mean)


@pytest.mark.filterwarnings("ignore:this network can't run several", "ignore:the data flow of")
@pytest.mark.filterwarnings("ignore:the forward assigns")
def test_trials_leave_no_state_behind_and_own_buffers_are_kept():
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    ensemble = embens.independent(Centred(), 3).train()
    alone = [ensemble.member(a) for a in range(3)]
    for _ in range(3):
        ensemble(x)
        for network_ in alone:
            network_(x)
    for a in range(3):
        torch.testing.assert_close(ensemble.member(a).mean, alone[a].mean)
    embedded = embens.batch_ensemble(Centred(), 3).train()
    embedded(x)
    assert embedded.network.calls in (1, 3)


def test_outputs_whose_tensors_cannot_be_found_are_refused():
    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor

    ensemble = embens.embed(
        network(lambda s, x: Output(s.c(s.hidden(x)))), 3, example_input=torch.randn(8, 6)
    )
    with pytest.raises(TypeError, match="returns a Output, whose tensors can't be found"):
        ensemble(torch.randn(8, 6))
