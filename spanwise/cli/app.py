"""The commands of the command line: verify, plan, calibrate, and overlap."""

from __future__ import annotations

import typer

from spanwise.cli.calibrate import CalibrateOptions, calibrate
from spanwise.cli.command import command
from spanwise.cli.overlap import OverlapOptions, overlap
from spanwise.cli.plan import PlanOptions, plan
from spanwise.cli.verify import VerifyConfig, verify

app = typer.Typer(
    help="Context parallelism for PyTorch, planned from the attention mask.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("verify")(command(VerifyConfig, verify))
app.command("plan")(command(PlanOptions, plan))
app.command("calibrate")(command(CalibrateOptions, calibrate, torchrun=True))
app.command("overlap")(command(OverlapOptions, overlap))
