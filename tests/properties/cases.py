"""One attention call as a record: its plan and inputs, one rank's part of it, and the comparison with one device."""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import spanwise
from spanwise import AuxRequest, Packing, Plan, SpanMask
from tests.oracle import Inputs, expanded, expected

STYLES = ("eager", "checkpoint", "selective", "offloaded", "inference first", "layers", "twice", "some", "autocast")
BALANCERS = ("contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "spt", "local", "auto")

#: Largest error of an entry by dtype, relative to the largest sum of absolute values of the terms of any entry (see
#: `oracle.expected`). Rounding units: 1e-16, 6e-8, 2e-3 and 2e-4.
TOLERANCES = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 1e-2, "float16": 1.25e-3}

_SIDES: dict[str, Any] = {"out": "q", "lse": "q", "dq": "q", "dk": "kv", "dv": "kv"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention call.

    Attributes:
        masks: by name; `mask` is the name of the one that the call takes.
        packing: of the mask, for `packed_attention`.
        seed: of the tensors.
        batch: rows of the tensors; a mask of one row serves them all.
        levels: ``(outer, inner)`` ranks; inner 1 is a 1-D mesh.
        tp: ranks that share the heads, as DTensors.
        latents: dim of the latents that travel in place of K and V, see `tests.oracle.expanded`; 0: none.
        host_size: ranks of a host, for exchange "hierarchical".
        exchange, stages, keep_kv, balancer, block_size, cu_seqlens: arguments of make_plan.
        weighted: whether the layout weighs several masks unequally.
        give_shape: whether make_plan learns heads and head dims.
        heads, dims: query and K/V heads; head dims of K and V.
        dtype, kernel, scale, softcap, bias: of the call; `bias` is a kind of score_mod.
        sinks: logits a head that join the softmax; 0: none.
        lse, max_logit: whether the call asks for lse (with a cotangent) and max_logit.
        rank_plan: whether the call takes ``plan.local(…)`` instead of the plan.
        style: how it is called: one of `STYLES`, or "compiled by" a backend.
        gradients: whether q, k and v require gradients.
    """

    masks: dict[str, SpanMask]
    mask: str = "default"
    packing: Packing | None = None
    seed: int = 0
    batch: int = 1
    levels: tuple[int, int] = (1, 1)
    tp: int = 1
    latents: int = 0
    host_size: int = 2
    exchange: Any = "needed"
    stages: int | None = None
    keep_kv: bool | None = None
    balancer: str = "contiguous"
    block_size: int = 8
    cu_seqlens: list[int] | None = None
    weighted: bool = False
    give_shape: bool = False
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (8, 6)
    dtype: str = "float64"
    kernel: Any = "sdpa"
    scale: float | None = None
    softcap: float | None = None
    bias: str | None = None
    sinks: int = 0
    lse: bool = True
    max_logit: bool = False
    rank_plan: bool = True
    style: str = "eager"
    gradients: bool = True

    @property
    def num_ranks(self) -> int:
        return self.levels[0] * self.levels[1] * self.tp

    @property
    def packed(self) -> bool:
        return self.packing is not None


def plan_of(case: Case) -> Plan:
    outer, inner = case.levels
    given: dict[str, Any] = {}
    if case.give_shape or case.exchange == "auto":  # "auto" may take Ulysses only where it knows the heads
        names = ("num_q_heads", "num_kv_heads", "head_dim", "v_head_dim")
        given = dict(zip(names, (*case.heads, *case.dims), strict=True))
    return spanwise.make_plan(
        case.masks, outer if inner == 1 else case.levels, balancer=case.balancer, exchange=case.exchange,
        hardware=spanwise.H100.with_host_size(case.host_size) if case.exchange == "hierarchical" else None,
        stages=case.stages, keep_kv=case.keep_kv, block_size=case.block_size, cu_seqlens=case.cu_seqlens,
        weights={name: 1 + 2 * i for i, name in enumerate(case.masks)} if case.weighted else None,
        dtype=case.dtype, packing=case.packing, **given,
    )  # fmt: skip


def padding_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Which queries and which keys are padding, bool ``[q_len]`` and ``[kv_len]``."""
    mask = case.masks[case.mask]
    if case.packing is None:
        return torch.zeros(mask.q_len, dtype=torch.bool), torch.zeros(mask.kv_len, dtype=torch.bool)
    return torch.from_numpy(~case.packing.valid_q), torch.from_numpy(~case.packing.valid_kv)


def inputs_of(case: Case) -> Inputs:
    """Whole random tensors of a case; no cotangent in padding."""
    generator, dtype, mask = torch.Generator().manual_seed(case.seed), getattr(torch, case.dtype), case.masks[case.mask]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    (q_heads, kv_heads), (dim, v_dim) = case.heads, case.dims
    q, grad_out = draw(case.batch, q_heads, mask.q_len, dim), draw(case.batch, q_heads, mask.q_len, v_dim)
    rows = ((1, case.latents), (1, dim - v_dim)) if case.latents else ((kv_heads, dim), (kv_heads, v_dim))
    k, v = (draw(case.batch, heads, mask.kv_len, d) for heads, d in rows)
    grad_lse = draw(case.batch, q_heads, mask.q_len) * case.lse
    padding = padding_of(case)[0]
    grad_out[:, :, padding], grad_lse[:, :, padding] = 0, 0
    sinks = {0: None, 1: (q_heads,)}.get(case.sinks, (q_heads, case.sinks))
    up = draw(kv_heads, case.latents, 2 * v_dim) if case.latents else None
    return Inputs(q, k, v, grad_out, grad_lse, sinks and draw(*sinks), up)


def poisoned(case: Case, inputs: Inputs) -> Inputs:
    """The inputs with NaN in padding, which no rank may read."""
    queries, keys = padding_of(case)
    tensors = [x.clone() for x in inputs[:5]]
    for x, padding in zip(tensors, (queries, keys, keys, queries, queries), strict=True):
        x[:, :, padding] = torch.nan
    return inputs._replace(**dict(zip(Inputs._fields, tensors, strict=False)))


def _score_mod(kind: str, heads: int, device: str) -> Callable[..., torch.Tensor]:
    """As `tests.oracle.score_bias`."""
    slopes = 0.3 / (torch.arange(heads, dtype=torch.float64, device=device) + 1)

    def score_mod(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        slope = slopes.to(score.dtype)[h] * (1 + b if kind == "batch" else 1)
        return score + slope * (kv_idx - q_idx) / 8 + 0.01 * q_idx.to(score.dtype)

    return score_mod


def keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy of a selective checkpoint."""
    keep = op is torch.ops.spanwise.sdpa.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _styled(style: str, call: Callable[..., Any], given: list[Any]) -> Any:
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
    if style == "autocast":
        # torch's own operators refuse float16 there.
        with torch.autocast("cpu", torch.bfloat16, enabled=given[0].dtype != torch.float16):
            return call(*given)
    if style.startswith("compiled"):
        torch._dynamo.reset()
        return torch.compile(call, backend=style.removeprefix("compiled by "), fullgraph=True)(*given)
    return call(*given)


def on_rank(
    rank: int, mesh: DeviceMesh | None, case: Case, plan: Plan, inputs: Inputs, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """One rank's results by name: out, lse, max_logit and the gradients that the case asks for."""
    sides: Any = ("q", "kv", "kv", "q", "q")
    tp = None if case.tp == 1 else mesh["tp"]
    if tp is not None:
        mesh = mesh["cp"] if case.levels[1] == 1 else mesh["outer", "inner"]

    def placed(x: torch.Tensor, placement: Placement) -> torch.Tensor:
        return x.to(device) if tp is None else distribute_tensor(x, tp, [placement])

    shards = (_shard(x, side, case, plan, mesh) for x, side in zip(inputs[:5], sides, strict=True))
    q, k, v, grad_out, grad_lse = (placed(x, Shard(1)) for x in shards)
    wanted = [i for i in range(3) if case.gradients and (case.style != "some" or case.seed >> i & 1)]
    leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate((q, k, v))]
    sinks = None if inputs.sinks is None else placed(inputs.sinks.clone(), Replicate()).requires_grad_(case.gradients)
    up = None if inputs.up is None else inputs.up.clone().requires_grad_(case.gradients)
    attend: Any = spanwise.packed_attention if case.packed else spanwise.context_parallel_attention
    given, where = (plan.local(mesh, device, kernel=case.kernel), None) if case.rank_plan else (plan, mesh)
    score_mod = _score_mod(case.bias, case.heads[0], device) if case.bias else None

    made: list[weakref.ref[Any]] = []

    def expand(latents: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = expanded(latents, rope, up)
        if not torch.compiler.is_compiling() and k.numel():
            made.append(weakref.ref(k.untyped_storage()))
        return k, v

    more = {} if up is None else {"expand": expand}

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        return attend(
            q, k, v, given, where, mask_name=case.mask, scale=case.scale, kernel=case.kernel, score_mod=score_mod,
            softcap=case.softcap, sinks=sinks, return_aux=AuxRequest(lse=case.lse, max_logit=case.max_logit),
            **more,
        )  # fmt: skip

    pending = torch._C._distributed_c10d._get_work_registry_size()
    other = call(*(x.detach().flip(-1).requires_grad_() for x in leaves), sinks)[0] if case.style == "layers" else None
    out, aux = _styled(case.style, call, [*leaves, sinks])
    assert not any(storage() for storage in made)  # what was expanded is not saved
    found = {"out": out, **({"lse": aux.lse} if case.lse else {})}
    learned = {name: leaves[i] for i, name in enumerate(("dq", "dk", "dv")) if i in wanted}
    shared = {"dsinks": sinks, "dup": up} if case.gradients else {}
    learned |= {name: x for name, x in shared.items() if x is not None}
    gradients = {}
    if learned:
        cotangents = [{"out": grad_out, "lse": grad_lse}[name].to(x.dtype) for name, x in found.items()]
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
    found |= {name: x for name, x in gradients.items() if name not in shared}
    if case.packed:
        found = {name: (x.transpose(0, 1) if x.dim() == 3 else x)[None] for name, x in found.items()}
    found |= {name: x for name, x in gradients.items() if name in shared}
    if case.max_logit:
        found["max_logit"] = aux.max_logit
    full = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}
    return {name: x.detach().cpu() for name, x in full.items()}


def _shard(x: torch.Tensor, side: Any, case: Case, plan: Plan, mesh: DeviceMesh | None) -> torch.Tensor:
    """This rank's part of ``[B, H, T, D]`` or ``[B, H, T]``; of a packed case ``[T, H, D]`` or ``[H, T]``."""
    dim = 2
    if case.packed:
        x = x[0].transpose(0, 1) if x.dim() == 4 else x[0]
        dim = 0 if x.dim() == 3 else 1
    return spanwise.shard(plan, mesh, x, dim=dim, side=side)


def check(case: Case, run: Callable[..., list[Any]]) -> None:
    """Compare the results of every rank with dense float64 attention.

    Args:
        run: runs ``fn(rank, mesh, *args)`` on so many ranks, results by rank; as `run_ranks` and `GlooPool.run`.

    Raises:
        AssertionError: a result is wrong.
    """
    plan, inputs = plan_of(case), inputs_of(case)
    shape, names = (case.levels, ("outer", "inner")) if case.levels[1] > 1 else (case.levels[:1], ("cp",))
    if case.tp > 1:
        shape, names = (*shape, case.tp), (*names, "tp")
    mesh = {"mesh_shape": shape, "mesh_dim_names": names}
    results = run(case.num_ranks, on_rank, case, plan, poisoned(case, inputs), **mesh)
    visible = torch.from_numpy(case.masks[case.mask].dense())
    whole = expected(inputs, visible, {name: getattr(case, name) for name in ("scale", "softcap", "bias")})
    whole.values["lse"][:, :, padding_of(case)[0]] = -math.inf
    # Rows without a key, and keys that no row reads, have results of exactly 0.
    zeros = {"q": ~visible.any(2).expand(case.batch, -1), "kv": ~visible.any(1).expand(case.batch, -1)}
    for rank, result in enumerate(results):
        rank //= case.tp
        for name, got in result.items():
            if name in ("dsinks", "dup"):
                continue
            side, want = _SIDES.get(name), whole.values[name]
            if side is not None:
                want = plan.shard(want, rank, dim=2, side=side)
            _compare(f"rank {rank} {name}", got, want, whole.sizes[name])
            if side is not None and name != "lse":
                zero = plan.shard(zeros[side], rank, side=side)
                assert not got.movedim(2, 1)[zero].any(), f"rank {rank} {name} is not 0 where the mask has no pair"
    for name in {"dsinks", "dup"} & results[0].keys():
        each = torch.stack([result[name] for result in results[:: case.tp]])
        total = each.double().sum(0).to(each.dtype)
        _compare(f"{name}, summed over ranks,", total, whole.values[name], whole.sizes[name])


def _compare(what: str, got: torch.Tensor, want: torch.Tensor, size: float) -> None:
    """Errors relative to `size` are within the tolerance of the dtype; -inf is where it is expected."""
    assert got.shape == want.shape, f"{what} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    infinite = want == -math.inf
    assert torch.equal(got == -math.inf, infinite), f"{what} is -inf at other places than expected"
    difference = torch.where(infinite, 0.0, (got.double() - want).abs())
    largest = float(difference.max()) if difference.numel() else 0.0
    error = largest / max(size, 1e-30) if largest else 0.0
    tolerance = TOLERANCES[str(got.dtype).removeprefix("torch.")]  # the lse of bfloat16 is float32
    assert error <= tolerance, f"{what} differs by {largest:.3g}, {error:.3g} of its terms; at most {tolerance:g}"
