"""Each row's prediction: which machine and kernel it names, and which model prices it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from benchmarks.published import attention, machines, training
from benchmarks.published.machines import Kernel, Machine
from benchmarks.published.rows import Row, Setting, packs
from spanwise.advice.model import CONTENTION, PASSES, PASSES_COMPILED

# Layers of FLUX.1 (its published configuration): 19 blocks of two streams, 38 of one, each with 12 · dim² weights.
_FLUX_BLOCKS, _FLUX_DIM, _FLUX_HEADS, _FLUX_TOKENS = 57, 3072, 24, 4608
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
    machine = (machines.machine_of(hardware) or machines.H100).scaled(factor)
    kernel = machine.kernel(_kernel_name(row, machine))
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


def _kernel_name(row: Row, machine: Machine) -> str:
    words = f"{row.setting.get('method', '')} {row.setting.get('kernel', '')}".lower()
    names = {kernel.name for kernel in machine.kernels}
    wanted = "cudnn"
    if "magi" in words.split("(")[0].split("_")[0]:
        wanted = "magi"
    elif re.search("fa3|flash 3|fa4", words):
        wanted = "flash 3"
    elif re.search("fa2|flash-attn 2|flash_attn", words) or re.search(f"torchtitan|{_BEFORE_HOPPER}", row.source):
        wanted = "flash 2"
    return wanted if wanted in names else machine.kernels[0].name


def _passes(words: str, setting: Setting) -> tuple[bool, ...]:
    """Directions (True: backward) that a measurement covers."""
    work = str(setting.get("workload", ""))
    if words.startswith("bwd") or work == "bwd":
        return (True,)
    return (False,) if words.startswith("fwd") or work in ("fwd", "attention fwd") else (False, True)


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
        directions = _passes(name, setting)
        predicted = sum(attention.seconds(problem, method, backward=one) for one in directions)
        if "tflops" in name:
            flops = sum(problem.flops * (2.5 if one else 1.0) for one in directions) / cp
            found.append(Pair(name, flops / (value * 1e12), predicted))
        elif name.endswith("ms"):
            found.append(Pair(name, value / 1e3, predicted))
        elif name.endswith("_s"):
            found.append(Pair(name, value, predicted))
    return found


def _step(row: Row, machine: Machine, kernel: Kernel) -> list[Pair]:
    found = []
    for name, value in row.measured.items():
        change = {"async_tp": True} if name.startswith("async_tp") else {}
        run = training.run_of(row.setting | change, machine)
        measured = training.units(run, name, value) if value else None
        if measured is not None:
            found.append(Pair(name, measured, run.seconds(machine, kernel)))
    return found


def memory(rows: list[Row]) -> list[float]:
    """Measured over predicted bytes of training steps; what they offload is not modelled."""
    found = []
    for row in rows:
        words = f"{row.setting.get('checkpointing', '')} {row.setting.get('hardware', '')}"
        sizes = [value * 2.0**30 for name, value in row.measured.items() if name == "memory_gib" and value]
        try:
            run = training.run_of(row.setting, machines.machine_of(words) or machines.H100)
        except NOT_EXPRESSED:
            continue
        found += [size / run.memory for size in sizes if "offload" not in words]
    return found


def _prefill(row: Row, machine: Machine, kernel: Kernel) -> list[Pair]:
    found = []
    for name, value in row.measured.items():
        moved = "q" if "pass_q" in name or "pass-q" in str(row.setting.get("exchange", "")).lower() else "kv"
        if name.endswith("_ms") or name == "ttft_s":
            seconds = value / 1e3 if name.endswith("_ms") else value
            found.append(Pair(name, seconds, training.prefill_seconds(row.setting, machine, kernel, moved)))
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
