"""Options of a training run, checked before any process starts. ``spanwise train`` takes the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from spanwise.train.model import ModelConfig

#: Most tokens of a sequence that one device repeats.
PROVE_LIMIT = 16_384

#: Most tokens of a sequence: a plan keeps some arrays of one entry a token.
SEQ_LIMIT = 2**26


@dataclass(frozen=True)
class TrainConfig:
    """Options of a run. ``ranks = dp × cp``; the ranks of cp share a sequence.

    Attributes:
        data: files and folders, every file one document; several may follow. Default: the Python standard library's
            sources.
        out: folder for metrics.json and checkpoints.
        ranks: local processes to start; ranks = dp × cp. Default: 1, or what torchrun started.
        dp: ranks that take different sequences; the others share one.
        inner: ranks that trade heads for tokens (Ulysses); --exchange works between groups of so many.
        steps: optimizer steps, counted from the start of the run.
        seq_len: tokens of a sequence; any number from 2.
        batch_size: sequences of a step over all ranks, a multiple of --dp; past dp they accumulate. Default: --dp, or
            as in the checkpoint.
        global_batch: plan all sequences of a step as one, over all ranks; a rank reads its own tokens only.
        workers: processes of each rank that make the next plan of --global-batch while a step runs.
        max_document: tokens; longer documents become several. Default: --seq-len (with --global-batch, the tokens of a
            step), or as in the checkpoint.
        model: sizes of the decoder.
        learning_rate: rate of AdamW after the warm-up.
        warmup: steps of linear warm-up.
        weight_decay: of AdamW; norms do not decay.
        max_grad_norm: norm to which gradients are clipped.
        seed: of weights and document order.
        dtype: of parameters: float32 or float64.
        device: of the ranks: cpu (gloo) or cuda (NCCL).
        balancer: as `make_plan` takes it.
        exchange: as `make_plan` takes it.
        prove: first steps of this run that one device repeats and is compared with.
        held_out: share of documents for evaluation, from 0 to below 1.
        eval_every: steps between evaluations; 0: only after the last.
        eval_sequences: most sequences evaluated.
        save_every: steps between checkpoints; 0: only after the last.
        keep: checkpoints to keep.
        resume: go on from the last good checkpoint in --out.
        timeout: seconds without a finished step after which the run ends (local ranks). After 60 it says where each
            rank is.
    """

    data: tuple[str, ...] = ()
    out: str | None = None
    ranks: int = 1
    dp: int = 1
    inner: int = 1
    steps: int = 30
    seq_len: int = 8192
    batch_size: int | None = None
    global_batch: bool = False
    workers: int = 0
    max_document: int | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    learning_rate: float = 3e-3
    warmup: int = 10
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    balancer: str = "auto"
    exchange: str = "auto"
    prove: int = 0
    held_out: float = 0.02
    eval_every: int = 0
    eval_sequences: int = 4
    save_every: int = 0
    keep: int = 2
    resume: bool = False
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        for ok, text in self._checks():
            if not ok:
                raise ValueError(text)

    def _checks(self) -> Iterator[tuple[bool, str]]:
        """Conditions, in order, and the text of the error where one does not hold."""
        for name in ("ranks", "dp", "inner", "steps", "eval_sequences", "keep"):
            value = getattr(self, name)
            yield value >= 1, f"{name} must be at least 1, got {value}"
        for name in ("seq_len", "max_document"):
            value = getattr(self, name)
            text = f"{name} must be at least 2 tokens, so that one can predict the next, got {value}"
            yield value is None or value >= 2, text
        step = "seq_len × batch_size with --global-batch" if self.global_batch else "seq_len"
        yield self.plan_tokens <= SEQ_LIMIT, f"{step} must be at most {SEQ_LIMIT:,} tokens, got {self.plan_tokens:,}"
        yield self.seed < 2**64, f"seed must be below 2**64, got {self.seed}"
        for name in ("warmup", "eval_every", "save_every", "prove", "seed", "workers"):
            value = getattr(self, name)
            yield value >= 0, f"{name} must not be negative, got {value}"
        text = f"ranks = dp × cp: ranks must be a multiple of dp, got {self.ranks} and {self.dp}"
        yield self.ranks % self.dp == 0, text
        text = f"inner must divide the {self.cp} ranks that share a sequence, got {self.inner}"
        yield self.cp % self.inner == 0, text
        size = self.dp if self.batch_size is None else self.batch_size
        text = (
            f"batch_size must be a positive multiple of dp (every rank takes as many sequences), got batch_size {size}"
        )
        yield size >= 1 and size % self.dp == 0, f"{text} and dp {self.dp}"
        text = f"held_out is a share of the documents in [0, 1), got {self.held_out}"
        yield 0 <= self.held_out < 1, text
        for name in ("learning_rate", "max_grad_norm", "timeout"):
            value = getattr(self, name)
            yield value > 0 and math.isfinite(value), f"{name} must be positive and finite, got {value}"
        yield self.weight_decay >= 0, f"weight_decay must not be negative, got {self.weight_decay}"
        yield self.dtype in ("float32", "float64"), f"dtype must be float32 or float64, got {self.dtype!r}"
        yield self.device in ("cpu", "cuda"), f"device must be cpu or cuda, got {self.device!r}"
        yield from self._check_global_batch()
        text = f"--prove holds a dense mask of ({step})² entries on one device and takes at most {PROVE_LIMIT} tokens, "
        text += f"got {self.plan_tokens}; prove a shorter --seq-len, or train without --prove"
        yield self.prove == 0 or self.plan_tokens <= PROVE_LIMIT, text
        writes = self.out is not None
        yield writes or not self.resume, "--resume continues the run in a folder: name it with --out"
        yield writes or self.save_every == 0, "--save-every writes into a folder: name it with --out"
        yield self.out != "", "--out is empty; name a folder"

    def _check_global_batch(self) -> Iterator[tuple[bool, str]]:
        text = f"--global-batch plans over all ranks, there are no replicas: leave --dp out, got {self.dp}"
        yield not self.global_batch or self.dp == 1, text
        text = f"--global-batch gives ranks equal shares: seq_len × batch_size must be a multiple of {self.ranks} ranks"
        unknown = self.batch_size is None and self.resume  # the checkpoint's
        fine = not self.global_batch or unknown or self.plan_tokens % self.ranks == 0
        yield fine, f"{text}, got {self.plan_tokens:,} tokens"
        yield self.global_batch or self.workers == 0, f"--workers {self.workers} are for --global-batch; add that"

    @property
    def plan_tokens(self) -> int:
        """Tokens of one plan: of a sequence, or of a step under ``--global-batch``."""
        return self.seq_len * (self.batch_size or self.dp) if self.global_batch else self.seq_len

    @property
    def cp(self) -> int:
        """Ranks that share a sequence."""
        return self.ranks // self.dp

    @property
    def cp_axes(self) -> int | tuple[int, int]:
        """Size of the cp axis, or of both axes, as `make_plan` takes it."""
        return self.cp if self.inner == 1 else (self.cp // self.inner, self.inner)

    def completed(self, batch_size: int | None = None, max_document: int | None = None) -> TrainConfig:
        """These options with both values filled in: their own, else the arguments (a checkpoint's), else defaults."""
        sized = replace(self, batch_size=self.batch_size or batch_size or self.dp)
        return replace(sized, max_document=self.max_document or max_document or sized.plan_tokens)

    def as_dict(self) -> dict[str, Any]:
        """All options, nested ones as dictionaries."""
        return asdict(self)
