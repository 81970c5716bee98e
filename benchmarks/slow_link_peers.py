"""Attention calls of other packages as `slow_link_rank.py` times them, on contiguous shards."""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """The package does not take this mask, or does not run here; the text says why."""


PEERS: dict[str, Any] = {}
