# SPDX-License-Identifier: Apache-2.0
"""What all pages are made with: templates whose values are escaped, and pictures."""

from __future__ import annotations

import functools
from html import escape
from typing import Any, Final

import jinja2
from markupsafe import Markup

from ...bench import plot
from ...build import render
from ..picture.svg import Panel, document

NARROW: Final = 400  # [pixels] a panel up to this is never wider than a phone

# Charts are grey on white.
CHART_STYLE: Final = """\
.chart { display: block; }
@media screen and (prefers-color-scheme: dark) {
  .chart { filter: invert(1); }
}
"""


def template(name: str, **values: object) -> str:
    """A file of the site."""
    return render.render_template(f"site/{name}", values, env=_environment())


def figure(panel: Panel) -> dict[str, Any]:
    """What the macro `figure` reads."""
    return {
        "title": panel.title,
        "svg": Markup(document(panel, style=False)),  # our own, escaped
        "narrow": panel.width <= NARROW,
    }


class Charts:
    """The charts of a site, by path: files of their own, as ids in them may be the same."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}

    def add(self, path: str, title: str, chart: Any, root: str = "") -> dict[str, Any]:
        """Keep a matplotlib Figure; what the macro `figure` reads. root: from its page."""
        self.files[path] = plot.image(chart, "svg").decode()
        image = f'<img class="chart" src="{root}{path}" alt="{escape(title)}">'
        narrow = bool(chart.get_figwidth() <= plot.ROWS_INCHES)
        return {"title": title, "svg": Markup(image), "narrow": narrow}


@functools.cache
def _environment() -> jinja2.Environment:
    """The templates' environment, but for HTML: what a spec says is escaped."""
    return render.environment().overlay(autoescape=True)
