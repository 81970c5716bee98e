"""The decoder of `train_packed.py`: Llama-style, with RMSNorm, rotary positions, grouped-query attention and SwiGLU.

Only `Inner` reads across tokens: training replaces its forward with `spanwise.ContextParallel`, whose `attn_mask` is a
plan; the one-device reference passes a dense boolean mask.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 258  # bytes, and the first and last token of a document


class Inner(nn.Module):  # only the attention call: [B, heads, T, head_dim] in and out
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, enable_gqa=True)


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary positions (RoPE, arXiv:2104.09864): rotate the pairs (i, i + K/2) of `x` [B, heads, T, K]."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** -(torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = positions[:, None, :, None] * rates  # float64: float32 positions above 2**24 collide
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    """Attention and feed-forward (SwiGLU, arXiv:2002.05202), each behind a norm; the unit that FSDP2 shards."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, hidden_dim: int):
        super().__init__()
        self.head_dim = dim // num_heads
        self.norm, self.feed_forward_norm = (nn.RMSNorm(dim, eps=1e-5) for _ in range(2))
        self.wq, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(dim, num_kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.inner = Inner()
        self.gate, self.up = (nn.Linear(dim, hidden_dim, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attn_mask: Any) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (w(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = self.inner(rotate(q, positions), rotate(k, positions), v, attn_mask=attn_mask)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        y = self.feed_forward_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Logits [B, T, V] of tokens and positions, int64 [B, T] each; its weights are equal on every rank."""

    def __init__(self, dim: int, num_layers: int, num_heads: int, num_kv_heads: int, hidden_dim: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Block(dim, num_heads, num_kv_heads, hidden_dim) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        generator = torch.Generator().manual_seed(0)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:  # the projections back into the residual stream are scaled as in GPT-2
                back = name.endswith(("wo.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * num_layers) ** (back / 2), generator=generator)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, attn_mask: Any) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids, attn_mask)
        return F.linear(self.norm(x), self.embedding.weight)
