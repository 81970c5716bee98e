"""The attention call of one rank of many, replayed on one device, and times on a device.

    with call_of_a_rank(mask, 8, "flex", torch.device("cuda", 0), torch.bfloat16) as call: ...

replays one rank on one device. Its process group copies as many bytes as each collective receives, on a stream of its
own, beside compute; a wait makes the current stream wait for that copy. So the call runs as among the other ranks, with
links as fast as the device's memory. What arrives is the rank's own data repeated: times mean something, numbers do
not.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import spanwise
from benchmarks.plan import document_offsets
from spanwise import SpanMask
from spanwise.attention.kernels.table import KERNELS
from spanwise.attention.rank_plan import build
from spanwise.overlap._torch import fake_store

RANKS, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 8, 32, 8, 128, 4096


def seconds(step: Callable[[], Any], device: torch.device, host: bool = False) -> float:
    """Of one call, until the device has finished it, by CUDA events; until the call returns, by the `host`'s clock."""
    cuda, begin = device.type == "cuda", time.perf_counter()
    if cuda:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        begin = time.perf_counter()
    step()
    taken = time.perf_counter() - begin
    if cuda and not host:
        last.record()
        torch.cuda.synchronize()
        taken = first.elapsed_time(last) / 1e3
    return taken


def milliseconds(
    cases: Mapping[str, Callable[[], Any]], device: torch.device, repeats: int, host: bool = False
) -> dict[str, float]:
    """Median of each case, timed in turns after two calls that compile and warm up."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(2 + repeats):
        for name, step in cases.items():
            taken = seconds(step, device, host)
            times[name] += [1e3 * taken] if number >= 2 else []
    return {name: statistics.median(found) for name, found in times.items()}


def allocated(step: Callable[[], Any], device: torch.device) -> int | None:
    """Peak of the allocator in a call, above what was there before; None on a CPU."""
    if device.type == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def masks(tokens: int) -> dict[str, SpanMask]:
    return {
        "causal": SpanMask.causal(tokens),
        "documents": SpanMask.documents(document_offsets(tokens, 0)),
        "window": SpanMask.sliding_window(tokens, min(WINDOW, tokens // 4)),
    }


def draw(heads: int, tokens: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """``[1, heads, tokens, HEAD_DIM]``, which requires a gradient."""
    return torch.randn(1, heads, tokens, HEAD_DIM, device=device, dtype=dtype).requires_grad_()


def one_device(name: str, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], Any], Any]:
    """torch's own attention over the whole sequence, and its leaves: flash for causal, `varlen_attn` for the others.

    On a CPU, where `varlen_attn` does not run, causal attention stands for all.
    """
    q, k, v = (draw(heads, tokens, device, dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    if name == "causal" or device.type == "cpu":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def causal() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return causal, (q, k, v)
    from torch.nn.attention.varlen import varlen_attn

    offsets = document_offsets(tokens, 0) if name == "documents" else np.array([0, tokens])
    cu = torch.tensor(offsets, dtype=torch.int32, device=device)
    longest = int(np.diff(offsets).max())
    # One K/V head for each query head: older releases know no grouped heads here.
    packed = [x.detach()[0].repeat_interleave(HEADS // x.shape[1], 0).transpose(0, 1).contiguous() for x in (q, k, v)]
    leaves = [x.requires_grad_() for x in packed]
    window = (WINDOW, 0) if name == "window" else (-1, 0)
    return lambda: varlen_attn(*leaves, cu, cu, longest, longest, window_size=window), leaves


class _Copied(dist._Work):
    """A collective under way on the stream of copies."""

    def __init__(self, end: Any) -> None:
        super().__init__()
        self.end = end

    def wait(self, timeout: Any = None) -> bool:
        if self.end is not None:
            torch.cuda.current_stream().wait_event(self.end)
        return True


class Replay(dist.ProcessGroup):
    """Collectives of one rank, as copies; `received` counts the bytes that came from other ranks."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.received, self.launches, self._stream = 0, 0, None

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return "replay"

    def _fill(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], received: int) -> _Copied:
        self.received, self.launches = self.received + received, self.launches + 1
        if not outputs or outputs[0].device.type != "cuda":
            _copy(outputs, inputs)
            return _Copied(None)
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copy(outputs, inputs)
            for x in (*outputs, *inputs):
                x.record_stream(self._stream)
            end = torch.cuda.Event()
            end.record()
        return _Copied(end)

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, recv: list[int], sent: list[int], options: Any = None
    ) -> _Copied:
        own = recv[self.rank()] if recv else output.shape[0] // self.size()
        return self._fill([output], [given], (output.shape[0] - own) * output[:1].nbytes)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], given: list[torch.Tensor], options: Any = None
    ) -> _Copied:
        return self._fill(outputs, given, sum(x.nbytes - y.nbytes for x, y in zip(outputs, given, strict=True)))

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], given: list[torch.Tensor], options: Any = None
    ) -> _Copied:
        return self._fill(outputs, given, sum(y.nbytes - x.nbytes for x, y in zip(outputs, given, strict=True)))

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> _Copied:
        return self._fill(tensors, tensors, sum(x.nbytes for x in tensors))


def _copy(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Write every output, and read as many bytes, from the inputs over and over."""
    for output, given in zip(outputs, inputs, strict=True):
        into, source = output.view(-1), given.reshape(-1)
        if not source.numel():
            into.zero_()
        elif output is not given:
            for part in into.split(source.numel()):
                part.copy_(source[: part.numel()])


class Call(NamedTuple):
    """A call of the busiest rank: its plan, the forward, q, k and v, a gradient of the output, and its group."""

    plan: spanwise.Plan
    attend: Callable[[], torch.Tensor]
    leaves: tuple[torch.Tensor, ...]
    cotangent: torch.Tensor
    group: Replay

    def step(self) -> None:
        """Forward and backward."""
        torch.autograd.grad(self.attend(), self.leaves, self.cotangent)


@contextlib.contextmanager
def call_of_a_rank(
    mask: SpanMask, ranks: int, kernel: str, device: torch.device, dtype: torch.dtype, **options: Any
) -> Iterator[Call]:
    """The call of the plan's busiest rank, replayed; `options` are those of `make_plan`."""
    plan = spanwise.make_plan(
        mask, ranks, num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, **options
    )
    rank = int(np.argmax(plan.work()))
    dist.Backend.register_backend("replay", lambda store, *of, timeout=None: Replay(*of[:2]), devices=["cpu", "cuda"])
    dist.init_process_group("replay", rank=rank, world_size=ranks, store=fake_store())
    try:
        mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("cp",))
        spanwise.compare_calls(mesh, False)
        local, group = build(plan, rank, device, kernel=KERNELS[kernel]), mesh.get_group()
        assert isinstance(group, Replay)
        tokens = local.tokens.shape[1]
        leaves = tuple(draw(heads, tokens, device, dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))

        def attend() -> torch.Tensor:
            return spanwise.context_parallel_attention(*leaves, local, mesh, kernel=kernel)

        yield Call(plan, attend, leaves, torch.randn_like(leaves[0]), group)
    finally:
        dist.destroy_process_group()
