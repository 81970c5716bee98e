"""The kernel of docs/add-a-kernel.md, run as the page prints it, gives exact results under every exchange."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import spanwise
from spanwise import SpanMask
from spanwise.attention.kernels.base import AttentionOptions, Chunk, Kernel
from spanwise.attention.kernels.table import KERNELS
from spanwise.attention.rank_plan import build
from tests.attention.test_own_exchange import LENGTH, code_of
from tests.pairs import covering
from tests.properties.cases import check
from tests.ranks.calls import EXCHANGES
from tests.ranks.harness import run_ranks
from tests.ranks.test_attention import Setting


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """The page's kernel."""
    with code_of("add-a-kernel.md", tmp_path_factory.mktemp("outside")) as module:
        yield module.Dense()


class Blockwise(Kernel):
    """Tables, spare keys and all other members that shape a rank plan, around an inner kernel's `attend`."""

    name = "blockwise"
    dynamic_queries = False
    needs_tokens = True
    table_type = dict

    def __init__(self, inner: Kernel) -> None:
        self.inner = inner

    def tables(self, mask: SpanMask, device: torch.device) -> dict[str, torch.Tensor]:
        return {"area": torch.from_numpy(mask.area()).to(device), "keys": torch.empty(mask.kv_len, 0, device=device)}

    def capacity(self, num_keys: int) -> int:
        return max(2, -(-num_keys // 16)) * 16

    def num_spans(self, num_spans: int) -> int:
        return 4

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: Chunk, q_pos: torch.Tensor, options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert k.isfinite().all() and v.isfinite().all()  # spare keys too
        assert chunk.start.shape[1] == 4
        assert chunk.tables["keys"].shape[0] == k.shape[2]
        assert torch.equal(chunk.tables["area"], (chunk.end - chunk.start).clamp(min=0).sum(1))
        return self.inner.attend(q, k, v, chunk, q_pos, options)


CELLS = covering(
    EXCHANGES, [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1)], ["documents", "random, empty rows", "rows"], ["head_tail"],
    [(blockwise, dtype) for blockwise in (True, False) for dtype in ("float64", "float32", "bfloat16")],
    [{}, {"bias": "batch"}, {"max_logit": True}], [((8, 4), (8, 12))], ["eager", "autocast"],
    possible=lambda *cell: Setting(*cell).possible(),
)  # fmt: skip


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: str(Setting(*cell)))
def test_exact_under_every_exchange(kernel: Kernel, cell: Any) -> None:
    """Also with tables and spare keys, autocast, a score_mod on global positions, and the mask's largest scores."""
    case = Setting(*cell).case()
    check(dataclasses.replace(case, kernel=Blockwise(kernel) if case.kernel else kernel), run_ranks)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_where_the_number_of_keys_is_unbacked(kernel: Kernel) -> None:
    """As in the chunks of "needed" and "ring"; one graph serves any number, also none."""
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(q: torch.Tensor, k: torch.Tensor, end: torch.Tensor, kv_pos: torch.Tensor) -> Any:
        chunk = Chunk(torch.zeros_like(end), end, kv_pos)
        return kernel.attend(q, k, k, chunk, kv_pos, AttentionOptions())

    q, end = torch.randn(1, 4, 5, 8), torch.tensor([[[0, 1, 2, 3, 3]]], dtype=torch.int32)
    for keys in (3, 0, 7):
        k, kv_pos = torch.randn(1, 2, keys, 8), torch.arange(keys, dtype=torch.int32)[None]
        torch._dynamo.decorators.mark_unbacked(k, 2)
        torch._dynamo.decorators.mark_unbacked(kv_pos, 1)
        reference = KERNELS["reference"]
        chunk = Chunk(torch.zeros_like(end), end, kv_pos)
        wanted = reference.attend(q, k, k, chunk, kv_pos, AttentionOptions())
        torch.testing.assert_close(attend(q, k, end, kv_pos), wanted)


# --- kernels that shape the rank plan -------------------------------------------------------------------------------


def test_plans_are_shared_by_kernels_that_shape_them_alike(kernel: Kernel) -> None:
    plan = spanwise.make_plan(SpanMask.causal(LENGTH), 1)
    plain = plan.local(None)
    assert kernel.plain and plan.local(None, kernel=kernel) is plain is plan.local(None, kernel="reference")
    blockwise = Blockwise(kernel)
    mine = plan.local(None, kernel=blockwise)
    assert not blockwise.plain and blockwise.pads_keys
    assert mine is not plain and plan.local(None, kernel=blockwise) is mine
    assert plan.local(None, kernel=Blockwise(kernel)) is not mine
    assert plan.local(None, kernel="flex") is plan.local(None, kernel="flex") is not plain
    two = spanwise.make_plan(
        SpanMask.causal(LENGTH), 2, balancer="head_tail", block_size=4, exchange="needed", stages=2
    )
    for chunk in build(two, 0, kernel=blockwise).chunks["default"][1:]:
        assert chunk.kv_pos.shape[1] in (32, 48)


def test_refusals(kernel: Kernel) -> None:
    plan, x = spanwise.make_plan(SpanMask.causal(LENGTH), 1), torch.randn(1, 2, LENGTH, 8)
    attend = spanwise.context_parallel_attention
    with pytest.raises(ValueError, match="kernel 'blockwise' needs dict in the rank plan"):
        attend(x, x, x, plan.local(None), None, kernel=Blockwise(kernel))
    for wrong in ("dens", type(kernel)):
        for call in (lambda name: plan.local(None, kernel=name), lambda name: attend(x, x, x, plan, kernel=name)):
            with pytest.raises(ValueError, match="unknown kernel .*dens.*choose one of .* or give a Kernel|Dense"):
                call(wrong)
    with pytest.raises(ValueError, match=r"'blockwise' needs at least one token .* \[1, 0\]"):
        build(spanwise.make_plan(SpanMask.causal(1), 2), 0, kernel=Blockwise(kernel))
