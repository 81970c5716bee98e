"""Random attention calls in words: masks, ranks, exchange, shapes, options. Imports nothing of spanwise.

Hypothesis draws every number, so a failing case shrinks, is kept in the example database, and runs first the next time.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.properties.cells import MaskCase, cells
from tests.properties.masks import Rng, cuts, random_batch, random_mask, random_packing

EXCHANGES = ("needed", "all_gather", "hierarchical", "ring", "ulysses", "auto")
STYLES = ("eager", "checkpoint", "selective", "offloaded", "inference first", "layers", "twice", "some")
BALANCERS = ("contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "spt", "local", "auto")


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention call.

    Attributes:
        masks: by name; `mask` is the name of the one that the call takes.
        seed: of the tensors.
        batch: rows of the tensors; a mask of one row serves them all.
        levels: ``(outer, inner)`` ranks; inner 1 is a 1-D mesh.
        host_size: ranks of a host, for exchange "hierarchical".
        exchange, stages, keep_kv, balancer, block_size, cu_seqlens: arguments of make_plan.
        weighted: whether the layout weighs several masks unequally.
        give_shape: whether make_plan learns heads and head dims.
        heads, dims: query and K/V heads; head dims of K and V.
        dtype, kernel, scale, softcap, bias: of the call; `bias` is a kind of score_mod.
        sinks: logits a head that join the softmax; 0: none.
        lse, max_logit: whether the call asks for lse (with a cotangent) and max_logit.
        rank_plan: whether the call takes ``plan.local(…)`` instead of the plan.
        style: how it is called: under a checkpoint, compiled, …; `build` has them.
        gradients: whether q, k and v require gradients.
    """

    masks: dict[str, MaskCase]
    mask: str = "default"
    seed: int = 0
    batch: int = 1
    levels: tuple[int, int] = (1, 1)
    host_size: int = 2
    exchange: str = "needed"
    stages: int | None = None
    keep_kv: bool | None = None
    balancer: str = "contiguous"
    block_size: int = 8
    cu_seqlens: list[int] | None = None
    weighted: bool = False
    give_shape: bool = False
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (8, 6)
    dtype: str = "float64"
    kernel: str = "sdpa"
    scale: float | None = None
    softcap: float | None = None
    bias: str | None = None
    sinks: int = 0
    lse: bool = True
    max_logit: bool = False
    rank_plan: bool = True
    style: str = "eager"
    gradients: bool = True

    @functools.cached_property
    def cells(self) -> np.ndarray:
        """Which keys each row reads, bool ``[batch, q_len, kv_len]``."""
        return cells(self.masks[self.mask])

    @property
    def q_len(self) -> int:
        return self.cells.shape[1]

    @property
    def kv_len(self) -> int:
        return self.cells.shape[2]

    @property
    def num_ranks(self) -> int:
        return self.levels[0] * self.levels[1]

    @property
    def packed(self) -> bool:
        return self.masks[self.mask].kind == "packing"

    def kinds(self) -> list[str]:
        """What the case is one of; `pytest --hypothesis-show-statistics` counts them."""
        options = [name for name in ("sinks", "lse", "softcap", "bias") if getattr(self, name)]
        return [
            f"mask {self.masks[self.mask].kind}",
            f"{self.exchange} on {self.levels[0]} x {self.levels[1]} ranks",
            f"balancer {self.balancer}",
            f"{self.kernel} in {self.dtype}",
            f"called {self.style}",
            *(f"option {name}" for name in options),
        ]


@st.composite
def attention_calls(draw: st.DrawFn, most_ranks: int, exchange: str) -> Case:
    """A call on at most `most_ranks` ranks."""
    return random_case(Rng(draw), most_ranks, exchange)


def random_case(rng: Rng, most_ranks: int, exchange: str) -> Case:
    """One case out of the numbers of `rng`."""
    levels = _ranks(rng, most_ranks, exchange)
    between = levels[0] if exchange != "ulysses" else 1  # groups between which K/V travel
    q_len = _length(rng)
    mask, masks, kv_len, batch, packed = _masks(rng, q_len, levels[0] * levels[1])
    q_len = masks[mask].args["q_len"] if packed else q_len
    square = q_len == kv_len and not (packed and _differs(masks[mask]))
    dual = packed and _in_chunks(masks[mask], 2 * levels[0] * levels[1])
    balancer = "dual_chunk" if dual and rng.random() < 0.8 else _balancer(rng, square)
    stages = None
    if exchange in ("needed", "auto") and rng.random() < 0.8:
        stages = rng.choice([1, 2, 4])
    keep_kv = [None, True, False][rng.integers(0, 3)]
    if between == 1 and keep_kv is False:
        keep_kv = None
    heads = _heads(rng, levels[1] if exchange != "ulysses" else levels[0])
    dims = [rng.integers(1, 17) for _ in range(2)]
    return Case(
        seed=rng.integers(0, 2**32), masks=masks, mask=mask, batch=batch, levels=levels,
        host_size=rng.integers(2, 5), exchange=exchange, stages=stages, keep_kv=keep_kv, balancer=balancer,
        block_size=rng.choice([1, 2, 3, 4, 8, 16, 128]),
        cu_seqlens=cuts(rng, q_len, 4) if balancer == "per_document_head_tail" and not packed else None,
        weighted=len(masks) > 1 and rng.random() < 0.5,
        give_shape=rng.random() < 0.5, heads=heads,
        dims=(dims[0], dims[1] if rng.random() < 0.5 else dims[0]), **_options(rng),
    )  # fmt: skip


def _ranks(rng: Rng, most: int, exchange: str) -> tuple[int, int]:
    """Ranks of both levels. Ulysses alone has one level here."""
    if most > 1 and exchange in ("needed", "all_gather", "ring", "auto") and rng.random() < 0.25:
        levels = [(2, 2), (1, 2), (1, 3), (2, 3), (3, 2), (2, 4), (4, 2)]
        return rng.choice([pair for pair in levels if pair[0] * pair[1] <= most])
    return rng.integers(1, most + 1), 1


def _length(rng: Rng) -> int:
    kind = rng.random()
    if kind < 0.15:
        return rng.integers(1, 9)
    return rng.integers(9, 80) if kind < 0.92 else rng.integers(80, 300)


def _masks(rng: Rng, q_len: int, num_ranks: int) -> tuple[str, dict[str, MaskCase], int, int, bool]:
    """Name of the mask, masks by name, keys, batch rows, and whether the sequences are packed."""
    kind = rng.random()
    if kind < 0.12:
        multiple = 2 * num_ranks if rng.random() < 0.4 else None
        mask = random_packing(rng, q_len, rng.random() < 0.4, multiple)
        return "default", {"default": mask}, mask.args["kv_len"], 1, True
    kv_len = q_len if rng.random() < 0.85 else rng.integers(1, 2 * q_len + 1)
    batch = rng.choice([1, 2, 3], p=[0.6, 0.25, 0.15])
    if batch > 1 and rng.random() < 0.6:
        return "default", {"default": random_batch(rng, q_len, kv_len, batch)}, kv_len, batch, False
    if rng.random() < 0.15:
        masks = {name: random_mask(rng, q_len, kv_len) for name in ("local", "global")}
        return rng.choice(list(masks)), masks, kv_len, batch, False
    return "default", {"default": random_mask(rng, q_len, kv_len)}, kv_len, batch, False


def _differs(packing: MaskCase) -> bool:
    names = ("lens", "starts", "len")
    return any(packing.args[f"q_{name}"] != packing.args[f"kv_{name}"] for name in names)


def _in_chunks(packing: MaskCase, multiple: int) -> bool:
    edges = [x for side in ("q", "kv") for x in (*packing.args[f"{side}_starts"], packing.args[f"{side}_len"])]
    return all(x % multiple == 0 for x in edges)


def _balancer(rng: Rng, square: bool) -> str:
    if not square:
        return rng.choice(["contiguous", "auto"])
    return rng.choice(BALANCERS, p=[0.16, 0.16, 0.12, 0.12, 0.12, 0.12, 0.1, 0.1])


def _heads(rng: Rng, inner: int) -> tuple[int, int]:
    """Query heads that `inner` ranks can share, and K/V heads."""
    kv_heads, group = rng.integers(1, 4), rng.integers(1, 4)
    while kv_heads * group % inner:
        kv_heads, group = rng.integers(1, 9), rng.integers(1, 9)
    return kv_heads * group, kv_heads


def _options(rng: Rng) -> dict[str, Any]:
    """Options of the call that go together."""
    change = rng.choice(["none", "softcap", "alibi", "batch"], p=[0.6, 0.2, 0.1, 0.1])
    bias = change if change in ("alibi", "batch") else None
    return {
        "dtype": rng.choice(["float64", "float32", "bfloat16", "float16"], p=[0.5, 0.3, 0.1, 0.1]),
        "kernel": rng.choice(["reference", "auto"] if bias else ["sdpa", "reference", "auto"]),
        "scale": None if rng.random() < 0.7 else rng.choice([0.0, 0.4, -0.7, 1.5]),
        "softcap": rng.choice([0.5, 3.0]) if change == "softcap" else None,
        "bias": bias,
        "sinks": rng.choice([0, 1, 2], p=[0.7, 0.2, 0.1]),
        "lse": rng.random() < 0.6,
        "max_logit": bias is None and rng.random() < 0.25,
        "rank_plan": rng.random() < 0.7,
        "style": "eager" if rng.random() < 0.4 else rng.choice(STYLES),
        "gradients": rng.random() < 0.95,
    }
