# SPDX-License-Identifier: Apache-2.0
"""How the parts of a report look: on a terminal, and in a pull request's comment."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Final, Literal

Style = Literal["text", "markdown"]

WIDTH: Final = 100  # [columns] of a terminal's sentences
MARKDOWN_SOURCE: Final = 300  # [lines] of source in a comment, which GitHub limits


class Text:
    """Plain text with aligned columns. source_limit: lines of source in all; None: no limit."""

    source_limit: int | None = None

    def title(self, text: str) -> str:
        """The report's first line."""
        return text

    def heading(self, text: str) -> str:
        """The words that start a part."""
        return text

    def name(self, text: str) -> str:
        """A kernel, a path or a revision."""
        return text

    def sentence(self, text: str, indent: str = "") -> str:
        """A sentence of its own."""
        return textwrap.fill(
            text,
            WIDTH,
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_on_hyphens=False,
            break_long_words=False,
        )

    def bullets(self, lines: Iterable[str]) -> str:
        """Sentences, each on its own line."""
        return "\n".join(self.sentence(line, "  ") for line in lines)

    def commands(self, lines: Iterable[str]) -> str:
        """What to type."""
        return "\n".join(f"  {line}" for line in lines)

    def table(self, rows: Sequence[Sequence[str]]) -> str:
        """Rows of equally many cells; the first one has the titles."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = (c.ljust(width) for c, width in zip(row, widths, strict=True))
            lines.append(f"  {'  '.join(cells)}".rstrip())
        return "\n".join(lines)

    def source(self, lines: Iterable[str]) -> str:
        """Lines of a diff."""
        return "\n".join(lines)


class Markdown(Text):
    """What GitHub and GitLab show."""

    source_limit = MARKDOWN_SOURCE

    def title(self, text: str) -> str:
        """The report's first line."""
        return f"### {text}"

    def heading(self, text: str) -> str:
        """The words that start a part."""
        return f"**{text}**"

    def name(self, text: str) -> str:
        """A kernel, a path or a revision."""
        return f"`{text}`"

    def sentence(self, text: str, indent: str = "") -> str:
        """A sentence of its own."""
        return text

    def bullets(self, lines: Iterable[str]) -> str:
        """Sentences, each on its own line."""
        return "\n".join(f"- {line}" for line in lines)

    def commands(self, lines: Iterable[str]) -> str:
        """What to type."""
        return ", ".join(f"`{line}`" for line in lines)

    def table(self, rows: Sequence[Sequence[str]]) -> str:
        """Rows of equally many cells; the first one has the titles."""
        head, *body = (f"| {' | '.join(row)} |" for row in rows)
        return "\n".join([head, f"|{' --- |' * len(rows[0])}", *body])

    def source(self, lines: Iterable[str]) -> str:
        """Lines of a diff."""
        return "\n".join(["```diff", *lines, "```"])


PAGES: Final[dict[Style, type[Text]]] = {"text": Text, "markdown": Markdown}
