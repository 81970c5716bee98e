"""Cells of parity for what is around attention: its options, `ContextParallel`, `verify`, tokens, links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import spanwise
from benchmarks.gpu.campaign import Row
from benchmarks.gpu.problem import KV_HEADS, TOLERANCES, differences, mask_of, problem
from benchmarks.gpu.worlds import Here
from spanwise.calibrate.links import measure_links
from spanwise.calibrate.ranks import Ranks

OPTIONS = ("score_mod", "softcap", "sinks", "lse", "max_logit")


def cells(cuda: bool) -> list[Row]:
    """For a world of several ranks."""
    kernels = ("flex", "reference") if cuda else ("reference",)
    found: list[Row] = [
        {"what": "option", "option": option, "kernel": kernel} for kernel in kernels for option in OPTIONS
    ]
    types = ("flex", "sdpa", "varlen") if cuda else ("flex", "sdpa")
    found += [{"what": "module", "attention_type": name} for name in types]
    found += [{"what": "verify", "kernel": kernel} for kernel in (("flex", "varlen") if cuda else ("sdpa",))]
    return [*found, {"what": "tokens"}, {"what": "links"}]


def _plan(here: Here, **options: Any) -> tuple[spanwise.Plan, int]:
    length, block = (1000, 128) if here.device.type == "cuda" else (90, 16)
    mask = mask_of("documents", length)
    fixed: dict[str, Any] = {"balancer": "head_tail", "block_size": block, "exchange": "needed", "stages": 1}
    return spanwise.make_plan(mask, here.world.size, **fixed, **options), length


def option(cell: Row, here: Here) -> Row:
    """One option of attention in float32, against kernel "reference" in float64 with the same option."""
    plan, length = _plan(here)
    given, _ = problem("documents", length, "float32", here.device)
    q, k, v, grad = (plan.shard(x, here.rank, dim=2) for x in given)
    slopes = torch.linspace(0.01, 0.1, q.shape[1], device=here.device)
    sinks = torch.linspace(-1.0, 1.0, q.shape[1], device=here.device)

    def alibi(score: torch.Tensor, b: Any, h: Any, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return score - slopes[h] * (q_idx - kv_idx)

    def run(kernel: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        options: dict[str, Any] = {
            "score_mod": {"score_mod": alibi},
            "softcap": {"softcap": 3.0},
            "sinks": {"sinks": sinks.to(dtype).requires_grad_()},
            "lse": {"return_aux": spanwise.AuxRequest(lse=True)},
            "max_logit": {"return_aux": spanwise.AuxRequest(max_logit=True)},
        }[cell["option"]]
        found = spanwise.context_parallel_attention(*leaves, plan, here.mesh, kernel=kernel, **options)
        out, extra = found if isinstance(found, tuple) else (found, None)
        results, cotangents = [out], [grad.to(dtype)]
        if cell["option"] == "lse":
            results.append(extra.lse)
            cotangents.append(torch.ones_like(extra.lse))
        grads = torch.autograd.grad(results, [*leaves, *([options["sinks"]] if "sinks" in options else [])], cotangents)
        return [*results, *grads, *([extra.max_logit] if cell["option"] == "max_logit" else [])]

    found, wanted = run(cell["kernel"], torch.float32), run("reference", torch.float64)
    names = [f"result {i}" for i in range(len(found))]
    errors = differences(dict(zip(names, zip(found, wanted, strict=True), strict=True)), 1e-4)
    return {"differs": max(errors.values())}


class Attention(nn.Module):
    """A module whose forward is the attention call alone."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function


class Flex(Attention):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: Any = None) -> torch.Tensor:
        return self.function(q, k, v, block_mask=block_mask, enable_gqa=True)


class Sdpa(Attention):
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None, is_causal: bool = False
    ) -> torch.Tensor:
        return self.function(q, k, v, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=True)


class Varlen(Attention):
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int
    ) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return self.function(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size=(-1, 0))


def module(cell: Row, here: Here) -> Row:
    """A module under `ContextParallel`; the style itself runs it on a small problem first."""
    kind = cell["attention_type"]
    dtype = "bfloat16" if kind == "varlen" else "float32"
    plan, length = _plan(here)
    given, wanted = problem("documents", length, dtype, here.device)
    local = [plan.shard(x, here.rank, dim=2).clone() for x in given]
    leaves = [x.requires_grad_() for x in local[:3]]
    kernel = {"varlen": "varlen", "flex": "flex", "sdpa": "auto"}[kind] if here.device.type == "cuda" else "sdpa"
    style = spanwise.ContextParallel(attention_type=kind, kernel=kernel, probe=(2, 1, 16))
    if kind == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        inner = parallelize_module(Varlen(varlen_attn), here.mesh, style)
        packed = (x[0].transpose(0, 1) for x in leaves)
        rank_plan = plan.local(here.mesh, here.device, kernel=kernel)
        out = inner(*packed, rank_plan, rank_plan, length, length).transpose(0, 1)[None]
    else:
        inner = parallelize_module(Flex(flex_attention) if kind == "flex" else Sdpa(_sdpa), here.mesh, style)
        out = inner(*leaves, **{"block_mask" if kind == "flex" else "attn_mask": plan})
    got = [out.detach(), *torch.autograd.grad(out, leaves, local[3])]
    pairs = zip(got, (plan.shard(x, here.rank, dim=2) for x in wanted), strict=True)
    return differences(dict(zip(("out", "dq", "dk", "dv"), pairs, strict=True)), TOLERANCES[dtype])


_sdpa = F.scaled_dot_product_attention


def verify(cell: Row, here: Here) -> Row:
    """`spanwise.verify`: parity and the probe for leaks."""
    kernel, dtype = cell["kernel"], torch.bfloat16 if cell["kernel"] == "varlen" else torch.float32
    plan, _ = _plan(here, num_q_heads=4, num_kv_heads=2, head_dim=16)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any, mesh: Any) -> torch.Tensor:
        return spanwise.context_parallel_attention(q, k, v, plan, mesh, kernel=kernel)

    report = spanwise.verify(attend, plan, here.mesh, dtype=dtype, device=here.device, num_probes=2)
    if not report:
        raise AssertionError(str(report))
    return {"differs": max(report.errors.values())}


def links(cell: Row, here: Here) -> Row:
    """The sweep of `spanwise calibrate` over the ranks of this device: that it runs; not the rate of a real link."""
    ranks = Ranks(here.mesh, here.device)
    found, _, _ = measure_links(ranks, ranks.size, 1 << 16, 2)
    return {"bandwidth": found[0].bandwidth, "latency": found[0].latency}


def tokens(cell: Row, here: Here) -> Row:
    """`shard`, `unshard` and its gradient, and packed attention."""
    plan, length = _plan(here)
    whole = torch.randn(1, length, 3, generator=torch.Generator().manual_seed(0)).to(here.device)
    local = spanwise.shard(plan, here.mesh, whole, dim=1).requires_grad_()
    gathered = spanwise.unshard(plan, here.mesh, local, dim=1)
    torch.testing.assert_close(gathered, whole, rtol=0, atol=0)
    (grad,) = torch.autograd.grad(gathered, local, whole)  # every rank sends the whole gradient: their sum comes back
    torch.testing.assert_close(grad, here.world.size * local.detach())
    given, wanted = problem("documents", length, "float32", here.device)
    q, k, v = (plan.shard(x, here.rank, dim=2)[0].transpose(0, 1).contiguous() for x in given[:3])
    assert k.shape[1] == KV_HEADS
    out = spanwise.packed_attention(q, k, v, plan, here.mesh, kernel="reference").transpose(0, 1)[None]
    return differences({"out": (out, plan.shard(wanted[0], here.rank, dim=2))}, TOLERANCES["float32"])


FUNCTIONS = {"option": option, "module": module, "verify": verify, "links": links, "tokens": tokens}
