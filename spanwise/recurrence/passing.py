"""The states of a gated recurrence, passed through the runs of all ranks.

    runs that open documents, maps of middle runs -> | whole documents | -> compose -> middle and last runs

Maps travel between the arrows. A run acts on the state as S -> A S + B. Ranks send B of runs that open documents, and
both of middle runs, which are computed once for their map and again from the state that enters them. Everything is
differentiable, so the backward is the mirror image: gradients of maps travel the other way beside whole documents.
"""

# R rows of a shard, H heads, K key dim, V value dim, d dims of a decay, P runs, F features of a map

from __future__ import annotations

import torch
import torch.nn.functional as F

from spanwise import _torch
from spanwise.attention.compare import Compared
from spanwise.attention.executor import Link, bring
from spanwise.recurrence import _ops
from spanwise.recurrence.route import ChunkTable, RecurrenceRoute

Tensor = torch.Tensor


def passed(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, route: RecurrenceRoute, scale: float,
    label: str, call: Compared | None,
) -> Tensor:  # fmt: skip
    """Outputs ``[R, H, V]`` of a gated recurrence.

    Args:
        q, k: ``[R, h, K]``; v ``[R, H, V]``; log_decay ``[R, H, d]``; beta ``[R, H]`` or None; float32 at least.
        label: names the transfer in errors.
        call: the layer, if it is compared.
    """
    state, dense = (log_decay.shape[1], k.shape[2], v.shape[2]), beta is not None

    def run(table: ChunkTable, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        before = v.new_zeros(table.order.shape[0], *state) if before is None else before
        return _ops.run(q, k, v, log_decay, beta, before, table.tokens, table.order, table.counts, scale)

    if not route.apart:
        return run(route.whole)[0]
    assert route.mesh is not None
    out, opened = run(route.first)
    factors = state[0] * state[1] ** 2 if dense else log_decay.shape[1:].numel()
    own = F.pad(opened.flatten(1), (factors, 0))  # of the first map of a document A is not read
    if not _is_empty(route.middle):
        own = own + _maps(q, k, v, log_decay, beta, route)
    link = Link(_torch.group_name(route.mesh.get_group()), route.mesh.size(), label, call)
    arriving = bring(own, [route.step], link)
    if not _is_empty(route.whole):
        out = out + run(route.whole)[0]
    rows = torch.cat([own, *arriving])
    read = route.chain, route.counts, route.reads, route.read_from, route.read_counts
    return out + run(route.rest, _ops.compose(rows, *read, *state, dense))[0]


def _is_empty(table: ChunkTable) -> bool:
    """Whether there is nothing to compute; compiled code does not know."""
    return not torch.compiler.is_compiling() and table.tokens.shape[0] == 0


def _maps(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, route: RecurrenceRoute) -> Tensor:
    """Maps ``[P, F]`` of runs in the middle of documents; B of others is 0."""
    table, number, heads = route.middle, route.first.order.shape[0], v.shape[1]
    keys, values = k.shape[2], v.shape[2]
    cut, before = (table.tokens, table.order, table.counts, 1.0), v.new_zeros(number, heads, keys, values)
    if beta is None:
        b = _ops.run(q, k, v, log_decay, None, before, *cut)[1]
        decay = log_decay.double()  # a run has 100,000s of tokens, and float32 would lose 5 digits of their sum
        sums = decay.new_zeros(number + 1, *decay.shape[1:]).index_add(0, route.through, decay)
        return torch.cat([sums[:-1].exp().to(b.dtype).flatten(1), b.flatten(1)], dim=1)
    # The columns of A are states that begin as the identity and get no values.
    columns = torch.eye(keys, dtype=v.dtype, device=v.device).expand(*before.shape[:2], -1, -1)
    wide, both = F.pad(v, (0, keys)), torch.cat([before, columns], dim=-1)
    after = _ops.run(q, k, wide, log_decay, beta, both, *cut)[1]
    return torch.cat([after[..., values:].flatten(1), after[..., :values].flatten(1)], dim=1)
