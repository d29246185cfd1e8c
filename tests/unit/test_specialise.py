# SPDX-License-Identifier: Apache-2.0
"""What is left of a template's Python once the flags of a spec are known."""

from __future__ import annotations

import ast
import textwrap

import pytest
import support
from fmha_gen.build import render
from fmha_gen.build.specialise import FoldError, _ends, _split, folded, specialise


def left(text: str, numbers: dict[str, int] | None = None, **flags: bool) -> str:
    """The specialised text, formatted."""
    found = specialise(textwrap.dedent(text).lstrip("\n"), flags, numbers or {})
    return render.format_source(found)


def body(text: str, **flags: bool) -> str:
    """The same of a function's body, without its first line."""
    lines = textwrap.indent(textwrap.dedent(text).strip("\n"), "    ")
    found = left(f"def fmha(x, y):\n{lines}\n", **flags)
    return textwrap.dedent(found.partition("\n")[2]).rstrip("\n")


@pytest.mark.parametrize(
    ("text", "on", "off"),
    [
        ("if F:\n    return x\nelse:\n    return y", "return x", "return y"),
        ("if not F:\n    x += 1\nreturn x", "return x", "x += 1\nreturn x"),
        (
            "if F and G:\n    x += 1\nelif G:\n    x += 2\nelse:\n    x += 3\nreturn x",
            "x += 1\nreturn x",
            "x += 2\nreturn x",
        ),
        (
            "if x if F else ONCE:\n    y = x\nreturn y",
            "if x:\n    y = x\nreturn y",
            "y = x\nreturn y",
        ),
        ("return x if F else y", "return x", "return y"),
        ("return f(x if F else y, y)", "return f(x, y)", "return f(y, y)"),
        # Parentheses only where the operator needs them.
        ("return (x if F else x + y) * 2", "return x * 2", "return (x + y) * 2"),
        ("return y - (x if F else x - y)", "return y - x", "return y - (x - y)"),
        ("return (x if F else x - y) - y", "return x - y", "return x - y - y"),
        ("return (x if F else -y).size", "return x.size", "return (-y).size"),
        ("return f(\n    x\n    if F\n    else y\n)", "return f(x)", "return f(y)"),
        # An argument that is left out.
        ("return f(x, mask=y if F else OMIT)", "return f(x, mask=y)", "return f(x)"),
        (
            "return f(x if F else OMIT, y, z=1)",
            "return f(x, y, z=1)",
            "return f(y, z=1)",
        ),
        # A test of flags behind one that is not known.
        (
            "if x:\n    y = 1\nelif F:\n    y = 2\n    y += 1\nreturn y",
            "if x:\n    y = 1\nelse:\n    y = 2\n    y += 1\nreturn y",
            "if x:\n    y = 1\nreturn y",
        ),
        (
            "if x:\n    y = 1\nelif F:\n    y = 2\nelse:\n    y = 3\nreturn y",
            "if x:\n    y = 1\nelse:\n    y = 2\nreturn y",
            "if x:\n    y = 1\nelse:\n    y = 3\nreturn y",
        ),
        # Branches in branches.
        (
            "if F:\n    if x:\n        y = 1\n    else:\n        y = 2\nreturn y",
            "if x:\n    y = 1\nelse:\n    y = 2\nreturn y",
            "return y",
        ),
        (
            "while x:\n    if F:\n        x -= 1\n    x -= y",
            "while x:\n    x -= 1\n    x -= y",
            "while x:\n    x -= y",
        ),
        (
            "if (\n    F\n    and G\n):\n    x = 1\nreturn x",
            "x = 1\nreturn x",
            "return x",
        ),
    ],
)
def test_tests_of_flags_are_folded(text: str, on: str, off: str) -> None:
    assert body(text, F=True, G=True) == on
    assert body(text, F=False, G=True) == off


def test_comments_stay_with_their_statements() -> None:
    text = """
    # of the test
    if F:
        # of x
        x = 1  # beside x
    # of y
    if not F:
        y = 1
    # of z
    z = 1
    """
    assert body(text, F=True) == (
        "# of the test\n# of x\nx = 1  # beside x\n# of z\nz = 1"
    )
    assert body(text, F=False) == "# of y\ny = 1\n# of z\nz = 1"


def test_comments_between_empty_lines_stay() -> None:
    text = """
    y = 0
    if F:  # why:

        # first:

        # second
        x = 1
    else:
        # third

        x = 2
    """
    assert body(text, F=True) == "y = 0\n\n# first:\n\n# second\nx = 1"
    assert body(text, F=False) == "y = 0\n# third\n\nx = 2"


def test_a_block_of_comments_stays_above_what_comes_next() -> None:
    text = "if F:\n    # why\n    pass\nreturn x"
    assert body(text, F=True) == "# why\nreturn x"
    assert body(text, F=False) == "return x"


def test_a_docstring_can_depend_on_a_flag() -> None:
    text = """
    def fmha(q):
        if F:
            \"\"\"One.

            More of it.
            \"\"\"
        else:
            \"\"\"Two.\"\"\"
        return q
    """
    assert '    """One.\n\n    More of it.\n    """\n' in left(text, F=True)
    assert '"""Two."""' in left(text, F=False)


def test_numbers_are_read_by_tests_and_stay_elsewhere() -> None:
    text = "SIZE = 2\n\n\ndef fmha(q):\n    if SIZE > 1:\n        q += SIZE\n    return q\n"
    assert "q += SIZE" in left(text, {"SIZE": 2})
    assert "q += SIZE" not in left(text, {"SIZE": 1})
    assert left(text, {"SIZE": 1}).startswith("SIZE = 2\n")  # the plan's, read or not


def test_whole_functions_depend_on_flags() -> None:
    text = """
    if F:

        @jit
        def store(x):
            return x

    else:

        @jit
        def store(x, y):
            return y

    def fmha(x, y):
        return store(x) if F else store(x, y)
    """
    assert "@jit\ndef store(x):\n    return x\n" in left(text, F=True)
    assert "@jit\ndef store(y):\n    return y\n" in left(text, F=False)
    assert "return store(y)" in left(text, F=False)


def test_inline_functions_are_their_expression() -> None:
    text = """
    @inline
    def length(problem):
        return LENGTH if F else problem.length

    @inline
    def end_of(tile, problem):
        \"\"\"The end.\"\"\"
        return (tile + 1) * length(problem)

    def fmha(tile, problem):
        return end_of(tile - 1, problem) + 2 * end_of(tile, problem)
    """
    assert left(text, F=True) == (
        "def fmha(tile, problem):\n"
        "    return (tile - 1 + 1) * LENGTH + 2 * ((tile + 1) * LENGTH)\n"
    )
    assert "2 * ((tile + 1) * problem.length)" in left(text, F=False)


UNUSED = """
from parts import a, b, c as d

ROWS = 3
COLUMNS = 4

class Sizes(NamedTuple):
    rows: int  # of it
    # Of what is read.
    columns: int

def fmha(x, y):
    return multiply(x, y, Sizes(rows=x, columns=y), group=1)

def multiply(x, y, sizes, scale=None, group=1):
    if F:
        return helper(x, scale) + sizes.columns
    else:
        return a(x, group)

def helper(x, scale):
    return d(x, COLUMNS)
"""


def test_what_nothing_reads_is_dropped() -> None:
    assert left(UNUSED, F=True) == (
        "from parts import c as d\n\n"
        "COLUMNS = 4\n\n\n"
        "class Sizes(NamedTuple):\n"
        "    # Of what is read.\n"
        "    columns: int\n\n\n"
        "def fmha(x, y):\n"
        "    return multiply(x, Sizes(columns=y))\n\n\n"
        "def multiply(x, sizes):\n"
        "    return helper(x) + sizes.columns\n\n\n"
        "def helper(x):\n"
        "    return d(x, COLUMNS)\n"
    )
    assert left(UNUSED, F=False) == (
        "from parts import a\n\n\n"
        "def fmha(x, y):\n"
        "    return multiply(x)\n\n\n"
        "def multiply(x, group=1):\n"
        "    return a(x, group)\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "def fmha(x):\n    return apply(one, x)\n\n\ndef one(x, y):\n    return x\n",
        "def fmha(x):\n    return one(*x)\n\n\ndef one(x, y):\n    return x\n",
        "def fmha(x):\n    return one(**x)\n\n\ndef one(x, y):\n    return x\n",
        "def fmha(one):\n    return one.x\n",
        "__all__ = ['one']\n\n\ndef one(x):\n    return 1\n",
    ],
)
def test_what_may_be_called_otherwise_keeps_its_parameters(text: str) -> None:
    assert specialise(text, {}, {}) == text


def test_a_comma_at_the_end_stays() -> None:
    """Black puts such lists one to a line, whatever is left of them."""
    text = "def fmha(\n    x,\n):\n    f(\n        x,\n        mask=x if F else OMIT,\n    )\n"
    assert left(text, F=False) == "def fmha(\n    x,\n):\n    f(\n        x,\n    )\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("if F and x:\n    y = 1", "F cannot be folded here: if F and x:"),
        ("y = F", "F cannot be folded here: y = F"),
        (
            "if x:\n    y = 1\nelif f(F):\n    y = 2",
            "F cannot be folded here: elif f(F):",
        ),
        ("if F:\n    x = 1\n    # the end\nreturn x", "a comment ends a block"),
        (
            "if F:\n    x = 1\nelif x:\n    y = 1",
            "this follows a test of flags: elif x:",
        ),
        ("if not F: x = 1", "a block begins on its test's line: if not F: x = 1"),
        ("x = = 1", "rendered text is not Python"),
    ],
)
def test_what_cannot_be_folded_is_said(text: str, said: str) -> None:
    lines = textwrap.indent(text, "    ")
    with pytest.raises(FoldError, match=said.replace("(", r"\(").replace(")", r"\)")):
        specialise(f"def fmha(x):\n{lines}\n", {"F": False}, {})


def test_flags_in_words_are_no_flags() -> None:
    text = 'def fmha(x):\n    """F is off."""\n    return "F"  # F\n'
    assert specialise(text, {"F": True}, {}) == text


def test_an_inline_function_only_returns() -> None:
    text = "@inline\ndef f(x):\n    x += 1\n    return\n\n\ndef fmha(x):\n    return f(x)\n"
    with pytest.raises(FoldError, match="f is inline, so it only returns"):
        specialise(text, {}, {})
    text = "@inline\ndef f(x):\n    return x\n\n\ndef fmha(x):\n    return f(x, 1)\n"
    with pytest.raises(FoldError, match=r"f takes x: return f\(x, 1\)"):
        specialise(text, {}, {})


def test_folding_alone_drops_nothing() -> None:
    text = "def one(x, y):\n    if F:\n        return x\n"
    assert folded(text, {"F": True}, {}) == "def one(x, y):\n    return x\n"


@pytest.mark.parametrize("stem", support.SHIPPED)
def test_a_kernel_has_nothing_that_nothing_reads(stem: str) -> None:
    text = (support.GENERATED / f"{stem}.py").read_text("utf-8")
    plan = support.shipped_plan(stem)
    _, numbers = render.decided(plan.context)
    assert specialise(text, {}, numbers) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only\n# comments\n",
        "X = 1",
        '"""Doc."""\n# c\nX = 1\n# end\n',
        "if F:\n    x = 1\nelif G:\n    x = 2\nelse:\n    x = 3\nY = 1\n",
        "@a\n@b(\n    1,\n)\n# c\ndef f():\n    pass\n\n\nX = 1\n",
        "try:\n    import a\nexcept ImportError:\n    a = None\nfinally:\n    b = 1\n",
        "X = (\n    1,\n)\nY = [\n    2\n]\n",
        "X = 1; Y = 2\n",
        'X = """\nfirst\n"""\nY = 1\n',
        "X = \\\n1\nY = 2\n",
        "(x, y) = 1, 2\nf()\n",
    ],
)
def test_a_text_is_split_as_python_is(text: str) -> None:
    pieces = _split(text)
    assert "".join(pieces) == text
    statements = ast.parse(text).body
    if "; " in text:
        return  # two statements of one line stay together
    assert [len(ast.parse(piece).body) for piece in pieces if piece.strip("# \n")] in (
        [1] * len(statements),
        [0],
    )


@pytest.mark.parametrize("stem", support.SHIPPED)
def test_a_kernel_is_split_without_a_parser(stem: str) -> None:
    text = (support.GENERATED / f"{stem}.py").read_text("utf-8")
    assert _ends(text) == [node.end_lineno for node in ast.parse(text).body]
