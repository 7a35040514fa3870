"""The ``Trainer`` of transformers for ensembles; import it from here (needs transformers)."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import Trainer

from embens.ensemble import EmbeddedEnsemble
from embens.losses import logits_of
from embens.optim import objective


class EnsembleTrainer(Trainer):
    """A transformers ``Trainer`` whose ``model`` is an ensemble.

    The training loss is the sum over members, the evaluation loss their mean. Predictions have the
    shape ``(batch, member, class)``, because ``Trainer`` concatenates batches along the first axis.

    Args:
        model: The ensemble.
        args: ``transformers.TrainingArguments``.
        options: Further arguments of ``Trainer``. ``compute_loss_func`` is a criterion: a function
            of the outputs of one member and the labels (a tuple, if there are several
            ``label_names``).

    Raises:
        TypeError: If the model is not an ensemble.
    """

    loss_is_scaled_for_ga = False  # the loss is a mean over the rows of a batch

    def __init__(self, model: EmbeddedEnsemble, args: Any = None, **options: Any):
        if not isinstance(model, EmbeddedEnsemble):
            kind = type(model).__name__
            raise TypeError(f"model: expected an ensemble (embens.adapt(…)), got {kind}.")
        self.ensemble = model
        # Ensembles raise an error when the Trainer of transformers reads this attribute, since it
        # would train on a wrong loss. An instance attribute hides the check.
        vars(model)["accepts_loss_kwargs"] = False
        self.criterion = options.pop("compute_loss_func", None)
        super().__init__(model, args, **options)
        self.model_accepts_loss_kwargs = False
        self.label_names = self.args.label_names or ["labels"]
        inputs = inspect.signature(model.reference.forward).parameters
        self._signature_columns = [*inputs, "label", "label_ids", *self.label_names]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the optimizer of the training arguments from the ensemble's parameter groups."""
        if self.optimizer is None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.ensemble)  # type: ignore[arg-type]
            make = functools.partial(kind, **options)
            groups = self.ensemble.parameter_groups(
                lr=self.args.learning_rate, weight_decay=self.args.weight_decay, optimizer=make
            )
            self.optimizer = make(groups)
        return self.optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the sum (training) or mean (evaluation) of the members' losses."""
        labels: Any = tuple(inputs[name] for name in self.label_names)
        if len(labels) == 1:
            (labels,) = labels
        features = {name: value for name, value in inputs.items() if name not in self.label_names}
        outputs = model(**features)
        loss = objective(outputs, labels, self.criterion)
        if not model.training:
            loss = loss / self.ensemble.members
        if return_outputs:
            return loss, _batch_first(outputs)
        return loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **options: Any
    ) -> Any:
        """Predict a batch; without labels there is no loss."""

        def predict(**features: Any) -> Any:
            return _batch_first(model(**features))

        network: Callable[..., Any] = model
        if any(inputs.get(name) is None for name in self.label_names):
            network = predict
        return super().prediction_step(network, inputs, *args, **options)  # type: ignore[arg-type]


def _batch_first(outputs: Any) -> dict[str, Any]:
    """Move the member axis behind the batch axis."""
    moved = tree_map(lambda value: value.movedim(0, 1), logits_of(outputs))
    if isinstance(moved, Tensor):
        return {"logits": moved}
    return moved
