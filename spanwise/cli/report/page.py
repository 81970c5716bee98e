"""One self-contained HTML page of a report: no network, no libraries; its security policy lets it load nothing.

`page.html.jinja` and `page.css` hold the parts that all reports share; each report adds a template, a script, styles.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from spanwise.cli.report import units


def render_page(name: str, *, styles: tuple[str, ...] = (), **values: Any) -> str:
    """The page of the template ``NAME.html.jinja`` as text.

    Numbers stand in ``<data value>`` with their full precision; the macros of the templates round the text shown.

    Args:
        name: report, "plan" or "overlap". Its script is ``NAME.js``.
        styles: files of styles after ``page.css``.
        values: variables of the template. Text is escaped, except `Markup`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        seconds=units.seconds,
        ms=units.milliseconds,
        bytes=units.num_bytes,
        count=units.count,
        times=units.times,
        share=units.percent,
        fine_share=units.fine_percent,
    )
    style = "".join(_read(file) for file in ("page.css", *styles))
    template = environment.get_template(f"{name}.html.jinja")
    return template.render(**values, style=Markup(style), script=Markup(_read(f"{name}.js")))


def _read(name: str) -> str:
    return resources.files("spanwise.cli.report").joinpath(name).read_text("utf-8")
