"""Log-probabilities and the loss from hidden states on one device: numbers, memory, dtypes, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import spanwise
from spanwise.batch import token_scores
from tests.oracle import relative_error

N, D, V = 13, 5, 11


def problem(
    tokens: int = N, dim: int = D, vocab: int = V, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight and bias that need gradients, and labels, some ignored."""
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, dim, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(vocab, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=rng)
    return hidden, weight, bias, labels.masked_fill_(torch.rand(tokens, generator=rng) < 0.3, -100)


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies by torch's own operators, with all logits."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    entropies = torch.special.entr(log_p.exp()).sum(-1)
    picked = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return picked * (labels != -100), entropies * (labels != -100)


@pytest.mark.parametrize(
    ("from_hidden", "temperature", "softcap"),
    [(False, 1.0, None), (False, 0.7, None), (True, 1.0, None), (True, 0.7, None), (True, 1.0, 2.0), (True, 1.3, 2.0)],
)
@pytest.mark.parametrize("chunk", [1, 4, None])
@pytest.mark.parametrize("entropy", [False, True])
def test_scores_and_gradients_are_those_of_all_logits(
    from_hidden: bool, temperature: float, softcap: float | None, chunk: int | None, entropy: bool
) -> None:
    hidden, weight, bias, labels = problem()
    scored, given = F.linear(hidden, weight, bias), dict[str, Any]()
    if from_hidden:
        scored, given = hidden, {"vocab_weight": weight, "bias": bias, "softcap": softcap}
    found = spanwise.token_logprobs(scored, labels, temperature=temperature, chunk=chunk, entropy=entropy, **given)
    found = found if isinstance(found, tuple) else (found,)
    expected = reference(hidden, weight, bias, labels, temperature, softcap)[: len(found)]
    cotangents = [torch.randn(N, dtype=torch.float64) for _ in found]
    torch.testing.assert_close(found, expected)
    grads, exact = (torch.autograd.grad(out, (hidden, weight, bias), cotangents) for out in (found, expected))
    torch.testing.assert_close(grads, exact)


@given(
    shape=st.lists(st.integers(0, 5), max_size=3), dim=st.integers(1, 4), vocab=st.integers(1, 7),
    chunk=st.integers(1, 9), reduction=st.sampled_from(["mean", "sum", "none"]), seed=st.integers(0, 99),
    needs=st.tuples(st.booleans(), st.booleans(), st.booleans()), ignored=st.floats(0, 1),
    scale=st.sampled_from([0.01, 1.0, 300.0]),
)  # fmt: skip
def test_any_loss_is_that_of_all_logits(
    shape: list[int], dim: int, vocab: int, chunk: int, reduction: Any, seed: int, needs: tuple[bool, ...],
    ignored: float, scale: float,
) -> None:  # fmt: skip
    rng = torch.Generator().manual_seed(seed)
    hidden = scale * torch.randn(*shape, dim, generator=rng, dtype=torch.float64)
    weight, bias = (torch.randn(*s, generator=rng, dtype=torch.float64) for s in ((vocab, dim), (vocab,)))
    labels = torch.randint(0, vocab, shape, generator=rng)
    labels = labels.masked_fill(torch.rand(shape, generator=rng) < ignored, -100)
    inputs = [x.requires_grad_(need) for x, need in zip((hidden, weight, bias), needs, strict=True)]
    found = spanwise.linear_cross_entropy(
        hidden, weight, labels, bias=bias, loss_mesh=None, reduction=reduction, chunk=chunk
    )
    flat = F.linear(hidden, weight, bias).reshape(-1, vocab)
    expected = F.cross_entropy(flat, labels.reshape(-1), reduction="none").reshape(shape)
    if reduction != "none":
        expected = expected.sum() / (max(1, int((labels != -100).sum())) if reduction == "mean" else 1)
    torch.testing.assert_close(found, expected)
    if any(needs):
        cotangent = torch.randn(found.shape, generator=rng, dtype=torch.float64)
        found.backward(cotangent)
        grads = [x.grad for x in inputs]
        for x in inputs:
            x.grad = None
        expected.backward(cotangent)
        for one, x in zip(grads, inputs, strict=True):
            assert (one is None) == (x.grad is None)
            if one is not None:
                torch.testing.assert_close(one, x.grad, rtol=1e-7, atol=1e-9 * scale)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("what", ["loss", "scores", "softcap"])
def test_no_tensor_is_larger_than_a_chunk_of_logits(what: str) -> None:
    tokens, dim, vocab, chunk = 96, 4, 512, 8
    hidden, weight, bias, labels = problem(tokens, dim, vocab, torch.float32)
    with Largest() as seen:
        if what == "loss":
            loss = spanwise.linear_cross_entropy(hidden, weight, labels, bias=bias, loss_mesh=None, chunk=chunk)
        else:
            softcap = 5.0 if what == "softcap" else None
            pair = spanwise.token_logprobs(
                hidden, labels, vocab_weight=weight, bias=bias, entropy=True, softcap=softcap, chunk=chunk
            )
            loss = pair[0].sum() + pair[1].sum()
        forward, seen.elements = seen.elements, 0
        loss.backward()
    assert forward == seen.elements == chunk * vocab > max(hidden.numel(), weight.numel())
    with Largest() as seen:
        spanwise.linear_cross_entropy(hidden, weight, labels, loss_mesh=None, chunk=tokens).backward()
    assert seen.elements == tokens * vocab  # so it would be seen


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_as_exact_as_torch_with_all_logits(autocast: bool) -> None:
    exact = problem(200, 32, 300)
    labels = exact[3]
    low = [x.detach().bfloat16().requires_grad_() for x in exact[:3]]
    wide = [x.detach().double().requires_grad_() for x in low]
    F.cross_entropy(F.linear(*wide), labels).backward()

    def errors(loss: Any) -> list[float]:
        inputs = [x.detach().float().requires_grad_() if autocast else x.detach().requires_grad_() for x in low]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = loss(*inputs)
        assert found.dtype == torch.float32
        found.backward()
        assert all(x.grad.dtype == x.dtype for x in inputs)
        return [relative_error(x.grad.double(), w.grad) for x, w in zip(inputs, wide, strict=True)]

    theirs = errors(lambda h, w, b: F.cross_entropy(F.linear(h, w, b).float(), labels))
    ours = errors(lambda h, w, b: spanwise.linear_cross_entropy(h, w, labels, bias=b, loss_mesh=None, chunk=16))
    for one, other in zip(ours, theirs, strict=True):
        assert one <= 1.2 * other


def test_large_logits_lose_no_digits() -> None:
    """A logsumexp of logits near 5,000 is rounded to 5e-4 in float32; the difference to the largest logit is not."""
    logits = torch.tensor([[5000.0, 4999.5, 4990.0], [-5000.0, -5000.25, -5003.0]])
    labels = torch.tensor([1, 0])
    found, entropies = spanwise.token_logprobs(logits, labels, entropy=True)
    exact = reference(logits.double(), torch.eye(3).double(), None, labels)
    torch.testing.assert_close(found.double(), exact[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(entropies.double(), exact[1], rtol=1e-6, atol=0)


def test_ignored_tokens_may_hold_nan_and_minus_infinity_is_a_logit() -> None:
    hidden, weight, bias, labels = problem()
    expected = torch.autograd.grad(reference(hidden, weight, bias, labels)[0].sum(), (hidden, weight, bias))
    dirty = hidden.detach().clone()
    dirty[labels == -100] = math.nan
    dirty.requires_grad_()
    found = spanwise.token_logprobs(dirty, labels, vocab_weight=weight, bias=bias, chunk=4)
    assert (found[labels == -100] == 0).all()
    for one, other in zip(torch.autograd.grad(found.sum(), (dirty, weight, bias)), expected, strict=True):
        torch.testing.assert_close(one, other)
    logits = torch.tensor([[0.5, -math.inf, 1.0]] * 2, requires_grad=True)
    found, entropies = spanwise.token_logprobs(logits, torch.tensor([0, 1]), entropy=True)
    kept = torch.tensor([0.5, 1.0]).log_softmax(-1)
    torch.testing.assert_close(found[0], kept[0])
    assert found[1] == -math.inf
    torch.testing.assert_close(entropies, -(kept.exp() * kept).sum().expand(2))
    (grad,) = torch.autograd.grad(found[0] + entropies[0], logits)
    assert grad.isfinite().all() and grad[0, 1] == 0


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hidden": torch.zeros(4, D)}, r"hidden must be \[\*labels.shape, dim\], got \(4, 5\), .*\(13,"),
    ({"vocab_weight": torch.zeros(V, 4)}, r"vocab_weight must be \[vocab, 5\] .* got \(11, 4\)"),
    ({"vocab_weight": torch.zeros(V, D).long()}, "vocab_weight must be floating point on cpu, got torch.int64"),
    ({"vocab_weight": torch.zeros(V, D, device="meta")}, "floating point on cpu, got torch.float32 on meta"),
    ({"bias": torch.zeros(4)}, r"bias must be \[11\] .* got \(4,\)"),
    ({"labels": torch.full((N,), V)}, r"labels must be -100 or in \[0, 11\); labels\[0\] is"),
    ({"labels": torch.full((N,), -1)}, r"in \[0, 11\); labels\[0\] is -1"),
    ({"labels": torch.zeros(N)}, "labels must be int64, got torch.float32"),
    ({"reduction": "max"}, "reduction must be .* got 'max'"),
    ({"num_valid": -1}, "num_valid must be a number of tokens, got -1"),
    ({"num_valid": 0}, "num_valid is 0, and this rank has [0-9]+ valid labels"),
    ({"num_valid": 3, "reduction": "sum"}, "num_valid divides the sum .* got 3 for 'sum'"),
    ({"softcap": 0.0}, "softcap must be positive and finite, got 0.0"),
    ({"chunk": 0}, "chunk must be at least 1, got 0"),
]


@pytest.mark.parametrize(("wrong", "match"), WRONG)
def test_bad_input(wrong: dict[str, Any], match: str) -> None:
    hidden, weight, _, labels = problem()
    arguments = {"hidden": hidden, "vocab_weight": weight, "labels": labels} | wrong
    with pytest.raises(ValueError, match=match):
        spanwise.linear_cross_entropy(**arguments, loss_mesh=None)


def test_bad_input_of_logprobs() -> None:
    logits, labels = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    for wrong, match in (
        ({"temperature": 0.0}, "temperature must be positive and finite, got 0.0"),
        ({"softcap": 3.0}, "softcap needs vocab_weight"),
        ({"bias": torch.zeros(3)}, "bias needs vocab_weight"),
    ):
        with pytest.raises(ValueError, match=match):
            spanwise.token_logprobs(logits, labels, **wrong)


def test_second_derivatives_and_transforms() -> None:
    hidden, weight, _, labels = problem()

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        return spanwise.linear_cross_entropy(hidden, weight, labels, loss_mesh=None)

    with pytest.raises(NotImplementedError, match=r"second derivatives"):
        torch.autograd.grad(loss(hidden), hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"does not run inside torch.func"):
        torch.func.grad(loss)(hidden)


def test_activation_checkpointing() -> None:
    hidden, weight, _, labels = problem()

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return spanwise.linear_cross_entropy(hidden, weight, labels, loss_mesh=None, chunk=4)

    expected = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    again = torch.utils.checkpoint.checkpoint(loss, hidden, weight, use_reentrant=False)
    for one, other in zip(torch.autograd.grad(again, (hidden, weight)), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in Dynamo and Inductor
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_in_one_graph(backend: str) -> None:
    hidden, weight, bias, labels = problem()

    def loss(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        logprobs, entropies = spanwise.token_logprobs(
            hidden, labels, vocab_weight=weight, bias=bias, entropy=True, temperature=0.7, softcap=4.0, chunk=7
        )
        mean = spanwise.linear_cross_entropy(hidden, weight, labels, bias=bias, loss_mesh=None, chunk=7)
        return mean + logprobs.square().sum() + entropies.sum()

    inputs = (hidden, weight, bias)
    expected = loss(*inputs)
    found = torch.compile(loss, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(found, expected)
    grads, exact = (torch.autograd.grad(x, inputs) for x in (found, expected))
    for one, other in zip(grads, exact, strict=True):
        torch.testing.assert_close(one, other)


def test_products_of_bfloat16_on_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which dtype the operands get there, with fake tensors; and numbers on a CPU, with a stand-in for torch.mm."""
    with FakeTensorMode():
        low, wide = (torch.empty(2, 2, dtype=d, device="cuda") for d in (torch.bfloat16, torch.float32))
        assert token_scores._dtypes(low, low) == (torch.bfloat16, torch.float32)
        assert token_scores._dtypes(low, wide) == token_scores._dtypes(low, None) == (torch.float32,) * 2
    hidden, weight, bias, labels = problem(200, 32, 300, torch.bfloat16)
    expected = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    F.cross_entropy(F.linear(*expected), labels).backward()
    monkeypatch.setattr(token_scores, "_dtypes", lambda *_: (torch.bfloat16, torch.float32))
    products = []

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        products.append((a.dtype, b.dtype))
        return a.to(out_dtype) @ b.to(out_dtype)

    monkeypatch.setattr(torch, "mm", mm)
    spanwise.linear_cross_entropy(hidden, weight, labels, bias=bias, loss_mesh=None, chunk=64).backward()
    assert products == [(torch.bfloat16, torch.bfloat16)] * (4 * 4)  # chunks × the forward's, and three
    for x, exact in zip((hidden, weight, bias), expected, strict=True):
        assert x.grad.dtype == torch.bfloat16 and relative_error(x.grad.double(), exact.grad) < 5e-3
