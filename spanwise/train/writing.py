"""Write the shards of a checkpoint; errors of the file system stay recognizable on the way to the other ranks."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.futures import Future


class Writer(FileSystemWriter):
    """DCP's writer, whose errors of the file system arrive as such.

    If the disk is full in the middle of a tensor, torch raises another error, and DCP pickles it without its cause.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if (cause := os_error(error)) is None:
                raise
            raise OSError(cause.errno, cause.strerror or str(cause)) from error


def os_error(error: BaseException) -> OSError | None:
    """The failure of the file system behind an error of a save."""
    failures = [failure for failure, _ in getattr(error, "failures", {}).values()]
    seen: list[BaseException] = []
    for one in [error, *failures]:
        cause: BaseException | None = one
        while cause is not None and cause not in seen:
            seen.append(cause)
            if isinstance(cause, OSError) and cause.errno is not None:
                return cause
            cause = cause.__cause__ or cause.__context__
    return None
