"""Write generated text into pages of the site, between two comments that name the script and the block.

<!-- draw_gallery.py: causal -->
...
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).parent


def filled(page: str, script: str, blocks: Mapping[str, str]) -> str:
    """The page with each block of `script` replaced.

    Args:
        page: Markdown with the comments.
        script: name of the script that owns the blocks.
        blocks: text by the name of its block.

    Raises:
        ValueError: the page names other blocks of the script than those given.
    """
    pattern = re.compile(rf"(<!-- {re.escape(script)}: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
    named = [match[2] for match in pattern.finditer(page)]
    if sorted(named) != sorted(blocks):
        raise ValueError(f"the page has the blocks {sorted(named)} of {script}, got text for {sorted(blocks)}")
    return pattern.sub(lambda match: f"{match[1]}\n{blocks[match[2]].strip()}\n\n{match[3]}", page)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
