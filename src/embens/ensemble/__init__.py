"""An ensemble: one network whose members run through it together, an ordinary module.

``plan`` says what makes it out of a reference, ``surgery`` carries that out, ``layers`` are what is
put in, ``run`` owns a pass, ``wrapping`` takes members out again, ``storage`` keeps it in a file.
"""

from embens.ensemble.module import EmbeddedEnsemble

__all__ = ["EmbeddedEnsemble"]
