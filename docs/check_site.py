"""Crawl a built site: every link and anchor inside it exists, every picture is there, nothing comes from the network.

python docs/check_site.py site
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"img": "src", "script": "src", "source": "src", "iframe": "src"}  # what a page fetches by itself
FETCHED_LINKS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch"}


class Page(HTMLParser):
    """Ids, links and fetched files of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and FETCHED_LINKS & set(given.get("rel", "").split()):
            self.fetched.append(given.get("href", ""))
        if tag in LOADED and LOADED[tag] in given:
            self.fetched.append(given[LOADED[tag]])


def faults(site: Path) -> list[str]:
    """What is wrong, one line each."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for url in page.fetched + page.links:
            parts = urlsplit(url)
            if parts.scheme in ("data", "mailto"):
                continue
            if parts.scheme or parts.netloc:
                if url in page.fetched:
                    found.append(f"{name}: fetches {url} from the network")
                continue
            if name.name == "404.html":
                continue  # its links are from the root of a server
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target = target / "index.html"
            if not target.exists():
                found.append(f"{name}: {url} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                found.append(f"{name}: {url} names no place of {target.name}")
    return found


def main() -> None:
    site = Path(sys.argv[1])
    found = faults(site)
    pages = len(list(site.rglob("*.html")))
    print("\n".join([*found, f"{pages} pages, {len(found)} faults"]))
    sys.exit(bool(found) or not pages)


if __name__ == "__main__":
    main()
