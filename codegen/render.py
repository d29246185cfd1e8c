# SPDX-License-Identifier: Apache-2.0
"""Turns a template and its values into the text of a file, the same bytes everywhere.

The text is rendered strictly, formatted with the pinned black and stamped with two digests in its
header, so that any copy of the file can be told intact, edited or out of date by itself.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.meta

from .errors import CheckFailed
from .verify import SPEC_DIGITS, sha256
from .verify import Digests as Digests
from .verify import body_digest as body_digest
from .verify import stated_digests as stated_digests

if TYPE_CHECKING:
    from .planning.kernel_plan import KernelPlan

# A header template writes this line where the digests belong.
DIGEST_PLACEHOLDER = "spec sha256:  body sha256:"


@functools.cache
def template_folder() -> Path:
    """Where the templates are: inside the installed package, or beside it in a source tree."""
    spec = importlib.util.find_spec(f"{__package__}.templates")
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(__file__).resolve().parent.parent / "templates"


def environment(loader: jinja2.BaseLoader | None = None) -> jinja2.Environment:
    """The one way templates are read: strict, no globals, whole-line tags leave no trace."""
    env = jinja2.Environment(
        loader=loader or jinja2.FileSystemLoader(template_folder(), encoding="utf-8"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        newline_sequence="\n",
        autoescape=False,
    )
    env.globals.clear()
    return env


def render_kernel(plan: KernelPlan) -> str:
    """Return the whole text of a plan's kernel: rendered, formatted, with its digests."""
    values = {**plan.context, "digest_line": DIGEST_PLACEHOLDER}
    text = format_source(render_template(kernel_template(plan), values))
    return finish(text, plan.spec_file.digest)


def kernel_template(plan: KernelPlan) -> str:
    """Return the name of the template that a plan's kernel is rendered from."""
    return f"{plan.arch}/module.py.j2"


def render_template(
    name: str, context: Mapping[str, Any], *, env: jinja2.Environment | None = None
) -> str:
    """Render one template; raises CheckFailed that names the template and line."""
    try:
        return (env or _environment()).get_template(name).render(context)
    except jinja2.TemplateSyntaxError as error:
        raise CheckFailed(
            f"template {error.name}:{error.lineno}: {error.message}"
        ) from error
    except jinja2.TemplateNotFound as error:
        raise CheckFailed(f"template {error.name}: not found") from error
    except jinja2.TemplateError as error:
        raise CheckFailed(f"template {_place(error, name)}: {error.message}") from error


def format_source(text: str) -> str:
    """Format Python text with black: default style, target 3.10. Black is pinned exactly."""
    # Here: most builds find their text in the cache and need no formatter.
    import black
    from black.mode import TargetVersion
    from black.parsing import InvalidInput

    mode = black.Mode(target_versions={TargetVersion.PY310})
    collects = gc.isenabled()
    gc.disable()  # a quarter of the time, and a tree of a thousand lines is soon gone
    try:
        return black.format_str(text, mode=mode)
    except InvalidInput as error:
        raise CheckFailed(f"rendered text is not Python: {error}") from error
    finally:
        if collects:
            gc.enable()


def template_closure(
    name: str, *, env: jinja2.Environment | None = None
) -> tuple[str, ...]:
    """The template and all it includes, imports or extends, at any depth, sorted.

    Raises CheckFailed for a missing template and for a name that only a run would tell.
    """
    env = env or _environment()
    found: set[str] = set()
    todo = [name]
    while todo:
        current = todo.pop()
        if current in found:
            continue
        found.add(current)
        for referenced in jinja2.meta.find_referenced_templates(
            env.parse(_source(env, current))
        ):
            if referenced is None:
                raise CheckFailed(
                    f"template {current}: includes a template by a computed name"
                )
            todo.append(referenced)
    return tuple(sorted(found))


def closure_digest(name: str, *, env: jinja2.Environment | None = None) -> str:
    """The sha256 over names and texts of a template's closure."""
    env = env or _environment()
    digest = hashlib.sha256()
    for member in template_closure(name, env=env):
        text = _source(env, member).encode()
        digest.update(f"{member}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


def finish(text: str, spec_digest: str) -> str:
    """Put both digests where the header has the placeholder line; the text is final afterwards."""
    placeholder = f"{DIGEST_PLACEHOLDER}\n"
    before, found, after = text.partition(f"\n{placeholder}")
    if not found or f"\n{placeholder}" in after:
        raise CheckFailed(
            f"rendered text needs exactly one line {DIGEST_PLACEHOLDER!r}"
        )
    body = sha256(f"{before}\n{after}")
    return f"{before}\nspec sha256:{spec_digest[:SPEC_DIGITS]}  body sha256:{body}\n{after}"


@functools.cache
def _environment() -> jinja2.Environment:
    return environment()


def _source(env: jinja2.Environment, name: str) -> str:
    if env.loader is None:
        raise CheckFailed(f"template {name}: not found")
    try:
        return env.loader.get_source(env, name)[0]
    except jinja2.TemplateNotFound as error:
        raise CheckFailed(f"template {name}: not found") from error


def _place(error: BaseException, name: str) -> str:
    """`template:line` where a run of a template failed: Jinja maps its traceback to it."""
    place = name
    traceback = error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if filename.endswith(".j2"):
            place = f"{Path(filename).name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place
