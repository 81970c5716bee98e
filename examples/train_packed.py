"""Train a decoder on packed documents, its sequences cut over ranks, and compare the first steps with one device.

    files -> documents -> GlobalBatches (a plan for each sequence) -> this rank's tokens -> decoder under FSDP2 -> loss

Run: torchrun --nproc-per-node 2 examples/train_packed.py
`--resume` continues on any number of ranks; `--global-batch` plans all sequences of a step as one. The exit status is 1
if a loss or a gradient differs from one device.
"""

import argparse
import json
import os
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from decoder import Decoder
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import spanwise

BOS, EOS = 256, 257
SIZES = {"dim": 128, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 384}
# Of losses in nats, and of `gradient_error`: twelve steps in float32 differ by 6e-7 and 5e-5, wrong attention by 0.6.
TOLERANCES = {"float32": (1e-4, 1e-3), "float64": (1e-9, 1e-9)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", nargs="*", default=[], help="files, a document each; default: Python's own sources")
    parser.add_argument("--out", type=Path, default="runs/train_packed", help="folder of checkpoints and metrics.json")
    parser.add_argument("--dp", type=int, default=1, help="sequences of a step; the ranks of each share it")
    parser.add_argument("--global-batch", action="store_true", help="one plan for all sequences of a step")
    parser.add_argument("--steps", type=int, default=20, help="counted from the start of the first run")
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=list(TOLERANCES), default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--exchange", default="auto", help="as make_plan takes it")
    parser.add_argument("--prove", type=int, default=3, help="first steps of this run to repeat on one device")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    return parser.parse_args()


def read_documents(paths: list[str]) -> list[np.ndarray]:
    """Tokens of each file: its bytes between BOS and EOS."""
    paths = paths or sorted(map(str, Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    return [np.concatenate(([BOS], np.fromfile(path, dtype=np.uint8), [EOS])) for path in paths]


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, alone: bool = False) -> None:
    """Read a checkpoint into a model, sharded over all ranks or whole in one process."""
    state = get_state_dict(model, optimizer)
    dcp.load({"model": state[0], "optimizer": state[1]}, checkpoint_id=path, no_dist=alone)
    set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])


def update(model: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> None:
    """Clip the gradients and step; the rate warms up over ten steps."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (done + 1) / 11)
    optimizer.step()
    optimizer.zero_grad()


def one_device_loss(model: nn.Module, sequences: list[list[np.ndarray]], device: torch.device) -> float:
    """Mean loss of sequences, lists of documents: a dense mask, torch's attention and loss. Leaves the gradients."""
    num_valid, total = sum(len(tokens) - 1 for documents in sequences for tokens in documents), 0.0
    for documents in sequences:
        tokens = torch.from_numpy(np.concatenate(documents))
        document = torch.cat([torch.full((len(x),), i) for i, x in enumerate(documents)])
        positions = torch.cat([torch.arange(len(x)) for x in documents])
        labels = torch.cat([F.pad(torch.from_numpy(x[1:]), (0, 1), value=-100) for x in documents])
        mask = (document[:, None] == document).tril()
        logits = model(tokens[None].to(device), positions[None].to(device), mask[None, None].to(device))
        loss = F.cross_entropy(logits[0], labels.to(device), ignore_index=-100, reduction="sum") / num_valid
        loss.backward()
        total += loss.item()
    return total


def gradient_error(gradients: dict[str, torch.Tensor], model: nn.Module) -> float:
    """Largest over all tensors of max |g - g_ref| / max |g_ref|, this at least 1e-4 of the model's largest."""
    references = {name: parameter.grad for name, parameter in model.named_parameters()}
    least = 1e-4 * max(g.abs().max() for g in references.values())
    errors = [(gradients[name] - g).abs().max() / g.abs().max().clamp(min=least) for name, g in references.items()]
    return torch.stack(errors).max().item()  # NaN if one of them is


class Run:
    def __init__(self, args: argparse.Namespace):
        self.args, size, self.rank = args, dist.get_world_size(), dist.get_rank()
        if size % args.dp or args.seq_len * args.dp % size:
            raise ValueError(f"{size} ranks must be a multiple of --dp {args.dp}, and divide --dp x --seq-len tokens")
        self.device = torch.device(args.device, int(os.environ["LOCAL_RANK"]) if args.device == "cuda" else None)
        self.documents = read_documents(args.data)
        self.num_plans = 1 if args.global_batch else args.dp  # in a step
        grid = (self.num_plans, size // self.num_plans)
        self.mesh = dist.init_device_mesh(args.device, grid, mesh_dim_names=("dp", "cp"))
        self.ranks = dist.init_device_mesh(args.device, (size,), mesh_dim_names=("all",))
        self.cp, dtype = self.mesh["cp"], getattr(torch, args.dtype)
        self.batches = spanwise.GlobalBatches(
            [len(tokens) for tokens in self.documents], self.cp.size(), args.seq_len * args.dp // size, seed=0,
            max_document=args.seq_len, cut=True, epochs=None, exchange=args.exchange, num_q_heads=4, num_kv_heads=2,
            head_dim=32, dtype=dtype, hardware=spanwise.CPU_HOST if args.device == "cpu" else spanwise.H100,
        )  # fmt: skip
        self.model, self.single = (Decoder(num_layers=args.layers, **SIZES).to(self.device, dtype) for _ in range(2))
        style = spanwise.ContextParallel(attention_type="sdpa")
        parallelize_module(self.model, self.cp, {"layers.*.inner": style})
        for module in (*self.model.layers, self.model):
            fully_shard(module, mesh=self.ranks)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.single_optimizer = torch.optim.AdamW(self.single.parameters())
        self.rows: list[dict[str, float]] = []
        if args.resume:
            self.resume()
        elif any(args.out.glob("step-*")):
            raise ValueError(f"{args.out} holds checkpoints of a run: give --resume, or another --out")
        self.prove_until = len(self.rows) + args.prove

    def resume(self) -> None:
        saved = sorted(path.parent for path in self.args.out.glob("step-*/.metadata"))
        if not saved:
            raise ValueError(f"no checkpoint in {self.args.out}; start without --resume")
        metrics = json.loads((self.args.out / "metrics.json").read_text())
        if metrics["documents"] != self.batches.config:
            raise ValueError(f"the run in {self.args.out} had other documents, or another --seq-len")
        load(saved[-1], self.model, self.optimizer)
        if self.rank == 0 and self.args.prove:
            load(saved[-1], self.single, self.single_optimizer, alone=True)
        self.rows = metrics["steps"][: int(saved[-1].name.removeprefix("step-"))]

    def save(self) -> None:
        """Metrics, then the checkpoint: it counts once its index, written last, is there."""
        if self.rank == 0:
            self.args.out.mkdir(parents=True, exist_ok=True)
            metrics = {"documents": self.batches.config, "steps": self.rows}
            (self.args.out / "metrics.json").write_text(json.dumps(metrics, indent=1))
        state = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=self.args.out / f"step-{len(self.rows):06}")

    def step(self) -> None:
        """One step of all ranks; appends its figures, with those of one device where that repeats the step."""
        begin, done, tokens = time.perf_counter(), len(self.rows), self.batches.batch_tokens
        starts = [(done * self.num_plans + i) * tokens for i in range(self.num_plans)]
        pieces = [self.batches.order.pieces(start, tokens) for start in starts]  # (document, start, stop)
        num_valid = sum(int((p[:, 2] - p[:, 1] - 1).sum()) for p in pieces)
        batch = self.batches.at(starts[self.mesh.get_local_rank("dp")])
        mine = batch.load(self.documents, self.cp.get_local_rank())
        ids, labels, positions = (mine[name].to(self.device) for name in ("input_ids", "labels", "position_ids"))
        logits = self.model(ids, positions, batch.plan.local(self.cp, self.device))
        loss = spanwise.cross_entropy(logits, labels, self.ranks, num_valid=num_valid)  # mean over all ranks
        loss.backward()
        figures = torch.tensor([batch.plan.imbalance(), float(batch.plan.recv_tokens().max())])
        dist.all_reduce(figures, dist.ReduceOp.MAX)  # over the plans of the step
        row = {"loss": loss.item(), "imbalance": figures[0].item(), "recv_tokens": figures[1].item()}
        seconds = time.perf_counter() - begin
        if done < self.prove_until:
            gradients = {name: p.grad.full_tensor() for name, p in self.model.named_parameters()}
            if self.rank == 0:
                sequences = [[self.documents[d][start:stop] for d, start, stop in p.tolist()] for p in pieces]
                expected = one_device_loss(self.single, sequences, self.device)
                row["loss_error"] = abs(row["loss"] - expected)
                row["gradient_error"] = gradient_error(gradients, self.single)
                update(self.single, self.single_optimizer, done)
        begin = time.perf_counter()
        update(self.model, self.optimizer, done)
        row["tokens_per_second"] = tokens * self.num_plans / (seconds + time.perf_counter() - begin)
        self.rows.append(row | {"num_documents": sum(map(len, pieces))})

    def summary(self) -> bool:
        """Print the table that ends a run; False if one device disagrees."""
        columns = {name: np.array([row[name] for row in self.rows if name in row]) for name in self.rows[0]}
        losses, limits, proved = columns["loss"], TOLERANCES[self.args.dtype], True
        table = {}
        table["ranks"] = f"{self.ranks.size()} (dp {self.mesh.size(0)} × cp {self.cp.size()})"
        table["steps"] = f"{len(losses)}"
        table["loss"] = f"{losses[0]:.4f} → {losses[-1]:.4f}"
        table["tokens/s, median"] = f"{np.median(columns['tokens_per_second']):,.0f}"
        table["imbalance, mean (max / mean work)"] = f"{columns['imbalance'].mean():.3f}"
        table["K/V tokens received, largest rank"] = f"{columns['recv_tokens'].mean():,.0f} a layer"
        if errors := [columns[name] for name in ("loss_error", "gradient_error") if name in columns]:
            proved = all(e.max() <= limit for e, limit in zip(errors, limits, strict=True))  # NaN is not
            table["one device, steps compared"] = f"{len(errors[0])}"
            table["largest loss difference"] = f"{errors[0].max():.2e}, at most {limits[0]:g}"
            table["largest gradient difference"] = f"{errors[1].max():.2e}, at most {limits[1]:g}"
            table["the same as one device"] = "proved" if proved else "FAILED"
        table["written to"] = f"{self.args.out}"
        print("\ntrain_packed", *(f"{name:34} │ {value}" for name, value in table.items()), sep="\n")
        return proved


@record
def main() -> None:
    args = parse()
    dist.init_process_group("gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    run = Run(args)
    if run.rank == 0:
        run.batches.at(0)  # compiles the search once for all ranks of this host
    dist.barrier()
    while len(run.rows) < args.steps:
        run.step()
        done, row = len(run.rows), run.rows[-1]
        if run.rank == 0:
            print(f"step {done}/{args.steps}  loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tokens/s  "
                  f"imbalance {row['imbalance']:.3f}  received {row['recv_tokens']:,.0f} tokens")  # fmt: skip
        if done % args.save_every == 0 or done == args.steps:
            run.save()
    proved = run.rank != 0 or run.summary()
    dist.destroy_process_group()
    raise SystemExit(0 if proved else 1)


if __name__ == "__main__":
    main()
