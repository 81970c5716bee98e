"""Plans keep their fingerprints, layouts, traffic, bytes and seconds: compared with a file made before the change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.planning.golden import record, requests

GOLDEN = json.loads((Path(__file__).parent / "golden_plans.json").read_text())
REQUESTS = {name: (mask, given) for name, mask, given in requests()}


def test_every_case_is_in_the_file() -> None:
    assert list(REQUESTS) == list(GOLDEN) and len(GOLDEN) > 300


@pytest.mark.parametrize("group", sorted({name.split(";")[0] for name in REQUESTS}))
def test_plans_are_as_they_were(group: str) -> None:
    for name, (mask, given) in REQUESTS.items():
        if name.split(";")[0] != group:
            continue
        found: dict[str, Any] = record(mask, given)
        wanted = dict(GOLDEN[name])
        seconds = wanted.pop("seconds", None)
        assert found.pop("seconds", None) == (None if seconds is None else pytest.approx(seconds, rel=1e-9)), name
        assert found == wanted, name
