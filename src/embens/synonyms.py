"""Hints for arguments that other libraries have, or name differently.

A hint follows "NAME has no argument 'argument'"; see :func:`embens.checks.unknown_argument`.
"""

MEMBERS = (
    "n_members num_members nb_members ensemble_size n_models num_models n_estimators "
    "num_estimators n_networks num_networks M n size"
)
SAMPLES = "n_samples num_samples samples mc_samples n_passes passes"
EXAMPLE_INPUT = "example example_inputs input_example sample_input dummy_input input_shape"
DEVICE = ". Move the ensemble, and the batches follow it: ensemble.to(device)."
GENERATOR = ". Pass generator=torch.Generator().manual_seed(seed)."
TRAINING = ". It belongs to training: pass it to embens.fit."
LEARNING_RATE = (
    ". It belongs to training: embens.fit(ensemble, …, lr=…), or "
    "ensemble.parameter_groups(lr=…) in your own loop."
)
DROPOUT = ". Pass law=laws.Bernoulli(keep), where keep is the probability of keeping a unit."
FAMILIES = (
    ". The families differ by function: embens.batch_ensemble, mc_dropout, masksembles, "
    "last_layer_dropout, low_rank, adapt and independent."
)
NO_PROGRESS = ". It prints no progress; leave it out."


def renamed(argument: str, names: str) -> dict[str, str]:
    """Return a hint for each name that other libraries use for an argument.

    Args:
        argument: Name of the argument.
        names: The other names, separated by spaces.

    Returns:
        The hints by name.

    Example:
        >>> renamed("members", "n_members ensemble_size")["n_members"]
        "; did you mean 'members'?"
    """
    return dict.fromkeys(names.split(), f"; did you mean {argument!r}?")


COMMON = {
    **renamed("members", MEMBERS),
    **renamed("reference", "model net network module base_model base_estimator estimator backbone"),
    **dict.fromkeys(("device", "devices", "accelerator"), DEVICE),
    **dict.fromkeys(("seed", "random_state", "random_seed", "manual_seed"), GENERATOR),
    **dict.fromkeys(("lr", "learning_rate", "modulation_lr", "gamma"), LEARNING_RATE),
    **dict.fromkeys(("epochs", "batch_size", "optimizer", "criterion", "loss"), TRAINING),
    **dict.fromkeys(("verbose", "progress"), NO_PROGRESS),
    "task": ". It belongs to prediction: pass it to embens.predict or embens.evaluate.",
    "family": FAMILIES,
    "method": FAMILIES,
}
"""Hints of all families."""

EMBEDDING = {
    **COMMON,
    **renamed("example_input", EXAMPLE_INPUT),
    **renamed("sites", "layers modules target_modules layer_names"),
}
"""Hints of families with sites."""

EMBED = {
    **EMBEDDING,
    "law": ". Pass pre= and post=, the laws of outputs and inputs of layers.",
    "p": ". Pass pre=laws.Signs(p) and post=laws.Signs(p), or use embens.batch_ensemble.",
    "rank": ". Use embens.low_rank(reference, members, rank).",
    "overlap": ". Use embens.masksembles(reference, members, overlap).",
}
"""Hints of :func:`embens.embed`."""

BATCH_ENSEMBLE = {
    **EMBEDDING,
    **dict.fromkeys(("pre", "post"), ". Pass law= for both, or use embens.embed(pre=…, post=…)."),
    "rank": ". Use embens.low_rank(reference, members, rank).",
}
"""Hints of :func:`embens.batch_ensemble`."""

MC_DROPOUT = {
    **EMBEDDING,
    **renamed("members", SAMPLES),
    **dict.fromkeys("p dropout dropout_rate rate prob keep keep_prob drop_prob".split(), DROPOUT),
}
"""Hints of :func:`embens.mc_dropout`."""

LAST_LAYER_DROPOUT = {
    **MC_DROPOUT,
    **dict.fromkeys(
        ("sites", "layers", "modules", "target_modules", "layer_names"),
        ". It masks the input of the last layer; for other layers use embens.mc_dropout(sites=…).",
    ),
}
"""Hints of :func:`embens.last_layer_dropout`."""

MASKSEMBLES = {**EMBEDDING, **renamed("overlap", "scale S")}
"""Hints of :func:`embens.masksembles`."""

INDEPENDENT = {**COMMON, **renamed("initialise", "initialize init init_fn reset")}
"""Hints of :func:`embens.independent`."""

LOW_RANK = {
    **EMBEDDING,
    **renamed("rank", "r lora_rank"),
    **renamed("scale", "alpha lora_alpha std"),
}
"""Hints of :func:`embens.low_rank`."""

ADAPT = {
    **COMMON,
    **renamed("example_input", EXAMPLE_INPUT),
    **renamed("by", "kind"),
    "rank": ". Members of adapt have rank 4. For another one use embens.low_rank(reference, "
    'members, rank, kind="additive", shared="frozen").',
    **dict.fromkeys(
        ("sites", "layers", "modules", "target_modules", "layer_names"),
        '. Use embens.low_rank(reference, members, kind="additive", shared="frozen", sites=…).',
    ),
}
"""Hints of :func:`embens.adapt`."""

RATES = {
    **renamed("lr", "learning_rate eta base_lr"),
    **renamed("weight_decay", "wd l2 decay"),
    **dict.fromkeys(
        ("momentum", "nesterov", "betas", "eps"),
        ". Pass it to the optimizer: torch.optim.SGD(ensemble.parameter_groups(…), momentum=…).",
    ),
}
"""Hints of ``parameter_groups``."""

CRITERION = renamed("criterion", "loss loss_fn loss_function loss_func")
"""Hints of functions that take a criterion."""

PREDICTION = {
    **renamed("members", SAMPLES),
    **renamed("members", MEMBERS),
    **dict.fromkeys(("device", "devices", "accelerator"), DEVICE),
    **dict.fromkeys(("verbose", "progress"), NO_PROGRESS),
    **dict.fromkeys(("seed", "random_state"), GENERATOR),
    **dict.fromkeys(
        ("num_workers", "shuffle", "collate_fn"),
        ". Pass a DataLoader with this option in place of the data.",
    ),
    **dict.fromkeys(
        ("return_std", "return_cov"), ". The prediction has .mean, .std and .interval(level)."
    ),
    **dict.fromkeys(
        ("metric", "metrics", "criterion", "loss", "loss_fn"),
        ". embens.evaluate returns all scores of the task in a dict.",
    ),
    "batch": "; did you mean 'batch_size'?",
    "y": ". Pass inputs alone to embens.predict, and (x, y) to embens.evaluate.",
}
"""Hints of :func:`embens.predict` and :func:`embens.evaluate`."""

DIAGNOSE = {
    **CRITERION,
    **renamed("target", "y labels"),
    **dict.fromkeys(("device", "devices"), DEVICE),
    **dict.fromkeys(("verbose", "progress"), NO_PROGRESS),
    **dict.fromkeys(
        (*SAMPLES.split(), "members"), ". Pass budget=embens.finite.Budget(samples=…, members=…)."
    ),
    **dict.fromkeys(
        ("lr", "learning_rate"), ". It suggests rates; pass optimizer= and gamma= to check them."
    ),
}
"""Hints of :func:`embens.diagnose`."""
