"""Every causal language model and every model of images and text of transformers, made small, on two ranks.

    python -m tests.integrations.transformers.every_model  # writes benchmarks/results/huggingface-models.json

Each is trained on batches of several documents and compared with one forward a document: those of text on one packed
batch, those of images on packed and padded ones, with pixels of images that go through the model's own encoder. The
result says for each model type whether it is exact, refused (and why), or could not be made small by `tiny.py`.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
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
from tests.integrations.transformers import images, tiny

LENGTHS = (23, 41, 7, 30)
BESIDE_IMAGES = (22, 31, 17)  # tokens of text of three documents
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "huggingface-models.json"


def _examined(make: Callable[[], Any], describe: Callable[[Any], Any]) -> dict[str, Any]:
    """What becomes of the model that `make` makes.

    Args:
        describe: of the model, its batches by name and a function that gives the reference for a kind of attention.
    """
    status = "not made"
    try:
        torch.manual_seed(0)
        model = make()
        status = "refused"
        tiny.train(model, {}, act=lambda *_: None)
        status = "not made"
        batches, reference = describe(model)
        want = reference("eager")
    except Exception as error:
        return _failure(error, status)
    rows = {form: _compared(model, batch, want, reference) for form, batch in batches.items()}
    order = ("differs", "failed", "exact", "refused")
    _, row = min(rows.items(), key=lambda item: (order.index(item[1]["status"]), -item[1].get("gradient_error", 0)))
    others = [(form, other) for form, other in rows.items() if other["status"] != row["status"]]
    return row | {f"{form} {other['status']}": other.get("text", "") for form, other in others}


def _failure(error: Exception, status: str) -> dict[str, Any]:
    if status == "refused":
        return {"status": status if isinstance(error, ValueError) else "failed", "text": f"{error}"}
    return {"status": status, "text": " ".join(f"{type(error).__name__}: {error}".split())[:300]}


def _compared(model: Any, batch: dict[str, Any], want: Any, reference: Callable[[str], Any]) -> dict[str, Any]:
    try:
        hf.make_plan(batch, model.config, 2)
        results = tiny.train(model, batch)
    except Exception as error:
        return _failure(error, "refused")
    loss, gradient, name = tiny.errors(tiny.mean_over_ranks(results), want)
    found = {"status": "exact", "loss_error": loss, "gradient_error": gradient}
    if loss <= 3e-6 and gradient <= 1e-5:
        return found
    # Some small models amplify rounding: so much does transformers' own SDPA differ from eager attention.
    found["rounding"] = tiny.errors(reference("sdpa"), want)[1]
    exact = loss <= 3e-6 and gradient <= 2 * found["rounding"]
    return found | {"status": "exact" if exact else "differs", "text": f"gradient of {name}"}


def _of_text(kind: str) -> dict[str, Any]:
    """One type of causal language models; its text model, where it has encoders of images."""
    documents = tiny.documents_of(LENGTHS)

    def make() -> Any:
        config = tiny.small_config(kind)
        if kind in WITH_IMAGES and type(config.get_text_config()) in MODEL_FOR_CAUSAL_LM_MAPPING:
            config = config.get_text_config()
        cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        parts = [config, *(getattr(config, name) for name in config.sub_configs)]
        config = next((part for part in parts if type(part) is cls.config_class), config)
        config._attn_implementation = "eager"
        return tiny.randomized(cls._from_config(config).float().train())

    batches = {"packed": tiny.packed(documents)}
    return _examined(make, lambda model: (batches, lambda kind: tiny.reference(model, documents, attention=kind)))


def _with_images(kind: str) -> dict[str, Any]:
    """One type of models of images and text."""

    def describe(model: Any) -> Any:
        tokens = images.tokens_of(kind, model)
        held = (True, kind in images.ALWAYS, True)
        lengths = tuple(n + tokens * image for n, image in zip(BESIDE_IMAGES, held, strict=True))
        documents = images.documents_of(lengths, held, tokens)
        seen = {seed: images.reference(kind, model, documents, seed)[0] for seed in (3, 4)}
        if kind not in images.OF_TEXT and abs(seen[3] / seen[4] - 1) < 1e-6:
            raise ValueError("its loss does not depend on the images")
        batches = {form: images.batch_of(kind, documents, form, model) for form in ("packed", "left", "right")}
        return batches, lambda attention: images.reference(kind, model, documents, attention=attention)

    return _examined(lambda: images.model_of(kind), describe)


EXAMINE = {"models": _of_text, "with_images": _with_images}


def main(named: list[str]) -> None:
    """Examine the named model types; all, if there are none, and write down what became of them."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    start, versions = time.time(), {"transformers": transformers.__version__, "torch": torch.__version__}
    result: dict[str, Any] = {"versions": versions, "ranks": 2, "lengths": LENGTHS}
    for name, known in (("models", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), ("with_images", WITH_IMAGES)):
        rows = result[name] = {}
        for kind in sorted(k for k in known if k in (named or known)):
            rows[kind] = EXAMINE[name](kind)
            print(f"{name:12s} {kind:28s}", *rows[kind].values(), flush=True)
    if not named:
        RESULTS.write_text(json.dumps(result | {"seconds": time.time() - start}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
