"""A lower bound for the tokens that cross between hosts, beside which tests hold plans. Exact; pure."""

from __future__ import annotations

import numpy as np

from spanwise.layouts import traffic
from spanwise.layouts.problem import offsets_of_documents
from spanwise.masks.arrays import Float64, Int64
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.plan import Plan

# Prices of `_once_bound`: of a token, in mean work; of work, over that. Any are valid. For lognormal documents finer
# grids, of 15 and 8 values, gave at most 1 % more.
_TOKEN_PRICES, _WORK_PRICES = (0.05, 0.1, 0.15, 0.2, 0.3), (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)


def bound(plan: Plan, size: int) -> int:
    """Tokens that cross between hosts of `size` ranks at least, each counted once a host.

    Holds for every layout whose busiest rank has at most the work W of this plan's busiest rank. Only causal documents
    with more work than a host may have, C = W * size, add to it.

    Proof: order the k hosts that have rows of a document by their last row. The rows after the last row of host i are
    on the k - i hosts after it, so the c(i) rows up to it have the work of the document - (k - i) C or more. Host i
    reads the keys of all of these. The last host reads all keys, and all hosts together hold each once: so they receive
    ``sum of c(i), i < k`` or more. Contiguous parts, the last hosts full, receive as many. `_once_bound` also knows
    that hosts must hold tokens, where all documents are causal.
    """
    of, most = plan.mask(), float(plan.work().max()) * size
    total = 0.0
    for row in range(plan.batch_size):
        at = traffic.row_of(of, row)
        offsets = offsets_of_documents([of], at)
        length = np.diff(offsets).astype(np.float64)
        long = np.flatnonzero(length * (length + 1) / 2 > most)
        once = sum(document_bound(length[i], most) for i in long if _is_causal(of, at, offsets[i : i + 2]))
        if once and _is_causal(of, at, offsets):
            once = max(once, _once_bound(length, most, float(plan.layout.tokens_per_rank.min() * size)))
        total += once
    return int(total)


def document_bound(length: float, capacity: float) -> float:
    """The bound for one causal document; hosts have at most the work `capacity`."""
    work = length * (length + 1) / 2
    before = work - capacity * np.arange(1, np.ceil(work / capacity))
    rows = (np.sqrt(1 + 8 * before) - 1) / 2  # of this work together
    return float(np.ceil(rows - 1e-6).sum())


def _once_bound(length: Float64, work: float, tokens: float) -> float:
    """The bound for causal documents where a host has at most so much work, and at least so many tokens; once a host.

    A host with one document's tail must fill up with tokens of others, few of which are light. Proof: take any prices
    s, d with d <= work / tokens and s d <= 1. A part of a document with m rows of work w on one host weighs
    x = s (w - d m). The parts on a host weigh at most A = s (work - d tokens) together. Let g(x) = x below 0, 0 up to
    A, x - A beyond; then g of the parts on a host is at most 0 in sum. A host reads the keys before its last row. So
    all documents cross ``sum over all parts of (last row + g) - rows`` times or more. One document adds to that

    - min(0, x) or more if it weighs x <= A as a whole: with s d <= 1 splitting it never pays;
    - otherwise, in k parts by last row, ``sum of c(i), i < k, + v - Z`` or more. Z is the weight of its light rows,
      wherever they are, and v >= 0 that of the last j parts beyond j A, for the worst j: the rows after c(k - j) weigh
      at most v + j A. The sum is concave in v between values at which some c is 0, and there fewer parts are as good.
      So v = max(0, weight - k A), for each k.
    """
    best = 0.0
    for d in np.floor(np.array(_TOKEN_PRICES) * work / max(tokens, 1.0)):
        for s in np.array(_WORK_PRICES) / max(d, 1.0):
            weight, most = s * (length * (length + 1) / 2 - d * length), s * (work - d * tokens)
            found = np.minimum(weight[weight <= most], 0.0).sum()
            found += sum(_wide_bound(n, s, d, most) for n in length[weight > most])
            best = max(best, float(found))
    return best


def _wide_bound(rows: float, s: float, d: float, most: float) -> float:
    """The least of `_once_bound` for one document that weighs more than `most`."""
    heavy, light = s * (rows - d) * (rows - d + 1) / 2, s * d * (d - 1) / 2
    k = np.arange(1, np.ceil(heavy / most) + 1)[:, None]
    v = np.maximum(heavy - k * most, 0.0)
    after = (heavy - v - np.arange(1, len(k)) * most) / s  # what rows up to c weigh
    c = np.where(after > 0, d + (np.sqrt(1 + 8 * np.maximum(after, 0.0)) - 1) / 2, 0.0)
    return float(((c * (np.arange(1, len(k)) < k)).sum(axis=1) + v[:, 0]).min()) - light


def _is_causal(mask: SpanMask, row: int, offsets: Int64) -> bool:
    """Whether each row of these documents reads exactly the keys from the start of its document to itself."""
    first, last = int(offsets[0]), int(offsets[-1])
    start, end = mask.start[row, :, first:last], mask.end[row, :, first:last]
    of_document = np.repeat(offsets[:-1], np.diff(offsets))
    alone = (start[0] == of_document).all() and (end[0] == np.arange(first + 1, last + 1)).all()
    return bool(alone and (start[1:] == end[1:]).all())
