"""Random tiny models of text and images, and batches of documents of which some hold an image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.integrations.transformers import tiny

_VISION: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=28, patch_size=14
)
_IMAGE, _VIDEO, _START, _END = 150, 151, 152, 153
_QWEN_IDS = dict(image_token_id=_IMAGE, video_token_id=_VIDEO, vision_start_token_id=_START, vision_end_token_id=_END)
_QWEN_TEXT = tiny.COMMON | dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]})
_QWEN_VISION = dict(num_heads=2, patch_size=7, spatial_merge_size=2, temporal_patch_size=1)
TOKENS = 4  # of an image, and of a frame of a video


def _llava() -> PreTrainedModel:
    text, vision = transformers.LlamaConfig(**tiny.COMMON), transformers.CLIPVisionConfig(**_VISION)
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_id=_IMAGE, image_token_index=_IMAGE, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config)


def _gemma3() -> PreTrainedModel:
    text = tiny.COMMON | dict(sliding_window=16, layer_types=["sliding_attention", "full_attention"])
    config = transformers.Gemma3Config(
        text_config=text, vision_config=_VISION, image_token_id=_IMAGE, boi_token_id=_START, eoi_token_id=_END,
        mm_tokens_per_image=TOKENS,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


def _paligemma() -> PreTrainedModel:
    text = tiny.COMMON | dict(model_type="gemma2", query_pre_attn_scalar=16, sliding_window=6)
    vision = _VISION | dict(model_type="siglip_vision_model", projection_dim=64)
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_id=_IMAGE, image_token_index=_IMAGE, projection_dim=64,
        hidden_size=64,
    )  # fmt: skip
    return transformers.PaliGemmaForConditionalGeneration(config)


def _qwen2_vl() -> PreTrainedModel:
    vision = _QWEN_VISION | dict(depth=1, embed_dim=32, hidden_size=64, mlp_ratio=1)
    config = transformers.Qwen2VLConfig(text_config=_QWEN_TEXT, vision_config=vision, **_QWEN_IDS)
    return transformers.Qwen2VLForConditionalGeneration(config)


def _qwen3_vl() -> PreTrainedModel:
    vision = _QWEN_VISION | dict(
        depth=2, hidden_size=32, out_hidden_size=64, intermediate_size=32, num_position_embeddings=16,
        deepstack_visual_indexes=[0, 1],
    )  # fmt: skip
    text = _QWEN_TEXT | dict(rope_parameters=_QWEN_TEXT["rope_parameters"] | {"mrope_interleaved": True})
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **_QWEN_IDS)
    return transformers.Qwen3VLForConditionalGeneration(config)


def _qwen3_5() -> PreTrainedModel:
    vision = _QWEN_VISION | dict(
        depth=1, hidden_size=32, out_hidden_size=64, intermediate_size=32, num_position_embeddings=16
    )
    delta = dict(
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    rotary = _QWEN_TEXT["rope_parameters"] | {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
    text = _QWEN_TEXT | delta | dict(rope_parameters=rotary)
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, **_QWEN_IDS)
    return tiny.randomized(transformers.Qwen3_5ForConditionalGeneration(config))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llava": _llava,
    "gemma3": _gemma3,
    "paligemma": _paligemma,
    "qwen2_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_5,
}


def model_of(name: str) -> PreTrainedModel:
    """A random float32 model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]().float().train()


def documents_of(lengths: tuple[int, ...], with_image: tuple[bool, ...]) -> tiny.Documents:
    """Token ids; an image after the fifth token."""
    documents = [d.clamp(max=140) for d in tiny.documents_of(lengths)]
    for document, image in zip(documents, with_image, strict=True):
        if image:
            document[5 : 7 + TOKENS] = torch.tensor([_START, *[_IMAGE] * TOKENS, _END])
    return documents


def pixels_of(name: str, number: int, seed: int = 3) -> dict[str, torch.Tensor]:
    """Arguments that hold `number` images; equal images for equal seeds, in order."""
    generator = torch.Generator().manual_seed(seed)
    if name.startswith("qwen"):
        patches = torch.randn(number * 16, 3 * 7 * 7, generator=generator)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]] * number)}
    return {"pixel_values": torch.randn(number, 3, 28, 28, generator=generator)}


def marks_of(name: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arguments that mark tokens of images."""
    if name == "gemma3":
        return {"token_type_ids": (ids == _IMAGE).long()}
    if name == "paligemma":
        return {"token_type_ids": ((ids < _IMAGE) | (ids > _END)).long()}  # 0: they read each other
    kinds = (ids == _IMAGE).int() + 2 * (ids == _VIDEO).int()
    return {"mm_token_type_ids": kinds} if name.startswith("qwen") else {}


def holds_image(document: torch.Tensor) -> bool:
    return bool((document == _IMAGE).any())


def with_video(name: str, documents: tiny.Documents) -> tuple[tiny.Documents, dict[str, torch.Tensor]]:
    """The documents with a video of two frames in the first one, and the arguments that hold it.

    Qwen3-VL wraps each frame of a video like an image.
    """
    frames = [_VIDEO] * (2 * TOKENS) if name == "qwen2_vl" else [*[_VIDEO] * TOKENS, _END, _START, *[_VIDEO] * TOKENS]
    tokens = torch.tensor([_START, *frames, _END])
    first = documents[0].clone()
    first[5 : 5 + len(tokens)] = tokens
    patches = torch.randn(2 * 16, 3 * 7 * 7, generator=torch.Generator().manual_seed(4))
    return [first, *documents[1:]], {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([[2, 4, 4]])}


def reference(name: str, model: PreTrainedModel, documents: tiny.Documents) -> Any:
    """Loss and gradients of one document at a time."""
    images = [holds_image(d) for d in documents]
    every = pixels_of(name, sum(images))
    more, seen = [], 0
    for document, image in zip(documents, images, strict=True):
        given = marks_of(name, document[None])
        if image:
            per_image = {n: len(x) // sum(images) for n, x in every.items()}
            given |= {n: x[seen * per_image[n] : (seen + 1) * per_image[n]] for n, x in every.items()}
            seen += 1
        more.append(given)
    return tiny.reference(model, documents, more)


def batch_of(name: str, documents: tiny.Documents, form: str) -> dict[str, torch.Tensor]:
    """All documents as one batch: "packed", or padded on the "left" or "right"."""
    batch = tiny.packed(documents) if form == "packed" else tiny.padded(documents, form)
    images = sum(holds_image(d) for d in documents)
    return batch | marks_of(name, batch["input_ids"]) | (pixels_of(name, images) if images else {})
