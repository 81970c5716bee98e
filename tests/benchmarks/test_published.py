"""The table of published measurements: methods, packs, the one fitted number, and orders of methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import __main__ as published, attention, predict, settings

SHAPE = {"heads": 8, "kv_heads": 8, "head_dim": 128, "hardware": "8xH100", "workload": "fwd", "kernel": "FA3"}


def row(number: int, measured: dict[str, Any], group: str = "attention", **setting: Any) -> dict[str, Any]:
    return {"id": number, "source": "s", "group": group, "setting": SHAPE | setting, "measured": measured}


def test_one_number_is_fitted_on_the_smallest_row_and_never_on_packed_masks(tmp_path: Path) -> None:
    whole = {"seq_len": 65536, "mask": "causal"}
    file = tmp_path / "rows.json"
    data = [
        row(1, {"ms": 9.0}, cp=8, method="ulysses", **whole),
        row(2, {"ms": 12.0}, cp=8, method="ring", **whole),
        row(3, {"ms": 20.0}, cp=2, method="ulysses", **whole),
        row(4, {"ms": 1.0}, cp=1, method="flash", **(whole | {"mask": "packed causal documents"})),
        row(5, {"ms": 1.0}, cp=4, method="telepathy", **whole),
        row(6, {"ms": 1.0}, cp=4, group="offload"),
        row(7, {"memory_gib": 70.0}, "e2e-train", model="70B", gpus=2, tp=4, seq_len=8192),  # fewer than tp
    ]
    file.write_text(json.dumps({"about": "", "rows": data}))
    published.main([str(file), "--json", str(tmp_path / "out.json")])
    result = json.loads((tmp_path / "out.json").read_text())
    of = {one["id"]: one for one in result["rows"]}
    assert result["sources"]["s"]["fitted_row"] == 3 and of[3]["ratio"] == pytest.approx(1, abs=1e-3)
    assert [number for number, one in of.items() if one.get("fitted")] == [3]
    assert "unknown" in of[5]["reason"] and "not given" in of[6]["reason"] and of[7]["reason"]
    assert (result["all"]["expressed"], result["all"]["errors"], result["all"]["tau"]) == (4, 3, 1.0)


def problem(packs: tuple[tuple[int, ...], ...], *, causal: bool = True) -> attention.Problem:
    machine = settings.machine_of("H100")
    return attention.Problem(packs, causal, 64, 8, 128, machine, machine.kernels[0])


def test_a_ring_of_contiguous_chunks_takes_nearly_twice_as_long_as_zigzag() -> None:
    long = problem(((1 << 20,),))
    one, other = (attention.seconds(long, attention.method_of(name, 8), backward=False) for name in ("ring", "zigzag"))
    assert 1.7 < one / other < 2.0


def test_packs_are_full_and_cut_at_a_quarter() -> None:
    packs = settings.packs({"seq_len_total": 65536, "mask": "packed causal documents"})
    assert {sum(pack) for pack in packs} == {65536} and max(map(max, packs)) == 16384 and len(packs) == 20
    lists = settings.packs({"seq_len_total": 64, "mask": "packed; cu_seqlens [0,8],[0,2,8]"})
    assert lists == ((64,), (16, 48))


def test_a_training_step_is_counted_in_tokens_of_a_device() -> None:
    setting = {"model": "Llama 3.1 8B", "gpus": 8, "cp": 2, "seq_len": 65536, "local_batch": 1, "hardware": "H100"}
    found = settings.Row(
        1, "s", "e2e-train", settings.complete(setting), {"tokens_per_s_per_gpu": 2000, "memory_gib": 80}
    )
    (pair,) = predict.pairs(found)
    assert pair.measured == pytest.approx(65536 * 4 / 8 / 2000) and 5 < pair.predicted < 20
