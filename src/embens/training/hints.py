"""Hints for arguments that ``fit`` does not have."""

_GROUPS = ". Pass optimizer=torch.optim.SGD(ensemble.parameter_groups(lr=…, {}=…), momentum=0.9)."
_DEVICE = ". Move the ensemble, and the batches follow it: ensemble.to(device)."
_CALLBACK = ". Pass callbacks=[embens.training.{}]."
_SAMPLE_WEIGHT = ". Pass it with the data: train=(x, y, sample_weight)."
_CLASS_WEIGHT = ". Pass criterion=nn.CrossEntropyLoss(weight=class_weight)."
_METRICS = (
    ". The history has the metrics of the task; choose the best epoch by one of them with "
    'callbacks=[embens.training.KeepBest("nll")].'
)
REMOVED_ARGUMENTS = {
    "modulation_lr": _GROUPS.format("modulation_lr"),
    "weight_decay": _GROUPS.format("weight_decay"),
    "modulation_weight_decay": _GROUPS.format("modulation_weight_decay"),
    "batch": _CALLBACK.format('Batches("own")') + ' "split" is the other choice.',
    "of": _CALLBACK.format('Objective(of="mean")'),
    "chunk": _CALLBACK.format("Objective(chunk=…)"),
    "metric": _CALLBACK.format("KeepBest(metric=…)"),
    "maximise": _CALLBACK.format("KeepBest(metric=…, maximise=…)"),
    "patience": _CALLBACK.format("EarlyStopping(patience)"),
    "keep": _CALLBACK.format("KeepLast()") + " The best epoch is kept by default.",
    "clip": _CALLBACK.format("ClipGradients(norm)"),
    "accumulate": _CALLBACK.format("Accumulate(batches)"),
    "autocast": _CALLBACK.format("Autocast(dtype)"),
    "compile": _CALLBACK.format("Compile()"),
    "schedule_by": _CALLBACK.format("ScheduleEveryStep()"),
    "average": _CALLBACK.format("WeightAveraging(epochs)"),
    "time_limit": _CALLBACK.format("TimeLimit(seconds)"),
    "checkpoint": _CALLBACK.format("Checkpoint(folder)"),
    "every": _CALLBACK.format("Checkpoint(folder, every=…)"),
    "each": ". Per-member hyperparameters are not part of the library; write a loop around "
    "embens.objective.",
}
"""Hints for arguments that callbacks or the optimizer replace."""

_SYNONYMS = {
    "epochs": "max_epochs n_epochs num_epochs nb_epochs num_train_epochs",
    "lr": "learning_rate eta base_lr",
    "criterion": "loss loss_fn loss_function loss_func",
    "validation": "val valid valid_data val_data validation_data val_loader valid_loader eval_set "
    "eval_data validation_set val_set test",
    "train": "data train_data train_loader training_data train_set dataset dataloader loader",
    "progress": "verbose verbosity progress_bar show_progress",
    "scheduler": "lr_scheduler schedule",
    "seed": "random_state random_seed generator",
    "optimizer": "optimiser opt",
}
"""Names that other libraries use, by the argument of ``fit``."""


def _synonym_hints() -> dict[str, str]:
    """Return a hint for each name that other libraries use."""
    hints = {}
    for argument, names in _SYNONYMS.items():
        for name in names.split():
            hints[name] = f"; did you mean {argument!r}?"
    return hints


HINTS = {
    **REMOVED_ARGUMENTS,
    **_synonym_hints(),
    "verbose": "; use progress=True or progress=False.",
    "device": _DEVICE,
    **dict.fromkeys(("accelerator", "devices", "gpu", "gpus"), _DEVICE),
    "x": ". Pass inputs and targets together: train=(x, y).",
    "X": ". Pass inputs and targets together: train=(X, y).",
    "y": ". Pass inputs and targets together: train=(x, y).",
    **dict.fromkeys(("sample_weight", "sample_weights", "weights"), _SAMPLE_WEIGHT),
    **dict.fromkeys(("class_weight", "class_weights"), _CLASS_WEIGHT),
    **dict.fromkeys(("metrics", "eval_metric", "monitor"), _METRICS),
    "momentum": ". Pass optimizer=functools.partial(torch.optim.SGD, momentum=…).",
    "shuffle": ". Tensors and data sets are shuffled; pass a DataLoader for another order.",
    "validation_split": ". Split the data: train=(x[:n], y[:n]), validation=(x[n:], y[n:]).",
    "num_workers": ". Pass a DataLoader with num_workers=…",
    "logger": _CALLBACK.format("Log(writer)"),
    "early_stopping": _CALLBACK.format("EarlyStopping(patience)"),
    "grad_clip": _CALLBACK.format("ClipGradients(norm)"),
    "gradient_clip_val": _CALLBACK.format("ClipGradients(norm)"),
    "precision": _CALLBACK.format("Autocast(dtype)"),
    "amp": _CALLBACK.format("Autocast(dtype)"),
}
"""What follows "fit has no argument 'name'"."""
