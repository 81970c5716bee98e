"""What travels between ranks, when, and what is refused before anything does."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import spanwise
from spanwise import AuxRequest, SpanMask, _torch
from tests.oracle import make_problem
from tests.pairs import covering, named
from tests.ranks.calls import CU_SEQLENS, EXCHANGES, HOSTS, LENGTH, errors, leaves_of, mesh_of
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks

DOCUMENTS = SpanMask.documents(CU_SEQLENS)
ROWS = SpanMask.stack([DOCUMENTS, SpanMask.sliding_window(LENGTH, 5)])


class Operators(TorchDispatchMode):
    """Calls in order: `+0` starts transfer 0, `-0` waits for it; `a` attends to a chunk, `a'` is its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.started: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.name().split("::")
        result = func(*args, **(kwargs or {}))
        if namespace == "spanwise":
            self.names.append({"sdpa": "a", "sdpa_backward": "a'"}.get(name, name))
        elif name == "wait_tensor":
            (number,) = (i for i, x in enumerate(self.started) if x.data_ptr() == args[0].data_ptr())
            self.names.append(f"-{number}")
        elif namespace == "_c10d_functional":
            self.names.append(f"+{len(self.started)}")
            self.started.append(result)
        return result


# Of rank 0, forward and backward: each transfer is under way while attention to other keys is computed.
ORDERS: dict[str, tuple[dict[str, Any], str]] = {
    "all_gather": ({}, "+0 a -0 a | a' +1 a' -1"),
    "needed": ({"stages": 3}, "+0 +1 +2 a -0 a -1 a -2 a | a' +3 a' +4 a' +5 a' -3 -4 -5"),
    # The next chunk is fetched again before this one is waited for; gradients leave in between.
    "needed, refetched": (
        {"stages": 3, "keep_kv": False},
        "+0 +1 +2 a -0 a -1 a -2 a | +3 +4 -3 a' +5 +6 -4 a' +7 -6 a' +8 a' -5 -7 -8",
    ),
    "needed, nothing": ({}, "a | a'"),  # each rank holds a whole document
    "ring": ({"keep_kv": True}, "+0 a -0 +1 a -1 +2 a -2 a | a' +3 a' -3 +4 a' -4 +5 a' -5"),
    "ring, refetched": ({}, "+0 a -0 +1 a -1 +2 a -2 a | +3 +4 -3 a' +5 +6 -4 a' -5 +7 -6 a' -7 +8 a' -8"),
    "hierarchical": ({"hardware": HOSTS}, "+0 a -0 +1 a -1 a | a' +2 a' -2 +3 a' -3"),
    "ulysses": ({}, "+0 +1 -0 -1 a +2 -2 | +3 -3 a' +4 +5 -4 -5"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_transfers_run_beside_attention(name: str) -> None:
    options, expected = ORDERS[name]
    mask = SpanMask.documents(range(0, 65, 16)) if "nothing" in name else SpanMask.causal(64)
    balancer = "contiguous" if "nothing" in name else "head_tail"
    plan = spanwise.make_plan(mask, 4, balancer=balancer, exchange=name.split(",")[0], block_size=4, **options)
    problem = make_problem(mask.dense(), heads=(8, 4))
    assert plan.recv_tokens().any() == ("nothing" not in name)

    def on_rank(rank: int, mesh: DeviceMesh) -> str:
        leaves, grad = leaves_of(plan, mesh, problem)
        local = plan.local(mesh)
        with Operators() as operators:
            out = spanwise.context_parallel_attention(*leaves, local)
            operators.names.append("|")
            out.backward(grad)
        assert max(errors(plan, rank, problem, [out, *(x.grad for x in leaves)])) <= 1e-10
        return " ".join(operators.names)

    assert run_ranks(4, on_rank)[0] == expected


@pytest.mark.parametrize(
    ("dtype", "way", "batched", "axes"),
    covering(
        [torch.float32, torch.bfloat16], EXCHANGES, [False, True], [3, (2, 3), (3, 2)],
        # The inner axis trades heads already.
        possible=lambda dtype, way, batched, axes: axes == 3 or way["exchange"] != "ulysses",
    ),
    ids=named,
)  # fmt: skip
def test_bytes_on_the_wire(
    monkeypatch: pytest.MonkeyPatch, way: dict[str, Any], dtype: torch.dtype, batched: bool, axes: Any
) -> None:
    """What a rank receives from others in a forward is what the plan says, to the byte; no less comes back."""
    mask = ROWS if batched else DOCUMENTS
    shape = {"num_q_heads": 12, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 6}
    plan = spanwise.make_plan(mask, axes, balancer="lpt", **way, block_size=8, dtype=dtype, **shape)
    problem = make_problem(mask.dense(), batch=mask.batch_size, heads=(12, 2), dims=(8, 6), dtype=dtype)
    received = [0] * plan.num_ranks
    ranks = threading.local()
    gather, exchange_rows = _torch.start_all_gather, _torch.start_all_to_all

    def count_gather(x: torch.Tensor, size: int, name: str) -> torch.Tensor:
        if hasattr(ranks, "rank"):  # else it is the comparison of plans
            received[ranks.rank] += (size - 1) * x.numel() * x.element_size()
        return gather(x, size, name)

    def count_rows(x: torch.Tensor, recv_rows: list[int], send_rows: list[int], name: str) -> torch.Tensor:
        own = _torch.find_group(name).rank()  # what a rank sends itself does not travel
        received[ranks.rank] += (sum(recv_rows) - recv_rows[own]) * x.shape[1] * x.element_size()
        return exchange_rows(x, recv_rows, send_rows, name)

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        local = plan.local(mesh)
        ranks.rank = rank
        spanwise.context_parallel_attention(*(plan.shard(x, rank, dim=2) for x in problem[:3]), local, mesh)

    monkeypatch.setattr(_torch, "start_all_gather", count_gather)
    monkeypatch.setattr(_torch, "start_all_to_all", count_rows)
    run_ranks(plan.num_ranks, on_rank, **mesh_of(plan))
    assert received == plan.recv_bytes().tolist()


# ---------------------------------------------------------------- refused

PLAN = spanwise.make_plan(DOCUMENTS, 3, balancer="ptrr", exchange="all_gather", block_size=4)
AUX = {"return_aux": AuxRequest(max_logit=True)}


def change(score: Any, *_: Any) -> Any:
    return score


# What is changed of a call that works, and what the error names.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too few tokens": ({"edit": lambda q, k, v: (q[:, :, :5], k, v)}, "shard of the sequence"),
    "three dims": ({"edit": lambda q, k, v: (q[0], k, v)}, "batch, heads, tokens, head_dim"),
    "heads": ({"edit": lambda q, k, v: (q[:, :3], k, v)}, "3 query heads are not a multiple of 2"),
    "dtypes": ({"edit": lambda q, k, v: (q, k.double(), v)}, "dtype"),
    "values": ({"edit": lambda q, k, v: (q, k, v[:, :1])}, "agree"),
    "more keys": ({"edit": lambda q, k, v: (q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1))}, "shard of the sequence"),
    "integers": ({"edit": lambda q, k, v: (q.int(), k.int(), v.int())}, "dtype|float"),
    "no heads": ({"edit": lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0])}, "heads"),
    "head dims": ({"edit": lambda q, k, v: (q, k.repeat(1, 1, 1, 2), v)}, "agree"),
    "a mask": ({"plan": DOCUMENTS}, "SpanMask"),
    "no plan": ({"plan": None}, "NoneType"),
    "ranks": ({"plan": spanwise.make_plan(DOCUMENTS, 2)}, "2 ranks"),
    "no mesh": ({"mesh": None}, "mesh"), "its name": ({"mesh": "cp"}, "DeviceMesh, got a str"),
    "mask name": ({"mask_name": "window"}, "'window'"),
    "kernel": ({"kernel": "cudnn"}, "'cudnn'"),
    "flex": ({"kernel": "flex"}, "'flex' runs on CUDA"),
    "varlen": ({"kernel": "varlen"}, "use kernel='sdpa'"),
    "score_mod": ({"kernel": "sdpa", "score_mod": change}, "score_mod"),
    "two changes": ({"softcap": 1.0, "score_mod": change}, "combined"),
    "softcap": ({"softcap": -1.0}, "softcap"),
    **{f"softcap {x}": ({"softcap": x}, "softcap") for x in (0.0, torch.inf, torch.nan)},
    "sinks": ({"sinks": torch.zeros(3)}, r"\[4\], or several"),
    "sinks of two": ({"sinks": torch.zeros(1, 4)}, r"\[4\], or several"),
    "max_logit": ({"kernel": "reference", "score_mod": change, **AUX}, "score_mod"),
    "aux": ({"return_aux": True}, "AuxRequest.*True"),
    "other heads": ({"plan": spanwise.make_plan(DOCUMENTS, 3, exchange="ulysses", num_q_heads=6, num_kv_heads=2,
                                                head_dim=8, balancer="ptrr", block_size=4)}, r"got \(4, 2, 8, 8\)"),
    "heads of ulysses": ({"plan": spanwise.make_plan(DOCUMENTS, 3, exchange="ulysses", balancer="ptrr", block_size=4)},
                         "cannot divide 4 query heads"),
}  # fmt: skip
WRONG_PACKED: dict[str, tuple[dict[str, Any], str]] = {
    "four dims": ({"edit": lambda q, k, v: (q[None], k[None], v[None])}, r"\[tokens, heads, head_dim\]"),
    "two dims": ({"edit": lambda q, k, v: (q, k[:, 0], v)}, "context_parallel_attention"),
    "too few tokens": ({"edit": lambda q, k, v: (q[:-1], k, v)}, "packed ones with dim=0"),
    "too few keys": ({"edit": lambda q, k, v: (q, k[:-1], v)}, "packed ones with dim=0"),
    "heads first": ({"edit": lambda *qkv: [x.transpose(0, 1) for x in qkv]}, "packed ones with dim=0"),
    "batch rows": ({"plan": spanwise.make_plan(ROWS, 3, balancer="ptrr", block_size=4)}, "masks for 2 batch rows"),
    "no plan": ({"plan": None}, "Plan or RankPlan"),
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collectives that any rank starts, other than the comparison of plans (of bytes)."""
    names: list[str] = []
    for name in ("start_all_gather", "start_reduce_scatter", "start_all_to_all", "start_all_reduce"):
        start = getattr(_torch, name)

        def recorded(x: torch.Tensor, *args: Any, name: str = name, start: Any = start) -> Any:
            names.extend([name] * (x.dtype != torch.uint8))
            return start(x, *args)

        monkeypatch.setattr(_torch, name, recorded)
    return names


@pytest.mark.parametrize("packed", [False, True])
def test_wrong_calls_are_errors_before_any_collective(packed: bool, started: list[str]) -> None:
    """On every rank; none waits for another."""

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        shards = [torch.ones(1, n, PLAN.layout.num_tokens(rank), 8) for n in (4, 2, 2)]
        attend, cases = spanwise.context_parallel_attention, WRONG
        if packed:
            shards, attend, cases = [x[0].transpose(0, 1) for x in shards], spanwise.packed_attention, WRONG_PACKED
        for options, message in cases.values():
            given = {"plan": PLAN, "mesh": mesh, "edit": lambda *qkv: qkv} | options
            qkv = given.pop("edit")(*shards)
            with pytest.raises(ValueError, match=message):
                attend(*qkv, given.pop("plan"), given.pop("mesh"), **given)

    run_ranks(3, on_rank)
    assert started == []


def test_a_rank_without_a_token_is_refused_by_flex_on_all_ranks() -> None:
    """The kernel would on the empty rank alone, and the others would wait."""
    plan = spanwise.make_plan(SpanMask.causal(2), 3, balancer="contiguous", block_size=1)

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        with pytest.raises(ValueError, match="at least one token on every rank"):
            plan.local(mesh, kernel="flex")

    run_ranks(3, on_rank)


PACKINGS = [spanwise.Packing(cu, cu_seqlens_q_padded=padded) for cu, padded in (
    ([0, 5, 12], [0, 8, 16]), ([0, 5, 11], [0, 8, 16]), ([0, 4, 12], [0, 8, 16]), ([0, 5, 5, 12], [0, 8, 8, 16])
)]  # fmt: skip


def differing(rank: int, mesh: DeviceMesh, plans: list[spanwise.Plan]) -> str:
    """The first plan on all ranks, then the second on the last one."""
    q = torch.zeros(1, 2, plans[0].layout.num_tokens(rank), 8)
    assert spanwise.context_parallel_attention(q, q, q, plans[0], mesh).shape == q.shape
    plan = plans[rank == mesh.size() - 1]
    q = torch.zeros(1, 2, plan.layout.num_tokens(rank), 8)
    with pytest.raises(ValueError, match="ranks disagree on call") as error:
        spanwise.context_parallel_attention(q, q, q, plan, mesh)
    return str(error.value)


# One valid token less, others, one empty sequence more: the same mask.
@pytest.mark.parametrize(("number", "axes"), [(1, 2), (2, (2, 2)), (3, 2)])
def test_ranks_whose_cu_seqlens_differ(gloo_pool: GlooPool, number: int, axes: Any) -> None:
    given = PACKINGS[0], PACKINGS[number]
    plans = [spanwise.make_plan(x.mask(), axes, packing=x, balancer="lpt", block_size=8) for x in given]
    for text in gloo_pool.run(plans[0].num_ranks, differing, plans, **mesh_of(plans[0])):
        assert "plan.local" in text and all(f"plan {plan.fingerprint}" in text for plan in plans), text


@pytest.mark.parametrize("way", EXCHANGES, ids=named)
def test_second_derivatives_are_refused(way: dict[str, Any]) -> None:
    plan = spanwise.make_plan(DOCUMENTS, 2, balancer="lpt", block_size=8, **way)

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        x = torch.randn(1, 2, plan.layout.num_tokens(rank), 8, dtype=torch.float64).requires_grad_()
        out = spanwise.context_parallel_attention(x, x, x, plan, mesh, kernel="reference")
        with pytest.raises(NotImplementedError, match="create_graph=True|second derivatives"):
            torch.autograd.grad(out.sum(), x, create_graph=True)

    run_ranks(2, on_rank)


def test_a_change_in_place_is_noticed_where_chunks_are_fetched_again() -> None:
    plan = spanwise.make_plan(DOCUMENTS, 2, balancer="lpt", exchange="needed", block_size=8, keep_kv=False)

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        q, k, v = (torch.randn(1, 1, plan.layout.num_tokens(rank), 8).requires_grad_() for _ in range(3))
        changed = q * 1
        out = spanwise.context_parallel_attention(changed, k, v, plan, mesh)
        changed.detach().add_(1)
        with pytest.raises(RuntimeError, match="changed in place|modified by an inplace operation"):
            out.sum().backward()

    run_ranks(2, on_rank)


@pytest.mark.parametrize("stages", [0, -1, 1.5, True])
def test_stages_are_checked(stages: Any) -> None:
    with pytest.raises(ValueError, match="stages"):
        spanwise.make_plan(DOCUMENTS, 2, stages=stages)
