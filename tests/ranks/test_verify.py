"""verify passes what is right and names what is wrong; every failure here is a bug planted in an attention call."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention

import spanwise
from spanwise import SpanMask
from tests.ranks.calls import mesh_of
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks

LENGTH = 40
CU = [0, 1, 18, LENGTH]
MASK = SpanMask.documents(CU)
PADDED = spanwise.Packing([0, 5, 5, 12, 13], cu_seqlens_q_padded=[0, 8, 16, 32, 40])
CROSS = spanwise.Packing(
    [0, 5, 9], cu_seqlens_q_padded=[0, 8, 16], cu_seqlens_kv=[0, 3, 14], cu_seqlens_kv_padded=[0, 8, 24]
)
attend = spanwise.context_parallel_attention


def plan_of(num_ranks: Any, exchange: str = "needed", mask: Any = MASK, **options: Any) -> spanwise.Plan:
    """Without a number of heads verify takes one that Ulysses can share."""
    options = {"balancer": "contiguous", "block_size": 4} | options
    return spanwise.make_plan(mask, num_ranks, exchange=exchange, **options)


def packed(packing: spanwise.Packing, num_ranks: Any, exchange: str) -> spanwise.Plan:
    mask = packing.mask(causal=packing is PADDED)
    return plan_of(num_ranks, exchange, mask, balancer="dual_chunk", packing=packing)


def reports(make: Any, plan: spanwise.Plan, **options: Any) -> list[spanwise.VerifyReport]:
    """Of each rank, for the function or model that ``make(mesh)`` gives."""
    return run_ranks(
        plan.num_ranks, lambda rank, mesh: spanwise.verify(make(mesh), plan, mesh, **options), **mesh_of(plan)
    )


class Model(nn.Module):
    """Two layers of two heads. Where the sequence is cut, `forgets` is the share of a gradient that is lost."""

    def __init__(self, mesh: Any = None, forgets: float = 0.0) -> None:
        super().__init__()
        self.mesh, self.forgets, self.embed = mesh, forgets, nn.Embedding(50, 8).requires_grad_(False)
        self.qkv, self.out = (nn.ModuleList([nn.Linear(8, n, bias=False) for _ in range(2)]) for n in (24, 8))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.3, generator=generator)

    def forward(self, x: torch.Tensor, plan: spanwise.RankPlan) -> torch.Tensor:
        for qkv, out in zip(self.qkv, self.out, strict=True):
            heads = qkv(x).unflatten(-1, (-1, 3, 4)).permute(3, 0, 2, 1, 4)
            if plan.num_ranks > 1:
                heads = heads * (1 - self.forgets) + heads.detach() * self.forgets
            x = x + out(attend(*heads, plan, self.mesh).transpose(1, 2).flatten(2))
        return x


class Named(Model):
    """As Hugging Face calls it: inputs by name, the plan under a name of its own, an object with logits."""

    def forward(self, input_ids=None, position_ids=None, use_cache=True, **kwargs):  # type: ignore[override]
        assert use_cache is False
        plan = kwargs["spanwise_plan"]
        assert position_ids is None or torch.equal(position_ids, plan.positions.expand_as(position_ids))
        return types.SimpleNamespace(logits=super().forward(self.embed(input_ids), plan))


POSITIONS = torch.from_numpy(spanwise.Packing(CU).positions())[None]
NAMED = {"input_ids": torch.arange(LENGTH)[None], "position_ids": POSITIONS, "use_cache": False}
STREAM: dict[str, Any] = {"inputs": [torch.randn(1, LENGTH, 8)]}
QKV, INPUTS = {"out", "dq", "dk", "dv"}, {"out", "dinputs[0]", "dparameters"}
FUNCTION = lambda mesh: attend  # noqa: E731
HEADS = plan_of(3, balancer="ptrr", num_q_heads=4, num_kv_heads=2, head_dim=8)
RIGHT: dict[str, tuple[Any, spanwise.Plan, dict[str, Any], set[str]]] = {
    **{str(dtype): (FUNCTION, HEADS, {"dtype": dtype}, QKV)
       for dtype in (torch.float64, torch.float32, torch.bfloat16)},
    **{f"{exchange} on {ranks}": (FUNCTION, plan_of(ranks, exchange, balancer="lpt"), {}, QKV)
       for ranks, exchange in ((3, "ulysses"), ((2, 2), "ring"), ((3, 2), "all_gather"))},
    **{f"{exchange} on {ranks}, {'cross' if packing is CROSS else 'padded'}": (
        FUNCTION, packed(packing, ranks, exchange), {"num_probes": 40}, QKV)
       for ranks, exchange, packing in ((2, "ring", PADDED), (4, "ulysses", CROSS), ((2, 2), "needed", PADDED))},
    # A window reaches further over two layers; that is no leak.
    "a model": (Model, plan_of(3, mask=SpanMask.sliding_window(LENGTH, 3)), STREAM, INPUTS),
    # The residual stream goes on in padding; only attention is zero there.
    "a model, padded": (Model, packed(PADDED, 2, "ring"), STREAM | {"num_probes": 40}, INPUTS),
    "names": (Named, plan_of(3), {"inputs": NAMED, "plan_name": "spanwise_plan"}, {"out", "dparameters"}),
    "plan and mesh by name, a tuple": (
        lambda _: lambda q, k, v, *, block_mask, mesh: (attend(q, k, v, block_mask, mesh), None), plan_of(2), {}, QKV),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name: str) -> None:
    make, plan, options, errors = RIGHT[name]
    for report in reports(make, plan, **options):
        assert report.ok and set(report.errors) == errors, report
        assert 0 < max(report.errors.values()) <= report.tolerance, report
        if plan.packing is not None:
            valid = plan.packing.valid_kv
            assert set(report.probed) <= set(valid.nonzero()[0]) and len(report.probed) == valid.sum()
        report.raise_if_failed()


def under(plan: spanwise.Plan) -> Any:
    """Attends under the mask of this plan, whatever is given."""
    return lambda mesh: lambda q, k, v, given: attend(q, k, v, plan, mesh)


CAUSAL, FULL = SpanMask.causal(LENGTH), SpanMask.full(PADDED.q_len)
PADDED_PLAN = plan_of(2, "ring", PADDED.mask(), packing=PADDED)
WRONG: dict[str, tuple[Any, spanwise.Plan, dict[str, Any], str]] = {
    "across documents": (under(plan_of(3, mask=CAUSAL)), plan_of(3), {}, "leaks"),
    "out of padding": (under(plan_of(2, "ring", FULL)), PADDED_PLAN, {}, "leaks"),
    # What a plain attention call does on a shard.
    "own keys alone": (lambda mesh: lambda q, k, v, plan: scaled_dot_product_attention(q, k, v, enable_gqa=True),
                       HEADS, {}, "blind"),
    "K detached": (lambda mesh: lambda q, k, v, plan: attend(q, k.detach(), v, plan, mesh), HEADS, {}, "dk"),
    "weights": (lambda mesh: Model(mesh, forgets=1.0), plan_of(3, mask=CAUSAL), STREAM, "dparameters"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found_and_named(name: str) -> None:
    make, plan, options, what = WRONG[name]
    for report in reports(make, plan, **options):
        assert not report.ok
        if what in ("leaks", "blind"):
            assert getattr(report, what)
        else:
            assert report.errors[what] > 0.5 and report.errors["out"] <= report.tolerance
            assert not report.leaks and not report.blind
        if what == "leaks":
            assert not report.blind and "leak: row" in str(report)
            assert not any(plan.mask().dense()[0, row, token] for row, token in report.leaks)
        with pytest.raises(RuntimeError, match="FAILED"):
            report.raise_if_failed()


ONE, LONG = plan_of(1, mask=SpanMask.causal(8)), plan_of(1, mask=SpanMask.causal(5000))
ALL_PADDING = spanwise.Packing([0, 0], cu_seqlens_q_padded=[0, 8])
EMPTY = spanwise.make_plan(ALL_PADDING.mask(), 1, packing=ALL_PADDING)
REFUSED: dict[str, Any] = {
    "16 .* and 24": lambda: reports(Model, packed(CROSS, 2, "ring"), inputs=[torch.randn(1, 16, 8)]),
    "padding": lambda: spanwise.verify(attend, EMPTY, None),
    "num_probes": lambda: reports(FUNCTION, HEADS, num_probes=0),
    "5000": lambda: spanwise.verify(lambda x, plan: x, LONG, None, inputs=[torch.zeros(1, 5000, 1)]),
    "a dict": lambda: spanwise.verify(lambda x, plan: {"out": x}, ONE, None, inputs=[torch.zeros(1, 8, 4)]),
}


@pytest.mark.parametrize("names", REFUSED)
def test_what_cannot_be_verified_is_refused(names: str) -> None:
    with pytest.raises(ValueError, match=names):
        REFUSED[names]()


# ---------------------------------------------------------------- parameters sharded by FSDP2 or tensor parallelism

SHARDED = plan_of(2, mask=SpanMask.documents([0, 1, 10, 24]))


def sharded(rank: int, mesh: DeviceMesh, axes: tuple[str, ...]) -> list[tuple[bool, dict[str, float]]]:
    """Of a right model and of one that forgets a tenth."""
    found = []
    for forgets in (0.0, 0.1):
        model: Any = Model(mesh["cp"], forgets)
        if "tp" in axes:  # the last dim holds all heads, as the layer unflattens it
            columns, rows = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
            model = parallelize_module(model, mesh["tp"], {"qkv.*": columns, "out.*": rows})
        else:
            fully_shard(model, mesh=mesh[axes])
        x = torch.randn(1, 24, 8, generator=torch.Generator().manual_seed(1))
        report = spanwise.verify(model, SHARDED, mesh["cp"], inputs=[x])
        assert all(p.grad is None for p in model.parameters())  # nothing is accumulated
        found.append((report.ok, report.errors))
    return found


@pytest.mark.parametrize("axes", [("cp",), ("dp", "cp"), ("cp", "tp")])
def test_sharded_parameters(gloo_pool: GlooPool, axes: tuple[str, ...]) -> None:
    for (ok, right), (wrong_ok, wrong) in gloo_pool.run(
        2 ** len(axes), sharded, axes, mesh_shape=(2,) * len(axes), mesh_dim_names=axes
    ):
        assert ok and not wrong_ok and set(right) == set(wrong) == INPUTS, (right, wrong)
        assert 0.01 < wrong["dparameters"] < 0.3, wrong
