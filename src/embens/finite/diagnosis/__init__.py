"""Diagnosis before training: will members differ, how many have room, what is wrong."""

from embens.finite.diagnosis.diagnose import diagnose
from embens.finite.diagnosis.measurement import Budget
from embens.finite.diagnosis.report import Diagnosis, Finding

__all__ = ["Budget", "Diagnosis", "Finding", "diagnose"]
