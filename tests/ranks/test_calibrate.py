"""Calibration: fits that find the figures behind synthetic times, and the whole of it on real processes."""

from __future__ import annotations

import dataclasses
import math
import socket
import time
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
import torch

from spanwise.advice.advise import MEASURED
from spanwise.calibrate.fit import AttentionCall, Sample, fit_attention, fit_link
from spanwise.calibrate.measure import Calibration, measure
from spanwise.calibrate.rates import SMALLEST, Ranks
from spanwise.cli.calibrate import show
from spanwise.hardware import CPU_HOST, Hardware
from tests.cli.commands import run
from tests.ranks.gloo import GlooPool

# Sizes over two powers of ten, so that noise of a busy machine does not hide what grows with them.
QUICK = {"problems": ((256, 32), (512, 128), (512, 512)), "largest": 4**4 * SMALLEST, "repeats": 3}


def synthetic_calls() -> list[AttentionCall]:
    pairs = {False: 4.0 * 8 * 64, True: 10.0 * 8 * 64}
    return [
        AttentionCall("synthetic", backward, tokens * keys * pairs[backward], pairs[backward], tokens if own else 0)
        for tokens in (512, 2048, 8192)
        for keys in (32, 300, 1500)
        for own in (True, False)
        for backward in (False, True)
    ]


def attention_seconds(calls: Sequence[AttentionCall], fixed: float, edge: float) -> np.ndarray:
    rate = {False: 5e10, True: 8e10}
    return np.array([fixed + (c.flops + edge * c.tokens * c.pair_flops) / rate[c.backward] for c in calls])


@pytest.mark.parametrize("fixed", [0.0, 2e-3])
@pytest.mark.parametrize("edge", [0.0, 64.0, 130.0])
def test_fit_finds_attention_figures(fixed: float, edge: float) -> None:
    calls = synthetic_calls()
    figures, samples = fit_attention(calls, attention_seconds(calls, fixed, edge).tolist())
    assert figures["attention_flops"] == pytest.approx(5e10, rel=1e-3)
    assert figures["attention_backward_flops"] == pytest.approx(8e10, rel=1e-3)
    assert figures["kernel_seconds"] == pytest.approx(fixed, rel=1e-2, abs=1e-7)
    assert figures["edge_pairs"] == pytest.approx(edge, rel=1e-2, abs=0.05)
    assert max(abs(sample.fitted / sample.seconds - 1) for sample in samples) < 1e-3
    assert {sample.figure for sample in samples} == {"attention forward", "attention backward"}


def test_fit_stands_noise_on_both_sides() -> None:
    # Twice as long and half as long are equally far away: the rate must not drift to one side. (Residuals relative to
    # the fitted times alone give -0.13.)
    calls, rng, rates = synthetic_calls(), np.random.default_rng(0), []
    for _ in range(20):
        noisy = attention_seconds(calls, 1e-3, 100) * np.exp(0.6 * rng.standard_normal(len(calls)))
        rates.append(math.log(fit_attention(calls, noisy.tolist())[0]["attention_flops"] / 5e10))
    assert abs(np.mean(rates)) < 0.08 and np.std(rates) < 0.3


def test_fit_refuses_times_without_meaning() -> None:
    calls = synthetic_calls()
    with pytest.raises(ValueError, match="attention"):
        fit_attention(calls, [1e-3] * len(calls))
    with pytest.raises(ValueError, match="collectives"):
        fit_link([("all_gather", 10.0**n, 1e-3) for n in range(2, 8)])


def test_a_fixed_time_is_that_of_no_call_and_not_negative() -> None:
    # Small collectives that waited for the processor took longer than larger ones: nothing is faster than a latency.
    times = {4096: 3.9, 65536: 3.9, 262144: 2.0, 1048576: 5.4}
    link, _, _ = fit_link([("all_gather", float(n), 1e-3 * t) for n, t in times.items()])
    assert 0 <= link.latency <= 2e-3 and 1e8 < link.bandwidth < 1e9
    link, _, _ = fit_link([("all_gather", 10.0**n, 2e-9 * 10.0**n - 1e-6) for n in range(3, 8)])
    assert link.latency >= 0


def test_fit_finds_the_link_and_what_a_backend_moves() -> None:
    factors = {"all_gather": 1.25, "reduce_scatter": 2.0, "all_to_all": 1.0}
    samples = [(c, 4.0**n, 5e-4 + f * 4.0**n / 25e6) for c, f in factors.items() for n in range(6, 12)]
    link, wire, fitted = fit_link(samples)
    assert link.bandwidth == pytest.approx(25e6) and link.latency == pytest.approx(5e-4)
    assert wire == pytest.approx(factors)
    assert fitted == pytest.approx([seconds for _, _, seconds in samples])
    # Known factors are kept: the same times are then those of another link.
    link, wire, _ = fit_link(samples[12:], {"all_to_all": 2.0})
    assert link.bandwidth == pytest.approx(50e6) and wire == {"all_to_all": 2.0}


def everything(rank: int, mesh, out: str, options: dict) -> tuple[dict, dict, float]:
    begin = time.perf_counter()
    result = measure(mesh, **QUICK, **options)
    if rank == 0:
        result.hardware.save(out)
    assert len({(s.figure, s.what) for s in result.samples}) == len(result.samples)
    return result.hardware.to_dict(), {s.what: s.seconds for s in result.samples}, time.perf_counter() - begin


@pytest.mark.slow
def test_processes_agree_on_one_hardware(gloo_pool: GlooPool, tmp_path) -> None:
    """Of two levels, in a range from a very slow computer to a very fast one; a call's time is that of the sweep."""
    path = str(tmp_path / "here.json")
    results = gloo_pool.run(4, everything, path, {"host_size": 2, "num_q_heads": 4, "num_kv_heads": 2})
    first, samples, seconds = results[0]
    assert all(result[:2] == results[0][:2] for result in results), "every rank must return the same figures"
    hardware = Hardware.load(path)
    assert hardware.to_dict() == first
    for rate in (hardware.attention_flops, hardware.attention_backward_flops, hardware.matmul_flops):
        assert 1e7 < rate < 1e14
    assert 1e7 < hardware.memory_bandwidth < 1e13 and 2**20 < hardware.memory < 2**50
    assert [link.ranks for link in hardware.links] == [2, None]
    assert all(1e4 < link.bandwidth < 1e12 and 0 <= link.latency < 1 for link in hardware.links)
    assert 0 <= hardware.kernel_seconds < 1 and 0 <= hardware.edge_pairs <= 1024
    assert "4 and 2 heads of 64" in hardware.source and all(0 < value < seconds for value in samples.values())
    assert any("remote" in what for what in samples) and any("own keys" in what for what in samples)


def of_ranks(rank: int, mesh, hosts: list[str]) -> tuple[list[float], list[float], list[int]]:
    """Figures of which the slowest rank's count; and ranks of a host, by its own name and by those given."""
    ranks = Ranks(mesh, torch.device("cpu"))
    sizes = [ranks.host_size(None)]
    with mock.patch.object(socket, "gethostname", lambda: hosts[rank]):
        sizes.append(ranks.host_size(None))
    calls = [lambda: [1.0 + rank, 5.0 - rank], lambda: [7.0 * rank]]
    return ranks.over_ranks([1.0 + rank, 5.0 - rank]), ranks.medians(calls, 3), sizes


def test_the_slowest_rank_counts_and_host_names_tell_the_levels(gloo_pool: GlooPool) -> None:
    for hosts, size in (("aabb", 2), ("abcd", 4)):  # one level, between hosts
        found = gloo_pool.run(4, of_ranks, list(hosts))
        assert found == [([4.0, 5.0], [4.0, 5.0, 21.0], [4, size])] * 4
    for hosts, names in (("abaa", r"\('a', 1\), \('b', 1\), \('a', 2\)"), ("abab", "consecutive"),
                         ("aaab", r"\('a', 3\), \('b', 1\)")):  # fmt: skip
        with pytest.raises(ValueError, match=names):
            gloo_pool.run(4, of_ranks, list(hosts))


def test_figures_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    hardware = dataclasses.replace(CPU_HOST, name="my [/cluster] a[red]b")
    samples = (Sample("attention forward", "one", 1.0, 1.1), Sample("attention forward", "two", 1.0, 0.7))
    samples += tuple(Sample(figure, "call", 1.0, 1.0) for figure in ("link between hosts", "link inside a host"))
    show(Calibration(hardware, samples, 12.34))
    printed = capsys.readouterr().out
    assert "my [/cluster] a[red]b, measured in 12.3 s" in printed
    assert f"{MEASURED[2]:.2f} times" in printed and "399.4 GFLOP/s" in printed and "20.0%, 30.0% of 2" in printed
    assert "1,000.0 MB/s a rank, 200 µs" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [({"host_size": 3}, "host_size .*3"), ({"kernel": "fast"}, "'fast'"),
     ({"num_q_heads": 3, "num_kv_heads": 2}, "got 3 and 2")],
)  # fmt: skip
def test_what_cannot_be_measured(gloo_pool: GlooPool, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gloo_pool.run(2, everything, "", options)


def test_one_rank_has_no_link(gloo_pool: GlooPool) -> None:
    with pytest.raises(ValueError, match="two ranks .*; got one of shape"):
        gloo_pool.run(1, everything, "", {})
    with pytest.raises(ValueError, match="two ranks .*; got no mesh"):
        measure(None, **QUICK)
    result = run("calibrate", "--ranks", 1)
    assert result.status == 2 and "two ranks; got 1" in result.err
