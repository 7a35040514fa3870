"""Fixtures of the tests of files."""

import pytest


@pytest.fixture
def path(tmp_path):
    """The path of a file that does not exist yet."""
    return tmp_path / "file.txt"
