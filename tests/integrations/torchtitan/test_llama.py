"""torchtitan's Llama 3 under context parallelism: its own modules, masks, loss, checkpointing and FSDP2.

The reference is one forward a document on one device, by torchtitan's SDPA attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan.models.llama3", reason="torchtitan (Python 3.11), or triton, is not installed")

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention
from torchtitan.models.llama3 import llama3_configs

import spanwise
from spanwise.integrations import torchtitan as titan
from tests.oracle import dense_attention
from tests.ranks.gloo import GlooPool
from tests.ranks.harness import run_ranks

Rows = Sequence[Sequence[int]]  # lengths of the documents of each row
Step = tuple[Any, dict[str, torch.Tensor]]  # loss and gradients
ROWS = ((23, 41, 7, 30), (64, 1, 36))


def model_of(inner_attention: type[Any] = FlexAttention) -> Any:
    """Two layers; the same weights in each call."""
    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = inner_attention.Config()
    model = config.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.init_states()  # the rotary table; its weights come from the generator that threads share
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return model


def batch_of(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, labels and positions ``[B, S]``, as torchtitan's loader makes them; some labels are ignored."""
    generator, shape = torch.Generator().manual_seed(1), (len(rows), sum(rows[0]))
    tokens = torch.randint(0, 2048, (shape[0], shape[1] + 1), generator=generator)
    labels = tokens[:, 1:].masked_fill(torch.rand(shape, generator=generator) < 0.2, IGNORE_INDEX)
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])
    return tokens[:, :-1], labels, positions


def step(model: Any, labels: torch.Tensor, count: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A rank's part of the loss, as torchtitan's trainer computes it: its sum over all labels of the batch."""
    loss = cross_entropy_loss(model(*args, **kwargs), labels) / count
    loss.backward()
    return loss.detach()


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Whole gradients by name."""
    held = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in held.items() if g is not None}


def reference(rows: Rows, batch: tuple[torch.Tensor, ...]) -> Step:
    """Loss and gradients of one document at a time."""
    model = model_of(ScaledDotProductAttention)
    inputs, labels, positions = batch
    loss, count = 0.0, int((labels != IGNORE_INDEX).sum())
    for row, lengths in enumerate(rows):
        stops = torch.tensor(lengths).cumsum(0).tolist()
        for stop, length in zip(stops, lengths, strict=True):
            one = slice(row, row + 1), slice(stop - length, stop)
            loss += step(model, labels[one], count, inputs[one], positions[one]).item()
    return loss, gradients_of(model)


def check(results: Sequence[Step], want: Step) -> None:
    """Losses and gradients of the ranks sum to those of one device, as FSDP2 sums them in torchtitan."""
    loss, gradients = want
    total = sum(float(result[0]) for result in results)
    assert abs(total - loss) <= 3e-6 * abs(loss), (total, loss)
    assert results[0][1].keys() == gradients.keys()
    for name, gradient in gradients.items():
        error = sum(result[1][name] for result in results) - gradient
        assert error.norm() <= 1e-5 * gradient.norm() + 1e-8, (name, error.norm(), gradient.norm())


def inner(model: Any) -> list[Any]:
    return [layer.attention.inner_attention for layer in model.layers.values()]


def train(
    rank: int, mesh: Any, batch: Any, extra: dict[str, Any] | None = None, change: Any = None, **options: Any
) -> Step:
    """A rank's part of the loss, and its gradients, of a model that is changed after context parallelism."""
    model = model_of()
    titan.apply_cp_to_forward(inner(model), mesh)
    if change is not None:
        change(model, mesh)
    inputs, labels, positions = batch
    count = int((labels != IGNORE_INDEX).sum())
    inputs, labels, kwargs = titan.prepare_context_parallel_input(
        inputs, labels, {"positions": positions} | (extra or {}), mesh, **options
    )
    assert isinstance(kwargs["attention_masks"], titan.PlannedMask)
    return step(model, labels, count, inputs, **kwargs), gradients_of(model)


HALVES = spanwise.SpanMask.documents([0, 50, 101])


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (4, dict(load_balancer_type="headtail")),
        (3, dict(load_balancer_type=None)),
        (2, dict(mask=HALVES)),  # goes before the positions
        (2, dict(plan=spanwise.make_plan(HALVES, 2, balancer="ptrr", block_size=8))),
        (2, dict(extra="a block mask")),
    ],
)
def test_packed_documents(num_ranks: int, options: dict[str, Any]) -> None:
    """Rotary embeddings are relative, so results are equal for documents by `mask` and positions of one document."""
    by_mask = not options.keys().isdisjoint(("mask", "plan"))
    rows = ((50, 51),) if by_mask else ROWS
    batch = inputs, labels, positions = batch_of(rows)
    want = reference(rows, batch)
    if "extra" in options:  # what torchtitan's trainer puts into `attention_masks`
        with torch.compiler.set_stance("force_eager"):
            options = {"extra": {"attention_masks": model_of().get_attention_masks(positions)}}
    if by_mask:
        batch = inputs, labels, torch.arange(101)[None]
        with pytest.raises(AssertionError):  # one document
            check(run_ranks(2, train, batch), want)
    check(run_ranks(num_ranks, train, batch, **options), want)


def _checkpointed(model: Any, mesh: Any) -> None:
    FullAC.Config().build(dump_folder="").apply(model)
    _sharded(model, mesh)


def _compiled(model: Any, mesh: Any) -> None:
    torch._dynamo.reset()  # processes are reused
    for layer in model.layers.values():
        layer.compile(backend="aot_eager", fullgraph=True)
    _sharded(model, mesh)


def _sharded(model: Any, mesh: Any) -> None:
    apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, pp_enabled=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no multiplied sum


@pytest.mark.compiles
@pytest.mark.parametrize("change", [_checkpointed, _compiled])
def test_fsdp(gloo_pool: GlooPool, change: Any) -> None:
    """FSDP sums gradients over ranks."""
    batch = batch_of(ROWS)
    (loss, gradients), (other, _) = gloo_pool.run(2, train, batch, change=change, exchange="needed", stages=1)
    check([(loss + other, gradients)], reference(ROWS, batch))


def _attended(layers: Any, x: torch.Tensor, masks: Any) -> torch.Tensor:
    """Two layers of attention with GQA, a scale, and sinks through `out_transform`, as in gpt-oss."""
    q, k, v = x.unflatten(-1, (8, 16)).split((4, 2, 2), dim=2)
    options = dict(scale=0.3, enable_gqa=True, out_transform=lambda out, lse: out * lse.sigmoid()[..., None])
    basic, sliding = layers
    out = basic(q, k, v, attention_masks=masks["basic_mask"], **options)
    return sliding(out, k, v, attention_masks=masks["sliding_window_mask"], **options)


def _dense(q: Any, k: Any, v: Any, *, attention_masks: Any, scale: float, out_transform: Any, **_: Any) -> Any:
    """Attention with a dense mask, for one device."""
    out, lse = dense_attention(*(x.transpose(1, 2) for x in (q, k, v)), attention_masks, scale)
    return out_transform(out.transpose(1, 2), lse.transpose(1, 2))


def _two_masks(rank: int, mesh: Any, x: torch.Tensor, out: torch.Tensor, positions: torch.Tensor, masks: Any) -> Any:
    x, layers = x.clone().requires_grad_(), [FlexAttention(FlexAttention.Config()) for _ in range(2)]
    titan.apply_cp_to_forward(layers, mesh)
    local, _, kwargs = titan.prepare_context_parallel_input(
        x, positions, {"positions": positions}, mesh, mask=masks, weights={"basic_mask": 3}
    )
    plan, local = kwargs["attention_masks"]["basic_mask"].plan, _attended(layers, local, kwargs["attention_masks"])
    local.backward(spanwise.shard(plan, x=out))
    return spanwise.unshard(plan, x=local.detach()), x.grad


def test_two_masks_and_sinks() -> None:
    positions, generator = batch_of(ROWS)[2], torch.Generator().manual_seed(3)
    x, cotangent = (torch.randn(2, 101, *s, generator=generator, dtype=torch.float64) for s in ((128,), (4, 16)))
    masks = {"basic_mask": spanwise.SpanMask.from_position_ids(positions)}
    masks |= {"sliding_window_mask": spanwise.SpanMask.from_position_ids(positions, window=(9, 0)), "unused": None}
    results = run_ranks(2, _two_masks, x, cotangent, positions, masks)

    document, i, j = (positions == 0).cumsum(1), torch.arange(101)[:, None], torch.arange(101)
    basic = (document[:, :, None] == document[:, None]) & (j <= i)
    whole = x.clone().requires_grad_()
    out = _attended([_dense, _dense], whole, {"basic_mask": basic, "sliding_window_mask": basic & (i - j <= 9)})
    (grad,) = torch.autograd.grad(out, whole, cotangent)
    torch.testing.assert_close(sum(grad for _, grad in results), grad)
    for got, _ in results:
        torch.testing.assert_close(got, out.detach())


def _refused(rank: int, mesh: Any) -> None:
    inputs, labels, positions = batch_of(ROWS)
    model, windowed = model_of(), VarlenAttention(VarlenAttention.Config())
    windowed.window_size = (9, 0)
    titan.apply_cp_to_forward(inner(model), mesh)

    def prepare(*args: Any, **options: Any) -> Any:
        return titan.prepare_context_parallel_input(*args, mesh, **options)

    _, _, kwargs = prepare(inputs, labels, {"other": 1})
    assert kwargs["other"] == 1 and kwargs["positions"].shape[0] == 2
    q, masks = torch.zeros(2, kwargs["positions"].shape[1], 2, 4), {"attention_masks": kwargs["attention_masks"]}
    plan = spanwise.make_plan(spanwise.SpanMask.causal(100), 2)
    for text, act, args, options in (
        ("got Linear", titan.apply_cp_to_forward, ([torch.nn.Linear(1, 1)], mesh), {}),
        (r"window_size=\(9, 0\)", titan.apply_cp_to_forward, ([windowed], mesh), {}),
        ("own forward, got FlexAttention", titan.apply_cp_to_forward, (inner(model), mesh), {}),
        ("got NoneType", model, (inputs, positions), {}),
        ("'is_causal': False, 'window': 3", inner(model)[0], (q, q, q), masks | dict(is_causal=False, window=3)),
        (r"\(2, 101\)", prepare, (inputs, labels[:1], {"positions": positions}), {}),
        (r"\(100, 2\) .*\(101, 2\)", prepare, (inputs, labels, {}), dict(plan=plan)),
    ):
        with pytest.raises(ValueError, match=text):
            act(*args, **options)
    skipping = torch.tensor([[*range(7, 27), *range(30, 61), *range(50)]] * 2)  # a document starts at 0 alone
    documents = prepare(inputs, labels, {"positions": skipping})[2]["attention_masks"].plan
    plan = spanwise.make_plan(spanwise.SpanMask.documents([0, 51, 101]), 2)
    assert torch.equal(documents.digest, plan.local(mesh, "cpu").digest)


def test_refusals() -> None:
    run_ranks(2, _refused)
