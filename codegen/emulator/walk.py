# SPDX-License-Identifier: Apache-2.0
"""Walks a launch: every CTA's control flow, barriers, loads and stores, and no data.

What runs is the kernel's skeleton. A TMA load moves nothing and completes its bytes; a store only
says what it covers. So tensors need no memory, any size, any strides, anywhere, but for those whose
numbers decide what a CTA does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .additions import Sum
from .cluster import Cta
from .lanes import Mask
from .lower import Program, lower
from .machine import MAX_STEPS, Machine
from .memory import GlobalMemory
from .ptx import Module
from .report import NAMELESS, Fault, Finding, Kind, Names
from .scheduler import Schedule
from .skeleton import skeleton
from .tma import SHARED_ALIGNMENT, TensorMap

if TYPE_CHECKING:
    from .launch import Launch

I64 = NDArray[np.int64]

_Moved = defaultdict[int, list[tuple[int, ...]]]
"""By the id of a tensor map, its boxes: who moved them, and their coordinates."""
_Found = defaultdict[str, list[tuple[I64, I64, I64]]]
"""By the name of a tensor, parts of it: who moved them, and their begins and ends."""

_KEYS = 5
"""Numbers of a box that say who moved it: cluster, cta, by, warp, line."""


@dataclass(frozen=True)
class Extent:
    """A tensor that nothing backs: element (i, j, ...) is at address + i strides[0] + ..."""

    name: str
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # [bytes]
    itemsize: int  # [bytes]

    def find(self, addresses: I64) -> tuple[I64, NDArray[np.bool_]]:
        """Indices of the elements at addresses [n, axes], and which of the addresses are one's.

        Each stride must be at least as large as all that the smaller ones span.
        """
        rest = addresses - self.address
        index = np.zeros((len(addresses), len(self.sizes)), np.int64)
        inside = rest >= 0
        for axis in sorted(self._moving(), key=lambda axis: -self.strides[axis]):
            index[:, axis], rest = np.divmod(rest, self.strides[axis])
            inside &= index[:, axis] < self.sizes[axis]
        return index, inside & (rest == 0)

    def axis_of(self, stride: int, count: int) -> tuple[int, int]:
        """The axis along which `count` steps of some bytes go, and by how many elements each.

        Raises Fault when there is none.
        """
        for axis in sorted(self._moving(), key=lambda axis: -self.strides[axis]):
            step, rest = divmod(stride, self.strides[axis])
            if step and not rest and (count - 1) * step < self.sizes[axis]:
                return axis, step
        raise Fault(
            Kind.TMA,
            f"{count} steps of {stride} bytes are along no axis of {self.name}: sizes "
            f"{self.sizes}, strides {self.strides}",
        )

    def _moving(self) -> list[int]:
        return [axis for axis, size in enumerate(self.sizes) if size > 1]


@dataclass(frozen=True)
class Boxes:
    """Parts of a tensor that were loaded or stored, in the order in which that happened.

    Box n is [begin[n], end[n]) along each axis, what is outside the tensor cut off; empty when all
    is. cluster: by number, x fastest. cta: rank in the cluster, of a load the CTA that received it.
    by, warp: rank of the CTA whose warp issued it, and that warp.
    """

    cluster: I64
    cta: I64
    by: I64
    warp: I64
    line: I64
    begin: I64
    end: I64

    def __len__(self) -> int:
        return len(self.cluster)

    def where(self, chosen: NDArray[Any]) -> Boxes:
        """Those of a mask, or of an array of numbers."""
        return Boxes(
            *(self.cluster[chosen], self.cta[chosen], self.by[chosen]),
            *(self.warp[chosen], self.line[chosen]),
            *(self.begin[chosen], self.end[chosen]),
        )


@dataclass(frozen=True)
class Walk:
    """What the CTAs did. loads, stores, additions: by the name of the tensor."""

    findings: tuple[Finding, ...]
    steps: int
    """[warp instructions] of the skeleton"""
    clusters: int
    """That the grid has."""
    walked: tuple[int, ...]
    """The clusters that ran."""
    loads: Mapping[str, Boxes]
    stores: Mapping[str, Boxes]
    additions: Mapping[str, Boxes]


def prepare(module: Module) -> Program:
    """The program that `walk` runs, as often as one likes; raises DataDependence."""
    return lower(skeleton(module), turns=False)


def walk(
    program: Program,
    launch: Launch,
    tensors: Iterable[Extent],
    *,
    clusters: Collection[int] | None = None,
    tiles: Mapping[int, Sequence[int]] | None = None,
    memory: GlobalMemory | None = None,
    max_steps: int = MAX_STEPS,
    names: Names = NAMELESS,
) -> Walk:
    """Runs every cluster of a launch, or those of `clusters`; `program` is of `prepare`.

    tensors: what the kernel's arguments point to. memory: of those that decide the schedule.
    tiles, names: as for `machine.run`. The findings
    are those that need no data: deadlocks, misused barriers, boxes and stores that are outside.
    """
    memory = memory or GlobalMemory()
    walker = Walker(program, launch, tensors, memory, tiles or {}, max_steps, names)
    walker.run(launch, clusters)
    return walker.result(clusters)


@dataclass(frozen=True)
class _Mapped:
    """A tensor map and the tensor that it describes."""

    tensor_map: TensorMap
    tensor: Extent
    axes: tuple[tuple[int, int], ...]
    """Of each dimension of the map: the tensor's axis, and elements of it; (-1, 0): one step."""
    early: tuple[int, int]
    """Of an axis, elements by which the map begins before the tensor."""

    def boxes(self, coordinates: I64) -> tuple[I64, I64]:
        """(begin, end) of boxes at coordinates [n, rank]."""
        count, rank = coordinates.shape
        begin = np.zeros((count, len(self.tensor.sizes)), np.int64)
        begin[:, self.early[0]] -= self.early[1]
        extent = np.ones_like(begin)
        empty = np.zeros(count, np.bool_)
        for dimension in range(rank):
            start = coordinates[:, dimension]
            stop = start + self.tensor_map.box[dimension]
            first = np.maximum(start, 0)
            left = np.minimum(stop, self.tensor_map.dimensions[dimension]) - first
            empty |= left <= 0
            axis, step = self.axes[dimension]
            if axis >= 0:
                begin[:, axis] += step * first
                if self.tensor_map.box[dimension] > 1:
                    extent[:, axis] = step * left
        extent[empty] = 0
        return begin, begin + extent

    def check(self, coordinates: Sequence[int], *, loaded: bool) -> None:
        """Raises Fault for a box that reaches before the tensor, where the map begins: as a load
        does that is wholly outside.
        """
        if self.early[1]:
            begin, end = self.boxes(np.array([coordinates], np.int64))
            outside = (begin == end).any()
            if ((begin < 0) & (begin < end)).any() or (loaded and outside):
                what = "reads" if outside else "begins"
                problem = (
                    f"a box at {tuple(coordinates)} {what} before {self.tensor.name}"
                )
                raise Fault(Kind.OUT_OF_BOUNDS, problem)


class Walker(Machine):
    """A machine whose copies and stores move nothing, and are written down."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        tensors: Iterable[Extent],
        memory: GlobalMemory,
        tiles: Mapping[int, Sequence[int]],
        max_steps: int,
        names: Names,
    ) -> None:
        super().__init__(
            *({launch.kernel: program}, memory, Schedule(), False),
            *(None, max_steps, tiles, {launch.kernel: names}),
        )
        self._tensors = tuple(tensors)
        self._at = {tensor.address: tensor for tensor in self._tensors}
        self._mapped: dict[int, _Mapped] = {}
        """By the id of the tensor map, which `tensor_map` keeps."""
        self._loads: _Moved = defaultdict(list)
        self._stores: _Moved = defaultdict(list)
        self._sums: _Moved = defaultdict(list)
        self._lanes: _Found = defaultdict(list)
        self._runs: _Found = defaultdict(list)
        self._additions: _Found = defaultdict(list)

    def load_box(
        self,
        tensor_map: TensorMap,
        coordinates: Sequence[int],
        receivers: Sequence[Cta],
        place: int,
    ) -> tuple[int, range]:
        """A TMA load completes its bytes; what each CTA receives is written down."""
        known = self._describes(tensor_map)
        known.check(coordinates, loaded=True)
        record = self._loads[id(known.tensor_map)]
        for cta in receivers:
            cta.shared.check_region(place, tensor_map.box_bytes, SHARED_ALIGNMENT)
            record.append((*self._now(cta), *coordinates))
        return tensor_map.box_bytes, range(place, place + tensor_map.box_bytes)

    def load_run(
        self, address: int, nbytes: int, receivers: Sequence[Cta], place: int
    ) -> None:
        """A bulk load completes its bytes; what each CTA receives is written down."""
        for cta in receivers:
            self._cover_run(self._runs, cta, address, nbytes)

    def copy_shared(
        self, cta: Cta, begin: int, nbytes: int, receivers: Sequence[Cta], place: int
    ) -> None:
        """A bulk copy between CTAs, whose bytes nobody asks for."""

    def store_box(
        self, tensor_map: TensorMap, coordinates: Sequence[int], cta: Cta, place: int
    ) -> range:
        """A TMA store: what it covers is written down."""
        return self._put(self._stores, tensor_map, coordinates, cta, place)

    def _put(
        self,
        boxes: _Moved,
        tensor_map: TensorMap,
        coordinates: Sequence[int],
        cta: Cta,
        place: int,
    ) -> range:
        """Writes down a box that leaves a CTA; the bytes of shared memory that it is."""
        known = self._describes(tensor_map)
        known.check(coordinates, loaded=False)
        if min(coordinates) < 0:
            problem = f"a store at the negative coordinates {tuple(coordinates)}"
            raise Fault(Kind.OUT_OF_BOUNDS, problem)
        record = (*self._now(cta), *coordinates)
        boxes[id(known.tensor_map)].append(record)
        return range(place, place + tensor_map.box_bytes)

    def sum_of_box(
        self, tensor_map: TensorMap, coordinates: Sequence[int], cta: Cta, place: int
    ) -> tuple[range, Sum | None]:
        """A bulk reduction: what it covers is written down."""
        region = self._put(self._sums, tensor_map, coordinates, cta, place)
        return region, None

    def sum_of_run(self, address: int, nbytes: int, cta: Cta, place: int) -> Sum | None:
        """A bulk reduction: what it covers is written down."""
        self._cover_run(self._additions, cta, address, nbytes)
        return None

    def store_lanes(
        self,
        cta: Cta,
        addresses: I64,
        width: int,
        values: Sequence[NDArray[Any]],
        mask: Mask,
    ) -> None:
        """st.global: the elements that lanes cover are written down."""
        self._cover(self._lanes, cta, addresses[mask], width * len(values))

    def add_lanes(
        self,
        cta: Cta,
        addresses: I64,
        kind: str,
        values: Sequence[NDArray[Any]],
        mask: Mask,
    ) -> list[NDArray[Any]]:
        """red and atom: the elements that lanes add to are written down; all are zero."""
        nbytes = sum(value.itemsize for value in values)
        self._cover(self._additions, cta, addresses[mask], nbytes)
        return [np.zeros_like(value) for value in values]

    def _cover(self, found: _Found, cta: Cta, wanted: I64, nbytes: int) -> None:
        """Writes down the elements of a tensor in accesses of `nbytes` at some addresses."""
        if not len(wanted):
            return
        for tensor in self._tensors:
            index, inside = tensor.find(wanted)
            if inside.all():
                break
        else:
            problem = f"{nbytes} bytes of global memory at {int(wanted[0]):#x} are no tensor's"
            raise Fault(Kind.OUT_OF_BOUNDS, problem)
        if nbytes % tensor.itemsize or (wanted % nbytes).any():
            raise Fault(Kind.MISALIGNED, f"{nbytes} bytes of {tensor.name}")
        end = index + 1
        if nbytes > tensor.itemsize:
            axis, _ = tensor.axis_of(tensor.itemsize, nbytes // tensor.itemsize)
            end[:, axis] = index[:, axis] + nbytes // tensor.itemsize
            if (end[:, axis] > tensor.sizes[axis]).any():
                raise Fault(Kind.OUT_OF_BOUNDS, f"{nbytes} bytes leave {tensor.name}")
        who = np.broadcast_to(np.array(self._now(cta), np.int64), (len(index), _KEYS))
        found[tensor.name].append((who, index, end))

    def _cover_run(self, found: _Found, cta: Cta, address: int, nbytes: int) -> None:
        """Writes down the elements of a tensor that bytes are, row by row."""
        who = np.array([self._now(cta)], np.int64)
        while nbytes > 0:
            for tensor in self._tensors:
                index, inside = tensor.find(np.array([address], np.int64))
                if inside.all():
                    break
            else:
                problem = (
                    f"{nbytes} bytes of global memory at {address:#x} are no tensor's"
                )
                raise Fault(Kind.OUT_OF_BOUNDS, problem)
            axis, _ = tensor.axis_of(tensor.itemsize, 2)
            count = min(
                nbytes // tensor.itemsize, tensor.sizes[axis] - int(index[0, axis])
            )
            if count == 0:
                raise Fault(Kind.MISALIGNED, f"{nbytes} bytes of {tensor.name}")
            end = index + 1
            end[0, axis] += count - 1
            found[tensor.name].append((who, index, end))
            address += count * tensor.itemsize
            nbytes -= count * tensor.itemsize

    def result(self, clusters: Collection[int] | None) -> Walk:
        """What there is to tell after a run."""
        size = self.launch.cluster
        count = int(
            np.prod([g // s for g, s in zip(self.launch.grid, size, strict=True)])
        )
        return Walk(
            tuple(self.findings),
            self.steps,
            count,
            tuple(n for n in range(count) if clusters is None or n in clusters),
            self._collect(self._loads, self._runs),
            self._collect(self._stores, self._lanes),
            self._collect(self._sums, self._additions),
        )

    def _now(self, cta: Cta) -> tuple[int, int, int, int, int]:
        """What `Boxes` say of a box of this CTA's that moves now."""
        grid, size = self.launch.grid, self.launch.cluster
        x, y, z = (place // edge for place, edge in zip(cta.index, size, strict=True))
        wide, high = grid[0] // size[0], grid[1] // size[1]
        line = self.program.instructions[self.index].line
        return x + wide * (y + high * z), cta.rank, *self.actor, line

    def _describes(self, tensor_map: TensorMap) -> _Mapped:
        known = self._mapped.get(id(tensor_map))
        if known is None:
            steps, sizes = list(tensor_map.strides), list(tensor_map.dimensions)
            rows = steps.index(steps[-1])  # of a map that counts them back from an end
            for early in (0, sizes[rows]):
                begin = tensor_map.address + early * steps[rows]
                tensor = self._at.get(begin)
                if tensor is not None:
                    break
            else:
                address = tensor_map.address
                raise Fault(
                    Kind.TMA, f"a tensor map at {address:#x}, which is no tensor's"
                )
            if early:
                sizes[-1] = early
            if tensor.itemsize != tensor_map.element_size:
                raise Fault(
                    Kind.TMA, f"a tensor map of other elements than {tensor.name}'s"
                )
            axes = tuple(
                tensor.axis_of(stride, count) if count > 1 else (-1, 0)
                for stride, count in zip(steps, sizes, strict=True)
            )
            axis, step = axes[rows]
            known = _Mapped(tensor_map, tensor, axes, (axis, early * step))
            self._mapped[id(tensor_map)] = known
        return known

    def _collect(
        self,
        records: Mapping[int, list[tuple[int, ...]]],
        lanes: Mapping[str, list[tuple[I64, I64, I64]]],
    ) -> dict[str, Boxes]:
        parts: defaultdict[str, list[tuple[I64, I64, I64]]] = defaultdict(list)
        for key, record in records.items():
            known = self._mapped[key]
            numbers = np.array(record, np.int64)
            parts[known.tensor.name].append(
                (numbers[:, :_KEYS], *known.boxes(numbers[:, _KEYS:]))
            )
        for name, found in lanes.items():
            parts[name] += found
        return {name: _boxes(found) for name, found in parts.items()}


def _boxes(parts: list[tuple[I64, I64, I64]]) -> Boxes:
    who, begin, end = (np.concatenate(each) for each in zip(*parts, strict=True))
    cluster, cta, by, warp, line = who.T
    return Boxes(cluster, cta, by, warp, line, begin, end)
