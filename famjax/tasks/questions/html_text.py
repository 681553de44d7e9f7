"""Extraction of the text of an HTML document."""

from __future__ import annotations

import re
from html.parser import HTMLParser

# tags that begin a paragraph
_BLOCKS = {"p", "div", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "li", "tr", "blockquote"}
_UNSEEN = {"head", "script", "style"}


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._unseen = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # the end tag of a head may be missing
        self._unseen = 0 if tag == "body" else self._unseen + (tag in _UNSEEN)
        self._break(tag)
        if tag == "br":
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        # an end tag may have no start tag
        self._unseen = max(self._unseen - (tag in _UNSEEN), 0)
        self._break(tag)

    def handle_data(self, data: str) -> None:
        if not self._unseen:
            self.parts.append(re.sub(r"\s+", " ", data))

    def _break(self, tag: str) -> None:
        if tag in _BLOCKS:
            self.parts.append("\n\n")


def html_text(html: str) -> str:
    """Return the text of an HTML document, with an empty line between paragraphs."""
    parser = _Text()
    parser.feed(html)
    parser.close()
    text = re.sub(r" *\n *", "\n", re.sub(" +", " ", "".join(parser.parts)))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
