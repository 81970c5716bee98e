"""Each row's prediction: which machine and kernel it names, and which model prices it.

Training steps are those of `spanwise.advice`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable

from benchmarks.published import attention
from benchmarks.published.settings import Kernel, Machine, Row, Setting, machine_of, packs
from spanwise.advice.model import CONTENTION, PASSES, PASSES_COMPILED, Model, Step, apart

# Layers of FLUX.1 (its published configuration): 19 blocks of two streams, 38 of one, each with 12 · dim² weights.
_FLUX_BLOCKS, _FLUX_DIM, _FLUX_HEADS, _FLUX_TOKENS = 57, 3072, 24, 4608
# Asynchronous tensor parallelism hides about half of its collectives. Stages of an interleaved pipeline on a device,
# and micro-batches a stage where a row gives no batch.
_ASYNC_EXPOSED, _INTERLEAVED, _MICRO_BATCHES = 0.5, 4, 4
_REFUSED = {
    "recurrence": "recurrent layers on machines that are not named, or on NPUs",
    "overlap-simulated": "simulated by its authors from cost tables; benchmarks/public_graphs.py reads such graphs",
    "offload": "the model or the host's link is not given",
    "model-accuracy": "a figure about another cost model, not a time",
}

# NVIDIA's containers from before kernels made for Hopper: cuDNN's attention was "its own flavor of flash attention
# (v2)" (pytorch/pytorch#113713), and FlashAttention-3 appeared in July 2024.
_BEFORE_HOPPER = r"NeMo 2(3\.\d\d|4\.0[1-4])"


# What a row raises that lacks a number or has it in another form.
NOT_EXPRESSED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


@dataclasses.dataclass(frozen=True)
class Pair:
    """One measurement of a row: its name, and seconds."""

    name: str
    measured: float
    predicted: float


def pairs(row: Row, factor: float = 1.0, fixed: float = 0.0) -> list[Pair]:
    """Measured and predicted seconds of a row: all compute faster by `factor`, and `fixed` seconds of the host.

    They run beside a collective, and add to everything else.

    Raises:
        ValueError: the row cannot be expressed, and why.
    """
    setting, measured = row.setting, row.measured
    if row.group in _REFUSED:
        raise ValueError(_REFUSED[row.group])
    if re.search("MoE|DeepSeek", str(setting.get("model", ""))):
        raise ValueError("experts: their loads and kernels are not modelled")
    if (measured.get("mfu_percent") or 100) < 15:
        raise ValueError("a utilization below 15 %: the host, not the device, takes the time")
    hardware = str(setting.get("hardware", ""))
    if "Ascend" in hardware or "GB300" in hardware:
        raise ValueError(f"no rates are known for {hardware}")
    machine = machine_of(hardware).scaled(factor)
    kernel = _kernel(row, machine)
    models: dict[str, Callable[..., list[Pair]]] = {
        "attention": _attention, "e2e-train": _step, "overlap-train": _step, "prefill": _prefill,
        "collective": _collective, "overlap-micro": _micro, "diffusion": _diffusion,
    }  # fmt: skip
    if row.group not in models:
        raise ValueError(f"group {row.group!r} is unknown")
    found = [pair for pair in models[row.group](row, machine, kernel) if pair.measured > 0]
    if not found:
        raise ValueError("no time among its measurements")
    beside = row.group == "collective"
    return [
        dataclasses.replace(one, predicted=max(one.predicted, fixed) if beside else one.predicted + fixed)
        for one in found
    ]


def _kernel(row: Row, machine: Machine) -> Kernel:
    words = f"{row.setting.get('method', '')} {row.setting.get('kernel', '')}".lower()
    wanted = "cudnn"
    if "magi" in words.split("(")[0].split("_")[0]:
        wanted = "magi"
    elif re.search("fa3|flash 3|fa4", words):
        wanted = "flash 3"
    elif re.search("fa2|flash-attn 2|flash_attn", words) or re.search(f"torchtitan|{_BEFORE_HOPPER}", row.source):
        wanted = "flash 2"
    return next((kernel for kernel in machine.kernels if kernel.name == wanted), machine.kernels[0])


def _attention(row: Row, machine: Machine, kernel: Kernel) -> list[Pair]:
    setting, found = row.setting, []
    if "heads" not in setting:
        raise ValueError("the attention's shape is not given")
    cp, causal = setting.get("cp", 1), "causal" in str(setting.get("mask", ""))
    problem = attention.Problem(
        packs(setting), causal, setting["heads"], setting.get("kv_heads", setting["heads"]),
        setting.get("head_dim", 128), machine, kernel,
    )  # fmt: skip
    for name, value in row.measured.items():
        if value is None or name == "iter_per_s":
            continue
        words = setting.get("method") or name.removesuffix("_ms").replace("_", " ").replace("padded heads", "")
        method = attention.method_of(words, cp)
        work, directions = str(setting.get("workload", "")), [False, True]  # True: backward
        if name.startswith("bwd") or work == "bwd":
            directions = [True]
        elif name.startswith("fwd") or work in ("fwd", "attention fwd"):
            directions = [False]
        predicted = sum(attention.seconds(problem, method, backward=one) for one in directions)
        if "tflops" in name:
            flops = sum(problem.flops * (2.5 if one else 1.0) for one in directions) / cp
            found.append(Pair(name, flops / (value * 1e12), predicted))
        elif name.endswith(("ms", "_s")):
            found.append(Pair(name, value / 1e3 if name.endswith("ms") else value, predicted))
    return found


def _step(row: Row, machine: Machine, kernel: Kernel) -> list[Pair]:
    found = []
    for name, value in row.measured.items():
        change = {"async_tp": True} if name.startswith("async_tp") else {}
        run, measured = run_of(row.setting | change, machine), None
        if not value or re.search("gib|gb|mfu|percent|mb$|speedup|without_cp", name):
            continue  # not its time
        if "tokens_per_s" in name:
            measured = run.tokens / value
        elif "tflops" in name:
            measured = run.tokens * run.model_flops / (value * 1e12)
        elif name in ("step_s", "iteration_s", "step_ms", "ms"):
            measured = value / 1e3 if name.endswith("ms") else value
        if measured is not None:
            found.append(Pair(name, measured, run.seconds(machine, kernel)))
    return found


def memory(rows: list[Row]) -> list[float]:
    """Measured over predicted bytes of training steps; what they offload is not modelled."""
    found = []
    for row in rows:
        words = f"{row.setting.get('checkpointing', '')} {row.setting.get('hardware', '')}"
        sizes = [value * 2.0**30 for name, value in row.measured.items() if name == "memory_gib" and value]
        with contextlib.suppress(*NOT_EXPRESSED):
            predicted = run_of(row.setting, machine_of(words)).memory
            found += [size / predicted for size in sizes if "offload" not in words]
    return found


def _prefill(row: Row, machine: Machine, kernel: Kernel) -> list[Pair]:
    """A forward over new tokens after cached ones; a ring of hosts passes K/V or queries."""
    setting, hardware, found = row.setting, machine.hardware, []
    new, cached = setting.get("new") or setting["seq_len"], setting.get("cached") or 0
    tp, cp, heads, kv_heads = setting["tp_in_node"], setting["cp"], setting["heads"], setting["kv_heads"]
    layers, dim, head_dim = setting["layers"], setting["dim"], setting["head_dim"]
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
    for name, value in row.measured.items():
        if name.endswith("_ms") or name == "ttft_s":
            queries = "pass_q" in name or "pass-q" in str(setting.get("exchange", "")).lower()
            hop = far.latency + (rows if queries else keys) / far.bandwidth
            back = far.latency + rows / far.bandwidth if queries else 0.0  # an all-to-all of partial outputs
            ring = attend / cp + (cp - 1) * max(attend / cp, hop) + back
            measured = value / 1e3 if name.endswith("_ms") else value
            found.append(Pair(name, measured, layers * (products + all_reduce + ring)))
    return found


def _collective(row: Row, machine: Machine, kernel: Kernel) -> list[Pair]:
    setting, ranks = row.setting, row.setting["ranks"]
    shard = setting["shard_mib"] * 2.0**20
    kind = {"all-gather": "all_gather_seconds", "reduce-scatter": "reduce_scatter_seconds"}.get(setting["collective"])
    if kind is None:
        raise ValueError(f"collective {setting['collective']!r} is not modelled")
    rate = row.measured.get("nccl_GBps")  # copy engines and multicast are not modelled
    if not rate:
        raise ValueError("no measurement of NCCL")
    seconds = getattr(machine.hardware, kind)(shard, ranks)
    return [Pair("nccl_GBps", shard * (ranks - 1) / (rate * 1e9), seconds)]


def _micro(row: Row, machine: Machine, kernel: Kernel) -> list[Pair]:
    setting, ranks = row.setting, 8
    size = int(re.search(r"(\d+)\^3", setting["matmul"]).group(1))  # type: ignore[union-attr]
    product = 2.0 * size**3 / machine.hardware.matmul_flops
    gather = machine.hardware.all_gather_seconds(setting["all_gather_mib"] * 2.0**20, ranks)
    together = max(product, gather)
    if "sequential" in setting["variant"]:
        together = product + gather
    elif "copy engine" not in setting["variant"]:
        together = max(product + CONTENTION * min(product, gather), gather)
    return [Pair("ms", row.measured["ms"] / 1e3, together)]


def _diffusion(row: Row, machine: Machine, kernel: Kernel) -> list[Pair]:
    setting = row.setting
    match = re.search(r"(\d+) steps", str(setting.get("model", "")))
    if match is None or "FLUX" not in str(setting["model"]):
        raise ValueError("only FLUX.1 is known")
    cp, found = setting["cp"], []
    tokens, hardware = _FLUX_TOKENS / cp, machine.hardware
    problem = attention.Problem(
        ((_FLUX_TOKENS,),), False, _FLUX_HEADS, _FLUX_HEADS, _FLUX_DIM // _FLUX_HEADS, machine, kernel
    )
    attend = attention.seconds(problem, attention.method_of(setting["method"], cp), backward=False)
    eager = {} if any("compiled" in name for name in row.measured) else row.measured  # eager ones wait for the host
    for name, value in (eager or {n: v for n, v in row.measured.items() if "compiled" in n}).items():
        passes = (PASSES_COMPILED if "compiled" in name else PASSES) / 3
        rest = passes * tokens * _FLUX_DIM * 2 / hardware.memory_bandwidth
        products = 2 * 12 * _FLUX_DIM**2 * tokens / hardware.matmul_flops
        block = products + rest + attend
        found.append(Pair(name, value / (1e3 if name == "ms" else 1.0), int(match.group(1)) * _FLUX_BLOCKS * block))
    return found


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
