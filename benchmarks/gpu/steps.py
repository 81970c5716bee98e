"""The steps of the campaign, most important first: of each its rows as data, and the function that fills one in."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import spanwise
from benchmarks.gpu import replay as on
from benchmarks.gpu.replay import HEAD_DIM, HEADS, RANKS, call_of_a_rank, masks, milliseconds
from benchmarks.gpu.runner import Here, NotPossible, Row, Step
from benchmarks.overlap_link import Model
from spanwise import SpanMask, _torch, overlap
from spanwise.attention.kernels.table import resolve
from spanwise.calibrate.fit import fit_attention
from spanwise.calibrate.rates import Ranks, copy_rate, matmul_rate, time_attention

ROOT = Path(__file__).parents[2]
PACKAGES = ("spanwise", "numpy", "numba", "triton", "pytest", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
EXCHANGES: dict[str, Row] = {"needed": {"stages": 2}, "all_gather": {}, "ring": {}, "ulysses": {}, "hierarchical": {}}
MASKS = ("documents", "causal", "window", "prefix", "empty rows")
LAYERS = 4


def kernels(dry: bool) -> tuple[str, ...]:
    return ("sdpa",) if dry else ("varlen", "flex")


def rows_of(**values: Any) -> list[Row]:
    """A row for each combination, the last value changing fastest; what is no tuple is the same in all."""
    lists = [value if isinstance(value, tuple) else (value,) for value in values.values()]
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*lists)]


def environment(here: Here, found: Row, row: Row) -> None:
    """What the machine is: versions, device, memory."""
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    found |= {"cores": os.cpu_count(), "device": f"CPU, {platform.machine()}"}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if not here.dry:
        known, driver = torch.cuda.get_device_properties(0), None
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            driver = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
        found |= {
            "device": known.name, "devices": torch.cuda.device_count(), "capability": f"{known.major}.{known.minor}",
            "memory": known.total_memory, "multiprocessors": known.multi_processor_count, "driver": driver,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }  # fmt: skip
        x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
        found["computes"] = bool((x @ x).isfinite().all())


def tests(here: Here, found: Row, row: Row) -> None:
    """tests/gpu by pytest, a row for each test as it ends, so that a crash or a hang leaves the others' results."""
    import pytest

    class Recorder:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or not report.passed:
                found["passed"] = found.get("passed", 0) + report.passed
                # pytest's "E" lines are what the error says.
                lines = report.longreprtext.strip().split("\n") if report.failed else [""]
                error = next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1])[:300]
                status = "ok" if report.passed else report.outcome
                seconds = round(report.duration, 2)
                here.write(row | {"test": report.nodeid, "status": status, "seconds": seconds, "error": error})

    # Options of the project that need plugins are cleared, and warnings of torch and Triton are not ours to fix.
    arguments = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "default", str(ROOT / "tests" / "gpu")]
    os.chdir(ROOT)
    code = pytest.main(arguments, plugins=[Recorder()])
    if code not in (0, 1) or not (found.get("passed") or here.dry):
        raise RuntimeError(f"pytest ended with {code}, {found.get('passed', 0)} tests passed")


def syncs(here: Here, found: Row, row: Row) -> None:
    """An exchange and kernel, forward and backward, while torch refuses any call that would wait for the device."""
    tokens = 256 if here.dry else 8192
    mask = SpanMask.documents([0, tokens // 3, tokens // 2, tokens])
    options = EXCHANGES[row["exchange"]] | {"exchange": row["exchange"]}
    with call_of_a_rank(mask, 4, row["kernel"], here.device, here.dtype, **options) as call:
        for _ in range(2):
            call.step()  # compiles, and makes what a plan's first call makes
        call.group.received = call.group.launches = 0
        if not here.dry:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            call.step()
        finally:
            if not here.dry:
                torch.cuda.set_sync_debug_mode("default")
        found |= {"collectives": call.group.launches, "bytes received": call.group.received}


PARITY: dict[str, Row] = {
    "none": {}, "needed, 1 chunk": {"exchange": "needed", "stages": 1},
    "needed, 2 chunks": {"exchange": "needed", "stages": 2},
    "needed, refetched": {"exchange": "needed", "stages": 2, "keep_kv": False},
    "all_gather": {"exchange": "all_gather"}, "ring": {"exchange": "ring"}, "ulysses": {"exchange": "ulysses"},
}  # fmt: skip


def parity_rows(exchanges: tuple[str, ...], dry: bool) -> list[Row]:
    tried = ("flex bfloat16", "varlen bfloat16", "reference float32", "flex float32", "varlen float16")
    tried += ("reference bfloat16", "reference float16", "flex float16")  # flex compiles each dtype for a while
    if dry:
        tried = ("sdpa float32", "sdpa bfloat16", "reference float16")
    found = rows_of(what="attention", mask=MASKS[:: 4 if dry else 1], kernel=tried, exchange=exchanges)
    return [row | dict(zip(("kernel", "dtype"), row["kernel"].split(), strict=True)) for row in found]


def parity(here: Here, found: Row, row: Row) -> None:
    """Output and gradients of a kernel, exchange, dtype and mask against dense float64 attention, and leaks."""
    length, block = (90, 16) if here.dry else (1000, 128)
    assert here.mesh is not None
    dtype, heads = getattr(torch, row["dtype"]), {"num_q_heads": 8, "num_kv_heads": 4, "head_dim": 64}
    options = {"balancer": "head_tail", "block_size": block, "dtype": dtype, **PARITY[row["exchange"]]}
    plan = spanwise.make_plan(mask_of(row["mask"], length), here.mesh.size(), **heads, **options)
    local = plan.local(here.mesh, here.device, kernel=row["kernel"])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any) -> Any:
        return spanwise.context_parallel_attention(q, k, v, local, kernel=row["kernel"])

    report = spanwise.verify(attend, plan, here.mesh, dtype=dtype, num_probes=2)
    found |= report.errors
    report.raise_if_failed()


def mask_of(name: str, length: int) -> SpanMask:
    cuts, rows = [0, 1, length // 3, length // 3, length // 2 + 1, length], np.arange(length)
    empty = rows % 7 == 3
    start, end = np.where(empty, 0, np.maximum(rows - length // 4, 0)), np.where(empty, 0, rows + 1)
    return {
        "documents": lambda: SpanMask.documents(cuts),
        "causal": lambda: SpanMask.causal(length),
        "window": lambda: SpanMask.sliding_window(length, length // 5, 3),
        "prefix": lambda: SpanMask.prefix_lm(cuts, [1, 5, 0, length // 9, length // 8]),
        "empty rows": lambda: SpanMask(start[None], end[None], length),
    }[name]()


def replay_rows(dry: bool) -> list[Row]:
    found = []
    for tokens, mask in itertools.product((512,) if dry else (65_536, 131_072), ("causal", "documents", "window")):
        found += rows_of(what="one device", mask=mask, tokens=tokens)
        found += rows_of(what="rank of 8", mask=mask, tokens=tokens, kernel=kernels(dry)[::-1], chunks=(1, 2, 4))
    return found


def replay(here: Here, found: Row, row: Row) -> None:
    """The whole call of one rank of 8, its collectives replayed as copies, beside torch's attention on one device.

    Each row is the busiest rank of a plan: forward and backward in milliseconds of the device, the host's part, the
    peak of memory, the bytes that arrive. An eighth of one device's time over the whole sequence is the floor: what is
    above it is imbalance, pieces of another shape, packing, merging and gaps.
    """
    device, repeats, about = here.device, 1 if here.dry else 7, (row["mask"], row["tokens"])

    def times(attend: Any, leaves: Any) -> Row:
        out = attend()
        backward = functools.partial(torch.autograd.grad, out, leaves, torch.ones_like(out), retain_graph=True)
        return milliseconds({"forward ms": attend, "backward ms": backward}, device, repeats)

    if row["what"] == "one device":
        found |= times(*on.one_device(*about, device, here.dtype))
        here.kept[about] = dict(found)
        return
    mask, options = masks(row["tokens"])[row["mask"]], {"exchange": "needed", "stages": row["chunks"]}
    with call_of_a_rank(mask, RANKS, row["kernel"], device, here.dtype, **options) as call:
        found |= times(call.attend, call.leaves)
        found |= milliseconds({"host ms": call.step}, device, repeats, host=True)
        call.group.received = 0
        call.attend()
        found |= {"received": call.group.received, "peak": on.allocated(call.step, device)}
        found |= {"imbalance": call.plan.imbalance()}
        floor = here.kept.get(about, {})
        found |= {f"{part} over an eighth": found[part] / floor[part] * RANKS for part in floor}


def trace(here: Here, found: Row, row: Row) -> None:
    """A profile of three calls: how long the device computes, copies, idles between, and how much copies hide."""
    mask, dry = masks(512 if here.dry else 65_536)["documents"], here.dry
    options = {"exchange": "needed", "stages": 2}
    with call_of_a_rank(mask, RANKS, row["kernel"], here.device, here.dtype, **options) as call:
        for _ in range(2):
            call.step()
        with profile(activities=[ProfilerActivity.CPU, *([] if dry else [ProfilerActivity.CUDA])]) as profiler:
            for _ in range(3):
                call.step()
            if not dry:
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    events = [x for x in events if x.get("cat") in (("cpu_op",) if dry else ("kernel", "gpu_memcpy", "gpu_memset"))]
    streams: dict[object, list[tuple[float, float]]] = {}
    total: Counter[str] = Counter()
    for event in events:
        begin, taken = float(event["ts"]) / 1e3, float(event["dur"]) / 1e3
        stream = event.get("args", {}).get("stream", event.get("tid"))
        streams.setdefault(stream, []).append((begin, begin + taken))
        total[event["name"][:80]] += taken  # type: ignore[assignment]
    busiest = streams.pop(max(streams, key=lambda stream: _covered(streams[stream])))
    rest = list(itertools.chain(*streams.values()))
    compute, others, together = map(_covered, (busiest, rest, busiest + rest))
    span = max(end for _, end in busiest) - min(begin for begin, _ in busiest)
    found |= {
        "span ms": span, "compute ms": compute, "gaps ms": span - compute, "other streams ms": others,
        "of them hidden ms": compute + others - together, "launches": len(events),
    }  # fmt: skip
    for name, ms in total.most_common(12):
        here.write({"what": "launches", "kernel": row["kernel"], "name": name, "ms": ms})


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, covered = 0.0, 0.0
    for begin, end in sorted(intervals):
        total, covered = total + max(0.0, end - max(begin, covered)), max(covered, end)
    return total


def layers(here: Here, found: Row, row: Row) -> None:
    """Four layers whose weights are gathered on the stream of copies, as eager calls and as one captured CUDA graph."""
    device, width, repeats = here.device, HEADS * HEAD_DIM, 1 if here.dry else 7
    mask, options = masks(512 if here.dry else 65_536)["documents"], {"exchange": "needed", "stages": 2}
    with call_of_a_rank(mask, RANKS, row["kernel"], device, here.dtype, **options) as call:
        name = _torch.group_name(call.group)
        shards = [torch.randn(width // RANKS, width, device=device, dtype=here.dtype) / width for _ in range(LAYERS)]

        def step() -> list[torch.Tensor]:
            out, under_way = call.leaves[0], _torch.start_all_gather(shards[0], RANKS, name)
            for following in (*shards[1:], None):
                weight = _torch.wait(under_way)
                if following is not None:
                    under_way = _torch.start_all_gather(following, RANKS, name)
                rows = (out + call.attend()).transpose(1, 2).flatten(2)
                out = (rows @ weight).unflatten(2, (HEADS, HEAD_DIM)).transpose(1, 2)
            return [out, *torch.autograd.grad(out, call.leaves, call.cotangent)]

        found |= milliseconds({"eager ms": step}, device, repeats)
        found |= milliseconds({"host ms": step}, device, repeats, host=True)
        if here.dry:
            return
        wanted = [x.clone() for x in step()]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            got = step()
        graph.replay()
        for x, y in zip(got, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
        found |= milliseconds({"captured ms": graph.replay}, device, repeats)


def lengths_rows(dry: bool) -> list[Row]:
    tokens, (many, *_, few) = 2048 if dry else 65_536, kernels(dry) * 2
    sequences, lengths = (10, 30, 100) if dry else (10, 300, 3000), (tokens, tokens - 512, tokens // 2, tokens // 4)
    found = rows_of(what="sequences", kernel=many, tokens=tokens, sequences=sequences)
    return found + rows_of(what="lengths", kernel=few, tokens=(*lengths, tokens // 2 + 256))


def lengths(here: Here, found: Row, row: Row) -> None:
    """What grows with the batch: `varlen` with more sequences, and compiled `flex` with other lengths."""
    tokens, mask = row["tokens"], masks(row["tokens"])["documents"]
    if "sequences" in row:
        mask = SpanMask.documents(np.linspace(0, tokens, row["sequences"] + 1).astype(int))
    options = {"exchange": "needed", "stages": 1}
    with call_of_a_rank(mask, RANKS, row["kernel"], here.device, here.dtype, **options) as call:
        before = counters["stats"]["unique_graphs"]
        found["first call s"] = on.seconds(call.step, here.device)
        found["graphs"] = counters["stats"]["unique_graphs"] - before
        found |= milliseconds({"ms": call.step}, here.device, 1 if here.dry else 5)
        found["peak"] = on.allocated(call.step, here.device)


class Alone(Ranks):
    """One rank of `spanwise calibrate`, which measures links, too, and so needs two."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.size, self.rank = device, 1, 0

    def over_ranks(self, values: Any) -> list[float]:
        return list(values)


def calibrate(here: Here, found: Row, row: Row) -> None:
    """The rates that `spanwise calibrate` measures, on one device."""
    alone, repeats, longer = Alone(here.device), 1 if here.dry else 5, 1 if here.dry else 16
    found["TFLOP/s of a matrix product"] = matmul_rate(alone, here.dtype, repeats) / 1e12
    found["GB/s read and written"] = copy_rate(alone, repeats) / 1e9
    # Two lengths: FlexAttention compiles for each number of queries.
    fitted = [(longer * n, longer * m) for n, m in ((1024, 64), (1024, 512), (2048, 128), (2048, 1024))]
    times = time_attention(alone, resolve("auto", here.device), (8, 2, 64), here.dtype, fitted, repeats)
    try:
        found |= fit_attention(*times)[0]
    except ValueError as error:
        if here.dry:  # times of a busy host need not grow with the work; those of a GPU must
            raise NotPossible(str(error)) from error
        raise


def scheduled_rows(dry: bool) -> list[Row]:
    cases = ("aot_eager", "spanwise, aot_eager") if dry else ("inductor", "spanwise, aot_eager", "spanwise, inductor")
    return rows_of(what="compiled step", case=cases)


def scheduled(here: Here, found: Row, row: Row) -> None:
    """A compiled step of layers whose weights are gathered when they are used: equal to eager code, and times.

    The group has one rank, so NCCL copies on a stream of its own instead of sending: what is shown is that the schedule
    compiles, runs and is exact, and what it costs. How much of a real link it hides needs several devices.
    """
    if not _torch.COMPILES:  # the functions below would not refuse, as the package's do
        raise NotPossible(f"torch {torch.__version__} compiles autograd functions with collectives to wrong gradients")
    torch.manual_seed(0)
    width, tokens = (64, 32) if here.dry else (4096, 8192)
    model = Model(LAYERS, width, width).to(here.device, here.dtype)
    x, shards = torch.randn(tokens, width).to(here.device, here.dtype), list(model.parameters())

    def gradients(run: Any) -> list[torch.Tensor]:
        loss = run(x)
        return [loss.detach(), *torch.autograd.grad(loss, shards)]

    results: list[overlap.Result] = []
    backend: Any = row["case"]
    if backend.startswith("spanwise"):
        backend = overlap.backend(backend.split(", ")[1], cost=spanwise.H100, on_result=results.append)
    calls = {"ms": functools.partial(gradients, torch.compile(model, backend=backend))}
    calls["eager ms"] = functools.partial(gradients, model)
    pairs = zip(*(call() for call in calls.values()), strict=True)
    errors = [float((x.double() - y.double()).abs().max() / y.double().abs().max()) for x, y in pairs]
    found |= milliseconds(calls, here.device, 2 if here.dry else 10) | {"differs": max(errors)}
    found["launches"] = sum(len(result.timeline.dag.starts) for result in results)
    assert all(error <= (1e-4 if here.dry else 3.5e-2) for error in errors), f"differs from eager code by {errors}"


#: Less than ten minutes in all. What would be worst to miss comes first, and what may crash last.
STEPS: dict[str, Step] = {
    "environment": Step(lambda dry: rows_of(what="environment"), environment, 20),
    "tests": Step(lambda dry: rows_of(what="tests"), tests, 70, 70),
    "syncs": Step(
        lambda dry: rows_of(what="exchange without a wait", kernel=kernels(dry), exchange=tuple(EXCHANGES)), syncs, 35
    ),
    "nccl": Step(lambda dry: parity_rows(("none",), dry), parity, 40, backend="nccl"),
    "parity": Step(lambda dry: parity_rows(tuple(PARITY)[1:], dry), parity, 80, size=4, backend="gloo"),
    "replay": Step(replay_rows, replay, 120),
    "trace": Step(lambda dry: rows_of(what="three calls", kernel=kernels(dry)), trace, 30),
    "layers": Step(lambda dry: rows_of(what="four layers", kernel=kernels(dry)), layers, 40),
    "lengths": Step(lengths_rows, lengths, 45),
    "calibrate": Step(lambda dry: rows_of(what="device"), calibrate, 35),
    "overlap": Step(scheduled_rows, scheduled, 40, backend="nccl"),
}
