"""Models of text and images under context parallelism."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
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


@pytest.mark.parametrize("name", ["llava", "gemma3", "paligemma"])
def test_packed(name: str) -> None:
    model = images.model_of(name)
    results = run_ranks(3, _train, tiny.copies(model, 3), images.batch_of(name, DOCUMENTS, "packed"))
    tiny.check(results, images.reference(name, model, DOCUMENTS))


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
    batch = images.batch_of("qwen2_vl", DOCUMENTS, "packed")
    offsets = torch.tensor([0, 23, 64, 94], dtype=torch.int32)
    del batch["position_ids"]
    models = tiny.copies(images.model_of("qwen2_vl"), 2)
    with pytest.raises(ValueError, match=r"pass position_ids, \[3, B, S\]"):
        run_ranks(2, _train, models, batch | {"cu_seq_lens_q": offsets})


def test_positions_of_images_are_cut() -> None:
    """Three rows of positions, as the model counts them for each document alone."""
    name = "qwen2_vl"
    model = images.model_of(name)
    batch = images.batch_of(name, DOCUMENTS, "packed")
    padded = images.batch_of(name, DOCUMENTS, "right")
    keys = ("input_ids", "image_grid_thw", "attention_mask", "mm_token_type_ids")
    positions, _ = model.model.get_rope_index(**{key: padded[key] for key in keys})
    batch["position_ids"] = positions[:, padded["attention_mask"].bool()][:, None]
    batch["cu_seq_lens_q"] = torch.tensor([0, 23, 64, 94], dtype=torch.int32)
    results = run_ranks(2, _train, tiny.copies(model, 2), batch)
    tiny.check(results, images.reference(name, model, DOCUMENTS))
