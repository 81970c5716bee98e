"""What attention refuses: wrong shapes, transforms, senseless scales, wrong sinks; and sizes that it fixes."""

from __future__ import annotations

import math
import operator

import torch

from spanwise import _torch
from spanwise.attention.rank_plan import RankPlan

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NO_TRANSFORM = (
    "context parallelism does not run inside torch.func (vmap, grad, vjp, jvp, jacrev, …): its collectives and kernels "
    "have no rules for them; use the batch dim in place of vmap, and torch.autograd.grad or backward() in place of "
    "torch.func.grad"
)


def check_transforms(*tensors: torch.Tensor) -> None:
    """``NotImplementedError`` inside a transform of `torch.func`, or for a tensor with a forward-mode tangent.

    Compiled code sees only vmap here; other transforms meet what Dynamo refuses.
    """
    if torch.compiler.is_compiling():
        if any([_torch.is_batched(x) for x in tensors]):
            raise NotImplementedError(_NO_TRANSFORM)
        return
    if _torch.inside_transform():
        raise NotImplementedError(_NO_TRANSFORM)
    if _torch.have_tangent(*tensors):
        raise NotImplementedError(
            "context parallelism has no forward-mode derivatives; use torch.autograd.grad or backward()"
        )


def fix_sizes(*sizes: int) -> None:
    """Make heads and feature dims constants of compiled code, which has symbols for them under ``dynamic=True``."""
    if torch.compiler.is_compiling():
        for size in sizes:
            operator.index(size)


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out ``[B, H, T, Dv]`` and lse ``[B, H, T]`` after sinks ``[H]`` or ``[H, n]`` join each row's denominator."""
    sinks = sinks.to(lse.dtype)
    if sinks.dim() == 2:
        none = (sinks == -math.inf).all(-1)  # there logsumexp has the gradient nan
        sinks = sinks.masked_fill(none.unsqueeze(-1), 0).logsumexp(-1).masked_fill(none, -math.inf)
    sink = sinks.view(1, -1, 1)
    # Rows without a key keep output 0, also for a sink of -inf.
    # Not torch.sigmoid: its gradient has 1 - kept, which is all rounding error where the sink weighs little.
    kept = torch.exp(torch.nn.functional.logsigmoid(torch.where(lse == -math.inf, lse, lse - sink)))
    return (out * kept.unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, sink.expand_as(lse))


def check_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, local: RankPlan, rows: int, sinks: torch.Tensor | None
) -> None:
    """``ValueError`` unless q, k and v are this rank's shard, and fit each other and the plan."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k and v must be [batch, heads, tokens, head_dim], got {shapes}")
    if 0 in (q.shape[3], k.shape[3], v.shape[3]):
        raise ValueError(f"head dims must be at least 1, got {shapes}")
    num_tokens, num_keys = local.tokens.shape[1], local.key_tokens.shape[1]
    if q.shape[2] != num_tokens or not k.shape[2] == v.shape[2] == num_keys:
        raise ValueError(
            f"q, k and v must be rank {local.rank}'s shard of the sequence, {num_tokens} of {local.seq_len} tokens in "
            f"dim 2, with {num_keys} of {local.kv_len} keys, got {shapes}; cut them with spanwise.shard(plan, mesh, x, "
            f"dim=2), packed ones with dim=0, the keys of cross attention with side='kv'"
        )
    if rows > 1 and q.shape[0] != rows:
        raise ValueError(f"the plan has masks for {rows} batch rows, got {shapes}")
    if q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q, k and v must agree in batch size, k and v in heads, q and k in head dim; got {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key/value heads; got {shapes}")
    alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    if not alike or q.dtype not in _FLOATS:
        raise ValueError(
            f"q, k and v must share dtype and device, float64, float32, bfloat16 or float16, got {q.dtype}, {k.dtype}, "
            f"{v.dtype} on {q.device}, {k.device}, {v.device}"
        )
    given = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
    if any(n is not None and n != got for n, got in zip(local.attention_shape, given, strict=True)):
        raise ValueError(
            f"the plan was made for (num_q_heads, num_kv_heads, head_dim, v_head_dim) = {local.attention_shape}, got "
            f"{given}; {shapes}. make_plan takes those of one rank's tensors, under tensor parallelism its share of "
            f"the heads; without them the plan serves any shape, and cannot check that ranks have equal heads"
        )
    if local.tokens.device != q.device:
        raise ValueError(
            f"the rank plan is on {local.tokens.device}, q on {q.device}; build it with plan.local(mesh, q.device)"
        )
    if sinks is not None and (sinks.dim() not in (1, 2) or sinks.shape[0] != q.shape[1]):
        raise ValueError(
            f"sinks must be one logit a query head, [{q.shape[1]}], or several, [{q.shape[1]}, n], got "
            f"{tuple(sinks.shape)}"
        )
