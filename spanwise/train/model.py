"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The model does not know of ranks. It takes tokens, their positions inside their documents, and a mask object that it
hands to `InnerAttention`, the only module that looks across tokens. Training replaces that module's forward with
`spanwise.ContextParallel`; the one-device reference keeps it and passes a dense boolean mask, so that the two share no
attention code.

Shape legend: B batch, T tokens (this rank's), D model dim, H query heads, G key/value heads, K head dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from spanwise.train.data import VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the decoder. A checkpoint must agree on every one.

    Attributes:
        dim: width of the hidden states.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: heads of K and V; a divisor of --heads.
        hidden_dim: width inside the feed-forward layers.
        vocab_size: rows of the embedding.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of RMSNorm.
        tie_embeddings: use the embedding as output projection, too.

    Raises:
        ValueError: a size is not positive, heads do not divide, or the head dim is odd (rotary pairs).
    """

    dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    hidden_dim: int = 384
    vocab_size: int = VOCAB_SIZE
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "num_heads", "num_kv_heads", "hidden_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.vocab_size < VOCAB_SIZE:
            raise ValueError(f"vocab_size must be at least {VOCAB_SIZE} (bytes and BOS, EOS), got {self.vocab_size}")
        if self.dim % self.num_heads:
            raise ValueError(f"dim must be a multiple of num_heads, got dim {self.dim} and num_heads {self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"the head dim must be even (rotary positions turn pairs), got dim {self.dim} / "
                f"num_heads {self.num_heads} = {self.head_dim}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


class InnerAttention(nn.Module):
    """Only the attention call, for a parallel style to replace: BHSD in, BHSD out."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attn_mask: Any = None, is_causal: bool = False
    ) -> torch.Tensor:
        """Attend `q` ``[B, H, T, K]`` to `k`, `v` ``[B, G, T, K]``; `attn_mask` as SDPA takes it."""
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1]
        )


def rotary_table(position_ids: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine ``[B, 1, T, K/2]`` (float32; float64 stays) for positions ``[B, T]`` (RoPE, arXiv:2104.09864)."""
    # float64, because float32 positions above 2**24 collide; the table is small.
    exponent = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float64) / head_dim
    angle = position_ids[:, None, :, None].double() * theta**-exponent
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + K/2) of `x` ``[B, heads, T, K]``; the result has the dtype of `x`."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Projections and rotary positions around ``inner``."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)
        self.inner = InnerAttention()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attn_mask: Any) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = self.inner(rotate(q, cos, sin), rotate(k, cos, sin), v, attn_mask=attn_mask)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm attention and feed-forward; the unit that FSDP2 shards."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attn_mask: Any) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, attn_mask)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Tokens and positions in, logits out."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, attn_mask: Any) -> torch.Tensor:
        """Compute logits.

        Args:
            input_ids: int64 ``[B, T]``.
            position_ids: int64 ``[B, T]``, counted from the start of each token's document.
            attn_mask: a plan for context-parallel attention, else a dense boolean mask.

        Returns:
            ``[B, T, V]`` in the parameters' dtype.
        """
        x = self.embedding(input_ids)
        cos, sin = rotary_table(position_ids, self.config.head_dim, self.config.rope_theta)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attn_mask)
        return self.output(self.norm(x))


def build_model(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder whose weights depend only on `config`, `seed` and `dtype`: the same on every rank.

    Normal weights of deviation 0.02; the projections back into the residual stream are scaled by
    ``1/sqrt(2 * num_layers)`` (GPT-2), so that the stream's variance does not grow with depth.
    """
    with torch.device("meta"):
        model = Decoder(config)
    model = model.to_empty(device="cpu").to(dtype)
    if config.tie_embeddings:  # to_empty gives each name its own storage
        model.output.weight = model.embedding.weight
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
            continue
        std = 0.02
        if name.endswith(("wo.weight", "down.weight")):
            std /= (2 * config.num_layers) ** 0.5
        nn.init.normal_(parameter, std=std, generator=generator)
    return model
