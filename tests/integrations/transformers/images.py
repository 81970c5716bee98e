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
_GRID: dict[str, Any] = dict(image_grid_thw=[[1, 4, 4]])
_CROPS: dict[str, Any] = dict(pixel_values=(1, 3, 3, 28, 28), image_sizes=[[28, 28]])
_STRIP: dict[str, Any] = dict(pixel_values=(1, 3, 14, 224), target_sizes=[[4, 4]])
_OF_ROWS: dict[str, Any] = dict(pixel_values=(1, 1, 3, 28, 28))  # row, image of the row
_LARGER: dict[str, Any] = dict(pixel_values=(1, 3, 56, 56))
_SQUARE = (1, 3, 28, 28)
_PLACES = [[[x, y] for y in range(4) for x in range(4)]]
# What holds one image: values, and shapes of random ones; [1, 3, 28, 28] or a grid of patches where there is no entry.
_IMAGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision", "granite4_vision"), _CROPS),
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), _STRIP),
    **dict.fromkeys(("idefics", "idefics2", "idefics3", "smolvlm"), _OF_ROWS),
    **dict.fromkeys(("mistral3", "mistral_large4", "lighton_ocr"), _LARGER | dict(image_sizes=[[56, 56]])),
    **dict.fromkeys(("paddleocr_vl", "kimi_k25"), dict(pixel_values=(16, 3, 14, 14)) | _GRID),
    **dict.fromkeys(("muse_glimmer", "muse_spark"), dict(pixel_values=(16, 1176)) | _GRID),
    "instructblipvideo": _OF_ROWS | dict(qformer_input_ids=[[3, 4, 5, 6]]),
    "instructblip": dict(pixel_values=_SQUARE, qformer_input_ids=[[3, 4, 5, 6]]),
    "granite_docling": _OF_ROWS | dict(pixel_attention_mask=[[True]]),
    "video_llama_3": dict(pixel_values=(16, 588), image_merge_sizes=[2]) | _GRID,
    "lfm2_vl": dict(pixel_values=(1, 16, 588), spatial_shapes=[[4, 4]], pixel_attention_mask=[[1] * 16]),
    "molmo2": dict(pixel_values=(1, 4, 588), image_token_pooling=[[0], [1], [2], [3]])
    | dict(image_grids=[[2, 2, 0, 0]], image_num_crops=[1]),
    "nemotron_h_omni": dict(pixel_values=(16, 588), image_grid_hw=[[4, 4]]),
    "fuyu": dict(pixel_values=(1, 4, 588)),
    "gemma4": dict(pixel_values=(1, 16, 48), image_position_ids=_PLACES),
    "gemma4_unified": dict(pixel_values=(1, 16, 192), image_position_ids=_PLACES),
    "deepseek_vl_hybrid": dict(pixel_values=_SQUARE, high_res_pixel_values=(1, 3, 56, 56)),
    "emu3": dict(pixel_values=(1, 3, 32, 32), image_sizes=[[32, 32]]),
    "chameleon": dict(pixel_values=(1, 3, 32, 32)),
    "llama4": _LARGER,
    "deepseek_ocr2": dict(pixel_values=(1, 3, 128, 128)),
    "mllama": dict(pixel_values=(1, 1, 1, 3, 28, 28), aspect_ratio_ids=[[1]], aspect_ratio_mask=[[[1]]]),
}
_BY_ROW = ("idefics", "idefics2", "idefics3", "smolvlm", "granite_docling")  # rows without an image hold zeros
ALWAYS = ("blip", "blip-2", "instructblip", "instructblipvideo", "mllama", "idefics")  # each document has one
OF_TEXT = ("mistral4",)  # without an encoder of images
_COUNTS = {"blip-2": 4, "instructblip": 4, "instructblipvideo": 4}  # tokens of an image, where nothing checks them


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
    if name in OF_TEXT or name in _IMAGES or "image_grid_thw" not in _arguments(name):
        return _IMAGES.get(name, {} if name in OF_TEXT else dict(pixel_values=_SQUARE))
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


def _joined(name: str, images: list[dict[str, torch.Tensor]], by_row: bool) -> dict[str, torch.Tensor]:
    """Arguments that hold several images, of one row each or all of one row."""
    result = {}
    for key in images[0]:
        dim = -1 if _image(name) is _STRIP and key == "pixel_values" else int(name in _BY_ROW and not by_row)
        offset = 4 * (key == "image_token_pooling")
        result[key] = torch.cat(
            [image[key] + offset * i if offset else image[key] for i, image in enumerate(images)], dim
        )
    return result


def pixels_of(name: str, number: int, seed: int = 3) -> dict[str, torch.Tensor]:
    """Arguments that hold `number` images of one row; equal images for equal seeds, in order."""
    return _joined(name, _images(name, number, seed), by_row=False)


def marks_of(name: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arguments that mark tokens of images."""
    if name == "paligemma":
        return {"token_type_ids": ((ids < IMAGE) | (ids > END)).long()}  # 0: they read each other
    if name == "idefics":
        return {"image_attention_mask": (ids == START).cumsum(-1)[..., None]}
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


def reference(
    name: str, model: PreTrainedModel, documents: tiny.Documents, seed: int = 3, attention: str = "eager"
) -> Any:
    """Loss and gradients of one document at a time."""
    images = iter(_images(name, sum(holds_image(d) for d in documents), seed))
    more = [{"attention_mask": torch.ones_like(d)[None]} | marks_of(name, d[None]) for d in documents]
    more = [given | (next(images) if holds_image(d) else {}) for given, d in zip(more, documents, strict=True)]
    if name == "hunyuan_vl":  # a document alone would count its images from 0, and a batch counts them all
        positions = positions_of(name, model, documents)
        starts = [0, *(len(d) for d in documents)]
        parts = positions.split(starts[1:], dim=-1)
        more = [given | {"position_ids": part} for given, part in zip(more, parts, strict=True)]
    return tiny.reference(model, documents, more, attention)


def batch_of(
    name: str, documents: tiny.Documents, form: str, model: PreTrainedModel | None = None
) -> dict[str, torch.Tensor]:
    """All documents as one batch: padded on the "left" or "right", or "packed", with positions that `model` counts."""
    by = "position_ids" if "position_ids" in _arguments(name) else "cu_seq_lens_q"
    batch = tiny.packed(documents, by) if form == "packed" else tiny.padded(documents, form)
    batch |= marks_of(name, batch["input_ids"])
    held = [holds_image(d) for d in documents]
    images = iter(_images(name, sum(held), 3))
    if form != "packed" and name in _BY_ROW:
        blank = {key: torch.zeros_like(x) for key, x in _images(name, 1, 3)[0].items()}
        batch |= _joined(name, [next(images) if image else blank for image in held], by_row=True)
    elif any(held):
        batch |= _joined(name, list(images), by_row=False)
    positions = positions_of(name, model, documents) if model is not None and form == "packed" else None
    if positions is not None:
        batch |= {"position_ids": positions, "cu_seq_lens_q": tiny.packed(documents, "cu_seq_lens_q")["cu_seq_lens_q"]}
    return batch
