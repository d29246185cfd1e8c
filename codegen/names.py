# SPDX-License-Identifier: Apache-2.0
"""A spec's file stem is its kernel's name: what it may look like, and what its tokens promise.

The tokens between underscores that speak about a field must agree with it; others are free text:

    sm90            arch
    d128, d192x128  head_dim
    bf16, fp16      dtype
    causal, full    mask
    mha, gqa4, mqa  heads.q_per_kv: 1, 4, more than 1
    pack            pack_gqa
    lse, nolse      lse
    s4096, dyn      both lengths of seqlen; q4096 and kv4096 for one of them
    c2x1            cluster
    mck, mcv, mckv  multicast; also kmc, vmc, kvmc
    t128x64         tile, query rows by KV rows
    single          schedule
    cta1, cta2      cta_group
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .errors import Violation, quoted

if TYPE_CHECKING:
    from .spec import Spec

DYNAMIC: Final = "dynamic"
LONGEST_STEM: Final = (
    100  # [characters]; a name with every token that is known has fewer
)

_STEM = re.compile(r"[a-z][a-z0-9_]*")
_SOFT_KEYWORDS: Final = frozenset({"case", "match", "type"})  # of any Python since 3.10

# Beside a kernel of such a name nothing could import the module any more. Names that no stem can
# have are left out. Fixed, so that a spec is right or wrong wherever it is built: the standard
# library of Python 3.10 to 3.14, with what was removed meanwhile.
_STANDARD_LIBRARY: Final = """
    abc aifc annotationlib antigravity argparse array ast asynchat asyncio asyncore atexit
    audioop base64 bdb binascii binhex bisect builtins bz2 calendar cgi cgitb chunk cmath
    cmd code codecs codeop collections colorsys compileall compression concurrent
    configparser contextlib contextvars copy copyreg crypt csv ctypes curses dataclasses
    datetime dbm decimal difflib dis distutils doctest email encodings ensurepip enum errno
    faulthandler fcntl filecmp fileinput fnmatch fractions ftplib functools gc genericpath
    getopt getpass gettext glob graphlib grp gzip hashlib heapq hmac html http idlelib
    imaplib imghdr imp importlib inspect io ipaddress itertools json keyword lib2to3
    linecache locale logging lzma mailbox mailcap marshal math mimetypes mmap modulefinder
    msilib msvcrt multiprocessing netrc nis nntplib nt ntpath nturl2path numbers opcode
    operator optparse os ossaudiodev pathlib pdb pickle pickletools pipes pkgutil platform
    plistlib poplib posix posixpath pprint profile pstats pty pwd py_compile pyclbr pydoc
    pydoc_data pyexpat queue quopri random re readline reprlib resource rlcompleter runpy
    sched secrets select selectors shelve shlex shutil signal site smtpd smtplib sndhdr
    socket socketserver spwd sqlite3 sre_compile sre_constants sre_parse ssl stat statistics
    string stringprep struct subprocess sunau symtable sys sysconfig syslog tabnanny tarfile
    telnetlib tempfile termios textwrap this threading time timeit tkinter token tokenize
    tomllib trace traceback tracemalloc tty turtle turtledemo types typing unicodedata
    unittest urllib uu uuid venv warnings wave weakref webbrowser winreg winsound wsgiref
    xdrlib xml xmlrpc zipapp zipfile zipimport zlib zoneinfo
    """

# What kernels, the DSL and PyTorch import, and what a folder's tests, packages and scripts do.
_OTHER_MODULES: Final = """
    black build click conftest cuda cupy cutlass cython cython_runtime dask distributed einops
    filelock flash_attn flash_attn_interface flashinfer flax fmha_gen fsspec functorch hypothesis
    jax jaxlib jinja2 keras libcst markupsafe matplotlib ml_dtypes mpmath mypy networkx numba numpy
    nvidia onnx packaging pandas pip pkg_resources psutil pybind11 pydantic pygments pytest quack
    rich ruff safetensors scipy setup setuptools sglang sitecustomize six sklearn sympy tensorflow
    tokenizers torch torchaudio torchgen torchvision tqdm transformers triton tvm tvm_ffi typer
    typing_extensions usercustomize verify vllm wheel xformers yaml
    """
_MODULES: Final = frozenset([*_STANDARD_LIBRARY.split(), *_OTHER_MODULES.split()])


@dataclass(frozen=True)
class _Token:
    """Tokens that match `pattern` speak about `field`.

    `agreeing(spec, token)` lists the tokens that would be true, the one to suggest first; "" there
    suggests no token at all.
    """

    pattern: re.Pattern[str]
    field: tuple[str, ...]
    agreeing: Callable[[Spec, str], tuple[str, ...]]


def stem_violations(stem: str) -> list[Violation]:
    """Return what keeps `stem` from being a file, module and symbol name."""
    if not _STEM.fullmatch(stem):
        message = f"{quoted(stem)} cannot name a kernel"
        hint = "a name is a lower-case letter, then lower-case letters, digits and underscores"
        return [Violation("FG301", (), message, hint)]
    if len(stem) > LONGEST_STEM:
        message = f"{quoted(stem)} has {len(stem)} characters"
        hint = f"a name has at most {LONGEST_STEM}"
        return [Violation("FG301", (), message, hint)]
    if stem in _SOFT_KEYWORDS:
        message = f"{quoted(stem)} is a word of Python's grammar"
        return [Violation("FG303", (), message, "choose another name")]
    if keyword.iskeyword(stem):
        message = f"{quoted(stem)} is a Python keyword, so no module can have that name"
        return [Violation("FG303", (), message, "")]
    if stem in _MODULES:
        message = f"{quoted(stem)} is a module that Python programs import"
        hint = f"beside {stem}.py they would import the kernel; choose another name"
        return [Violation("FG303", (), message, hint)]
    if "cutlass" in stem:
        message = (
            f"{quoted(stem)} contains cutlass, which changes how the kernel is compiled"
        )
        hint = "choose a name without that word: compilers look for it in symbols"
        return [Violation("FG306", (), message, hint)]
    return []


def contradictions(stem: str, spec: Spec) -> list[Violation]:
    """Return one violation for each token of a valid `stem` that is untrue of `spec`."""
    words = stem.split("_")
    found = [
        (word, token) for word in words if (token := _untrue(word, spec)) is not None
    ]
    better = suggestion(stem, spec)
    rename = f"rename the file {better}.yaml, or" if better else "rename the file, or"
    return [
        Violation(
            "FG305",
            token.field,
            f"the name says {word}, but {_stated(token.field, spec)}",
            f"{rename} change the field",
        )
        for word, token in found
    ]


def suggestion(stem: str, spec: Spec) -> str:
    """Return `stem` with its untrue tokens corrected; "" if no name is left of it."""
    corrected: list[str] = []
    for word in stem.split("_"):
        token = _untrue(word, spec)
        right = word if token is None else token.agreeing(spec, word)[0]
        corrected += right.split("_")
    # A correction may repeat what another token says already.
    better = "_".join(dict.fromkeys(word for word in corrected if word))
    return "" if stem_violations(better) else better


def _untrue(word: str, spec: Spec) -> _Token | None:
    for token in _TOKENS:
        if token.pattern.fullmatch(word):
            return None if word in token.agreeing(spec, word) else token
    return None


def _stated(field: tuple[str, ...], spec: Spec) -> str:
    """Return a field's value as a clause."""
    value: object = spec.model_dump(mode="json")
    for name in field:
        assert isinstance(value, dict)
        value = value[name]
    if field == ("tile",) and None in (spec.tile.q, spec.tile.kv):
        return "the tile is left to the plan"
    return f"{'.'.join(field)} is {_in_yaml(value)}"


def _in_yaml(value: object) -> str:
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{key}: {_in_yaml(item)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _head_dim(spec: Spec, word: str) -> tuple[str, ...]:
    qk, v = spec.head_dim.qk, spec.head_dim.v
    both = f"d{qk}x{v}"
    return (f"d{qk}", both) if qk == v else (both,)


def _heads(spec: Spec, word: str) -> tuple[str, ...]:
    n = spec.heads.q_per_kv
    return ("mha", "gqa1") if n == 1 else (f"gqa{n}", "gqa", "mqa")


def _lengths(spec: Spec, word: str) -> tuple[str, ...]:
    q, kv = spec.seqlen.q, spec.seqlen.kv
    if q == kv:
        return ("dyn",) if q == DYNAMIC else (f"s{q}",)
    return (
        "_".join(f"{axis}{n}" for axis, n in (("q", q), ("kv", kv)) if n != DYNAMIC),
    )


def _length(axis: str) -> Callable[[Spec, str], tuple[str, ...]]:
    def agreeing(spec: Spec, word: str) -> tuple[str, ...]:
        n = getattr(spec.seqlen, axis)
        return ("",) if n == DYNAMIC else (f"{axis}{n}",)

    return agreeing


def _cluster(spec: Spec, word: str) -> tuple[str, ...]:
    along_q, along_heads = spec.cluster
    size = f"c{along_q}x{along_heads}"
    return ("", size) if spec.cluster == (1, 1) else (size,)


def _multicast(spec: Spec, word: str) -> tuple[str, ...]:
    if spec.multicast == "none":
        return ("",)
    return (f"{spec.multicast}mc",) if word.endswith("mc") else (f"mc{spec.multicast}",)


def _tile(spec: Spec, word: str) -> tuple[str, ...]:
    q, kv = spec.tile.q, spec.tile.kv
    return ("",) if q is None or kv is None else (f"t{q}x{kv}",)


def _tokens() -> Iterator[_Token]:
    yield _Token(re.compile(r"sm\d+[a-z]?"), ("arch",), lambda spec, word: (spec.arch,))
    yield _Token(re.compile(r"d\d+(x\d+)?"), ("head_dim",), _head_dim)
    yield _Token(
        re.compile(r"(bf|fp)\d+"), ("dtype",), lambda spec, word: (spec.dtype,)
    )
    yield _Token(
        re.compile(r"causal|full"),
        ("mask",),
        lambda spec, word: ("causal" if spec.mask == "causal" else "full",),
    )
    yield _Token(re.compile(r"mha|mqa|gqa\d*"), ("heads", "q_per_kv"), _heads)
    yield _Token(
        re.compile(r"pack"),
        ("pack_gqa",),
        lambda spec, word: ("pack" if spec.pack_gqa else "",),
    )
    yield _Token(
        re.compile(r"lse|nolse"),
        ("lse",),
        lambda spec, word: ("lse" if spec.lse else "nolse",),
    )
    yield _Token(re.compile(r"s\d+|dyn"), ("seqlen",), _lengths)
    yield _Token(re.compile(r"q\d+"), ("seqlen", "q"), _length("q"))
    yield _Token(re.compile(r"kv\d+"), ("seqlen", "kv"), _length("kv"))
    yield _Token(re.compile(r"c\d+x\d+"), ("cluster",), _cluster)
    yield _Token(re.compile(r"mc(k|v|kv)|(k|v|kv)mc"), ("multicast",), _multicast)
    yield _Token(re.compile(r"t\d+x\d+"), ("tile",), _tile)
    yield _Token(
        re.compile(r"single|persistent"),
        ("schedule",),
        lambda spec, word: (spec.schedule,),
    )
    yield _Token(
        re.compile(r"cta\d"),
        ("cta_group",),
        lambda spec, word: (f"cta{spec.cta_group}",),
    )


_TOKENS: Final = tuple(_tokens())
