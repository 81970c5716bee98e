"""Log-probability and entropy of each token, from logits or from hidden states, one chunk of tokens after the other.

`logprobs` and `linear_loss` build on it. Nothing here is larger than a chunk of tokens × the vocabulary, except what
the caller gave and gradients of that. The backward computes a chunk's logits again: docs/decisions compares.
"""

# N tokens, C tokens of a chunk, D hidden size, V vocabulary of this rank

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from spanwise.attention.exchange import failure
from spanwise.batch.loss import IGNORE_INDEX

# Logits of a chunk by default, 64 MiB in float32. A forward and backward of 4,096 tokens, vocabulary 32,768, takes
# 1.61, 1.35, 1.27, 1.22 and 1.23 times the time of all logits with chunks of 2^21 to 2^25, and 107 to 226 MiB where all
# logits take 1,546: benchmarks/results/linear-loss-cpu.json. Not measured on a GPU.
CHUNK_LOGITS = 1 << 24

# exp(-1000) is 0 in every dtype, and 0 * -1000 is 0, which 0 * -inf is not.
_LOWEST = -1000.0


class Tokens(NamedTuple):
    """Tokens to score.

    Attributes:
        x: ``[…, D]`` hidden states; without a weight, ``[…, V]`` logits.
        labels: int64 ``[…]``.
        weight, bias: this rank's rows ``[V, D]`` and ``[V]`` of the last linear layer, or None.
    """

    x: torch.Tensor
    labels: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None


class Scoring(NamedTuple):
    """How tokens are scored; `spanwise.token_logprobs` describes the options.

    Attributes:
        mesh: ranks that share the vocabulary, with the same tokens.
    """

    temperature: float = 1.0
    softcap: float | None = None
    entropy: bool = False
    chunk: int | None = None
    mesh: DeviceMesh | None = None

    def check(self) -> None:
        """``ValueError`` for a number that is not usable, or a mesh of several axes."""
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite, got {self.temperature}")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap must be positive and finite, got {self.softcap}")
        if self.chunk is not None and (not isinstance(self.chunk, int) or self.chunk < 1):
            raise ValueError(f"chunk must be a positive number of tokens, got {self.chunk!r}")
        if self.mesh is not None and self.mesh.ndim != 1:
            axes = f"{self.mesh.ndim} ({self.mesh.mesh_dim_names})"
            raise ValueError(f"vocab_mesh must have one axis, got {axes}; pass one of them")


def score(tokens: Tokens, offset: torch.Tensor, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each label, and the entropy of each token's distribution.

    Args:
        offset: number of the first row of this rank's vocabulary, a scalar on the device.

    Returns:
        logprobs and entropies (zeros unless asked for) in the shape of the labels, float32 at least; 0 for ignored
        labels. All ranks of the mesh get the same, and the whole gradient of hidden states.

    Raises:
        NotImplementedError: in a backward with ``create_graph=True``.
        spanwise.ExchangeError: a rank of the mesh is gone or too late.
    """
    x, labels, weight, bias = tokens
    x_ND = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    logprobs_N, entropies_N = _TokenScores.apply(x_ND, weight, bias, labels.flatten(), offset, *scoring)
    return logprobs_N.view(labels.shape), entropies_N.view(labels.shape)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        weight_VD: torch.Tensor | None,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        offset: torch.Tensor,
        *given: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scoring = ctx.scoring = Scoring(*given)
        entropy, mesh = scoring.entropy, scoring.mesh
        ctx.operand_dtype, ctx.dtype = _dtypes(x_ND, weight_VD, bias_V)
        with torch.autocast(x_ND.device.type, enabled=False):
            weight, bias = _operands(weight_VD, bias_V, ctx.operand_dtype, ctx.dtype)
            # Largest logit; with z = logit - largest: sum of exp(z); the label's logit; minus the sum of exp(z) z.
            top_N, sum_N, picked_N, spread_N = (x_ND.new_empty(len(x_ND), dtype=ctx.dtype) for _ in range(4))
            for part in _chunks(x_ND, weight, scoring):
                h = _without_ignored(x_ND[part], labels_N[part], ctx.operand_dtype)
                z_CV = _logits(h, weight, bias, ctx.dtype, scoring)
                picked_N[part] = _pick(z_CV, labels_N[part] - offset)
                top_N[part] = _top(z_CV)
                z_CV.sub_(_finite(top_N[part]))
                if entropy:
                    e_CV = z_CV.exp()
                    sum_N[part] = e_CV.sum(-1)
                    spread_N[part] = e_CV.mul_(z_CV.clamp_(min=_LOWEST)).sum(-1).neg_()
                else:
                    sum_N[part] = z_CV.exp_().sum(-1)
                del z_CV
            if mesh is not None:
                top_N, sum_N, picked_N, spread_N = _join(top_N, sum_N, picked_N, spread_N, entropy, mesh)
            ignored = labels_N == IGNORE_INDEX
            log_sum_N = sum_N.log()
            logprobs = (picked_N - top_N - log_sum_N).masked_fill_(ignored, 0)
            entropies = (spread_N / sum_N + log_sum_N).masked_fill_(ignored, 0) if entropy else torch.zeros_like(top_N)
        ctx.save_for_backward(x_ND, weight_VD, bias_V, labels_N, offset, top_N, log_sum_N, entropies)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "second derivatives through token_logprobs and linear_cross_entropy are not supported; call backward "
                "without create_graph=True"
            )
        scoring = ctx.scoring
        temperature, softcap, entropy, _, mesh = scoring
        x_ND, weight_VD, bias_V, labels_N, offset, top_N, log_sum_N, entropies = ctx.saved_tensors
        with torch.autocast(x_ND.device.type, enabled=False):
            weight, bias = _operands(weight_VD, bias_V, ctx.operand_dtype, ctx.dtype)
            ignored_N = labels_N == IGNORE_INDEX
            g_N, ge_N = (g.to(ctx.dtype).masked_fill(ignored_N, 0) for g in grads)
            need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
            # Hidden states are the same on all ranks of the mesh; their gradient is a sum over these, in float32.
            summed = mesh is not None and weight is not None
            grad_x = torch.empty_like(x_ND, dtype=ctx.dtype if summed else x_ND.dtype) if need_x else None
            grad_weight = torch.zeros_like(weight_VD, dtype=ctx.dtype) if need_weight else None
            grad_bias = torch.zeros_like(bias_V, dtype=ctx.dtype) if need_bias else None
            for part in _chunks(x_ND, weight, scoring):
                h = _without_ignored(x_ND[part], labels_N[part], ctx.operand_dtype)
                z_CV = _logits(h, weight, bias, ctx.dtype, scoring)
                slope = None if softcap is None else (z_CV * (temperature / softcap)).square_().neg_().add_(1)
                z_CV.sub_(_finite(top_N[part])).sub_(log_sum_N[part].unsqueeze(-1))  # log-probabilities
                g, ge = g_N[part].unsqueeze(-1), ge_N[part].unsqueeze(-1)
                if entropy:
                    p_CV = z_CV.exp()
                    d_CV = z_CV.clamp_(min=_LOWEST).add_(entropies[part].unsqueeze(-1)).mul_(ge).add_(g).mul_(p_CV)
                    d_CV.neg_()
                    del p_CV
                else:
                    d_CV = z_CV.exp_().mul_(-g)
                _add_at_labels(d_CV, labels_N[part] - offset, g)
                if slope is not None:
                    d_CV.mul_(slope)
                if temperature != 1:
                    d_CV.div_(temperature)
                if grad_bias is not None:
                    grad_bias += d_CV.sum(0)
                d_CV = d_CV.to(ctx.operand_dtype)
                if grad_x is not None:
                    grad_x[part] = d_CV if weight is None else _product(d_CV, weight, ctx.dtype)
                if grad_weight is not None:
                    _add_product(grad_weight, d_CV.t(), h)
                del z_CV, d_CV, slope
            if grad_x is not None and summed:
                grad_x = failure.all_reduce(grad_x, "sum", mesh, "the gradient of hidden states")
        return (*_as_given((grad_x, grad_weight, grad_bias), (x_ND, weight_VD, bias_V)), *[None] * 7)


def _dtypes(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes of the operands of products, and of everything else: float32 at least.

    A CUDA device multiplies bfloat16 (its own, or autocast's) into float32 sums without a copy in float32. Elsewhere
    the operands are float32, too, so that no product is rounded.
    """
    dtype = torch.float32
    for given in (x, *others):
        dtype = dtype if given is None else torch.promote_types(dtype, given.dtype)
    weight = others[0]
    if weight is None or x.device.type != "cuda" or dtype != torch.float32:
        return dtype, dtype
    if torch.is_autocast_enabled("cuda"):
        low = torch.get_autocast_dtype("cuda") == torch.bfloat16
    else:
        low = x.dtype == weight.dtype == torch.bfloat16
    return (torch.bfloat16 if low else dtype), dtype


def _operands(
    weight: torch.Tensor | None, bias: torch.Tensor | None, operand_dtype: torch.dtype, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (
        None if weight is None else weight.to(operand_dtype),
        None if bias is None else bias.to(dtype),
    )


def _as_given(
    grads: tuple[torch.Tensor | None, ...], inputs: tuple[torch.Tensor | None, ...]
) -> list[torch.Tensor | None]:
    return [None if g is None or given is None else g.to(given.dtype) for g, given in zip(grads, inputs, strict=True)]


def _chunks(x_ND: torch.Tensor, weight: torch.Tensor | None, scoring: Scoring) -> Iterator[slice]:
    length, vocab = len(x_ND), x_ND.shape[-1] if weight is None else weight.shape[0]
    chunk = scoring.chunk or max(1, CHUNK_LOGITS // max(1, vocab))
    for start in range(0, length, chunk):
        yield slice(start, min(start + chunk, length))


def _without_ignored(x: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor of `x` in which rows of ignored labels are 0: what padding holds, NaN included, is never read."""
    return x.masked_fill((labels == IGNORE_INDEX).unsqueeze(-1), 0).to(dtype)


def _logits(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype, scoring: Scoring
) -> torch.Tensor:
    """A chunk's logits ``[C, V]``, in a tensor that may be written to."""
    z = x if weight is None else _product(x, weight.t(), dtype)
    if bias is not None:
        z.add_(bias)
    if scoring.softcap is not None:
        z.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    return z if scoring.temperature == 1 else z.div_(scoring.temperature)


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return a @ b if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(_product(a, b, total.dtype))


def _finite(top_C: torch.Tensor) -> torch.Tensor:
    """`top_C` as a column, 0 where every logit of this rank is -inf, for a difference that is not NaN."""
    return top_C.masked_fill(top_C == -math.inf, 0).unsqueeze(-1)


def _top(z_CV: torch.Tensor) -> torch.Tensor:
    # A rank may have no row of the vocabulary.
    return z_CV.amax(-1) if z_CV.shape[-1] else z_CV.new_full(z_CV.shape[:1], -math.inf)


def _own(z_CV: torch.Tensor, index_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices as a column inside ``[0, V)``, and which of them were."""
    vocab = z_CV.shape[-1]
    return index_C.clamp(0, vocab - 1).unsqueeze(-1), ((index_C >= 0) & (index_C < vocab)).unsqueeze(-1)


def _pick(z_CV: torch.Tensor, index_C: torch.Tensor) -> torch.Tensor:
    """The label's logit, or -inf where another rank has it."""
    if not z_CV.shape[-1]:
        return _top(z_CV)
    index, own = _own(z_CV, index_C)
    return z_CV.gather(1, index).masked_fill_(~own, -math.inf).squeeze(-1)


def _add_at_labels(d_CV: torch.Tensor, index_C: torch.Tensor, g: torch.Tensor) -> None:
    if d_CV.shape[-1]:
        index, own = _own(d_CV, index_C)
        d_CV.scatter_add_(1, index, g * own)


def _join(
    top_N: torch.Tensor,
    sum_N: torch.Tensor,
    picked_N: torch.Tensor,
    spread_N: torch.Tensor,
    entropy: bool,
    mesh: DeviceMesh,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four statistics of the whole vocabulary from those of each rank's rows."""
    both = failure.all_reduce(torch.stack([top_N, picked_N]), "max", mesh, "the largest logits")
    top, picked = both.unbind()
    shift = (top_N - top).clamp(min=_LOWEST)  # both -inf: NaN, as one device has it
    share = shift.exp()
    sums = [sum_N * share]
    if entropy:
        sums.append(share * (spread_N - sum_N * shift))
    joined = failure.all_reduce(torch.stack(sums), "sum", mesh, "sums of exponentials")
    return top, joined[0], picked, joined[1] if entropy else spread_N
