# SPDX-License-Identifier: Apache-2.0
"""Turns a template and its values into the text of a file, the same bytes everywhere.

The text is rendered strictly, formatted with the pinned black and stamped with two digests in its
header, so that any copy of the file can be told intact, edited or out of date by itself.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jinja2

from ..errors import CheckFailed
from ..expressions.language import Name, Node, Term, parse, text_of
from ..expressions.solve import Form
from ..expressions.values import check_range
from ..host import files, tools
from ..ops import OPERATIONS
from ..ops.operation import OF_OUTPUT, OF_SPEC
from ..verify import SPEC_DIGITS, same_but_layout, sha256, without_digests
from ..verify import Digests as Digests
from ..verify import body_digest as body_digest
from ..verify import stated_digests as stated_digests
from . import spell
from .specialise import Flag, FoldError, specialise

if TYPE_CHECKING:
    from ..ops import operation
    from ..ops.operation import Tensor, Workspace
    from ..planning.kernel_plan import KernelPlan, Number

# A header template writes this line where the digests belong.
DIGEST_PLACEHOLDER = "spec sha256:  body sha256:"
# What templates read beside the context of a plan.
OF_EVERY_KERNEL: Final = {
    "digest_line": DIGEST_PLACEHOLDER,
    "dsl_wanted": f"{tools.DSL}{tools.DSL_RANGE}",
    "ffi_wanted": f"{tools.FFI}{tools.FFI_RANGE}",
}
_KEPT_PIECES = 4096  # formatted, some kilobytes each


@functools.cache
def template_folder() -> Path:
    """Where the templates are: inside the installed package, or beside it in a source tree."""
    return files.packaged("templates")


def environment(loader: jinja2.BaseLoader | None = None) -> jinja2.Environment:
    """The one way templates are read: strict, no globals, whole-line tags leave no trace."""
    env = jinja2.Environment(
        loader=loader or jinja2.FileSystemLoader(template_folder(), encoding="utf-8"),
        undefined=jinja2.StrictUndefined,
        line_statement_prefix="#%",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        newline_sequence="\n",
        autoescape=False,
    )
    env.globals.clear()
    env.filters |= {
        **{"literal": repr, "constant": constant, "tuple": tuple_of},
        **{"element": element, "has_rank": has_rank, "allocated": allocated},
        **{"greatest": greatest, "least": least, "truth": truth, "as_written": spell.as_written},
        **{"scalar_type": scalar_type, "some_number": some_number, "as_number": as_number},
        **{"lines": spell.lines, "names_of_rows": spell.names_of_rows},
        "as_string": '"{}"'.format,
    }
    return env


def tuple_of(items: Sequence[str]) -> str:
    """Return a tuple of names or calls."""
    return f"({', '.join(items)}{',' * (len(items) == 1)})"


def element(tensor: Tensor | Workspace) -> str:
    """Return the element type of a tensor, or of a workspace, as the DSL says it."""
    if not isinstance(tensor.dtype, str):
        return f"{tensor.name.upper()}_DTYPE"
    of_spec = {OF_SPEC: "DTYPE", OF_OUTPUT: "OUT_DTYPE"}
    return {**of_spec, "fp32": "Float32", "int32": "Int32"}[tensor.dtype]


def scalar_type(number: operation.Number) -> str:
    """Return a number's type as the DSL says it."""
    return {"fp32": "Float32", "int32": "Int32"}[number.dtype]


def some_number(number: operation.Number) -> str:
    """Return a value of a number's type, as it is compiled with."""
    return f"{scalar_type(number)}(1)"


def as_number(number: operation.Number) -> str:
    """Return a number as TVM-FFI takes it."""
    return f"float({number.name})" if number.dtype == "fp32" else number.name


def has_rank(tensor: Tensor) -> str:
    """Return the test of a tensor's number of dimensions."""
    return f"{tensor.name}.ndim == {len(tensor.axes)}"


def allocated(tensor: Tensor, spec: operation.Spec) -> str:
    """Return the arguments of PyTorch's `new_empty`, called on a tensor of the SPEC's type."""
    sizes = [x.symbol if x.constant else x.letter for x in tensor.axes]
    named = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    types = [] if tensor.dtype == OF_SPEC else [f"dtype=torch.{named[tensor.type(spec)]}"]
    return ", ".join([*sizes, *types])


def greatest(bounds: Sequence[Form]) -> str:
    """Return the greatest of some bounds of kv as a kernel has it for a position; q of none."""
    found = [in_kernel(bound, "position") for bound in bounds]
    return functools.reduce("cutlass.max({}, {})".format, found or ["q"])


def least(bounds: Sequence[Form]) -> str:
    """Return the least of some bounds of kv as a kernel has it for a row; q of none."""
    found = [in_kernel(bound, "row") for bound in bounds]
    return functools.reduce("cutlass.min({}, {})".format, found or ["q"])


def in_kernel(bound: Form, row: str) -> str:
    """Return a bound of kv in the DSL, of ``q``, head, batch and a problem; row: its name there."""
    return _in_kernel(bound.node(), row)


def truth(tests: Node | None) -> str:
    """Return a truth value in the DSL, of ``q``, ``kv`` and the lengths; True of none."""
    match tests:
        case Term(operator="and" | "or" as joint, operands=operands):
            sign = {"and": " & ", "or": " | "}[joint]
            return sign.join(f"({truth(each)})" for each in operands)
        case Term(operator=sign, operands=(left, right)):
            remainder = sign in ("==", "!=") and text_of(right) == "0"
            sides = _in_kernel(left, of_zero=remainder), _in_kernel(right)
            return f"{sides[0]} {sign} {sides[1]}"
    return "True"


def _in_kernel(node: Node, row: str = "", *, of_zero: bool = False) -> str:
    spelt = {**_SPELT, "row": row}
    text = text_of(_in_dsl(node, of_zero=of_zero))
    return re.sub(r"[a-z]\w*", lambda name: spelt.get(name[0], f"problem.{name[0]}"), text)


_SPELT: Final = {
    **{"q": "q", "kv": "kv", "b": "batch", "h": "head", "h_kv": "kv_head_of(head)"},
    **{name: f"{name}_of(problem)" for name in ("seqlen_q", "seqlen_kv")},
    **{name: f"cutlass.{name}" for name in ("min", "max")},
}


def _in_dsl(node: Node, *, of_zero: bool = False) -> Node:
    """As the DSL computes it: a minimum of two, and a remainder with the sign of what is divided.

    of_zero: all that matters of a remainder is whether it is 0.
    """
    if node == Name("row"):
        return parse("q + (seqlen_q - seqlen_kv)", type="int")
    if not isinstance(node, Term):
        return node
    operands = tuple(map(_in_dsl, node.operands))
    match node.operator:
        case "min" | "max":
            return functools.reduce(lambda a, b: Term(node.operator, (a, b)), operands)
        case "abs":
            return Term("max", (operands[0], Term("-", operands)))
        case "%" if not of_zero and check_range(node.operands[0], {})[0] < 0:
            whole = Term("*", (Term("//", operands), operands[1]))
            return Term("-", (operands[0], whole))
    return Term(node.operator, operands)


def constant(number: Number) -> str:
    """Return a constant of the plan as the file's constants block has it."""
    unit = f" [{number.unit}]" if number.unit else ""
    formula = f" = {number.formula}" if number.formula else ""
    return f"{number.name} = {number.value}  #{unit}{formula}"


def render_kernel(plan: KernelPlan) -> str:
    """Return the whole text of a plan's kernel: rendered, formatted, with its digests."""
    return finish(format_source(render_source(plan)), plan.spec_file.digest)


def render_source(plan: KernelPlan) -> str:
    """Return the text of a plan's kernel as the templates give it, specialised."""
    text = render_template(kernel_template(plan), {**plan.context, **OF_EVERY_KERNEL})
    try:
        return specialise(text, *decided(plan.context))
    except FoldError as error:
        places = _places(error.code, (folder_of(plan), "common"))
        raise CheckFailed(f"template {' or '.join(places)}: {error}") from error


def _places(code: str, folders: Sequence[str]) -> list[str]:
    """Each `template:line` that has a line of code, or the module where holes hide it."""
    found = [
        f"{folder}/{file.name}:{number}"
        for folder in folders
        for file in sorted((template_folder() / folder).glob("*.py.j2"))
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if code and line.strip() == code
    ]
    return found or [f"{folders[0]}/module.py.j2"]


def decided(context: Mapping[str, Any]) -> tuple[dict[str, Flag], dict[str, Flag]]:
    """What the tests of templates may read: flags, and numbers, by upper-case name.

    Flags are the values of a context that are true or false; numbers are its integers and the
    constants of the kernel.
    """
    flags: dict[str, Flag] = {}
    numbers: dict[str, Flag] = {}
    for name, value in context.items():
        if isinstance(value, bool):
            flags[name.upper()] = value
        elif isinstance(value, int):
            numbers[name.upper()] = value
    for number in (*context["chosen"], *context["derived"]):
        numbers[number.name] = number.value
    return flags, numbers


def is_formatted(text: str, source: str, spec_digest: str) -> bool:
    """Whether a kernel's text is `source`, as a build finished it, up to the layout.

    Comments count, the digest of the body does too.
    """
    stated = stated_digests(text)
    return (
        stated is not None
        and stated.spec == spec_digest[:SPEC_DIGITS]
        and stated.body == body_digest(text)
        and same_but_layout(without_digests(text, f"{DIGEST_PLACEHOLDER}\n"), source)
    )


def kernel_template(plan: KernelPlan) -> str:
    """Return the name of the template that a plan's kernel is rendered from."""
    return f"{folder_of(plan)}/module.py.j2"


def folder_of(plan: KernelPlan) -> str:
    """Return the folder of the templates of a plan's architecture and operation."""
    return f"{plan.arch}/{OPERATIONS[plan.spec_file.spec.op].folder}"


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
    """Format Python text with black: default style, target 3.10. Black is pinned exactly.

    Functions and classes at the top are formatted apart, each once: kernels share most of theirs,
    and what black makes of one depends on nothing around it. Only the empty lines between them do,
    so short stand-ins take their places while the rest is formatted.
    """
    lines = re.findall(r".*\n|.+\Z", text)  # as Python counts them
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise CheckFailed(f"rendered text is not Python: {error}") from error
    rest: list[str] = []
    taken = 0
    pieces: dict[str, str] = {}
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        first = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
        piece = "".join(lines[first : node.end_lineno])
        stand_in = _stand_in(node, len(pieces))
        pieces[stand_in] = _black(piece)
        rest += [*lines[taken:first], stand_in]
        taken = node.end_lineno or 0
    formatted = _black("".join([*rest, *lines[taken:]]))
    for stand_in, piece in pieces.items():
        before, found, after = formatted.partition(stand_in)
        if not found:  # two statements in a line, or the like: no text of ours
            return _black(text)
        formatted = f"{before}{piece}{after}"
    return formatted


def _stand_in(node: ast.FunctionDef | ast.ClassDef, number: int) -> str:
    """A statement of the same kind, already formatted, that is nowhere else in the text."""
    head = "class " if isinstance(node, ast.ClassDef) else "def "
    call = ":" if isinstance(node, ast.ClassDef) else "():"
    decorator = "@piece\n" if node.decorator_list else ""
    return f"{decorator}{head}_piece_{number}_{call}\n    body\n"


@functools.lru_cache(_KEPT_PIECES)
def _black(text: str) -> str:
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
