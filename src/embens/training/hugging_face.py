"""The ``Trainer`` of transformers, for ensembles; imported from here, by those who have it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import Trainer

from embens.ensemble import EmbeddedEnsemble
from embens.objective import logits_of, objective


class EnsembleTrainer(Trainer):
    """A Trainer whose ``model`` is an ensemble; all else is as in transformers.

    The loss is the sum over members in training, their mean in evaluation; a ``compute_loss_func``
    is a criterion of one member's outputs and the labels, of several ``label_names`` a tuple of
    them. Predictions are ``(row, member, class)``: Trainer joins batches along the first axis.
    """

    loss_is_scaled_for_ga = False  # a mean over the rows of a batch

    def __init__(self, model: EmbeddedEnsemble, args: Any = None, **options: Any):
        if not isinstance(model, EmbeddedEnsemble):
            raise TypeError(f"model: expected an ensemble (embens.adapt(…)); got {type(model)}")
        self.ensemble, self.criterion = model, options.pop("compute_loss_func", None)
        super().__init__(model, args, **options)
        self.model_accepts_loss_kwargs = False
        self.label_names = self.args.label_names or ["labels"]
        taken = inspect.signature(model.network.forward).parameters
        self._signature_columns = [*taken, "label", "label_ids", *self.label_names]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.ensemble)  # type: ignore[arg-type]
            make = functools.partial(kind, **options)
            rates = {"lr": self.args.learning_rate, "weight_decay": self.args.weight_decay}
            self.optimizer = make(self.ensemble.parameter_groups(**rates, optimizer=make))
        return self.optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None) -> Any:
        labels = tuple(inputs[name] for name in self.label_names)
        outputs = model(**{k: v for k, v in inputs.items() if k not in self.label_names})
        loss = objective(outputs, labels[0] if len(labels) == 1 else labels, self.criterion)
        loss = loss if model.training else loss / self.ensemble.members
        return (loss, _rows_first(lambda: outputs)) if return_outputs else loss

    def prediction_step(self, model, inputs, *args: Any, **options: Any) -> Any:
        if any(inputs.get(name) is None for name in self.label_names):  # then there is no loss
            model = functools.partial(_rows_first, model)
        return super().prediction_step(model, inputs, *args, **options)  # type: ignore[arg-type]


def _rows_first(model: Callable[..., Any], **inputs: Any) -> Any:
    moved = tree_map(lambda v: v.movedim(0, 1), logits_of(model(**inputs)))
    return {"logits": moved} if isinstance(moved, Tensor) else moved
