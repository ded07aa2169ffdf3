"""Fixtures of the tests that run server processes, and the way to the load scripts' parts."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """One compilation cache for all of them: the first process fills it."""
    directory = tmp_path_factory.mktemp("compiled")
    directory.chmod(0o700)
    return directory
