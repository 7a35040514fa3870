"""transformers' Trainer trains an ensemble as a loop by hand does."""

from __future__ import annotations

import warnings

import pytest
import torch

import embens
from embens.prediction import Prediction

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from embens.training.huggingface import EnsembleTrainer

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, TOKENS, CLASSES, MEMBERS = 24, 7, 3, 3


def bert() -> torch.nn.Module:
    """Return a small untrained classifier without dropout."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=30,
        intermediate_size=24,
        num_labels=CLASSES,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


def make_columns() -> dict[str, torch.Tensor]:
    """Return token ids, half of them padded, and labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 30, (ROWS, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % CLASSES}


def split_rows(columns: dict[str, torch.Tensor]) -> list[dict]:
    rows = []
    for i in range(ROWS):
        rows.append({name: column[i] for name, column in columns.items()})
    return rows


def without_labels(batch: dict) -> dict:
    return {name: column for name, column in batch.items() if name != "labels"}


def make_ensemble(by: str = "modulations", trunk: str = "trained") -> embens.EmbeddedEnsemble:
    generator = torch.Generator().manual_seed(1)
    return embens.adapt(bert(), MEMBERS, by=by, trunk=trunk, generator=generator)


def make_trainer(
    model: torch.nn.Module, folder, compute_loss_func=None, **options
) -> EnsembleTrainer:
    """Return a trainer of one epoch with a constant learning rate."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        **{"num_train_epochs": 1, "save_strategy": "no", **options},
    )
    rows = split_rows(make_columns())
    return EnsembleTrainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, compute_loss_func=compute_loss_func
    )


def record_batches(trainer: EnsembleTrainer) -> list[dict]:
    """Return a list to which the trainer adds the batches that it trains on."""
    batches = []
    compute_loss = trainer.compute_loss

    def recording(model, inputs, *args, **kwargs):
        batches.append({name: column.clone() for name, column in inputs.items()})
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = recording
    return batches


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_equal_those_of_a_plain_loop(tmp_path, accumulate):
    lr = 1e-2
    trainer = make_trainer(
        make_ensemble(),
        tmp_path,
        optim="sgd",
        learning_rate=lr,
        per_device_train_batch_size=12 // accumulate,
        gradient_accumulation_steps=accumulate,
    )
    batches = record_batches(trainer)
    trainer.train()
    assert len(batches) == 2 * accumulate

    expected = make_ensemble().train()
    optimizer = torch.optim.SGD(expected.parameter_groups(lr=lr, weight_decay=0.0))
    for first in range(0, len(batches), accumulate):
        optimizer.zero_grad()
        for batch in batches[first : first + accumulate]:
            loss = embens.objective(expected(**without_labels(batch)), batch["labels"])
            (loss / accumulate).backward()
        optimizer.step()

    weights = trainer.model.state_dict()
    for name, expected_weight in expected.state_dict().items():
        torch.testing.assert_close(weights[name], expected_weight, msg=name)


def test_predictions_have_rows_first_and_losses_are_means_over_members(tmp_path):
    model = make_ensemble(trunk="frozen").eval()
    columns = make_columns()
    trainer = make_trainer(model, tmp_path, per_device_eval_batch_size=5)

    result = trainer.predict(split_rows(columns))

    assert result.predictions.shape == (ROWS, MEMBERS, CLASSES)
    prediction = Prediction(torch.tensor(result.predictions).transpose(0, 1))
    expected = embens.predict(model, without_labels(columns))
    torch.testing.assert_close(prediction.probabilities, expected.probabilities)
    losses = embens.metrics.member_nll(prediction.members, columns["labels"])
    assert result.metrics["test_loss"] == pytest.approx(float(losses.mean()), rel=1e-4)


def test_rows_are_predicted_with_and_without_labels(tmp_path):
    columns = make_columns()
    trainer = make_trainer(make_ensemble().eval(), tmp_path, per_device_eval_batch_size=5)

    with_labels = trainer.predict(split_rows(columns)).predictions
    unlabelled = trainer.predict(split_rows(without_labels(columns))).predictions

    assert unlabelled == pytest.approx(with_labels, abs=1e-6)


def test_several_columns_of_labels_are_used_and_all_outputs_have_rows_first(tmp_path):
    config = bert().config
    config.num_labels = 2
    model = embens.adapt(transformers.BertForQuestionAnswering(config), MEMBERS).eval()
    columns = make_columns()
    starts = columns["labels"]
    ends = starts + 2
    spans = {**without_labels(columns), "start_positions": starts, "end_positions": ends}
    cross_entropy = torch.nn.functional.cross_entropy

    def criterion(outputs, labels):
        start_loss = cross_entropy(outputs.start_logits, labels[0])
        end_loss = cross_entropy(outputs.end_logits, labels[1])
        return start_loss + end_loss

    trainer = make_trainer(
        model, tmp_path, criterion, label_names=["start_positions", "end_positions"]
    )
    result = trainer.predict(split_rows(spans))

    start_logits, end_logits = (torch.tensor(logits) for logits in result.predictions)
    losses = []
    for a in range(MEMBERS):
        start_loss = cross_entropy(start_logits[:, a], starts)
        end_loss = cross_entropy(end_logits[:, a], ends)
        losses.append(float(start_loss + end_loss))
    assert result.metrics["test_loss"] == pytest.approx(sum(losses) / MEMBERS, rel=1e-4)


def test_plain_network_raises_type_error(tmp_path):
    with pytest.raises(TypeError, match="expected an ensemble"):
        make_trainer(bert(), tmp_path)


def test_frozen_trunk_is_not_trained_and_its_ensemble_can_be_saved(tmp_path):
    model = make_ensemble(by="low_rank", trunk="frozen")
    shared_before = [parameter.detach().clone() for parameter in model.shared_parameters()]
    trainer = make_trainer(model, tmp_path, per_device_train_batch_size=8, learning_rate=1e-2)

    trainer.train()

    trained = set()
    for group in trainer.optimizer.param_groups:
        trained.update(id(parameter) for parameter in group["params"])
    assert trained == {id(parameter) for parameter in model.individual_parameters()}
    for parameter, before in zip(model.shared_parameters(), shared_before, strict=True):
        assert torch.equal(parameter, before)

    model.save_pretrained(tmp_path / "folder")
    loaded = embens.load(tmp_path / "folder", bert())
    inputs = without_labels(make_columns())
    expected = embens.predict(model, inputs).probabilities
    torch.testing.assert_close(embens.predict(loaded, inputs).probabilities, expected)


def test_checkpoint_resumes_to_the_same_weights(tmp_path):
    options = {
        "per_device_train_batch_size": 6,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    uninterrupted = make_trainer(make_ensemble(), tmp_path, **options)
    uninterrupted.train()

    resumed = make_trainer(make_ensemble(), tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    weights = resumed.model.state_dict()
    for name, expected_weight in uninterrupted.model.state_dict().items():
        torch.testing.assert_close(weights[name], expected_weight, msg=name)


def test_custom_criterion_takes_the_outputs_of_one_member(tmp_path):
    shapes = []

    def criterion(outputs, labels):
        shapes.append(outputs.logits.shape)
        return torch.nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.1)

    trainer = make_trainer(make_ensemble(), tmp_path, criterion, per_device_train_batch_size=12)
    trainer.train()

    assert set(shapes) == {(12, CLASSES)}


def test_stock_trainer_raises_an_error_that_names_the_ensemble_trainer(tmp_path):
    arguments = transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    rows = split_rows(make_columns())
    with pytest.raises(TypeError, match=r"cannot train an ensemble\. Use .*EnsembleTrainer"):
        transformers.Trainer(make_ensemble(), arguments, train_dataset=rows)


def test_members_of_a_prediction_are_the_logits():
    prediction = embens.predict(make_ensemble(by="low_rank"), without_labels(make_columns()))

    assert prediction.members.shape == (MEMBERS, ROWS, CLASSES)
    assert torch.equal(prediction["logits"].members, prediction.members)


def test_a_network_of_transformers_is_saved_without_a_warning(tmp_path):
    model = make_ensemble(trunk="frozen")
    make_trainer(
        model, tmp_path / "run"
    ).train()  # the forward with labels changes the configuration
    with warnings.catch_warnings(action="error"):
        model.save(tmp_path / "model.safetensors", shared=False)
    loaded = embens.load(tmp_path / "model.safetensors", bert()).eval()
    batch = {"input_ids": torch.ones(2, TOKENS, dtype=torch.int64)}
    torch.testing.assert_close(loaded(**batch).logits, model.eval()(**batch).logits)
