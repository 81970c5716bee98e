"""verify must pass what is right and name what is wrong; every failure here is a bug planted in an attention call."""

from __future__ import annotations

import types
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import spanwise
from spanwise import SpanMask
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
            q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (x @ weight).chunk(3, -1))
            x = x + spanwise.context_parallel_attention(q, k, v, plan, self.mesh).transpose(1, 2).flatten(2)
        return x


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
        x = self.embed(input_ids)
        for weight in self.weights:
            q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (x @ weight).chunk(3, -1))
            x = x + self.attend(q, k, v, plan).transpose(1, 2).flatten(2)
        return types.SimpleNamespace(logits=x)

    def attend(self, q, k, v, plan):
        return spanwise.context_parallel_attention(q, k, v, plan)


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


def test_outputs_that_are_no_tensor_are_refused() -> None:
    plan = spanwise.make_plan(SpanMask.causal(8), 1)
    with pytest.raises(ValueError, match="verify compares one tensor: .* got a dict"):
        spanwise.verify(lambda x, plan: {"out": x}, plan, None, inputs=[torch.randn(1, 8, 4)])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()


class Inner(nn.Module):
    def forward(self, q, k, v, attn_mask=None):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)


def test_a_style_counts_the_modules_it_was_applied_to() -> None:
    def on_rank(rank: int, mesh: object) -> None:
        style = spanwise.ContextParallel(attention_type="sdpa")
        model = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()])})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch does where nothing matches
            parallelize_module(model, mesh, {"layers.*.attention": style})
        assert style.num_applied == 0
        parallelize_module(model, mesh, {"layers.*.inner": style})
        assert style.num_applied == 2

    run_ranks(2, on_rank)


class ForgetsItsWeights(TwoLayers):
    """Gets no gradient for its weights where the sequence is cut."""

    def forward(self, x: torch.Tensor, plan: spanwise.RankPlan) -> torch.Tensor:
        kept = [w if plan.num_ranks == 1 else w.detach() for w in self.weights]
        for weight in kept:
            q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (x @ weight).chunk(3, -1))
            x = x + spanwise.context_parallel_attention(q, k, v, plan, self.mesh).transpose(1, 2).flatten(2)
        return x


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


def test_what_cannot_be_verified_is_refused() -> None:
    with pytest.raises(ValueError, match="a plan of cross attention, 16 queries and 24 keys"):
        reports(TwoLayers, packed_plan(CROSS, 2, "ring"), inputs=[torch.randn(1, 16, 8)])
    padding = spanwise.Packing([0, 0], cu_seqlens_q_padded=[0, 8])
    with pytest.raises(ValueError, match="all of it is padding"):
        plan = spanwise.make_plan(padding.mask(), 1, packing=padding)
        spanwise.verify(spanwise.context_parallel_attention, plan, None)
    with pytest.raises(ValueError, match="needs the Plan"):
        spanwise.verify(spanwise.context_parallel_attention, PLAN.local, None)
    with pytest.raises(ValueError, match="num_probes must be at least 1"):
        reports(lambda mesh: spanwise.context_parallel_attention, num_probes=0)
    long = spanwise.make_plan(SpanMask.causal(5000), 1)
    with pytest.raises(ValueError, match="seq_len <= 4096, got 5000"):
        spanwise.verify(lambda x, plan: x, long, None, inputs=[torch.zeros(1, 5000, 1)])
