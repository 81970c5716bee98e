"""The text of an `ExchangeError`, from what a rank can know after a failure."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from spanwise import _torch
from spanwise.attention.exchange import findings
from spanwise.attention.exchange.errors import ExchangeError
from spanwise.attention.exchange.findings import Findings, Report, describe, lost_ranks

WORLD = (0, 1, 2, 3)


def report(
    what: str = "all-to-all of K/V", ranks: Sequence[int] = WORLD, closed: Sequence[int] = (), **kw: Any
) -> Report:
    kw = {"seconds": 0.5, "said": "Connection closed by peer", "group": "cp"} | kw
    return Report(what, ranks=ranks, closed=closed, label=f"group '{kw['group']}'", **kw)


def test_who_is_gone_and_who_is_silent() -> None:
    found = Findings(2, {2: report(closed=(3,)), 0: report()}, silence=5.0)
    assert lost_ranks(found) == (1, 3)
    assert describe(found) == (
        "all-to-all of K/V failed on rank 2 of 4, group 'cp', after 0.5 s; lost: rank 3, connection closed from there: "
        "the process has ended; lost: rank 1, no word within 5.0 s: the process or its host has ended, is stuck, or is "
        "busy elsewhere; failed as well: rank 0. torch said: Connection closed by peer"
    )


def test_who_reported_is_not_lost_though_its_connection_is_closed() -> None:
    assert lost_ranks(Findings(0, {0: report(closed=(1, 3)), 1: report()})) == (2, 3)


def test_global_ranks_are_named_where_they_differ() -> None:
    found = Findings(6, {6: report(ranks=(4, 6, 8), closed=(4, 8))}, silence=5.0)
    assert lost_ranks(found) == (4, 8)
    text = describe(found)
    assert "failed on rank 1 (global rank 6) of 3" in text
    assert "lost: ranks 0 (global rank 4), 2 (global rank 8), connection closed" in text


def test_where_it_began_is_told_group_by_group() -> None:
    """A mesh of 2 x 2 x 2 whose rank 7 is lost: rank 0 waits for 1, that for 3, and that for 7."""
    own = report("all-to-all of heads of q", (0, 1), (1,), group="inner")
    reports = {
        1: report("hop 1 of 1 of K/V", (1, 3), (3,), group="outer"),
        0: own,
        3: report("all-reduce of the loss", (3, 7), (7,), group="dp"),
    }
    found = Findings(0, reports, earlier=(1, 3), silence=5.0)
    assert lost_ranks(found) == (7,)
    assert describe(found) == (
        "all-to-all of heads of q failed on rank 0 of 2, group 'inner', after 0.5 s; rank 1 failed in hop 1 of "
        "1 of K/V, group 'outer'; global rank 3 failed in all-reduce of the loss, group 'dp'; lost: global "
        "rank 7, connection closed from there: the process has ended; failed as well: rank 1. torch said: Connection "
        "closed by peer"
    )
    stuck = Findings(0, reports | {3: reports[3]._replace(closed=())}, earlier=(1, 3), silence=5.0)
    assert "lost: global rank 7, no word within 5.0 s" in describe(stuck)


def test_without_a_store_only_closed_connections_tell() -> None:
    gone = Findings(1, {1: report(closed=(0,))}, trouble="the group's store is gone")
    assert lost_ranks(gone) == (0,)
    assert "could not tell each other more: the group's store is gone" in describe(gone)
    nothing = Findings(1, {1: report()}, trouble="the group's store is gone")
    assert lost_ranks(nothing) == ()
    text = describe(nothing)
    assert "; lost:" not in text
    assert "could not tell each other who is lost: the group's store is gone" in text


def test_a_connection_that_ended_before_any_rank_failed_is_cut() -> None:
    cut = {2: report(closed=(1,)), 1: report(closed=(2,)), 0: report(), 3: report()}
    text = describe(Findings(0, cut))
    assert "no process has ended: the network has cut the connection of ranks 2, 1." in text
    # Here rank 1 closed the connection itself, when it failed or gave up.
    assert "network" not in describe(Findings(0, {1: report(), 2: report(closed=(1,)), 0: report(), 3: report()}))
    assert "network" not in describe(Findings(0, cut | {3: report(said="Timed out waiting 2000ms")}))


def test_late_ranks_and_other_collectives() -> None:
    early = report("all-gather of K/V", (0, 1), seconds=30.0, said="Timed out waiting 30000ms")
    text = describe(Findings(1, {0: early, 1: report(ranks=(0, 1))}))
    assert "rank 0 failed in another collective, all-gather of K/V" in text
    assert "rank 1 came last and had waited 0.5 s" in text
    assert "rank 0 failed first, after 30.0 s: Timed out waiting 30000ms" in text


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


def test_connections_are_closed_though_a_peer_has_closed_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a send that times out closes those to the others; without one, a rank waited for them until its timeout."""
    peers = Peers()
    monkeypatch.setattr(_torch, "groups", lambda: [peers])
    monkeypatch.setattr(_torch, "is_gloo", lambda group: True)
    findings.close_connections()
    assert peers.waited == [0, 1]
