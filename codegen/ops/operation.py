# SPDX-License-Identifier: Apache-2.0
"""The parts of an operation: axes, tensors and scalars of its public function, and its reference.

The header and the entry of a generated file, the tensors of a case in the emulator and on a GPU,
the calls that must be refused and the problems of a benchmark are derived from these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from .lists import Drawn

Spec = Mapping[str, Any]  # the SPEC of a generated file
Array = Any  # numpy.ndarray or torch.Tensor

OF_SPEC: Final = "dtype"  # in place of an element type: the SPEC's
OF_OUTPUT: Final = "out_dtype"  # the SPEC's of O, which may be another
BYTES: Final[Mapping[str, int]] = {
    **{"e4m3": 1, "bf16": 2, "fp16": 2},
    **{"fp32": 4, "int32": 4},
}


class Sizes(Protocol):
    """The counts of a call, and its block lists; a Case and a benchmark's Problem have them."""

    @property
    def batch(self) -> int:
        """Batches."""

    @property
    def kv_heads(self) -> int:
        """KV heads; query heads are ``kv_heads * q_per_kv``."""

    @property
    def q(self) -> int:
        """[rows]"""

    @property
    def kv(self) -> int:
        """[rows]"""

    @property
    def lists(self) -> Drawn:
        """Of a SPEC that has them."""

    @property
    def lengths(self) -> Sequence[tuple[int, int]]:
        """Rows of Q and of K of each packed sequence; q and kv are those of the tensors."""

    @property
    def hostile(self) -> bool:
        """Whether inputs of integers are an adversary's where they may be anything."""


@dataclass(frozen=True)
class Axis:
    """A dimension; of one name, the sizes are equal in all tensors of a call.

    letter: its name in the allocations of a kernel. kind: what it counts, by which layouts order
    axes: b (batches), s (rows), h (heads), d (elements of a head), or a letter of its own; no two
    axes of a tensor have the same. size: in a call. fixed: the size that a SPEC decides, None where
    a call does. constant: every SPEC decides it. part_of: another axis, of which each element of
    this one stands for so many as `ratio` says. cached: its tensors may be the first rows of longer
    ones. follows: an axis whose size decides this one's, though they differ. told: its size for a
    reader, where no other words do.
    """

    name: str
    letter: str
    kind: str
    size: Callable[[Spec, Sizes], int]
    fixed: Callable[[Spec], int | None] = lambda spec: None
    constant: bool = False
    part_of: str = ""
    ratio: Callable[[Spec], int] = lambda spec: 1
    broadcast: bool = False
    cached: bool = False
    follows: str = ""
    told: Callable[[Spec], str] = lambda spec: ""

    @property
    def is_free(self) -> bool:
        """No SPEC decides its size, nor does another axis."""
        return not self.part_of and self.fixed is Axis.fixed

    def words(self, spec: Spec) -> str:
        """Return its size for a reader of the kernel."""
        if told := self.told(spec):
            return told
        if (fixed := self.fixed(spec)) is not None:
            return str(fixed)
        ratio = self.ratio(spec)
        return f"{self.part_of} / {ratio}" if ratio > 1 else self.part_of or self.name

    @property
    def symbol(self) -> str:
        """What `arguments()` of a kernel calls its size."""
        return self.name.upper() if self.constant else self.name

    def known_as(self, spec: Spec) -> str:
        """Return the constant or the other axis that gives its size; "" where a call does."""
        if self.fixed(spec) is not None:
            return self.name.upper()
        return self.part_of if self.ratio(spec) == 1 else ""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the public function.

    dtype: of `BYTES`, `OF_SPEC`, `OF_OUTPUT` or a function of the SPEC. tma: moved by TMA, so the
    last axis is contiguous and the other strides are multiples of 16 bytes; else strides are free.
    words: a remark in the header. when: the field of the SPEC without which it is not there; "" for
    always. An input that has one comes by name. about: what it does or receives, for the function's
    docstring; "" where that goes without saying. expands: PyTorch may hand it over with strides of
    0, which is refused with a word on what to do.
    """

    name: str
    axes: tuple[Axis, ...]
    dtype: str | Callable[[Spec], str] = OF_SPEC
    tma: bool = True
    words: str = ""
    when: str = ""
    about: Callable[[Spec], str] = lambda spec: ""
    expands: bool = False

    def is_in(self, spec: Spec) -> bool:
        """Whether the kernel of a SPEC has it; a SPEC lacks fields that came after its kernel."""
        return not self.when or bool(spec.get(self.when))

    def type(self, spec: Spec) -> str:
        """Return the element type."""
        if not isinstance(self.dtype, str):
            return self.dtype(spec)
        if self.dtype == OF_OUTPUT:
            return str(spec.get("out_dtype", spec["dtype"]))
        return str(spec["dtype"]) if self.dtype == OF_SPEC else self.dtype

    def sizes(self, spec: Spec, sizes: Sizes) -> dict[str, int]:
        """Return the shape in a call by kinds of axes, in their order."""
        return {axis.kind: axis.size(spec, sizes) for axis in self.axes}

    def shape(self, spec: Spec, sizes: Sizes) -> tuple[int, ...]:
        """Return the shape in a call."""
        return tuple(self.sizes(spec, sizes).values())

    def header(self, spec: Spec) -> str:
        """Return shape, element type and words for a reader of the kernel."""
        shape = ", ".join(axis.words(spec) for axis in self.axes)
        words = f", {self.words}" if self.words else ""
        return f"[{shape}] {self.type(spec)}{words}"

    def symbols(self, spec: Spec) -> list[str]:
        """Return what `arguments()` of a kernel calls its sizes."""
        return [x.words(spec) if x.broadcast else x.symbol for x in self.axes]

    @property
    def kinds(self) -> str:
        """The kinds of its axes in their order, such as ``bshd``."""
        return "".join(axis.kind for axis in self.axes)

    @property
    def broadcast(self) -> bool:
        """A SPEC decides along which of its axes all elements are one."""
        return any(axis.broadcast for axis in self.axes)

    @property
    def cached(self) -> bool:
        """It may be the first rows of a longer tensor."""
        return any(axis.cached for axis in self.axes)


@dataclass(frozen=True)
class Scalar:
    """A number of the public function, fp32 in the kernel. words: its default, value: of a SPEC."""

    name: str
    words: str
    value: Callable[[Spec], float]


@dataclass(frozen=True)
class Number:
    """A number of the public function, which comes by name. about: as of a `Tensor`.

    dtype: int32, from least to most, or fp32, finite there.
    """

    name: str
    dtype: str
    least: int
    most: int
    about: str


class Cut(Protocol):
    """How a kernel cuts a problem: constants of its file."""

    @property
    def q(self) -> int:
        """[query rows] of a tile: TILE_Q."""

    @property
    def kv(self) -> int:
        """[keys] of a tile: TILE_KV."""


@dataclass(frozen=True)
class Workspace:
    """Memory that the kernels of a call hand on to one another, of its own for each call.

    One-dimensional, contiguous, at a multiple of 16 bytes. It comes after the outputs; what it
    holds before a call and after one means nothing. axes: whose sizes `size` of a generated file
    takes, in this order: the first axes of the first two inputs. elements: that a call needs; more
    are not touched. about: as of a `Tensor`.
    """

    name: str
    dtype: str
    axes: tuple[Axis, ...]
    elements: Callable[[Spec, Cut, Sizes], int]
    about: str

    @property
    def size(self) -> str:
        """The public function of a generated file that returns the elements of a call."""
        return f"{self.name}_size"

    @property
    def call(self) -> str:
        """How many elements a call needs, for a reader of the kernel."""
        return f"{self.size}({', '.join(axis.name for axis in self.axes)})"


class Place(NamedTuple):
    """An axis of a tensor: the tensor's name and number, the axis' number."""

    name: str
    tensor: int
    axis: int


@dataclass(frozen=True)
class Given:
    """What a call computes with: inputs by name, in NumPy or PyTorch, and the softmax scale.

    Numbers are among the inputs.
    """

    spec: Spec
    inputs: Mapping[str, Array]
    scale: float


@dataclass(frozen=True)
class Operation:
    """One public function.

    name: of the spec's `op`. folder: of its templates, inside that of an architecture. function: in
    the generated file; it takes what the operation reads in
    this order, and returns what it writes in this order, a tuple where there are several. title,
    noun: in the header and in the function's docstring. exact: the results of a `Given` in float64,
    by output. truth: its parts with bounds; a bool array of rows may follow either, to which it is
    limited. judge: by output, a Verdict; of a `Given`, the outputs by name, their truth, the keys
    of a KV block, and perhaps the rows. flops: of a call; where inputs decide how many scores
    count, of those. indices: by name, what inputs of integers hold in a call. params, numbers:
    what only the kernel of a SPEC reads, after the rest. shape: of tensors of rows, in words.
    workspaces: one or none. kernels: what is behind the file's stem in the names of those that a
    call launches, in their order. unordered: outputs of a SPEC whose sums have no fixed order, so
    that two calls may differ in a last bit.
    """

    name: str
    folder: str
    function: str
    title: str
    noun: str
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    scalars: tuple[Scalar, ...]
    exact: Callable[..., Mapping[str, Array]]
    truth: Callable[..., Any]
    judge: Callable[..., Mapping[str, Any]]
    flops: Callable[..., float]
    indices: Callable[[Spec, Sizes], Mapping[str, Array]] = lambda spec, sizes: {}
    params: Callable[[Spec], Sequence[Tensor]] = lambda spec: ()
    numbers: Callable[[Spec], Sequence[Number]] = lambda spec: ()
    shape: str = "batch, seqlen, heads, head_dim"
    workspaces: tuple[Workspace, ...] = ()
    kernels: Callable[[Spec], Sequence[str]] = lambda spec: ("",)
    unordered: Callable[[Spec], frozenset[str]] = lambda spec: frozenset()

    def inputs(self, spec: Spec) -> tuple[Tensor, ...]:
        """Return the tensors that a SPEC's kernel reads."""
        return (*(x for x in self.reads if x.is_in(spec)), *self.params(spec))

    def outputs(self, spec: Spec) -> tuple[Tensor, ...]:
        """Return the tensors that a SPEC's kernel writes."""
        return tuple(x for x in self.writes if x.is_in(spec))

    def header(self, spec: Spec) -> list[str]:
        """Return a line about each tensor for a reader of the kernel."""
        lines = {x.name: x.header(spec) for x in self.tensors(spec)}
        lines |= {x.name: f"[{x.call}] {x.dtype}" for x in self.workspaces}
        width = max(map(len, lines)) + 2
        return [f"{name + ':':{width}}{line}" for name, line in lines.items()]

    def axes(self, spec: Spec) -> tuple[list[Axis], list[Axis]]:
        """Return the axes that are no constants: the free ones, then parts, then lengths."""
        axes = dict.fromkeys(axis for x in self.tensors(spec) for axis in x.axes)
        others = [x for x in axes if not (x.constant or x.is_free or x.broadcast)]
        others.sort(key=lambda axis: not axis.part_of)
        return [x for x in axes if x.is_free], others

    def sources(self, spec: Spec) -> list[Tensor]:
        """Return the inputs whose shapes decide those of the outputs."""
        return [x for x in self.inputs(spec) if {*self.unpacked(spec, x)} != {"_"}]

    def unpacked(self, spec: Spec, source: Tensor) -> list[str]:
        """Return an input's axes as allocations name them; "_" for those of no use there."""
        inputs = self.inputs(spec)
        before = {a for x in inputs[: inputs.index(source)] for a in x.axes}
        wanted = {a for x in self.outputs(spec) for a in x.axes if not a.constant}
        return [a.letter if a in wanted - before else "_" for a in source.axes]

    def places(self, spec: Spec) -> dict[str, Place]:
        """Return where each axis is first, by its name."""
        places: dict[str, Place] = {}
        for number, tensor in enumerate(self.tensors(spec)):
            for at, axis in enumerate(tensor.axes):
                places.setdefault(axis.name, Place(tensor.name, number, at))
        return places

    def parts(self, spec: Spec) -> Iterator[tuple[Place, Place]]:
        """Yield where each axis that is part of another one is first, and where the other is."""
        places = self.places(spec)
        for axis in self.axes(spec)[1]:
            if axis.part_of:
                yield places[axis.name], places[axis.part_of]

    def tensors(self, spec: Spec) -> tuple[Tensor, ...]:
        """Return the inputs, then the outputs."""
        return self.inputs(spec) + self.outputs(spec)

    def nbytes(self, spec: Spec, sizes: Sizes) -> dict[str, int]:
        """Return the bytes of each tensor of a call."""
        return {
            x.name: math.prod(x.shape(spec, sizes)) * BYTES[x.type(spec)]
            for x in self.tensors(spec)
        }
