"""The ensemble: its module, the merged executor, files and export."""

from embens.ensemble.module import EmbeddedEnsemble

__all__ = ["EmbeddedEnsemble"]
