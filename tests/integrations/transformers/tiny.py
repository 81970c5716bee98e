"""Random tiny models of transformers, batches of documents, and what training on one document at a time gives.

transformers' own packed forward is no reference: some models attend across documents in it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from spanwise.integrations import transformers as hf
from tests.integrations.transformers.small import VOCAB, small_config
from tests.ranks.harness import run_ranks

Documents = list[torch.Tensor]

_MIXED = dict(num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
_CHUNKED = dict(num_hidden_layers=3, layer_types=["chunked_attention", "full_attention", "chunked_attention"])
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24}
_LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [1.0 + n for n in range(8)]}
_ROUTED = dict(output_router_logits=True, router_aux_loss_coef=0.1)
_MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8)
# Name of a configuration that is not called as its model type: that, and what it has otherwise.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, dynamic NTK": (
        "llama", dict(rope_parameters=_YARN | {"rope_type": "dynamic"}, max_position_embeddings=16),
    ),
    "llama, YaRN": ("llama", dict(rope_parameters=_YARN)),
    "phi3, longrope": (
        "phi3", dict(rope_parameters=_LONGROPE, original_max_position_embeddings=24, sliding_window=None),
    ),
    "qwen2, sliding": ("qwen2", dict(use_sliding_window=True, sliding_window=16, **_MIXED)),
    "qwen3_moe, auxiliary loss": ("qwen3_moe", _ROUTED),
    "mixtral, auxiliary loss": ("mixtral", _ROUTED),
    "gemma3": ("gemma3_text", dict(query_pre_attn_scalar=16, **_MIXED)),
    "llama4": ("llama4_text", dict(intermediate_size_mlp=96, no_rope_layers=[1, 0, 1], floor_scale=8, **_CHUNKED)),
    "granite": ("granite", dict(attention_multiplier=0.1, logits_scaling=2.0)),
    "gemma2": ("gemma2", dict(attn_logit_softcapping=5.0, query_pre_attn_scalar=16)),
    "smollm3": ("smollm3", dict(no_rope_layers=[1, 0, 1])),
    "qwen3_5": ("qwen3_5_text", {}),
    "kimi_linear": ("kimi_linear", dict(linear_num_heads=2, linear_head_dim=8)),
    "falcon_h1": ("falcon_h1", dict(mamba_d_ssm=128, **_MAMBA2)),
    "granitemoehybrid": ("granitemoehybrid", dict(shared_intermediate_size=32, **_MAMBA2)),
    "jamba": ("jamba", dict(attn_layer_period=2, attn_layer_offset=1, num_hidden_layers=2, mamba_d_state=4)),
    "recurrent_gemma": ("recurrent_gemma", dict(attention_window_size=16)),
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


def train(
    model: PreTrainedModel | str, batch: Mapping[str, Any], ranks: int = 2, act: Any = None, **options: Any
) -> list[Any]:
    """Loss and gradients of a batch on each of so many threads as ranks, or what ``act(model, batch)`` returns."""
    models, act = copies(model_of(model) if isinstance(model, str) else model, ranks), act or step
    return run_ranks(ranks, lambda rank, mesh: act(hf.context_parallel(models[rank], mesh, **options), batch))


def copies(model: PreTrainedModel, number: int) -> list[PreTrainedModel]:
    """Equal models, one a rank."""
    return [copy.deepcopy(model) for _ in range(number)]


def step(model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one batch."""
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), gradients(model)
