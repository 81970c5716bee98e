"""Models of text and images under context parallelism."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")


from spanwise.integrations import transformers as hf
from tests.integrations.transformers import images, tiny
from tests.ranks.harness import run_ranks

DOCUMENTS = images.documents_of((23, 41, 30), (True, False, True))


def _train(rank: int, mesh: Any, models: list[Any], batch: dict[str, Any]) -> Any:
    return tiny.step(hf.context_parallel(models[rank], mesh, block_size=4), batch)


@pytest.mark.parametrize("form", ["left", "right"])
@pytest.mark.parametrize("name", images.MODELS)
def test_padded(name: str, form: str) -> None:
    model = images.model_of(name)
    results = run_ranks(2, _train, tiny.copies(model, 2), images.batch_of(name, DOCUMENTS, form))
    tiny.check(results, images.reference(name, model, DOCUMENTS))


OTHERS = {
    "qwen2_vl": "rows of positions, as the model counts them for each document alone",
    "shieldgemma2": "the model of another type",
    "granite4_vision": "features for deeper layers, by layer",
    "instructblipvideo": "positions that its encoder would take for its own",
    "got_ocr2": "an encoder without AttentionInterface",
    "nemotron_h_omni": "a decoder with a head, and layers that carry a state",
}


@pytest.mark.parametrize("name", ["llava", "gemma3", "paligemma", *OTHERS])
def test_packed(name: str) -> None:
    model = images.model_of(name)
    documents = images.documents_of((29, 31, 25), (True, name in images.ALWAYS, True), images.tokens_of(name, model))
    results = run_ranks(3, _train, tiny.copies(model, 3), images.batch_of(name, documents, "packed", model))
    tiny.check(results, images.reference(name, model, documents))


@pytest.mark.parametrize("name", images.MODELS)
def test_text_alone(name: str) -> None:
    documents = images.documents_of((23, 41), (False, False))
    model = images.model_of(name)
    results = run_ranks(2, _train, tiny.copies(model, 2), images.batch_of(name, documents, "right"))
    tiny.check(results, images.reference(name, model, documents))


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_videos(name: str) -> None:
    documents, video = images.with_video(name, images.documents_of((30, 23), (False, False)))
    batch = tiny.padded(documents, "right")
    batch |= images.marks_of(name, batch["input_ids"]) | video
    model = images.model_of(name)
    alone = [images.marks_of(name, document[None]) for document in documents]
    alone[0] |= video
    want = tiny.reference(model, documents, alone)
    tiny.check(run_ranks(2, _train, tiny.copies(model, 2), batch), want)
    alone[0] |= {"pixel_values_videos": -video["pixel_values_videos"]}
    assert abs(tiny.reference(model, documents, alone)[0] - want[0]) > 1e-5  # the video counts


def test_packed_documents_need_positions_of_images() -> None:
    model = images.model_of("qwen2_vl")
    batch = images.batch_of("qwen2_vl", DOCUMENTS, "packed", model)
    del batch["position_ids"]
    with pytest.raises(ValueError, match=r"pass position_ids, \[3, B, S\]"):
        run_ranks(2, _train, tiny.copies(model, 2), batch)


def test_positions_that_start_anew_at_images() -> None:
    """HunYuan-VL's; an image would begin a document."""
    model = images.model_of("hunyuan_vl")
    documents = images.documents_of((29, 31), (True, False), images.tokens_of("hunyuan_vl", model))
    batch = images.batch_of("hunyuan_vl", documents, "packed", model)
    for left_out in ("cu_seq_lens_q", "position_ids"):
        with pytest.raises(ValueError, match="pad the batch"):
            run_ranks(2, _train, tiny.copies(model, 2), {n: x for n, x in batch.items() if n != left_out})
