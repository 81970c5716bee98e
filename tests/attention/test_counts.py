"""Operators, bytes moved and bytes kept of one attention call: what a GPU would launch, copy and hold for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import spanwise
from spanwise import _torch
from spanwise.attention.kernels.table import KERNELS
from tests.attention import stand_ins

HEADS, KV_HEADS, DIM, LENGTH = 8, 2, 64, 1024


class Counts(_torch.TorchDispatchMode):
    """Names and written bytes of the operators that launch something: no views, nothing uninitialized."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given, made = (
            [_torch.storage_id(x) for x in _torch.tree_leaves(of) if isinstance(x, torch.Tensor)]
            for of in ((args, kwargs), results)
        )
        name = func.name().split("::")[1].split(".")[0]
        in_place = name.endswith("_") or name == "wait_tensor"
        if made and not name.startswith(("empty", "new_empty")) and (in_place or not set(made) <= set(given)):
            written = sum(x.nbytes for x in _torch.tree_leaves(results) if isinstance(x, torch.Tensor))
            self.launched.append((name, written))
        return results


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    dist.destroy_process_group()


EXCHANGES: dict[str, dict[str, Any]] = {
    "needed": {"exchange": "needed", "stages": 1},
    "needed in 4": {"exchange": "needed", "stages": 4},
    "all_gather": {"exchange": "all_gather"},
    "ring": {"exchange": "ring"},
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # read by Dynamo
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch's own, on import
@pytest.mark.parametrize("kernel", ["sdpa", "varlen", "flex"])
@pytest.mark.parametrize("name", EXCHANGES)
def test_a_call(mesh: DeviceMesh, name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS[kernel], "check_device", lambda *_: None, raising=False)
    plan = spanwise.make_plan(
        spanwise.SpanMask.causal(LENGTH), 4, balancer="head_tail", block_size=32, keep_kv=True, num_q_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=DIM, **EXCHANGES[name],
    )  # fmt: skip
    local = plan.local(mesh, kernel=kernel)
    chunks, tokens = local.chunks["default"], local.tokens.shape[1]
    leaves = [
        torch.randn(1, heads, tokens, DIM, dtype=torch.bfloat16).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            kept[_torch.storage_id(x)] = x.untyped_storage().nbytes()
        return x

    forward, backward = Counts(), Counts()
    # FlexAttention compiles in no other mode.
    counted = stand_ins.dense_flex() if kernel == "flex" else forward
    with counted, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = spanwise.context_parallel_attention(*leaves, local, mesh, kernel=kernel)
    row = 2 * KV_HEADS * DIM * 2  # bytes of K and V of a token
    received = row * sum(chunk.kv_pos.shape[1] for chunk in chunks[1:])
    # q, the output and the lse of the union, and what was received; K and V of this rank.
    assert sum(kept.values()) <= 2.1 * out.nbytes + (received + row * tokens) * 1.34
    if kernel == "flex":
        return  # its dense form launches what no kernel does
    with backward:
        out.backward(out.detach())
    # For each chunk that arrives: an exchange, a wait, the rows that leave and those that arrive in order, attention,
    # and eight for the merge.
    more = len(chunks) - 2
    assert len(forward.launched) <= 18 + 13 * more, forward.launched
    assert len(forward.launched) + len(backward.launched) <= 42 + 22 * more, (forward.launched, backward.launched)
    copies = {"clone", "constant_pad_nd", "_local_scalar_dense"}
    assert not copies & {launched for launched, _ in forward.launched}
    assert not copies & {launched for launched, _ in backward.launched}
    moved = sum(written for name, written in forward.launched if name in ("cat", "index_select"))
    assert moved <= 2.2 * received
    # Only gradients of rows are as large as what is gathered.
    zeros = [written for name, written in backward.launched if "zeros" in name]
    assert len(zeros) <= len(chunks) and max(zeros, default=0) <= 2 * row * LENGTH
