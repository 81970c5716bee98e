"""ContextParallel as a parallelize_module plan, on threaded ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import flex_attention

import spanwise
from spanwise import ContextParallel, SpanMask
from tests.oracle import make_problem, relative_error
from tests.ranks.harness import run_ranks

LENGTH = 37
MASK = SpanMask.documents([0, 1, 20, LENGTH])
PLAN = spanwise.make_plan(MASK, 2, balancer="lpt", block_size=4)
CAUSAL = spanwise.make_plan(SpanMask.causal(LENGTH), 2, block_size=4)


class SDPA(nn.Module):
    def forward(self, q, k, v, attn_mask=None, *, is_causal=False, enable_gqa=True, dropout_p=0.0, **_):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa)


class AlwaysCausal(nn.Module):
    def forward(self, query, key, value, is_causal=True):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


class Scaled(nn.Module):
    def forward(self, q, k, v, *, attn_mask=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, scale=0.5)


class Flex(nn.Module):
    def forward(self, q, k, v, block_mask=None, *, score_mod=None):
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)


class TokensFirst(nn.Module):
    def forward(self, q, k, v, *, attn_mask=None):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask, enable_gqa=True).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def run(inner: type[nn.Module], style: dict, call, plan=PLAN, heads=(4, 2), dim=2):
    """Apply the style to ``{"layers.*.inner"}`` and make one call with gradients; (out, dq, dk, dv) of every rank."""
    axes = (plan.num_groups, plan.inner) if 1 < plan.inner < plan.num_ranks else None
    problem = make_problem(plan.masks.get(style.get("mask_name"), plan.mask()).dense(), heads=heads)

    def on_rank(rank: int, mesh: object):
        model = nn.ModuleDict({"layers": nn.ModuleList([Layer(inner())])})
        mesh = mesh["cp"] if axes is None else mesh["outer", "inner"]
        parallelize_module(model, mesh, {"layers.*.inner": ContextParallel(**style)})
        leaves = [spanwise.shard(plan, mesh, x, dim=2).requires_grad_() for x in problem[:3]]
        tensors = [x.transpose(1, 2) for x in leaves] if dim == 1 else leaves
        out = call(model["layers"][0], tensors, plan, mesh)
        out = out.transpose(1, 2) if dim == 1 else out
        out.backward(spanwise.shard(plan, mesh, problem.grad_out, dim=2))
        return [out.detach(), *(x.grad for x in leaves)]

    if axes is None:
        return problem, run_ranks(plan.num_ranks, on_rank)
    # Beside another axis, as beside data parallelism.
    shape, names = (1, plan.num_groups, plan.inner), ("dp", "outer", "inner")
    return problem, run_ranks(plan.num_ranks, on_rank, mesh_shape=shape, mesh_dim_names=names)


def check(problem, results, plan=PLAN) -> None:
    for rank, got in enumerate(results):
        for x, whole in zip(got, (problem.out, problem.dq, problem.dk, problem.dv), strict=True):
            assert relative_error(x, plan.shard(whole, rank, dim=2)) <= 1e-10


@pytest.mark.parametrize(
    "call",
    [
        lambda layer, t, plan, mesh: layer(*t, plan),
        lambda layer, t, plan, mesh: layer(*t, attn_mask=plan),
        lambda layer, t, plan, mesh: layer(q=t[0], k=t[1], v=t[2], attn_mask=plan.local(mesh)),
        lambda layer, t, plan, mesh: layer(*t, plan, is_causal=False, dropout_p=0.0),
    ],
    ids=["positional", "keyword", "all keywords, RankPlan", "defaults spelled out"],
)
def test_sdpa_module(call) -> None:
    check(*run(SDPA, {"attention_type": "sdpa"}, call))


class Varlen(nn.Module):
    """As `torch.nn.attention.varlen.varlen_attn`, which is for a GPU, sequence by sequence."""

    window = (-1, 0)

    def forward(self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=None):
        assert torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k == cu_seq_q.diff().max()
        parts = [[x.transpose(0, 1) for x in y.tensor_split(cu_seq_q[1:-1].tolist())] for y in (query, key, value)]
        causal = (window_size or self.window) == (-1, 0)
        out = [
            F.scaled_dot_product_attention(*qkv, is_causal=causal, scale=scale, enable_gqa=True)
            for qkv in zip(*parts, strict=True)
        ]
        return torch.cat(out, 1).transpose(0, 1)


class OffsetsAlone(Varlen):
    def forward(self, query, key, value, cu_seq_q, max_q):
        return super().forward(query, key, value, cu_seq_q, cu_seq_q, max_q, max_q)


class Bidirectional(OffsetsAlone):
    window = (-1, -1)


@pytest.mark.parametrize(
    ("module", "call"),
    [
        (Varlen, lambda layer, t, plan, mesh: layer(*t, plan, plan, 20, 20)),
        (Varlen, lambda layer, t, plan, mesh: layer(*t, cu_seq_q=plan, cu_seq_k=None, max_q=0, max_k=0, scale=None)),
        (OffsetsAlone, lambda layer, t, plan, mesh: layer(*t, plan.local(mesh), 20)),
    ],
    ids=["both offsets", "keywords", "RankPlan"],
)
def test_varlen_module(module, call) -> None:
    def packed(layer, tensors, plan, mesh):
        out = call(layer, [x.squeeze(0).transpose(0, 1) for x in tensors], plan, mesh)
        return out.transpose(0, 1).unsqueeze(0)

    check(*run(module, {"attention_type": "varlen"}, packed))


def test_what_a_varlen_module_is_refused() -> None:
    def refused(module, message, *args, **kwargs):
        def on_rank(rank: int, mesh: object) -> None:
            inner = module()
            parallelize_module(inner, mesh["cp"], ContextParallel(attention_type="varlen"))
            x = torch.zeros(CAUSAL.layout.num_tokens(rank), 2, 8)
            inner(x, x, x, *args, **kwargs)

        with pytest.raises(ValueError, match=message):
            run_ranks(2, on_rank)

    offsets = torch.tensor([0, LENGTH])
    refused(Bidirectional, "on a causal probe of two sequences it differs")
    refused(Varlen, "the mask must be a Plan, got a Tensor.*pass cu_seq_q=plan", offsets, None, 37, 37)
    refused(Varlen, "two masks; cu_seq_k is the second", CAUSAL, offsets, 37, 37)
    refused(Varlen, r"window_size=\(-1, 0\) is not supported", CAUSAL, CAUSAL, 37, 37, window_size=(-1, 0))


def alibi(score, b, h, q_idx, kv_idx):
    return score + 0.1 * (kv_idx - q_idx)


def flex_steps(rank: int, mesh: object, problem, score_mod):
    """A process of its own: flex_attention compiles for the probe, which other threads would notice."""
    module = Flex()
    parallelize_module(module, mesh["cp"], ContextParallel(attention_type="flex"))
    leaves = [spanwise.shard(PLAN, mesh, x, dim=2).requires_grad_() for x in problem[:3]]
    out = module(*leaves, block_mask=PLAN, score_mod=score_mod)
    assert torch.equal(module(*leaves, PLAN, score_mod=score_mod), out)
    assert torch.equal(module(q=leaves[0], k=leaves[1], v=leaves[2], block_mask=PLAN, score_mod=score_mod), out)
    out.backward(spanwise.shard(PLAN, mesh, problem.grad_out, dim=2))
    return [out.detach(), *(x.grad for x in leaves)]


def test_flex_module_on_cpu_with_gradients(gloo_pool) -> None:
    """PyTorch's flex_attention has no CPU backward; the style runs the sdpa kernel there."""
    problem = make_problem(MASK.dense())
    check(problem, gloo_pool.run(2, flex_steps, problem, None))


def test_score_mod_of_the_call_sees_global_positions(gloo_pool) -> None:
    problem = make_problem(MASK.dense())
    q, k, v = (x.repeat_interleave(4 // x.shape[1], 1) for x in problem[:3])
    i = torch.arange(LENGTH)
    scores = q @ k.transpose(-1, -2) / math.sqrt(8) + 0.1 * (i[None] - i[:, None])
    expected = scores.masked_fill(~torch.from_numpy(MASK.dense()), -math.inf).softmax(-1) @ v
    for rank, got in enumerate(gloo_pool.run(2, flex_steps, problem, alibi)):
        assert relative_error(got[0], PLAN.shard(expected, rank, dim=2)) <= 1e-10


def test_plan_of_the_style_serves_is_causal() -> None:
    style = {"attention_type": "sdpa", "plan": CAUSAL}
    check(*run(AlwaysCausal, style, lambda layer, t, plan, mesh: layer(*t), CAUSAL, heads=(4, 4)), CAUSAL)


def test_sequence_in_dim_1() -> None:
    style = {"attention_type": "sdpa", "seq_dim": 1}
    check(*run(TokensFirst, style, lambda layer, t, plan, mesh: layer(*t, attn_mask=plan), dim=1))


@pytest.mark.parametrize(("num_ranks", "exchange"), [(2, "ring"), (4, "ulysses"), ((2, 2), "ring"), ((2, 2), "needed")])
@pytest.mark.parametrize("dim", [1, 2])
def test_exchanges_and_meshes(num_ranks, exchange: str, dim: int) -> None:
    plan = spanwise.make_plan(MASK, num_ranks, balancer="lpt", exchange=exchange, block_size=4)
    style = {"attention_type": "sdpa", "seq_dim": dim}
    inner = SDPA if dim == 2 else TokensFirst
    check(*run(inner, style, lambda layer, t, plan, mesh: layer(*t, attn_mask=plan), plan, dim=dim), plan)


@pytest.mark.parametrize(("num_ranks", "exchange"), [(2, "ring"), ((2, 2), "needed")])
def test_a_packing_with_padding(num_ranks, exchange: str) -> None:
    packing = spanwise.Packing([0, 5, 5, 12, 13], cu_seqlens_q_padded=[0, 8, 16, 32, 40])
    plan = spanwise.make_plan(packing.mask(), num_ranks, balancer="dual_chunk", packing=packing, exchange=exchange)
    style = {"attention_type": "sdpa"}
    check(*run(SDPA, style, lambda layer, t, plan, mesh: layer(*t, plan), plan), plan)


@pytest.mark.parametrize(
    ("num_ranks", "shape", "names", "message"),
    [
        ((2, 2), (4,), ("cp",), r"a 2-D cp mesh of shape \(2, 2\), got \(4,\)"),
        (4, (2, 2), ("outer", "inner"), r"needs a 1-D mesh, got axes \('outer', 'inner'\).*_flatten"),
        ((4, 2), (2, 4), ("outer", "inner"), r"a 2-D cp mesh of shape \(4, 2\), got \(2, 4\)"),
    ],
)
def test_a_mesh_that_the_plan_does_not_fit(num_ranks, shape, names, message: str) -> None:
    plan = spanwise.make_plan(MASK, num_ranks, block_size=4, exchange="ring")

    def on_rank(rank: int, mesh: object) -> None:
        module = SDPA()
        parallelize_module(module, mesh, ContextParallel(attention_type="sdpa"))
        q = torch.zeros(1, 4, plan.layout.num_tokens(rank), 8)
        with pytest.raises(ValueError, match=message):
            module(q, q, q, plan)

    run_ranks(plan.num_ranks, on_rank, mesh_shape=shape, mesh_dim_names=names)


def test_packed_tensors_are_refused_with_what_takes_them() -> None:
    def call(layer, t, plan, mesh):
        return layer(*(x[0].transpose(0, 1) for x in t), attn_mask=plan)

    for dim in (1, 2):
        with pytest.raises(ValueError, match=r"\(.*, 4, 8\), \(.*, 2, 8\).*there are attention_type='varlen' and"):
            run(SDPA if dim == 2 else TokensFirst, {"attention_type": "sdpa", "seq_dim": dim}, call)


def test_named_mask() -> None:
    plan = spanwise.make_plan({"default": MASK, "full": SpanMask.causal(LENGTH)}, 2, block_size=4)
    style = {"attention_type": "sdpa", "mask_name": "full"}
    check(*run(SDPA, style, lambda layer, t, plan, mesh: layer(*t, plan), plan), plan)


def test_scale_inside_the_module_must_be_declared() -> None:
    def call(layer, t, plan, mesh):
        return layer(*t, attn_mask=plan)

    with pytest.raises(ValueError, match="computes something other than softmax"):
        run(Scaled, {"attention_type": "sdpa"}, call, heads=(4, 4))
    problem, results = run(Scaled, {"attention_type": "sdpa", "scale": 0.5}, call, heads=(4, 4))
    expected = F.scaled_dot_product_attention(*problem[:3], torch.from_numpy(MASK.dense())[0], scale=0.5)
    for rank, got in enumerate(results):
        assert relative_error(got[0], PLAN.shard(expected, rank, dim=2)) <= 1e-10


@pytest.mark.parametrize(
    ("style", "call", "message"),
    [
        ({}, lambda layer, t, plan, mesh: layer(*t), "a call without a mask does not say"),
        ({}, lambda layer, t, plan, mesh: layer(*t, is_causal=True), "is_causal=True does not say"),
        (
            {},
            lambda layer, t, plan, mesh: layer(*t, torch.ones(19, 37, dtype=torch.bool)),
            "must be a Plan, got a Tensor",
        ),
        ({}, lambda layer, t, plan, mesh: layer(*t, MASK.block_mask("cpu")), "must be a Plan, got a BlockMask"),
        ({"plan": PLAN}, lambda layer, t, plan, mesh: layer(*t, is_causal=True), "only with a plan of the causal mask"),
        ({}, lambda layer, t, plan, mesh: layer(*t, plan, dropout_p=0.1), "dropout_p=0.1 is not supported"),
        ({}, lambda layer, t, plan, mesh: layer(*t, plan, window=3), "does not know the argument window, 3, of"),
        ({}, lambda layer, t, plan, mesh: layer(*t[:2], attn_mask=plan), r"called without \['v'\]"),
        ({}, lambda layer, t, plan, mesh: layer(*t, plan, block_mask=plan), "given two masks"),
        ({"kernel": "flash"}, lambda layer, t, plan, mesh: layer(*t, plan), "unknown kernel 'flash'"),
        ({"mask_name": "window"}, lambda layer, t, plan, mesh: layer(*t, plan), "no mask named 'window'"),
    ],
)
def test_calls_that_cannot_be_right_are_refused(style: dict, call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(SDPA, {"attention_type": "sdpa"} | style, call)


class NotAttention(nn.Module):
    def forward(self, q, k, v, attn_mask=None):
        return q.sum()


class DropoutInTraining(nn.Module):
    """Called in eval mode here: the dropout of training shows only if the probe runs in training mode as well."""

    def forward(self, q, k, v, attn_mask=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, 0.5 if self.training else 0.0)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.ones(()))

    def forward(self, q, k, v, attn_mask=None):
        return self.gate * F.scaled_dot_product_attention(q, k, v, attn_mask)


class NoMask(nn.Module):
    def forward(self, q, k, v):
        return q


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (NotAttention, "not an attention call"),
        (NoMask, "and neither a mask"),
        (nn.Identity, "could not run"),
        (DropoutInTraining, "computes something other"),
        (Gated, r"has parameters, \['gate'\]"),
    ],
)
def test_modules_that_are_not_attention(inner: type, message: str) -> None:
    def on_rank(rank: int, mesh: object) -> None:
        module = inner().eval()
        parallelize_module(module, mesh["cp"], ContextParallel(attention_type="sdpa"))

    with pytest.raises(ValueError, match=message):
        run_ranks(1, on_rank)


def test_bad_styles() -> None:
    with pytest.raises(ValueError, match="unknown attention_type"):
        ContextParallel(attention_type="flash")
    with pytest.raises(ValueError, match="seq_dim must be"):
        ContextParallel(seq_dim=3)
    with pytest.raises(ValueError, match="plan must be a Plan"):
        ContextParallel(plan=MASK)
    with pytest.raises(ValueError, match="seq_dim=1 is not for attention_type 'varlen'"):
        ContextParallel(attention_type="varlen", seq_dim=1)
