"""Commands made of dataclasses: options, help and values come from the fields."""

from __future__ import annotations

import dataclasses
import shlex

import pytest
import typer
from typer.testing import CliRunner

from spanwise.cli.app import app
from spanwise.cli.calibrate import CalibrateOptions
from spanwise.cli.command import BALANCERS, command, command_line, help_texts
from spanwise.cli.overlap import OverlapOptions
from spanwise.cli.plan import PlanOptions
from spanwise.cli.ranks import RankFailure
from spanwise.cli.verify import VerifyConfig
from spanwise.layouts.assignment import resolve


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes.

    Attributes:
        num_heads: query heads.
        secret: of nobody.
    """

    num_heads: int = 4
    secret: int = 7


@dataclasses.dataclass(frozen=True)
class Options:
    """Options.

    Attributes:
        data: files.
        ranks: how many; `two` lines of
            help.
        sizes: of the model.
        rate: a number.
        fast: less exact.
        cache: keep results.

    Raises:
        ValueError: the rate is negative.
    """

    data: tuple[str, ...] = ()
    ranks: int = 2
    sizes: Sizes = dataclasses.field(default_factory=Sizes)
    rate: float | None = dataclasses.field(default=None, metadata={"metavar": "HERTZ"})
    fast: bool = False
    cache: bool = True

    def __post_init__(self) -> None:
        if (self.rate or 0) < 0:
            raise ValueError(f"rate must not be negative, got {self.rate}")


def invoke(*arguments: str, torchrun: bool = False) -> tuple[int, list[object], str]:
    found: list[object] = []

    def note(options: Options) -> int:
        """Note the options."""
        found.append(options)
        if options.rate == 13:
            raise RankFailure("rank 1 failed:\nbad luck")
        return 3 if options.fast else 0

    app = typer.Typer(rich_markup_mode=None)
    app.command()(command(Options, note, torchrun=torchrun, leave_out=("secret",)))
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, found, result.stderr or result.output


def test_fields_are_options() -> None:
    assert invoke()[:2] == (0, [Options()])
    arguments = "--data a b --data c --ranks 5 --heads 8 --rate 1.5 --fast --no-cache"
    expected = Options(("a", "c", "b"), 5, Sizes(8), 1.5, fast=True, cache=False)
    assert invoke(*arguments.split())[:2] == (3, [expected])
    assert invoke("--secret", "1")[0] == invoke("--no-fast")[0] == 2


def test_help_is_the_docstring() -> None:
    text = " ".join(invoke("--help")[2].split())
    for part in (
        "Note the options.", "--ranks <int> How many; two lines of help. [default: 2]", "--rate HERTZ A number.",
        "--heads <int> Query heads. [default: 4]", "--fast Less exact.", "--cache / --no-cache Keep results.",
    ):  # fmt: skip
        assert part in text
    assert "secret" not in text


def test_help_shows_the_balancers_and_exchanges() -> None:
    text = " ".join(CliRunner().invoke(app, ["verify", "--help"]).output.split())
    assert "--exchange {auto, all_gather, needed, hierarchical, ring, ulysses}" in text and "--mask {documents," in text
    with pytest.raises(ValueError, match="use " + ", ".join(map(repr, BALANCERS)) + " or an object"):
        resolve("none")


def test_errors_are_one_line() -> None:
    assert invoke("--rate", "-1") == (2, [], "spanwise: rate must not be negative, got -1.0\n")
    status, _, text = invoke("--rate", "13")
    assert (status, text) == (1, "spanwise: rank 1 failed:\nbad luck\n")


def test_ranks_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(torchrun=True)[1] == [Options()]
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "3"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    assert invoke(torchrun=True)[1] == [Options(ranks=3)]
    assert invoke("--ranks", "2", torchrun=True)[:2] == (1, [])
    assert invoke("--ranks", "2")[1] == [Options()]


@pytest.mark.parametrize("config", [VerifyConfig, PlanOptions, CalibrateOptions, OverlapOptions])
def test_every_option_has_a_help(config: type) -> None:
    texts = help_texts(config)
    assert set(texts) == {field.name.removeprefix("num_") for field in dataclasses.fields(config)}
    assert all(text.endswith(".") for text in texts.values())


def test_a_command_line_gives_its_options_again() -> None:
    options = Options(("a b", "c"), 5, fast=True, cache=False)
    line = command_line("x", options, ("sizes",))
    assert line == "spanwise x --data 'a b' --data c --ranks 5 --fast --no-cache"
    assert invoke(*shlex.split(line)[2:])[1][0] == options
