"""The built site by itself: links lead to files and anchors, every page is linked, nothing is loaded from elsewhere.

python .ci/site_check.py build/site
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
"""What a browser fetches by itself, without a click."""
MADE = {"genindex.html", "py-modindex.html", "search.html"}
"""Pages that Sphinx makes, which the theme links or nobody needs to."""


class Page(HTMLParser):
    """A page's links, its anchors, and the files that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Note what it names."""
        given = dict(attributes)
        for name in ("id", "name"):
            if given.get(name):
                self.anchors.add(str(given[name]))
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        rel = given.get("rel") or ""
        if tag in LOADED and given.get(LOADED[tag]) and rel not in ("next", "prev", "index", "search", "canonical"):
            self.loaded.append(str(given[LOADED[tag]]))


def problems(site: Path) -> list[str]:
    """What is wrong, a line each."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    found, linked = [], set()
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme == "data":
                continue
            if parts.scheme or parts.netloc:
                if link in page.loaded:
                    found.append(f"{name} loads {link}")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target != path:
                linked.add(target)
            if not target.is_file():
                found.append(f"{name} names {link}, which is not there")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name} names {link}, and there is no such anchor")
    for style in sorted(site.rglob("*.css")):
        for url in re.findall(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')]+)", style.read_text(encoding="utf-8")):
            found.append(f"{style.relative_to(site)} loads {url}")
    for path in pages.keys() - linked:
        if path.name not in MADE and path.parent.name != "_modules" and path != (site / "index.html").resolve():
            found.append(f"{path.relative_to(site.resolve())} is linked from nowhere")
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    wrong = problems(folder)
    print(
        "\n".join(wrong) or f"{sum(1 for _ in folder.rglob('*.html'))} pages: links lead somewhere, nothing is loaded"
    )
    raise SystemExit(bool(wrong))
