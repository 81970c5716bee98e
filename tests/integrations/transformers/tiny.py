"""Random tiny models of transformers, batches of documents, and what training on one document at a time gives.

transformers' own packed forward is no reference: some models attend across documents in it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

Documents = list[torch.Tensor]

VOCAB = 160
COMMON: dict[str, Any] = dict(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=VOCAB,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    attention_dropout=0.0,
)
_BERT = {"num_key_value_heads", "head_dim", "attention_dropout"}
_NO_BERT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, is_decoder=True)
_GPT: dict[str, Any] = dict(
    n_embd=64, n_layer=2, n_head=4, n_positions=512, vocab_size=VOCAB, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
)
_EXPERTS = dict(moe_intermediate_size=32, num_experts=4, num_local_experts=4, num_experts_per_tok=2)
_MLA = dict(
    num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16
)
_MIXED = dict(num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + n for n in range(8)],
    "original_max_position_embeddings": 24,
}

_LINEAR_FIRST = dict(layer_types=["linear_attention", "full_attention"])
_DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12, **_LINEAR_FIRST
)
_KIMI = dict(linear_num_heads=2, linear_head_dim=8, mlp_layer_types=["dense", "sparse"], **_LINEAR_FIRST)
_MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8)
_NO_ATTENTION = {"num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "attention_dropout"}
_NO_ATTENTION |= {"max_position_embeddings"}

# Name of a configuration: model type, values beside the common ones, names of common values that the type lacks.
CONFIGS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "llama": ("llama", {}, set()),
    "llama, dynamic NTK": ("llama", dict(rope_parameters=_DYNAMIC, max_position_embeddings=16), set()),
    "llama, YaRN": ("llama", dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}), set()),
    "phi3, longrope": ("phi3", dict(rope_parameters=_LONGROPE, original_max_position_embeddings=24), {"head_dim"}),
    "mistral, sliding": ("mistral", dict(sliding_window=16), set()),
    "qwen2": ("qwen2", {}, {"head_dim"}),
    "qwen2, sliding": ("qwen2", dict(use_sliding_window=True, sliding_window=16, **_MIXED), {"head_dim"}),
    "qwen3": ("qwen3", {}, set()),
    "qwen2_moe": ("qwen2_moe", dict(shared_expert_intermediate_size=32, **_EXPERTS), {"head_dim"}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS, set()),
    "qwen3_moe, auxiliary loss": (
        "qwen3_moe",
        dict(output_router_logits=True, router_aux_loss_coef=0.1, **_EXPERTS),
        set(),
    ),
    "mixtral": ("mixtral", dict(num_local_experts=4, sliding_window=16), set()),
    "mixtral, auxiliary loss": (
        "mixtral",
        dict(num_local_experts=4, sliding_window=16, output_router_logits=True, router_aux_loss_coef=0.1),
        set(),
    ),
    "gpt_oss": ("gpt_oss", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=16), set()),
    "gemma": ("gemma", {}, set()),
    "gemma2": ("gemma2", dict(sliding_window=16, attn_logit_softcapping=5.0, query_pre_attn_scalar=16), set()),
    "gemma3": ("gemma3_text", dict(sliding_window=16, query_pre_attn_scalar=16, **_MIXED), set()),
    "llama4": (
        "llama4_text",
        dict(
            num_local_experts=2,
            intermediate_size_mlp=96,
            attention_chunk_size=16,
            num_hidden_layers=3,
            layer_types=["chunked_attention", "full_attention", "chunked_attention"],
            no_rope_layers=[1, 0, 1],
            floor_scale=8,
        ),
        set(),
    ),
    "olmo2": ("olmo2", {}, {"head_dim"}),
    "olmo3": ("olmo3", dict(sliding_window=16, **_MIXED), {"head_dim"}),
    "olmoe": ("olmoe", dict(num_experts=4, num_experts_per_tok=2), {"head_dim"}),
    "phi": ("phi", dict(resid_pdrop=0.0, embd_pdrop=0.0), {"head_dim"}),
    "starcoder2": ("starcoder2", dict(sliding_window=16, residual_dropout=0.0, embedding_dropout=0.0), {"head_dim"}),
    "stablelm": ("stablelm", {}, {"head_dim"}),
    "cohere2": ("cohere2", dict(sliding_window=16, **_MIXED), set()),
    "granite": ("granite", dict(attention_multiplier=0.1, logits_scaling=2.0), {"head_dim"}),
    "glm4": ("glm4", {}, set()),
    "deepseek_v3": (
        "deepseek_v3",
        dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32, **_MLA),
        {"head_dim"},
    ),
    "minicpm3": ("minicpm3", _MLA, {"head_dim"}),
    "exaone4": ("exaone4", dict(sliding_window=16, sliding_window_pattern=2, **_MIXED), set()),
    "smollm3": ("smollm3", dict(no_rope_layers=[1, 0]), {"head_dim"}),
    "ministral3": ("ministral3", {}, set()),
    "gpt_neox": ("gpt_neox", dict(hidden_dropout=0.0), {"head_dim", "num_key_value_heads"}),
    "gpt2": ("gpt2", _GPT, set(COMMON)),
    "gpt_bigcode": ("gpt_bigcode", _GPT, set(COMMON)),
    "opt": (
        "opt",
        dict(ffn_dim=96, word_embed_proj_dim=64, dropout=0.0),
        {"num_key_value_heads", "head_dim", "intermediate_size"},
    ),
    "bert": ("bert", _NO_BERT, _BERT),
    "modernbert": (
        "modernbert-decoder",
        dict(sliding_window=16, local_attention=16),
        {"num_key_value_heads", "head_dim"},
    ),
    "qwen3_next": ("qwen3_next", dict(shared_expert_intermediate_size=32, **_EXPERTS, **_DELTA), set()),
    "qwen3_5": ("qwen3_5_text", _DELTA, set()),
    "olmo_hybrid": ("olmo_hybrid", _DELTA | dict(linear_num_key_heads=4), {"head_dim"}),
    "kimi_linear": ("kimi_linear", dict(num_experts_per_token=2, num_experts=4, **_KIMI, **_MLA), {"head_dim"}),
    "mamba2": ("mamba2", dict(num_heads=8, head_dim=16, n_groups=2, state_size=8), _NO_ATTENTION),
    "bamba": ("bamba", dict(attn_layer_indices=[1], **_MAMBA2), {"head_dim"}),
    "falcon_h1": ("falcon_h1", dict(mamba_d_ssm=128, **_MAMBA2), set()),
    "granitemoehybrid": (
        "granitemoehybrid",
        dict(num_local_experts=4, shared_intermediate_size=32, **_LINEAR_FIRST, **_MAMBA2),
        {"head_dim"},
    ),
    "nemotron_h": (
        "nemotron_h",
        dict(
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=2,
            ssm_state_size=8,
            n_routed_experts=4,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
        ),
        {"num_hidden_layers"},
    ),
    "zamba2": (
        "zamba2",
        dict(
            num_hidden_layers=4,
            layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
            n_mamba_heads=8,
            mamba_headdim=16,
            mamba_d_state=8,
            attention_head_dim=32,
            num_key_value_heads=4,
            num_query_groups=4,
            adapter_rank=8,
        ),
        {"head_dim"},
    ),
    "mamba": ("mamba", dict(state_size=4, time_step_rank=8), _NO_ATTENTION),
    "jamba": (
        "jamba",
        dict(attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=8, num_experts=4),
        {"head_dim"},
    ),
    "lfm2": ("lfm2", dict(block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"]), {"head_dim"}),
    "minimax": ("minimax", dict(num_local_experts=4, block_size=16, **_LINEAR_FIRST), set()),
    "recurrent_gemma": (
        "recurrent_gemma",
        dict(num_hidden_layers=3, lru_width=64, attention_window_size=16, num_key_value_heads=4),
        {"num_key_value_heads"},
    ),
}


def config_of(name: str, **changes: Any) -> Any:
    """The configuration called `name`."""
    kind, values, lacks = CONFIGS[name]
    common = {key: value for key, value in COMMON.items() if key not in lacks}
    return AutoConfig.for_model(kind, **{**common, **values, **changes})


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


def padded(documents: Documents, side: str) -> dict[str, torch.Tensor]:
    """A row for each document, padded on the left or right."""
    length = max(len(d) for d in documents)

    def row(document: torch.Tensor, fill: int) -> torch.Tensor:
        padding = document.new_full((length - len(document),), fill)
        return torch.cat([padding, document] if side == "left" else [document, padding])

    return {
        "input_ids": torch.stack([row(d, 0) for d in documents]),
        "labels": torch.stack([row(d, -100) for d in documents]),
        "attention_mask": torch.stack([row(torch.ones_like(d), 0) for d in documents]),
    }


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all gradients by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def reference(
    model: PreTrainedModel,
    documents: Documents,
    more: Sequence[Mapping[str, Any]] | None = None,
    attention: str = "eager",
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one process that forwards one document at a time.

    Args:
        more: further arguments of each document's forward.
    """
    model = copy.deepcopy(model)
    model.set_attn_implementation(attention)
    total = sum(len(d) - 1 for d in documents)
    losses, routers = [], []
    for document, given in zip(documents, more or [{}] * len(documents), strict=True):
        out = model(input_ids=document[None], use_cache=False, **given)
        scores = out.logits[0, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(scores, document[1:], reduction="sum") / total)
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
    names = {name for _, grads in results for name in grads}

    def mean(name: str) -> torch.Tensor:
        held = [grads[name] for _, grads in results if name in grads]
        return torch.stack(held).sum(0) / len(results)

    return results[0][0], {name: mean(name) for name in sorted(names)}


def check(results: Sequence[Any], want: tuple[float, dict[str, torch.Tensor]]) -> None:
    """Loss within 3e-6 and every gradient within 1e-5 of `want`."""
    loss, gradient, name = errors(mean_over_ranks(results), want)
    assert loss <= 3e-6, f"loss differs by {loss:.1e}"
    assert gradient <= 1e-5, f"the gradient of {name} differs by {gradient:.1e}"


def copies(model: PreTrainedModel, number: int) -> list[PreTrainedModel]:
    """Equal models, one a rank."""
    return [copy.deepcopy(model) for _ in range(number)]


def step(model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one batch."""
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), gradients(model)
