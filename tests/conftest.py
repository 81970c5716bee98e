"""Settings that every test runs under, and the session's pool of gloo processes."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
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

# Files that share processes, by what their text holds: the pool's, and those forked from a server that imports much.
_SHARED = {"gloo_pool": ("gloo_pool",), "forked": ("tests.scripts", "Processes, started")}
# What takes longest comes first, so that no worker has a long file left when the other is done.
_LONG = ("tests/ranks", "tests/test_dist", "tests/docs", "tests/cli", "tests/attention", "tests/overlap")
_LONG += ("tests/integrations", "tests/recurrence", "tests/benchmarks", "tests/planning")


def _place(item: pytest.Item) -> tuple[int, int]:
    shared, long = list(_SHARED), next((i for i, long in enumerate(_LONG) if item.nodeid.startswith(long)), len(_LONG))
    scope = _shared(item.path)
    return (shared.index(scope) if scope else len(shared), long)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Imported where tests are collected, for the process that only hands them out to workers does without.
    import torch

    from spanwise._torch import COMPILES

    # One thread an operator: the test processes share the cores, and sums come out the same on every machine.
    torch.set_num_threads(1)
    items.sort(key=_place)
    if not COMPILES:
        refused = pytest.mark.skip(reason=f"torch {torch.__version__} refuses compiled calls; it needs 2.12")
        for item in items:
            if item.get_closest_marker("compiles"):
                item.add_marker(refused)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):  # `item.keywords` also has the names of folders, such as the checkout's
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What is imported by now stays: a full garbage collection, one for each `torch._dynamo.reset`, leaves it out."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, all files that share processes are one file: one worker starts them."""
    from xdist.scheduler import LoadFileScheduling

    class OnePool(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return _shared(config.rootpath / file) or file

        def remove_node(self, node: Any) -> str | None:
            # A test that ended its worker is done. xdist's own schedule runs it again until no worker may start.
            units = self.assigned_work[node].values()
            crashed = next((test for unit in units for test, done in unit.items() if not done), None)
            for unit in units:
                unit.update({crashed: True} if crashed in unit else {})
            super().remove_node(node)
            return crashed

    return OnePool(config, log) if config.getoption("dist") == "loadfile" else None


@functools.cache
def _shared(file: Path) -> str:
    """What a file shares with others, of `_SHARED`; empty if nothing."""
    text = file.read_text()
    return next((name for name, words in _SHARED.items() if any(word in text for word in words)), "")


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[GlooPool]:
    """Real gloo processes, started at the first test that asks and reused until the session ends."""
    from tests.ranks.gloo import GlooPool

    with GlooPool(num_ranks=4) as pool:
        yield pool
