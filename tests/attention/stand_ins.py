"""The kernels on the CPU as functions of tensors: "flex" on torch's dense form, "varlen" on a plain-torch flash."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

from spanwise.attention.kernels import flex as flex_module, varlen as varlen_module
from spanwise.attention.kernels.base import AttentionOptions, Chunk, Kernel
from spanwise.attention.kernels.merge import Merging
from spanwise.masks.span_mask import SpanMask

NAN = float("nan")
PARTS = (0, 0.35, 0.36, 0.36, 0.7, 1)  # uneven fractions of the keys, one of them of no key


def attend(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: SpanMask, options: AttentionOptions,
    cuts: Sequence[float] | None = None, q_pos: torch.Tensor | None = None, kv_pos: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Out and lse of a kernel: in one call, or merged over chunks of the keys between `cuts`."""
    q_pos = torch.arange(q.shape[2], dtype=torch.int32)[None] if q_pos is None else q_pos
    kv_pos = torch.arange(k.shape[2], dtype=torch.int32)[None] if kv_pos is None else kv_pos
    if cuts is None:
        return kernel.attend(q, *chunk(kernel, k, v, mask, kv_pos), q_pos, options)
    merging, queries = Merging(q.dtype), kernel.queries(q)
    for i, j in itertools.pairwise(round(cut * mask.kv_len) for cut in cuts):
        here = SpanMask(mask.start.clip(i, j) - i, mask.end.clip(i, j) - i, j - i)
        part = chunk(kernel, k[:, :, i:j], v[:, :, i:j], here, kv_pos[:, i:j], mask.num_spans)
        merging.add(kernel.attend_part(queries, *part, q_pos, options))
    return merging.result()


def chunk(
    kernel: Kernel, k: torch.Tensor, v: torch.Tensor, mask: SpanMask, kv_pos: torch.Tensor, num_spans: int = 1
) -> tuple[torch.Tensor, torch.Tensor, Chunk]:
    """K and V with spare keys that hold large numbers, and the chunk, as a rank plan makes them."""
    spare = kernel.capacity(mask.kv_len) - mask.kv_len
    if spare:
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, spare), value=1e4) for x in (k, v))
        mask, kv_pos = SpanMask(mask.start, mask.end, mask.kv_len + spare), torch.nn.functional.pad(kv_pos, (0, spare))
    added = (0, 0), (0, kernel.num_spans(max(num_spans, mask.num_spans)) - mask.num_spans), (0, 0)
    start, end = (torch.from_numpy(np.pad(x, added)) for x in (mask.start, mask.end))
    return k, v, Chunk(start, end, kv_pos, kernel.tables(mask, torch.device("cpu")))


@contextlib.contextmanager
def dense_flex() -> Iterator[None]:
    """Nothing is compiled, and FlexAttention takes CPU tensors that require gradients."""
    torch._dynamo.reset()
    flex_module._compiled.cache_clear()
    # Only CUDA has a backward, but the gradient's formula is device-independent in torch's dense form.
    with (
        mock.patch("torch.nn.attention.flex_attention._validate_device", lambda *_: None),
        mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager")),
    ):
        yield
    flex_module._compiled.cache_clear()


# --- flash ----------------------------------------------------------------------------------------------------------


def _wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """What the kernel computes in: float32 for half precision."""
    return [x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in tensors]


def _sequences(cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor, max_q: int, max_k: int) -> list[tuple[slice, slice]]:
    found = []
    for (q0, q1), (k0, k1) in zip(*(itertools.pairwise(x.tolist()) for x in (cu_seq_q, cu_seq_k)), strict=True):
        if q1 > q0 and k1 > k0:
            assert q1 - q0 <= max_q and k1 - k0 <= max_k
            found.append((slice(q0, q1), slice(k0, k1)))
    return found


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, window: tuple[int, int], max_k: int) -> torch.Tensor:
    """Scores ``[H, n, m]`` of one sequence, aligned at the bottom right."""
    num_q, num_k = q.shape[0], k.shape[0]
    scores = scale * torch.einsum("nhd,mhd->hnm", q, k)
    if window == (-1, -1):
        return scores
    left, right = (max_k if not 0 <= bound < max_k else bound for bound in window)
    diagonal = torch.arange(num_q).unsqueeze(1) + num_k - num_q
    key = torch.arange(num_k)
    return scores.masked_fill((key < diagonal - left) | (key > diagonal + right), float("-inf"))


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor, max_q: int,
    max_k: int, scale: float, window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """NaN and +inf in rows without keys: nothing may be made of them."""
    assert q.shape[2] == k.shape[2] == v.shape[2] and q.shape[2] % 8 == 0  # as flash demands
    group, dtype = q.shape[1] // k.shape[1], q.dtype
    q, k, v = _wide(q, k, v)
    out, lse = torch.full_like(q, NAN), torch.full((q.shape[1], q.shape[0]), float("inf"), dtype=q.dtype)
    for rows, keys in _sequences(cu_seq_q, cu_seq_k, max_q, max_k):
        scores = _scores(q[rows], k[keys].repeat_interleave(group, 1), scale, window, max_k)
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v[keys].repeat_interleave(group, 1))
    return out.to(dtype), lse


def _backward(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor, max_q: int, max_k: int, scale: float, window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """FlashAttention-2's backward; NaN where a row has no keys or a key no queries."""
    assert lse.dtype == _wide(q)[0].dtype and lse.is_contiguous()  # as flash demands
    kv_heads, group, dtype = k.shape[1], q.shape[1] // k.shape[1], q.dtype
    grad_out, q, k, v, out = _wide(grad_out, q, k, v, out)
    delta = (grad_out * out).sum(-1).T
    dq, dk, dv = (torch.full_like(x, NAN) for x in (q, k, v))
    for rows, keys in _sequences(cu_seq_q, cu_seq_k, max_q, max_k):
        each_k, each_v = (x[keys].repeat_interleave(group, 1) for x in (k, v))
        p = (_scores(q[rows], each_k, scale, window, max_k) - lse[:, rows, None]).exp()
        ds = p * (torch.einsum("nhd,mhd->hnm", grad_out[rows], each_v) - delta[:, rows, None]) * scale
        dq[rows] = torch.einsum("hnm,mhd->nhd", ds, each_k)
        dk[keys] = torch.einsum("hnm,nhd->mhd", ds, q[rows]).unflatten(1, (kv_heads, group)).sum(2)
        dv[keys] = torch.einsum("hnm,nhd->mhd", p, grad_out[rows]).unflatten(1, (kv_heads, group)).sum(2)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def _on_cpu(stand_in: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *rest: (stand_in if x.device.type == "cpu" else real)(x, *rest)


# The operators have kernels for CUDA alone; these are for the CPU, registered as any backend's would be.
varlen_module.flash_forward = _on_cpu(_forward, varlen_module.flash_forward)
varlen_module.flash_backward = _on_cpu(_backward, varlen_module.flash_backward)
varlen_module._varlen.register_kernel("cpu", varlen_module.forward)
varlen_module._varlen_backward.register_kernel("cpu", varlen_module.backward)
