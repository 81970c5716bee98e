"""What attention refuses in its own words: senseless numbers, second derivatives, transforms of functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import spanwise
from spanwise import AuxRequest, SpanMask

PLAN = spanwise.make_plan(SpanMask.causal(16), 1)
KERNELS = ["reference", "sdpa"]


def draw(dim: int = 8) -> torch.Tensor:
    return torch.randn(1, 2, 16, dim, generator=torch.Generator().manual_seed(0))


KEYS = draw()  # vmap allows no random numbers inside


def attend(q: torch.Tensor, k: torch.Tensor | None = None, v: torch.Tensor | None = None, **options: Any) -> Any:
    k = KEYS if k is None else k
    return spanwise.context_parallel_attention(q, k, k if v is None else v, PLAN, None, **options)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{f"scale {scale}": ({"scale": scale}, "scale must be finite") for scale in (math.nan, math.inf, -math.inf)},
    **{f"head dims {a}, {b}": ({"q": draw(a), "k": draw(a), "v": draw(b)}, "head dims must be at least 1")
       for a, b in ((0, 8), (8, 0), (0, 0))},
}  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", REFUSED)
def test_bad_numbers(name: str, kernel: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        attend(**{"q": draw()} | options, kernel=kernel)
    assert attend(draw(), scale=-0.5).isfinite().all() and attend(draw(), scale=0).isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("which", ["out", "lse"])
def test_second_derivatives(kernel: str, which: str) -> None:
    q = draw().requires_grad_()
    out, aux = attend(q, kernel=kernel, return_aux=AuxRequest(lse=True))
    result = (out if which == "out" else aux.lse).square().sum()
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(result, q, create_graph=True)
    (grad,) = torch.autograd.grad(result, q)
    assert grad.abs().sum() > 0


TRANSFORMS: dict[str, Callable[[Callable[..., Any], torch.Tensor], Any]] = {
    "grad": lambda f, q: torch.func.grad(lambda q: f(q).sum())(q),
    "vjp": lambda f, q: torch.func.vjp(f, q),
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (q,)),
    "vmap": lambda f, q: torch.vmap(f)(q.expand(3, *q.shape)),
    "vmap around": lambda f, q: torch.vmap(lambda x: f(q) * x)(torch.arange(3.0)),
    "jacrev": lambda f, q: torch.func.jacrev(f)(q),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # by torch, where it first needs a tangent
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, kernel: str) -> None:
    with pytest.raises(NotImplementedError, match=r"does not run inside torch.func .* use the batch dim"):
        TRANSFORMS[name](lambda q: attend(q, kernel=kernel), KEYS)
    with pytest.raises(NotImplementedError, match=r"cannot be built inside torch.func"):
        TRANSFORMS[name](lambda q: (PLAN.local(None), q)[1], KEYS)
    assert attend(draw(), kernel=kernel).isfinite().all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("kernel", KERNELS)
def test_forward_mode(kernel: str) -> None:
    with forward_ad.dual_level():
        assert attend(draw(), kernel=kernel).isfinite().all()  # without a tangent
        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            attend(forward_ad.make_dual(draw(), draw()), kernel=kernel)


@pytest.mark.compiles
def test_compiled_vmap() -> None:
    """Alone, it gave numbers that no test holds to anything."""
    plan = PLAN.local(None)

    def mapped(q: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda x: spanwise.context_parallel_attention(x, KEYS, KEYS, plan, None))(q)

    compiled = torch.compile(mapped, backend="aot_eager", fullgraph=True)
    with pytest.raises((NotImplementedError, torch._dynamo.exc.Unsupported), match=r"does not run inside torch.func"):
        compiled(KEYS.expand(3, *KEYS.shape))
