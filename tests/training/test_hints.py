"""Arguments of other libraries are refused with the name that ``fit`` uses."""

import inspect

import pytest
import torch
from torch import nn

import embens
from embens.training.hints import HINTS

DATA = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)


def message_for(name: str) -> str:
    ensemble = embens.batch_ensemble(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), 2)
    with pytest.raises(TypeError) as error:
        embens.fit(ensemble, DATA, **{name: 1})
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("verbose", "progress=True"),
        ("device", "ensemble.to(device)"),
        ("max_epochs", "'epochs'"),
        ("n_epochs", "'epochs'"),
        ("num_epochs", "'epochs'"),
        ("learning_rate", "'lr'"),
        ("loss", "'criterion'"),
        ("loss_fn", "'criterion'"),
        ("val", "'validation'"),
        ("valid", "'validation'"),
        ("validation_data", "'validation'"),
        ("random_state", "'seed'"),
        ("sample_weight", "train=(x, y, sample_weight)"),
        ("sample_weights", "train=(x, y, sample_weight)"),
        ("class_weight", "nn.CrossEntropyLoss(weight=class_weight)"),
        ("class_weights", "nn.CrossEntropyLoss(weight=class_weight)"),
        ("eval_metric", 'KeepBest("nll")'),
        ("y", "train=(x, y)"),
        ("metrics", 'KeepBest("nll")'),
        ("validation_split", "validation=(x[n:], y[n:])"),
    ],
)
def test_names_of_other_libraries_get_the_name_that_fit_uses(name, fix):
    message = message_for(name)
    assert message.startswith(f"fit has no argument {name!r}")
    assert fix in message


def test_no_hint_hides_an_argument_and_all_are_sentences():
    arguments = inspect.signature(embens.fit).parameters
    assert not set(HINTS) & set(arguments)
    for hint in HINTS.values():
        assert hint.startswith((". ", "; "))
        assert hint.endswith((".", "…", "?"))


def test_other_typing_errors_get_the_closest_argument():
    assert "did you mean 'epochs'" in message_for("epoch")
