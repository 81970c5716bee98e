"""Plans of rows that travel in place of K and V: bytes, seconds and memory."""

from __future__ import annotations

import pytest

import spanwise
from spanwise import SpanMask

# DeepSeek-V3: 128 heads, keys of 128 + 64, values of 128, latents of 512 and a rotary key of 64.
SHAPE = dict(num_q_heads=128, num_kv_heads=128, head_dim=192, v_head_dim=128)
LENGTH = 65536


def plan(kv_row_dim: int | None = 576, exchange: str = "needed", **options: object) -> spanwise.Plan:
    return spanwise.make_plan(
        SpanMask.causal(LENGTH), 8, balancer="head_tail", exchange=exchange, kv_row_dim=kv_row_dim, **SHAPE, **options
    )


@pytest.mark.parametrize("exchange", ["all_gather", "needed", "ring"])
def test_bytes_are_those_of_the_rows(exchange: str) -> None:
    compact, expanded = plan(exchange=exchange), plan(None, exchange)
    assert compact.recv_bytes().tolist() == (compact.recv_tokens() * 576 * 2).tolist()
    assert (expanded.recv_bytes() >= 60 * compact.recv_bytes()).all()
    assert (compact.saved_bytes() * (128 * 320) == expanded.saved_bytes() * 576).all()


def test_one_chunk_at_a_time_is_expanded() -> None:
    one, four = plan(stages=1), plan(stages=4)
    token = 128 * 320 * 2
    assert (one.resident_bytes() >= one.recv_tokens() * token).all()
    assert (four.resident_bytes() <= one.resident_bytes() - four.recv_tokens() * token * 0.7).all()
