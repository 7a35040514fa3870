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
ROWS, TOKENS, CLASSES = 24, 7, 3


def bert() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        **sizes, vocab_size=30, intermediate_size=24, num_labels=CLASSES, max_position_embeddings=16
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return transformers.BertForSequenceClassification(config)


def rows(count: int = ROWS) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 30, (count, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, 4:] = 0
    labels = ids[:, 0] % CLASSES
    columns = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def ensemble(**options) -> embens.EmbeddedEnsemble:
    generator = torch.Generator().manual_seed(1)
    options = {"by": "modulations", "trunk": "trained", **options}
    return embens.adapt(bert(), 3, generator=generator, **options)


def trainer(model: embens.EmbeddedEnsemble, folder, **options) -> EnsembleTrainer:
    losses = {k: options.pop(k) for k in ("compute_loss_func",) if k in options}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        **{"num_train_epochs": 1, "save_strategy": "no", **options},
    )
    return EnsembleTrainer(model, arguments, train_dataset=rows(), eval_dataset=rows(), **losses)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_are_those_of_a_plain_loop(tmp_path, accumulate):
    size, lr = 12 // accumulate, 1e-2
    options = {"optim": "sgd", "learning_rate": lr, "gradient_accumulation_steps": accumulate}
    found = trainer(ensemble(), tmp_path, per_device_train_batch_size=size, **options)
    order = []
    original = found.compute_loss

    def noting(model, inputs, *args, **kwargs):
        order.append({k: v.clone() for k, v in inputs.items()})
        return original(model, inputs, *args, **kwargs)

    found.compute_loss = noting
    found.train()
    expected = ensemble().train()
    optimizer = torch.optim.SGD(expected.parameter_groups(lr=lr, weight_decay=0.0))
    for step in range(2):
        optimizer.zero_grad()
        for batch in order[step * accumulate : (step + 1) * accumulate]:
            inputs = {k: v for k, v in batch.items() if k != "labels"}
            loss = embens.objective(expected(**inputs), batch["labels"])
            (loss / accumulate).backward()
        optimizer.step()
    assert len(order) == 2 * accumulate
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[name], tensor, msg=name)


def test_predictions_have_rows_first_and_losses_are_means_of_members(tmp_path):
    model = ensemble(trunk="frozen").eval()
    found = trainer(model, tmp_path, per_device_eval_batch_size=5)
    result = found.predict(rows())
    columns = {k: torch.stack([row[k] for row in rows()]) for k in rows()[0]}
    inputs = {k: columns[k] for k in ("input_ids", "attention_mask")}
    outputs = embens.predict(model, inputs)
    assert result.predictions.shape == (ROWS, 3, CLASSES)
    mine = Prediction(torch.tensor(result.predictions).transpose(0, 1))
    torch.testing.assert_close(mine.probabilities, outputs.probabilities)
    expected = embens.metrics.member_nll(outputs.mean.new_tensor(mine.members), columns["labels"])
    assert result.metrics["test_loss"] == pytest.approx(float(expected.mean()), rel=1e-4)


def test_rows_without_labels_are_predicted_as_those_with_them(tmp_path):
    found = trainer(ensemble().eval(), tmp_path, per_device_eval_batch_size=5)
    expected = found.predict(rows()).predictions
    bare = [{k: v for k, v in row.items() if k != "labels"} for row in rows()]
    assert found.predict(bare).predictions == pytest.approx(expected, abs=1e-6)


def test_several_columns_of_labels_are_all_used_and_all_outputs_have_rows_first(tmp_path):
    config = bert().config
    config.num_labels = 2
    answering = transformers.BertForQuestionAnswering(config)
    model = embens.adapt(answering, 3).eval()
    spans = [
        {**row, "start_positions": row["labels"], "end_positions": row["labels"] + 2}
        for row in rows()
    ]
    spans = [{k: v for k, v in row.items() if k != "labels"} for row in spans]

    def criterion(outputs, labels):
        heads = outputs.start_logits, outputs.end_logits
        return sum(map(torch.nn.functional.cross_entropy, heads, labels))

    options = {"label_names": ["start_positions", "end_positions"]}
    found = trainer(model, tmp_path, compute_loss_func=criterion, **options)
    result = found.predict(spans)
    starts, ends = (torch.tensor(v).transpose(0, 1) for v in result.predictions)
    loss = torch.nn.functional.cross_entropy
    labels = torch.tensor([int(row["labels"]) for row in rows()])
    expected = [loss(s, labels) + loss(e, labels + 2) for s, e in zip(starts, ends, strict=True)]
    assert result.metrics["test_loss"] == pytest.approx(float(sum(expected)) / 3, rel=1e-4)


def test_a_network_that_is_no_ensemble_is_refused(tmp_path):
    with pytest.raises(TypeError, match="expected an ensemble"):
        trainer(bert(), tmp_path)


def test_groups_have_their_rates_under_adamw_and_a_frozen_trunk_stays(tmp_path):
    model = ensemble(by="low_rank", trunk="frozen")
    shared = [p.detach().clone() for p in model.shared_parameters()]
    found = trainer(model, tmp_path, per_device_train_batch_size=8, learning_rate=1e-2)
    found.train()
    grouped = {id(p) for group in found.optimizer.param_groups for p in group["params"]}
    assert grouped == {id(p) for p in model.individual_parameters()}
    assert all(map(torch.equal, shared, model.shared_parameters()))
    model.save_pretrained(tmp_path / "folder")
    again = embens.load(tmp_path / "folder", bert())
    first = rows(4)
    inputs = {k: torch.stack([row[k] for row in first]) for k in ("input_ids", "attention_mask")}
    expected = embens.predict(model, inputs).probabilities
    torch.testing.assert_close(embens.predict(again, inputs).probabilities, expected)


def test_a_checkpoint_resumes_to_the_same_weights(tmp_path):
    options = {"per_device_train_batch_size": 6, "save_strategy": "steps", "save_steps": 2}
    whole = trainer(ensemble(), tmp_path, **options, learning_rate=1e-2)
    whole.train()
    again = trainer(ensemble(), tmp_path, **options, learning_rate=1e-2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], tensor, msg=name)


def test_a_criterion_of_ones_own_takes_one_members_outputs(tmp_path):
    seen = []

    def criterion(outputs, labels):
        seen.append(outputs.logits.shape)
        return torch.nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.1)

    found = trainer(
        ensemble(), tmp_path, compute_loss_func=criterion, per_device_train_batch_size=12
    )
    found.train()
    assert set(seen) == {(12, CLASSES)}


def test_the_stock_trainer_is_refused_with_the_name_of_ours(tmp_path):
    arguments = transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    with pytest.raises(TypeError, match=r"cannot train an ensemble\. Use .*EnsembleTrainer"):
        transformers.Trainer(ensemble(), arguments, train_dataset=rows())


def test_members_of_a_prediction_are_the_logits():
    model = ensemble(by="low_rank")
    batch = torch.utils.data.default_collate(rows(4))
    prediction = embens.predict(model, {k: v for k, v in batch.items() if k != "labels"})
    assert prediction.members.shape == (3, 4, CLASSES)
    assert torch.equal(prediction["logits"].members, prediction.members)
