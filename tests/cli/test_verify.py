"""``spanwise verify``: its options, errors before a process starts, and failed ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

import spanwise
from spanwise.cli.app import app
from spanwise.cli.ranks import RankFailure, run_ranks
from spanwise.cli.verify import MASKS


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--ranks 0", "ranks and seq_len must be at least 1, got 0 and 1000"),
        ("--mask zebra", r"unknown mask 'zebra'; choose one of \['block_causal', "),
        ("--seq-len 5000", "seq_len must be at most 4096, got 5000"),
        ("--dtype int8", "dtype must be float32 or float64, got 'int8'"),
        ("--balancer best", "unknown balancer 'best'"),
        ("--heads 4 --kv-heads 3", "--heads a multiple of --kv-heads, got 32, 4 and 3"),
        ("--head-dim 0", "--head-dim must be at least 1 .* got 0, 4 and 2"),
        ("--kv-heads 0", "--heads a multiple of --kv-heads, got 32, 4 and 0"),
        ("--seed 18446744073709551616", r"seed must be in \[0, 2\*\*64\), got 18446744073709551616"),
    ],
)
def test_bad_options_of_verify(arguments: str, text: str) -> None:
    result = CliRunner().invoke(app, ["verify", *arguments.split()])
    assert result.exit_code == 2, (result.output, result.exception)
    assert re.search(text, result.stderr.replace("\n", " ")), result.stderr


@pytest.mark.parametrize("name", sorted(MASKS))
@pytest.mark.parametrize("seq_len", [2, 7, 100])
def test_masks_of_verify_fit_any_length(name: str, seq_len: int) -> None:
    mask = MASKS[name](seq_len, 0)
    assert (mask.q_len, mask.kv_len) == (seq_len, seq_len)


def test_a_plan_option_that_is_to_come_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_plan(*_: Any, **__: Any) -> None:
        raise NotImplementedError("exchange 'zebra' does not exist yet")

    monkeypatch.setattr("spanwise.make_plan", make_plan)
    result = CliRunner().invoke(app, ["verify"])
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stderr == "spanwise: exchange 'zebra' does not exist yet\n"


def test_verify_on_processes_is_planned_for_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from spanwise.cli import verify

    monkeypatch.setattr(verify, "run_ranks", lambda *_, **__: 0)
    assert verify.verify(verify.VerifyConfig(ranks=2, seq_len=100)) == 0
    printed = capsys.readouterr().out
    assert f"predicted on {spanwise.CPU_HOST.name}" in printed and "H100" not in printed and "fingerprint" in printed


@pytest.mark.slow
def test_verify_command_on_ranks() -> None:
    command = [sys.executable, "-m", "spanwise", "verify", "--ranks", "2", "--seq-len", "301", "--dtype", "float64"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "attention: verified" in ended.stdout and "layers: verified" in ended.stdout


def killed(options: None) -> int:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return 0


def raises(options: None) -> int:
    if dist.get_rank() == 1:
        raise ValueError("bad luck")
    return 3


@pytest.mark.slow
def test_a_failed_rank_is_named() -> None:
    with pytest.raises(RankFailure, match="rank 1 was ended by SIGKILL; the system may have run out of memory"):
        run_ranks(killed, None, 2)
    with pytest.raises(RankFailure, match=r"(?s)rank 1 failed:.*ValueError: bad luck"):
        run_ranks(raises, None, 2)
