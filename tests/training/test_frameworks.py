"""An ensemble is an ordinary module: a plain loop, Lightning and skorch train it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from training import problem

import embens
from embens import metrics


def test_a_plain_loop_of_twenty_lines_trains_an_ensemble():
    x, y = problem.data(200)
    net = problem.reference()
    ensemble = embens.batch_ensemble(net, members=4)
    optimizer = torch.optim.SGD(
        ensemble.parameter_groups(lr=0.05, modulation_lr=0.25), momentum=0.9
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    for _ in range(20):
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = embens.objective(ensemble(inputs), target)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(ensemble.parameters(), 5.0)
            optimizer.step()
        scheduler.step()

    assert metrics.ensemble_accuracy(ensemble(x), y) > 0.9


def groups_of(ensemble: embens.EmbeddedEnsemble) -> list[dict]:
    return ensemble.parameter_groups(lr=0.05, gamma=2.0)


def collective() -> embens.EmbeddedEnsemble:
    return problem.ensemble(p=0.9)


def expected_after_one_epoch(batch_size: int) -> embens.EmbeddedEnsemble:
    ensemble = collective()
    optimizer = torch.optim.SGD(groups_of(ensemble), momentum=0.9)
    for x, y in zip(*(t.split(batch_size) for t in problem.data()), strict=True):
        optimizer.zero_grad()
        embens.objective(ensemble(x), y).backward()
        optimizer.step()
    return ensemble


def test_lightning_trains_an_ensemble_with_the_same_objective(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.ensemble = collective()

        def training_step(self, batch, _):
            x, y = batch
            return embens.objective(self.ensemble(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(groups_of(self.ensemble), momentum=0.9)

    module = Module()
    loader = DataLoader(TensorDataset(*problem.data()), batch_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)
    expected = expected_after_one_epoch(16)
    for name, tensor in problem.weights(expected).items():
        torch.testing.assert_close(module.ensemble.state_dict()[name], tensor)


def test_skorch_trains_an_ensemble_with_the_same_objective():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        skorch = pytest.importorskip("skorch")

    class Net(skorch.NeuralNet):
        def get_loss(self, y_pred, y_true, X=None, training=False):
            return embens.objective(y_pred, y_true)

        def initialize_optimizer(self, triggered_directly=None):
            self.optimizer_ = torch.optim.SGD(groups_of(self.module_), momentum=0.9)
            return self

    x, y = problem.data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = Net(
            collective,
            criterion=torch.nn.CrossEntropyLoss,
            lr=0.05,
            batch_size=16,
            max_epochs=1,
            train_split=None,
            verbose=0,
        )
        net.fit(x, y)
    expected = expected_after_one_epoch(16)
    for name, tensor in problem.weights(expected).items():
        torch.testing.assert_close(net.module_.state_dict()[name], tensor)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_whole_step_compiles_with_the_objective_in_it():
    torch._dynamo.reset()
    ensemble = collective()

    def loss(x, y):
        outputs = ensemble(x)
        return embens.objective(outputs, y) + 0.1 * outputs.square().mean()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    x, y = problem.data(16)
    gradients = []
    for function in (loss, compiled):
        ensemble.zero_grad()
        function(x, y).backward()
        gradients.append([p.grad.clone() for p in ensemble.parameters()])
    for plain, fast in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-6)


def test_code_that_sets_rates_finds_the_factor_of_gamma_in_the_group():
    """As the gotchas say: a scheduler with absolute rates is told the rates of each group."""
    ensemble = collective()
    optimizer = torch.optim.SGD(groups_of(ensemble), momentum=0.9)
    highest = [0.1 * group["gamma_factor"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, highest, total_steps=10)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
        shared, modulations = (group["lr"] for group in optimizer.param_groups)
        assert shared == pytest.approx(modulations * 2 / 3)
