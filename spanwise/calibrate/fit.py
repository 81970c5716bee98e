"""Fits of a calibration: the figures that describe measured times best. Pure numpy.

Errors are relative: an error of 10 % counts the same for a millisecond and for a second.
"""

# S samples, C columns of a fit

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from spanwise.hardware import Link


@dataclasses.dataclass(frozen=True)
class Sample:
    """A timed call in words, the figure it measures, its seconds on the slowest rank, and those by the fit."""

    figure: str
    what: str
    seconds: float
    fitted: float


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """One forward or backward of the kernel on a problem `what`: FLOPs of the mask's pairs, and of one pair.

    `tokens` are queries on the mask's edge, where the kernel computes more; 0 for keys of other ranks.
    """

    what: str
    backward: bool
    flops: float
    pair_flops: float
    tokens: int


def fit_attention(
    calls: Sequence[AttentionCall], seconds: Sequence[float]
) -> tuple[dict[str, float], tuple[Sample, ...]]:
    """The attention figures of `Hardware` that describe the times best, and the samples with their fitted times.

    ``seconds = kernel_seconds + (flops + edge_pairs · tokens · pair_flops) / rate`` with one rate for the forward and
    one for the backward. That is linear for a given ``edge_pairs``; a grid search finds the best one.

    Raises:
        ValueError: the times do not grow with the work.
    """
    y = np.asarray(seconds, dtype=np.float64)
    backward = np.array([call.backward for call in calls])
    flops = np.array([call.flops for call in calls])
    edge = np.array([call.tokens * call.pair_flops for call in calls])

    def fit(edge_pairs: float) -> tuple[float, np.ndarray, np.ndarray]:
        computed = flops + edge_pairs * edge
        columns = np.stack([np.ones_like(y), computed * ~backward, computed * backward], axis=1)
        x = _fit_relative(columns, y)
        fitted = columns @ x
        return float(((fitted - y) ** 2 / np.abs(fitted * y)).sum()), x, fitted

    low, high = 0.0, 1024.0
    for _ in range(6):  # each grid is eight times finer
        grid = np.linspace(low, high, 33)
        best = int(np.argmin([fit(edge_pairs)[0] for edge_pairs in grid]))
        low, high = grid[max(0, best - 2)], grid[min(32, best + 2)]
    _, x, fitted = fit(grid[best])
    if not (x[1:] > 0).all():
        raise ValueError(
            f"attention took no longer for more work; take larger problems. It took {y.tolist()} seconds for "
            f"{flops.tolist()} FLOPs"
        )
    names = ("kernel_seconds", "attention_flops", "attention_backward_flops", "edge_pairs")
    rates = dict(zip(names, (float(x[0]), float(1 / x[1]), float(1 / x[2]), float(grid[best])), strict=True))
    samples = tuple(
        Sample(f"attention {'backward' if call.backward else 'forward'}", call.what, measured, model)
        for call, measured, model in zip(calls, y.tolist(), fitted.tolist(), strict=True)
    )
    return rates, samples


def _fit_relative(columns_SC: np.ndarray, y_S: np.ndarray) -> np.ndarray:
    """Least squares of relative residuals; the first unknown, a fixed time, lies between 0 and the shortest sample.

    Twice as long and half as long count the same. Residuals relative to measured times alone would give a fit below
    slow outliers; relative to fitted times alone, a fit above fast ones. The weights depend on the fit, which is
    repeated until they settle.
    """
    scale_S = y_S
    for _ in range(8):
        weighted, target = columns_SC / scale_S[:, None], y_S / scale_S
        x = np.linalg.lstsq(weighted, target, rcond=None)[0]
        fixed = min(max(x[0], 0.0), float(y_S.min()))
        if fixed != x[0]:
            x = np.append(fixed, np.linalg.lstsq(weighted[:, 1:], target - fixed * weighted[:, 0], rcond=None)[0])
        # Σ (f - y) f' / scale² = 0 is then Σ sinh(½ log f/y) f'/f = 0.
        fitted_S = np.maximum(columns_SC @ x, 1e-3 * y_S)
        scale_S = fitted_S**0.75 * y_S**0.25
    return x


def fit_link(
    samples: Sequence[tuple[str, float, float]], wire: dict[str, float] | None = None
) -> tuple[Link, dict[str, float], list[float]]:
    """The link that describes ``(collective, bytes, seconds)`` best, wire factors, and the fitted seconds.

    ``seconds = latency + factor · bytes / bandwidth``. The collective that moves its bytes fastest has factor 1; `wire`
    has known factors. ``ValueError`` if the times do not grow with the bytes.
    """
    names = list(dict.fromkeys(name for name, _, _ in samples))
    num_bytes = np.array([n for _, n, _ in samples])
    y = np.array([s for _, _, s in samples])
    is_name = np.array([[name == other for other in names] for name, _, _ in samples])
    if wire is None:
        columns = np.concatenate([np.ones((len(y), 1)), is_name * num_bytes[:, None]], axis=1)
    else:
        on_wire = num_bytes * np.array([wire[name] for name, _, _ in samples])
        columns = np.stack([np.ones_like(y), on_wire], axis=1)
    x = _fit_relative(columns, y)
    if not (x[1:] > 0).all():
        raise ValueError(
            f"collectives took no longer for more bytes; raise largest. (collective, bytes, seconds) were {samples}"
        )
    fastest = float(x[1:].min())
    if wire is None:
        wire = {name: float(beta / fastest) for name, beta in zip(names, x[1:], strict=True)}
    return Link(1 / fastest, float(x[0])), wire, (columns @ x).tolist()
