"""A griffe extension: what the docstrings of spanwise say that mkdocstrings would misread."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:class|func|meth|data|attr|mod):`")
NAMES = re.compile(r"^( +)(\w+(?:, \w+)+):", re.MULTILINE)
NO_BREAK = "\u00a0"


class Docstrings(Extension):
    """Shows Sphinx roles as code, and one entry for several names, such as ``start, end:``, with all of its names."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = ROLE.sub("`", obj.docstring.value)
            # Griffe takes what follows a space for a type.
            obj.docstring.value = NAMES.sub(lambda m: f"{m[1]}{m[2].replace(' ', NO_BREAK)}:", text)
