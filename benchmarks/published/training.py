"""Training steps and prefills of published measurements, with the step of `spanwise.advice`."""

from __future__ import annotations

import dataclasses
import re

from benchmarks.published import attention
from benchmarks.published.machines import Kernel, Machine
from benchmarks.published.rows import Setting
from spanwise.advice.model import Model, Step, apart

# Asynchronous tensor parallelism hides about half of its collectives. Stages of an interleaved pipeline on a device,
# and micro-batches a stage where a row gives no batch.
_ASYNC_EXPOSED, _INTERLEAVED, _MICRO_BATCHES = 0.5, 4, 4


@dataclasses.dataclass(frozen=True)
class Run:
    """A step, its sequences, and how a CP group shares them."""

    step: Step
    seq_len: int
    cp: int
    micro_batch: float  # sequences at a time in a replica
    micro_batches: int
    interleaved: int
    method: str

    @property
    def tokens(self) -> float:
        """Of a device, as throughputs count them."""
        whole = self.seq_len * self.micro_batch * self.micro_batches
        return float(whole) / self.cp / self.step.tp / self.step.pp

    @property
    def model_flops(self) -> float:
        """Operations of a token as Megatron counts them: no recomputation, all pairs (arXiv:2104.04473, eq. 3)."""
        model = self.step.model
        return 6.0 * model.parameters + 12.0 * model.layers * model.heads * model.head_dim * self.seq_len

    def seconds(self, machine: Machine, kernel: Kernel) -> float:
        """Of a whole step."""
        step, model = self.step, self.step.model
        beside = dataclasses.replace(machine, hardware=apart(machine.hardware, step.tp))
        problem = attention.Problem(
            ((self.seq_len,),), True, max(1, model.heads // step.tp), max(1, model.kv_heads // step.tp),
            model.head_dim, beside, kernel,
        )  # fmt: skip
        method = attention.method_of(self.method, self.cp)
        one, other = (attention.seconds(problem, method, backward=backward) for backward in (False, True))
        attend = (one * (1 + (step.recomputed == 1)) + other) * self.micro_batch * model.layers / step.pp
        compute = sum(step.compute(self.seq_len * self.micro_batch / self.cp).values()) + attend
        compute *= self.micro_batches + (step.pp - 1) / self.interleaved
        return compute + step.sharding(compute)

    @property
    def memory(self) -> float:
        """Bytes of a device; a pipeline's first stage holds a micro-batch for each stage."""
        return self.step.memory(self.seq_len * self.micro_batch * min(self.step.pp, self.micro_batches) / self.cp)


def run_of(setting: Setting, machine: Machine) -> Run:
    """The run that a setting describes; ``ValueError`` if it lacks a number."""
    names = ("layers", "dim", "heads", "kv_heads", "head_dim", "ffn", "vocab")
    missing = [key for key in (*names, "seq_len", "gpus") if key not in setting]
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
    how = " ".join(str(get(key, "")) for key in ("method", "exchange", "framework", "attention")).strip()
    if get("load_balance") and how == "ring":
        how = "zigzag"
    float8 = re.search("fp8|float8", str(get("precision", "")).lower())
    asynchronous = bool(get("async_tp")) or "async" in str(get("variant", "")).lower()
    step = Step(
        Model(*(setting[name] for name in names), tied=False), machine.hardware, dp * cp, tp, pp,
        recomputed=1.0 if "full" in words else 0.4 if "selective" in words else 0.0,
        compiled=bool(get("compile")) or get("mode") == "compile" or "Megatron" in how,
        product_speed=machine.float8 if float8 else 1.0, exposed=_ASYNC_EXPOSED if asynchronous else 1.0,
    )  # fmt: skip
    batch, batches = (1.0, int(local)) if pp > 1 else (float(local), 1)
    interleaved = 1 if get("schedule") == "1F1B" else _INTERLEAVED
    return Run(step, setting["seq_len"], cp, batch, batches, interleaved, how or "zigzag")


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


def units(run: Run, name: str, value: float) -> float | None:
    """A measurement of a step as seconds; None for what is not its time."""
    if re.search("gib|gb|mfu|percent|mb$|speedup|without_cp", name):
        return None
    if "tokens_per_s" in name:
        return run.tokens / value
    if "tflops" in name:
        return run.tokens * run.model_flops / (value * 1e12)
    if name in ("step_s", "iteration_s"):
        return value
    return value / 1e3 if name in ("step_ms", "ms") else None
