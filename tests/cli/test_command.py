"""Options come from dataclasses: their types, help and values; exit statuses; local ranks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args, get_type_hints

import pytest
import torch
import torch.distributed as dist

import spanwise
from spanwise.attention.kernels.table import KERNELS
from spanwise.cli import app, options, verify
from spanwise.cli.options import CalibrateOptions, OverlapOptions, PlanOptions
from spanwise.cli.output import PRESETS
from spanwise.cli.ranks import RankFailure, run_ranks
from spanwise.layouts.balancers import BY_NAME
from spanwise.routes.exchanges import EXCHANGES
from tests.cli.commands import run


def test_help_shows_the_values() -> None:
    said = run("verify", "--help").said
    assert "--exchange {auto,all_gather,needed,hierarchical,ring,ulysses}" in said
    said = run("plan", "--help").said
    assert "--window LEFT [RIGHT]" in said and "--no-bidirectional" not in said
    assert set(app.COMMANDS) <= set(run("--help").said.split()) and run().said == run("--help").said


def test_values_are_those_of_the_package() -> None:
    assert get_args(options.Balancer)[1:] == tuple(BY_NAME)
    assert set(get_args(options.Exchange)) == {"auto", *EXCHANGES}
    assert set(get_args(get_type_hints(CalibrateOptions)["kernel"])) == {"auto", *KERNELS}
    assert all(hasattr(torch, name) for name in get_args(options.Dtype))
    for kind in (PlanOptions, OverlapOptions):
        assert PRESETS[kind().hardware] is spanwise.H100


@pytest.mark.parametrize(("error", "status"), [(ValueError, 2), (NotImplementedError, 2), (RankFailure, 1)])
def test_errors_are_one_line(error: type[Exception], status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> int:
        raise error("bad luck")

    monkeypatch.setattr(verify, "verify", fails)
    done = run("verify")
    assert (done.status, done.err) == (status, "spanwise: bad luck\n")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    with pytest.raises(error, match="bad luck"):  # torchrun shows the traceback
        run("verify")


def test_verify_is_planned_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "run_ranks", lambda function, given, ranks: ranks)
    done = run("verify", "--ranks", 4, "--inner", 2, "--seq-len", 100)
    assert done.status == 4 and f"predicted on {spanwise.CPU_HOST.name}" in done.out
    assert "heads traded (Ulysses) among 2 ranks" in done.out


@pytest.mark.slow
def test_verify_command_on_ranks() -> None:
    command = [sys.executable, "-m", "spanwise", "verify", "--ranks", "2", "--seq-len", "301", "--dtype", "float64"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "attention: verified" in ended.stdout


def raises(options: None) -> int:
    if dist.get_rank() == 1:
        raise ValueError("bad luck")
    return 3


@pytest.mark.slow
def test_a_failed_rank_is_named() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1 failed:.*ValueError: bad luck"):
        run_ranks(raises, None, 2)
