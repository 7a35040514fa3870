"""Arguments of other libraries are refused with the name or the place that they have here."""

import inspect

import pytest
import torch
from torch import nn

import embens
from embens import synonyms

FAMILIES = {
    embens.embed: synonyms.EMBED,
    embens.batch_ensemble: synonyms.BATCH_ENSEMBLE,
    embens.mc_dropout: synonyms.MC_DROPOUT,
    embens.masksembles: synonyms.MASKSEMBLES,
    embens.last_layer_dropout: synonyms.LAST_LAYER_DROPOUT,
    embens.low_rank: synonyms.LOW_RANK,
    embens.adapt: synonyms.ADAPT,
    embens.independent: synonyms.INDEPENDENT,
}
OTHERS = {
    embens.predict: synonyms.PREDICTION,
    embens.evaluate: synonyms.PREDICTION,
    embens.diagnose: synonyms.DIAGNOSE,
    embens.objective: synonyms.CRITERION,
    embens.EmbeddedEnsemble.parameter_groups: synonyms.RATES,
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def message_of(function, *arguments, name: str) -> str:
    with pytest.raises(TypeError) as error:
        function(*arguments, **{name: 1})
    return str(error.value)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("n_members", "'members'"),
        ("num_members", "'members'"),
        ("ensemble_size", "'members'"),
        ("n_estimators", "'members'"),
        ("lr", "ensemble.parameter_groups(lr=…)"),
        ("learning_rate", "embens.fit(ensemble, …, lr=…)"),
        ("verbose", "leave it out"),
        ("device", "ensemble.to(device)"),
        ("seed", "generator=torch.Generator().manual_seed(seed)"),
        ("epochs", "embens.fit"),
    ],
)
def test_families_know_the_names_of_other_libraries(family, name, fix):
    message = message_of(family, network(), name=name)
    assert message.startswith(f"{family.__name__} has no argument {name!r}")
    assert fix in message


@pytest.mark.parametrize(
    ("family", "name", "fix"),
    [
        (embens.mc_dropout, "p", "law=laws.Bernoulli(keep)"),
        (embens.last_layer_dropout, "dropout", "law=laws.Bernoulli(keep)"),
        (embens.embed, "law", "pre= and post="),
        (embens.embed, "rank", "embens.low_rank"),
        (embens.adapt, "rank", "embens.low_rank"),
        (embens.last_layer_dropout, "layers", "embens.mc_dropout(sites=…)"),
        (embens.low_rank, "lora_alpha", "'scale'"),
        (embens.batch_ensemble, "example", "'example_input'"),
    ],
)
def test_families_know_the_arguments_of_one_another(family, name, fix):
    assert fix in message_of(family, network(), name=name)


def test_predictions_objectives_and_groups_know_other_names():
    ensemble, x = embens.batch_ensemble(network(), 2), torch.zeros(3, 4)
    target = torch.tensor([0, 1, 2])
    assert "leave it out" in message_of(embens.predict, ensemble, x, name="verbose")
    assert "'members'" in message_of(embens.predict, ensemble, x, name="n_samples")
    assert ".interval(level)" in message_of(embens.predict, ensemble, x, name="return_std")
    assert "all scores" in message_of(embens.evaluate, ensemble, (x, target), name="metrics")
    assert "Budget(" in message_of(embens.diagnose, ensemble, x, target, name="n_samples")
    assert "'criterion'" in message_of(embens.objective, ensemble(x), target, name="loss_fn")
    assert "'lr'" in message_of(ensemble.parameter_groups, name="learning_rate")
    assert "torch.optim.SGD" in message_of(ensemble.parameter_groups, name="momentum")


@pytest.mark.parametrize(
    ("function", "hints"),
    [pytest.param(*item, id=item[0].__name__) for item in (FAMILIES | OTHERS).items()],
)
def test_no_hint_names_an_argument_that_does_not_exist(function, hints):
    arguments = inspect.signature(function).parameters
    for name, hint in hints.items():
        assert hint.startswith((". ", "; "))
        assert hint.endswith((".", "?"))
        if "did you mean" in hint and name not in arguments:
            assert hint.split("'")[1] in arguments


def test_names_are_given_as_one_text():
    hints = synonyms.renamed("members", "n size")
    assert hints == dict.fromkeys(("n", "size"), "; did you mean 'members'?")
