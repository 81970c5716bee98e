"""Compile FlexAttention as spanwise calls it for an H200 that is not there: registers, spills, shared memory, graphs.

    python -m benchmarks.cuda_compile                 # needs a CUDA build of torch and g++: `make cuda-check`
    python -m benchmarks.cuda_compile --only MLA --json FILE

Fake CUDA tensors go through torch.compile, Triton and ptxas; nothing runs. A case fails if it does not compile, needs
more shared memory than a block of an H200 has, spills much more than torch's FlexAttention with a causal mask, or makes
more than one graph.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.cuda_compile import pretend

RESULT = Path(__file__).parents[1] / "results" / "cuda-compile.json"
SHARED = 232_448  # bytes of a block on sm_90
SPILLED = 1100  # bytes of a thread above torch's: most is 1,036, in the forward of head dim 64
ROWS = 128  # keys and queries of a block of the mask
Row = dict[str, Any]

#: Name: what differs from 8,192 queries, 65,536 keys, 32 and 8 heads of 128, bfloat16, one span, with gradients.
CASES: dict[str, Row] = {
    "bf16": {},
    "fp16": {"dtype": "float16"},
    "fp32, head dim 64": {"dtype": "float32", "dim": 64, "v_dim": 64},
    "fp32": {"dtype": "float32"},
    "head dim 64": {"dim": 64, "v_dim": 64},
    "head dim 256": {"heads": (16, 8), "dim": 256, "v_dim": 256},
    "MLA, 192 and 128": {"heads": (32, 32), "dim": 192},
    "4 spans": {"spans": 4},
    "spans of each batch row": {"batch": 2},
    "softcap": {"softcap": 30.0},
    "score_mod": {"score_mod": True},
    "no whole blocks": {"queries": (1000,), "keys": 1000},
    "inference": {"gradients": False},
    "inference, 16 queries": {"queries": (16,), "gradients": False},
    "numbers of keys": {"dim": 64, "v_dim": 64, "queries": (1024,) * 5, "key_counts": (1024, 1300, 4096, 5000, 65536)},
}


def compiled(case: Row, plain: bool = False) -> Row:
    """Compile a case; returns its graphs, seconds and kernels, and the error if there was one.

    Args:
        plain: torch's own FlexAttention with a causal mask in its place.
    """
    import torch
    from torch._dynamo.utils import counters
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch._dynamo.reset()
    counters.clear()
    pretend.kernels.clear()
    begin, error, gradients = time.monotonic(), "", case.get("gradients", True)
    queries = case.get("queries", (8192,))
    keys = case.get("key_counts", (case.get("keys", 65_536),) * len(queries))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(gradients):
        for q_len, kv_len in zip(queries, keys, strict=True):
            try:
                (_plain if plain else _ours)(case, q_len, kv_len)
            except Exception as found:  # what runs at last must fail; anything earlier is a finding
                if not any(text in str(found) for text in ("there is no device", "driver version is insufficient")):
                    error = f"{type(found).__name__}: {str(found).strip()[:300]}"
    return {
        "graphs": counters["stats"]["unique_graphs"], "seconds": round(time.monotonic() - begin, 1), "error": error,
        "kernels": [kernel._asdict() | {"seconds": round(kernel.seconds, 1)} for kernel in pretend.kernels],
    }  # fmt: skip


def _tensors(case: Row, q_len: int, kv_len: int) -> tuple[Any, ...]:
    """q, k, v, start, end and the tables of a case, on the device that is not there."""
    import torch

    from spanwise import _torch
    from spanwise.attention.kernels.flex import Flex, FlexTables

    batch, (heads, kv_heads), capacity = case.get("batch", 1), case.get("heads", (32, 8)), Flex().capacity(kv_len)

    def numbers(num_heads: int, tokens: int, dim: int) -> torch.Tensor:
        dtype, wants = getattr(torch, case.get("dtype", "bfloat16")), case.get("gradients", True)
        return torch.empty(batch, num_heads, tokens, dim, device="cuda", dtype=dtype, requires_grad=wants)

    def table(*shape: int) -> torch.Tensor:
        return torch.empty(batch, *shape, device="cuda", dtype=torch.int32)

    dim, spans = case.get("dim", 128), Flex().num_spans(case.get("spans", 1))
    rows, columns = -(-q_len // ROWS), capacity // ROWS
    shapes = [(1, rows), (1, rows, columns)] * 2 + [(1, columns), (1, columns, rows)] * 2
    q, k = numbers(heads, q_len, dim), numbers(kv_heads, capacity, dim)
    v = numbers(kv_heads, capacity, case.get("v_dim", 128))
    tables = [table(*shape) for shape in shapes]
    for i, dim in ((1, 3), (3, 3), (4, 2), (5, 2), (6, 2), (7, 2)):
        _torch.mark_dynamic(tables[i], dim)
    return q, k, v, table(spans, q_len), table(spans, q_len), FlexTables(*tables)


def _ours(case: Row, q_len: int, kv_len: int) -> None:
    import torch

    from spanwise.attention.kernels.base import AttentionOptions, Chunk
    from spanwise.attention.kernels.table import KERNELS

    q, k, v, start, end, tables = _tensors(case, q_len, kv_len)
    q_pos, kv_pos = (torch.empty(1, x.shape[2], device="cuda", dtype=torch.int64) for x in (q, k))
    chunk, kernel = Chunk(start, end, kv_pos, tables), KERNELS["flex"]
    options = AttentionOptions(None, _distance if case.get("score_mod") else None, case.get("softcap"))
    kernel.check(q, k, v, chunk, options)
    kernel.attend(q, k, v, chunk, q_pos, options)


def _plain(case: Row, q_len: int, kv_len: int) -> None:
    import torch
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    q, k, v, _, _, tables = _tensors(case, q_len, kv_len)
    causal = BlockMask(
        (q.shape[2], k.shape[2]), **vars(tables), BLOCK_SIZE=(ROWS, ROWS),
        mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
    )  # fmt: skip
    torch.compile(flex_attention, fullgraph=True, dynamic=False)(q, k, v, block_mask=causal, enable_gqa=True)


def _distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - 0.01 * (q_idx - kv_idx)


def attention(row: Row) -> list[Row]:
    """The kernels of attention among those of a case: the forward, then the backward."""
    return [kernel for kernel in row["kernels"] if kernel["name"].startswith("triton_tem")]


def problems(row: Row, plain: Row | None, gradients: bool) -> list[str]:
    """What is wrong with a compiled case.

    Args:
        plain: the case by torch's FlexAttention.
        gradients: whether there is a backward.
    """
    found = [row["error"]] if row["error"] else []
    if len(attention(row)) != 1 + gradients:
        found.append(f"{len(attention(row))} kernels of attention, not {1 + gradients}")
    if row["graphs"] != 1:
        found.append(f"{row['graphs']} graphs, not one")
    for kernel in row["kernels"]:
        if kernel["shared"] > SHARED:
            found.append(f"{kernel['name']} needs {kernel['shared']} bytes of shared memory, a block has {SHARED}")
    for kernel, other in zip(attention(row), attention(plain) if plain else (), strict=False):
        if kernel["spilled"] > other["spilled"] + SPILLED:
            found.append(f"{kernel['name']} spills {kernel['spilled']} bytes, torch's {other['spilled']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_compile", description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--json", type=Path, default=RESULT)
    args = parser.parse_args()
    pretend.restart()
    import torch
    import triton

    pretend.install()
    versions = {"by": f"torch {torch.__version__}, Triton {triton.__version__}, for sm_90a"}
    rows: dict[str, Row] = {}
    for name in args.only:
        case = CASES[name]
        row, plain = compiled(case), None if "key_counts" in case else compiled(case, plain=True)
        row["problems"] = problems(row, plain, case.get("gradients", True))
        rows[name] = row | {"plain": plain}
        shown = "; ".join(
            f"{k['registers']} registers, {k['spilled']:,} B spilled, {k['shared']:,} B shared" for k in attention(row)
        )
        print(f"{name:24} {row['seconds']:6.1f} s  {shown}", *row["problems"], sep="\n    ", flush=True)
        args.json.write_text(json.dumps(versions | {"cases": rows}, indent=1) + "\n")
    return int(any(row["problems"] for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
