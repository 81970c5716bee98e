"""The training job on real gloo processes: the same losses and gradients as one device, resumed on other ranks too."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanwise.train.data import DocumentStream, find_documents
from spanwise.train.plans import plan_sequence
from spanwise.train.start import start
from tests.ranks.train_runs import forked_ranks, metrics, tiny, write_documents

#: Of the run and of the ones that it is compared with.
SHARED: dict[str, Any] = {"batch_size": 2, "max_document": 60, "held_out": 0.4, "eval_sequences": 3}


@pytest.fixture(scope="module", autouse=True)
def ranks_start_fast() -> Iterator[None]:
    with forked_ranks():
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    """Three steps of two ranks that share each sequence; two sequences a step."""
    out = tmp_path_factory.mktemp("runs") / "three"
    assert start(tiny(data, ranks=2, steps=3, prove=3, out=str(out), **SHARED), None) == 0
    return out


def test_losses_and_gradients_are_those_of_one_device(three_steps: Path, data: str) -> None:
    values = metrics(three_steps)
    assert (values["ranks"], values["steps"], len(values["losses"])) == (2, 3, 3)
    np.testing.assert_allclose(values["losses"], values["reference_losses"], rtol=1e-12)
    assert values["max_loss_error"] <= 1e-10
    assert values["max_grad_error"] <= 1e-10
    assert max(values["grad_errors"]) == values["max_grad_error"] > 0  # another order of summation
    assert values["proved"] is True
    config = tiny(data, ranks=2, **SHARED)
    stream = DocumentStream(find_documents([data]).split(0.4)[0], 0, 60)
    plans = [plan_sequence(config, stream.cu_seqlens(n * 101, 101)) for n in range(6)]
    # Two sequences a step.
    received = [(a.recv_tokens() + b.recv_tokens()).tolist() for a, b in itertools.pairwise(plans)][::2]
    assert values["recv_tokens"] == received and any(map(any, received))
    imbalance = [plan.imbalance() for plan in plans]
    assert values["imbalance"] == [max(pair) for pair in itertools.pairwise(imbalance)][::2]
    assert max(values["imbalance"]) > 1
    assert values["eval_losses"][-1]["step"] == 3


def test_resumed_on_other_ranks_it_is_the_same_run(three_steps: Path, tmp_path: Path, data: str) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    # dp × cp = 2 × 2, against cp = 3 from the checkpoint of cp = 2. Three sequences are evaluated, which leaves a dp
    # rank idle in the last round.
    assert 2 < sum(d.num_tokens for d in find_documents([data]).split(0.4)[1]) / 101 <= 3
    shared = SHARED | {"steps": 5, "prove": 5}
    assert start(tiny(data, ranks=4, dp=2, exchange="ulysses", out=str(whole), **shared), None) == 0
    shutil.copytree(three_steps, resumed)
    assert (
        start(
            tiny(data, ranks=3, out=str(resumed), resume=True, **shared | {"batch_size": None, "max_document": None}),
            None,
        )
        == 0
    )
    one, two = metrics(whole), metrics(resumed)
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=1e-11)
    np.testing.assert_allclose(two["grad_norms"], one["grad_norms"], rtol=1e-9)
    np.testing.assert_allclose(two["eval_losses"][-1]["loss"], one["eval_losses"][-1]["loss"], rtol=1e-11)
    assert two["epochs"] == one["epochs"]
    assert two["runs"] == [{"first_step": 0, "ranks": 2, "dp": 1}, {"first_step": 3, "ranks": 3, "dp": 1}]
    for values in (one, two):
        assert max(values["max_grad_error"], values["max_loss_error"]) <= 1e-10
    assert len(one["reference_losses"]) == 5
    assert len(two["reference_losses"]) == 2  # the steps of the resumed run


def test_global_batches_resume_as_the_same_run(tmp_path: Path, data: str) -> None:
    """One plan a step for both ranks: one device's losses and gradients; a resumed run repeats the rest bit by bit."""
    options = SHARED | {"seq_len": 102, "ranks": 2, "global_batch": True, "steps": 4, "prove": 4, "save_every": 2}
    config = tiny(data, out=str(tmp_path / "whole"), **options)
    assert start(config, None) == 0
    whole = metrics(tmp_path / "whole")
    np.testing.assert_allclose(whole["losses"], whole["reference_losses"], rtol=1e-12)
    assert 0 < whole["max_grad_error"] <= 1e-10 and whole["proved"] is True
    stream = DocumentStream(find_documents([data]).split(0.4)[0], 0, 60)
    plans = [plan_sequence(config, stream.cu_seqlens(n * 204, 204)) for n in range(4)]
    assert whole["recv_tokens"] == [plan.recv_tokens().tolist() for plan in plans]
    assert whole["imbalance"] == [plan.imbalance() for plan in plans]

    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "whole", resumed)
    (resumed / "checkpoints/latest").write_text("step-00000002\n")
    options |= {"resume": True, "batch_size": None, "max_document": None}
    assert start(tiny(data, out=str(resumed), **options), None) == 0
    values = metrics(resumed)
    assert values["runs"][-1]["first_step"] == 2 and len(values["losses"]) == 4
    for name in ("losses", "grad_norms", "recv_tokens", "epochs"):
        assert values[name] == whole[name]
    with pytest.raises(ValueError, match="global_batch is True in the checkpoint and False here"):
        start(tiny(data, out=str(resumed), **options | {"global_batch": False}), None)


@pytest.mark.slow
def test_workers_make_the_same_global_batches(tmp_path: Path, data: str) -> None:
    runs = []
    for workers in (0, 1):
        out = tmp_path / str(workers)
        options = SHARED | {"seq_len": 102, "global_batch": True, "workers": workers, "steps": 3, "prove": 3}
        assert start(tiny(data, ranks=2, out=str(out), **options), None) == 0
        runs.append(metrics(out))
    assert runs[0]["losses"] == runs[1]["losses"] and runs[1]["proved"] is True
    assert runs[0]["recv_tokens"] == runs[1]["recv_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, {"exchange": "ulysses"}), (4, {"exchange": "ring", "inner": 2})],
    ids=["ulysses", "ring between groups of two"],
)
def test_exchanges_of_fully_sharded_ranks(ranks: int, options: dict[str, Any], tmp_path: Path, data: str) -> None:
    """The same losses and gradients as on one device, of a model that FSDP2 shards over all ranks."""
    config = tiny(data, ranks=ranks, steps=2, prove=2, out=str(tmp_path), **options, **SHARED)
    assert start(config, None) == 0
    values = metrics(tmp_path)
    np.testing.assert_allclose(values["losses"], values["reference_losses"], rtol=1e-12)
    assert values["max_grad_error"] <= 1e-10 and values["proved"] is True
    stream = DocumentStream(find_documents([data]).split(0.4)[0], 0, 60)
    plans = [plan_sequence(config, stream.cu_seqlens(n * 101, 101)) for n in range(2)]
    assert {(plan.exchange, plan.inner) for plan in plans} == {
        (options["exchange"], options.get("inner", 2 if options["exchange"] == "ulysses" else 1))
    }
    assert values["recv_tokens"][0] == sum(plan.recv_tokens() for plan in plans).tolist()


def test_ranks_that_cannot_trade_heads(data: str) -> None:
    with pytest.raises(ValueError, match="inner must divide the 2 ranks that share a sequence, got 4"):
        tiny(data, ranks=4, dp=2, inner=4)
    with pytest.raises(ValueError, match="cannot divide 4 query heads .* over 3 ranks"):
        start(tiny(data, ranks=3, inner=3), None)
    with pytest.raises(ValueError, match="has Ulysses on its inner axis already"):
        start(tiny(data, ranks=4, inner=2, exchange="ulysses"), None)


@pytest.mark.slow
def test_verify_command_on_ranks() -> None:
    command = [sys.executable, "-m", "spanwise", "verify", "--ranks", "2", "--seq-len", "301", "--dtype", "float64"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "attention: verified" in ended.stdout and "decoder: verified" in ended.stdout


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tmp_path: Path, data: str) -> None:
    sizes = "--dim 16 --layers 1 --heads 2 --kv-heads 1 --hidden-dim 16 --seq-len 51 --steps 1 --prove 1"
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 -m spanwise train"
    ended = subprocess.run(
        [sys.executable, *command.split(), "--data", data, "--out", str(tmp_path), *sizes.split()],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    values = metrics(tmp_path)
    assert (values["ranks"], values["steps"], values["proved"]) == (2, 1, True)
    assert ended.stdout.count("step 1/1") == 1  # one rank prints
