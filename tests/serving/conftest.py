"""Fixtures of the tests that run server processes."""

import pytest


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """One compilation cache for all of them: the first process fills it."""
    directory = tmp_path_factory.mktemp("compiled")
    directory.chmod(0o700)
    return directory
