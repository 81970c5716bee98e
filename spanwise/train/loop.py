"""The training step on every rank: pack, plan, shard, forward, backward, clip, update.

    documents -> PackedSequence -> SpanMask -> Plan -> RankPlan, local batch -> Decoder -> loss

Every rank packs the same sequences and makes the same plan; neither is sent. The mesh is dp × cp (cp may be two axes):
the ranks of cp share a sequence, each dp coordinate takes other sequences, and FSDP2 shards parameters over all ranks.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import spanwise
from spanwise.train import checkpoint
from spanwise.train.config import TrainConfig
from spanwise.train.data import DocumentStream, PackedSequence, num_targets
from spanwise.train.display import Display
from spanwise.train.inputs import Inputs, read_inputs
from spanwise.train.launch import Rank, StopRequest, cores, join_ranks
from spanwise.train.metrics import Metrics
from spanwise.train.model import Decoder, build_model
from spanwise.train.plans import load_global_batches, plan_sequence
from spanwise.train.prove import IGNORE, TOLERANCES, Reference, largest


def build_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; norms (1-D parameters) do not decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then constant: the rate of a step does not depend on the length of the run."""
    return config.learning_rate * min(1.0, (step + 1) / (config.warmup + 1))


def differences(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The entries, nested ones too, in which `other` differs from `first`, in words."""
    found = []
    for name in sorted(first.keys() | other.keys()):
        here, there = first.get(name), other.get(name)
        if isinstance(here, dict) and isinstance(there, dict):
            found += [f"{name}.{text}" for text in differences(here, there)]
        elif here != there:
            found.append(f"{name} is {there!r} there and {here!r} on rank 0")
    return found


class Trainer:
    """A rank's part of a run, from process group to last step."""

    def __init__(self, config: TrainConfig, rank: Rank, inputs: Inputs | None = None):
        self.rank = rank
        self.corpus, found = inputs or read_inputs(config)
        self.state = found.state if found else None
        self.skipped = found.skipped if found else ""
        if self.state is not None:
            config = config.completed(self.state.batch_size, self.state.max_document)
        self.config = config = config.completed()
        assert config.batch_size is not None and config.max_document is not None
        self.batch_size = config.batch_size
        self._start_ranks()
        self._compare_ranks()

        train, held_out = self.corpus.split(config.held_out)
        self.stream = DocumentStream(train, config.seed, config.max_document)
        self.held_out = DocumentStream(held_out, 0, config.max_document) if held_out else None
        self.step = self.state.step if self.state else 0
        self.position = self.state.position if self.state else 0
        self._build_sharded()
        if found is not None:
            checkpoint.load(found.path, self.model, self.optimizer)
        self.proved: bool | None = None  # of the steps of this run; known to rank 0
        self.prove_until = self.step + config.prove
        self.reference: Reference | None = None
        if config.prove:
            self.reference = Reference(self.model, self.optimizer, self._build_reference, cores())
        self.global_batches: Iterator[dict[str, Any]] | None = None
        if config.global_batch:
            self.global_batches = load_global_batches(config, self.stream, self.position, self.rank.rank)
        self._open_metrics()

    def _start_ranks(self) -> None:
        """Join the process group and make the meshes: dp × cp, and all ranks."""
        config = self.config
        self.device = join_ranks(self.rank, config.device)
        cp = config.cp_axes
        sizes, names = ((cp,), ("cp",)) if isinstance(cp, int) else (cp, ("cp_outer", "cp_inner"))
        self.mesh = init_device_mesh(config.device, (config.dp, *sizes), mesh_dim_names=("dp", *names))
        self.all_ranks = init_device_mesh(config.device, (config.ranks,), mesh_dim_names=("all",))
        self.cp_mesh = self.mesh[names]
        self.dp_index = self.mesh.get_local_rank("dp")

    def _build_sharded(self) -> None:
        """The model under context parallelism and FSDP2, and its optimizer."""
        self.model: torch.nn.Module = self._build().to(self.device)
        style = spanwise.ContextParallel(attention_type="sdpa")
        parallelize_module(self.model, self.cp_mesh, {"layers.*.attention.inner": style})
        for layer in self.model.layers:
            fully_shard(layer, mesh=self.all_ranks)
        fully_shard(self.model, mesh=self.all_ranks)
        self.optimizer = build_optimizer(self.model, self.config)

    def _open_metrics(self) -> None:
        """Metrics of this run, after those of the run that it resumes; an earlier run's files are set aside."""
        config, writes = self.config, self.rank.rank == 0
        self.metrics = Metrics(
            Path(config.out, "metrics.json") if config.out and writes else None,
            ranks=config.ranks,
            dp=config.dp,
            cp=config.cp,
            data=self.corpus.describe(),
            torch=torch.__version__,
            config=config.as_dict(),
        )
        self.set_aside: Path | None = None
        if config.out and writes:
            Path(config.out).mkdir(parents=True, exist_ok=True)
            self.set_aside = None if config.resume else checkpoint.set_aside(config.out)
        if self.state is not None:
            self.metrics.restore(self.step)
        self.metrics.values["runs"].append({"first_step": self.step, "ranks": config.ranks, "dp": config.dp})

    def _build(self) -> Decoder:
        return build_model(self.config.model, self.config.seed, getattr(torch, self.config.dtype))

    def _build_reference(self) -> tuple[Decoder, torch.optim.Optimizer]:
        model = self._build().to(self.device)
        return model, build_optimizer(model, self.config)

    def _compare_ranks(self) -> None:
        """Refuse hosts that differ in data, options or checkpoints."""
        options = {name: value for name, value in self.config.as_dict().items() if name not in ("data", "out")}
        if self.state is not None:
            options |= {f"checkpoint's {name}": value for name, value in dataclasses.asdict(self.state).items()}
        mine = options | {"data": f"{self.corpus.describe()} ({self.corpus.digest})"}
        everyone: list[Any] = [None] * self.rank.size
        dist.all_gather_object(everyone, mine)
        for other, theirs in enumerate(everyone):
            different = differences(everyone[0], theirs)
            if different:
                raise ValueError(
                    f"rank {other} differs from rank 0: {'; '.join(different)}; "
                    "start every host with the same command and the same files"
                )

    # One step

    def _local(self, sequence: PackedSequence, train: bool = True) -> tuple[dict[str, torch.Tensor], Any, Any]:
        """This rank's batch of a sequence, its `RankPlan` and the `Plan`. Without `train` the batch has no targets."""
        plan = plan_sequence(self.config, sequence.cu_seqlens)
        tokens = torch.as_tensor(sequence.tokens, device=self.device)[None]
        labels = tokens if train else torch.full_like(tokens, IGNORE)
        local_plan = plan.local(self.cp_mesh, self.device)
        batch = spanwise.shard_batch(
            {"input_ids": tokens, "labels": labels}, plan, self.cp_mesh, cu_seqlens=sequence.cu_seqlens
        )
        return batch, local_plan, plan

    def _global_batch(self, batch: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Any, Any]:
        """The same of a global batch, of which this rank has read its own tokens."""
        tensors = {name: batch[name].to(self.device) for name in ("input_ids", "labels", "position_ids")}
        return tensors, batch["plan"].local(self.cp_mesh, self.device), batch["plan"]

    def _loss(self, batch: dict[str, torch.Tensor], local_plan: Any, targets: int) -> torch.Tensor:
        logits = self.model(batch["input_ids"], batch["position_ids"], local_plan)
        return spanwise.cross_entropy(logits, batch["labels"], self.all_ranks, num_valid=targets)

    def train_step(self, stop: StopRequest) -> int:
        """One optimizer step over all ranks. Returns the signal by which some rank was asked to stop, or 0."""
        started = time.perf_counter()
        length = self.config.plan_tokens
        count = 1 if self.config.global_batch else self.batch_size
        starts = [self.position + index * length for index in range(count)]
        boundaries = [self.stream.cu_seqlens(start, length) for start in starts]
        loss, imbalance, received = self._backward(starts, max(sum(map(num_targets, boundaries)), 1))
        rate = learning_rate(self.config, self.step)
        seconds = time.perf_counter() - started
        if self.reference is not None:
            self._prove(self.reference, starts, loss, rate)

        started = time.perf_counter()
        norm = self._update(loss, rate)
        mine = torch.tensor([imbalance, received, stop.asked()], dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self.rank.size)]
        dist.all_gather(parts, mine)
        everyone = torch.stack(parts)
        seconds += time.perf_counter() - started

        self.step += 1
        self.rank.progressed()
        self.position += count * length
        self.metrics.add_step(
            losses=loss,
            imbalance=everyone[:, 0].max().item(),
            recv_tokens=everyone[:, 1].long().tolist(),
            tokens_per_second=count * length / seconds,
            grad_norms=norm,
            learning_rates=rate,
            documents=sum(len(cu) - 1 for cu in boundaries),
            epochs=self.position / self.stream.epoch_tokens,
        )
        return int(everyone[:, 2].max().item())

    def _backward(self, starts: list[int], targets: int) -> tuple[float, float, int]:
        """Forward and backward of this rank's sequences: loss, largest imbalance, K/V tokens received a layer."""
        self.optimizer.zero_grad()
        loss, imbalance, received = 0.0, 1.0, 0
        for start in starts[self.dp_index :: self.config.dp]:
            if self.global_batches is not None:
                batch, local_plan, plan = self._global_batch(next(self.global_batches))
            else:
                batch, local_plan, plan = self._local(self.stream.sequence(start, self.config.seq_len))
            part = self._loss(batch, local_plan, targets)
            part.backward()
            loss += part.item()
            imbalance = max(imbalance, float(plan.imbalance()))
            received += int(plan.recv_tokens()[local_plan.rank])
        return loss, imbalance, received

    def _prove(self, reference: Reference, starts: list[int], loss: float, rate: float) -> None:
        """Repeat the step on one device; rank 0 notes the differences."""
        config = self.config
        sequences = [self.stream.sequence(s, config.plan_tokens) for s in starts] if self.rank.rank == 0 else []
        floor = TOLERANCES[config.dtype].floor
        found = reference.compare(sequences, self.model, rate, config.max_grad_norm, floor)
        if found is not None:
            self._note_proof(loss, *found)
        if self.step + 1 >= self.prove_until:
            self.reference = None

    def _update(self, loss: float, rate: float) -> float:
        """Clip the gradients and step the optimizer. Returns the norm before clipping."""
        found = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        norm = (found.full_tensor() if isinstance(found, DTensor) else found).item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"step {self.step + 1} has loss {loss} and gradient norm {norm}; no checkpoint holds this step: "
                "resume from the last one with a smaller --learning-rate or --max-grad-norm"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return norm

    def _note_proof(self, loss: float, reference_loss: float, grad_error: float) -> None:
        values, tolerance = self.metrics.values, TOLERANCES[self.config.dtype]
        if self.proved is None:  # this run's first compared step
            values["proof"] = {"run": len(values["runs"]), "first_step": self.step, "tolerance": tolerance._asdict()}
            values.update(reference_losses=[], loss_errors=[], grad_errors=[])
        values["reference_losses"].append(reference_loss)
        values["loss_errors"].append(abs(loss - reference_loss))
        values["grad_errors"].append(grad_error)
        values["max_loss_error"] = largest(values["loss_errors"])
        values["max_grad_error"] = largest(values["grad_errors"])
        # A NaN fails these comparisons.
        self.proved = values["max_loss_error"] <= tolerance.loss and values["max_grad_error"] <= tolerance.gradient
        values["proved"] = self.proved

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Mean loss over the targets of the first held-out sequences, or None without held-out documents."""
        if self.held_out is None:
            return None
        length, total, dp = self.config.seq_len, self.held_out.epoch_tokens, self.config.dp
        starts = range(0, total, length)[: self.config.eval_sequences]
        sequences = [self.held_out.sequence(start, min(length, total - start)) for start in starts]
        targets = max(sum(sequence.num_targets for sequence in sequences), 1)
        loss = 0.0
        for first in range(0, len(sequences), dp):
            index = first + self.dp_index
            # Ranks without a sequence in the last round take part with one that has no targets.
            sequence = sequences[index] if index < len(sequences) else sequences[first]
            batch, local_plan, _ = self._local(sequence, train=index < len(sequences))
            loss += self._loss(batch, local_plan, targets).item()
            self.rank.progressed()
        return loss

    def save(self) -> Path:
        """Write metrics, then a checkpoint: metrics may be ahead of the newest checkpoint, never behind it."""
        self.metrics.save(force=True)
        config = self.config
        state = checkpoint.RunState(
            step=self.step,
            position=self.position,
            model=dataclasses.asdict(config.model),
            dtype=config.dtype,
            seed=config.seed,
            held_out=config.held_out,
            batch_size=self.batch_size,
            max_document=config.max_document or config.plan_tokens,
            data_digest=self.corpus.digest,
            data_text=self.corpus.describe(),
            global_batch=config.global_batch,
        )
        return checkpoint.save(config.out or "", state, self.model, self.optimizer, keep=config.keep)

    def run(self, stop: StopRequest) -> int:
        """Run the steps that remain, and return the exit status.

        128 + the signal that ended the run early; else 1, on rank 0 after everything is saved, if one device disagrees;
        else 0.
        """
        config, first = self.config, self.step
        evaluated = -1
        with Display(self.rank.rank == 0, config.steps, first) as display:
            display.line(self._headline())
            if self.set_aside is not None:
                display.line(f"{config.out} held an earlier run; it is kept in {self.set_aside}")
            if self.skipped:
                display.line(f"damaged checkpoints were passed over: {self.skipped}; going on from step {first}")
            asked = 0
            try:
                while self.step < config.steps and not asked:
                    asked = self.train_step(stop)
                    display.step(self.metrics.values)
                    if config.eval_every and self.step % config.eval_every == 0:
                        evaluated = self._evaluate_and_note(display)
                    if config.save_every and self.step % config.save_every == 0 and self.step < config.steps:
                        self.save()
                    self.metrics.save()
                if not asked and evaluated != self.step and self.step > first:
                    self._evaluate_and_note(display)
                if config.out is not None and self.step > first:
                    path = self.save()
                    if asked:
                        display.line(f"stopped after step {self.step}; saved {path}; go on with --resume")
                elif asked:
                    display.line(f"stopped after step {self.step}; nothing was saved, because there is no --out")
            finally:
                self.metrics.save(force=True)
                self.global_batches = None  # ends the workers
        display.summary(self.metrics.values, config.out)
        return 128 + asked if asked else int(self.proved is False)

    def _evaluate_and_note(self, display: Display) -> int:
        loss = self.evaluate()
        if loss is not None:
            self.metrics.values["eval_losses"].append({"step": self.step, "loss": loss})
            display.line(f"held-out loss after step {self.step}: {loss:.4f}")
        return self.step

    def _headline(self) -> str:
        config = self.config
        parameters = sum(p.numel() for p in self.model.parameters())
        together = "one plan for all" if config.global_batch else f"dp {config.dp} × cp {config.cp}"
        text = (
            f"{self.corpus.describe()}; {parameters:,} parameters; {config.ranks} ranks ({together}); "
            f"{config.batch_size} × {config.seq_len:,} tokens a step"
        )
        if self.corpus.skipped:
            text += f"; {self.corpus.skipped} empty files left out"
        if self.step >= config.steps:
            text += f"; already at step {self.step}: raise --steps to go on"
        elif self.step:
            text += f"; resumed at step {self.step}"
        return text


def run_rank(rank: Rank, config: TrainConfig, inputs: Inputs) -> int:
    """A rank from start to end; `launch` and torchrun start it."""
    stop = StopRequest(rank)
    try:
        return Trainer(config, rank, inputs).run(stop)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
