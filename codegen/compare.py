# SPDX-License-Identifier: Apache-2.0
"""The maths of a verdict, in operators that NumPy arrays and PyTorch tensors share.

Arrays are float64 unless a docstring says otherwise. A finding is one sentence; an empty one means
that the check held.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Array = Any  # numpy.ndarray or torch.Tensor

ERROR_RATIO_LIMIT = 1.5  # of the same computation done in 16 bits
LSE_ABSOLUTE = 1e-3
LSE_RELATIVE = 1e-4
EXACT = 1e-12  # below this the rounding of the float64 truth itself shows


@dataclass(frozen=True)
class OutputVerdict:
    """||x - ref|| / ||ref||; when ref is all zeros it is ||x||, and only 0 is right."""

    error: float
    reference_error: float
    finding: str = ""

    @property
    def ratio(self) -> float:
        """Error over the 16-bit reference's; infinite when only the reference is exact."""
        if self.error == 0:
            return 0.0
        return (
            self.error / self.reference_error if self.reference_error > 0 else math.inf
        )


@dataclass(frozen=True)
class LseVerdict:
    """absolute: the largest |lse - ref|. of_tolerance: the largest share of what is allowed."""

    absolute: float
    of_tolerance: float
    finding: str = ""


def relative_error(x: Array, reference: Array) -> float:
    """||x - reference|| / ||reference|| (Frobenius), or ||x|| when the reference is zero."""
    scale = _norm(reference)
    return _norm(x - reference) / scale if scale > 0 else _norm(x)


def judge_output(out: Array, reference: Array, reference_16bit: Array) -> OutputVerdict:
    """Compare O with float64, and its error with that of the same computation done in 16 bits."""
    unwritten = _count(_is_nan(out))
    if unwritten:
        return OutputVerdict(
            math.inf, math.inf, f"{unwritten} of {_size(out)} elements of out are NaN"
        )
    error = relative_error(out, reference)
    if error <= EXACT and _norm(reference) > 0:
        error = 0.0
    reference_error = relative_error(reference_16bit, reference)
    verdict = OutputVerdict(error, reference_error)
    if error <= ERROR_RATIO_LIMIT * reference_error:
        return verdict
    if _norm(reference) == 0:
        finding = f"no row sees a key, but ||out|| is {error:.3g} instead of 0"
    else:
        limit = f"{ERROR_RATIO_LIMIT} x {reference_error:.3e}, the error in 16 bits"
        finding = f"error {error:.3e} is more than {limit}"
    return OutputVerdict(error, reference_error, finding)


def judge_lse(lse: Array, reference: Array) -> LseVerdict:
    """Compare LSE with float64; -inf is right exactly where the reference has it."""
    unwritten = _count(_is_nan(lse))
    if unwritten:
        return LseVerdict(
            math.inf, math.inf, f"{unwritten} of {_size(lse)} elements of lse are NaN"
        )
    empty = reference == -math.inf
    if _count(empty != (lse == -math.inf)):
        return LseVerdict(
            math.inf, math.inf, "lse is not -inf exactly where a row sees no key"
        )
    rows = ~empty
    if not _count(rows):
        return LseVerdict(0.0, 0.0)
    difference, expected = abs(lse[rows] - reference[rows]), abs(reference[rows])
    # |x| / max(a, b) is the smaller of |x| / a and |x| / b
    tolerance = LSE_RELATIVE * expected
    tolerance = tolerance * (tolerance > LSE_ABSOLUTE) + LSE_ABSOLUTE * (
        tolerance <= LSE_ABSOLUTE
    )
    absolute, of_tolerance = float(difference.max()), float(
        (difference / tolerance).max()
    )
    if of_tolerance <= 1:
        return LseVerdict(absolute, of_tolerance)
    allowed = f"{LSE_ABSOLUTE:g} or {LSE_RELATIVE:g} of it"
    finding = f"lse is off by {absolute:.3g}, {of_tolerance:.3g} times what is allowed ({allowed})"
    return LseVerdict(absolute, of_tolerance, finding)


def same_bits(name: str, what: str, bits: Array, expected: Array) -> str:
    """Finding when two integer arrays differ anywhere."""
    different = _count(bits != expected)
    return (
        f"{different} of {_size(bits)} elements of {name} differ {what}"
        if different
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
        f"one at {_place(touched)} of its storage {list(touched.shape)}"
    )


def _place(mask: Array) -> list[int]:
    position = int((mask.reshape(-1) * 1).argmax())
    place: list[int] = []
    for size in reversed(mask.shape):
        place.insert(0, position % size)
        position //= size
    return place


def _norm(x: Array) -> float:
    return math.sqrt(float((x * x).sum()))


def _is_nan(x: Array) -> Array:
    return x != x


def _count(mask: Array) -> int:
    return int(mask.sum())


def _size(x: Array) -> int:
    return math.prod(x.shape)
