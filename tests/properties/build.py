"""From words to calls of spanwise: masks, plans, and one rank's part of a case."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import spanwise
from spanwise import AuxRequest, Packing, Plan, SpanMask
from tests.oracle import Inputs
from tests.properties.cases import Case
from tests.properties.cells import MaskCase


def _mask_mod(stride: int, reach: int) -> Callable[..., torch.Tensor]:
    return lambda b, h, q_idx, kv_idx: ((q_idx - kv_idx) % stride == 0) | ((q_idx - kv_idx).abs() <= reach)


def _from_mask_mod(q_len: int, kv_len: int, stride: int, reach: int) -> SpanMask:
    return SpanMask.from_mask_mod(_mask_mod(stride, reach), q_len, kv_len)


def _from_block_mask(q_len: int, kv_len: int, stride: int, reach: int) -> SpanMask:
    size = min(16, q_len, kv_len)
    block_mask = create_block_mask(
        _mask_mod(stride, reach), 1, None, q_len, kv_len, device="cpu", BLOCK_SIZE=(size, size)
    )
    return SpanMask.from_block_mask(block_mask)


def packing_of(mask: MaskCase) -> Packing:
    """The `Packing` of a mask of kind "packing"."""
    args = mask.args
    sides = {}
    for side in ("q", "kv"):
        sides[f"cu_seqlens_{side}"] = [0, *np.cumsum(args[f"{side}_lens"]).tolist()]
        sides[f"cu_seqlens_{side}_padded"] = [*args[f"{side}_starts"], args[f"{side}_len"]]
    return Packing(**sides, q_len=args["q_len"], kv_len=args["kv_len"])


def _of_packing(**args: Any) -> SpanMask:
    mask = MaskCase("packing", args)
    return packing_of(mask).mask(causal=args["causal"], window=args["window"], align=args["align"])


_CONSTRUCTORS: dict[str, Callable[..., SpanMask]] = {
    "full": SpanMask.full,
    "causal": SpanMask.causal,
    "sliding_window": SpanMask.sliding_window,
    "documents": SpanMask.documents,
    "prefix_lm": SpanMask.prefix_lm,
    "shared_prefix": SpanMask.shared_prefix,
    "block_causal": SpanMask.block_causal,
    "spans": SpanMask,
    "slices": SpanMask.from_slices,
    "mask_mod": _from_mask_mod,
    "block_mask": _from_block_mask,
    "packing": _of_packing,
}


def span_mask(mask: MaskCase) -> SpanMask:
    """The `SpanMask` of a mask in words."""
    parts = [span_mask(part) for part in mask.parts]
    if mask.kind == "and":
        return parts[0] & parts[1]
    if mask.kind == "or":
        return parts[0] | parts[1]
    if mask.kind == "stack":
        return SpanMask.stack(parts)
    return _CONSTRUCTORS[mask.kind](**mask.args)


def plan_of(case: Case) -> Plan:
    """The plan of a case."""
    outer, inner = case.levels
    given: dict[str, Any] = {
        "mask": {name: span_mask(mask) for name, mask in case.masks.items()},
        "num_ranks": outer if inner == 1 else case.levels,
        "balancer": case.balancer,
        "exchange": case.exchange,
        "hardware": spanwise.H100.with_host_size(case.host_size) if case.exchange == "hierarchical" else None,
        "stages": case.stages,
        "keep_kv": case.keep_kv,
        "block_size": case.block_size,
        "cu_seqlens": case.cu_seqlens,
        "weights": {name: 1 + 2 * i for i, name in enumerate(case.masks)} if case.weighted else None,
        "dtype": case.dtype,
        "packing": packing_of(case.masks[case.mask]) if case.packed else None,
    }
    if case.give_shape or case.exchange == "auto":  # "auto" may take Ulysses only where it knows the heads
        names = ("num_q_heads", "num_kv_heads", "head_dim", "v_head_dim")
        given |= dict(zip(names, (*case.heads, *case.dims), strict=True))
    return spanwise.make_plan(**given)


def inputs_of(case: Case) -> Inputs:
    """Whole random tensors of a case; no cotangent in padding."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    (q_heads, kv_heads), (dim, v_dim) = case.heads, case.dims
    q, grad_out = draw(case.batch, q_heads, case.q_len, dim), draw(case.batch, q_heads, case.q_len, v_dim)
    k, v = draw(case.batch, kv_heads, case.kv_len, dim), draw(case.batch, kv_heads, case.kv_len, v_dim)
    grad_lse = draw(case.batch, q_heads, case.q_len) * case.lse
    padding = padding_of(case)[0]
    grad_out[:, :, padding], grad_lse[:, :, padding] = 0, 0
    sinks = {0: None, 1: (q_heads,)}.get(case.sinks, (q_heads, case.sinks))
    return Inputs(q, k, v, grad_out, grad_lse, sinks and draw(*sinks))


def padding_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Which queries and which keys are padding, bool ``[q_len]`` and ``[kv_len]``."""
    queries, keys = torch.zeros(case.q_len, dtype=torch.bool), torch.zeros(case.kv_len, dtype=torch.bool)
    if case.packed:
        args = case.masks[case.mask].args
        for padding, side in ((queries, "q"), (keys, "kv")):
            padding[:] = True
            for start, n in zip(args[f"{side}_starts"], args[f"{side}_lens"], strict=True):
                padding[start : start + n] = False
    return queries, keys


def poisoned(case: Case, inputs: Inputs) -> Inputs:
    """The inputs with NaN in padding, which no rank may read."""
    queries, keys = padding_of(case)
    sides = (queries, keys, keys, queries, queries)
    tensors = [x.clone() for x in inputs[:5]]
    for x, padding in zip(tensors, sides, strict=True):
        x[:, :, padding] = torch.nan
    q, k, v, grad_out, grad_lse = tensors
    return Inputs(q, k, v, grad_out, grad_lse, inputs.sinks)


def _score_mod(kind: str, heads: int) -> Callable[..., torch.Tensor]:
    slopes = 0.3 / (torch.arange(heads, dtype=torch.float64) + 1)

    def score_mod(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        slope = slopes.to(score.dtype)[h] * (1 + b if kind == "batch" else 1)
        return score + slope * (kv_idx - q_idx) / 8 + 0.01 * q_idx.to(score.dtype)

    return score_mod


Call = Callable[..., Any]
"""Attention of q, k, v and sinks: out and aux."""


def keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy of a selective checkpoint."""
    keep = op is torch.ops.spanwise.sdpa.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _styled(style: str, call: Call, given: list[Any]) -> Any:
    """Out and aux of ``call(*given)``, made as the style says."""
    if style == "checkpoint":
        return checkpoint(call, *given, use_reentrant=False)
    if style == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, keep_attention)
        with set_checkpoint_early_stop(False):
            return checkpoint(call, *given, use_reentrant=False, context_fn=contexts)
    if style == "offloaded":
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
            return call(*given)
    if style == "inference first":
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                assert not call(*(None if x is None else x.detach().clone() for x in given))[0].requires_grad
    if style.startswith("compiled"):
        torch._dynamo.reset()
        return torch.compile(call, backend=style.removeprefix("compiled by "), fullgraph=True)(*given)
    return call(*given)


def on_rank(rank: int, mesh: DeviceMesh | None, case: Case, plan: Plan, inputs: Inputs) -> dict[str, torch.Tensor]:
    """One rank's results by name: out, lse, max_logit and the gradients that the case asks for."""
    q, grad_out, grad_lse = (_shard(x, "q", case, plan, mesh) for x in (inputs.q, inputs.grad_out, inputs.grad_lse))
    k, v = (_shard(x, "kv", case, plan, mesh) for x in (inputs.k, inputs.v))
    wanted = [i for i in range(3) if case.gradients and (case.style != "some" or case.seed >> i & 1)]
    leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate((q, k, v))]
    sinks = None if inputs.sinks is None else inputs.sinks.clone().requires_grad_(case.gradients)
    attend: Any = spanwise.packed_attention if case.packed else spanwise.context_parallel_attention
    given, where = (plan.local(mesh), None) if case.rank_plan else (plan, mesh)
    score_mod = _score_mod(case.bias, case.heads[0]) if case.bias else None

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        return attend(
            q, k, v, given, where, mask_name=case.mask, scale=case.scale, kernel=case.kernel, score_mod=score_mod,
            softcap=case.softcap, sinks=sinks, return_aux=AuxRequest(lse=case.lse, max_logit=case.max_logit),
        )  # fmt: skip

    pending = torch._C._distributed_c10d._get_work_registry_size()
    other = call(*(x.detach().flip(-1).requires_grad_() for x in leaves), sinks)[0] if case.style == "layers" else None
    out, aux = _styled(case.style, call, [*leaves, sinks])
    found = {"out": out, **({"lse": aux.lse} if case.lse else {})}
    learned = {name: leaves[i] for i, name in enumerate(("dq", "dk", "dv")) if i in wanted}
    learned |= {"dsinks": sinks} if case.gradients and sinks is not None else {}
    gradients = {}
    if learned:
        grad_lse = grad_lse.to(aux.lse.dtype) if case.lse else grad_lse
        cotangents = [{"out": grad_out, "lse": grad_lse}[name] for name in found]
        of = functools.partial(torch.autograd.grad, list(found.values()), list(learned.values()))
        if case.style == "twice":
            of(cotangents, retain_graph=True)
            grads = [x / 2 for x in of([2 * x for x in cotangents])]
        else:
            grads = of(cotangents)
        gradients = dict(zip(learned, grads, strict=True))
    if other is not None:
        other.sum().backward()
    # A started exchange that nobody waits for would keep its buffers until the process ends. Threads share the count.
    own_process = mesh is not None and "gloo" in mesh.get_group(0).name()
    assert not own_process or torch._C._distributed_c10d._get_work_registry_size() == pending
    dsinks = gradients.pop("dsinks", None)
    found |= gradients
    if case.packed:
        found = {name: x.transpose(0, 1) if x.dim() == 3 else x for name, x in found.items()}
        found = {name: x[None] for name, x in found.items()}
    found |= {} if dsinks is None else {"dsinks": dsinks}
    if case.max_logit:
        found["max_logit"] = aux.max_logit
    return {name: x.detach() for name, x in found.items()}


def _shard(x: torch.Tensor, side: Literal["q", "kv"], case: Case, plan: Plan, mesh: DeviceMesh | None) -> torch.Tensor:
    """This rank's part of ``[B, H, T, D]`` or ``[B, H, T]``; of a packed case ``[T, H, D]`` or ``[H, T]``."""
    dim = 2
    if case.packed:
        x = x[0].transpose(0, 1) if x.dim() == 4 else x[0]
        dim = 0 if x.dim() == 3 else 1
    return spanwise.shard(plan, mesh, x, dim=dim, side=side)
