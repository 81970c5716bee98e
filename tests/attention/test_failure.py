"""The text of an `ExchangeError`, from what a rank can know after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from spanwise.attention import call_log
from spanwise.attention.failure import explanation

WORLD = (0, 1, 2, 3)


def report(what: str = "all-to-all of K/V", ranks: Sequence[int] = WORLD) -> tuple[str, Sequence[int]]:
    return f"{what} failed", ranks


# Rank, reports, ranks that are cut off, trouble with the store; lost ranks and parts of the text.
CASES: dict[str, tuple[int, dict[int, Any], set[int], str, tuple[int, ...], tuple[str, ...]]] = {
    "two are silent": (2, {2: report(), 0: report("an all-gather")}, {3}, "", (1, 3), ("ranks 1, 3", "an all-gather")),
    # A mesh of 2 x 2 x 2 whose rank 7 is lost: rank 0 waits for 1, that for 3, and that for 7.
    "ranks of other groups lead to the lost one": (
        0, {0: report("q", (0, 1)), 1: report("a hop", (1, 3)), 3: report("a loss", (3, 7))}, set(), "", (7,),
        ("rank 7", "a hop failed", "a loss failed"),
    ),
    "without a store connections tell": (1, {1: report()}, {0}, "no store", (0,), ("lost: rank 0", "no store")),
    "without both": (1, {1: report()}, set(), "no store", (), ("no store",)),
    "nobody is lost": (1, {0: report(ranks=(0, 1)), 1: report(ranks=(0, 1))}, set(), "", (), ("all ranks are there",)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_lost_ranks(name: str) -> None:
    rank, reports, cut, trouble, lost, parts = CASES[name]
    found, text = explanation(rank, reports, cut, trouble)
    assert found == lost and all(part in text for part in parts), text
    assert text.startswith(reports[rank][0]) and ("lost:" in text) == bool(lost)


class Peers:
    """A group of three: rank 0 has just closed its end, so that a send to it begins and then fails; rank 1 lives."""

    def __init__(self) -> None:
        self.waited: list[int] = []

    def size(self) -> int:
        return 3

    def rank(self) -> int:
        return 2

    def send(self, tensors: Any, peer: int, tag: int) -> Any:
        def wait(timeout: timedelta) -> None:
            self.waited.append(peer)
            raise RuntimeError("Connection closed by peer" if peer == 0 else "Timed out waiting 1ms")

        return SimpleNamespace(wait=wait)


def test_connections_are_closed_though_a_peer_has_closed_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a send that times out closes those to the others; without one, a rank waited for them until its timeout."""
    peers = Peers()
    monkeypatch.setattr(call_log, "logs", lambda: [SimpleNamespace(host=peers, ranks=range(3))])
    cut, open_sends = call_log.probe()
    call_log.close(open_sends)
    assert peers.waited == [0, 1] and not cut
