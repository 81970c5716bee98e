"""Seconds of a training step, and of a prefill, of a dense transformer.

step = (matrix products + attention + element-wise operations + exposed tensor parallelism) / pipeline's efficiency
     + collectives of sharded parameters that compute does not hide + optimizer
"""

from __future__ import annotations

import dataclasses
import re

from benchmarks.published import attention
from benchmarks.published.machines import CONTENTION, Kernel, Machine
from benchmarks.published.rows import Setting

# Passes over a token's hidden state in forward and backward of a layer. Eager: two norms 70, activation of a width of
# 3.5 42, rotations 25, layouts and residuals 60. Compiled: each of these reads its inputs and writes its results once.
_PASSES, _PASSES_COMPILED = 200, 70
FORWARD_PASSES, FORWARD_PASSES_COMPILED = _PASSES / 3, _PASSES_COMPILED / 3
# Bytes of an optimizer step for a parameter: three float32 states and the gradient, read, and written but for the last.
_OPTIMIZER_BYTES = 28
# Asynchronous tensor parallelism hides about half of its collectives. Stages of an interleaved pipeline on a device,
# and micro-batches a stage where a row gives no batch.
_ASYNC_EXPOSED, _INTERLEAVED, _MICRO_BATCHES = 0.5, 4, 4


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step as numbers: a model, its parallelism, and tokens of one pipeline's micro-batch."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    seq_len: int
    micro_batch: float  # sequences at a time in a replica
    micro_batches: int
    interleaved: int
    dp: int
    tp: int
    cp: int
    pp: int
    float8: bool
    recomputed: float  # fraction of the forward that runs twice
    compiled: bool
    asynchronous: bool
    method: str

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def parameters(self) -> float:
        """Of all layers, and of the output projection."""
        attention_part = self.dim * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention_part + 3.0 * self.dim * self.ffn) + self.vocab * self.dim

    @property
    def tokens(self) -> float:
        """Of all replicas in a step."""
        return float(self.seq_len) * self.micro_batch * self.micro_batches * self.dp

    @property
    def model_flops(self) -> float:
        """Operations of a token as Megatron counts them: no recomputation, all pairs (arXiv:2104.04473, eq. 3)."""
        return 6.0 * self.parameters + 12.0 * self.layers * self.heads * self.head_dim * self.seq_len


def step_of(setting: Setting) -> Step:
    """The step that a setting describes; ``ValueError`` if it lacks a number."""
    missing = [key for key in ("layers", "dim", "heads", "ffn", "vocab", "seq_len", "gpus") if key not in setting]
    if missing:
        raise ValueError(f"the setting does not give {', '.join(missing)}")
    get = setting.get
    words = f"{get('checkpointing', '')}".lower()
    parallel = dict(re.findall(r"(FSDP|TP)(\d+)", str(get("parallel", ""))))
    tp, cp, pp = int(get("tp") or parallel.get("TP", 1)), int(get("cp") or 1), int(get("pp") or 1)
    dp = setting["gpus"] // (tp * cp * pp)
    local = get("local_batch") or get("batch_per_dp")
    if local is None:
        local = max(1, int(get("global_batch") or dp) // dp) if pp == 1 else _MICRO_BATCHES * pp
    recomputed = 1.0 if "full" in words else 0.4 if "selective" in words else 0.0
    how = " ".join(str(get(key, "")) for key in ("method", "exchange", "framework", "attention")).strip()
    if get("load_balance") and how == "ring":
        how = "zigzag"
    sizes = {key: setting[key] for key in ("layers", "dim", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq_len")}
    fused = bool(get("compile")) or get("mode") == "compile" or "Megatron" in how or "graph" in str(get("compiler", ""))
    return Step(
        **sizes, micro_batch=1.0 if pp > 1 else float(local), micro_batches=int(local) if pp > 1 else 1, dp=dp, tp=tp,
        cp=cp, pp=pp, interleaved=1 if get("schedule") == "1F1B" else _INTERLEAVED, recomputed=recomputed,
        float8=bool(re.search("fp8|float8", str(get("precision", "")).lower())), compiled=fused,
        asynchronous=bool(get("async_tp")) or "async" in str(get("variant", "")).lower(), method=how or "zigzag",
    )  # fmt: skip


def attention_seconds(step: Step, machine: Machine, kernel: Kernel) -> float:
    """Of a rank's layers for one micro-batch, forward and backward, with what is recomputed."""
    method = attention.method_of(step.method, step.cp)
    problem = attention.Problem(
        ((step.seq_len,),), True, max(1, step.heads // step.tp), max(1, step.kv_heads // step.tp), step.head_dim,
        beside(machine, step.tp), kernel,
    )  # fmt: skip
    one, other = (attention.seconds(problem, method, backward=backward) for backward in (False, True))
    return (one * (1 + (step.recomputed == 1)) + other) * step.micro_batch * step.layers / step.pp


def beside(machine: Machine, inner: int) -> Machine:
    """The machine as seen by groups whose ranks are so many places apart."""
    hardware = machine.hardware
    size = (hardware.links[0].ranks or 1) // inner
    if inner > 1:
        links = hardware.links[1:] if size < 2 else hardware.with_host_size(size).links
        hardware = dataclasses.replace(hardware, links=links)
    return dataclasses.replace(machine, hardware=hardware)


def seconds(step: Step, machine: Machine, kernel: Kernel) -> float:
    """Of a whole step."""
    hardware = machine.hardware
    tokens = step.seq_len * step.micro_batch / step.cp  # of a rank's micro-batch
    own = step.parameters / step.tp / step.pp
    flops = 2.0 * own * tokens * (3 + step.recomputed)
    products = flops / (hardware.matmul_flops * (machine.float8 if step.float8 else 1.0))
    passes = (_PASSES_COMPILED if step.compiled else _PASSES) * (1 + step.recomputed / 3)
    rest = passes * tokens * step.dim * 2 * step.layers / step.pp / hardware.memory_bandwidth
    compute = products + rest / step.tp + attention_seconds(step, machine, kernel)
    if step.tp > 1:  # gathered before and scattered after attention and feed-forward, each way
        shard = tokens / step.tp * step.dim * 2
        once = hardware.all_gather_seconds(shard, step.tp) + hardware.reduce_scatter_seconds(shard, step.tp)
        exposed = _ASYNC_EXPOSED if step.asynchronous else 1.0
        compute += exposed * 2 * once * (2 + (step.recomputed == 1)) * step.layers / step.pp
    total = compute * (step.micro_batches + (step.pp - 1) / step.interleaved)
    sharded = step.dp * step.cp
    if sharded > 1:
        far = beside(machine, step.tp).hardware
        part = 2 * own / sharded
        gathers = 2 * far.all_gather_seconds(part, sharded) + far.reduce_scatter_seconds(2 * part, sharded)
        total = max(total + CONTENTION * min(gathers, total), gathers)
    return total + own / sharded * _OPTIMIZER_BYTES / hardware.memory_bandwidth


def prefill_seconds(setting: Setting, machine: Machine, kernel: Kernel, moved: str) -> float:
    """Of a forward over new tokens after cached ones; a ring of hosts passes K/V ("kv") or queries ("q")."""
    new, cached = setting.get("new") or setting["seq_len"], setting.get("cached") or 0
    tp, cp, heads, kv_heads = setting["tp_in_node"], setting["cp"], setting["heads"], setting["kv_heads"]
    layers, dim, head_dim = setting["layers"], setting["dim"], setting["head_dim"]
    hardware = machine.hardware
    per_layer = dim * head_dim * 2 * (heads + kv_heads) + 3.0 * dim * setting["ffn"]
    flops, tokens = 2.0 * per_layer / tp * new / cp, new / cp
    weights = per_layer / tp  # bytes in float8, read once
    products = max(flops / (hardware.matmul_flops * machine.float8), weights / hardware.memory_bandwidth)
    pairs = new * cached + new * (new + 1) / 2
    attend = 4.0 * pairs / cp * heads / tp * head_dim / kernel.forward
    all_reduce = 2 * 2 * hardware.all_gather_seconds(tokens / tp * dim * 2, tp)
    far = hardware.links[-1]
    keys = (new + cached) / cp * 2 * kv_heads / tp * head_dim * 2
    rows = tokens * heads / tp * head_dim * 2
    hop = far.latency + (keys if moved == "kv" else rows) / far.bandwidth
    back = 0.0 if moved == "kv" else far.latency + rows / far.bandwidth  # an all-to-all of partial outputs
    ring = attend / cp + (cp - 1) * max(attend / cp, hop) + back
    return layers * (products + all_reduce + ring)


def units(step: Step, name: str, value: float) -> float | None:
    """A measurement of a step as seconds; None for what is not its time."""
    if re.search("gib|gb|mfu|percent|mb$|speedup|without_cp", name):
        return None
    if "tokens_per_s" in name:
        return step.tokens / step.gpus / value
    if "tflops" in name:
        return step.tokens / step.gpus * step.model_flops / (value * 1e12)
    if name in ("step_s", "iteration_s"):
        return value
    return value / 1e3 if name in ("step_ms", "ms") else None
