"""The text of an `ExchangeError`, from what a rank can know after a failure."""

from __future__ import annotations

import pickle

from spanwise.exchange.failure import ExchangeError, Findings, Report, describe, lost_ranks

HERE = Report("all-to-all of K/V", 0.5, "Connection closed by peer")
WORLD = (0, 1, 2, 3)


def test_who_is_gone_and_who_is_silent() -> None:
    found = Findings(reports={2: HERE, 0: HERE}, closed=(3,), silence=5.0)
    assert lost_ranks(found, rank=2, num_ranks=4) == (1, 3)
    assert describe(found, 2, WORLD, "'cp'") == (
        "all-to-all of K/V failed on rank 2 of 4, group 'cp', after 0.5 s; lost: rank 3, connection closed from there: "
        "the process has ended; lost: rank 1, no word within 5.0 s: the process or its host has ended, is stuck, or is "
        "busy elsewhere; failed as well: rank 0. torch said: Connection closed by peer"
    )


def test_who_reported_is_not_lost_though_its_connection_is_closed() -> None:
    assert lost_ranks(Findings(reports={0: HERE, 1: HERE}, closed=(1, 3)), rank=0, num_ranks=4) == (2, 3)


def test_global_ranks_are_named_where_they_differ() -> None:
    text = describe(Findings(reports={1: HERE}, closed=(0, 2), silence=5.0), 1, (4, 6, 8), "'cp'")
    assert "failed on rank 1 (global rank 6) of 3" in text
    assert "lost: ranks 0 (global rank 4), 2 (global rank 8), connection closed" in text


def test_without_a_store_only_closed_connections_tell() -> None:
    gone = Findings(reports={1: HERE}, closed=(0,), trouble="the group's store is gone")
    assert lost_ranks(gone, rank=1, num_ranks=4) == (0,)
    assert "could not tell each other more: the group's store is gone" in describe(gone, 1, WORLD, "'cp'")
    nothing = Findings(reports={1: HERE}, trouble="the group's store is gone")
    assert lost_ranks(nothing, rank=1, num_ranks=4) == ()
    text = describe(nothing, 1, WORLD, "'cp'")
    assert "; lost:" not in text
    assert "could not tell each other who is lost: the group's store is gone" in text


def test_late_ranks_and_other_collectives() -> None:
    early = Report("all-gather of K/V", 30.0, "Timed out waiting 30000ms")
    text = describe(Findings(reports={0: early, 1: HERE}), 1, (0, 1), "'cp'")
    assert "rank 0 failed in another collective, all-gather of K/V" in text
    assert "rank 1 came last and had waited 0.5 s" in text
    assert "rank 0 failed first, after 30.0 s: Timed out waiting 30000ms" in text


def test_the_error_travels_between_processes() -> None:
    error = ExchangeError("text")
    error.lost, error.lost_global = (1,), (5,)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.lost, again.lost_global) == ("text", (1,), (5,))
