# SPDX-License-Identifier: Apache-2.0
"""Each template partial reads exactly the inputs and defines the names that its comment states."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jinja2
import jinja2.meta
import pytest
import support
from fmha_gen.arch import ARCHITECTURES
from fmha_gen.build import render, specialise
from fmha_gen.features.backward import is_backward
from test_unshipped import unshipped

BACKWARD = " backward"
MODULES = {
    **{arch: f"{arch}/forward/module.py.j2" for arch in ARCHITECTURES},
    **{f"{arch}{BACKWARD}": f"{arch}/backward/module.py.j2" for arch in ARCHITECTURES},
}
PAGES = ("index", "kernel", "speed", "decisions", "decision")
SITE = (*(f"site/{page}.html.j2" for page in PAGES), "site/style.css.j2")
VENDOR = tuple(
    f"vendor/{name}.j2"
    for name in (
        "init.py",
        "flash_attention_adapter.py",
        "pytorch_adapter.py",
        "readme.md",
        "sglang_adapter.py",
        "transformers_adapter.py",
        "vllm_adapter.py",
    )
)
PARTIALS_OF = {
    name: support.template_closure(module) - {module}
    for name, module in MODULES.items()
}
PARTIALS = sorted(set().union(*PARTIALS_OF.values()))

# `defines:` in words, where a list would only repeat the partial.
IN_WORDS = frozenset(
    {"the module docstring", "every imported name of the module", "the constants"}
)

_COMMENT = re.compile(r"\{#\n(?P<text>.*?)#\}\n", re.DOTALL)
_STATED = re.compile(
    r"^inputs: (?P<inputs>.+)\ndefines: (?P<defines>.+)\Z", re.MULTILINE
)

each_partial = pytest.mark.parametrize("name", PARTIALS)


class Stated(NamedTuple):
    """What a partial's comment says; `words` is what it says it defines, but in prose."""

    inputs: frozenset[str]
    defines: frozenset[str]
    words: frozenset[str]


def source_of(name: str) -> str:
    return (render.template_folder() / name).read_text("utf-8")


def stated(name: str) -> Stated:
    comment = _COMMENT.match(source_of(name))
    assert comment, f"{name} does not start with a comment"
    match = _STATED.search(comment["text"].strip())
    assert match, f"{name}: its comment does not end with lines inputs: and defines:"
    inputs = frozenset(match["inputs"].split(", ")) - {"none"}
    defines = re.split(r", | and (?=the )", match["defines"])
    words = frozenset(defines) & IN_WORDS
    return Stated(inputs, frozenset(defines) - words, words)


@functools.cache
def contexts(module: str) -> tuple[Mapping[str, Any], ...]:
    """The values that the templates of a module get, for every spec of it we have."""
    arch, backward = module.removesuffix(BACKWARD), module.endswith(BACKWARD)
    return tuple(
        {**each.context, **render.OF_EVERY_KERNEL}
        for each in (*map(support.shipped_plan, support.SHIPPED), *unshipped().values())
        if each.arch == arch and is_backward(each.spec_file.spec) == backward
    )


@functools.cache
def rendered(name: str) -> tuple[str, ...]:
    """Each text of the partial alone, of all specs, given only the inputs that it states."""
    inputs = stated(name).inputs

    def of(context: Mapping[str, Any]) -> str:
        text = render.render_template(name, {key: context[key] for key in inputs})
        if "the module docstring" in stated(name).words:
            return text
        return specialise.folded(text, *render.decided(context))

    texts = (
        of(context)
        for module, partials in PARTIALS_OF.items()
        if name in partials
        for context in contexts(module)
    )
    return tuple(dict.fromkeys(texts))


def bound(text: str) -> Iterator[str]:
    """The names that a module's top level binds."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name))


@functools.cache
def borrowed(name: str) -> set[str]:
    """The names that a text of the partial reads and binds nowhere itself."""
    found = set()
    for text in rendered(name):
        nodes = list(ast.walk(ast.parse(text)))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        found |= read - own
    return found


@each_partial
def test_inputs_are_exact(name: str) -> None:
    syntax = render.environment().parse(source_of(name))
    found = jinja2.meta.find_undeclared_variables(syntax)
    inputs = stated(name).inputs
    assert sorted(found - inputs) == [], f"{name} reads more than it states"
    assert sorted(inputs - found) == [], f"{name} states more than it reads"


@each_partial
def test_renders_alone_from_its_inputs(name: str) -> None:
    assert any(text.strip() for text in rendered(name))


@each_partial
def test_defines_what_it_states(name: str) -> None:
    names = {each for text in rendered(name) for each in bound(text)}
    assert sorted(stated(name).defines - names) == [], f"{name} does not define these"
    if not stated(name).words:
        assert stated(name).defines
    if "the module docstring" in stated(name).words:
        assert names == set()
        assert all(ast.get_docstring(ast.parse(text)) for text in rendered(name))


@each_partial
def test_states_what_others_use(name: str) -> None:
    """What a partial does not state is its own: no other one may lean on it."""
    if stated(name).words:
        return  # everything it binds is stated, in words
    names = {each for text in rendered(name) for each in bound(text)}
    neighbours = set().union(*(each for each in PARTIALS_OF.values() if name in each))
    others = set().union(*map(borrowed, neighbours - {name}))
    assert sorted((names & others) - stated(name).defines) == []


@pytest.mark.parametrize("module", MODULES.values())
def test_a_module_only_orders_its_partials(module: str) -> None:
    syntax = render.environment().parse(source_of(module))
    assert jinja2.meta.find_undeclared_variables(syntax) == set()
    assert not list(syntax.find_all((jinja2.nodes.If, jinja2.nodes.For)))


def test_every_template_is_used() -> None:
    on_disk = {
        path.relative_to(render.template_folder()).as_posix()
        for path in render.template_folder().rglob("*.j2")
    }
    others = {
        each for top in (*SITE, *VENDOR) for each in support.template_closure(top)
    }
    assert on_disk == {*PARTIALS, *MODULES.values(), *others}


@pytest.mark.parametrize("page", (*SITE, *VENDOR))
def test_a_page_reads_the_inputs_that_it_states(page: str) -> None:
    syntax = render.environment().parse(source_of(page))
    macros = {
        name for node in syntax.find_all(jinja2.nodes.FromImport) for name in node.names
    }
    read = jinja2.meta.find_undeclared_variables(syntax) - macros
    assert read == stated(page).inputs


@pytest.mark.parametrize("module", MODULES)
def test_every_value_is_read_and_there_for_every_spec(module: str) -> None:
    (keys,) = {frozenset(context) for context in contexts(module)}
    read = frozenset().union(*(stated(name).inputs for name in PARTIALS_OF[module]))
    texts = [source_of(name) for name in PARTIALS_OF[module]]
    flags = {
        flag.lower()
        for text in texts
        for flag in re.findall(r"\b[A-Z][A-Z0-9_]+\b", text)
    }
    # What all operations have beside their own, forward kernels read.
    shared = frozenset(contexts(module.removesuffix(BACKWARD))[0])
    own = keys - shared if module.endswith(BACKWARD) else keys
    assert sorted(own - read - flags) == []
