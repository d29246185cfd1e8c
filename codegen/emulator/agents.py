# SPDX-License-Identifier: Apache-2.0
"""What a warp knows of what happened, and what each of its lanes knows of the others.

PTX orders threads, not warps: that lanes ran an instruction together orders nothing in memory, and
neither does `shfl`, `vote` or `elect`. So what some lanes hand over covers what these lanes did and
what all lanes knew of each other when they last met: at a `bar.warp.sync`, a barrier, or a phase of
an mbarrier that all had arrived at. As long as lanes act together there is one clock for all. Once
some of them alone wait or fence, each lane has its own, until they meet again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import (
    FENCED,
    GLOBAL,
    HAPPENED,
    PUBLISHED,
    SEEN,
    SENT,
    Clock,
    Components,
)
from .lanes import WARP

_HANDED = SEEN
"""Rows of a clock before this one go from thread to thread."""
_TOGETHER, _ALONE = 0, 1
"""Places in `_own` of what the lanes did, and of what one lane did alone."""

Some = NDArray[np.bool_] | None
"""Of a warp's 32 lanes those that act; None: all that it began with."""


class Agent:
    """What one warp knows, its lanes taken together: see `view` for what some of them know."""

    def __init__(self, components: Components, warp: int) -> None:
        self.warp = warp
        self.clock: Clock = np.zeros((components.rows, components.count), np.int64)
        self._alone = components.alone(warp)
        self._tensor = components.own_tensor(warp)
        self._own = np.array([warp, self._alone, *self._tensor])
        self._mine = frozenset(self._own.tolist())
        self._met = self.clock[:, self._own]
        """What every lane knew of the others' doings when they last met."""
        self._acted = np.zeros(WARP, np.int64)
        """The epoch when each lane last did something that counts as done together."""
        self._fenced = {row: np.zeros(WARP, np.int64) for row in (FENCED, GLOBAL)}
        """The epoch when it last fenced that for the asynchronous proxy, in either space."""
        self._loner: int | None = None
        """The lane whose doings the component `_alone` counts."""
        self._last_alone = 0
        self._apart: Any = None
        """[32, rows, components]: what each lane knows, once they know different things."""
        self.advance()

    @property
    def epoch(self) -> int:
        """Where the warp is in its own components."""
        return int(self.clock[HAPPENED, self.warp])

    def advance(self) -> None:
        """What the warp does from here on was not released yet."""
        self.clock[HAPPENED, self.warp] += 1
        self.clock[HAPPENED, self._alone] += 1

    def actor(self, lanes: Some) -> int:
        """The component of what these lanes do now.

        Only one lane at a time has a component of its own. What another one does alone before they
        meet counts as done together: then nothing covers it but a meeting.
        """
        if lanes is not None and lanes.sum() == 1:
            lane = int(lanes.argmax())
            if self._loner != lane and self._last_alone <= self._met[HAPPENED, _ALONE]:
                self._loner = lane
            if self._loner == lane:
                self._last_alone = self.epoch
                return self._alone
        self._acted[slice(None) if lanes is None else lanes] = self.epoch
        return self.warp

    def view(self, lanes: Some = None) -> Clock:
        """What each of these lanes knows. Not to be written to."""
        if lanes is not None:
            return self._known(lanes, np.min)
        if self._apart is None:
            return self.clock
        clock: Clock = self._apart.min(axis=0)
        clock[:, self._own] = self.clock[:, self._own]
        return clock

    def _known(self, lanes: NDArray[np.bool_], join: Callable[..., Any]) -> Clock:
        """What these lanes know, joined in this way: of the others' doings what all met with."""
        clock: Clock
        if self._apart is None:
            clock = self.clock.copy()
            clock[:, self._own] = self._met
        else:
            clock = np.asarray(join(self._apart[lanes], axis=0))
        for place in self._covered(lanes):
            component = self._own[place]
            known = self.clock[:, component]
            clock[:, component] = np.maximum(clock[:, component], known)
        clock[PUBLISHED] = self.clock[PUBLISHED]
        return clock

    def knows(self, lanes: Some = None) -> Clock:
        """What these lanes know, for accesses of theirs: those of their own warp the shadow tells
        apart by lane."""
        clock = self.view(lanes)
        if lanes is not None:  # then it is a copy
            clock[HAPPENED, self._own[: _ALONE + 1]] = self.epoch
        return clock

    def _covered(self, lanes: NDArray[np.bool_]) -> list[int]:
        """Places in `_own` of what nobody but these lanes did since all met."""
        places = []
        if not (self._acted[~lanes] > self._met[HAPPENED, _TOGETHER]).any():
            places.append(_TOGETHER)
        if self._loner is not None and lanes[self._loner]:
            places.append(_ALONE)
        return places

    def meetings(self) -> list[tuple[int, int]]:
        """The components of its lanes, and the epochs up to which each lane knows them."""
        met = self._met[HAPPENED]
        return [(self.warp, int(met[_TOGETHER])), (self._alone, int(met[_ALONE]))]

    def latest(self) -> Clock:
        """What any of its lanes knows."""
        if self._apart is None:
            whole: Clock = self.clock.copy()
            return whole
        known: Clock = np.maximum(self.clock, self._apart.max(axis=0))
        return known

    def release(self, lanes: Some = None) -> Clock:
        """What these lanes hand to others, each what it knows."""
        clock = self.latest() if lanes is None else self._known(lanes, np.max)
        self.advance()
        return clock

    def issue(self, lanes: Some = None) -> Clock:
        """What an operation starts with that these lanes issue."""
        clock = self.view(lanes)
        if clock is self.clock:
            clock = clock.copy()
        self.advance()
        return clock

    def release_published(self) -> Clock:
        """What a relaxed arrival hands over: only the published initialisations."""
        clock = np.zeros_like(self.clock)
        clock[PUBLISHED] = self.clock[PUBLISHED]
        return clock

    def acquire(self, clock: Clock | None, lanes: Some = None) -> None:
        """These lanes learn what was released."""
        if clock is None:
            return
        handed = clock[:_HANDED]
        if lanes is not None:
            apart = self._part()
            apart[lanes, :_HANDED] = np.maximum(apart[lanes, :_HANDED], handed)
            self._unite()
            return
        np.maximum(self.clock[:_HANDED], handed, out=self.clock[:_HANDED])
        if self._apart is not None:
            held = self._apart[:, :_HANDED]
            np.maximum(held, handed, out=held)
        met = self._met[:_HANDED]
        np.maximum(met, handed[:, self._own], out=met)

    def meet(self) -> None:
        """All lanes of the warp wait for each other, and know what each of them did and knew."""
        if self._apart is not None:
            known = self._apart[:, :_HANDED].max(axis=0)
            self._apart[:, :_HANDED] = known
            np.maximum(self.clock[:_HANDED], known, out=self.clock[:_HANDED])
        self._met = self.clock[:, self._own]
        if self._apart is not None:
            self._apart[:, :_HANDED, self._own] = self._met[:_HANDED]
            self._unite()
        self.advance()

    def learn(self, component: int, epoch: int) -> None:
        """The warp knows that it has done all of a component of its own up to this epoch."""
        for row in (HAPPENED, SEEN):
            self.clock[row, component] = max(self.clock[row, component], epoch)

    def count_signal(self, component: int, epoch: int) -> None:
        """The warp arrives at an mbarrier of another CTA: whoever hears of it later knows."""
        self.clock[HAPPENED, component] = epoch
        if self._apart is not None:
            self._apart[:, HAPPENED, component] = epoch

    # --- fences -------------------------------------------------------------------------------

    def fence_async(self, row: int, lanes: Some = None) -> None:
        """All that these lanes know is visible to the asynchronous proxy from here on.

        row: FENCED or GLOBAL, of shared or of global memory.
        """
        self._raise(row, HAPPENED, lanes)
        fenced_at = self._fenced[row]
        fenced_at[slice(None) if lanes is None else lanes] = self.epoch
        open_ = self._acted > fenced_at
        fenced = int(fenced_at[open_].min()) if open_.any() else self.epoch
        known = self.clock[row, self.warp]
        self.clock[row, self.warp] = max(known, fenced)
        self.advance()

    def fence_after(self, lanes: Some = None) -> None:
        """What these lanes do in tensor memory from here on comes after what they waited for."""
        self._raise(SEEN, SENT, lanes)

    def fence_before(self, lanes: Some = None) -> None:
        """What these lanes did in tensor memory comes before what they signal from here on."""
        if lanes is None:  # loads and stores are of whole warps
            own = self._tensor
            self.clock[SENT, own] = self.clock[HAPPENED, own]

    def _raise(self, row: int, source: int, lanes: Some) -> None:
        """Raises a row to what another row says."""
        if lanes is None:
            clocks = [self.clock[None], self._met[None]]
            for each in clocks if self._apart is None else [*clocks, self._apart]:
                np.maximum(each[:, row], each[:, source], out=each[:, row])
            return
        known = self.view(lanes)[source]
        apart = self._part()
        apart[lanes, row] = np.maximum(apart[lanes, row], known)

    def fence_initialisations(self, lanes: Some = None) -> None:
        """The mbarriers that these lanes initialised are visible to whom they signal."""
        places = [_TOGETHER, _ALONE] if lanes is None else self._covered(lanes)
        self.clock[PUBLISHED, self._own[places]] = self.epoch
        self.advance()

    def knows_initialisation(
        self, component: int, epoch: int, lanes: Some = None
    ) -> bool:
        """Whether these lanes can use an mbarrier that a component initialised at its epoch."""
        known = self._of(component, lanes)
        return bool(max(known[HAPPENED], known[PUBLISHED]) >= epoch)

    def copies_know_initialisation(
        self, component: int, epoch: int, lanes: Some = None
    ) -> bool:
        """The same for a copy, which is of the asynchronous proxy and needs a fence."""
        known = self._of(component, lanes)
        return bool(max(known[FENCED], known[PUBLISHED]) >= epoch)

    def _of(self, component: int, lanes: Some) -> Any:
        """What these lanes know of one component."""
        if self._apart is None and component not in self._mine:
            return self.clock[:, component]
        return self.view(lanes)[:, component]

    # --- lanes that know different things -----------------------------------------------------

    def _part(self) -> Any:
        """What each lane knows, from here on one by one."""
        if self._apart is None:
            common = self.clock.copy()
            common[:, self._own] = self._met
            self._apart = np.repeat(common[None], WARP, axis=0)
        return self._apart

    def _unite(self) -> None:
        """One clock for all lanes again, if they know the same."""
        if (self._apart == self._apart[0]).all():
            own = self.clock[:, self._own]
            self._met = np.maximum(self._met, self._apart[0][:, self._own])
            self.clock = self._apart[0].copy()
            self.clock[:, self._own] = np.maximum(own, self._met)
            self._apart = None
