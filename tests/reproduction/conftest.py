"""Fixtures for experiments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reproduction import problem

FOLDER = Path(__file__).parent
LAGGING = "ignore:.* of its running statistics are older"
"""Experiments of one epoch are too short for BatchNorm."""


def pytest_collection_modifyitems(items):
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(LAGGING))


@pytest.fixture(scope="session")
def cifar_folder(tmp_path_factory):
    return problem.write_cifar(tmp_path_factory.mktemp("cifar"), train=256, test=32)


@pytest.fixture
def small_cifar(cifar_folder, monkeypatch):
    """A folder of a few random records, where the data are looked for."""
    monkeypatch.setenv("EMBENS_DATA", str(cifar_folder))
    return cifar_folder
