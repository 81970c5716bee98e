"""What travels between ranks, when, and what is refused before anything does."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import spanwise
from spanwise import SpanMask, _torch
from tests.oracle import make_problem
from tests.pairs import covering, named
from tests.ranks.calls import CU_SEQLENS, EXCHANGES, HOSTS, LENGTH, errors, leaves_of, mesh_of
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
