"""The text of an `ExchangeError`, from what a rank can know after a failure."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from spanwise.attention import call_log
from spanwise.attention.failure import ExchangeError, Findings, Report

WORLD = (0, 1, 2, 3)


def report(what: str = "all-to-all of K/V", ranks: Sequence[int] = WORLD, **kw: Any) -> Report:
    kw = {"seconds": 0.5, "said": "Connection closed by peer", "group": "group 'cp'"} | kw
    return Report(what, ranks=ranks, **kw)


def test_who_is_silent() -> None:
    found = Findings(2, {2: report(), 0: report()}, cut=frozenset({3}))
    assert found.lost() == (1, 3)
    assert str(found) == (
        "all-to-all of K/V failed on rank 2, group 'cp' of 4 ranks, after 0.5 s; lost: ranks 1, 3, no word within 5.0 "
        "s: the process or its host has ended, is stuck, or is busy elsewhere; failed as well: rank 0 in all-to-all of "
        "K/V, group 'cp'. torch said: Connection closed by peer"
    )


def test_ranks_of_other_groups_lead_to_the_lost_one() -> None:
    """A mesh of 2 x 2 x 2 whose rank 7 is lost: rank 0 waits for 1, that for 3, and that for 7."""
    reports = {
        0: report("all-to-all of heads of q", (0, 1), group="group 'inner'"),
        1: report("hop 1 of 1 of K/V", (1, 3), group="group 'outer'"),
        3: report("all-reduce of the loss", (3, 7), group="group 'dp'"),
    }
    found = Findings(0, reports)
    assert found.lost() == (7,)
    assert str(found) == (
        "all-to-all of heads of q failed on rank 0, group 'inner' of 2 ranks, after 0.5 s; lost: rank 7, no word "
        "within 5.0 s: the process or its host has ended, is stuck, or is busy elsewhere; failed as well: rank 1 in "
        "hop 1 of 1 of K/V, group 'outer'; failed as well: rank 3 in all-reduce of the loss, group 'dp'. torch said: "
        "Connection closed by peer"
    )


def test_without_a_store_only_connections_tell() -> None:
    gone = Findings(1, {1: report()}, trouble="the group's store is gone", cut=frozenset({0}))
    assert gone.lost() == (0,)
    assert "lost: rank 0, whose connection is closed" in str(gone)
    assert "could not tell each other more: the group's store is gone" in str(gone)
    nothing = Findings(1, {1: report()}, trouble="the group's store is gone")
    assert nothing.lost() == () and "; lost:" not in str(nothing)
    assert "could not tell each other who is lost: the group's store is gone" in str(nothing)


def test_late_ranks_and_other_collectives() -> None:
    early = report("all-gather of K/V", (0, 1), seconds=30.0, said="Timed out waiting 30000ms")
    text = str(Findings(1, {0: early, 1: report(ranks=(0, 1))}))
    assert "failed as well: rank 0 in all-gather of K/V, group 'cp'" in text
    assert "rank 1 came last and had waited 0.5 s, rank 0 30.0 s: Timed out waiting 30000ms" in text


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
