"""The text of an `ExchangeError`, from what a rank can know after a failure."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from spanwise.attention import call_log
from spanwise.attention.failure import ExchangeError, Report, explanation

WORLD = (0, 1, 2, 3)


def report(what: str = "all-to-all of K/V", ranks: Sequence[int] = WORLD, group: str = "group 'cp'") -> Report:
    return Report(what, f"{group} of {len(ranks)} ranks, after 0.5 s", "Connection closed by peer", ranks)


def test_who_is_silent() -> None:
    lost, text = explanation(2, {2: report(), 0: report()}, {3}, "")
    assert lost == (1, 3)
    assert text == (
        "all-to-all of K/V failed on rank 2, group 'cp' of 4 ranks, after 0.5 s; lost: ranks 1, 3, no word within 5.0 "
        "s: the process or its host has ended, is stuck or busy; failed as well: rank 0 in all-to-all of K/V, group "
        "'cp' of 4 ranks, after 0.5 s: Connection closed by peer. torch said: Connection closed by peer"
    )


def test_ranks_of_other_groups_lead_to_the_lost_one() -> None:
    """A mesh of 2 x 2 x 2 whose rank 7 is lost: rank 0 waits for 1, that for 3, and that for 7."""
    reports = {
        0: report("all-to-all of heads of q", (0, 1), group="group 'inner'"),
        1: report("hop 1 of 1 of K/V", (1, 3), group="group 'outer'"),
        3: report("all-reduce of the loss", (3, 7), group="group 'dp'"),
    }
    lost, text = explanation(0, reports, set(), "")
    assert lost == (7,)
    assert "rank 1 in hop 1 of 1 of K/V, group 'outer'" in text and "rank 3 in all-reduce of the loss" in text


def test_without_a_store_only_connections_tell() -> None:
    lost, text = explanation(1, {1: report()}, {0}, "the group's store is gone")
    assert lost == (0,)
    assert "lost: rank 0, whose connection is closed" in text
    assert "could not tell each other more: the group's store is gone" in text
    lost, text = explanation(1, {1: report()}, set(), "the group's store is gone")
    assert lost == () and "lost:" not in text and "the group's store is gone" in text


def test_nobody_is_lost() -> None:
    lost, text = explanation(1, {0: report(ranks=(0, 1)), 1: report(ranks=(0, 1))}, set(), "")
    assert lost == () and "all ranks are there" in text


def test_the_error_travels_between_processes() -> None:
    error = ExchangeError("text")
    error.lost, error.lost_global = (1,), (5,)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.lost, again.lost_global) == ("text", (1,), (5,))


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


def test_connections_are_closed_though_a_peer_has_closed_its_own() -> None:
    """Only a send that times out closes those to the others; without one, a rank waited for them until its timeout."""
    peers = Peers()
    cut, open_sends = call_log.probe([(peers, range(3))])
    call_log.close(open_sends)
    assert peers.waited == [0, 1] and not cut
