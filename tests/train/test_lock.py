"""The lock of a run's folder."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from spanwise.train.lock import NAME, lock
from tests.scripts import forked


def test_a_second_run_is_refused_with_host_and_process(tmp_path: Path) -> None:
    with lock(tmp_path):
        holder = json.loads((tmp_path / NAME).read_text())
        assert (holder["host"], holder["pid"]) == (socket.gethostname(), os.getpid())
        with pytest.raises(ValueError, match=rf"process {os.getpid()} on this host writes into .*another --out"):
            lock(tmp_path).__enter__()
    assert not list(tmp_path.iterdir())
    with lock(tmp_path):
        pass


def test_it_is_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), lock(tmp_path):
        raise KeyError
    assert not list(tmp_path.iterdir())


def hold_and_die(folder: Path) -> None:
    with lock(folder):
        os._exit(9)


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    holder = forked().Process(target=hold_and_die, args=(tmp_path,))
    holder.start()
    holder.join()
    assert holder.exitcode == 9
    assert json.loads((tmp_path / NAME).read_text())["pid"] != os.getpid()
    with lock(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_a_later_process_with_the_same_number_does_not_hold_it(tmp_path: Path) -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("only Linux tells when a process started")
    (tmp_path / NAME).write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": "1"}))
    with lock(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["started"] != "1"


def test_a_process_of_another_host_holds_it(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps({"host": "elsewhere", "pid": 2**30, "started": ""}))
    with pytest.raises(ValueError, match=r"process 1073741824 on host elsewhere writes into .* or remove .*lock.json"):
        lock(tmp_path).__enter__()


def test_another_file_of_that_name_is_named(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("[]")
    with pytest.raises(ValueError, match=r"lock.json is no lock of a run; remove it"):
        lock(tmp_path).__enter__()
