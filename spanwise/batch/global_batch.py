"""GlobalBatch: the documents of one step of all ranks, their plan, and what each rank reads of them.

    DocumentOrder -> GlobalBatches -> GlobalBatch (pieces, plan) -> load(source, rank) -> one rank's tensors

Every rank makes the same plan from lengths alone, and then reads its own tokens only. Where one of its runs ends inside
a document, it also reads the next token: the label of the run's last one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import numpy as np
import torch

from spanwise.batch.token_scores import IGNORE_INDEX
from spanwise.layouts.runs import ragged_arange
from spanwise.masks.arrays import Int64
from spanwise.planning.plan import Plan


class DocumentSource(Protocol):
    """Documents with random access: ``source[document][start:stop]`` are tokens, as integers.

    For example a list of arrays or tensors, or an object that reads a file when it is sliced.
    """

    def __getitem__(self, document: int, /) -> Any: ...


@dataclasses.dataclass(frozen=True, eq=False)
class GlobalBatch:
    """The documents of one step, end to end, with one plan over all ranks. Made by `GlobalBatches`.

    Attributes:
        pieces: int64 ``[n, 3]`` of (document, start, stop), read-only. Each counts as a document: where a document was
            cut, masks, positions and labels do not reach across the cut.
        plan: of all ranks, over the tokens of the pieces and then the padding.
        next_position: where the next batch begins, in tokens of the documents' order.

    >>> import numpy as np, spanwise
    >>> batches = spanwise.GlobalBatches([6, 3, 5], num_ranks=2, tokens_per_rank=5, balancer="head_tail")
    >>> batch = batches.at(0)  # the third document does not fit
    >>> batch.pieces.tolist(), batch.num_valid, batch.plan.runs(0).tolist()
    ([[0, 0, 6], [1, 0, 3]], 7, [[0, 3], [7, 9]])
    >>> batch.reads(0).tolist()  # document, start, stop; token 3 of document 0 is the label of token 2
    [[0, 0, 4], [1, 1, 3]]
    >>> source = [np.arange(10, 16), np.arange(20, 23), np.arange(30, 35)]
    >>> mine = batch.load(source, rank=0)
    >>> mine["input_ids"].tolist(), mine["labels"].tolist(), mine["position_ids"].tolist()
    ([[10, 11, 12, 21, 22]], [[11, 12, 13, 22, -100]], [[0, 1, 2, 1, 2]])
    """

    pieces: Int64
    plan: Plan
    next_position: int

    @functools.cached_property
    def cu_seqlens(self) -> Int64:
        """Offsets of the pieces, int64 ``[n + 1]``; padding follows the last."""
        return np.concatenate(([0], np.cumsum(self.pieces[:, 2] - self.pieces[:, 1])))

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int(self.cu_seqlens[-1])

    @property
    def num_valid(self) -> int:
        """Number of labels on all ranks: one for each token except the last of a piece; for `cross_entropy`."""
        return self.num_tokens - len(self.pieces)

    def reads(self, rank: int) -> Int64:
        """The tokens that a rank reads: int64 ``[m, 3]`` of (document, start, stop), labels behind runs included."""
        document, start, stop, more, _ = self._parts(rank).T
        return np.column_stack([document, start, stop + more])

    def load(self, source: DocumentSource, rank: int) -> dict[str, torch.Tensor]:
        """A rank's tensors, from the tokens of `reads` and no others.

        Args:
            source: ``source[document][start:stop]`` are tokens: integers, a numpy array or a tensor.

        Returns:
            ``"input_ids"``, ``"labels"`` and ``"position_ids"``, int64 ``[1, T]`` on the CPU, as `shard_batch` makes
            them: the label of a token is the next one of its piece, −100 at the end; positions count from the piece's
            start. Padding has input 0, label −100 and position 0.

        Raises:
            ValueError: the source has fewer tokens of a document than its length, or tokens that are no integers.
        """
        ids, labels, positions = np.zeros((3, self.plan.layout.num_tokens(rank)), dtype=np.int64)
        labels[:] = IGNORE_INDEX
        at = 0
        for document, start, stop, more, first in self._parts(rank).tolist():
            tokens = np.asarray(source[document][start : stop + more])
            if tokens.shape != (stop + more - start,):
                raise ValueError(
                    f"source[{document}][{start}:{stop + more}] has shape {tokens.shape}: not the documents of lengths"
                )
            if tokens.dtype.kind not in "iu":
                raise ValueError(f"tokens must be integers, got {tokens.dtype} from source[{document}]")
            end = at + stop - start
            ids[at:end] = tokens[: stop - start]
            labels[at : at + len(tokens) - 1] = tokens[1:]
            positions[at:end] = np.arange(start - first, stop - first)
            at = end
        tensors = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(x.copy())[None] for name, x in tensors.items()}

    def _parts(self, rank: int) -> Int64:
        """A rank's tokens in shard order, int64 ``[m, 5]``.

        Document, start and stop in it, whether the token behind them is a label, start of the piece in its document.
        """
        runs, ends = self.plan.runs(rank), self.cu_seqlens
        runs = np.minimum(runs, ends[-1])  # padding lies behind the last piece, in the rank's last run
        runs = runs[runs[:, 0] < runs[:, 1]]
        first = np.searchsorted(ends, runs[:, 0], side="right") - 1
        last = np.searchsorted(ends, runs[:, 1], side="left")
        piece = ragged_arange(np.column_stack([first, last]))
        run = np.repeat(np.arange(len(runs)), last - first)
        begin, finish = np.maximum(runs[run, 0], ends[piece]), np.minimum(runs[run, 1], ends[piece + 1])
        document, origin, _ = self.pieces[piece].T
        shift = origin - ends[piece]
        return np.column_stack([document, begin + shift, finish + shift, finish < ends[piece + 1], origin])
