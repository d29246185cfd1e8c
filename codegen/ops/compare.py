# SPDX-License-Identifier: Apache-2.0
"""The verdict on a result, in operators that NumPy arrays and PyTorch tensors share.

Arrays are float64 unless a docstring says otherwise. A finding is one sentence that names rows and
heads; an empty one means that the check held.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .reference import ROUNDINGS, Array, Bounded, Truth, namespace

# Of a head's mean squared error over its expectation, by Bernstein's inequality: a row's is at most
# 6 times what is expected and has the variance 1.4, where one key has all the weight and only P's
# and O's rounding are left; exp(-25) = 1e-11 is the chance of a false alarm.
ROW_VARIANCE = 1.4
LARGEST_ROW = 6.0
EXPONENT = 25.0
# Of elements whose sums come in any order, how many may differ: in bf16 one of a thousand, in fp16,
# whose numbers are eight times as dense, eight; and a few of a small tensor.
REORDERED, FEW, LEAST_UNIT = 1e-3, 8, 2.0**-8
DEFINED = (
    1.5  # of an error in P of 8 bits over what it is by definition, root mean square
)


@dataclass(frozen=True)
class Verdict:
    """of_bound: the largest error over what it may be, at most 1. absolute: the largest error.

    row: the first wrong one, (batch, row, head), of O; None where a bound of single elements holds.
    """

    of_bound: float
    absolute: float
    finding: str = ""
    row: tuple[int, int, int] | None = None


@dataclass
class Shown:
    """Errors that a run showed, of the first output and, by name, of the others.

    of_bound: the largest error over what it may be; absolute: the largest error. NaN where nothing
    was compared. others: None for an output that the SPEC leaves out.
    """

    of_bound: float = math.nan
    absolute: float = math.nan
    others: dict[str, Verdict | None] = field(default_factory=dict)

    def note(self, verdicts: Mapping[str, Verdict]) -> None:
        """Put the verdicts on outputs in, by their names and in their order."""
        (_, first), *others = verdicts.items()
        self.of_bound, self.absolute = first.of_bound, first.absolute
        self.others |= others

    def told(self) -> dict[str, float | None]:
        """As plain data, in which the others have their names in front."""
        found: dict[str, float | None] = {
            "of_bound": self.of_bound,
            "absolute": self.absolute,
        }
        for name, verdict in self.others.items():
            found[f"{name}_of_bound"] = verdict.of_bound if verdict else None
            found[f"{name}_absolute"] = verdict.absolute if verdict else None
        return found


def names_of_others(event: Mapping[str, Any]) -> list[str]:
    """The outputs but the first whose errors `Shown.told` has."""
    ending = "_of_bound"
    return [name.removesuffix(ending) for name in event if name.endswith(ending)]


def judge_output(out: Array, truth: Truth, wanted: Array | None = None) -> Verdict:
    """Compare O with the truth, by element and by head.

    wanted: bool [batch, q, heads]; other rows are not looked at.
    """
    return judge_rows("out", out, truth.rows, wanted, alike=True)


def judge_rows(
    name: str, found: Array, right: Bounded, wanted: Array | None = None, *, alike: bool
) -> Verdict:
    """Compare an output, [batch, rows, heads, elements], with its truth, by element and by head.

    alike: errors of all rows of a head are of one size, else each row's is of its own. wanted: bool
    [batch, rows, heads]; other rows are not looked at.
    """
    xp = namespace(found)
    rows = _all_rows(found) if wanted is None else wanted
    if wanted is not None:
        found = xp.where(rows[..., None], found, right.exact)
    unwritten = ((found != found) & (right.exact == right.exact)).any(-1)
    if _count(unwritten & rows):
        text = f"{rows_named(unwritten & rows)} of {name}: NaN"
        return Verdict(math.inf, math.inf, text)
    error = xp.abs(found - right.exact)
    error = xp.where(error == error, error, xp.zeros_like(error))  # rows not wanted
    ratio = _over(error, right.bound)
    of_head = _head_ratio(error, right.rms * right.rms, right.shift, rows, alike)
    if right.defined is not None:
        squared = DEFINED**2 * right.defined
        of_definition = _head_ratio(error, squared, right.shift, rows, alike)
        of_head = xp.where(of_head > of_definition, of_head, of_definition)
    worst = max(float(ratio.max()), float(of_head.max()))
    absolute = float(error.max())
    wrong = (ratio > 1.0).any(-1)
    if _count(wrong):
        b, row, head, column = place(ratio)
        bound = float(right.bound[b, row, head, column])
        told = (
            f"{name}[{b}, {row}, {head}, {column}] is "
            f"{float(found[b, row, head, column]):.6g} "
            f"instead of {float(right.exact[b, row, head, column]):.6g} +- {bound:.2g}"
        )
        first = place(wrong)
        named = rows_named(wrong)
        return Verdict(
            *(worst, absolute, f"{named} of {name}: wrong; {told}"),
            row=(first[0], first[1], first[2]),
        )
    if worst > 1:
        b, head = place(of_head)
        told = (
            f"head {head} of batch {b} of {name}: its mean square error is {worst:.3g}"
        )
        return Verdict(worst, absolute, f"{told} times what rounding explains")
    return Verdict(worst, absolute)


def judge_lse(lse: Array, truth: Truth, wanted: Array | None = None) -> Verdict:
    """Compare LSE with the truth; infinities are right exactly where the truth has them.

    wanted: as lse.
    """
    xp = namespace(lse)
    expected = truth.lse if wanted is None else xp.where(wanted, truth.lse, lse)
    unwritten = (lse != lse) & (expected == expected)
    if wanted is not None:
        unwritten = unwritten & wanted
    if _count(unwritten):
        found = f"{rows_named(unwritten.swapaxes(1, 2))} of lse: NaN"
        return Verdict(math.inf, math.inf, found)
    empty = (expected == -math.inf) != (lse == -math.inf)
    if _count(empty):
        found = rows_named(empty.swapaxes(1, 2))
        return Verdict(
            math.inf,
            math.inf,
            f"{found} of lse: not -inf exactly where a row sees no key",
        )
    seen, zero = expected > -math.inf, xp.zeros_like(lse)  # else -inf, or not wanted
    seen = seen & (lse != expected)  # a difference of infinities would be NaN
    error = xp.abs(xp.where(seen, lse, zero) - xp.where(seen, expected, zero))
    ratio = _over(error, truth.lse_bound)
    verdict = Verdict(float(ratio.max()), float(error.max()))
    if verdict.of_bound <= 1:
        return verdict
    b, head, row = place(ratio)
    bound = float(truth.lse_bound[b, head, row])
    told = (
        f"lse[{b}, {head}, {row}] is {float(lse[b, head, row]):.8g} "
        f"instead of {float(expected[b, head, row]):.8g} +- {bound:.2g}"
    )
    named = rows_named((ratio > 1.0).swapaxes(1, 2))
    return Verdict(verdict.of_bound, verdict.absolute, f"{named} of lse: wrong; {told}")


def rows_named(wrong: Array) -> str:
    """The rows where a bool [batch, q, heads] is true: the first one, and how many more."""
    b, row, head = place(wrong)
    text = f"row {row} of head {head}, batch {b}"
    if (more := _count(wrong) - 1) == 0:
        return text
    heads, rows = _count(wrong.any(1)), _spans(wrong.any(2).any(0))
    return f"{text} and {more} more (rows {rows} in {heads} heads)"


def same_bits(name: str, what: str, bits: Array, expected: Array) -> str:
    """Finding when two integer arrays differ anywhere."""
    different = _count(bits != expected)
    return (
        f"{different} of {_size(bits)} elements of {name} differ {what}"
        if different
        else ""
    )


def nearly_same(
    name: str, what: str, found: Array, expected: Array, dtype: str, right: Bounded
) -> str:
    """Finding when numbers differ by more than sums in another order do.

    dtype: of 16 bits, to which the sums were rounded. Of fp32 sums few are so near to the middle of
    two of its numbers that the order decides, and then they are neighbours; but where large terms
    cancel `right.shift` is more than a last place. Of sums in fp16 the order decides often, and
    moves them by `right.reordered` at most.
    """
    unit, xp = ROUNDINGS[dtype].unit, namespace(found)
    both = (found == expected) | ((found != found) & (expected != expected))
    different = _count(~both)
    few = FEW + int(_size(found) * REORDERED * LEAST_UNIT / unit)
    if different > few and right.reordered is None:
        return f"{different} of {_size(found)} elements of {name} differ {what}"
    large = xp.where(xp.abs(found) > xp.abs(expected), xp.abs(found), xp.abs(expected))
    allowed = 2 * unit * large + right.shift
    if right.reordered is not None:
        allowed = allowed + right.reordered
    far = _count(~both & ~(xp.abs(found - expected) <= allowed))
    return (
        f"{far} elements of {name} differ {what} by more than a last place"
        if far
        else ""
    )


def outside_touched(name: str, storage: Array, inside: Array, pattern: int) -> str:
    """Finding when integers are no longer ``pattern`` where the boolean ``inside`` is false."""
    touched = (storage != pattern) & ~inside
    written = _count(touched)
    if not written:
        return ""
    return (
        f"{written} elements outside {name} were written, "
        f"one at {list(place(touched))} of its storage {list(touched.shape)}"
    )


def place(x: Array) -> tuple[int, ...]:
    """Where an array is largest; of a bool, where it is first true."""
    position = int((x * 1).reshape(-1).argmax())
    found: list[int] = []
    for size in reversed(x.shape):
        found.insert(0, position % size)
        position //= size
    return tuple(found)


def _all_rows(out: Array) -> Array:
    return (out[..., 0] == 0) | True


def _over(error: Array, bound: Array) -> Array:
    """Their quotient: 0 where there is no error, infinite where none is allowed."""
    xp = namespace(error)
    zero = xp.zeros_like(error)
    allowed = bound > 0
    quotient = error / xp.where(allowed, bound, zero + 1.0)
    refused = xp.where(error > 0, zero + math.inf, zero)
    return xp.where(allowed | (error == 0), quotient, refused)


def _head_ratio(
    error: Array, squared: Array, shift: Array, rows: Array, alike: bool
) -> Array:
    """Of each [batch, head], its root mean square error over what it may be.

    squared: as the error, what is expected of its square. alike: as of `judge_rows`.
    """
    xp = namespace(error)
    chosen, zero = rows[..., None], xp.zeros_like(error)
    squares, expected, shifted = (
        xp.where(chosen, x, zero).sum(3).sum(1)
        for x in (error * error, squared, shift * shift)
    )
    if alike:
        count = xp.where(rows, zero[..., 0] + 1.0, zero[..., 0]).sum(1)
        count = xp.where(count > 0, count, count + 1.0)
        slack = xp.sqrt(2 * EXPONENT * ROW_VARIANCE / count)
        slack = slack + 2 * EXPONENT * LARGEST_ROW / (3 * count)
    else:
        slack = _slack(xp.where(chosen, squared, zero).sum(3))
    allowed = xp.sqrt(expected * (1.0 + slack)) + xp.sqrt(shifted)
    return _over(xp.sqrt(squares), allowed)


def _slack(expected: Array) -> Array:
    """Of a sum of squares over what is expected of it, by row: [batch, rows, heads].

    The error of a row is a sum of many, as of a Gaussian in few dimensions: of one at worst, of
    which Laurent and Massart bound sums of squares with weights.
    """
    xp = namespace(expected)
    total, most = expected.sum(1), xp.amax(expected, 1)
    divisor = xp.where(total > 0, total, xp.ones_like(total))
    spread = xp.sqrt((expected * expected).sum(1))
    return 2 * (math.sqrt(EXPONENT) * spread + EXPONENT * most) / divisor


def _spans(rows: Array) -> str:
    """Indices where a bool is true, as `0 to 3, 7`; at most four of these."""
    numbers = [number for number, is_true in enumerate(rows.tolist()) if is_true]
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    told = [f"{a}" if a == b else f"{a} to {b}" for a, b in spans[:4]]
    return ", ".join(told + ["..."] * (len(spans) > 4))


def _count(mask: Array) -> int:
    return int(mask.sum())


def _size(x: Array) -> int:
    return math.prod(x.shape)
