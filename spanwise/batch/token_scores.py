"""Log-probability of each token, from logits or from hidden states, one chunk of tokens after the other.

`loss` builds on `score`. Nothing here is larger than a chunk of tokens × the vocabulary, except what the caller gave
and gradients of that. The backward computes a chunk's logits again: docs/decisions compares.
"""

# N tokens, C tokens of a chunk, D hidden size, V vocabulary of this rank

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from spanwise import _torch
from spanwise.attention import executor
from spanwise.attention.compare import compare_backward, compare_call, compared, plain, tells_refusals
from spanwise.masks.checks import check_finite, check_positive, check_shape

Tensor = torch.Tensor

IGNORE_INDEX = -100

# Logits of a chunk by default, 64 MiB in float32. A forward and backward of 4,096 tokens, vocabulary 32,768, takes
# 1.61, 1.35, 1.27, 1.22 and 1.23 times the time of all logits with chunks of 2^21 to 2^25, and 107 to 226 MiB where all
# logits take 1,546: benchmarks/results/linear-loss-cpu.json. Not measured on a GPU.
CHUNK_LOGITS = 1 << 24


class Scoring(NamedTuple):
    """Options of `token_logprobs`; `mesh` is its `vocab_mesh`."""

    temperature: float = 1.0
    softcap: float | None = None
    chunk: int | None = None
    mesh: DeviceMesh | None = None


@tells_refusals
def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    vocab_weight: Tensor | None = None,
    bias: Tensor | None = None,
    vocab_mesh: DeviceMesh | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Log-probability of each label, on this rank's tokens; differentiable.

    A token's result depends on that token alone, so `unshard` puts the shards of all ranks into the global order.
    Nothing is scaled: if reducers average parameter gradients over ``n`` ranks, multiply a rank's loss by ``n`` and
    divide it by a global count.

    Args:
        logits: ``[…, V]``, any floating dtype; with a `vocab_weight`, hidden states ``[…, D]``. Computed in float32 at
            least.
        labels: int64 ``[…]``, shifted as `shard_batch` does. −100 is ignored: result 0 and gradient 0, whatever the
            logits hold.
        temperature: logits are divided by it, after the `softcap`.
        vocab_weight: ``[V, D]``, the weight of the last linear layer. The logits of one chunk of tokens exist at a
            time, in the forward and in the backward, which computes them again.
        bias: ``[V]``, of that layer.
        vocab_mesh: 1-D mesh of the ranks that share the vocabulary (tensor parallelism) and hold the same tokens. Each
            gives its rows of `vocab_weight` (or columns of `logits`) and `bias`, in the order of ranks, any number of
            them; or a DTensor ``Shard(0)`` on that mesh. All ranks get the same result, and the whole gradient of
            hidden states.
        softcap: logits are ``softcap * tanh(logits / softcap)``; with `vocab_weight` only.
        chunk: tokens of a chunk; default: about 2^24 logits, 64 MiB.

    Returns:
        Log-probabilities ``[…]``, float32 at least.

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit; labels outside the vocabulary, on the CPU (elsewhere
            their log-probability is −inf).
        NotImplementedError: second or forward-mode derivatives, and transforms of `torch.func`.

    >>> import torch, spanwise
    >>> spanwise.token_logprobs(torch.zeros(1, 3, 8), torch.tensor([[2, -100, 5]]))
    tensor([[-2.0794,  0.0000, -2.0794]])
    """
    for name, given in (("softcap", softcap), ("bias", bias)):
        if given is not None and vocab_weight is None:
            raise ValueError(f"{name} needs vocab_weight: a model's logits contain it already")
    scoring = Scoring(temperature, softcap, chunk, vocab_mesh)
    return score(logits, labels, vocab_weight, bias, scoring, "token_logprobs")


def check_labels(labels: Tensor, name: str, x: Tensor, **more: Tensor | None) -> None:
    """``ValueError`` for labels that do not fit `x`, logits or hidden states, and for others of their tensors."""
    for what, t in ((name, x), ("labels", labels)):
        if isinstance(t, DTensor):
            raise ValueError(f"{what} must be a plain tensor, got a DTensor {tuple(t.placements)}; use to_local()")
    if x.dim() == 0 or x.shape[:-1] != labels.shape:
        raise ValueError(f"{name} must be [*labels.shape, dim], got {tuple(x.shape)}, labels {tuple(labels.shape)}")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64, got {labels.dtype}")
    for what, tensor in (*more.items(), (name, x)):
        if tensor is not None and (not tensor.is_floating_point() or tensor.device != labels.device):
            raise ValueError(f"{what} must be floating point on {labels.device}, got {tensor.dtype} on {tensor.device}")


def _own_rows(
    x: Tensor, labels: Tensor, weight: Tensor | None, bias: Tensor | None, scoring: Scoring
) -> tuple[Tensor | None, Tensor | None]:
    """This rank's rows of the weight and the bias, differentiably; ``ValueError`` for what a rank sees to be wrong."""
    mesh = scoring.mesh
    for option in ("temperature", "softcap"):
        if (value := getattr(scoring, option)) is not None:
            check_finite(value, option, positive=True)
    if scoring.chunk is not None:
        check_positive(scoring.chunk, "chunk")
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(f"vocab_mesh must have one axis, got {mesh.ndim} ({mesh.mesh_dim_names}); pass one of them")
    _torch.check_transforms(*(t for t in (x, weight, bias) if t is not None))
    for name, t in (("vocab_weight", weight), ("bias", bias)):
        if isinstance(t, DTensor) and (t.device_mesh != mesh or tuple(t.placements) != (Shard(0),)):
            raise ValueError(
                f"{name} is a DTensor {tuple(t.placements)} on {t.device_mesh}; it must be Shard(0) on vocab_mesh, "
                f"{mesh}. Under FSDP, call this inside the forward of the module that owns the weight"
            )
    weight, bias = (t.to_local() if isinstance(t, DTensor) else t for t in (weight, bias))
    check_labels(labels, "logits" if weight is None else "hidden", x, vocab_weight=weight, bias=bias)
    if weight is not None:
        check_shape(weight, "vocab_weight", "vocab", x.shape[-1], like=f" for hidden {tuple(x.shape)}")
    if bias is not None and weight is not None:
        check_shape(bias, "bias", weight.shape[0], like=f" for vocab_weight {tuple(weight.shape)}")
    return weight, bias


def score(
    x: Tensor, labels: Tensor, weight: Tensor | None, bias: Tensor | None, scoring: Scoring, caller: str,
    amount: float | Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Log-probabilities in the shape of the labels.

    Args:
        x: hidden states ``[…, D]``, or logits ``[…, V]`` without a weight.
        weight, bias: as `token_logprobs` takes them.
        caller: equal on the ranks that share the vocabulary; its use of the scores decides on their gradients.
        amount: a number of the caller that changes from call to call, also equal; in a tensor it is not compared.
    """
    weight, bias = _own_rows(x, labels, weight, bias, scoring)
    mesh = None if scoring.mesh is None or scoring.mesh.size() == 1 else scoring.mesh
    rows = x.shape[-1] if weight is None else weight.shape[0]
    first, compare = labels.new_zeros(()), None
    if mesh is None:
        check_vocabulary(labels, rows)
    else:
        grads = torch.is_grad_enabled() and x.requires_grad
        facts = {
            "for": caller, "given": "logits" if weight is None else "hidden states", "dtype": x.dtype,
            "requires grad": grads, "temperature": plain(scoring.temperature), "softcap": plain(scoring.softcap),
            "bias": bias is not None,
        }  # fmt: skip
        sizes = ("[tokens, hidden size]", (labels.numel(), *([] if weight is None else x.shape[-1:])))
        name = "token scores of a sharded vocabulary"
        compare = compare_call(name, facts, mesh, [x], sizes=sizes, amount=amount)
        # A rank does not know the others' rows. The sum keeps the answer on the device.
        rank = mesh.get_local_rank()
        (counts,) = compared((F.pad(labels.new_full((1,), rows), (rank, mesh.size() - rank - 1)),), compare)
        counts = executor.all_reduce(counts, "sum", mesh, "rows of the vocabulary")
        check_vocabulary(labels, counts.sum())
        first = counts[:rank].sum()
        if not grads or weight is None:
            compare = None  # the backward has no collective
    if weight is not None and bias is not None:  # one more column of the weight
        x, weight = F.pad(x, (0, 1), value=1.0), torch.cat([weight, bias.unsqueeze(1)], dim=1)
    x_ND = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    logprobs = _TokenScores.apply(x_ND, weight, labels.flatten(), first, bias is not None, *scoring._replace(mesh=mesh))
    (logprobs,) = compare_backward((logprobs,), compare)
    return logprobs.view(labels.shape)


def check_vocabulary(labels: Tensor, vocab: Tensor | int) -> None:
    """``ValueError`` for labels outside the vocabulary, on the CPU: elsewhere the host would wait for the device."""
    if torch.compiler.is_compiling() or labels.device.type != "cpu" or _torch.is_fake(labels):
        return
    wrong = ((labels < 0) | (labels >= vocab)) & (labels != IGNORE_INDEX)
    for at in wrong.nonzero()[:1].tolist():
        raise ValueError(f"labels must be {IGNORE_INDEX} or in [0, {vocab}); labels{at} is {labels[tuple(at)]}")


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor | None, labels_N: Tensor, first: Tensor, biased: bool, *given: Any
    ) -> Tensor:
        scoring, ctx.biased = Scoring(*given), biased
        ctx.scoring = scoring
        mesh = scoring.mesh
        ctx.dtypes = _dtypes(x_ND, weight_VD)
        # Largest logit, finite for differences that are not NaN; sum of exp(logit - largest); the label's logit. A rank
        # without a row of the vocabulary keeps these.
        lowest = torch.finfo(ctx.dtypes[1]).min
        start = (lowest, 0, -math.inf)
        top_N, sum_N, picked_N = (x_ND.new_full((len(x_ND),), x, dtype=ctx.dtypes[1]) for x in start)
        with torch.autocast(x_ND.device.type, enabled=False):
            for part, h, z_CV, index, own in _chunks(x_ND, weight_VD, labels_N, first, ctx.dtypes, biased, scoring):
                if z_CV.shape[1]:
                    picked_N[part] = z_CV.gather(1, index).masked_fill_(~own, -math.inf).squeeze(1)
                    top_N[part] = z_CV.amax(-1).clamp_(min=lowest)
                sum_N[part] = z_CV.sub_(top_N[part].unsqueeze(-1)).exp_().sum(-1)
                del h, z_CV
            if mesh is not None:
                # Not `stack`: of torch 2.13's Inductor `top_N` would be a view of what the all-reduce overwrites.
                both = torch.where(torch.arange(2, device=top_N.device).unsqueeze(1) == 0, top_N, picked_N)
                tops = executor.all_reduce(both, "max", mesh, "the largest logits")
                sum_N = executor.all_reduce(sum_N * (top_N - tops[0]).exp(), "sum", mesh, "sums of exponentials")
                top_N, picked_N = tops.unbind()
            log_sum_N = sum_N.log()
            logprobs = (picked_N - top_N - log_sum_N).masked_fill_(labels_N == IGNORE_INDEX, 0)
        ctx.save_for_backward(x_ND, weight_VD, labels_N, first, top_N, log_sum_N)
        return logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _torch.check_first_order()
        scoring, (operand_dtype, dtype) = ctx.scoring, ctx.dtypes
        temperature, softcap, _, mesh = scoring
        x_ND, weight_VD, labels_N, first, top_N, log_sum_N = ctx.saved_tensors
        g_N1 = grad.to(dtype).masked_fill(labels_N == IGNORE_INDEX, 0).unsqueeze(-1)
        need_x, need_weight = ctx.needs_input_grad[:2]
        # Hidden states are the same on all ranks of the mesh; their gradient is a sum over these, in float32.
        summed = mesh is not None and weight_VD is not None
        grad_x = torch.empty_like(x_ND, dtype=dtype if summed else x_ND.dtype) if need_x else None
        grad_weight = torch.zeros_like(weight_VD, dtype=dtype) if need_weight else None
        with torch.autocast(x_ND.device.type, enabled=False):
            weight = None if weight_VD is None else weight_VD.to(operand_dtype)
            for part, h, z_CV, index, own in _chunks(x_ND, weight, labels_N, first, ctx.dtypes, ctx.biased, scoring):
                slope = None if softcap is None else (z_CV * (temperature / softcap)).square_().neg_().add_(1)
                g = g_N1[part]
                d_CV = z_CV.sub_(top_N[part].unsqueeze(-1)).sub_(log_sum_N[part].unsqueeze(-1)).exp_().mul_(-g)
                if d_CV.shape[1]:
                    d_CV.scatter_add_(1, index, g * own)
                if slope is not None:
                    d_CV.mul_(slope)
                if temperature != 1:
                    d_CV.div_(temperature)
                d_CV = d_CV.to(operand_dtype)
                if grad_x is not None:
                    grad_x[part] = d_CV if weight is None else _product(d_CV, weight, dtype)
                if grad_weight is not None and operand_dtype == dtype:
                    grad_weight.addmm_(d_CV.t(), h)
                elif grad_weight is not None:
                    grad_weight += _product(d_CV.t(), h, dtype)
                del h, z_CV, d_CV, slope
            if grad_x is not None and summed:
                grad_x = executor.all_reduce(grad_x, "sum", mesh, "the gradient of hidden states")
        found = zip((grad_x, grad_weight), (x_ND, weight_VD), strict=True)
        return *(None if g is None else g.to(x.dtype) for g, x in found), *[None] * 7


def _dtypes(x: Tensor, weight: Tensor | None) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes of the operands of products, and of everything else: float32 at least.

    A CUDA device multiplies bfloat16 (its own, or autocast's) into float32 sums without a copy in float32. Elsewhere
    the operands are float32, too, so that no product is rounded.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if weight is None:
        return dtype, dtype
    dtype = torch.promote_types(dtype, weight.dtype)
    low = {torch.get_autocast_dtype("cuda")} if torch.is_autocast_enabled("cuda") else {x.dtype, weight.dtype}
    fast = x.device.type == "cuda" and dtype == torch.float32 and low == {torch.bfloat16}
    return torch.bfloat16 if fast else dtype, dtype


def _chunks(
    x_ND: Tensor, weight: Tensor | None, labels_N: Tensor, first: Tensor, dtypes: tuple[torch.dtype, torch.dtype],
    biased: bool, scoring: Scoring,
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Slices of tokens, their operands ``[C, D]`` and logits ``[C, V]``, which may be written to.

    And the labels' columns ``[C, 1]``, clipped to this rank's, and which of them are this rank's.
    """
    operand_dtype, dtype = dtypes
    weight = None if weight is None else weight.to(operand_dtype)
    vocab = x_ND.shape[-1] if weight is None else weight.shape[0]
    chunk = scoring.chunk or max(1, CHUNK_LOGITS // max(1, vocab))
    column_N1 = (labels_N - first).unsqueeze(-1)
    index_N1, own_N1 = column_N1.clamp(0, max(vocab - 1, 0)), (column_N1 >= 0) & (column_N1 < vocab)
    for start in range(0, len(x_ND), chunk):
        part = slice(start, min(start + chunk, len(x_ND)))
        # What padding holds, NaN included, is never read. The column of a bias stays 1: 0 times one of -inf is NaN.
        h = x_ND[part].masked_fill((labels_N[part] == IGNORE_INDEX).unsqueeze(-1), 0).to(operand_dtype)
        if biased:
            h[:, -1] = 1
        z = h if weight is None else _product(h, weight.t(), dtype)
        if scoring.softcap is not None:
            z.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
        if scoring.temperature != 1:
            z.div_(scoring.temperature)
        yield part, h, z, index_N1[part], own_N1[part]
        del h, z  # before the next chunk is made


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a @ b if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)
