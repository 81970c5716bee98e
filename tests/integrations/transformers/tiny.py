"""Random tiny models of any type of transformers, batches of documents, and what one document at a time gives.

transformers' packed forward is no reference: some models attend across documents in it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import spanwise
from spanwise.integrations import transformers as hf
from tests.ranks.harness import run_ranks

VOCAB = 160
IMAGE, VIDEO, START, END, AUDIO, OTHER = 150, 151, 152, 153, 154, 155  # tokens
COMMON: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16)
COMMON |= dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=512)
COMMON |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, attention_dropout=0.0)


def _each(values: dict[str, Any]) -> dict[str, Any]:
    """The values by each word of their keys."""
    return {name: value for names, value in values.items() for name in names.split()}


# Values by the names of fields; a config takes those that it has. Those of models of text:
_TEXT = _each(
    {
        "hidden_size n_embd d_model dim embedding_size word_embed_proj_dim": 64,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers": 3,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads": 4,
        "intermediate_size ffn_dim decoder_ffn_dim n_inner ffn_hidden_size": 96,
        "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads": 4,
        "num_experts_per_tok moe_topk moe_k num_key_value_heads linear_num_key_heads indexer_n_heads index_n_heads": 2,
        "n_group topk_group first_k_dense_replace moe_layer_start_index encoder_layers indexer_kv_heads": 1,
        "shared_expert_intermediate_size shared_intermediate_size moe_intermediate_size": 32,
        "max_position_embeddings n_positions": 512,
        "sliding_window attention_chunk_size indexer_head_dim indexer_budget index_head_dim": 16,
        "kv_lora_rank qk_nope_head_dim v_head_dim head_dim kv_channels": 16,
        "vocab_size vocab_size_per_layer_input": VOCAB,
        "qk_rope_head_dim rotary_dim hidden_size_per_layer_input laurel_rank linear_key_head_dim": 8,
    }
)
_TEXT |= dict(q_lora_rank=24, index_topk=6, linear_value_head_dim=12, indexer_compress_ratio=4, num_kv_shared_layers=0)
_TEXT |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, is_decoder=True)
_ENCODER = _each(
    {
        "hidden_size embed_dim d_model encoder_hidden_size adapter_in_dim adapter_input_size": 32,
        "intermediate_size mlp_dim encoder_ffn_dim base_channels vocab_size num_embeddings codebook_size": 32,
        "num_hidden_layers depth num_layers resampler_depth encoder_layers num_attention_heads num_heads": 2,
        "attention_heads num_key_value_heads resampler_n_heads encoder_attention_heads": 2,
        "out_hidden_size projection_dim text_hidden_size projection_hidden_dim adapter_out_dim output_dim": 64,
        "projection_intermediate_size vision_output_dim": 64,
        "head_dim resampler_head_dim num_position_embeddings": 16,
        "image_size window_size": 28,
        "num_query_tokens resampler_n_latents": 4,
    }
)
_ENCODER |= dict(patch_size=14, output_channels=8, initializer_range=0.1)
_ENCODER |= dict(deepstack_visual_indexes=[0, 1], global_attn_indexes=[0])
_WHOLE = _each(
    {
        "projection_dim hidden_size projector_hidden_size out_hidden_size alignment_intermediate_size": 64,
        "mm_tokens_per_image image_seq_length num_query_tokens latent_query_num": 4,
        "projection_hidden_size vision_hidden_size": 32,
    }
)
_WHOLE |= dict(vocab_size=VOCAB, image_size=28, patch_size=14)
_SECTIONS = {"mrope_section": [2, 2, 4]}  # of half a head
_WORDS = {f"<|visual token {i:06d}|>": 100 + i for i in range(32)} | {"<image>": IMAGE, "<|extra_200|>": OTHER}
_ZAMBA = dict(num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2, attention_head_dim=32)
# Values that depend on each other, by the types of the configs that have them.
_MORE: dict[str, dict[str, Any]] = _each(
    {
        "mamba2": dict(num_heads=8, n_groups=2, state_size=8),
        "zamba": _ZAMBA | dict(num_key_value_heads=4),
        "zamba2": _ZAMBA | dict(mamba_headdim=16, mamba_d_state=8, num_key_value_heads=4, num_query_groups=4),
        "lfm2 lfm2_moe": dict(layer_types=["conv", "full_attention", "conv"]),
        "bamba": dict(attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8),
        "granitemoehybrid": dict(layer_types=["linear_attention", "full_attention", "linear_attention"]),
        "zaya": dict(num_experts_per_tok=1),
        "dots1": dict(n_shared_experts=1, n_routed_experts=4),
        "longcat_flash": dict(num_layers=2, num_hidden_layers=4, head_dim=8)
        | dict(expert_ffn_hidden_size=32, zero_expert_num=2),
        "dbrx": dict(attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0))
        | dict(ffn_config=dict(ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2)),
        "gpt_neo": dict(num_layers=2, attention_types=[[["global", "local"], 1]], window_size=8),
        "reformer": dict(axial_pos_shape=[8, 64], axial_pos_embds_dim=[16, 48], attn_layers=["local", "lsh"]),
        "xmod": dict(default_language="en_XX"),
        "blt": dict(encoder_hash_byte_group_vocab=64),
        "cohere_compass_text": dict(
            rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4} | _SECTIONS}
        ),
        "glm5_next_text": dict(index_topk=16, qk_rope_head_dim=0, head_dim=0, linear_head_dim=8, linear_num_heads=2),
        "step3p5": dict(sliding_window=16, share_expert_dim=32, num_hidden_layers=4)
        | dict(layer_types=["sliding_attention", "full_attention"] * 2),
        "diffusion_gemma_text": dict(num_experts=4, top_k_experts=2, moe_intermediate_size=32),
        "gemma4_text": dict(use_bidirectional_attention="vision"),
        # Models with images, and their encoders.
        "paligemma": dict(text_config=COMMON | dict(model_type="gemma2", query_pre_attn_scalar=16, sliding_window=6)),
        "instructblipvideo": dict(video_token_index=IMAGE),
        "emu3": dict(vocabulary_map=_WORDS),
        "clip_vision_model qwen2_vl_vision": dict(hidden_size=64),
        "sam_vision_model": dict(image_size=56),
        "granite4_vision": dict(spatial_target_layers=[0, 1], downsample_rate="1/2")
        | dict(image_grid_pinpoints=[[28, 56], [56, 28]], deepstack_layer_map=[[-1, 0], [-2, 1]]),
        "dots3_note_vision_encoder": dict(mlp_layer_types=["dense", "dense"]),
        "molmo2_vision": dict(image_size=[28, 28], num_position_embeddings=4),
        "molmo2_adapter": dict(vision_feature_layer=[0, 1]),
        "nemotron_h_omni": dict(image_token_id=IMAGE, video_token_id=VIDEO, projector_hidden_size=32),
        "radio": dict(video_temporal_patch_size=2, image_size=56, max_img_size=56),
    }
)
_OFTEN_NONE = ("head_dim", "num_key_value_heads", "num_experts", "num_experts_per_tok", "n_group", "topk_group")
_OFTEN_NONE += ("q_lora_rank", *(name for name in _TEXT if name.startswith("indexer")))
_NO_DROPOUT = ("drop", "jitter")  # parts of names of probabilities that are set to 0


def small_config(kind: str, **changes: Any) -> Any:
    """A small config of a model type, with those of its text model, which has the `changes`, and encoders."""
    config = CONFIG_MAPPING[kind]()
    return _small(config, config.decoder if kind.startswith("musicgen") else config.get_text_config(), changes)


def _small(config: Any, text: Any, changes: dict[str, Any]) -> Any:
    """`config` made small; `text` is that of the text model."""
    sizes = _TEXT if config is text else _WHOLE if config.sub_configs else _ENCODER
    defaults, values = config.to_dict(), {}
    for name in (field.name for field in dataclasses.fields(config)):
        value, token = defaults.get(name), _token(name)
        fits = isinstance(sizes.get(name), list) or not isinstance(value, (list, tuple, dict))  # no number for several
        if name in config.sub_configs:
            part = getattr(config, name)
            if part is not None:
                values[name] = _small(part, part if name == "text_config" else text, changes)
        elif any(part in name for part in _NO_DROPOUT) and isinstance(value, float):
            values[name] = 0.0
        elif config.sub_configs and token is not None and value is not None:
            values[name] = token
        elif name == "layer_types" and value and sizes is _ENCODER:
            values[name] = value[:2]
        elif name in sizes and fits and (value is not None or name in _OFTEN_NONE):
            values[name] = sizes[name]
    if config is not text:
        return type(config)(**values | _MORE.get(config.model_type, {}))
    if "qk_rope_head_dim" in values:  # multi-head latent attention
        values.pop("head_dim", None)
        values["num_key_value_heads"] = 4
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or []))
    if kinds:  # each kind of layer
        layers = max(3, len(kinds))
        values["layer_types"] = (kinds * layers)[:layers]
        values |= {name: layers for name in ("num_hidden_layers", "n_layer", "num_layers") if name in values}
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "default" and "qk_rope_head_dim" not in values:  # positions of images
        values["rope_parameters"] = rope | {n: 1.0 for n in rope if n == "partial_rotary_factor"} | _SECTIONS
    values |= _MORE.get(config.model_type, {}) | changes
    try:
        return type(config)(**values)
    except Exception:  # its layers follow another rule
        values.pop("layer_types", None)
        return type(config)(**values)


def _token(name: str) -> int | None:
    """The token that a field of this name tells; None for other fields."""
    if not name.endswith(("token_id", "token_index", "_start_id", "_end_id", "newline_id", "_patch_id")):
        return None
    beginnings = {("image_token", "image_patch"): IMAGE, ("video_token",): VIDEO, ("pad_", "bos_", "eos_"): None}
    for beginning, token in beginnings.items():
        if name.startswith(beginning):
            return token
    if "audio" in name or name.startswith(("boa", "eoa")):
        return AUDIO
    return START if "start" in name or name.startswith("bo") else END if "end" in name or name[:2] == "eo" else OTHER


Documents = list[torch.Tensor]

_MIXED = dict(num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
_CHUNKED = dict(num_hidden_layers=3, layer_types=["chunked_attention", "full_attention", "chunked_attention"])
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
_DYNAMIC = _YARN | {"rope_type": "dynamic"}
_SHORT = {"original_max_position_embeddings": 24}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8} | _SHORT
_LONGROPE["long_factor"] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
_ROUTED = dict(output_router_logits=True, router_aux_loss_coef=0.1)
_MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8)
# Name of a configuration that is not called as its model type: that, and what it has otherwise.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, dynamic NTK": ("llama", dict(rope_parameters=_DYNAMIC, max_position_embeddings=16)),
    "llama, YaRN": ("llama", dict(rope_parameters=_YARN)),
    "phi3, longrope": ("phi3", dict(rope_parameters=_LONGROPE, sliding_window=None, **_SHORT)),
    "qwen2, sliding": ("qwen2", dict(use_sliding_window=True, sliding_window=16, **_MIXED)),
    "qwen3_moe, auxiliary loss": ("qwen3_moe", _ROUTED),
    "mixtral, auxiliary loss": ("mixtral", _ROUTED),
    "gemma3": ("gemma3_text", dict(query_pre_attn_scalar=16, **_MIXED)),
    "llama4": ("llama4_text", dict(intermediate_size_mlp=96, no_rope_layers=[1, 0, 1], floor_scale=8, **_CHUNKED)),
    "granite": ("granite", dict(attention_multiplier=0.1, logits_scaling=2.0)),
    "gemma2": ("gemma2", dict(attn_logit_softcapping=5.0, query_pre_attn_scalar=16)),
    "kimi_linear": ("kimi_linear", dict(linear_num_heads=2, linear_head_dim=8)),
    "falcon_h1": ("falcon_h1", dict(mamba_d_ssm=128, **_MAMBA2)),
    "granitemoehybrid": ("granitemoehybrid", dict(shared_intermediate_size=32, **_MAMBA2)),
    "jamba, no attention": ("jamba", _ROUTED | dict(attn_layer_period=9, attn_layer_offset=8)),
    "granitemoehybrid, no attention": ("granitemoehybrid", _ROUTED | dict(layer_types=["linear_attention"] * 3)),
    "jamba": ("jamba", dict(attn_layer_period=2, attn_layer_offset=1, num_hidden_layers=2, mamba_d_state=4)),
}  # fmt: skip


def config_of(name: str, **changes: Any) -> Any:
    """The configuration called `name`, or the small one of a model type."""
    kind, values = CONFIGS.get(name, (name, {}))
    return small_config(kind, **values | changes)


def model_of(name: str, seed: int = 0, attention: str | None = None, **changes: Any) -> PreTrainedModel:
    """A random float32 model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = config_of(name, **changes)
        if attention is not None:
            config._attn_implementation = attention
        return randomized(AutoModelForCausalLM.from_config(config).float()).train()


def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """`model` with random biases, so that no gradient vanishes by chance, and states that last for long."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # some start from states that are forgotten after a token
                parameter.uniform_(0.02, 0.5).log_()
            elif parameter.dim() <= 1:
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model


def documents_of(lengths: Sequence[int], seed: int = 1) -> Documents:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]


def packed(documents: Documents, by: str = "position_ids") -> dict[str, torch.Tensor]:
    """One row, as `DataCollatorWithFlattening` makes it."""
    ids = torch.cat(documents)[None]
    batch = {"input_ids": ids, "labels": ids.clone()}
    if by == "position_ids":
        return batch | {"position_ids": torch.cat([torch.arange(len(d)) for d in documents])[None]}
    offsets = torch.tensor([0, *(len(d) for d in documents)]).cumsum(0).to(torch.int32)
    return batch | {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 9, "max_length_k": 9}


def as_tree(sequences: Documents, labels: Documents) -> dict[str, Any]:
    """Sequences whose common prefixes are stored once, and how often each token is a label."""
    found = spanwise.tree_from_sequences(sequences)
    ids, valid = torch.from_numpy(found.ids)[None], [(x != -100).index_fill(0, torch.tensor(0), 0) for x in labels]
    weights = torch.from_numpy(found.weights(valid))[None].float()
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(weights == 0, -100),
        "label_weights": weights,
        "tree": found.tree,
    }


FORMS = ("position_ids", "cu_seq_lens_q", "left", "right", "seq_idx", "seq_idx alone")


def batch_of(documents: Documents, form: str) -> dict[str, torch.Tensor]:
    """All documents as one batch of one of `FORMS`."""
    if form in ("left", "right"):
        return padded(documents, form)
    if not form.startswith("seq_idx"):
        return packed(documents, form)
    batch = packed(documents)
    batch["seq_idx"] = torch.arange(len(documents)).repeat_interleave(torch.tensor([len(d) for d in documents]))[None]
    return {name: x for name, x in batch.items() if form == "seq_idx" or name != "position_ids"}


def padded(documents: Documents, side: str) -> dict[str, torch.Tensor]:
    """A row for each document, padded on the left or right."""

    def rows(parts: Documents, fill: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill, padding_side=side)

    ones = [torch.ones_like(d) for d in documents]
    return {"input_ids": rows(documents, 0), "labels": rows(documents, -100), "attention_mask": rows(ones, 0)}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Whole copies of all gradients by name."""
    held = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in held.items()}


def reference(
    model: PreTrainedModel,
    documents: Documents,
    more: Sequence[Mapping[str, Any]] | None = None,
    attention: str = "eager",
    labels: Documents | None = None,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one process that forwards one document at a time.

    Args:
        more: further arguments of each document's forward.
        labels: of each document, unshifted; default: its tokens.
    """
    model, labels = copy.deepcopy(model), documents if labels is None else labels
    model.set_attn_implementation(attention)
    total = sum(int((wanted[1:] != -100).sum()) for wanted in labels)
    losses, routers = [], []
    for document, wanted, given in zip(documents, labels, more or [{}] * len(documents), strict=True):
        out = model(input_ids=document[None], use_cache=False, **given)
        scores = out.logits[0, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(scores, wanted[1:], reduction="sum") / total)
        routers.append(getattr(out, "router_logits", None))
    loss = torch.stack(losses).sum()
    if getattr(model.config, "output_router_logits", False):
        # Means over all documents, and not the mean of the documents' losses.
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        layers = tuple(torch.cat(layer) for layer in zip(*routers, strict=True))
        loss = loss + model.config.router_aux_loss_coef * load_balancing_loss_func(layers, 4, 2)
    loss.backward()
    return loss.item(), gradients(model)


def errors(
    got: tuple[float, dict[str, torch.Tensor]], want: tuple[float, dict[str, torch.Tensor]]
) -> tuple[float, float, str]:
    """Relative error of the loss, the largest relative error of a gradient by norm, and whose it is.

    A gradient below 1e-3 of the largest is compared on that scale: float32 does not resolve vanishing ones.
    """
    floor = 1e-3 * max(x.norm().item() for x in want[1].values())
    assert set(got[1]) == set(want[1])
    worst, name = max(((got[1][n] - x).norm().item() / max(x.norm().item(), floor), n) for n, x in want[1].items())
    return abs(got[0] - want[0]) / abs(want[0]), worst, name


def mean_over_ranks(results: Sequence[tuple[float, dict[str, torch.Tensor]]]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, which is equal on all ranks, and gradients averaged as FSDP2 and DDP do."""
    assert len({loss for loss, _ in results}) == 1
    names = sorted({name for _, grads in results for name in grads})
    held = {name: [grads[name] for _, grads in results if name in grads] for name in names}
    return results[0][0], {name: torch.stack(held[name]).sum(0) / len(results) for name in names}


def check(results: Sequence[Any], want: tuple[float, dict[str, torch.Tensor]]) -> None:
    """Loss within 3e-6 and every gradient within 1e-5 of `want`."""
    loss, gradient, name = errors(mean_over_ranks(results), want)
    assert loss <= 3e-6, f"loss differs by {loss:.1e}"
    assert gradient <= 1e-5, f"the gradient of {name} differs by {gradient:.1e}"


def train(
    model: PreTrainedModel | str, batch: Mapping[str, Any], ranks: int = 2, act: Any = None, **options: Any
) -> list[Any]:
    """Loss and gradients of a batch on each of so many threads as ranks, or what ``act(model, batch)`` returns."""
    model = model_of(model) if isinstance(model, str) else model
    models, act = [copy.deepcopy(model) for _ in range(ranks)], act or step
    return run_ranks(ranks, lambda rank, mesh: act(hf.context_parallel(models[rank], mesh, **options), batch))


def step(model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one batch."""
    return differentiated(model, model(**batch).loss)


def differentiated(model: torch.nn.Module, loss: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """A loss and its gradients."""
    loss.backward()
    return loss.item(), gradients(model)
