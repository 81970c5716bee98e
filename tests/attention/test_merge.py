"""Partial results over chunks of the keys: merged outputs, gradients, and the memory kept for the backward."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spanwise
from spanwise._torch import storage_id
from spanwise.attention.kernels.base import AttentionOptions, Chunk
from spanwise.attention.kernels.merge import Merging, merge
from spanwise.attention.kernels.table import KERNELS
from tests.attention import test_varlen  # noqa: F401  # registers a stand-in for flash on the CPU
from tests.attention.test_kernels import MASKS, Spans, assert_exact, make_case, oracle, relative_error, run
from tests.kernel_calls import CUTS, chunks_of, in_parts, reference, sdpa, sdpa_part
from tests.ranks.harness import run_ranks


def mask_of(mask: Spans, first: int, stop: int) -> Spans:
    return tuple(x.clamp(first, stop) - first for x in mask)


def test_only_the_lse() -> None:
    case = make_case(MASKS["random"])
    case = case._replace(grad_out=torch.zeros_like(case.grad_out))
    q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))
    _, lse = in_parts(q, k, v, *case.mask, scale=case.scale, softcap=None)
    got, want = torch.autograd.grad(lse, (q, k, v), case.grad_lse), oracle(case)
    for name, grad in zip(("dq", "dk"), got, strict=False):
        assert relative_error(grad, want[name]) <= 1e-10
    assert (got[2] == 0).all()


@pytest.mark.parametrize("wanted", ["q", "kv", "one chunk"])
def test_some_inputs_without_gradient(wanted: str) -> None:
    case = make_case(MASKS["documents"])
    want, mask = oracle(case), case.mask
    q = case.q.clone().requires_grad_(wanted == "q")
    merging, shared, leaves = Merging(q.dtype), KERNELS["sdpa"].queries(q), []
    for n, (i, j) in enumerate(chunks_of(case.k.shape[2])):
        needs = wanted == "kv" or (wanted == "one chunk" and n == 3)
        k, v = (x[:, :, i:j].clone().requires_grad_(needs) for x in (case.k, case.v))
        leaves += [(k, want["dk"][:, :, i:j]), (v, want["dv"][:, :, i:j])] if needs else []
        merging.add(sdpa_part(shared, k, v, *mask_of(mask, i, j), scale=case.scale))
    leaves += [(q, want["dq"])] if q.requires_grad else []
    grads = torch.autograd.grad(merging.result(), [x for x, _ in leaves], (case.grad_out, case.grad_lse))
    for grad, (_, expected) in zip(grads, leaves, strict=True):
        assert relative_error(grad, expected) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dq_of_many_parts_is_rounded_once(dtype: torch.dtype) -> None:
    """8 parts: gradients as near to the truth as those of one call over all keys."""
    case = make_case(MASKS["causal"], kv_heads=4, dim=32, v_dim=32, dtype=dtype)
    eighths = tuple(i / 8 for i in range(9))
    got, whole, want = run(functools.partial(in_parts, cuts=eighths), case), run(sdpa, case), oracle(case)

    def error(x: torch.Tensor, name: str) -> float:
        return (x.double() - want[name]).square().mean().sqrt().item()

    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(got[name].double(), want[name], atol=2.5e-2, rtol=2.5e-2)
        assert error(got[name], name) <= 1.25 * error(whole[name], name), name
    # Summed in the dtype of q it would be worse than this bound.
    q = case.q.detach().requires_grad_()
    parts = [
        sdpa_part(
            KERNELS["sdpa"].queries(q),
            case.k[:, :, i:j],
            case.v[:, :, i:j],
            *mask_of(case.mask, i, j),
            scale=case.scale,
        )
        for i, j in chunks_of(case.k.shape[2], eighths)
    ]
    (apart,) = torch.autograd.grad(merge(parts), q, (case.grad_out, case.grad_lse.float()))
    assert error(apart, "dq") > 1.25 * error(whole["dq"], "dq")


# --- memory ---------------------------------------------------------------------------------------------------------


def saved_bytes(num_parts: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the storages that are kept for the backward besides k, v and spans, and bytes of one output."""
    case = make_case(MASKS["documents"], dtype=dtype, dim=32, v_dim=32)
    q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))
    inputs = [(x[:, :, i:j].contiguous(), mask_of(case.mask, i, j)) for x in (k, v)
              for i, j in chunks_of(case.k.shape[2], tuple(n / num_parts for n in range(num_parts + 1)))]  # fmt: skip
    known = {x.untyped_storage().data_ptr() for x, mask in inputs for x in (x, *mask)}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return x

    merging, shared = Merging(q.dtype), KERNELS["sdpa"].queries(q)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        for (k_chunk, mask), (v_chunk, _) in zip(inputs[:num_parts], inputs[num_parts:], strict=True):
            merging.add(sdpa_part(shared, k_chunk, v_chunk, *mask, scale=case.scale))
        out, lse = merging.result()
    assert out.requires_grad and lse.requires_grad
    return sum(storage.nbytes() for storage in kept.values()), out.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_kept_of_a_part_but_its_keys(dtype: torch.dtype) -> None:
    """q, out and lse, whether there is one part or eight."""
    one, out = saved_bytes(1, dtype)
    eight, _ = saved_bytes(8, dtype)
    assert eight == one < 3 * out


def test_two_outputs_live_at_a_time() -> None:
    import weakref

    case = make_case(MASKS["documents"], dtype=torch.float32)
    q = case.q.requires_grad_()
    merging, shared, parts = Merging(q.dtype), KERNELS["sdpa"].queries(q), []
    for i, j in chunks_of(case.k.shape[2], tuple(n / 8 for n in range(9))):
        part = sdpa_part(shared, case.k[:, :, i:j], case.v[:, :, i:j], *mask_of(case.mask, i, j), scale=case.scale)
        parts.append(weakref.ref(part[0].untyped_storage()))
        merging.add(part)
        del part
        assert sum(ref() is not None for ref in parts) <= 1
    assert merging.result()[0].requires_grad


# --- other parts, compiled code, checkpoints ------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [reference, sdpa])
def test_pairs_keep_the_gradients_of_autograd(kernel: Callable) -> None:
    case = make_case(MASKS["some_rows_empty"])

    def attend(q, k, v, start, end, **options):
        return merge(
            [
                kernel(q, k[:, :, i:j], v[:, :, i:j], *mask_of((start, end), i, j), **options)
                for i, j in chunks_of(case.k.shape[2])
            ]
        )

    case = case._replace(grad_lse=case.grad_lse.masked_fill(oracle(case)["lse"] == -math.inf, 0))
    assert_exact(run(attend, case), oracle(case))


@pytest.mark.parametrize(
    ("backend", "dtype", "cuts"),
    [
        ("aot_eager", torch.float32, CUTS),
        ("aot_eager", torch.bfloat16, CUTS),
        ("aot_eager", torch.bfloat16, (0, 1)),
        pytest.param("inductor", torch.bfloat16, CUTS, marks=pytest.mark.slow),
        pytest.param("inductor", torch.float32, (0, 1), marks=pytest.mark.slow),
    ],
)
@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch's own, on import
def test_compiles_fullgraph(backend: str, dtype: torch.dtype, cuts: tuple[float, ...]) -> None:
    case = make_case(MASKS["window_and_globals"], dtype=dtype)
    torch._dynamo.reset()
    attend = functools.partial(in_parts, cuts=cuts)
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    got, want = run(compiled, case), run(attend, case)
    for name, value in want.items():
        assert relative_error(got[name], value.double()) <= (1e-6 if dtype == torch.float32 else 1e-2), name


@pytest.mark.parametrize("selective", [False, True])
def test_checkpointing_sees_the_operator(selective: bool) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    calls = []

    def policy(ctx, op, *args, **kwargs):
        if op is torch.ops.spanwise.sdpa.default:
            calls.append(ctx.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    case = make_case(MASKS["documents"])
    context = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)} if selective else {}

    def attend(*args, **options):
        return checkpoint(in_parts, *args, use_reentrant=False, **context, **options)

    assert_exact(run(attend, case), oracle(case))
    assert calls.count(False) == (len(CUTS) - 1 if selective else 0)


def test_backward_twice_and_no_second_derivatives() -> None:
    case = make_case(MASKS["random"])
    q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))
    results = in_parts(q, k, v, *case.mask, scale=case.scale, softcap=None)
    cotangents = (case.grad_out, case.grad_lse)
    first = torch.autograd.grad(results, (q, k, v), cotangents, retain_graph=True)
    second = torch.autograd.grad(results, (q, k, v), [2 * x for x in cotangents], retain_graph=True)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(2 * a, b)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(results[0].sum(), q, create_graph=True)[0].sum().backward()


def test_a_change_in_place_is_noticed() -> None:
    case = make_case(MASKS["random"])
    q = case.q.requires_grad_() * 1
    out, _ = in_parts(q, case.k, case.v, *case.mask, scale=case.scale, softcap=None)
    q.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_out_is_rounded_once(kernel: str, dtype: torch.dtype) -> None:
    """Parts rounded to the dtype of q would add to the error of the union."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 96, 16, generator=generator).to(dtype) for _ in range(3))
    exact = torch.softmax(q.double() @ k.double().mT * 0.25, -1) @ v.double()
    chosen, merging = KERNELS[kernel], Merging(q.dtype)
    shared, options, positions = chosen.queries(q), AttentionOptions(scale=0.25), torch.arange(96)[None]
    for i in range(0, 96, 24):
        start = torch.zeros(1, 2, 96, dtype=torch.int32)
        end = torch.stack([start[:, 0] + 24, start[:, 0]], 1)
        chunk = Chunk(start, end, torch.arange(i, i + 24, dtype=torch.int32)[None])
        part = chosen.attend_part(shared, k[:, :, i : i + 24], v[:, :, i : i + 24], chunk, positions, options)
        merging.add(part)
    out, _ = merging.result()
    assert out.dtype == dtype
    assert (out - exact).norm() <= 1.02 * (exact.to(dtype) - exact).norm()


def kept_outputs(plan: spanwise.Plan, kernel: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Bytes that each rank's autograd keeps in a layer, q, k and v included, in units of its output."""
    counted = {}

    def on_rank(rank: int, mesh: Any) -> None:
        kept: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            if x.is_floating_point():
                kept[storage_id(x)] = x.untyped_storage().nbytes()
            return x

        tensors = [torch.zeros(1, 2, plan.seq_len, 64, dtype=torch.bfloat16) for _ in range(3)]
        leaves = [spanwise.shard(plan, mesh, x, dim=2).requires_grad_() for x in tensors]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = spanwise.context_parallel_attention(*leaves, plan, mesh, kernel=kernel)
        counted[rank] = (sum(kept.values()) / out.untyped_storage().nbytes(), out)

    monkeypatch.setattr(KERNELS["varlen"], "check_device", lambda *_: None, raising=False)
    run_ranks(plan.num_ranks, on_rank)
    return [counted[rank][0] for rank in range(plan.num_ranks)]


@pytest.mark.parametrize("kernel", ["sdpa", "varlen"])
@pytest.mark.parametrize(
    "options",
    [
        {"exchange": "all_gather"},
        {"exchange": "ring"},
        {"exchange": "needed", "stages": 1},
        {"exchange": "needed", "stages": 4},
    ],
    ids=lambda x: "-".join(map(str, x.values())),
)
def test_a_layer_keeps_q_the_keys_it_reads_and_one_output(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], kernel: str
) -> None:
    """At most 6.5 outputs on two ranks, in units of which K and V of both are 4, q, the output and the lse 2.1."""
    mask = spanwise.SpanMask.documents([0, 256, 512])
    plan = spanwise.make_plan(mask, 2, balancer="head_tail", block_size=32, keep_kv=True, **options)
    assert max(kept_outputs(plan, kernel, monkeypatch)) <= 6.5
