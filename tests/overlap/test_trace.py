"""Chrome traces of timelines: what stands on which track, when, and what the arrows join."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spanwise.overlap.dag import Dag, Kind, Node, Storage
from spanwise.overlap.engine import simulate

# An all-gather of 4 ms behind one of 1 ms on the same stream, 3 ms of independent compute, 2 ms that need the second.
DAG = Dag(
    (
        Node("short", Kind.START, 1.0, group="dp"),
        Node("long", Kind.START, 4.0, group="dp"),
        Node("view", Kind.COMPUTE),
        Node("other", Kind.COMPUTE, 3.0),
        Node("wait short", Kind.WAIT, deps=(0,), start=0),
        Node("wait long", Kind.WAIT, deps=(1,), start=1),
        Node("reader", Kind.COMPUTE, 2.0, deps=(5,)),
    ),
    (Storage(100, 1, (5, 6)), Storage(10, 3, (), kept=True)),
)


def events(path: Path, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == phase]


def test_what_stands_on_the_tracks(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    simulate(DAG).save_chrome_trace(path)
    tracks = {e["tid"]: e["args"]["name"] for e in events(path, "M") if e["name"] == "thread_name"}
    assert sorted(tracks.values()) == ["compute", "group dp"]
    slices = [(tracks[e["tid"]], e["cat"], e["name"], e["ts"], e["dur"]) for e in events(path, "X")]
    assert slices == [
        ("compute", "issue", "short", 0, 0),
        ("group dp", "collective", "short", 0, 1000),
        ("compute", "issue", "long", 0, 0),
        ("group dp", "collective", "long", 1000, 4000),
        ("compute", "compute", "other", 0, 3000),
        ("compute", "wait", "wait short", 3000, 0),
        ("compute", "exposed", "exposed: long", 3000, 2000),
        ("compute", "compute", "reader", 5000, 2000),
    ]
    assert [e["args"] for e in events(path, "X") if e["cat"] == "compute"] == [{"ms": 3.0}, {"ms": 2.0}]
    assert [e["args"]["why"] for e in events(path, "X") if e["cat"] == "exposed"] == [
        "no independent compute (1 ms), stream is saturated (1 ms)"
    ]
    assert [(e["ts"], e["args"]["bytes"]) for e in events(path, "C")] == [(0, 100), (0, 110)]
