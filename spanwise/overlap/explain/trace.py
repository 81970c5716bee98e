"""Chrome trace events of timelines, for Perfetto (ui.perfetto.dev) or chrome://tracing.

    dag ─► schedule ─► timeline ─► trace ─► file

A timeline is a process, with a track for the compute stream, on which a wait lasts while compute stands still, and one
for each process group. A counter shows the bytes alive. Times are microseconds ("Trace Event Format", Google, 2016).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spanwise.overlap.dag import Kind
from spanwise.overlap.explain.reasons import reasons

_COMPUTE = 0  # its track; groups follow


def save_chrome_trace(
    path: str | os.PathLike[str],
    timelines: Mapping[str, Any],
    *,
    budget: int | None = None,
    groups: Mapping[str, str] | None = None,
) -> None:
    """Write timelines, by name, to a JSON file.

    Args:
        budget: byte limit of the orders, for the reasons of exposed collectives (`reasons.reasons`).
        groups: labels of process groups by name; others keep their name.
    """
    events = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events += trace_events(timeline, name, process, budget=budget, groups=groups)
    lines = ",\n".join(json.dumps(event) for event in events)
    Path(path).write_text(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n', encoding="utf-8")


def in_order(groups: Sequence[str], labels: Mapping[str, str]) -> list[str]:
    """Sort process groups for display: in the order of `labels`, then the others by name."""
    known = list(labels)
    return sorted(groups, key=lambda name: (known.index(name) if name in labels else len(known), len(name), name))


def trace_events(
    timeline: Any,
    name: str = "step",
    process: int = 0,
    *,
    budget: int | None = None,
    groups: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Events of one timeline; compute nodes that take no time are left out."""
    dag, labels = timeline.dag, groups or {}
    tracks = {group: at for at, group in enumerate(in_order(dag.groups, labels), _COMPUTE + 1)}
    begin, end, issued = (1e3 * times for times in (timeline.begin, timeline.end, timeline.issued))
    why = reasons(timeline, budget=budget)
    events: list[dict[str, Any]] = []

    def name_(what: str, track: int, **facts: Any) -> None:
        events.append({"ph": "M", "pid": process, "tid": track, "name": what, "args": facts})

    name_("process_name", _COMPUTE, name=name)
    for at, text in enumerate(["compute", *(labels.get(group, f"group {group}") for group in tracks)]):
        name_("thread_name", at, name=text)
        name_("thread_sort_index", at, sort_index=at)  # viewers sort by name otherwise

    def slice_(text: str, track: int, category: str, since: float, until: float, **facts: Any) -> None:
        times = {"ts": float(since), "dur": float(until - since)}
        events.append({"ph": "X", "pid": process, "tid": track, "name": text, "cat": category, **times, "args": facts})

    for i in timeline.order.tolist():
        node = dag.nodes[i]
        if node.kind == Kind.COMPUTE and node.ms > 0:
            slice_(node.name, _COMPUTE, "compute", begin[i], end[i], ms=node.ms)
        elif node.kind == Kind.START:
            track = tracks[node.group]
            slice_(node.name, _COMPUTE, "issue", issued[i], issued[i])
            slice_(node.name, track, "collective", begin[i], end[i], ms=node.ms, exposed_ms=timeline.exposed[i])
        elif node.kind == Kind.WAIT:
            if node.start in why:
                text = f"exposed: {dag.nodes[node.start].name}"
                slice_(text, _COMPUTE, "exposed", begin[i], end[i], why=str(why[node.start]))
            else:
                slice_(node.name, _COMPUTE, "wait", begin[i], end[i])
    alive = dag.alive_bytes(timeline.order)
    for at in np.flatnonzero(np.diff(alive, prepend=0)).tolist():  # nodes that change the bytes alive
        facts = {"ph": "C", "pid": process, "name": "memory", "args": {"bytes": int(alive[at])}}
        events.append({**facts, "ts": float(issued[timeline.order[at]])})
    return events
