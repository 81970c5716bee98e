"""Every causal language model of transformers, made small, on two ranks.

    python -m tests.integrations.transformers.every_model  # writes benchmarks/results/huggingface-models.json

Each is trained on a packed batch of several documents and compared with one forward a document. The result says for
each model type whether it is exact, refused (and why), or could not be made small by `tiny.py`.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as WITH_IMAGES,
)

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import tiny

LENGTHS = (23, 41, 7, 30)
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "huggingface-models.json"


def _made(kind: str) -> Any:
    """A model of a type; its text model, where it has encoders of images."""
    torch.manual_seed(0)
    config = tiny.small_config(kind)
    if kind in WITH_IMAGES and type(config.get_text_config()) in MODEL_FOR_CAUSAL_LM_MAPPING:
        config = config.get_text_config()
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    parts = [config, *(getattr(config, name) for name in config.sub_configs)]
    config = next((part for part in parts if type(part) is cls.config_class), config)
    config._attn_implementation = "eager"
    return tiny.randomized(cls._from_config(config).float().train())


def examine(kind: str) -> dict[str, Any]:
    """What becomes of a type of causal language models."""
    documents, status = tiny.documents_of(LENGTHS), "not made"
    try:
        model = _made(kind)
        status = "refused"
        tiny.train(model, {}, act=lambda *_: None)
        status = "not made"
        want = tiny.reference(model, documents)
        status = "refused"
        hf.make_plan(tiny.packed(documents), model.config, 2)
        results = tiny.train(model, tiny.packed(documents))
    except Exception as error:
        if status == "refused":
            return {"status": status if isinstance(error, ValueError) else "failed", "text": f"{error}"}
        return {"status": status, "text": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    loss, gradient, name = tiny.errors(tiny.mean_over_ranks(results), want)
    found = {"status": "exact", "loss_error": loss, "gradient_error": gradient}
    if loss <= 3e-6 and gradient <= 1e-5:
        return found
    # Some small models amplify rounding: so much does transformers' own SDPA differ from eager attention.
    found["rounding"] = tiny.errors(tiny.reference(model, documents, attention="sdpa"), want)[1]
    exact = loss <= 3e-6 and gradient <= 2 * found["rounding"]
    return found | {"status": "exact" if exact else "differs", "text": f"gradient of {name}"}


def main(named: list[str]) -> None:
    """Examine the named model types; all, if there are none, and write down what became of them."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    start, rows = time.time(), {}
    for kind in named or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows[kind] = examine(kind)
        print(f"{kind:28s}", *rows[kind].values(), flush=True)
    if not named:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        result = {"versions": versions, "ranks": 2, "lengths": LENGTHS, "models": rows, "seconds": time.time() - start}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
