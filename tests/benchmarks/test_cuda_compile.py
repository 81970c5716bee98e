"""The check of compiled CUDA kernels finds what it is for; compiling itself needs a CUDA build of torch."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.cuda_compile.__main__ import CASES, RESULT, SHARED, SPILLED, problems

Row = dict[str, Any]


def kernel(name: str = "triton_tem_fused_flex_attention_0", **changed: int) -> Row:
    return {"name": name, "registers": 200, "spilled": 0, "shared": 131_072, "wgmma": 24, "warps": 8, **changed}


GOOD: Row = {"graphs": 1, "error": "", "kernels": [kernel(), kernel("triton_poi_fused_1"), kernel()]}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"error": "TypeError: planted"}, "planted"),
        ({"graphs": 2}, "2 graphs"),
        ({"kernels": [kernel()]}, "1 kernels"),
        ({"kernels": [kernel(shared=SHARED + 1), kernel()]}, "shared memory"),
        ({"kernels": [kernel(), kernel(spilled=SPILLED + 1)]}, "spills"),
    ],
)
def test_a_defect_is_a_problem(changed: Row, text: str) -> None:
    assert problems(GOOD, GOOD, True) == []
    (found,) = problems(GOOD | changed, GOOD, True)
    assert text in found


def test_the_committed_result_has_every_case_and_no_problem() -> None:
    found = json.loads(RESULT.read_text())["cases"]
    assert list(found) == list(CASES)
    for name, row in found.items():
        assert problems(row, row["plain"], CASES[name].get("gradients", True)) == [] == row["problems"]
