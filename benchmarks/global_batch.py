"""Global batches: predicted steps under one plan over all ranks, and under fixed dp × cp grids.

    python -m benchmarks.global_batch --out benchmarks/results/global-batch.json

32 nominal H100s, 1,048,576 tokens, a layer as in Llama 3 8B.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import spanwise
from benchmarks.publish import main, publish
from spanwise.planning.grids import Grid, compare_grids

SHAPE: dict[str, Any] = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "hardware": spanwise.H100}
LINEAR_FLOPS = 6.0 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
DOCUMENTS = ((2_000, 1.6), (16_000, 1.2))  # medians and sigmas of lengths


def run(out: Path | None = None, quick: bool = False) -> dict[str, Any]:
    """Predict, print a table of each batch, and write JSON to `out`; `quick`: one batch."""
    rows = []
    for median, sigma in DOCUMENTS[:1] if quick else DOCUMENTS:
        for seed in range(1 if quick else 3):
            lengths = documents(median, sigma, seed, 1 << 20)
            grids = compare_grids(lengths, 32, linear_flops=LINEAR_FLOPS, **SHAPE)
            about = {"median": median, "sigma": sigma, "seed": seed, "longest": int(lengths.max())}
            rows.append(about | {"documents": len(lengths), "ways": [summary(grid) for grid in grids]})
    return publish({"predicted": rows}, out)


def documents(median: float, sigma: float, seed: int, tokens: int) -> np.ndarray:
    """Lengths of lognormal documents that fill so many tokens; the last is cut."""
    random, lengths = np.random.default_rng(seed), []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(int(max(1, min(random.lognormal(np.log(median), sigma), left))))
    return np.array(lengths)


def summary(grid: Grid) -> dict[str, Any]:
    return {
        "dp": grid.dp, "cp": grid.cp, "documents": grid.assignment, "seconds": grid.seconds,
        "work_imbalance": grid.work_imbalance, "token_imbalance": grid.token_imbalance,
        "recv_bytes_mean": float(grid.recv_bytes.mean()), "recv_bytes_max": float(grid.recv_bytes.max()),
    }  # fmt: skip


if __name__ == "__main__":
    main(run, __doc__ or "")
