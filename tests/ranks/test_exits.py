"""A collective ends only when gloo's thread has let go of its tensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from spanwise import _torch
from tests.limits import HANG

HELD = 0.3  # seconds


@pytest.fixture
def name() -> Iterator[str]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield _torch.group_name(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


class _Holds:
    """A process group whose works, and with them the tensors, live for a while after their end."""

    def __init__(self, group: dist.ProcessGroup, released: list[str]) -> None:
        self.group, self.released = group, released

    def __getattr__(self, name: str) -> Callable[..., dist.Work]:
        def call(*args: object) -> dist.Work:
            works = [getattr(self.group, name)(*args)]

            def release() -> None:
                self.released.append("works")
                works.clear()

            threading.Timer(HELD, release).start()
            return works[0]

        return call


def test_a_wait_is_over_when_gloo_has_let_go(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for a tensor that the caller keeps."""
    monkeypatch.setattr(_torch, "_LET_GO", HANG)
    real, released, x = _torch.find_group, [], torch.arange(6.0).reshape(2, 3)
    with monkeypatch.context() as patch:
        patch.setattr(_torch, "is_gloo", lambda group: True)
        patch.setattr(_torch, "find_group", lambda name: _Holds(real(name), released))
        pending = _torch.start_all_reduce(x, "sum", name)
    assert torch.equal(_torch.wait(pending), x)
    assert released == ["works"]
    began, kept = time.monotonic(), [x.view(6), x.detach()]
    assert torch.equal(_torch.wait(_torch.start_all_reduce(x, "sum", name)), x)
    assert time.monotonic() - began < HANG and kept
