"""What a model's layers that carry a state exchange, from its config: for the choice of a layout."""

from __future__ import annotations

from typing import Any

import spanwise

# Attributes of configs: heads, key dim and value dim of a state (1: no such dim), width of the convolution (1: none),
# and whether it is a delta rule. The first row of which a config has all attributes is its own.
_STATES: tuple[tuple[Any, Any, Any, Any, bool], ...] = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", True),
    ("linear_num_heads", "linear_head_dim", "linear_head_dim", "linear_conv_kernel_dim", True),
    ("mamba_n_heads", "mamba_d_state", "mamba_d_head", "mamba_d_conv", False),
    ("mamba_num_heads", "ssm_state_size", "mamba_head_dim", "conv_kernel", False),
    ("n_mamba_heads", "mamba_d_state", "mamba_headdim", "mamba_d_conv", False),
    ("num_heads", "state_size", "head_dim", "conv_kernel", False),
    ("intermediate_size", "state_size", 1, "conv_kernel", False),
    ("mamba_intermediate_size", "mamba_d_state", 1, "mamba_d_conv", False),
    ("lru_width", 1, 1, "conv1d_width", False),
    ("hidden_size", 1, 1, "conv_L_cache", False),
)


def recurrences(config: Any, layers: int) -> dict[str, spanwise.Recurrence] | None:
    """The argument of `spanwise.make_plan` for a model's config, with so many layers that carry a state; or None.

    >>> from transformers import Qwen3NextConfig
    >>> recurrences(Qwen3NextConfig(), 36)["linear_attention"].map_bytes
    4194304
    """
    config = config.get_text_config()
    numbers = _numbers(config)
    if layers == 0 or numbers is None:
        return None
    heads, _, value_dim, delta_rule, _ = numbers
    channels = None if delta_rule else heads * value_dim
    return {"linear_attention": spanwise.Recurrence(layers, *numbers, channels, config.hidden_size)}


def _numbers(config: Any) -> tuple[int, int, int, bool, int] | None:
    """Heads, key dim, value dim, whether it is a delta rule, and width of the convolution."""
    given = vars(config)
    if "mamba_expand" in given:  # Jamba and Zamba have a state for each channel
        given = given | {"mamba_intermediate_size": int(given["mamba_expand"] * config.hidden_size)}
    if "linear_attn_alpha_factor" in given:  # MiniMax, whose linear attention has the heads of its attention
        head_dim = given.get("head_dim") or config.hidden_size // config.num_attention_heads
        return config.num_attention_heads, head_dim, head_dim, False, 1
    for *names, delta_rule in _STATES:
        heads, key_dim, value_dim, width = (given.get(name) if isinstance(name, str) else name for name in names)
        if all(isinstance(x, int) for x in (heads, key_dim, value_dim, width)):
            return heads, key_dim, value_dim, delta_rule, width
    return None
