# SPDX-License-Identifier: Apache-2.0
"""What all pages are made with: templates whose values are escaped, and pictures."""

from __future__ import annotations

import functools
from typing import Any, Final

import jinja2
from markupsafe import Markup

from .. import render
from ..picture.svg import Panel, document

NARROW: Final = 400  # a panel up to this is never wider than a phone


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


@functools.cache
def _environment() -> jinja2.Environment:
    """The templates' environment, but for HTML: what a spec says is escaped."""
    return render.environment().overlay(autoescape=True)
