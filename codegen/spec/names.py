# SPDX-License-Identifier: Apache-2.0
"""A spec's file stem is its kernel's name: what it may look like, and what its tokens promise.

The words between underscores that speak about a field must agree with it, by the `Token`s of its
feature; others are free text.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from ..errors import Violation, quoted
from ..features import FEATURES
from ..features.feature import in_yaml, said

if TYPE_CHECKING:
    from .model import Spec

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
    better = suggestion(stem, spec)
    rename = f"rename the file {better}.yaml, or" if better else "rename the file, or"
    return [
        Violation(
            "FG305",
            tuple(field.split(".")),
            f"the name says {word}, but {_stated(field, spec)}",
            f"{rename} change the field",
        )
        for word in stem.split("_")
        for field, true in _about(word, spec)
        if word not in true
    ]


def suggestion(stem: str, spec: Spec) -> str:
    """Return `stem` with its untrue tokens corrected; "" if no name is left of it."""
    corrected: list[str] = []
    for word in stem.split("_"):
        untrue = [true[0] for _, true in _about(word, spec) if word not in true]
        corrected += "_".join(untrue or [word]).split("_")
    # A correction may repeat what another token says already.
    better = "_".join(dict.fromkeys(word for word in corrected if word))
    return "" if stem_violations(better) else better


def _about(word: str, spec: Spec) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the field that a word speaks about, and the words that are true of it."""
    for feature in FEATURES:
        for pattern, true in feature.tokens.items():
            if re.fullmatch(pattern, word):
                yield feature.path, true(spec)


def _stated(field: str, spec: Spec) -> str:
    """Return a field's value as a clause."""
    value = said(spec, field)
    if isinstance(value, dict) and None in value.values():
        return f"the {field} is left to the plan"
    return f"{field} is {in_yaml(value)}"
