"""Starting and ending ranks: failures name their rank, Ctrl-C stops politely, nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spanwise.train.launch import Rank, RankFailure, StopRequest, launch, torchrun_rank
from tests.limits import HANG
from tests.ranks.train_runs import forked_ranks


@pytest.fixture
def ranks_start_fast() -> Iterator[None]:
    with forked_ranks():
        yield


def _raises_on_one(rank: Rank) -> int:
    if rank.rank == 1:
        raise KeyError("the first error")
    # The launcher's folder holds what rank 1 reports; only then is this the second error, however slow it was.
    while not Path(rank.init_method.removeprefix("file://")).with_name("rank-1").exists():
        time.sleep(0.01)
    raise ConnectionError("because rank 1 is gone")


def _dies_on_one(rank: Rank) -> int:
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(HANG)
    return 0


def _until_asked(rank: Rank, folder: str) -> int:
    stop = StopRequest(rank)
    Path(folder, str(rank.rank)).touch()
    while not stop.asked():
        time.sleep(0.02)
    return 128 + stop.asked()


def _returns(rank: Rank, text: str) -> int:
    assert text == "argument"
    return 0


@pytest.mark.slow
def test_ranks_run_with_their_arguments() -> None:
    assert launch(_returns, "argument", ranks=2) == 0


def test_the_first_failure_is_shown_with_its_rank() -> None:
    with pytest.raises(RankFailure) as caught:
        launch(_raises_on_one, ranks=2)
    text = str(caught.value)
    assert text.startswith("rank 1 failed:\nTraceback")
    assert "KeyError: 'the first error'" in text and "_raises_on_one" in text


def _never_returns(rank: Rank, folder: str) -> int:
    Path(folder, f"{rank.rank}-{os.getpid()}").touch()
    while rank.stop_file is None or not Path(rank.stop_file).exists():
        time.sleep(0.01)
    Path(folder, "asked").touch()
    time.sleep(HANG)
    return 0


def _interrupt(number: signal.Signals) -> None:
    """Send this process a signal when the launcher, which ignores it at first, handles it."""
    while signal.getsignal(number) == signal.SIG_IGN:
        time.sleep(0.01)
    os.kill(os.getpid(), number)


def _wait_for(count: int, folder: Path) -> list[str]:
    while len(names := [path.name for path in folder.iterdir()]) < count:
        time.sleep(0.02)
    return sorted(names)


@pytest.mark.usefixtures("ranks_start_fast")
def test_a_second_signal_ends_ranks_that_do_not_listen(tmp_path: Path) -> None:
    def interrupt() -> None:
        for count in (1, 2):  # the rank runs; it has seen the first signal
            _wait_for(count, tmp_path)
            _interrupt(signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert launch(_never_returns, str(tmp_path), ranks=1) == 130


def _launches(folder: str) -> None:
    launch(_never_returns, folder, ranks=1)


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher = multiprocessing.get_context("spawn").Process(target=_launches, args=(str(tmp_path),))
    launcher.start()
    pids = [int(name.split("-")[1]) for name in _wait_for(1, tmp_path)]
    launcher.kill()
    launcher.join()
    while any(_runs(pid) for pid in pids):
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Whether the process is there and no zombie (its parent is gone, and somebody may be slow to reap it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_signal_forwarded_at_once_is_no_second_request(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    now, ended = [100.0], []
    monkeypatch.setattr("spanwise.train.launch.time.monotonic", lambda: now[0])
    monkeypatch.setattr(os, "_exit", ended.append)
    try:
        stop = StopRequest(Rank(0, 1, 0, 1, "env://"))
        os.kill(os.getpid(), signal.SIGINT)
        now[0] += 0.5
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.asked(), ended) == (signal.SIGINT, [])
        now[0] += 1
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended == [128 + signal.SIGTERM]
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


def _stops_on_one(rank: Rank) -> int:
    rank.progressed()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(HANG)
    return 0


@pytest.mark.slow
def test_a_stuck_rank_is_reported_and_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spanwise.train.launch._REPORT", 1.0)
    place = r"rank 0 is in _stops_on_one \(test_train_launch.py:\d+\).*; rank 1 does not answer"
    with pytest.raises(RankFailure, match=rf"no step has ended for \d+ s \(--timeout\); {place}"):
        launch(_stops_on_one, ranks=2, timeout=25.0)
    assert "spanwise: no step has ended for " in capfd.readouterr().err


@pytest.mark.usefixtures("ranks_start_fast")
def test_a_rank_that_dies_is_named_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spanwise.train.launch._GRACE", 0.2)
    with pytest.raises(RankFailure, match=r"rank 1 was ended by SIGKILL; the system may have run out of memory"):
        launch(_dies_on_one, ranks=2)


@pytest.mark.usefixtures("ranks_start_fast")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank_and_the_handlers_come_back(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def interrupt() -> None:
        _wait_for(2, tmp_path)
        _interrupt(number)

    threading.Thread(target=interrupt, daemon=True).start()
    assert launch(_until_asked, str(tmp_path), ranks=2) == 128 + number
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_torchrun_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert torchrun_rank() is None
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert torchrun_rank() == Rank(5, 8, 1, 4, "env://")
