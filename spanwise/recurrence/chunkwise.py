"""One rank's chunks of a gated recurrence, without a loop over tokens: outputs, and states after them. Differentiable.

`_ops` calls `step` slab by slab, and autograd differentiates it.

Inside a chunk the recurrence is a few products of matrices; states pass from chunk to chunk, all runs and heads at
once. With S the state before a chunk, D[i, j] the decay from token j to token i, and tril the lower triangle:

    U = V                                                          linear
    U = (I + tril(β (K Kᵀ · D), -1))⁻¹ β (V - (decay · K) S)        delta rule
    out = (decay · Q) S + tril(Q Kᵀ · D) U
    S' = decay S + (decay to the end · K)ᵀ U

The delta rule's form is that of DeltaNet (Yang et al., arXiv 2406.06484) with decays (arXiv 2412.06464). Sums of log
decays run over exactly the tokens between j and i, so that nothing cancels: decays may be 0 and products may underflow,
but no exponent is positive.

Where a head has one value and a decay for each of its few keys, such as Mamba's channels, pairs of tokens outnumber the
states. There the states of all tokens are written out, one token of all chunks at a time, first from zeros. CPU seconds
on one core, forward and backward of 1,024 channels with 16 states, 256 tokens: 0.06, and 1.05 by pairs.
"""

# T tokens of a rank, h heads of q or k, H heads, K key dim, V value dim, d 1 or K: dims of a decay
# P runs, n chunks of C tokens

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


class Inputs(NamedTuple):
    """Tokens of a rank: q, k ``[T, h, K]``, v ``[T, H, V]``, log_decay ``[T, H, d]``, beta ``[T, H]``.

    h divides H: a head of q or k serves consecutive heads of v. `beta` is None for linear attention.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None = None

    @property
    def heads(self) -> int:
        """H."""
        return self.log_decay.shape[1]

    @property
    def by_tokens(self) -> bool:
        """Whether the states of all tokens are written out."""
        return self.beta is None and self.v.shape[-1] == 1

    @property
    def largest(self) -> int:
        """Elements of a chunk's largest tensor, over C and heads."""
        return self.k.shape[-1] * (1 if self.by_tokens else 16 if self.log_decay.shape[-1] > 1 else 4)

    def of(self, slab: Slab) -> Inputs:
        """Those of the chunks of a slab, ``[n, h, C, …]``."""
        q, k, v, log_decay, *beta = (taken(x, slab.tokens, self.heads) for x in self if x is not None)
        return Inputs(q, k, v, log_decay, *beta)


class Slab(NamedTuple):
    """Consecutive steps of runs: their chunks ``[n, C]``, and how many chunks each step has."""

    tokens: Tensor
    sizes: list[int]


# Elements of the largest tensor of a slab. CPU seconds on one core, 4,096 tokens, 8 heads of 64, forward and backward:
# gdn 0.35, kda 0.82; with 2**24 elements 0.52 and 1.31; with chunks of 32 tokens in place of 16 0.35 and 1.11.
_SLAB = 1 << 20


def slabs(tokens: Tensor, counts: Tensor, heads: int, dims: int) -> Iterator[tuple[int, int, list[Slab]]]:
    """Batches ``[first, stop)`` of the runs, by length, each with its slabs in order.

    Args:
        tokens, counts: of a `ChunkTable`.
        dims: elements of a chunk's largest tensor, over C.
    """
    steps: list[int] = counts.tolist()
    offsets = [sum(steps[:i]) for i in range(len(steps))]
    most = max(1, _SLAB // max(heads * tokens.shape[1] * dims, 1))
    for first in range(0, steps[0] if steps else 0, most):
        found: list[Slab] = []
        rows: list[Tensor] = []
        sizes: list[int] = []
        stop = min(first + most, steps[0])
        for offset, count in zip(offsets, steps, strict=True):
            size = min(count, stop) - first
            if size <= 0:
                break
            if sum(sizes) + size > most and sizes:
                found.append(Slab(torch.cat(rows), sizes))
                rows, sizes = [], []
            rows.append(tokens[offset + first : offset + first + size])
            sizes.append(size)
        yield first, stop, [*found, Slab(torch.cat(rows), sizes)]


def taken(x: Tensor, tokens: Tensor, heads: int) -> Tensor:
    """``[n, h, C, …]``, the tokens of chunks of `x` ``[T, h, …]``; zeros in places that no token fills.

    Heads that serve several of v are repeated, where there is more than one.
    """
    found = x.index_select(0, tokens.flatten().clamp(max=x.shape[0] - 1))
    empty = (tokens.flatten() == x.shape[0]).view(-1, *[1] * (x.dim() - 1))
    found = found.masked_fill_(empty, 0).unflatten(0, tokens.shape).transpose(1, 2)
    return found if found.shape[1] in (1, heads) else found.repeat_interleave(heads // found.shape[1], 1)


def put(out: Tensor, tokens: Tensor, chunks: Tensor) -> None:
    """Writes ``[n, H, C, …]`` to the tokens of `out` ``[T + 1, h, …]``, summed over heads that share one of `out`.

    The last row of `out` takes what is empty.
    """
    found = chunks.transpose(1, 2)
    if found.shape[2] != out.shape[1]:
        found = found.unflatten(2, (out.shape[1], -1)).sum(3)
    out.index_copy_(0, tokens.flatten(), found.flatten(0, 1))


def step(given: Inputs, sizes: list[int], state: Tensor, *, outputs: bool = True) -> tuple[Tensor, Tensor]:
    """Outputs ``[n, H, C, V]`` of the chunks of a slab, not scaled, and the states after them.

    Args:
        given: q, k ``[n, h, C, K]``, v ``[n, H, C, V]``, log_decay ``[n, H, C, d]``, beta ``[n, H, C]`` or None.
        sizes: of a `Slab`.
        state: ``[P, H, K, V]``, before the slab.
        outputs: False where the states alone are needed.
    """
    if given.by_tokens:
        return _by_tokens(given, sizes, state, outputs)
    q, k, v, g, beta = given
    since = g.cumsum(2).exp()  # decay from the chunk's start, with token i's own
    until = F.pad(g[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2).exp()  # from token i to the chunk's end
    k, q = (x.expand(*v.shape[:3], -1) for x in (k, q))
    products = _Products.apply(g, k, *([] if beta is None else [k]), *([q] if outputs else []))
    solved_k: list[Any] = [None] * len(sizes)
    if beta is not None:
        beta = beta.unsqueeze(-1)
        system = (beta * products[0]).tril(-1) + torch.eye(k.shape[2], dtype=k.dtype, device=k.device)
        right = beta * torch.cat([since * k, v], dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        left, v = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
        solved_k = list(left.split(sizes))
    # Not slices, whose gradients would each fill a whole tensor.
    entering, new, ended = [], [], []
    chunks = zip(v.split(sizes), (until * k).split(sizes), since[:, :, -1].split(sizes), solved_k, strict=True)
    for found, written, decay, left in chunks:
        ended.append(state[len(found) :])
        state = state[: len(found)]
        entering.append(state)
        new.append(found if left is None else found - left @ state)
        state = decay.unsqueeze(-1) * state + written.mT @ new[-1]
    after = torch.cat([state, *reversed(ended)])
    if not outputs:
        return after, after
    return (since * q) @ torch.cat(entering) + products[-1] @ torch.cat(new), after


class _Products(torch.autograd.Function):
    """``x Kᵀ · D`` ``[n, H, C, C]`` for several x ``[n, H, C, K]``, of log decays; 0 above the diagonal.

    By hand, because autograd would make more tensors ``[n, H, C, C, K]``.
    """

    @staticmethod
    def forward(ctx: Any, log_decay: Tensor, k: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        if not xs:
            return ()
        # A row of all chunks at a time, because torch's cumsum along a dim in the middle takes four times as long.
        size = log_decay.shape[2]
        pairs = log_decay.new_zeros(*log_decay.shape[:2], size, *log_decay.shape[2:])
        sums = torch.zeros_like(log_decay)  # from each token j to the row
        for row in range(size):
            sums[:, :, :row] += log_decay[:, :, row : row + 1]
            torch.exp(sums[:, :, : row + 1], out=pairs[:, :, row, : row + 1])
        if log_decay.shape[-1] == 1:
            found = tuple(x @ k.mT * pairs.squeeze(-1) for x in xs)
        else:
            decayed = pairs * k.unsqueeze(2)
            found = tuple((decayed @ x.unsqueeze(-1)).squeeze(-1) for x in xs)
        ctx.save_for_backward(pairs, k, *xs, *found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        pairs, k, *rest = ctx.saved_tensors
        d_k, d_xs, d_log = torch.zeros_like(k), [], torch.zeros_like(pairs)
        for d, x, found in zip(grads, rest[: len(grads)], rest[len(grads) :], strict=True):
            if pairs.shape[-1] == 1:
                decayed = d * pairs.squeeze(-1)
                d_xs.append(decayed @ k)
                d_k += decayed.mT @ x
                d_log += (d * found).unsqueeze(-1)
            else:
                sent = d.unsqueeze(-1) * x.unsqueeze(3) * pairs  # [i, j, K]
                d_xs.append((d.unsqueeze(3) @ (pairs * k.unsqueeze(2))).squeeze(3))
                d_k += sent.sum(2)
                d_log += sent * k.unsqueeze(2)
        d_decay, below = torch.zeros_like(d_log[:, :, 0]), torch.zeros_like(d_log[:, :, 0])
        for row in reversed(range(d_log.shape[2])):  # token l decays the pairs with j < l <= i
            below += d_log[:, :, row]
            d_decay[:, :, row] = below[:, :, :row].sum(2)
        return d_decay, d_k, *d_xs


def _by_tokens(given: Inputs, sizes: list[int], state: Tensor, outputs: bool) -> tuple[Tensor, Tensor]:
    q, k, v, g = (x.permute(2, 0, 1, 3).contiguous() for x in given[:4])  # [C, n, h, …]
    written, state = k * v, state[..., 0]
    decay = g.exp().expand_as(written)
    last = _Scan.apply(decay, written, torch.zeros_like(written[0]))[-1]  # from zeros
    entering, ended = [], []
    for found, through in zip(last.split(sizes), g.sum(0).exp().split(sizes), strict=True):
        ended.append(state[len(found) :])
        entering.append(state[: len(found)])
        state = torch.addcmul(found, through, entering[-1])
    after = torch.cat([state, *reversed(ended)]).unsqueeze(-1)
    if not outputs:
        return after, after
    out = (q * _Scan.apply(decay, written, torch.cat(entering))).sum(-1, keepdim=True)
    return out.permute(1, 2, 0, 3), after


class _Scan(torch.autograd.Function):
    """``S[i] = decay[i] S[i-1] + written[i]`` along the first dim, from a state before. By hand, to be in place."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, written: Tensor, before: Tensor) -> Tensor:
        after = written.clone()
        for i in range(len(after)):
            after[i].addcmul_(decay[i], after[i - 1] if i else before)
        ctx.save_for_backward(decay, after, before)
        return after

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (decay, after, before), grad = ctx.saved_tensors, grad.clone()
        for i in reversed(range(len(grad) - 1)):
            grad[i].addcmul_(decay[i + 1], grad[i + 1])
        d_decay = torch.empty_like(after)
        torch.mul(grad[1:], after[:-1], out=d_decay[1:])
        torch.mul(grad[0], before, out=d_decay[0])
        return d_decay, grad, decay[0] * grad[0]
