# SPDX-License-Identifier: Apache-2.0
"""The digest of the host section: what changes it, and what does not."""

import pytest
import support
from fmha_gen.build.kernel_text import host_digest

KERNEL = '''"""A kernel."""
import math
import ctypes, cutlass.cute as cute

LIMIT = 2**31  # of a size
TILE = 128
if not cute.ready:
    raise ImportError("no DSL")

@cute.jit
def launch(q):
    """Launches."""
    return tile_of(q) * TILE

def tile_of(q):
    return q

def compile():
    """Compiles."""
    return cute.compile(launch)

def fmha(q, scale=None):
    """Attention."""
    check(q < LIMIT, "q", f"has a size from {LIMIT} on")
    return compile()(q, scale or 1 / math.sqrt(2))

def check(holds, name, words):
    if not holds:  # named
        raise ValueError(f"{name}: {words}")
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# named", "# with its name"),
        ('"""Attention."""', '"""Attention over DLPack tensors."""'),
        ('"""A kernel."""\n', '"""A kernel."""\n\n\n'),
        ("scale or 1 / math.sqrt(2)", "(scale or (1 / math.sqrt(2)))"),
        ("TILE = 128", "TILE = 64"),  # only launch reads it
        ("return tile_of(q) * TILE", "return q"),
        ("def tile_of(q):\n    return q", "def tile_of(q):\n    return -q"),
        ("2**31  # of a size", "2**31"),
    ],
)
def test_what_no_call_of_fmha_runs_does_not_count(old: str, new: str) -> None:
    assert old in KERNEL
    assert host_digest(KERNEL.replace(old, new)) == host_digest(KERNEL)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2**31", "2**32"),
        ("q < LIMIT", "q <= LIMIT"),
        ("{name}: {words}", "{words}"),
        ("raise ValueError", "raise TypeError"),
        ("def fmha(q, scale=None)", "def fmha(q, scale=1.0)"),
        ("cute.compile(launch)", "cute.compile(launch, options='-O2')"),
        ("if not cute.ready", "if cute.ready"),
        ("import math", "import cmath as math"),
        ("def check(", "@cached\ndef check("),
    ],
)
def test_what_a_call_of_fmha_runs_counts(old: str, new: str) -> None:
    assert old in KERNEL
    assert host_digest(KERNEL.replace(old, new)) != host_digest(KERNEL)


def test_it_is_the_same_for_every_python() -> None:
    """Whatever version runs the tests; so the records say the same for everybody."""
    assert host_digest(KERNEL) == (
        "d709d86c2a917abcb302eeaf7996fe25402cf27a86b982fcfa674d53060f9b49"
    )


def test_a_shipped_kernel_reads_its_spec_and_limits_and_no_tile() -> None:
    text = (support.GENERATED / "sm90_d128_bf16_causal.py").read_text("utf-8")
    known = host_digest(text)
    for name, counts in (
        ("STRIDE_LIMIT = 549755813888", True),
        ("HEAD_DIM_QK = 128", True),
        ("TILE_KV = 128", False),
        ("CONSUMER_REGS = 240", False),
    ):
        assert text.count(f"\n{name} ") == 1
        changed = text.replace(f"\n{name} ", f"\n{name}7 ")
        assert (host_digest(changed) != known) == counts
