"""Check that a built site makes no requests to other hosts: `python scripts/check_site.py site`.

Links that a reader clicks (`<a href>`) may lead anywhere. What a browser loads by itself (scripts, styles, images,
fonts, frames) must be inside the site.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "link": "href",
}
REMOTE = re.compile(r"^\s*(https?:)?//", re.IGNORECASE)


class _Loads(HTMLParser):
    """Collect the addresses that a browser loads with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.remote: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(LOADED.get(tag, ""), None)
        # A canonical link is metadata; browsers do not load it.
        if address is not None and REMOTE.match(address) and dict(attrs).get("rel") != "canonical":
            self.remote.append(f"<{tag}> {address}")


def remote_loads(site: Path) -> list[str]:
    """Return every address outside the site that a page or a style sheet loads, with the file that loads it."""
    found = []
    for page in sorted(site.rglob("*.html")):
        parser = _Loads()
        parser.feed(page.read_text(encoding="utf-8"))
        found += [f"{page.relative_to(site)}: {address}" for address in parser.remote]
    for style in sorted(site.rglob("*.css")):
        addresses = re.findall(r"url\(\s*['\"]?((?:https?:)?//[^)'\"]*)", style.read_text(encoding="utf-8"))
        found += [f"{style.relative_to(site)}: {address}" for address in addresses]
    return found


def main() -> int:
    """Print the findings and return the exit code."""
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "site")
    pages = len(list(site.rglob("*.html")))
    found = remote_loads(site)
    for line in found:
        sys.stderr.write(f"error: {line}: pages must not load anything from other hosts\n")
    if pages == 0:
        sys.stderr.write(f"error: {site} has no pages; build it with `make docs`\n")
    if not found and pages:
        sys.stdout.write(f"{site}: {pages} pages, no requests to other hosts\n")
    return 1 if found or pages == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
