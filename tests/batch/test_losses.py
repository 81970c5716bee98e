"""Log-probabilities and losses from hidden states or logits, against all logits by torch's own operators.

On one device and on ranks: tokens sharded over "cp", the vocabulary over "tp", and both.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import spanwise
from spanwise import SpanMask
from tests.oracle import relative_error
from tests.pairs import covering
from tests.ranks.harness import run_ranks

DIM, VOCAB = 6, 11
CU = [0, 1, 20, 20, 31, 45]
LENGTH = CU[-1]


def problem(
    tokens: int = 13, dim: int = DIM, vocab: int = VOCAB, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight and bias that need gradients, and labels, some ignored."""
    rng = torch.Generator().manual_seed(0)
    shapes = (tokens, dim), (vocab, dim), (vocab,)
    drawn = [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
    labels = torch.randint(0, vocab, (tokens,), generator=rng)
    return *drawn, labels.masked_fill_(torch.rand(tokens, generator=rng) < 0.3, -100)


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor,
    temperature: float = 1.0, softcap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Log-probabilities of all logits."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    picked = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return picked * (labels != -100)


# ---------------------------------------------------------------- any two settings together

OF_LOGITS = ("logits", "micro-batches", "scores of logits")
ROWS = [[VOCAB], [6, 5], [4, 4, 3], [5, 5, 1, 0], [0, 11]]  # of the vocabulary, by tp rank


def possible(rows: list[int], cp: int, what: str, softcap: float | None, weighted: bool, *rest: Any) -> bool:
    *_, dtensor = rest
    if dtensor and (what in OF_LOGITS or rows not in ([6, 5], [4, 4, 3]) or torch.__version__.startswith("2.11.")):
        return False  # torch 2.11 crashes where ranks that are threads enter a fake mode, as DTensor does
    if what in ("logits", "micro-batches") and len(rows) > 1:
        return False
    return cp * len(rows) <= 6 and not (weighted and "scores" in what) and not (softcap and what == "scores of logits")


@pytest.mark.parametrize(
    ("rows", "cp", "what", "softcap", "weighted", "chunk", "frozen", "dtensor"),
    covering(
        ROWS, [1, 2, 3, 4], ["mean", "scores", *OF_LOGITS], [None, 2.0], [False, True], [1, 7, None], ["", "h", "wb"],
        [False, True], possible=possible,
    ),
    ids=str,
)  # fmt: skip
def test_numbers_and_all_gradients_are_those_of_one_device(
    rows: list[int], cp: int, what: str, softcap: float | None, weighted: bool, chunk: int | None, frozen: str,
    dtensor: bool,
) -> None:  # fmt: skip
    """A rank may have no valid token, or no row of the vocabulary. Weights sum to far below 1."""
    plan, tp = spanwise.make_plan(SpanMask.documents(CU), cp, balancer="ptrr", block_size=4), len(rows)
    hidden, weight, bias, labels = (x.detach() for x in problem(2 * LENGTH))
    hidden, labels = hidden.view(2, LENGTH, DIM), labels.view(2, LENGTH)
    if cp > 1:
        labels[:, plan.layout.indices(0)] = -100
    learns = [name not in frozen for name in "hwb"]
    leaves = [x.clone().requires_grad_(needs) for x, needs in zip((hidden, weight, bias), learns, strict=True)]
    scores = "scores" in what
    found = reference(*leaves, labels, 1.3 if scores else 1.0, softcap)
    weights = torch.rand(2, LENGTH, dtype=torch.float64) * 1e-3 if weighted else None
    valid = labels != -100
    count = valid.sum() if weights is None else weights[valid].sum()
    whole = found if scores else -(found * (1 if weights is None else weights)).sum() / count
    cotangent = torch.randn_like(whole)
    exact = torch.autograd.grad(whole, [x for x in leaves if x.requires_grad], cotangent)

    def on_rank(rank: int, mesh: DeviceMesh) -> tuple[torch.Tensor, list[torch.Tensor]]:
        vocab_mesh, loss_mesh = mesh["tp"] if tp > 1 else None, mesh["cp"] if cp > 1 else None
        if dtensor:
            w, b = (distribute_tensor(x, vocab_mesh, [Shard(0)]) for x in (weight, bias))
        else:
            w, b = (x.split(rows)[rank % tp].clone() for x in (weight, bias))
        h, w, b = own = [x.requires_grad_(needs) for x, needs in zip((hidden.clone(), w, b), learns, strict=True)]
        states, targets = (spanwise.shard(plan, loss_mesh, x) for x in (h, labels))
        own_weights = None if weights is None else spanwise.shard(plan, loss_mesh, weights)
        if scores:
            of_hidden = {} if what in OF_LOGITS else {"vocab_weight": w, "bias": b, "softcap": softcap}
            states = states if of_hidden else F.linear(states, w, b)
            out = spanwise.token_logprobs(
                states, targets, temperature=1.3, vocab_mesh=vocab_mesh, chunk=chunk, **of_hidden
            )
        elif what in OF_LOGITS:
            logits = F.linear(states, w, b)
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            num_valid: Any = None if what == "logits" else count if weighted else int(count)
            out = sum(
                spanwise.cross_entropy(logits[i], targets[i], loss_mesh, num_valid=num_valid,
                                       weights=None if own_weights is None else own_weights[i])
                for i in ([...] if what == "logits" else [0, 1])
            )  # fmt: skip
        else:
            out = spanwise.linear_cross_entropy(
                states, w, targets, bias=b, loss_mesh=loss_mesh, vocab_mesh=vocab_mesh, softcap=softcap,
                weights=own_weights, chunk=chunk,
            )  # fmt: skip
        given = spanwise.shard(plan, loss_mesh, cotangent) * cp if scores else cotangent
        grads = torch.autograd.grad(out, [x for x in own if x.requires_grad], given)
        assert not dtensor or frozen == "wb" or isinstance(grads[-1], DTensor)
        return out.detach(), [x.to_local() if isinstance(x, DTensor) else x for x in grads]

    results = run_ranks(cp * tp, on_rank, mesh_shape=(cp, tp), mesh_dim_names=("cp", "tp"))
    for rank, (out, _) in enumerate(results):
        torch.testing.assert_close(out, plan.shard(whole.detach(), rank // tp) if scores else whole.detach())
    for n, want in enumerate(exact):  # averaged over "cp", as FSDP2 and DDP do
        means = [sum(results[i * tp + j][1][n] for i in range(cp)) / cp for j in range(tp)]
        if n or not learns[0]:
            torch.testing.assert_close(torch.cat(means), want)
        else:  # logits of own rows reach hidden states in parts; else their gradients are whole on each rank
            for got in [sum(means)] if what == "scores of logits" else means:
                torch.testing.assert_close(got, want)


@pytest.mark.parametrize("num_valid", [None, 0.25, torch.tensor(0.25)])
@pytest.mark.parametrize("of_logits", [False, True])
def test_weights_and_their_sum(of_logits: bool, num_valid: Any) -> None:
    """Equal weights are none, no weight is a loss of 0, and a number given in place of the sum is used."""
    hidden, weight, _, labels = problem()
    weights, valid = torch.linspace(0.001, 0.01, 13, dtype=torch.float64), labels != -100
    loss_of = F.cross_entropy(hidden @ weight.T, labels, reduction="none") * weights
    expected = loss_of.sum() / (weights[valid].sum() if num_valid is None else num_valid)

    def call(weights: Any, **options: Any) -> torch.Tensor:
        if of_logits:
            return spanwise.cross_entropy(hidden @ weight.T, labels, None, weights=weights, **options)
        return spanwise.linear_cross_entropy(
            hidden, weight, labels, loss_mesh=None, weights=weights, chunk=3, **options
        )

    loss = call(weights, num_valid=num_valid)
    torch.testing.assert_close(loss, expected.to(loss.dtype))
    torch.testing.assert_close(*(torch.autograd.grad(x, (hidden, weight)) for x in (loss, expected)))
    torch.testing.assert_close(call(torch.full_like(weights, 3)), call(None))
    assert call(torch.zeros_like(weights)).item() == 0
    for wrong, text in ((weights[:5], r"got \(5,\)"), (weights.clone().requires_grad_(), "weights are constants")):
        with pytest.raises(ValueError, match=text):
            call(wrong)


# ---------------------------------------------------------------- memory and rounding


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_no_tensor_is_larger_than_a_chunk_of_logits(softcap: float | None) -> None:
    tokens, vocab = 96, 512
    hidden, weight, bias, labels = problem(tokens, 4, vocab, torch.float32)
    given = dict(vocab_weight=weight, labels=labels, bias=bias, softcap=softcap)
    for chunk in (8, tokens):  # so it would be seen
        for call in (spanwise.token_logprobs, functools.partial(spanwise.linear_cross_entropy, loss_mesh=None)):
            with Largest() as seen:
                loss = call(hidden, chunk=chunk, **given).sum()
                forward, seen.elements = seen.elements, 0
                loss.backward()
            assert forward == seen.elements == chunk * vocab > max(hidden.numel(), weight.numel())


@pytest.mark.parametrize("way", ["plain", "autocast"])
def test_bfloat16_is_as_exact_as_torch_with_all_logits(way: str) -> None:
    exact = problem(200, 32, 300)
    labels = exact[3]
    low = [x.detach().bfloat16().requires_grad_() for x in exact[:3]]
    wide = [x.detach().double().requires_grad_() for x in low]
    F.cross_entropy(F.linear(*wide), labels).backward()

    def errors(loss: Any) -> list[float]:
        inputs = [(x.float() if way == "autocast" else x).detach().requires_grad_() for x in low]
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            found = loss(*inputs)
        assert found.dtype == torch.float32
        found.backward()
        assert all(x.grad.dtype == x.dtype for x in inputs)
        return [relative_error(x.grad.double(), w.grad) for x, w in zip(inputs, wide, strict=True)]

    theirs = errors(lambda h, w, b: F.cross_entropy(F.linear(h, w, b).float(), labels))
    ours = errors(lambda h, w, b: spanwise.linear_cross_entropy(h, w, labels, bias=b, loss_mesh=None, chunk=16))
    for one, other in zip(ours, theirs, strict=True):
        assert one <= 1.2 * other
    logits = F.linear(*low)
    loss = spanwise.cross_entropy(logits, labels, None)  # of bfloat16 logits in float32
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), labels))


def test_large_logits_lose_no_digits() -> None:
    """A logsumexp of logits near 5,000 is rounded to 5e-4 in float32; the difference to the largest logit is not."""
    logits = torch.tensor([[5000.0, 4999.5, 4990.0], [-5000.0, -5000.25, -5003.0]])
    labels = torch.tensor([1, 0])
    found = spanwise.token_logprobs(logits, labels)
    exact = reference(logits.double(), torch.eye(3).double(), None, labels)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


def test_ignored_tokens_may_hold_nan_and_minus_infinity_is_a_logit() -> None:
    hidden, weight, bias, labels = problem()
    expected = torch.autograd.grad(reference(hidden, weight, bias, labels).sum(), (hidden, weight, bias))
    dirty = hidden.detach().masked_fill((labels == -100)[:, None], math.nan).requires_grad_()
    found = spanwise.token_logprobs(dirty, labels, vocab_weight=weight, bias=bias, chunk=4)
    assert (found[labels == -100] == 0).all()
    torch.testing.assert_close(torch.autograd.grad(found.sum(), (dirty, weight, bias)), expected)
    off = bias.detach().clone()  # a bias may switch off rows that pad the vocabulary
    off[min({*range(1, len(off))} - {*labels.tolist()})] = -math.inf
    expected = torch.autograd.grad(reference(hidden, weight, off, labels).sum(), (hidden, weight))
    scores = spanwise.token_logprobs(hidden, labels, vocab_weight=weight, bias=off, chunk=4)
    torch.testing.assert_close(torch.autograd.grad(scores.sum(), (hidden, weight)), expected)
    logits = torch.tensor([[0.5, -math.inf, 1.0]] * 2, requires_grad=True)
    found = spanwise.token_logprobs(logits, torch.tensor([0, 1]))
    kept = torch.tensor([0.5, 1.0]).log_softmax(-1)
    torch.testing.assert_close(found[0], kept[0])
    assert found[1] == -math.inf
    (grad,) = torch.autograd.grad(found[0], logits)
    assert grad.isfinite().all() and grad[0, 1] == 0


# ---------------------------------------------------------------- compiled, checkpointed


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in Dynamo and Inductor
@pytest.mark.parametrize("way", ["checkpoint", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_in_one_graph_or_under_a_checkpoint(way: str) -> None:
    *inputs, labels = problem()

    def loss(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        logprobs = spanwise.token_logprobs(
            hidden, labels, vocab_weight=weight, bias=bias, temperature=0.7, softcap=4.0, chunk=7
        )
        mean = spanwise.linear_cross_entropy(hidden, weight, labels, bias=bias, loss_mesh=None, chunk=7)
        return mean + logprobs.square().sum()

    expected = loss(*inputs)
    if way == "checkpoint":
        found = torch.utils.checkpoint.checkpoint(loss, *inputs, use_reentrant=False)
    else:
        found = torch.compile(loss, backend=way, fullgraph=True)(*inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, inputs) for x in (found, expected)))


# ---------------------------------------------------------------- wrong calls: what is changed, and what the error says

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hidden": torch.zeros(4, DIM)}, r"\(4, 6\)"),
    ({"vocab_weight": torch.zeros(VOCAB, 4)}, r"\(11, 4\)"),
    ({"vocab_weight": torch.zeros(VOCAB, DIM, device="meta")}, "meta"),
    ({"bias": torch.zeros(4)}, r"\(4,\)"),
    ({"softcap": 0.0}, "softcap .*0.0"),
    ({"chunk": 0}, "chunk .*0"),
    ({"loss_mesh": "cp"}, "DeviceMesh, got a str"),
]
OF_LABELS: list[tuple[dict[str, Any], str]] = [
    ({"labels": torch.full((13,), VOCAB)}, r"\[0, 11\).*labels\[0\] is 11"),
    ({"labels": torch.zeros(13)}, "int64, got torch.float32"),
    ({"num_valid": -1}, "num_valid .*-1"),
]


@pytest.mark.parametrize(("wrong", "names"), WRONG + OF_LABELS)
def test_wrong_calls(wrong: dict[str, Any], names: str) -> None:
    hidden, weight, _, labels = problem()
    given = {"hidden": hidden, "vocab_weight": weight, "labels": labels, "loss_mesh": None} | wrong
    with pytest.raises(ValueError, match=names):
        spanwise.linear_cross_entropy(**given)
    if wrong.keys() & {"labels", "num_valid"}:
        with pytest.raises(ValueError, match=names):
            spanwise.cross_entropy(hidden @ weight.T, given["labels"], None, num_valid=wrong.get("num_valid"))
    with pytest.raises(ValueError, match="temperature"):
        spanwise.token_logprobs(hidden @ weight.T, labels, temperature=0.0)


def test_what_a_sharded_vocabulary_refuses() -> None:
    hidden, weight, _, labels = (x.detach() for x in problem(7))

    def on_rank(rank: int, mesh: DeviceMesh) -> None:
        tp = mesh["tp"]
        sharded, columns = (distribute_tensor(weight, tp, [Shard(dim)]) for dim in (0, 1))
        rows = weight.split([6, 5])[tp.get_local_rank()]
        for wrong, names in (
            ({"vocab_weight": sharded}, r"Shard\(dim=0\).* vocab_mesh, None. Under FSDP"),
            ({"vocab_weight": sharded, "vocab_mesh": mesh["cp"]}, r"Shard\(0\) on vocab_mesh"),
            ({"vocab_weight": columns, "vocab_mesh": tp}, r"Shard\(0\) on vocab_mesh"),
            ({"hidden": distribute_tensor(hidden, tp, [Replicate()])}, "hidden must be a plain tensor"),
            ({"vocab_mesh": mesh}, r"got 2 \(\('cp', 'tp'\)\)"),
            ({"vocab_weight": rows, "vocab_mesh": tp, "labels": torch.full((7,), 11)}, r"labels\[0\] is 11"),
        ):
            given = {"hidden": hidden, "vocab_weight": weight, "labels": labels, "loss_mesh": None} | wrong
            with pytest.raises(ValueError, match=names):
                spanwise.linear_cross_entropy(**given)

    run_ranks(4, on_rank, mesh_shape=(2, 2), mesh_dim_names=("cp", "tp"))


def test_second_derivatives_and_transforms() -> None:
    hidden, weight, _, labels = problem()

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        return spanwise.linear_cross_entropy(hidden, weight, labels, loss_mesh=None)

    with pytest.raises(NotImplementedError, match=r"second derivatives"):
        torch.autograd.grad(loss(hidden), hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"does not run inside torch.func"):
        torch.func.grad(loss)(hidden)
