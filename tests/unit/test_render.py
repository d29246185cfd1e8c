# SPDX-License-Identifier: Apache-2.0
import gc
import hashlib
import re
import shutil

import black
import jinja2
import pytest
import support
from fmha_gen.build import render
from fmha_gen.errors import CheckFailed

TEXT = f'"""A kernel.\n\n{render.DIGEST_PLACEHOLDER}\n"""\n\nX = 1\n'


def env(**templates: str) -> jinja2.Environment:
    return render.environment(
        jinja2.DictLoader({f"{name}.j2": text for name, text in templates.items()})
    )


def test_statements_leave_no_trace():
    text = "a\n    {% if on %}\nb\n    {% endif %}\nc\n"
    assert render.render_template("t.j2", {"on": True}, env=env(t=text)) == "a\nb\nc\n"
    assert render.render_template("t.j2", {"on": False}, env=env(t=text)) == "a\nc\n"


@pytest.mark.parametrize("text", ["{{ gone }}", "{{ range(3) }}", "{{ have.gone }}"])
def test_undefined_names_and_globals_are_errors(text):
    with pytest.raises(CheckFailed, match=r"^template t\.j2"):
        render.render_template("t.j2", {"have": {}}, env=env(t=text))


def test_syntax_error_names_template_and_line():
    with pytest.raises(CheckFailed, match=r"template b\.j2:2: "):
        render.render_template(
            "a.j2", {}, env=env(a="{% include 'b.j2' %}", b="x\n{% if %}\n")
        )


def test_finish_states_what_body_digest_finds():
    text = render.finish(TEXT, "ab" * 32)
    stated = render.stated_digests(text)
    assert stated == render.Digests("ab" * 6, render.body_digest(text))
    without = TEXT.replace(f"{render.DIGEST_PLACEHOLDER}\n", "")
    assert stated.body == hashlib.sha256(without.encode()).hexdigest()
    assert render.body_digest(text.replace("X = 1", "X = 2")) != stated.body


def test_the_specs_digest_is_not_part_of_the_body():
    one, two = render.finish(TEXT, "a" * 64), render.finish(TEXT, "b" * 64)
    assert one != two
    assert render.body_digest(one) == render.body_digest(two)


@pytest.mark.parametrize("text", ["X = 1\n", TEXT + TEXT])
def test_finish_needs_exactly_one_placeholder(text):
    with pytest.raises(CheckFailed, match="exactly one line"):
        render.finish(text, "a" * 64)


def test_black_formats_and_is_idempotent():
    text = render.format_source("x = f(a,\n  b)\n")
    assert text == "x = f(a, b)\n"
    assert render.format_source(text) == text


def test_what_is_not_python_is_reported():
    with pytest.raises(CheckFailed, match="not Python"):
        render.format_source("x = = 1\n")


def test_the_collector_rests_while_black_works(monkeypatch) -> None:
    """It would take a quarter of the time, and there is nothing yet that it could free."""
    seen = []
    monkeypatch.setattr(
        "black.format_str", lambda text, mode: seen.append(gc.isenabled()) or text
    )
    render.format_source("x = 1\n")
    assert (seen, gc.isenabled()) == ([False], True)


TRICKY = """\
# above
import  math
@first
# between
@second( 1 )
def decorated( a,b ) :
    return a+b
    # behind the last statement
# of the module
class C( Base ):
    "Doc."
    x:int=1
    def f(self): return self.x



    # in the class
def one(): pass
X=1;  Y = 2
def two( ): return  X
async def three():
    await  two( )
if X:
    def inner( ): return 1
    # deep
# last
"""


@pytest.mark.parametrize("text", [TRICKY, "", "X=1", "def f(): pass\n", "\n\n# a\n"])
def test_pieces_are_formatted_as_the_whole(text):
    whole = black.format_str(
        text, mode=black.Mode(target_versions={black.TargetVersion.PY310})
    )
    assert render.format_source(text) == whole


def test_two_statements_in_a_line_are_formatted_as_the_whole():
    text = "def f( ): return 1\nX = 1; Y = 2\ndef g( ): return 2\n"
    assert render.format_source(text) == black.format_str(text, mode=black.Mode())


@pytest.mark.parametrize("text", ["def f(:\n", "a\0b", "def f():\n"])
def test_what_is_no_python_is_refused(text):
    with pytest.raises(CheckFailed, match="not Python"):
        render.format_source(text)


def test_what_cannot_be_folded_is_said_with_its_template_and_line(
    tmp_path, monkeypatch
):
    folder = tmp_path / "templates"
    shutil.copytree(render.template_folder(), folder)
    file = folder / "sm90" / "forward" / "role_attend.py.j2"
    old, new = "    if TAKES_TURNS:", "    if TAKES_TURNS and warpgroup_idx:"
    text = file.read_text("utf-8").replace(old, new, 1)
    file.write_text(text, "utf-8")
    line = text.splitlines().index(new) + 1
    monkeypatch.setattr(render, "template_folder", lambda: folder)
    loader = jinja2.FileSystemLoader(folder)
    monkeypatch.setattr(render, "_environment", lambda: render.environment(loader))
    said = f"template sm90/forward/role_attend.py.j2:{line}: TAKES_TURNS cannot be folded here:"
    with pytest.raises(CheckFailed, match=f"^{re.escape(said)} {new.strip()}$"):
        render.render_source(support.shipped_plan("sm90_d64_bf16_full"))
