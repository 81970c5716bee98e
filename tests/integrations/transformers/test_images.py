"""Models of text and images under context parallelism."""

from __future__ import annotations

import pytest

from tests.integrations.transformers import images, tiny

DOCUMENTS = images.documents_of((23, 41, 30), (True, False, True))


@pytest.mark.parametrize("form", ["left", "right"])
@pytest.mark.parametrize("name", images.MODELS)
def test_padded(name: str, form: str) -> None:
    model = images.model_of(name)
    results = tiny.train(model, images.batch_of(name, DOCUMENTS, form), block_size=4)
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
    results = tiny.train(model, images.batch_of(name, documents, "packed", model), 3, block_size=4)
    tiny.check(results, images.reference(name, model, documents))


@pytest.mark.parametrize("name", images.MODELS)
def test_text_alone(name: str) -> None:
    documents = images.documents_of((23, 41), (False, False))
    model = images.model_of(name)
    results = tiny.train(model, images.batch_of(name, documents, "right"), block_size=4)
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
    tiny.check(tiny.train(model, batch, block_size=4), want)
    alone[0] |= {"pixel_values_videos": -video["pixel_values_videos"]}
    assert abs(tiny.reference(model, documents, alone)[0] - want[0]) > 1e-5  # the video counts
