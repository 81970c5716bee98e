"""Write the table of models in guides/huggingface.md from benchmarks/results/huggingface-models.json.

python docs/make_models.py
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from pages import DOCS, filled

RESULTS = DOCS.parent / "benchmarks" / "results" / "huggingface-models.json"
# Beginnings of what refusals say, after the model's name.
_REASONS = {
    "carries a state along the sequence": "a state that is not known here",
    "layers of type": "layers of another kind",
    "does not take its attention from AttentionInterface": "no `AttentionInterface`",
    "takes no position_ids": "no `position_ids`",
    "is not causal": "not causal",
    "an encoder and a decoder": "encoder and decoder",
    "rule of its own": "positions counted from padding",
    "a mask or a bias of its own": "a mask or bias of its own",
    "computes its loss itself": "a loss of its own",
    "asks for attention of": "a mask that its config does not tell",
    "logits must be": "logits of another shape",
}


def _reason(text: str) -> str:
    for part, reason in _REASONS.items():
        if part in text:
            return reason
    return re.sub(r"^\w+ ", "", text)[:60]


def models() -> str:
    """What became of each model type."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    by_status: dict[str, list[str]] = defaultdict(list)
    refused: dict[str, list[str]] = defaultdict(list)
    for kind, row in found["models"].items():
        by_status[row["status"]].append(kind)
        if row["status"] == "refused":
            refused[_reason(row["text"])].append(kind)
    lines = [
        f"Of the {len(found['models'])} causal language models of transformers {found['versions']['transformers']}, "
        f"each made small and random, on two ranks:",
        f"- **exact ({len(by_status['exact'])})**: {', '.join(by_status['exact'])}",
    ]
    lines += [
        f"- **refused, {reason} ({len(kinds)})**: {', '.join(kinds)}" for reason, kinds in sorted(refused.items())
    ]
    others = {"differs": "not exact", "failed": "failed", "not made": "not tried, because no small config was made"}
    lines += [
        f"- **{say} ({len(by_status[s])})**: {', '.join(by_status[s])}" for s, say in others.items() if by_status[s]
    ]
    return "\n".join([lines[0], "", *lines[1:]])


def page(text: str) -> str:
    """guides/huggingface.md with its list made anew."""
    return filled(text, Path(__file__).name, {"models": models()})


if __name__ == "__main__":
    path = DOCS / "guides" / "huggingface.md"
    path.write_text(page(path.read_text()))
