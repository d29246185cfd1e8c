# SPDX-License-Identifier: Apache-2.0
"""Why things are as they are: the project's decisions as pages, and links to them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup, escape

FOLDER: Final = Path(__file__).resolve().parents[2] / "decisions"

_NUMBER: Final = re.compile(r"(?<![\d.])\d{4}\b")  # 0.0012 is none
_FILE: Final = re.compile(r"\d{4}-[\w-]+(?=\.md\Z)")
_COMMENT: Final = re.compile(r"^<!--.*?-->\n", re.MULTILINE)
_WIDE: Final = {"table_open": "Table", "fence": "Code", "code_block": "Code"}
_SCROLL: Final = '<div class="scroll" role="region" aria-label="{}" tabindex="0">\n'


@dataclass(frozen=True)
class Decision:
    """stem: of its file, which begins with its number; text: Markdown, a heading first."""

    stem: str
    text: str

    @property
    def number(self) -> str:
        """Four digits."""
        return self.stem[:4]

    @property
    def title(self) -> str:
        """What its heading says after the number."""
        return self.text.partition("\n")[0].partition(": ")[2].replace("`", "")

    @property
    def page(self) -> str:
        """Where its page is in the site."""
        return f"decisions/{self.stem}.html"


@functools.cache
def shipped() -> Mapping[str, Decision]:
    """The decisions of this version by number."""
    found = (
        Decision(path.stem, path.read_text("utf-8")) for path in FOLDER.glob("*.md")
    )
    return {one.number: one for one in sorted(found, key=lambda one: one.stem)}


def link(number: str, root: str = "") -> Markup:
    """Name a decision with a link to its page; root: the way to the site's folder."""
    place = f"{root}{shipped()[number].page}"
    return Markup('<a href="{}">decision {}</a>').format(place, number)


def links(numbers: Sequence[str], root: str = "") -> Markup:
    """Name several."""
    return Markup(", ").join(link(number, root) for number in numbers)


def html(decision: Decision) -> Markup:
    """Its text; decisions that it names by file or number are links to their pages."""
    text = _COMMENT.sub("", decision.text)
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens: list[Token] = []
    for token in markdown.parse(text):
        if token.type == "inline":
            token.children = list(_linked(token.children or [], decision.number))
        if name := _WIDE.get(token.type):
            tokens.append(_raw(_SCROLL.format(name)))
        tokens.append(token)
        if token.type in ("table_close", "fence", "code_block"):
            tokens.append(_raw("</div>\n"))
    return Markup(markdown.renderer.render(tokens, markdown.options, {}))


def _linked(tokens: Sequence[Token], own: str) -> Iterator[Token]:
    """The words of a paragraph, with links. own: the decision's own number, which is none."""
    depth = 0
    for token in tokens:
        if token.type == "link_open":
            depth += 1
            found = _FILE.match(str(token.attrs["href"]))
            if found:
                token.attrs["href"] = f"{found[0]}.html"
        depth -= token.type == "link_close"
        if token.type != "text" or depth:
            yield token
            continue
        done = 0
        for number in _NUMBER.finditer(token.content):
            other = shipped().get(number[0])
            if other is None or other.number == own:
                continue
            yield Token("text", "", 0, content=token.content[done : number.start()])
            words = f'<a href="{escape(other.stem)}.html">{other.number}</a>'
            yield Token("html_inline", "", 0, content=words)
            done = number.end()
        yield Token("text", "", 0, content=token.content[done:])


def _raw(words: str) -> Token:
    return Token("html_block", "", 0, content=words)
