"""Partial results over chunks of the keys: gradients, rounding, compiled code and checkpoints.

`test_kernels` compares values and gradients of all kernels in chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from spanwise.attention.kernels.base import AttentionOptions
from spanwise.attention.kernels.merge import Merging
from spanwise.attention.kernels.table import KERNELS
from spanwise.masks.span_mask import SpanMask
from tests.attention.stand_ins import PARTS, attend, chunk
from tests.attention.test_kernels import MASKS, SHAPES, check, draw
from tests.oracle import Inputs, expected, relative_error

OPTIONS, SDPA = AttentionOptions(0.3), KERNELS["sdpa"]
EXACT: dict[str, Any] = {"scale": 0.3, "softcap": None}
EIGHTHS = tuple(i / 8 for i in range(9))


def cut(x: Inputs, mask: SpanMask, cuts: Sequence[float] = PARTS) -> list[tuple[slice, Any]]:
    """Keys of each chunk, and the chunk."""
    found = []
    for i, j in itertools.pairwise(round(at * mask.kv_len) for at in cuts):
        here = SpanMask(mask.start.clip(i, j) - i, mask.end.clip(i, j) - i, j - i)
        kv_pos = torch.arange(i, j, dtype=torch.int32)[None]
        found.append((slice(i, j), chunk(SDPA, x.k[:, :, i:j], x.v[:, :, i:j], here, kv_pos, mask.num_spans)[2]))
    return found


@pytest.mark.parametrize("wanted", ["q", "kv", "one chunk"])
def test_some_inputs_without_gradient(wanted: str) -> None:
    mask = MASKS["documents"]
    inputs = draw(mask, SHAPES[0], torch.float64)
    want = expected(inputs, torch.from_numpy(mask.dense()), {"bias": None} | EXACT).values
    q = inputs.q.clone().requires_grad_(wanted == "q")
    merging, queries, leaves = Merging(q.dtype), SDPA.queries(q), []
    for n, (keys, part) in enumerate(cut(inputs, mask)):
        needs = wanted == "kv" or (wanted == "one chunk" and n == 3)
        k, v = (x[:, :, keys].clone().requires_grad_(needs) for x in (inputs.k, inputs.v))
        leaves += [(k, want["dk"][:, :, keys]), (v, want["dv"][:, :, keys])] if needs else []
        merging.add(SDPA.attend_part(queries, k, v, part, torch.empty(0), OPTIONS))
    leaves += [(q, want["dq"])] if q.requires_grad else []
    grads = torch.autograd.grad(merging.result(), [x for x, _ in leaves], (inputs.grad_out, inputs.grad_lse))
    for grad, (_, exact) in zip(grads, leaves, strict=True):
        assert relative_error(grad, exact) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_eight_parts_are_rounded_once(kernel: str, dtype: torch.dtype) -> None:
    """Results as near to the truth as those of one call over all keys, though out and dq are sums over all parts."""
    mask = MASKS["causal"]
    inputs = draw(mask, (4, 4, 32, 32), dtype)
    want = expected(inputs, torch.from_numpy(mask.dense()), {"bias": None} | EXACT).values

    def errors(cuts: Any) -> list[float]:
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        got = attend(KERNELS[kernel], *leaves, mask, OPTIONS, cuts)
        grads = torch.autograd.grad(got, leaves, (inputs.grad_out, inputs.grad_lse.float()))
        found = zip((got[0], *grads), ("out", "dq", "dk", "dv"), strict=True)
        return [float((x.detach().double() - want[name]).square().mean().sqrt()) for x, name in found]

    for parts, whole in zip(errors(EIGHTHS), errors((0, 1)), strict=True):
        assert parts <= 1.25 * whole


@pytest.mark.parametrize(
    ("backend", "dtype", "cuts"),
    [
        ("aot_eager", torch.float32, PARTS),
        ("aot_eager", torch.bfloat16, None),
        pytest.param("inductor", torch.bfloat16, PARTS, marks=pytest.mark.slow),
        pytest.param("inductor", torch.float32, (0, 1), marks=pytest.mark.slow),
    ],
)
@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch's own, on import
def test_compiles_fullgraph_for_any_mask(backend: str, dtype: torch.dtype, cuts: Any) -> None:
    """Masks that differ in spans and keys share two graphs; results and their strides are those of eager code."""
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def parts_of(x: Inputs, mask: SpanMask) -> list[Any]:
        return [part for _, part in cut(x, mask, (0, 1) if cuts is None else cuts)]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: list[Any], empty: torch.Tensor) -> Any:
        if cuts is None:
            return SDPA.attend(q, k, v, parts[0], empty, OPTIONS)
        merging, queries, first = Merging(q.dtype), SDPA.queries(q), 0
        for part in parts:
            stop = first + part.kv_pos.shape[1]
            merging.add(SDPA.attend_part(queries, k[:, :, first:stop], v[:, :, first:stop], part, empty, OPTIONS))
            first = stop
        return merging.result()

    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=True)
    for name in ("sinks", "random", "shared prefix"):
        inputs = draw(MASKS[name], SHAPES[0], dtype)
        cotangents, results = (inputs.grad_out, inputs.grad_lse.float()), []
        for function in (compiled, run):
            leaves = [x.clone().requires_grad_() for x in inputs[:3]]
            got = function(*leaves, parts_of(inputs, MASKS[name]), torch.empty(0))
            results.append((*got, *torch.autograd.grad(got, leaves, cotangents)))
        for x, y in zip(*results, strict=True):
            x, y = (each.detach().double().nan_to_num(0, 0, 0) for each in (x, y))
            assert relative_error(x, y) <= (1e-6 if dtype == torch.float32 else 1e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 2


@pytest.mark.parametrize("selective", [False, True])
def test_checkpointing_sees_the_operator(selective: bool) -> None:
    calls, mask = [], MASKS["documents"]

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.spanwise.sdpa.default:
            calls.append(ctx.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    context = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)} if selective else {}
    inputs = draw(mask, SHAPES[0], torch.float64)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    got = checkpoint(
        lambda q, k, v: attend(SDPA, q, k, v, mask, OPTIONS, PARTS), *leaves, use_reentrant=False, **context
    )
    check(inputs, mask, got, leaves, "both", EXACT)
    assert calls.count(False) == (len(PARTS) - 1 if selective else 0)


def test_backward_twice_no_second_derivatives_and_no_change_in_place() -> None:
    mask = MASKS["random"]
    inputs = draw(mask, SHAPES[0], torch.float64)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    q = leaves[0] * 1
    results = attend(SDPA, q, *leaves[1:], mask, OPTIONS, PARTS)
    cotangents = inputs.grad_out, inputs.grad_lse
    first = torch.autograd.grad(results, leaves, cotangents, retain_graph=True)
    second = torch.autograd.grad(results, leaves, [2 * x for x in cotangents], retain_graph=True)
    assert all(torch.equal(2 * a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(results[0].sum(), leaves, create_graph=True, retain_graph=True)
    q.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results[0].sum().backward()
