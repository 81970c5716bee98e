"""Random tiny models of text and images, and batches of documents of which some hold an image."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from tests.integrations.transformers import tiny
from tests.integrations.transformers.tiny import END, IMAGE, START, VIDEO, small_config

MODELS = ("llava", "gemma3", "paligemma", "qwen2_vl", "qwen3_vl", "qwen3_5")
TOKENS = 4  # of an image of these models, and of a frame of a video
_SQUARE = (1, 3, 28, 28)
_GRID: dict[str, Any] = dict(image_grid_thw=[[1, 4, 4]])
# What holds one image: values, and shapes of random ones; a square or a grid of patches where there is no entry.
_IMAGES: dict[str, dict[str, Any]] = {
    "granite4_vision": dict(pixel_values=(1, 3, 3, 28, 28), image_sizes=[[28, 28]]),
    "instructblipvideo": dict(pixel_values=(1, 1, 3, 28, 28), qformer_input_ids=[[3, 4, 5, 6]]),
    "nemotron_h_omni": dict(pixel_values=(16, 588), image_grid_hw=[[4, 4]]),
}
ALWAYS = ("instructblipvideo",)  # each document has an image
_COUNTS = {"instructblipvideo": 4}  # tokens of an image, where nothing checks them


def model_of(name: str) -> PreTrainedModel:
    """A random float32 model."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        config = small_config(name)
        config._attn_implementation = "eager"
        model = tiny.randomized(AutoModelForImageTextToText.from_config(config).float()).train()
        for parameter in model.parameters():
            if not parameter.any():  # projections that start at 0
                parameter.normal_(std=0.1)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.eval()  # or images depend on those beside them
    return model


def documents_of(lengths: tuple[int, ...], with_image: tuple[bool, ...], tokens: int = TOKENS) -> tiny.Documents:
    """Token ids; an image after the fifth token."""
    documents = [d.clamp(max=140) for d in tiny.documents_of(lengths)]
    for document, image in zip(documents, with_image, strict=True):
        if image:
            document[5 : 7 + tokens] = torch.tensor([START, *[IMAGE] * tokens, END])
    return documents


def holds_image(document: torch.Tensor) -> bool:
    return bool((document == IMAGE).any())


@functools.cache
def _image(name: str) -> dict[str, Any]:
    """Shapes and values of one image."""
    if name in _IMAGES or "image_grid_thw" not in _arguments(name):
        return _IMAGES.get(name, dict(pixel_values=_SQUARE))
    vision = small_config(name).vision_config
    size = 3 * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    return dict(pixel_values=(16, size)) | _GRID


@functools.cache
def _arguments(name: str) -> Any:
    """Names of arguments of a model's forward."""
    cls = AutoModelForImageTextToText._model_mapping[type(small_config(name))]
    return inspect.signature(cls.forward).parameters


def _images(name: str, number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """What holds each of `number` images alone."""
    generator = torch.Generator().manual_seed(seed)

    def made(x: Any) -> torch.Tensor:
        return torch.randn(x, generator=generator) if isinstance(x, tuple) else torch.tensor(x)

    return [{key: made(x) for key, x in _image(name).items()} for _ in range(number)]


def pixels_of(name: str, number: int, seed: int = 3) -> dict[str, torch.Tensor]:
    """Arguments that hold `number` images; equal images for equal seeds, in order."""
    images = _images(name, number, seed)
    return {key: torch.cat([image[key] for image in images]) for key in images[0]} if images else {}


def marks_of(name: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arguments that mark tokens of images."""
    if name == "paligemma":
        return {"token_type_ids": ((ids < IMAGE) | (ids > END)).long()}  # 0: they read each other
    marks = {
        "token_type_ids": (ids == IMAGE).long(),
        "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
    }
    return {key: x for key, x in marks.items() if key in _arguments(name)}


def tokens_of(name: str, model: PreTrainedModel) -> int:
    """How many tokens an image has: the first number that the model takes."""
    for tokens in range(_COUNTS.get(name, 1), 160):
        ids = documents_of((tokens + 9,), (True,), tokens)[0][None]
        try:
            with torch.no_grad():
                model(input_ids=ids, use_cache=False, **pixels_of(name, 1), **marks_of(name, ids))
            return tokens
        except (ValueError, RuntimeError) as error:
            # One image may be found wrong in several ways before its number of tokens is right.
            last = error
    raise last


def with_video(name: str, documents: tiny.Documents) -> tuple[tiny.Documents, dict[str, torch.Tensor]]:
    """The documents with a video of two frames in the first one, and the arguments that hold it.

    Qwen3-VL wraps each frame of a video like an image.
    """
    frames = [VIDEO] * (2 * TOKENS) if name == "qwen2_vl" else [*[VIDEO] * TOKENS, END, START, *[VIDEO] * TOKENS]
    tokens = torch.tensor([START, *frames, END])
    first = documents[0].clone()
    first[5 : 5 + len(tokens)] = tokens
    shape = pixels_of(name, 2)["pixel_values"].shape
    patches = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    return [first, *documents[1:]], {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([[2, 4, 4]])}


def positions_of(name: str, model: PreTrainedModel, documents: tiny.Documents) -> torch.Tensor | None:
    """int64 ``[axes, 1, S]``: positions of packed documents, as the model counts them; None where it counts tokens."""
    counting = next((m for m in (model, model.base_model) if hasattr(m, "get_rope_index")), None)
    if counting is None:
        return None
    batch = batch_of(name, documents, "right")
    known = inspect.signature(counting.get_rope_index).parameters
    positions, _ = counting.get_rope_index(**{key: x for key, x in batch.items() if key in known})
    return positions[:, batch["attention_mask"].bool()][:, None]


def reference(name: str, model: PreTrainedModel, documents: tiny.Documents) -> Any:
    """Loss and gradients of one document at a time."""
    images = iter(_images(name, sum(holds_image(d) for d in documents), 3))
    more = [{"attention_mask": torch.ones_like(d)[None]} | marks_of(name, d[None]) for d in documents]
    more = [given | (next(images) if holds_image(d) else {}) for given, d in zip(more, documents, strict=True)]
    return tiny.reference(model, documents, more)


def batch_of(
    name: str, documents: tiny.Documents, form: str, model: PreTrainedModel | None = None
) -> dict[str, torch.Tensor]:
    """All documents as one batch: padded on the "left" or "right", or "packed", with positions that `model` counts."""
    by = "position_ids" if "position_ids" in _arguments(name) else "cu_seq_lens_q"
    batch = tiny.packed(documents, by) if form == "packed" else tiny.padded(documents, form)
    batch |= marks_of(name, batch["input_ids"]) | pixels_of(name, sum(holds_image(d) for d in documents))
    positions = positions_of(name, model, documents) if model is not None and form == "packed" else None
    if positions is not None:
        batch |= {"position_ids": positions, "cu_seq_lens_q": tiny.packed(documents, "cu_seq_lens_q")["cu_seq_lens_q"]}
    return batch
