"""verify must pass what is right and name what is wrong; every failure here is a bug planted in an attention call."""

from __future__ import annotations

import itertools
import types
import warnings
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
PLAN = spanwise.make_plan(MASK, 3, balancer="ptrr", block_size=4, num_q_heads=4, num_kv_heads=2, head_dim=8)
PADDED = spanwise.Packing([0, 5, 5, 12, 13], cu_seqlens_q_padded=[0, 8, 16, 32, 40])
CROSS = spanwise.Packing(
    [0, 5, 9], cu_seqlens_q_padded=[0, 8, 16], cu_seqlens_kv=[0, 3, 14], cu_seqlens_kv_padded=[0, 8, 24]
)
attend = spanwise.context_parallel_attention


class LayoutOf:
    """A balancer that gives the layout of another plan."""

    def __init__(self, plan: spanwise.Plan) -> None:
        self.layout = plan.layout if plan.inner == 1 else plan.groups

    def assign(self, problem: Any, num_ranks: int) -> Any:
        return self.layout


def with_mask(plan: spanwise.Plan, mask: SpanMask) -> spanwise.Plan:
    """The plan with the mask of a call that forgets something."""
    ranks: Any = plan.num_ranks if plan.inner == 1 else (plan.num_groups, plan.inner)
    return spanwise.make_plan(mask, ranks, balancer=LayoutOf(plan), exchange=plan.exchange, block_size=4)


def packed_plan(packing: spanwise.Packing, num_ranks: Any, exchange: str) -> spanwise.Plan:
    mask = packing.mask(causal=packing is PADDED)
    return spanwise.make_plan(mask, num_ranks, balancer="dual_chunk", packing=packing, exchange=exchange)


def reports(make: Any, plan: spanwise.Plan = PLAN, **options: Any) -> list[spanwise.VerifyReport]:
    """Of each rank, for the function or model that ``make(mesh)`` gives."""
    return run_ranks(
        plan.num_ranks, lambda rank, mesh: spanwise.verify(make(mesh), plan, mesh, **options), **mesh_of(plan)
    )


class TwoLayers(nn.Module):
    """A residual stream; its subclasses do something in another way."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList([torch.randn(8, 24, generator=generator) / 3 for _ in range(2)])
        self.mesh = mesh

    def forward(self, x: torch.Tensor, plan: spanwise.RankPlan) -> torch.Tensor:
        for weight in self.weights:
            q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (x @ self.kept(weight, plan)).chunk(3, -1))
            x = x + self.attend(q, k, v, plan).transpose(1, 2).flatten(2)
        return x

    def kept(self, weight: torch.Tensor, plan: spanwise.RankPlan) -> torch.Tensor:
        return weight

    def attend(self, q: Any, k: Any, v: Any, plan: Any) -> torch.Tensor:
        return attend(q, k, v, plan, self.mesh)


class ForgetsItsWeights(TwoLayers):
    """Gets no gradient for its weights where the sequence is cut."""

    def kept(self, weight: torch.Tensor, plan: spanwise.RankPlan) -> torch.Tensor:
        return weight if plan.num_ranks == 1 else weight.detach()


class Named(TwoLayers):
    """A model as Hugging Face calls it: inputs by name, the plan under a name of its own, an object with logits."""

    def __init__(self, mesh: Any) -> None:
        super().__init__(mesh)
        self.embed = nn.Embedding.from_pretrained(torch.randn(50, 8, generator=torch.Generator().manual_seed(2)))

    def forward(self, input_ids=None, position_ids=None, use_cache=True, **kwargs):  # type: ignore[override]
        assert use_cache is False
        plan = kwargs["spanwise_plan"]
        assert position_ids is None or torch.equal(position_ids, plan.positions.expand_as(position_ids))
        return types.SimpleNamespace(logits=super().forward(self.embed(input_ids), plan))


class TwoMasks(Named):
    def attend(self, q: Any, k: Any, v: Any, plan: Any) -> torch.Tensor:
        return attend(q, k, v, plan, mask_name="far") + attend(q, k, v, plan, mask_name="near")


class NeverReached(Named):
    """Attends to the shard alone, as a model does whose attention no pattern matched."""

    def attend(self, q: Any, k: Any, v: Any, plan: Any) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)


NAMED: dict[str, Any] = {
    "inputs": {
        "input_ids": torch.arange(LENGTH)[None],
        "position_ids": torch.from_numpy(spanwise.Packing(CU).positions())[None],
        "use_cache": False,
    },
    "plan_name": "spanwise_plan",
}
STREAM: dict[str, Any] = {"inputs": [torch.randn(1, LENGTH, 8)]}
NEAR = SpanMask.documents(CU, window=(2, 0))
QKV, INPUTS = {"out", "dq", "dk", "dv"}, {"out", "dinputs[0]", "dparameters"}


def exchange_plan(num_ranks: Any, exchange: str) -> spanwise.Plan:
    """Without a number of heads verify takes one that Ulysses can share."""
    return spanwise.make_plan(MASK, num_ranks, balancer="lpt", exchange=exchange, block_size=4)


RIGHT: dict[str, tuple[Any, spanwise.Plan, dict[str, Any], set[str]]] = {
    **{str(dtype): (lambda mesh: attend, PLAN, {"dtype": dtype}, QKV)
       for dtype in (torch.float64, torch.float32, torch.bfloat16)},
    **{f"{exchange} on {ranks}": (lambda mesh: attend, exchange_plan(ranks, exchange), {}, QKV)
       for ranks, exchange in ((3, "ring"), (3, "ulysses"), ((2, 2), "ring"), ((3, 2), "all_gather"))},
    **{f"{exchange} on {ranks}, {name}": (lambda mesh: attend, packed_plan(packing, ranks, exchange),
                                          {"num_probes": 40}, QKV)
       for ranks, exchange in ((2, "ring"), (4, "ulysses"), ((2, 2), "needed"))
       for name, packing in (("padded", PADDED), ("cross", CROSS))},
    # A window reaches further over two layers; that is no leak.
    "a model": (TwoLayers, spanwise.make_plan(SpanMask.sliding_window(LENGTH, 3), 3, block_size=4), STREAM, INPUTS),
    **{f"a model, {x} on {n}": (TwoLayers, exchange_plan(n, x), STREAM, INPUTS)
       for n, x in ((2, "ulysses"), ((2, 2), "needed"))},
    # The residual stream goes on in padding; only attention is zero there.
    "a model, padded": (TwoLayers, packed_plan(PADDED, 2, "ring"), STREAM | {"num_probes": 40}, INPUTS),
    "names": (Named, exchange_plan(3, "needed"), NAMED, {"out", "dparameters"}),
    "two masks": (TwoMasks, spanwise.make_plan({"far": MASK, "near": NEAR}, 2, block_size=4), NAMED,
                  {"out", "dparameters"}),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name: str) -> None:
    make, plan, options, errors = RIGHT[name]
    for report in reports(make, plan, **options):
        assert report.ok and set(report.errors) == errors and 0 < max(report.errors.values()) <= report.tolerance, (
            report
        )
        if plan.packing is not None:
            valid = plan.packing.valid_kv
            assert set(report.probed) <= set(valid.nonzero()[0]) and len(report.probed) == valid.sum()
        report.raise_if_failed()


def test_rounding_of_one_pass_is_no_leak() -> None:
    def make(mesh: Any) -> Any:
        calls = itertools.count()

        def fn(q: Any, k: Any, v: Any, plan: Any) -> torch.Tensor:
            return attend(q, k, v, plan, mesh) * (1 + 4e-7 * (next(calls) == 4))  # of a probe

        return fn

    assert all(report.ok for report in reports(make))


def forgets(plan: spanwise.Plan, mask: SpanMask) -> Any:
    """Attends under another mask."""
    leaky = with_mask(plan, mask)
    return lambda mesh: lambda q, k, v, given: attend(q, k, v, leaky, mesh)


LEVELS, PADDED_PLAN = exchange_plan((2, 2), "ring"), packed_plan(PADDED, 2, "ring")
WRONG: dict[str, tuple[Any, spanwise.Plan, dict[str, Any], str]] = {
    "across documents": (forgets(PLAN, SpanMask.causal(LENGTH)), PLAN, {}, "leaks"),
    "on two levels": (forgets(LEVELS, SpanMask.causal(LENGTH)), LEVELS, {}, "leaks"),
    "out of padding": (forgets(PADDED_PLAN, SpanMask.full(PADDED.q_len)), PADDED_PLAN, {}, "leaks"),
    # What a plain attention call does on a shard.
    "own keys alone": (lambda mesh: lambda q, k, v, plan: scaled_dot_product_attention(q, k, v, enable_gqa=True), PLAN,
                       {}, "blind"),
    "K detached": (lambda mesh: lambda q, k, v, plan: attend(q, k.detach(), v, plan, mesh), PLAN, {}, "dk"),
    "never reached": (NeverReached, exchange_plan(2, "needed"), NAMED, "blind"),
    "weights": (ForgetsItsWeights, spanwise.make_plan(SpanMask.causal(LENGTH), 3, block_size=4), STREAM, "dparameters"),
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


class Inner(nn.Module):
    def forward(self, q, k, v, attn_mask=None):
        return scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)


def test_a_style_counts_the_modules_it_was_applied_to() -> None:
    def on_rank(rank: int, mesh: Any) -> None:
        style = spanwise.ContextParallel(attention_type="sdpa")
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"inner": Inner()}) for _ in range(2)])})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch does where nothing matches
            parallelize_module(model, mesh, {"layers.*.attention": style})
        assert style.num_applied == 0
        parallelize_module(model, mesh, {"layers.*.inner": style})
        assert style.num_applied == 2

    run_ranks(2, on_rank)


ONE, LONG = spanwise.make_plan(SpanMask.causal(8), 1), spanwise.make_plan(SpanMask.causal(5000), 1)
ALL_PADDING = spanwise.Packing([0, 0], cu_seqlens_q_padded=[0, 8])
EMPTY = spanwise.make_plan(ALL_PADDING.mask(), 1, packing=ALL_PADDING)
REFUSED = [
    (lambda: reports(TwoLayers, packed_plan(CROSS, 2, "ring"), inputs=[torch.randn(1, 16, 8)]), "16 .* and 24"),
    (lambda: spanwise.verify(attend, EMPTY, None), "all of it is padding"),
    (lambda: spanwise.verify(attend, PLAN.local, None), "Plan"),
    (lambda: reports(lambda mesh: attend, num_probes=0), "num_probes"),
    (lambda: spanwise.verify(lambda x, plan: x, LONG, None, inputs=[torch.zeros(1, 5000, 1)]), "4096, got 5000"),
    (lambda: spanwise.verify(lambda x, plan: {"out": x}, ONE, None, inputs=[torch.zeros(1, 8, 4)]), "got a dict"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_cannot_be_verified_is_refused(number: int) -> None:
    call, message = REFUSED[number]
    with pytest.raises(ValueError, match=message):
        call()


# ---------------------------------------------------------------- parameters sharded by FSDP2 or tensor parallelism

SHARDED = spanwise.make_plan(SpanMask.documents([0, 1, 10, 24]), 2, block_size=4)


class Layer(nn.Module):
    """An attention layer of 2 heads; `forgets` is the share of a gradient that is lost."""

    def __init__(self, forgets: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.forgets = forgets
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, plan: spanwise.RankPlan) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, 4)).permute(3, 0, 2, 1, 4)
        if plan.num_ranks > 1:
            heads = heads * (1 - self.forgets) + heads.detach() * self.forgets
        return x + self.out(attend(*heads, plan).transpose(1, 2).flatten(2))


def sharded(rank: int, mesh: DeviceMesh, axes: tuple[str, ...]) -> list[tuple[bool, dict[str, float]]]:
    """Of a right layer and of one that forgets a tenth."""
    found = []
    for forgets in (0.0, 0.1):
        model: Any = Layer(forgets)
        if "tp" in axes:  # the last dim holds all heads, as the layer unflattens it
            columns, rows = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
            model = parallelize_module(model, mesh["tp"], {"qkv": columns, "out": rows})
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
        assert 0.01 < wrong["dparameters"] < 0.2, wrong
