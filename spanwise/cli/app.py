"""The commands plan, overlap, calibrate and verify. A command's module is imported when it runs, so --help is quick."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import tyro

from spanwise.cli.options import CalibrateOptions, OverlapOptions, PlanOptions, VerifyOptions

#: The options of each command. Its module, named like it, has a function of the same name.
COMMANDS: dict[str, Any] = {
    "plan": PlanOptions,
    "overlap": OverlapOptions,
    "calibrate": CalibrateOptions,
    "verify": VerifyOptions,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 2 for wrong options, and 1 for a failed rank or check."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="spanwise",
        description="Context parallelism for PyTorch, planned from the attention mask.",
        args=words or ["--help"],
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    name = next(name for name, kind in COMMANDS.items() if isinstance(options, kind))
    run = getattr(importlib.import_module(f"spanwise.cli.{name}"), name)
    from spanwise.cli.ranks import RankFailure, torchrun_size

    try:
        return run(options, shlex.join(["spanwise", *words]))
    except (ValueError, NotImplementedError, RankFailure) as error:
        if torchrun_size() is not None:  # torchrun shows the traceback
            raise
        sys.stdout.flush()
        print(f"spanwise: {error}", file=sys.stderr)
        return 1 if isinstance(error, RankFailure) else 2
