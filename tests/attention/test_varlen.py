"""The varlen kernel without a GPU, around a plain-torch flash: operators, graphs, half precision, plans, refusals.

`test_kernels` compares its values and gradients, `tests/ranks/test_attention.py` those on ranks.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from spanwise import SpanMask
from spanwise.attention.kernels import varlen as varlen_module
from spanwise.attention.kernels.base import AttentionOptions
from spanwise.attention.kernels.merge import with_lse_gradient
from spanwise.attention.kernels.varlen import Varlen, VarlenTables
from tests.attention.stand_ins import attend, chunk
from tests.attention.test_kernels import MASKS, SHAPES, check, draw, random_mask

OPTIONS = AttentionOptions(0.3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e-3, 0.0])
def test_gradient_of_lse_in_half_precision(dtype: torch.dtype, size: float) -> None:
    """What the kernel computes for delta is right to the dtype's precision, whatever the sizes of the two gradients."""
    gen = torch.Generator().manual_seed(0)
    out, grad_out = (torch.randn(1, 2, 50, 16, generator=gen).to(dtype) for _ in range(2))
    grad_out = grad_out * size
    grad_lse = torch.randn(1, 2, 50, generator=gen)
    grad_lse[..., :3] = 0
    new_grad, new_out = with_lse_gradient(grad_out, out, grad_lse)
    assert new_grad.dtype == new_out.dtype == dtype and new_out.isfinite().all()
    eps = torch.finfo(dtype).eps
    want = (grad_out.double() * out.double()).sum(-1) - grad_lse.double()
    got = (new_grad.double() * new_out.double()).sum(-1)
    assert ((got - want).abs() <= eps * want.abs() + 1e-7).all()
    # The other uses of grad_out see it unchanged, within what rounding does to a row's gradient.
    changed = (new_grad.double() - grad_out.double()).abs().amax(-1)
    assert (changed <= eps / 8 * want.abs()).all()
    assert (new_grad[..., 1:] == grad_out[..., 1:]).all()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # by opcheck itself, torch 2.14 on
def test_operators_are_well_formed() -> None:
    """On the CPU, and torch's own kernels on tensors without data, on a pretended CUDA device."""
    tables = VarlenTables.of(MASKS["others"])
    fields = [getattr(tables, f.name) for f in dataclasses.fields(tables)]
    inputs = draw(MASKS["others"], SHAPES[0], torch.float64)
    torch.library.opcheck(torch.ops.spanwise.varlen, (*inputs[:3], *fields, 0.3))
    with FakeTensorMode():
        q, k = (torch.empty(9, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
        offsets = torch.empty(3, dtype=torch.int32, device="cuda")
        for window in ((-1, -1), (-1, 0), (0, -1), (5, 2)):
            options = (offsets, offsets, 9, 9, 0.3, window)
            out, lse = varlen_module.flash_forward(q, k, k, *options)
            assert (out.shape, out.dtype) == (q.shape, q.dtype)
            assert (lse.shape, lse.dtype) == ((4, 9), torch.float32)
            grads = varlen_module.flash_backward(out, q, k, k, out, lse, *options)
            assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's own tracing
def test_masks_share_a_graph() -> None:
    """Other windows and other numbers of calls and sequences compile nothing."""
    torch.compiler.reset()
    backend = CompileCounterWithBackend("eager")
    nothing = torch.empty(1, 1, 0, dtype=torch.int32)  # the tables hold the mask
    empty = SpanMask([[0] * 40], [[0] * 40], 40)
    part = chunk(Varlen(), nothing, nothing, empty, nothing)[2]

    @torch.compile(backend=backend, fullgraph=True)
    def compiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: VarlenTables) -> Any:
        return Varlen().attend(q, k, v, dataclasses.replace(part, tables=tables), nothing, OPTIONS)

    for mask in (SpanMask.causal(40), empty, random_mask(40, 40, 2), SpanMask.full(40)):
        inputs = draw(mask, SHAPES[0], torch.float64)
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        got = compiled(*leaves, VarlenTables.of(mask))
        check(inputs, mask, got, leaves, "both", {"scale": 0.3, "softcap": None})
    assert backend.frame_count == 1


# dtype, head dims of q and v, options; a value that the error names.
REFUSED: dict[str, tuple[torch.dtype, tuple[int, int], AttentionOptions, str]] = {
    "softcap": (torch.bfloat16, (64, 64), AttentionOptions(softcap=3.0), "softcap"),
    "score_mod": (torch.bfloat16, (64, 64), AttentionOptions(score_mod=lambda score, *_: score), "score_mod"),
    "dtype": (torch.float32, (64, 64), AttentionOptions(), "float32"),
    "head dim": (torch.bfloat16, (64, 288), AttentionOptions(), "288"),
}


def test_refusals() -> None:
    """Fake tensors on CUDA: the checks read nothing that needs the device."""
    with FakeTensorMode():
        tables = VarlenTables.of(SpanMask([[0] * 9], [[0] * 9], 9))
        part = SimpleNamespace(tables=tables)

        def given(dtype: torch.dtype, dims: tuple[int, int]) -> list[torch.Tensor]:
            return [torch.empty(1, 2, 9, d, dtype=dtype, device="cuda") for d in (dims[0], *dims)]

        Varlen().check(*given(torch.bfloat16, (192, 128)), part, AttentionOptions())
        for dtype, dims, options, named in REFUSED.values():
            with pytest.raises(ValueError, match=named):
                Varlen().check(*given(dtype, dims), part, options)
    with pytest.raises(ValueError, match="cpu"):
        Varlen().check_device(torch.device("cpu"), None)
    mask, many = SpanMask.documents(list(range(41))), [torch.zeros(2000, 1, 40, 8) for _ in range(3)]
    with pytest.raises(ValueError, match="65535 sequences in a call, got 80000"):
        attend(Varlen(), *many, mask, OPTIONS)
