"""Plans as files: numpy's npz, arrays and one JSON header, no pickled code. Behind `Plan.save` and `Plan.load`.

The fingerprint detects a changed file, and the checksums of npz a damaged one, also in `reason` and `candidates`, which
the fingerprint leaves out. Neither detects forgery.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import numpy as np

from spanwise.hardware import Hardware
from spanwise.layouts.layout import Layout
from spanwise.layouts.packing import Packing
from spanwise.masks.span_mask import SpanMask
from spanwise.planning.plan_data import Candidate, PlanData, PlanT
from spanwise.planning.recurrence import Recurrence
from spanwise.routes.exchanges import EXCHANGES, resolve

FORMAT = 6


def save(plan: PlanData, path: str | os.PathLike[str]) -> None:
    """Write the plan to ``path``."""
    arrays: dict[str, np.ndarray] = {}
    for i, mask in enumerate(plan.masks.values()):
        arrays[f"mask{i}_start"], arrays[f"mask{i}_end"] = mask.start, mask.end
    for name, layout in (("runs", plan.layout), ("kv_runs", plan.kv_layout)):
        if name == "runs" or layout != plan.layout:
            arrays |= {f"{name}{row}": layout.pieces(row) for row in range(layout.batch_size)}
    for row, cu in enumerate(plan.cu_seqlens or ()):
        arrays[f"cu_seqlens{row}"] = cu
    if plan.packing is not None:
        arrays |= {f"packing_{name}": np.asarray(array) for name, array in plan.packing.to_arrays().items()}
    header = plan.header() | {
        "format": FORMAT,
        "masks": list(plan.masks),
        "seq_len": plan.seq_len,
        "kv_len": plan.kv_len,
        "layout_rows": plan.layout.batch_size,
        "cu_rows": len(plan.cu_seqlens or ()),
        "fingerprint": plan.fingerprint,
    }
    with open(path, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, header=np.array(json.dumps(header)), **arrays)


def load(cls: type[PlanT], path: str | os.PathLike[str], exchange: Any = None) -> PlanT:
    """Read a plan that :func:`save` wrote, of class `cls`; ``ValueError`` if the file is not a plan, or was altered.

    Args:
        exchange: the caller's, if the plan was made with one.
    """
    own = None if exchange is None else resolve(exchange)
    exchanges = EXCHANGES if own is None else EXCHANGES | {own.name: own}
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as data:
            header = json.loads(str(data["header"]))
            if header["format"] != FORMAT:
                raise ValueError(f"it has plan format {header['format']}, this version reads {FORMAT}")
            masks = {
                name: SpanMask(data[f"mask{i}_start"], data[f"mask{i}_end"], header["kv_len"])
                for i, name in enumerate(header["masks"])
            }

            def layout(name: str, length: int) -> Layout:
                rows = range(header["layout_rows"])
                return Layout([data[f"{name}{row}"] for row in rows], header["num_ranks"], length)

            of_queries = layout("runs", header["seq_len"])
            kv_layout = layout("kv_runs", header["kv_len"]) if "kv_runs0" in data else of_queries
            packed = {name[8:]: data[name] for name in data if name.startswith("packing_")}
            packing = Packing(**packed) if packed else None
            cu = tuple(data[f"cu_seqlens{row}"] for row in range(header["cu_rows"])) or None
        fields = {f.name for f in dataclasses.fields(cls)}
        plain = {key: value for key, value in header.items() if key in fields - {"masks"}}
        plain["hardware"] = Hardware.from_dict(header["hardware"])
        plain["candidates"] = tuple(Candidate(**candidate) for candidate in header["candidates"])
        if plain["recurrences"]:
            plain["recurrences"] = {name: Recurrence(**value) for name, value in plain["recurrences"].items()}
        if header["exchange"] not in exchanges:
            raise ValueError(f"its exchange {header['exchange']!r} is not spanwise's: pass Plan.load(path, exchange=…)")
        plain["kv_exchange"] = exchanges[header["exchange"]]
        plan = cls(masks=masks, layout=of_queries, kv_layout=kv_layout, cu_seqlens=cu, packing=packing, **plain)
    except FileNotFoundError:
        raise
    except Exception as error:  # for damaged bytes zipfile, its decompressors and numpy raise errors of many types
        cause = error if isinstance(error, (OSError, ValueError)) else repr(error)
        raise ValueError(f"{os.fspath(path)} is not a plan written by Plan.save: {cause}") from error
    if plan.fingerprint != header.get("fingerprint"):
        raise ValueError(
            f"{os.fspath(path)} was altered or damaged: its fingerprint is {header.get('fingerprint')}, "
            f"its contents give {plan.fingerprint}"
        )
    return plan
