"""The lock of a run's folder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spanwise.train.lock import NAME, lock


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


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    code = f"import os, pathlib, spanwise.train.lock as l\nwith l.lock(pathlib.Path({str(tmp_path)!r})): os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
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
