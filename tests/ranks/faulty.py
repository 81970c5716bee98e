"""Every call that communicates, small, as a function of one tensor; and steps of such calls in a few words.

A word of a step is a call, or something of one: `f` calls, `g` calls with another plan, `n` with another mask, `c`
under a checkpoint, `p` makes the rank plan anew, `b0` is the backward of the first call, and `q0` its gradient of q
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import spanwise
from spanwise import SpanMask, recurrence
from tests.ranks.calls import HOSTS

TOKENS = 12  # of a rank
HEADS = 6
TREE = spanwise.TokenTree([-1, 0, 0], [2, 1, 2])
Options = dict[str, Any]
Call = Callable[..., Any]
OPTIONS_OF_ATTENTION = ("scale", "softcap", "return_aux", "score_mod")


def plan_of(mesh: DeviceMesh, which: str = "a", exchange: str = "needed", balancer: str = "contiguous") -> Any:
    """Plans a and b give the ranks equally many tokens, so that every tensor of one fits the other."""
    length = TOKENS * mesh.size()
    causal, window = SpanMask.causal(length), SpanMask.sliding_window(length, TOKENS - 3)
    apart = SpanMask.documents(range(0, length + 1, TOKENS))
    masks = {
        "a": {"full": causal, "near": window}, "b": {"full": window, "near": causal},
        "apart": {"full": apart, "near": apart},  # nothing travels
    }[which]  # fmt: skip
    return spanwise.make_plan(
        masks, mesh.size() if mesh.ndim == 1 else tuple(mesh.mesh.shape), balancer=balancer, block_size=2,
        exchange=exchange, hardware=HOSTS if exchange == "hierarchical" else None,
    )  # fmt: skip


def attention(mesh: DeviceMesh, options: Options) -> Call:
    """The tensor is q of each head; K and V have a leaf of their own."""
    first = options.get("plan", "a")
    exchange = options.get("exchange", "needed")
    plans = {which: plan_of(mesh, which, exchange).local(mesh) for which in {first, "b"}}
    batch, heads = options.get("batch", 1), options.get("heads", HEADS)
    leaf = torch.ones((), requires_grad=options.get("grad", True))
    given = {name: options[name] for name in OPTIONS_OF_ATTENTION if name in options}

    def call(x: torch.Tensor, plan: str = first, mask_name: str = options.get("mask_name", "full")) -> Any:
        kernel = options.get("kernel", "reference" if x.dtype == torch.float16 else "sdpa")
        q, k = x.expand(batch, heads, *x.shape), (x.detach() * leaf).expand(batch, HEADS, *x.shape)
        return spanwise.context_parallel_attention(
            q, k, 2 * k, plans[plan], mesh, mask_name=mask_name, kernel=kernel, **given
        )

    return call


def rank_plan(mesh: DeviceMesh, options: Options) -> Call:
    """Of sequences in storage: b has one valid token less, c an empty sequence more and the same mask."""

    def call(x: torch.Tensor, plan: str = "a") -> torch.Tensor:
        lens, slots = {"a": ([0, 5, 12], [0, 8, 16]), "b": ([0, 5, 11], [0, 8, 16]),
                       "c": ([0, 5, 5, 12], [0, 8, 8, 16])}[plan]  # fmt: skip
        packing = spanwise.Packing(lens, cu_seqlens_q_padded=slots)
        spanwise.make_plan(packing.mask(), mesh.size(), packing=packing, balancer="lpt", block_size=8).local(mesh)
        return x

    return call


def unshard(mesh: DeviceMesh, options: Options) -> Call:
    local = plan_of(mesh).local(mesh)
    return lambda x: spanwise.unshard(local, x=x[None])


def roll(mesh: DeviceMesh, options: Options) -> Call:
    local, cu = plan_of(mesh).local(mesh), [0, TOKENS * mesh.size()]
    return lambda x: spanwise.roll(x[None], 1, local, cu_seqlens=cu)


def gated_linear(mesh: DeviceMesh, options: Options) -> Call:
    route, gates = recurrence.recurrence_route(plan_of(mesh), mesh), -torch.ones(1, TOKENS, 1)
    return lambda x: recurrence.gated_linear(*[x[None, :, None]] * 3, gates, route)


def gated_delta(mesh: DeviceMesh, options: Options) -> Call:
    """Behind a convolution."""
    route = recurrence.recurrence_route(plan_of(mesh), mesh)
    bias, normalize = options.get("bias"), options.get("normalize", False)

    def call(x: torch.Tensor) -> Any:
        x = recurrence.causal_conv(x[None], torch.ones(5, 3), bias, route)[:, :, None]
        gates = torch.full((1, x.shape[1], 1), 0.5)
        return recurrence.gated_delta(x, x, x, -gates, gates, route, normalize=normalize)

    return call


def relayout(mesh: DeviceMesh, options: Options) -> Call:
    route = spanwise.relayout_route(plan_of(mesh), plan_of(mesh, balancer="head_tail"), mesh)
    return lambda x: spanwise.relayout(x, route, dim=0)


def cross_entropy(mesh: DeviceMesh, options: Options) -> Call:
    count, weights = options.get("count", 6), options.get("weights")
    labels = torch.arange(TOKENS) % 4
    labels[1] = -100
    return lambda x: spanwise.cross_entropy(x, labels, mesh, num_valid=count, weights=weights)


def linear_cross_entropy(mesh: DeviceMesh, options: Options) -> Call:
    def call(x: torch.Tensor) -> Any:
        weight, labels = torch.ones(7, x.shape[-1]), torch.arange(TOKENS) % 7
        return spanwise.linear_cross_entropy(x, weight, labels, loss_mesh=mesh, softcap=options.get("softcap"))

    return call


def token_logprobs(mesh: DeviceMesh, options: Options) -> Call:
    """Scores of hidden states, or of logits, or a loss of them."""
    weight, bias = (torch.ones(shape, dtype=options.get("dtype", torch.float32)) for shape in ((3, 5), (3,)))
    labels = torch.arange(options.get("tokens", TOKENS)) % 4
    given = {name: options[name] for name in ("temperature", "softcap") if name in options}

    def call(x: torch.Tensor) -> Any:
        x = x[: len(labels)] if "tokens" in options else x
        if "loss" in options:
            return spanwise.linear_cross_entropy(
                x, weight, labels, loss_mesh=None, vocab_mesh=mesh, num_valid=options.get("count")
            )
        return spanwise.token_logprobs(
            x, labels, vocab_weight=None if "logits" in options else weight, bias=bias if "bias" in options else None,
            vocab_mesh=mesh, **given,
        )  # fmt: skip

    return call


def unshard_edges(mesh: DeviceMesh, options: Options) -> Call:
    tree = options.get("tree", TREE)
    own = spanwise.shard_edges(tree, spanwise.make_plan(tree.mask(), 2, block_size=1), mesh)
    return lambda x: spanwise.unshard_edges(own, mesh, x[: len(own.targets)], dim=0)


CALLS = {
    make.__name__: make
    for make in (
        attention, rank_plan, unshard, roll, gated_linear, gated_delta, relayout, cross_entropy,
        linear_cross_entropy, token_logprobs, unshard_edges,
    )
}  # fmt: skip


def total(out: Any) -> torch.Tensor:
    return sum(part.sum() for part in (out if isinstance(out, tuple) else (out,)) if isinstance(part, torch.Tensor))


def play(name: str, mesh: DeviceMesh, call: Call, words: str, options: Options | None = None) -> None:
    """A step of call `name`, made by ``CALLS[name](mesh, …)``."""
    options = options or {}
    leaves, outs = [], []
    for word in words.split():
        if word[0] in "bq":
            out, x = (made[int(word[1:])] for made in (outs, leaves))
            if total(out).requires_grad:
                torch.autograd.backward(total(out), inputs=[x] if word[0] == "q" else None)
            continue
        if word == "p":
            call = CALLS[name](mesh, options)
            continue
        x = torch.ones(TOKENS, options.get("columns", 5), dtype=options.get("dtype", torch.float32))
        x = x.requires_grad_(options.get("grad", True))
        changed = {"g": {"plan": "b"}, "n": {"mask_name": "near"}}.get(word, {})
        leaves.append(x)
        outs.append(checkpoint(call, x, use_reentrant=False) if word == "c" else call(x, **changed))
