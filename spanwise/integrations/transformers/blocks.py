"""Tokens that read each other in both directions beside causal attention: of images, and of prefixes.

The rules are those of the models' own code in transformers 5.23.
"""

# N tokens that are kept

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

import spanwise
from spanwise.integrations.transformers.documents import Batch, Documents, of_tokens

BIDIRECTIONAL, OF_IMAGES = "use_bidirectional_attention", "vision"  # of text configs; a value: inside of images


@dataclasses.dataclass(frozen=True)
class Rule:
    """Which tokens of a model read each other.

    Attributes:
        argument: of the model's forward; marks tokens.
        marks: its values for tokens that read each other.
        runs: whether they do inside of each run of marked tokens, or all of a document.
        windowed: whether windows of sliding layers end such reading on the left.
        sliding_alone: whether full layers stay causal.
        needed: whether a batch without the argument is an error.
        when: an attribute of the text config, and its values for which the rule holds.
    """

    argument: str
    marks: tuple[int, ...]
    runs: bool
    windowed: bool = False
    sliding_alone: bool = False
    needed: bool = False
    when: tuple[str, tuple[Any, ...]] = (BIDIRECTIONAL, (None, False))


_VISION = (BIDIRECTIONAL, (OF_IMAGES,))
_GEMMA3 = Rule("token_type_ids", (1,), runs=True, windowed=True)
_RULES = {
    "gemma3": _GEMMA3,
    "shieldgemma2": _GEMMA3,
    "gemma4": Rule("mm_token_type_ids", (1, 2), runs=True, windowed=True, sliding_alone=True, when=_VISION),
    "gemma4_unified": Rule("mm_token_type_ids", (1, 2), runs=True, when=_VISION),
    # Without marks its SDPA attention is not causal at all, and its eager attention is.
    "paligemma": Rule("token_type_ids", (0,), runs=False, needed=True, when=(BIDIRECTIONAL, (None, False, True))),
    "molmo2": Rule("mm_token_type_ids", (1,), runs=False),
    "hrm_text": Rule("token_type_ids", (1,), runs=False, when=("prefix_lm", (True,))),
}


def rule_of(config: Any) -> Rule | None:
    """The rule of a model's config; None where no tokens read each other in both directions."""
    rule = _RULES.get(getattr(config, "model_type", ""))
    return rule if rule and getattr(config.get_text_config(), rule.when[0], None) in rule.when[1] else None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of tokens of a batch that read each other.

    Attributes:
        rule: of the model.
        starts, ends: int64 ``[num_runs]``, runs of marked tokens.
        block: int64 ``[num_runs]``, the block that each run belongs to, ascending.
    """

    rule: Rule
    starts: np.ndarray
    ends: np.ndarray
    block: np.ndarray

    def added_to(self, mask: spanwise.SpanMask, window: int | None) -> spanwise.SpanMask:
        """`mask` of layers with this sliding window, or none, where the tokens of each block also read each other."""
        if len(self.starts) == 0 or (window is None and self.rule.sliding_alone):
            return mask
        length, most = mask.q_len, int(np.bincount(self.block).max())
        start, end = np.zeros((2, most, length), dtype=np.int64)
        for first, last, block in zip(self.starts, self.ends, self.block, strict=True):
            runs = np.flatnonzero(self.block == block)
            start[: len(runs), first:last] = self.starts[runs, None]
            end[: len(runs), first:last] = self.ends[runs, None]
        blocks = spanwise.SpanMask(start, end, mask.kv_len)
        if self.rule.windowed and window is not None:
            blocks &= spanwise.SpanMask.sliding_window(length, window - 1, length)
        return mask | blocks


def find_blocks(batch: Batch, config: Any, documents: Documents) -> Blocks | None:
    """The blocks of a batch; None where the model has no rule for them, or the batch does not mark its tokens.

    Raises:
        ValueError: a batch without marks that the model needs, or with images of a model that has no rule here.
    """
    rule, name = rule_of(config), type(config).__name__
    if rule is None:  # a text model alone may have the config of one that reads images
        marks, reads = batch.get("mm_token_type_ids"), getattr(config.get_text_config(), BIDIRECTIONAL, None)
        if marks is not None and reads == OF_IMAGES and bool(((marks == 1) | (marks == 2)).any()):
            raise ValueError(f"tokens of an image or video read each other by {name}; known are {', '.join(_RULES)}")
        return None
    given = batch.get(rule.argument)
    if documents.tree is not None:
        raise ValueError(f"tokens of a model with {name} may read each other, which no tree has a mask for")
    if given is None:
        if rule.needed:
            raise ValueError(f"{name} trains on batches with {rule.argument} [B, S], as its processor makes them")
        return None
    of_tokens(rule.argument, given, (documents.rows, documents.length))
    marked = torch.isin(documents.flat(given)[0].cpu(), torch.tensor(rule.marks)).numpy()
    document = np.repeat(np.arange(1, len(documents.cu_seqlens)), np.diff(documents.cu_seqlens))
    run = np.where(marked, document, 0)  # a run ends with its document
    edges = np.concatenate([[0], np.flatnonzero(np.diff(run)) + 1, [len(run)]])
    within = run[edges[:-1]] > 0
    starts, ends = edges[:-1][within], edges[1:][within]
    block = np.arange(len(starts)) if rule.runs else np.unique(run[starts], return_inverse=True)[1]
    return Blocks(rule, starts, ends, block)
