"""Wrong calls of attention: errors that name the argument, on every rank, before anything is sent."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import spanwise
from spanwise import AuxRequest, SpanMask, _torch
from spanwise.attention.rank_plan import build
from tests.pairs import named
from tests.ranks.calls import CU_SEQLENS, EXCHANGES, LENGTH
from tests.ranks.harness import run_ranks

DOCUMENTS = SpanMask.documents(CU_SEQLENS)
ROWS = SpanMask.stack([DOCUMENTS, SpanMask.sliding_window(LENGTH, 5)])
KERNELS = ("reference", "sdpa")
attend = spanwise.context_parallel_attention


def plan_of(mask: SpanMask = DOCUMENTS, **options: Any) -> spanwise.Plan:
    return spanwise.make_plan(mask, 3, **{"balancer": "ptrr", "exchange": "all_gather", "block_size": 4} | options)


def edited(edit: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Changes q, k and v."""
    return {"edit": edit, **options}


def change(score: Any, *_: Any) -> Any:
    return score


PLAN, AUX = plan_of(), {"return_aux": AuxRequest(max_logit=True)}
ROW = functools.partial(edited, lambda q, k, v: (torch.cat([q, q], -1), k[:, :1], v[:, :1]))  # q of head dim 16
# What is changed of a call that works, and what the error names.
WRONG: list[tuple[dict[str, Any], str]] = [
    (edited(lambda q, k, v: (q[:, :, :5], k, v)), "shard of the sequence"),
    (edited(lambda q, k, v: (q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1))), "shard of the sequence"),
    (edited(lambda q, k, v: (q[0], k, v)), "batch, heads, tokens, head_dim"),
    (edited(lambda q, k, v: (q[:, :3], k, v)), "3 query heads"),
    (edited(lambda q, k, v: (q, k, v[:, :1])), "agree"),
    (edited(lambda q, k, v: (q, k.double(), v)), "dtype"),
    ({"plan": DOCUMENTS}, "SpanMask"),
    ({"plan": spanwise.make_plan(DOCUMENTS, 2)}, "2 ranks"),
    ({"plan": plan_of(exchange="ulysses")}, "4 query heads"),
    ({"plan": plan_of(exchange="ulysses", num_q_heads=6, num_kv_heads=2, head_dim=8)}, r"\(4, 2, 8, 8\)"),
    ({"mesh": None}, "mesh"),
    ({"kernel": "flex"}, "'flex' runs on CUDA"),
    ({"kernel": "varlen"}, "use kernel='sdpa'"),
    ({"kernel": "sdpa", "score_mod": change}, "score_mod"),
    ({"kernel": "reference", "score_mod": change, **AUX}, "score_mod"),
    ({"softcap": 1.0, "score_mod": change}, "combined"),
    *(({"softcap": x}, "softcap") for x in (-1.0, 0.0, math.inf, math.nan)),
    *(({"scale": x}, "scale") for x in (math.nan, math.inf, -math.inf)),
    *(({"sinks": torch.zeros(shape)}, "sinks") for shape in ((3,), (1, 4))),
    (edited(lambda q, k, v: (q, k[:, :1], v), expand=lambda k, v: (k, v)), "expand"),
    (ROW(expand=lambda k, v: (k[:, :, 1:], v[:, :, 1:])), "expand"),
    (ROW(expand=lambda k, v: (k, v)), "head dim"),
]
WRONG_PACKED: list[tuple[dict[str, Any], str]] = [
    (edited(lambda q, k, v: (q[None], k[None], v[None])), r"\[tokens, heads, head_dim\]"),
    (edited(lambda q, k, v: (q, k[:-1], v)), "dim=0"),
    (edited(lambda *qkv: [x.transpose(0, 1) for x in qkv]), "dim=0"),
    ({"plan": plan_of(ROWS)}, "2 batch rows"),
]


@pytest.mark.parametrize("packed", [False, True])
def test_wrong_calls_are_errors_before_any_collective(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank; none waits for another."""
    started: list[str] = []
    for name in ("start_all_gather", "start_reduce_scatter", "start_all_to_all", "start_all_reduce"):
        start = getattr(_torch, name)

        def recorded(x: torch.Tensor, *args: Any, name: str = name, start: Any = start) -> Any:
            started.extend([name] * (x.dtype != torch.uint8))  # bytes are the comparison of plans
            return start(x, *args)

        monkeypatch.setattr(_torch, name, recorded)

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        shards = [torch.ones(1, n, PLAN.layout.num_tokens(rank), 8) for n in (4, 2, 2)]
        shards = [x[0].transpose(0, 1) for x in shards] if packed else shards
        for options, message in WRONG_PACKED if packed else WRONG:
            given = {"plan": PLAN, "mesh": mesh, "edit": lambda *qkv: qkv} | options
            qkv, call = given.pop("edit")(*shards), spanwise.packed_attention if packed else attend
            with pytest.raises(ValueError, match=message):
                call(*qkv, given.pop("plan"), given.pop("mesh"), **given)

    run_ranks(3, on_rank)
    assert started == []


def test_dtensors_and_meshes_that_do_not_fit() -> None:
    plan, ulysses = (spanwise.make_plan(DOCUMENTS, 2, exchange=name, block_size=4) for name in ("needed", "ulysses"))
    levels, four = (spanwise.make_plan(DOCUMENTS, ranks, block_size=4) for ranks in ((2, 2), 4))

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        cp = mesh["cp"]
        x = torch.randn(1, 2, plan.layout.num_tokens(cp.get_local_rank()), 8)

        def placed(x: torch.Tensor, dim: int = 1, **options: Any) -> DTensor:
            return DTensor.from_local(x, mesh["tp"], [Shard(dim)], run_check=False, **options)

        odd = placed(x[:, :1], shape=(1, 3, *x.shape[2:]), stride=x.stride())
        three = placed(torch.randn(1, 3, ulysses.layout.num_tokens(cp.get_local_rank()), 8))
        for call, names in (
            (lambda: attend(*[placed(x, 2)] * 3, plan, cp), "sharded over heads"),
            (lambda: attend(placed(x), placed(x), x, plan, cp), "v is a Tensor"),
            (lambda: attend(odd, placed(x), placed(x), plan, cp), r"q is a DTensor of shape \(1, 3"),
            (lambda: attend(three, three, three, ulysses.local(cp), cp), "3 query heads"),
            (lambda: spanwise.packed_attention(*[placed(x[0], 0)] * 3, plan, cp), "DTensor .* to_local"),
            (lambda: attend(x, x, x, levels, cp), r"\(2, 2\), got \(2,\)"),
            (lambda: attend(x, x, x, four, mesh), r"\(4,\), got \(2, 2\)"),
        ):
            with pytest.raises(ValueError, match=names):
                call()

    run_ranks(4, on_rank, mesh_shape=(2, 2), mesh_dim_names=("cp", "tp"))


@pytest.mark.compiles
@pytest.mark.parametrize("exchange", ["ring", "needed"])
def test_what_compiled_code_refuses(exchange: str) -> None:
    """A plan that no rank plan was built of, and chunks that are fetched again."""
    plan = plan_of(exchange=exchange, keep_kv=False)

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        x = torch.randn(1, 2, plan.layout.num_tokens(rank), 8)
        compiled = torch.compile(attend, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="keep_kv=False is for eager code"):
            compiled(x, x, x, build(plan, rank), mesh)  # plan.local would notice that another thread compiles
        with pytest.raises(Exception, match="inside a compiled region; build plan.local"):
            compiled(x, x, x, plan, mesh)

    run_ranks(3, on_rank)


def test_plans_that_no_call_can_take() -> None:
    with pytest.raises(ValueError, match="stages"):
        plan_of(stages=0)
    plan = spanwise.make_plan(SpanMask.causal(2), 3, balancer="contiguous", block_size=1)

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        # The kernel would on the empty rank alone, and the others would wait.
        with pytest.raises(ValueError, match="at least one token on every rank"):
            plan.local(mesh, kernel="flex")

    run_ranks(3, on_rank)


# ---------------------------------------------------------------- derivatives that do not exist


@pytest.mark.parametrize("way", EXCHANGES, ids=named)
def test_second_derivatives_and_changes_in_place(way: dict[str, Any]) -> None:
    """Of the output and of the lse; a change is noticed also where chunks are fetched again."""
    plan = spanwise.make_plan(DOCUMENTS, 2, balancer="lpt", block_size=8, **way)

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        for kernel in KERNELS:
            x = torch.randn(1, 2, plan.layout.num_tokens(rank), 8, dtype=torch.float64).requires_grad_()
            q, request = x * 1, AuxRequest(lse=True)
            out, aux = attend(q, x, x, plan, mesh, kernel=kernel, return_aux=request)
            for result in (out, aux.lse):
                with pytest.raises(NotImplementedError, match="create_graph=True|second derivatives"):
                    torch.autograd.grad(result.square().sum(), x, create_graph=True)
            if way["exchange"] == "ulysses":
                continue  # what it saves is a copy that has travelled
            q.detach().add_(1)
            with pytest.raises(RuntimeError, match="changed in place|modified by an inplace operation"):
                out.sum().backward()

    run_ranks(2, on_rank)


ONE, KEYS = spanwise.make_plan(SpanMask.causal(16), 1), torch.randn(1, 2, 16, 8)  # vmap allows no random numbers
TRANSFORMS: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    "grad": lambda f, q: torch.func.grad(lambda q: f(q).sum())(q),
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (q,)),
    "vmap": lambda f, q: torch.vmap(f)(q.expand(3, *q.shape)),
    "vmap around": lambda f, q: torch.vmap(lambda x: f(q) * x)(torch.arange(3.0)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # by torch, where it first needs a tangent
@pytest.mark.parametrize("kernel", KERNELS)
def test_transforms_and_tangents(kernel: str) -> None:
    """Afterwards a call works; scales of any sign do."""
    call = functools.partial(attend, k=KEYS, v=KEYS, plan=ONE, kernel=kernel)
    for transform in TRANSFORMS.values():
        with pytest.raises(NotImplementedError, match="inside torch.func"):
            transform(call, KEYS)
        with pytest.raises(NotImplementedError, match="inside torch.func"):
            transform(lambda q: (ONE.local(None), q)[1], KEYS)
    with forward_ad.dual_level():
        assert call(KEYS).isfinite().all()  # without a tangent
        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            call(forward_ad.make_dual(KEYS, KEYS))
    assert call(KEYS, scale=-0.5).isfinite().all() and call(KEYS, scale=0).isfinite().all()


@pytest.mark.compiles
def test_compiled_vmap() -> None:
    """Alone, it gave numbers that no test holds to anything."""
    local = ONE.local(None)

    def mapped(q: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda x: attend(x, KEYS, KEYS, local, None))(q)

    compiled = torch.compile(mapped, backend="aot_eager", fullgraph=True)
    with pytest.raises((NotImplementedError, torch._dynamo.exc.Unsupported), match="inside torch.func"):
        compiled(KEYS.expand(3, *KEYS.shape))
