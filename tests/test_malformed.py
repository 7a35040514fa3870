"""Damaged and forged files of every kind are refused by name, or read as they are.

Damaged: flipped bits, truncation, insertions, pickles. Forged: changed fields and tensors with a
valid checksum. Nothing is executed, and memory stays small.
"""

import forgery
import mutation
import pytest


@pytest.mark.parametrize("kind", mutation.KINDS)
def test_a_damaged_file_is_refused_or_unchanged(kind, tmp_path):
    counts = mutation.mutate_often(kind, tmp_path, 12)
    assert counts["refused"] > 1
    assert counts["after"] - counts["before"] < 1000  # megabytes of memory


@pytest.mark.parametrize("kind", forgery.KINDS)
def test_a_forged_file_is_refused_or_works(kind, tmp_path):
    counts = forgery.forge_often(kind, tmp_path, 12)
    assert counts["refused"] > 3
    assert counts["after"] - counts["before"] < 1000


@pytest.mark.long
@pytest.mark.parametrize("kind", mutation.KINDS)
def test_1000_damaged_files_execute_nothing_and_use_little_memory(kind, tmp_path):
    counts = mutation.mutate_in_process(kind, tmp_path, 1000)
    assert counts["refused"] > 250
    assert counts["after"] < 1000  # megabytes, including torch


@pytest.mark.long
@pytest.mark.parametrize("kind", [*forgery.MORE_ENSEMBLES, *forgery.MORE_RUNS])
def test_files_of_other_families_optimizers_and_schedules_are_refused_or_work(kind, tmp_path):
    counts = forgery.forge_in_process(kind, tmp_path, 300)
    assert counts["refused"] > 75
    assert counts["after"] < 1000


@pytest.mark.long
@pytest.mark.parametrize("kind", forgery.KINDS)
def test_1000_forged_files_execute_nothing_and_use_little_memory(kind, tmp_path):
    counts = forgery.forge_in_process(kind, tmp_path, 1000)
    assert counts["refused"] > 250
    assert counts["after"] < 1000
