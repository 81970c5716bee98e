"""Random attention calls in words: masks, ranks, exchange, shapes, options. Imports nothing of spanwise.

A case follows from a seed and an index alone: filters skip cases, they do not change them. Another version of numpy may
draw other numbers from the same seed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from spanwise.cli.fuzz.cells import MaskCase
from spanwise.cli.fuzz.masks import Rng, cuts, random_batch, random_mask, random_packing
from spanwise.cli.fuzz.refusals import REFUSALS

BALANCERS = ("contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "spt", "local", "auto")


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention call.

    Attributes:
        seed, index: what it follows from.
        masks: by name; `mask` is the name of the one that the call takes.
        batch: rows of the tensors; a mask of one row serves them all.
        levels: ``(outer, inner)`` ranks; inner 1 is a 1-D mesh.
        exchange, stages, keep_kv, balancer, block_size, cu_seqlens: arguments of make_plan.
        quality: of make_plan; `weighted`: whether the layout weighs several masks unequally.
        give_shape: whether make_plan learns heads and head dims.
        heads, dims: query and K/V heads; head dims of K and V.
        dtype, kernel, scale, softcap, bias: of the call; `bias` is a kind of score_mod.
        sinks: logits a head that join the softmax; 0: none.
        lse, max_logit: whether the call asks for lse (with a cotangent) and max_logit.
        rank_plan: whether the call takes ``plan.local(…)`` instead of the plan.
        gradients: whether q, k and v require gradients.
        refusal: name of what is wrong with the call, or None.
    """

    seed: int
    index: int
    masks: dict[str, MaskCase]
    mask: str
    q_len: int
    kv_len: int
    batch: int
    levels: tuple[int, int]
    exchange: str
    stages: int | None
    keep_kv: bool | None
    balancer: str
    block_size: int
    cu_seqlens: list[int] | None
    quality: str
    weighted: bool
    give_shape: bool
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: str
    kernel: str
    scale: float | None
    softcap: float | None
    bias: str | None
    sinks: int
    lse: bool
    max_logit: bool
    rank_plan: bool
    gradients: bool
    refusal: str | None

    @property
    def num_ranks(self) -> int:
        return self.levels[0] * self.levels[1]

    @property
    def name(self) -> str:
        """``SEED:INDEX``."""
        return f"{self.seed}:{self.index}"

    @property
    def packed(self) -> bool:
        return self.masks[self.mask].kind == "packing"

    def kinds(self) -> dict[str, str]:
        """What the case is one of, by group: for counts and filters."""
        exchange = self.exchange
        if self.exchange == "needed" and self.stages is not None:
            exchange += f" in {self.stages}"
        if self.levels[1] > 1:
            exchange = f"two levels, {exchange}"
        mask = self.masks[self.mask].kind
        options = [name for name in ("sinks", "lse", "max_logit") if getattr(self, name)]
        options += [name for name in ("scale", "softcap") if getattr(self, name) is not None]
        options += ["score_mod"] if self.bias else []
        options += ["keep_kv=False"] if self.keep_kv is False else []
        options += ["GQA"] if self.heads[0] > self.heads[1] else []
        options += ["MLA dims"] if self.dims[0] != self.dims[1] else []
        options += ["cross attention"] if self.q_len != self.kv_len else []
        options += ["batched mask"] if mask == "stack" else []
        options += ["several masks"] if len(self.masks) > 1 else []
        options += ["weights"] if self.weighted else []
        options += ["several sinks a head"] if self.sinks > 1 else []
        options += ["quality fast"] if self.quality == "fast" else []
        return {
            "mask": mask,
            "ranks": str(self.num_ranks),
            "exchange": exchange,
            "balancer": self.balancer,
            "kernel": self.kernel,
            "dtype": self.dtype,
            "refusal": self.refusal or "none",
            **{f"option {name}": "yes" for name in options},
        }


def random_case(seed: int, index: int) -> Case:
    """The case of a seed and an index."""
    rng = np.random.default_rng([seed, index])
    levels, exchange = _ranks(rng)
    between = levels[0] if exchange != "ulysses" else 1  # groups between which K/V travel
    q_len = _length(rng)
    mask, masks, kv_len, batch, packed = _masks(rng, q_len, levels[0] * levels[1])
    q_len = masks[mask].args["q_len"] if packed else q_len
    square = q_len == kv_len and not (packed and _differs(masks[mask]))
    dual = packed and _in_chunks(masks[mask], 2 * levels[0] * levels[1])
    balancer = "dual_chunk" if dual and rng.random() < 0.8 else _balancer(rng, square)
    stages = None
    if exchange in ("needed", "auto") and rng.random() < 0.8:
        stages = int(rng.choice([1, 2, 4]))
    if exchange == "needed" and stages is None and index % 2:
        exchange = "hierarchical"
    keep_kv = [None, True, False][int(rng.integers(0, 3))]
    if between == 1 and keep_kv is False:
        keep_kv = None
    heads = _heads(rng, levels[1] if exchange != "ulysses" else levels[0])
    dims = [int(x) for x in rng.integers(1, 17, 2)]
    case = Case(
        seed=seed, index=index, masks=masks, mask=mask, q_len=q_len, kv_len=kv_len, batch=batch, levels=levels,
        exchange=exchange, stages=stages, keep_kv=keep_kv, balancer=balancer,
        block_size=int(rng.choice([1, 2, 3, 4, 8, 16, 128])),
        cu_seqlens=cuts(rng, q_len, 4) if balancer == "per_document_head_tail" and not packed else None,
        quality=("best", "fast")[index % 4 == 1], weighted=len(masks) > 1 and index % 2 == 1,
        give_shape=bool(rng.random() < 0.5), heads=heads,
        dims=(dims[0], dims[1] if rng.random() < 0.5 else dims[0]), **_options(rng),
    )  # fmt: skip
    # By the index, so that the cases of older versions stay what they were.
    if case.dtype == "bfloat16" and index % 2:
        case = dataclasses.replace(case, dtype="float16")
    if case.sinks and index % 3 == 0:
        case = dataclasses.replace(case, sinks=2)
    if rng.random() < 0.12:
        fitting = [name for name, refusal in REFUSALS.items() if refusal.fits(case)]
        case = dataclasses.replace(case, refusal=str(rng.choice(fitting)))
    return case


def _ranks(rng: Rng) -> tuple[tuple[int, int], str]:
    """Levels, and the exchange between groups; Ulysses alone has one level of groups of one rank here."""
    if rng.random() < 0.15:
        levels = [(2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (1, 2), (1, 3)][int(rng.integers(0, 7))]
        return levels, str(rng.choice(["needed", "all_gather", "ring", "auto"]))
    ranks = int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8], p=[0.08, 0.25, 0.25, 0.17, 0.08, 0.06, 0.05, 0.06]))
    return (ranks, 1), str(
        rng.choice(["needed", "all_gather", "ring", "ulysses", "auto"], p=[0.4, 0.15, 0.2, 0.15, 0.1])
    )


def _length(rng: Rng) -> int:
    kind = rng.random()
    if kind < 0.15:
        return int(rng.integers(1, 9))
    return int(rng.integers(9, 80)) if kind < 0.92 else int(rng.integers(80, 300))


def _masks(rng: Rng, q_len: int, num_ranks: int) -> tuple[str, dict[str, MaskCase], int, int, bool]:
    """Name of the mask, masks by name, keys, batch rows, and whether the sequences are packed."""
    kind = rng.random()
    if kind < 0.12:
        multiple = 2 * num_ranks if rng.random() < 0.4 else None
        mask = random_packing(rng, q_len, bool(rng.random() < 0.4), multiple)
        return "default", {"default": mask}, mask.args["kv_len"], 1, True
    kv_len = q_len if rng.random() < 0.85 else int(rng.integers(1, 2 * q_len + 1))
    batch = int(rng.choice([1, 2, 3], p=[0.6, 0.25, 0.15]))
    if batch > 1 and rng.random() < 0.6:
        return "default", {"default": random_batch(rng, q_len, kv_len, batch)}, kv_len, batch, False
    if rng.random() < 0.15:
        masks = {name: random_mask(rng, q_len, kv_len) for name in ("local", "global")}
        return str(rng.choice(list(masks))), masks, kv_len, batch, False
    return "default", {"default": random_mask(rng, q_len, kv_len)}, kv_len, batch, False


def _differs(packing: MaskCase) -> bool:
    names = ("lens", "starts", "len")
    return any(packing.args[f"q_{name}"] != packing.args[f"kv_{name}"] for name in names)


def _in_chunks(packing: MaskCase, multiple: int) -> bool:
    edges = [x for side in ("q", "kv") for x in (*packing.args[f"{side}_starts"], packing.args[f"{side}_len"])]
    return all(x % multiple == 0 for x in edges)


def _balancer(rng: Rng, square: bool) -> str:
    if not square:
        return str(rng.choice(["contiguous", "auto"]))
    return str(rng.choice(BALANCERS, p=[0.16, 0.16, 0.12, 0.12, 0.12, 0.12, 0.1, 0.1]))


def _heads(rng: Rng, inner: int) -> tuple[int, int]:
    """Query heads that `inner` ranks can share, and K/V heads."""
    kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    while kv_heads * group % inner:
        kv_heads, group = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    return kv_heads * group, kv_heads


def _options(rng: Rng) -> dict[str, Any]:
    """Options of the call that go together."""
    change = rng.choice(["none", "softcap", "alibi", "batch"], p=[0.6, 0.2, 0.1, 0.1])
    bias = str(change) if change in ("alibi", "batch") else None
    return {
        "dtype": str(rng.choice(["float64", "float32", "bfloat16"], p=[0.5, 0.3, 0.2])),
        "kernel": str(rng.choice(["reference", "auto"] if bias else ["sdpa", "reference", "auto"])),
        "scale": None if rng.random() < 0.7 else float(rng.choice([0.0, 0.4, -0.7, 1.5])),
        "softcap": float(rng.choice([0.5, 3.0])) if change == "softcap" else None,
        "bias": bias,
        "sinks": int(rng.random() < 0.3),
        "lse": bool(rng.random() < 0.6),
        "max_logit": bool(bias is None and rng.random() < 0.25),
        "rank_plan": bool(rng.random() < 0.7),
        "gradients": bool(rng.random() < 0.95),
        "refusal": None,
    }
