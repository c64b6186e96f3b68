"""The ranks that the tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.distributed.launcher import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Two ranks."""
    ranks = World(2)
    yield ranks
    ranks.close()
