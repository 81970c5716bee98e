"""Makes a command of a dataclass: every field is an option, and its line under "Attributes" is the option's help.

    dataclass ─► typer parameters ─► command line ─► dataclass ─► the command's function ─► exit status

A new option is one field and its line in the docstring. `command_line` goes the other way.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

from spanwise.cli.ranks import RankFailure, torchrun_size

#: Balancers that `make_plan` takes by name, but "auto".
BALANCERS = ("contiguous", "head_tail", "per_document_head_tail", "ptrr", "lpt", "spt", "local")


def command(
    config: type, run: Callable[..., int | None], *, torchrun: bool = False, leave_out: Collection[str] = ()
) -> Callable[..., None]:
    """A function for `typer.Typer.command`: it builds `config` from the options and hands it to `run`.

    `num_heads: int = 4` becomes ``--heads`` with the default 4. A field that is a dataclass stands for the fields of
    that class. A tuple is an option that may be given several times; the paths of ``--data`` may also follow bare.
    ``metadata={"metavar": "BYTES"}`` names the value in the help.

    Args:
        config: a dataclass; every field has a default. Its ``ValueError`` becomes one line and exit status 2.
        run: takes the config and returns the exit status. Its docstring is the help of the command.
        torchrun: whether torchrun may start the command on every rank; ``--ranks`` may then be left out.
        leave_out: fields that keep their defaults.
    """
    parameters = [p for p in _parameters(config) if p.name not in leave_out]
    if torchrun:
        parameters = [p.replace(default=None) if p.name == "ranks" else p for p in parameters]

    def call(**given: Any) -> None:
        size = torchrun_size() if torchrun else None
        try:
            if torchrun:
                given["ranks"] = _num_ranks(config, given["ranks"], size)
            status = run(_build(config, given))
        except (ValueError, NotImplementedError) as error:
            if size is not None:  # torchrun shows the traceback
                raise
            _fail(str(error), 2)
        except RankFailure as error:
            _fail(str(error), 1)
        raise typer.Exit(status or 0)

    call.__doc__ = run.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _parameters(config: type) -> Iterator[inspect.Parameter]:
    hints, texts = get_type_hints(config), help_texts(config)
    for field in dataclasses.fields(config):
        kind, name = hints[field.name], _option_name(field)
        if dataclasses.is_dataclass(kind):
            yield from _parameters(kind)  # type: ignore[arg-type]
            continue
        several = kind == tuple[str, ...]
        flags = [f"--{_flag(field)}"] if field.default is False else []  # without its opposite, --no-…
        option = typer.Option(*flags, help=texts.get(name, ""), metavar=field.metadata.get("metavar"))
        kind, default = (list[str] | None, None) if several else (kind, field.default)
        yield _parameter(name, default, Annotated[kind, option])
        if name == "data":
            paths = typer.Argument(metavar="[PATH]...", help="More paths for --data.")
            yield _parameter("more_data", None, Annotated[list[str] | None, paths])


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _build(config: type, given: dict[str, Any]) -> Any:
    """The dataclass of the options; a field without one keeps its default."""
    hints, values = get_type_hints(config), {}
    for field in dataclasses.fields(config):
        kind, name = hints[field.name], _option_name(field)
        if dataclasses.is_dataclass(kind):
            values[field.name] = _build(kind, given)  # type: ignore[arg-type]
        elif name in given:
            values[field.name] = given[name]
            if kind == tuple[str, ...]:
                values[field.name] = (*(given[name] or ()), *(given.get(f"more_{name}") or ()))
    return config(**values)


def choices(*values: str) -> dict[str, str]:
    """Metadata of a field whose help shows the values that it takes."""
    return {"metavar": f"{{{', '.join(values)}}}"}


def _option_name(field: dataclasses.Field[Any]) -> str:
    return field.name.removeprefix("num_")


def _flag(field: dataclasses.Field[Any]) -> str:
    """The option without its dashes in front; ``metadata={"flag": …}`` is for words that Python keeps to itself."""
    return field.metadata.get("flag", _option_name(field).replace("_", "-"))


def help_texts(config: type) -> dict[str, str]:
    """Help of each option: the entries of the section "Attributes" of the docstring, without backquotes."""
    section = inspect.cleandoc(config.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    ([\w, ]+): (.+(?:\n {8}.+)*)", section, re.M)
    texts = {name: " ".join(text.replace("`", "").split()) for names, text in entries for name in names.split(", ")}
    return {name.removeprefix("num_"): text[0].upper() + text[1:] for name, text in texts.items()}


def _num_ranks(config: type, given: int | None, started: int | None) -> int:
    """Ranks of a run: those that torchrun started, else ``--ranks``, else the default of the config."""
    if started is not None and given not in (None, started):
        raise ValueError(f"torchrun started {started} processes, and --ranks says {given}; leave --ranks out")
    default = next(field.default for field in dataclasses.fields(config) if field.name == "ranks")
    return started or (default if given is None else given)  # type: ignore[return-value]


def _fail(text: str, status: int) -> NoReturn:
    sys.stdout.flush()
    print(f"spanwise: {text}", file=sys.stderr)
    raise typer.Exit(status)


def command_line(name: str, options: Any, leave_out: Collection[str]) -> str:
    """The shell command that gives `options`: all fields that differ from their defaults, except `leave_out`."""
    words = ["spanwise", name]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name in leave_out or value == field.default:
            continue
        flag = _flag(field)
        for one in value if isinstance(value, tuple) else (value,):
            words += [f"--{flag}"] if one is True else [f"--no-{flag}"] if one is False else [f"--{flag}", str(one)]
    return shlex.join(words)
