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

import spanwise
from spanwise import SpanMask
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks

LENGTH = 40
MASK = SpanMask.documents([0, 1, 18, LENGTH])
PLAN = spanwise.make_plan(MASK, 3, balancer="ptrr", block_size=4, num_q_heads=4, num_kv_heads=2, head_dim=8)


def reports(fn, plan=PLAN, **options):
    mesh = {}
    if 1 < plan.inner < plan.num_ranks:
        mesh = {"mesh_shape": (plan.num_groups, plan.inner), "mesh_dim_names": ("outer", "inner")}
    return run_ranks(plan.num_ranks, lambda rank, mesh: spanwise.verify(fn(mesh), plan, mesh, **options), **mesh)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_is_verified(dtype: torch.dtype) -> None:
    for report in reports(lambda mesh: spanwise.context_parallel_attention, dtype=dtype):
        assert report.ok and set(report.errors) == {"out", "dq", "dk", "dv"} and len(report.probed) == 8
        assert 0 < report.errors["dq"] <= report.tolerance
        report.raise_if_failed()


def test_rounding_of_one_pass_is_no_leak() -> None:
    def fn(mesh):
        calls = itertools.count()

        def attend(q, k, v, plan):
            out = spanwise.context_parallel_attention(q, k, v, plan, mesh)
            return out * (1 + 4e-7 * (next(calls) == 4))  # of a probe

        return attend

    assert all(report.ok for report in reports(fn))


def test_a_leak_is_found_and_named() -> None:
    """Runs with the causal mask in place of the documents': attends across documents."""
    leaky = spanwise.make_plan(SpanMask.causal(LENGTH), 3, balancer=_Same(), block_size=4)
    for report in reports(
        lambda mesh: lambda q, k, v, plan: spanwise.context_parallel_attention(q, k, v, _fit(leaky, plan, mesh), mesh)
    ):
        assert not report.ok and report.leaks and not report.blind
        assert all(not MASK.dense()[0, row, token] for row, token in report.leaks)
        assert "leak: row" in str(report)
        with pytest.raises(RuntimeError, match="FAILED"):
            report.raise_if_failed()


def test_blind_rows_are_found() -> None:
    """Attends to the rank's own keys only, what a plain attention call does on a shard."""

    def local_only(q, k, v, plan):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    for report in reports(lambda mesh: local_only):
        assert not report.ok and report.blind


def test_wrong_gradients_are_found() -> None:
    def detached(mesh):
        return lambda q, k, v, plan: spanwise.context_parallel_attention(q, k.detach(), v, plan, mesh)

    for report in reports(detached):
        assert not report.ok and report.errors["out"] <= report.tolerance and report.errors["dk"] > 0.5
        assert not report.leaks and not report.blind


class _Same(spanwise.layouts.balancers.PTRR):
    """The layout that PTRR gives the documents, whatever the mask."""

    def assign(self, problem, num_ranks):
        return super().assign(spanwise.LayoutProblem({"default": MASK}, block_size=4), num_ranks)


def _fit(plan, local, mesh):
    return plan.local(mesh)


class TwoLayers(nn.Module):
    def __init__(self, mesh: object) -> None:
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

    def attend(self, q, k, v, plan):
        return spanwise.context_parallel_attention(q, k, v, plan, self.mesh)


def test_a_model_is_verified_against_itself() -> None:
    """A window reaches further over two layers; that is no leak."""
    plan = spanwise.make_plan(SpanMask.sliding_window(LENGTH, 3), 3, block_size=4)
    x = torch.randn(1, LENGTH, 8)
    for report in reports(TwoLayers, plan, inputs=[x]):
        assert report.ok and set(report.errors) == {"out", "dinputs[0]", "dparameters"}


class Named(TwoLayers):
    """A model as Hugging Face calls it: inputs by name, the plan under a name of its own, an object with logits."""

    def __init__(self, mesh: object) -> None:
        super().__init__(mesh)
        self.embed = nn.Embedding.from_pretrained(torch.randn(50, 8, generator=torch.Generator().manual_seed(2)))

    def forward(self, input_ids=None, position_ids=None, use_cache=True, **kwargs):  # type: ignore[override]
        assert use_cache is False
        plan = kwargs["spanwise_plan"]
        assert position_ids is None or torch.equal(position_ids, plan.positions.expand_as(position_ids))
        return types.SimpleNamespace(logits=super().forward(self.embed(input_ids), plan))


class NeverReached(Named):
    """Attends to the shard alone, as a model does whose attention no pattern matched."""

    def attend(self, q, k, v, plan):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


NAMED = {
    "input_ids": torch.arange(LENGTH)[None],
    "position_ids": torch.from_numpy(spanwise.Packing([0, 1, 18, LENGTH]).positions())[None],
    "use_cache": False,
}


def test_a_whole_model_is_verified_by_name() -> None:
    plan = spanwise.make_plan(MASK, 3, balancer="ptrr", block_size=4)
    for report in reports(Named, plan, inputs=NAMED, plan_name="spanwise_plan"):
        assert report.ok and set(report.errors) == {"out", "dparameters"}, str(report)


class TwoMasks(Named):
    def attend(self, q, k, v, plan):
        far = spanwise.context_parallel_attention(q, k, v, plan, mask_name="far")
        return far + spanwise.context_parallel_attention(q, k, v, plan, mask_name="near")


def test_a_model_uses_all_masks_of_its_plan() -> None:
    near = SpanMask.documents([0, 1, 18, LENGTH], window=(2, 0))
    plan = spanwise.make_plan({"far": MASK, "near": near}, 2, balancer="ptrr", block_size=4)
    for report in reports(TwoMasks, plan, inputs=NAMED, plan_name="spanwise_plan"):
        assert report.ok, str(report)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_model_that_never_reached_attention_is_an_error(num_ranks: int) -> None:
    plan = spanwise.make_plan(SpanMask.causal(LENGTH), num_ranks, balancer="head_tail")
    ids = {**NAMED, "position_ids": torch.arange(LENGTH)[None]}

    def on_rank(rank: int, mesh: object) -> None:
        given = None if num_ranks == 1 else mesh
        with pytest.raises(ValueError, match="the model never reached spanwise's attention .*num_applied counts"):
            spanwise.verify(NeverReached(given), plan, given, inputs=ids, plan_name="spanwise_plan")

    run_ranks(num_ranks, on_rank)


class Inner(nn.Module):
    def forward(self, q, k, v, attn_mask=None):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)


def test_a_style_counts_the_modules_it_was_applied_to() -> None:
    def on_rank(rank: int, mesh: object) -> None:
        style = spanwise.ContextParallel(attention_type="sdpa")
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"inner": Inner()}) for _ in range(2)])})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch does where nothing matches
            parallelize_module(model, mesh, {"layers.*.attention": style})
        assert style.num_applied == 0
        parallelize_module(model, mesh, {"layers.*.inner": style})
        assert style.num_applied == 2

    run_ranks(2, on_rank)


class ForgetsItsWeights(TwoLayers):
    """Gets no gradient for its weights where the sequence is cut."""

    def kept(self, weight: torch.Tensor, plan: spanwise.RankPlan) -> torch.Tensor:
        return weight if plan.num_ranks == 1 else weight.detach()


def test_missing_gradients_of_parameters_are_found_and_nothing_is_accumulated() -> None:
    plan = spanwise.make_plan(SpanMask.causal(LENGTH), 3, block_size=4)
    x = torch.randn(1, LENGTH, 8)

    def on_rank(rank: int, mesh: object) -> spanwise.VerifyReport:
        model = ForgetsItsWeights(mesh)
        report = spanwise.verify(model, plan, mesh, inputs=[x])
        assert all(p.grad is None for p in model.parameters())
        return report

    for report in run_ranks(3, on_rank):
        assert not report.ok and report.errors["dparameters"] > 0.5 and report.errors["dinputs[0]"] <= report.tolerance


@pytest.mark.parametrize(
    ("num_ranks", "exchange"),
    [(3, "ring"), (2, "ulysses"), (3, "ulysses"), ((2, 2), "ring"), ((2, 2), "needed"), ((3, 2), "all_gather")],
)
def test_every_exchange_is_verified(num_ranks, exchange: str) -> None:
    """Without a number of heads in the plan verify takes one that Ulysses can deal out."""
    plan = spanwise.make_plan(MASK, num_ranks, balancer="lpt", exchange=exchange, block_size=4)
    for report in reports(lambda mesh: spanwise.context_parallel_attention, plan):
        assert report.ok and set(report.errors) == {"out", "dq", "dk", "dv"}, str(report)
    if plan.inner > 2:
        return  # the model has two heads
    x = torch.randn(1, LENGTH, 8)
    for report in reports(TwoLayers, plan, inputs=[x]):
        assert report.ok and set(report.errors) == {"out", "dinputs[0]", "dparameters"}, str(report)


def test_a_leak_is_found_on_two_levels() -> None:
    """One group forgets the documents; every rank reports it."""
    plan = spanwise.make_plan(MASK, (2, 2), balancer="contiguous", exchange="ring", block_size=4)
    leaky = spanwise.make_plan(SpanMask.causal(LENGTH), (2, 2), balancer="contiguous", exchange="ring", block_size=4)

    def fn(mesh):
        return lambda q, k, v, given: spanwise.context_parallel_attention(q, k, v, leaky, mesh)

    for report in reports(fn, plan):
        assert report.leaks and not report.blind and "leak: row" in str(report)


PADDED = spanwise.Packing([0, 5, 5, 12, 13], cu_seqlens_q_padded=[0, 8, 16, 32, 40])
CROSS = spanwise.Packing(
    [0, 5, 9], cu_seqlens_q_padded=[0, 8, 16], cu_seqlens_kv=[0, 3, 14], cu_seqlens_kv_padded=[0, 8, 24]
)


def packed_plan(packing, num_ranks, exchange: str, **options) -> spanwise.Plan:
    mask = packing.mask(causal=packing is PADDED)
    return spanwise.make_plan(mask, num_ranks, balancer="dual_chunk", packing=packing, exchange=exchange, **options)


@pytest.mark.parametrize(("num_ranks", "exchange"), [(2, "ring"), (4, "ulysses"), ((2, 2), "needed")])
@pytest.mark.parametrize("packing", [PADDED, CROSS], ids=["padded", "cross"])
def test_packings_are_verified(packing, num_ranks, exchange: str) -> None:
    plan = packed_plan(packing, num_ranks, exchange)
    for report in reports(lambda mesh: spanwise.context_parallel_attention, plan, num_probes=40):
        assert report.ok and set(report.errors) == {"out", "dq", "dk", "dv"}, str(report)
        assert set(report.probed) <= set(packing.valid_kv.nonzero()[0]) and len(report.probed) == packing.valid_kv.sum()


def test_a_model_is_verified_under_a_packing() -> None:
    """The residual stream goes on in padding; only attention is zero there."""
    x = torch.randn(1, PADDED.q_len, 8)
    for report in reports(TwoLayers, packed_plan(PADDED, 2, "ring"), inputs=[x], num_probes=40):
        assert report.ok and len(report.probed) == 13, str(report)


def test_a_leak_out_of_padding_is_found() -> None:
    """Keys in padding that all rows read."""
    plan = packed_plan(PADDED, 2, "ring")
    everything = spanwise.make_plan(SpanMask.full(PADDED.q_len), 2, balancer=_DualChunk(), exchange="ring")

    def fn(mesh):
        return lambda q, k, v, given: spanwise.context_parallel_attention(q, k, v, everything, mesh)

    for report in reports(fn, plan):
        assert report.errors["out"] > 0.5 and report.leaks and not report.ok


class _DualChunk(spanwise.layouts.balancers.PTRR):
    """The layout of the padded packing."""

    def assign(self, problem, num_ranks):
        return PADDED.dual_chunk_layout(num_ranks)


ONE, LONG = spanwise.make_plan(SpanMask.causal(8), 1), spanwise.make_plan(SpanMask.causal(5000), 1)
ALL_PADDING = spanwise.Packing([0, 0], cu_seqlens_q_padded=[0, 8])
EMPTY = spanwise.make_plan(ALL_PADDING.mask(), 1, packing=ALL_PADDING)
ATTENTION, X = spanwise.context_parallel_attention, [torch.zeros(1, 8, 4)]
REFUSED = [
    (lambda: reports(TwoLayers, packed_plan(CROSS, 2, "ring"), inputs=[torch.randn(1, 16, 8)]), "16 .* and 24"),
    (lambda: spanwise.verify(ATTENTION, EMPTY, None), "all of it is padding"),
    (lambda: spanwise.verify(ATTENTION, PLAN.local, None), "Plan"),
    (lambda: reports(lambda mesh: ATTENTION, num_probes=0), "num_probes"),
    (lambda: spanwise.verify(lambda x, plan: x, LONG, None, inputs=[torch.zeros(1, 5000, 1)]), "4096, got 5000"),
    (lambda: spanwise.verify(lambda x, plan: {"out": x}, ONE, None, inputs=X), "got a dict"),
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
        return x + self.out(spanwise.context_parallel_attention(*heads, plan).transpose(1, 2).flatten(2))


def report_of(model: nn.Module, mesh: DeviceMesh) -> tuple[bool, dict[str, float]]:
    x = torch.randn(1, 24, 8, generator=torch.Generator().manual_seed(1))
    report = spanwise.verify(model, SHARDED, mesh, inputs=[x])
    assert all(p.grad is None for p in model.parameters())
    return report.ok, report.errors


def sharded(rank: int, mesh: DeviceMesh, forgets: float, axes: tuple[str, ...]) -> Any:
    model = Layer(forgets)
    fully_shard(model, mesh=mesh[axes])
    return report_of(model, mesh["cp"])


def parallel(rank: int, mesh: DeviceMesh, forgets: float) -> Any:
    columns = ColwiseParallel(output_layouts=Replicate())  # the last dim holds all heads, as the layer unflattens it
    plan = {"qkv": columns, "out": RowwiseParallel(input_layouts=Replicate())}
    return report_of(parallelize_module(Layer(forgets), mesh["tp"], plan), mesh["cp"])


def check(pool: GlooPool, ranks: int, run: Any, *args: Any, **mesh: Any) -> None:
    for forgets in (0.0, 0.1):
        for ok, errors in pool.run(ranks, run, forgets, *args, **mesh):
            assert ok is (forgets == 0.0) and set(errors) == {"out", "dinputs[0]", "dparameters"}, errors
            assert forgets == 0.0 or 0.01 < errors["dparameters"] < 0.2, errors


def test_fully_sharded(gloo_pool: GlooPool) -> None:
    check(gloo_pool, 2, sharded, ("cp",), mesh_dim_names=("cp",))
    axes: Any = dict(mesh_shape=(2, 2), mesh_dim_names=("dp", "cp"))
    check(gloo_pool, 4, sharded, ("dp", "cp"), **axes)


def test_tensor_parallel(gloo_pool: GlooPool) -> None:
    check(gloo_pool, 4, parallel, mesh_shape=(2, 2), mesh_dim_names=("cp", "tp"))
