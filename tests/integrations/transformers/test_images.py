"""Models of text and images under context parallelism."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

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


@pytest.mark.parametrize("name", ["llava", "gemma3", "paligemma", "qwen2_vl", "shieldgemma2"])
def test_packed(name: str) -> None:
    """Qwen2-VL with three rows of positions, as it counts them for each document alone."""
    model = images.model_of(name)
    results = run_ranks(3, _train, tiny.copies(model, 3), images.batch_of(name, DOCUMENTS, "packed", model))
    tiny.check(results, images.reference(name, model, DOCUMENTS))


def test_features_for_deeper_layers_are_cut() -> None:
    name = "granite4_vision"  # it gives them to its decoder by layer
    model = images.model_of(name)
    tokens = images.tokens_of(name, model)
    documents = images.documents_of((29, 31, 25), (True, False, True), tokens)
    results = run_ranks(2, _train, tiny.copies(model, 2), images.batch_of(name, documents, "right"))
    tiny.check(results, images.reference(name, model, documents))


@pytest.mark.parametrize("name", images.MODELS)
def test_text_alone(name: str) -> None:
    documents = images.documents_of((23, 41), (False, False))
    model = images.model_of(name)
    results = run_ranks(2, _train, tiny.copies(model, 2), images.batch_of(name, documents, "right"))
    tiny.check(results, images.reference(name, model, documents))


def test_an_encoder_of_images_without_attention_interface() -> None:
    """The decoder has it."""
    text = {name: x for name, x in tiny.COMMON.items() if name != "head_dim"} | {"model_type": "qwen2"}
    vision = dict(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, mlp_dim=32, image_size=32, output_channels=8
    )
    config = transformers.GotOcr2Config(text_config=text, vision_config=vision | {"global_attn_indexes": [0]})
    model = tiny.randomized(transformers.GotOcr2ForConditionalGeneration(config)).train()
    documents = tiny.documents_of((23, 41))
    results = run_ranks(2, _train, tiny.copies(model, 2), tiny.packed(documents))
    tiny.check(results, tiny.reference(model, documents, attention="sdpa"))


def test_a_decoder_with_a_head_of_its_own() -> None:
    """A text model for causal language modeling inside of one for images, with layers that carry a state."""
    text = tiny.config_of("nemotron_h").to_dict()
    vision = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, video_temporal_patch_size=2)
    config = transformers.AutoConfig.for_model(
        "nemotron_h_omni", text_config=text, vision_config=vision, projector_hidden_size=32, vision_hidden_size=32
    )
    model = tiny.randomized(transformers.AutoModelForImageTextToText.from_config(config)).train()
    documents = tiny.documents_of((23, 41))
    results = run_ranks(2, _train, tiny.copies(model, 2), tiny.packed(documents))
    tiny.check(results, tiny.reference(model, documents))


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
    with pytest.raises(ValueError, match=r"pass their position_ids, \[3, B, S\]"):
        run_ranks(2, _train, tiny.copies(model, 2), batch)
