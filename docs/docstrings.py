"""A griffe extension: what the docstrings of spanwise say that mkdocstrings would misread."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:class|func|meth|data|attr|mod):`")
ATTRIBUTES = re.compile(r"^Attributes:\n.*?(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
SHARED = re.compile(r"^( +)(\w+(?:, \w+)+):(.*\n(?:\1 .*\n?)*)", re.MULTILINE)
# A doctest without a heading, up to the next section. Markdown would take it for quotes, and lists in it for links.
DOCTEST = re.compile(r"^>>> .*?(?=^[A-Z]\w+:\n|\Z)", re.MULTILINE | re.DOTALL)


class Docstrings(Extension):
    """Shows Sphinx roles as code, an attribute entry for several names, such as ``start, end:``, once for each, and
    doctests without a heading as examples."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = ROLE.sub("`", obj.docstring.value)
            text = ATTRIBUTES.sub(lambda section: SHARED.sub(_each, section[0]), text)
            obj.docstring.value = DOCTEST.sub(lambda found: "Examples:\n" + textwrap.indent(found[0], "    "), text)


def _each(entry: re.Match[str]) -> str:
    body = entry[3] if entry[3].endswith("\n") else entry[3] + "\n"
    return "".join(f"{entry[1]}{name}:{body}" for name in entry[2].split(", "))
