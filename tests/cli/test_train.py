"""The command line: what it accepts, and errors before a process starts."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import spanwise.cli.bench
from spanwise.cli.app import app
from spanwise.cli.verify import MASKS


def fails(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == 2, (result.output, result.exception)
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--ranks 4 --dp 3", "ranks must be a multiple of dp, got 4 and 3"),
        ("--ranks 0", "ranks must be at least 1, got 0"),
        (
            "--dp 2 --ranks 2 --batch-size 3",
            "batch_size must be a positive multiple of dp .* got batch_size 3 and dp 2",
        ),
        ("--seq-len 0", "seq_len must be at least 2 tokens, so that one can predict the next, got 0"),
        ("--seq-len 1", "seq_len must be at least 2 tokens.* got 1"),
        ("--max-document 1", "max_document must be at least 2 tokens.* got 1"),
        ("--seq-len 99999999999", "seq_len must be at most 67,108,864 tokens, got 99,999,999,999"),
        ("--data {tmp}/file --seq-len 3001", r"repeats the 3 training tokens 1,000 times .* a --seq-len up to 3,000"),
        ("--global-batch --ranks 4 --dp 2", "--global-batch plans over all ranks, .* leave --dp out, got 2"),
        (
            "--global-batch --ranks 4 --seq-len 101 --batch-size 2",
            "seq_len × batch_size must be a multiple of 4 ranks, got 202 tokens",
        ),
        ("--workers 1", "--workers 1 are for --global-batch; add that"),
        ("--global-batch --batch-size 3 --prove 1", r"\(seq_len × batch_size .*\)² .* at most 16384 tokens, got 24576"),
        ("--seed 18446744073709551616", r"seed must be below 2\*\*64, got 18446744073709551616"),
        ("--prove 1 --seq-len 20000", "takes at most 16384 tokens, got 20000; prove a shorter --seq-len"),
        ("--heads 3", "dim must be a multiple of num_heads, got dim 128 and num_heads 3"),
        ("--heads 4 --kv-heads 3", "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ("--dim 12 --heads 4 --kv-heads 4", "head dim must be even .* got dim 12 / num_heads 4 = 3"),
        ("--dtype float16", "dtype must be float32 or float64, got 'float16'"),
        ("--device tpu", "device must be cpu or cuda, got 'tpu'"),
        ("--device cuda --ranks 99", "needs a GPU for each of 99 local ranks, found .*; start fewer ranks, or use"),
        ("--held-out 1", r"held_out is a share of the documents in \[0, 1\), got 1.0"),
        ("--learning-rate nan", "learning_rate must be positive and finite, got nan"),
        ("--resume", "name it with --out"),
        ("--save-every 3", "name it with --out"),
        ("--data nowhere", "nowhere does not exist; --data takes files and folders"),
        ("--balancer best", "unknown balancer 'best'"),
        ("--exchange pigeon", "unknown exchange 'pigeon'"),
        ("--out {tmp}/file", "--out must be a folder, and .*file is a file"),
        ("--out {tmp}/file/sub", "--out must be a folder, and .*file is a file"),
        ("--out /proc/none", "cannot write into --out /proc/none: .*; name another"),
        (
            "--data {tmp}/file --seq-len 3 --out {tmp}/{long}",
            "cannot write into --out .*: File name too long; name another",
        ),
        ("--data {tmp}/{long}", "cannot read --data .*…: File name too long; name another"),
        ("--data {tmp}/file/sub", "file/sub does not exist"),
        ("--data {tmp} --out {tmp}", "is a folder of --data: what the run writes would be data; name another --out"),
        ("--out {tmp}/{long} --resume", "cannot write into --out .*: File name too long; name another"),
        ("--out {tmp}/none --resume", "no checkpoint in .*none/checkpoints; start the run without --resume"),
    ],
)
def test_bad_options_name_the_value_and_the_remedy(arguments: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    message = fails(*arguments.format(tmp=tmp_path, long="x" * 300).split())
    assert re.search(text, message.replace("\n", " ")), message


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


def test_torchrun_and_ranks_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["train", "--ranks", "3"])
    assert result.exit_code != 0
    assert "torchrun started 2 processes, and --ranks says 3" in str(result.exception)


def test_several_paths_after_one_data(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    assert "b does not exist" in fails("--data", str(tmp_path / "a"), str(tmp_path / "b"))


def test_help_names_every_option() -> None:
    result = CliRunner().invoke(app, ["train", "--help"])
    assert result.exit_code == 0
    for option in ("--data", "--ranks", "--dp", "--seq-len", "--prove", "--resume", "--out", "--batch-size"):
        assert option in result.output


def test_bench_runs_what_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ["kernels", "plan", "layout", "memory", "packed"]
    calls: list[tuple[str, Path | None, bool]] = []
    for name in names:
        module = importlib.import_module(f"spanwise.cli.bench.{name}")
        monkeypatch.setattr(module, "run", lambda out, quick, name=name: calls.append((name, out, quick)))
    for arguments in (["bench", "plan", "--quick"], ["bench", "--out", str(tmp_path)], ["bench", "kernels"]):
        assert CliRunner().invoke(app, arguments).exit_code == 0
    every = [(name, tmp_path / f"{name}.json", False) for name in names]
    assert calls == [("plan", None, True), *every, ("kernels", None, False)]
    assert {path.stem for path in Path(spanwise.cli.bench.__path__[0]).glob("*.py")} - {"__init__"} == set(names)
    assert CliRunner().invoke(app, ["bench", "--quick", "plan"]).exit_code == 2


def test_empty_paths_are_refused() -> None:
    assert "'' does not exist; --data takes files and folders" in fails("--data", "")
    assert "--out is empty; name a folder" in fails("--out", "")


@pytest.mark.parametrize("command", ["train", "verify"])
def test_a_plan_option_that_is_to_come_is_one_line(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_plan(*_: Any, **__: Any) -> None:
        raise NotImplementedError("exchange 'zebra' does not exist yet")

    monkeypatch.setattr("spanwise.make_plan", make_plan)
    result = CliRunner().invoke(app, [command])
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stderr == "spanwise: exchange 'zebra' does not exist yet\n"


def test_a_file_of_too_many_documents_is_refused_at_once(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(2**33)
    assert re.search(
        r"8,589,934,594 tokens, are 85,899,346 of at most 100 tokens; at most 33,554,432 .* raise --max-doc",
        fails("--data", str(tmp_path / "sparse"), "--seq-len", "100"),
    )


def test_a_sequence_of_too_many_documents_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"x" * 20_000)
    text = fails("--data", str(tmp_path / "text"), "--seq-len", "10000000", "--max-document", "2")
    assert "packs about 5,000,000 documents into one plan" in text and "up to 2,097,152, or raise" in text


def test_verify_on_processes_is_planned_for_a_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from spanwise.cli import verify

    monkeypatch.setattr(verify, "launch", lambda *_, **__: 0)
    assert verify.verify(verify.VerifyConfig(ranks=2, seq_len=100)) == 0
    printed = capsys.readouterr().out
    assert f"predicted on {spanwise.CPU_HOST.name}" in printed and "H100" not in printed and "fingerprint" in printed
