"""Every causal language model of transformers, made small, under context parallelism on two ranks.

    python -m tests.integrations.transformers.every_model --out benchmarks/results/huggingface-models.json

Each is trained on one packed batch and compared with one forward a document. The result says for each model type
whether it is exact, refused (and why), or could not be made small by `_SIZES`, so that nothing is known about it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spanwise.integrations import transformers as hf
from tests.integrations.transformers import tiny
from tests.ranks.harness import run_ranks

LENGTHS = (23, 41, 7, 30)
SECONDS = 120  # for one model

# Values of configs, by the names that models have for them; a config takes those that it has.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "moe_layer_start_index"), 1),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "moe_intermediate_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 16),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "head_dim", "kv_channels"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), tiny.VOCAB),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "hidden_size_per_layer_input", "laurel_rank"), 8),
    **dict(num_key_value_heads=2, q_lora_rank=24, encoder_layers=1, encoder_attention_heads=4, num_kv_shared_layers=0),
    **dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, is_decoder=True),
}
# Values that depend on each other in one model type only.
_ALTERNATE = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_MORE: dict[str, dict[str, Any]] = {
    "mamba2": dict(num_heads=8, n_groups=2, state_size=8),
    "zamba": dict(num_hidden_layers=4, layers_block_type=_ALTERNATE, attention_head_dim=32, num_key_value_heads=4),
    "zamba2": dict(
        num_hidden_layers=4,
        layers_block_type=_ALTERNATE,
        mamba_headdim=16,
        mamba_d_state=8,
        attention_head_dim=32,
        num_key_value_heads=4,
        num_query_groups=4,
    ),
    "lfm2": dict(layer_types=["conv", "full_attention", "conv"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention", "conv"]),
    "bamba": dict(attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8),
    "granitemoehybrid": dict(layer_types=["linear_attention", "full_attention", "linear_attention"]),
    "zaya": dict(num_experts_per_tok=1),
    "dots1": dict(n_shared_experts=1, n_routed_experts=4),
    "longcat_flash": dict(num_layers=2, num_hidden_layers=4, head_dim=8, expert_ffn_hidden_size=32, zero_expert_num=2),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2),
    ),
    "gpt_neo": dict(num_layers=2, attention_types=[[["global", "local"], 1]], window_size=8),
}
_AFTER_PADDING = ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl")
_OFTEN_NONE = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_group", "topk_group", "q_lora_rank")
_NO_DROPOUT = ("drop", "jitter")  # parts of names of probabilities that are set to 0


def small_config(kind: str) -> Any:
    """A small config of a model type; of its text model, where it has several."""
    default = CONFIG_MAPPING[kind]()
    text = default.get_text_config()
    defaults, values = text.to_dict(), {}
    for name in (field.name for field in dataclasses.fields(text)):
        value = defaults.get(name)
        if any(part in name for part in _NO_DROPOUT) and isinstance(value, float):
            values[name] = 0.0
        elif name in _SIZES and not isinstance(value, (list, dict)) and (value is not None or name in _OFTEN_NONE):
            values[name] = _SIZES[name]
    if "qk_rope_head_dim" in values:  # multi-head latent attention
        values.pop("head_dim", None)
        values["num_key_value_heads"] = 4
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or []))
    if kinds:  # each kind of layer
        layers = max(3, len(kinds))
        values["layer_types"] = (kinds * layers)[:layers]
        values |= {name: layers for name in ("num_hidden_layers", "n_layer", "num_layers") if name in values}
    values |= _MORE.get(kind, {})
    try:
        return type(text)(**values)
    except Exception:  # its layers follow another rule
        values.pop("layer_types", None)
        return type(text)(**values)


def _train(rank: int, mesh: Any, models: list[Any], batch: dict[str, Any]) -> Any:
    return tiny.step(hf.context_parallel(models[rank], mesh), batch)


def examine(kind: str) -> dict[str, Any]:
    """What becomes of one model type."""
    documents = tiny.documents_of(LENGTHS)
    try:
        torch.manual_seed(0)
        config = small_config(kind)
        config._attn_implementation = "eager"
        model = tiny.randomized(AutoModelForCausalLM.from_config(config).float().train())
        want = tiny.reference(model, documents)
    except Exception as error:
        return {"status": "not made", "text": f"{type(error).__name__}: {error}"[:300]}
    # Positions that start behind the padding token are the model's to count.
    batch = tiny.packed(documents, "cu_seq_lens_q" if kind in _AFTER_PADDING else "position_ids")
    try:
        hf.make_plan(batch, config, 2)
        results = run_ranks(2, _train, tiny.copies(model, 2), batch, timeout=SECONDS)
    except ValueError as error:
        return {"status": "refused", "text": str(error)}
    except Exception as error:
        return {"status": "failed", "text": f"{type(error).__name__}: {error}"[:300]}
    loss, gradient, name = tiny.errors(tiny.mean_over_ranks(results), want)
    found = {"status": "exact", "loss_error": loss, "gradient_error": gradient}
    if loss <= 3e-6 and gradient <= 1e-5:
        return found
    # Some small models amplify rounding: so much does transformers' own SDPA differ from eager attention.
    found["rounding"] = tiny.errors(tiny.reference(model, documents, attention="sdpa"), want)[1]
    exact = gradient <= 2 * found["rounding"]
    return found | {"status": "exact" if exact else "differs", "text": f"gradient of {name}"}


def _give_up(*_: Any) -> None:
    raise TimeoutError(f"took longer than {SECONDS} s")


def main() -> None:
    """Examine all model types, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", help="model types; default: all")
    parser.add_argument("--out", type=Path, help="where to write JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _give_up)
    rows, start = {}, time.time()
    for kind in options.kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        signal.alarm(SECONDS)
        rows[kind] = examine(kind)
        signal.alarm(0)
        print(f"{kind:28s}", *rows[kind].values(), flush=True)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    if options.out:
        result = {"versions": versions, "ranks": 2, "lengths": LENGTHS, "seconds": time.time() - start, "models": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
