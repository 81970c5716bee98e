"""Settings that every test runs under, and the session's pool of gloo processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.ranks.gloo import GlooPool

# No deadline: two shared cores make single examples slow at random. CI draws the same examples on every run, so that
# a red run is red again when it is repeated; a developer's machine goes on looking for new ones.
settings.register_profile(
    "default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# One thread an operator: the test processes share the cores, and sums come out the same on every machine.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[GlooPool]:
    """Real gloo processes, started at the first test that asks and reused until the session ends."""
    from tests.ranks.gloo import GlooPool

    with GlooPool(num_ranks=4) as pool:
        yield pool
