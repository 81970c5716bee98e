"""Write the lists of models in guides/huggingface.md from benchmarks/results/huggingface-models.json.

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
# Parts of what is said of a model that is refused or was not tried.
_REASONS = {
    "carries a state along the sequence": "an unknown kind of state",
    "layers of type": "unsupported layers",
    "picks keys in a way": "an unknown indexer",
    "does not take its attention from AttentionInterface": "no `AttentionInterface`",
    "takes no position_ids": "no `position_ids`",
    "is not causal": "not causal",
    "an encoder and a decoder": "encoder and decoder",
    "positions behind padding": "positions counted from padding",
    "a mask or a bias of its own": "its own mask or bias",
    "computes its loss itself": "a loss of its own",
    "asks for attention of": "a mask other than its config's",
    "logits must be": "logits of another shape",
    "reads the first token": "a pooler",
    "tells neither layer_types": "no layer types in its config",
    "gets cross_attention_states": "cross attention to images",
    "gets pixel_values": "images merged after the cut",
    "timm library": "its image encoder needs timm",
    "Unrecognized configuration": "does not read images",
    "hidden_size_per_layer_input": "reads the keys of another model",
    "producing a cache": "reads the keys of another model",
}
_SAY = {"refused": "refused", "differs": "not exact", "not made": "not tried"}


def _reason(text: str) -> str:
    for part, reason in _REASONS.items():
        if part in text:
            return reason
    return re.sub(r"^\w+ ", "", text)[:60]


def _listed(found: dict[str, dict[str, Any]], what: str, lead: str) -> str:
    """What became of each model type, after a sentence that says what was run."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for kind, row in found.items():
        said = _SAY.get(row["status"], row["status"])
        said += "" if said in ("exact", "failed") else f", {_reason(row['text'])}"
        said += "".join(f", {form}" for form in row if " " in form)  # the other batches
        kinds[said].append(kind)
    lines = [f"- **{said} ({len(kinds[said])})**: {', '.join(kinds[said])}" for said in sorted(kinds)]
    rounded = [
        f"{kind} {row['gradient_error']:.0e}"
        for kind, row in found.items()
        if row["status"] == "exact" and "rounding" in row
    ]
    rest = (
        f"Gradients of {', '.join(rounded)} differ by more than 1e-5, but by less than twice the difference between "
        f"transformers' SDPA and eager attention."
    )
    return "\n".join([f"Of the {len(found)} {what}, {lead}:", "", *lines, "", rest])


def lists() -> dict[str, str]:
    """The lists by the name of their block."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    version = f"of transformers {found['versions']['transformers']}"
    return {
        "models": _listed(
            found["models"],
            f"causal language models {version}",
            "small and random, on two ranks and a packed batch",
        ),
    }


def page(text: str) -> str:
    """guides/huggingface.md with its lists made anew."""
    return filled(text, Path(__file__).name, lists())


if __name__ == "__main__":
    path = DOCS / "guides" / "huggingface.md"
    path.write_text(page(path.read_text()))
