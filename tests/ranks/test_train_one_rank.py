"""The training loop on one rank, in this process: resuming, stopping, what is kept, what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from spanwise.train import checkpoint, manifest
from spanwise.train.data import find_documents
from spanwise.train.launch import RunError
from spanwise.train.loop import Trainer, differences
from spanwise.train.metrics import PER_STEP, Metrics
from spanwise.train.start import start
from tests.ranks.train_runs import TINY, NoStop, metrics, one_rank, run_one_rank, tiny, write_documents


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


def test_an_interrupted_run_resumes_as_if_it_had_not_been(tmp_path: Path, data: str) -> None:
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    assert run_one_rank(tiny(data, steps=6, out=whole, eval_every=3)) == 0
    assert run_one_rank(tiny(data, steps=6, out=cut, eval_every=3), NoStop(after=3)) == 128 + 15
    assert metrics(cut)["steps"] == 3
    assert run_one_rank(tiny(data, steps=6, out=cut, eval_every=3, resume=True)) == 0
    one, two = metrics(whole), metrics(cut)
    for name in ("losses", "grad_norms", "eval_losses", "imbalance", "recv_tokens", "documents", "learning_rates"):
        assert two[name] == one[name], name
    # Nothing is left to do: no step, no loss of what is there.
    assert run_one_rank(tiny(data, steps=6, out=cut, resume=True)) == 0
    assert metrics(cut)["losses"] == one["losses"]


def test_metrics_past_the_checkpoint_are_made_again(tmp_path: Path, data: str) -> None:
    out = str(tmp_path)
    with pytest.raises(RuntimeError, match="power"), one_rank(tiny(data, steps=6, out=out, save_every=2)) as trainer:
        step, trainer_step = 0, trainer.train_step

        def fails_in_step_6(stop: Any) -> int:
            nonlocal step
            step += 1
            if step == 6:
                raise RuntimeError("power")
            return trainer_step(stop)

        trainer.train_step = fails_in_step_6  # type: ignore[method-assign]
        trainer.run(NoStop())  # type: ignore[arg-type]
    before = metrics(out)
    assert before["steps"] == 5  # kept although the run failed
    assert checkpoint.latest(out)[1].step == 4
    assert run_one_rank(tiny(data, steps=6, out=out, resume=True)) == 0
    after = metrics(out)
    assert after["steps"] == 6
    assert after["losses"][:5] == before["losses"]


def test_an_interrupted_save_leaves_the_checkpoint_before(
    tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path)
    assert run_one_rank(tiny(data, steps=2, out=out)) == 0
    real_save = dcp.save

    def half_a_save(state: Any, **where: Any) -> None:
        real_save({"model": state["model"]}, **where)
        raise OSError("disk full")

    monkeypatch.setattr(dcp, "save", half_a_save)
    with pytest.raises(OSError, match="disk full"):
        run_one_rank(tiny(data, steps=3, out=out, resume=True))
    monkeypatch.undo()
    path, state, _ = checkpoint.latest(out)
    assert state.step == 2
    assert run_one_rank(tiny(data, steps=3, out=out, resume=True)) == 0
    assert checkpoint.latest(out)[1].step == 3
    assert sorted(p.name for p in path.parent.iterdir()) == ["latest", "step-00000002", "step-00000003"]


def test_old_checkpoints_go_and_a_new_run_keeps_the_old_one(tmp_path: Path, data: str) -> None:
    out = str(tmp_path)
    assert run_one_rank(tiny(data, steps=5, out=out, save_every=1, keep=2)) == 0
    assert sorted(p.name for p in checkpoint.checkpoints(out).iterdir()) == [
        "latest",
        "step-00000004",
        "step-00000005",
    ]
    first = metrics(out)
    assert run_one_rank(tiny(data, steps=1, out=out)) == 0
    assert metrics(out)["steps"] == 1
    assert json.loads((tmp_path / "previous" / "1" / "metrics.json").read_text()) == first
    assert checkpoint.latest(tmp_path / "previous" / "1")[1].step == 5


def test_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path, data: str) -> None:
    out = str(tmp_path / "run")
    assert run_one_rank(tiny(data, steps=1, out=out)) == 0
    path, state, _ = checkpoint.latest(out)
    corpus = find_documents([data])

    def refused(text: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=text):
            checkpoint.check_same_run(state, tiny(data, **options), corpus, path)

    other = dataclasses.replace(TINY, num_layers=3, hidden_dim=32)
    refused(
        r"another model: hidden_dim is 24 in the checkpoint and 32 here; num_layers is 2 in the checkpoint and 3 here",
        model=other,
    )
    refused(r"dtype is 'float64' in the checkpoint and 'float32' here", dtype="float32")
    refused(r"seed is 0 in the checkpoint and 7 here.*Give what the run was started with", seed=7)
    refused(r"max_document is 101 in the checkpoint and 64 here", max_document=64)
    checkpoint.check_same_run(state, tiny(data, seq_len=64, learning_rate=1.0, ranks=3), corpus, path)
    with pytest.raises(ValueError, match=r"the data are 12 documents, [\d,]+ tokens in the checkpoint and 1 documents"):
        checkpoint.check_same_run(state, tiny(data), find_documents([Path(data, "01")]), path)


def test_missing_and_broken_checkpoints_are_named(tmp_path: Path, data: str) -> None:
    with pytest.raises(ValueError, match=r"no checkpoint in .*; start the run without --resume"):
        checkpoint.latest(tmp_path)
    out = str(tmp_path / "run")
    assert run_one_rank(tiny(data, steps=2, save_every=1, out=out)) == 0
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        (path / "manifest.json").write_text('{"files": {}}')
    with pytest.raises(
        ValueError, match=r"can be read: step-00000002: .* is not in manifest.json; step-00000001: .*without --resume"
    ):
        checkpoint.latest(out)


def test_one_document_holds_nothing_out(tmp_path: Path) -> None:
    (tmp_path / "only").write_text("x" * 50)
    assert run_one_rank(tiny(str(tmp_path / "only"), steps=1, out=str(tmp_path / "out"))) == 0
    assert metrics(tmp_path / "out")["eval_losses"] == []


def test_training_learns(data: str, tmp_path: Path) -> None:
    assert run_one_rank(tiny(data, steps=25, out=str(tmp_path), dtype="float32", learning_rate=0.01)) == 0
    losses = metrics(tmp_path)["losses"]
    assert losses[-1] < losses[0] - 1


def test_a_step_that_is_not_finite_ends_the_run_and_keeps_the_checkpoint(data: str, tmp_path: Path) -> None:
    out = str(tmp_path)
    assert run_one_rank(tiny(data, steps=1, out=out)) == 0
    with pytest.raises(FloatingPointError, match=r"step \d has loss .*smaller --learning-rate"):
        run_one_rank(tiny(data, steps=4, out=out, resume=True, learning_rate=1e300))
    assert checkpoint.latest(out)[1].step == 1


def test_batch_size_of_the_checkpoint_must_fit_dp(data: str, tmp_path: Path) -> None:
    out = str(tmp_path)
    assert run_one_rank(tiny(data, steps=1, batch_size=3, out=out)) == 0
    with pytest.raises(ValueError, match=r"batch_size 3 and dp 2"):
        start(tiny(data, steps=2, ranks=2, dp=2, out=out, resume=True), None)


@pytest.mark.parametrize(("factor", "proved"), [(0.0, True), (1e-6, False)])
def test_a_wrong_gradient_fails_the_proof_after_saving(
    tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch, factor: float, proved: bool
) -> None:
    right = Trainer._loss

    def wrong(self: Trainer, *arguments: Any) -> Any:
        loss = right(self, *arguments)
        return loss + factor * (loss - loss.detach())  # the same loss, another gradient

    monkeypatch.setattr(Trainer, "_loss", wrong)
    out = str(tmp_path)
    assert run_one_rank(tiny(data, steps=2, prove=1, out=out)) == (0 if proved else 1)
    values = metrics(out)
    assert values["proved"] is proved
    assert values["max_grad_error"] == pytest.approx(factor, rel=1e-3, abs=1e-10)
    assert checkpoint.latest(out)[1].step == 2
    # The verdict is on the steps of one run: the next compares none, and keeps what was found.
    assert run_one_rank(tiny(data, steps=3, out=out, resume=True)) == 0
    assert metrics(out)["proved"] is proved


def test_nan_in_the_reference_fails_the_proof(tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_: Any) -> tuple[float, float]:
        return float("nan"), 0.0

    monkeypatch.setattr("spanwise.train.prove.Reference.compare", compare)
    assert run_one_rank(tiny(data, steps=2, prove=2, out=str(tmp_path))) == 1
    values = metrics(tmp_path)
    assert values["proved"] is False
    assert (values["max_loss_error"], values["reference_losses"]) == (None, [None, None])


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit": (lambda p: _flip_a_bit(p / "__0_0.distcp"), "__0_0.distcp is damaged: its content is not what was"),
    "truncated": (lambda p: _truncate(p / "__0_0.distcp"), r"__0_0.distcp is damaged: [\d,]+ bytes of [\d,]+"),
    "missing": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp"),
    "no index": (lambda p: (p / ".metadata").unlink(), ".metadata"),
    "index": (lambda p: _flip_a_bit(p / ".metadata"), ".metadata is damaged"),
    "facts": (lambda p: (p / "run.json").write_text("[]"), "run.json is damaged"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json"),
    "manifest": (lambda p: _truncate(p / "manifest.json"), "manifest.json is damaged"),
    "added": (lambda p: (p / "__1_0.distcp").touch(), "__1_0.distcp is not in manifest.json"),
    "binary": (lambda p: (p.parent / "latest").write_bytes(b"\xff\xfe\0"), "codec can't decode"),
    "away": (lambda p: (p.parent / "latest").write_text("../../x"), "it names no checkpoint"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(
    two_checkpoints: Path, tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(two_checkpoints, out)
    spoil, text = DAMAGE[damage]
    spoil(out / "checkpoints" / "step-00000002")
    found = checkpoint.latest(out)
    pointer = damage in ("binary", "away")
    assert found.state.step == (2 if pointer else 1)
    assert re.search(text, found.skipped), found.skipped
    assert ("step-00000002: " in found.skipped) is not pointer


def test_a_flipped_bit_is_not_trained_on(
    two_checkpoints: Path, tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(two_checkpoints, out)
    _flip_a_bit(out / "checkpoints" / "step-00000002" / "__0_0.distcp")
    assert run_one_rank(tiny(data, steps=3, out=str(out), resume=True)) == 0
    text = "passed over: step-00000002: __0_0.distcp is damaged: its content is not what was written"
    assert text in " ".join(capsys.readouterr().out.split())
    whole = str(tmp_path / "whole")
    assert run_one_rank(tiny(data, steps=3, out=whole)) == 0
    assert metrics(out)["losses"] == metrics(whole)["losses"]
    assert checkpoint.latest(out).skipped == ""


class _Planted:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("planted"),)


def test_a_checkpoint_cannot_run_code(
    two_checkpoints: Path, tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one whose manifest fits."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    shutil.copytree(two_checkpoints, out)
    path = out / "checkpoints" / "step-00000002"
    (path / ".metadata").write_bytes(pickle.dumps(_Planted()))
    manifest.write(path, {name: manifest.describe(path / name) for name in manifest.names(path)})
    assert checkpoint.latest(out).path == path
    with pytest.raises(
        ValueError, match=r"step-00000002 cannot be loaded: .*names pathlib.*which is no part of an index"
    ):
        run_one_rank(tiny(data, steps=3, out=str(out), resume=True))
    assert not Path("planted").exists()


def test_data_of_another_content_are_refused(tmp_path: Path) -> None:
    data, out = write_documents(tmp_path / "data"), str(tmp_path / "out")
    assert run_one_rank(tiny(data, steps=1, out=out)) == 0
    _flip_a_bit(tmp_path / "data" / "03")
    with pytest.raises(ValueError, match=r"the data are 12 documents, .* in the checkpoint and other contents here"):
        run_one_rank(tiny(data, steps=2, out=out, resume=True))


@pytest.mark.parametrize("share", [0.5, 1.0])  # in the middle of a large tensor torch raises an error of its own
def test_a_full_disk_is_one_line_and_loses_no_checkpoint(
    two_checkpoints: Path, tmp_path: Path, data: str, share: float
) -> None:
    out = tmp_path / "run"
    shutil.copytree(two_checkpoints, out)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(path.stat().st_size for path in (out / "checkpoints" / "step-00000002").iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest * share) - 1, limits[1]))
    try:
        with pytest.raises(
            RunError, match=r"step 3 cannot be saved in .*: File too large. Earlier .*--resume"
        ) as caught:
            run_one_rank(tiny(data, steps=3, out=str(out), resume=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["latest", "step-00000001", "step-00000002"]
    assert run_one_rank(tiny(data, steps=3, out=str(out), resume=True)) == 0


def test_a_disk_that_is_full_at_the_first_checkpoint_has_nothing_to_resume(tmp_path: Path, data: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(RunError, match="step 1 cannot be saved .*: File too large. There is no earlier") as caught:
            run_one_rank(tiny(data, steps=1, out=str(tmp_path)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "make room and start the run again" in str(caught.value) and "resume" not in str(caught.value)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    out = tmp_path_factory.mktemp("runs") / "two"
    assert run_one_rank(tiny(data, steps=2, save_every=1, out=str(out))) == 0
    return out


@pytest.mark.parametrize("text", ["[]", "{", '{"losses": 3}', '{"runs": [1]}', '{"eval_losses": [{}]}', "\udcff"])
def test_metrics_that_no_run_wrote_are_refused_before_ranks_start(
    two_checkpoints: Path, tmp_path: Path, data: str, text: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(two_checkpoints, out)
    (out / "metrics.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"metrics.json is no metrics file .*move it away to resume without it"):
        start(tiny(data, steps=3, out=str(out), resume=True), None)


def test_lost_metrics_become_null_and_steps_still_count(two_checkpoints: Path, tmp_path: Path, data: str) -> None:
    whole = metrics(two_checkpoints)
    for kept in (0, 1):
        out = tmp_path / str(kept)
        shutil.copytree(two_checkpoints, out)
        if kept:
            short = {name: value[:1] if isinstance(value, list) else value for name, value in whole.items()}
            (out / "metrics.json").write_text(json.dumps(short))
        else:
            (out / "metrics.json").unlink()
        assert run_one_rank(tiny(data, steps=4, out=str(out), resume=True)) == 0
        values = metrics(out)
        assert values["steps"] == 4
        for name in PER_STEP:
            assert [value is None for value in values[name]] == [False] * kept + [True] * (2 - kept) + [False] * 2


def test_metrics_are_never_behind_the_checkpoint(tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may be killed at any moment: look whenever `latest` has moved."""
    out, seen, real_replace = str(tmp_path), [], os.replace

    def replace(source: Any, target: Any) -> None:
        real_replace(source, target)
        if Path(target).name == "latest":
            state = checkpoint.latest(out).state  # it names a complete one
            values = metrics(out)
            seen.append((state.step, values["steps"], [e["step"] for e in values["eval_losses"]]))

    monkeypatch.setattr(os, "replace", replace)
    # Unforced, metrics would be written too seldom to be right by chance.
    monkeypatch.setattr("spanwise.train.metrics.time.monotonic", lambda: -1.0)
    assert run_one_rank(tiny(data, steps=4, out=out, save_every=1, eval_every=2)) == 0
    assert seen == [(1, 1, []), (2, 2, [2]), (3, 3, [2]), (4, 4, [2, 4])]


def test_a_crash_while_metrics_are_written_leaves_the_old_ones(tmp_path: Path) -> None:
    file = Metrics(tmp_path / "metrics.json", data="old")
    file.save(force=True)
    before = metrics(tmp_path)
    file.values["data"] = object()  # cannot be written, found out halfway
    with pytest.raises(TypeError):
        file.save(force=True)
    assert metrics(tmp_path) == before
    # A reader that opened the file before keeps the old text whole: it is replaced, not written in place.
    os.link(tmp_path / "metrics.json", tmp_path / "opened")
    file.values["data"] = "new"
    file.save(force=True)
    assert json.loads((tmp_path / "opened").read_text()) == before != metrics(tmp_path)


def test_out_below_the_data_is_resumed(tmp_path: Path, data: str) -> None:
    shutil.copytree(data, tmp_path / "data")
    out = str(tmp_path / "data" / "out")
    assert run_one_rank(tiny(str(tmp_path / "data"), steps=1, out=out)) == 0
    assert run_one_rank(tiny(str(tmp_path / "data"), steps=2, out=out, resume=True)) == 0
    assert metrics(out)["data"].startswith("12 documents")


def test_ranks_that_differ_say_in_what() -> None:
    one = {"seed": 0, "dtype": "float32", "model": {"dim": 16, "num_layers": 2}}
    other = {"seed": 1, "dtype": "float32", "model": {"dim": 16, "num_layers": 3}, "checkpoint's step": 4}
    assert differences(one, one) == []
    assert differences(one, other) == [
        "checkpoint's step is 4 there and None on rank 0",
        "model.num_layers is 3 there and 2 on rank 0",
        "seed is 1 there and 0 on rank 0",
    ]
