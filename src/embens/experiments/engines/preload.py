"""What workers import, done once in the process that they are forked from.

Nothing is computed here: a fork must not find threads.
"""

import contextlib

import embens.embedding.families
import embens.experiments.job
import embens.experiments.training  # noqa: F401

with contextlib.suppress(ImportError):
    import sklearn.datasets  # noqa: F401
