# SPDX-License-Identifier: Apache-2.0
"""What the plan says each CTA of a cluster loads, and for whom, is what the emulator sees."""

from __future__ import annotations

from collections import defaultdict

import pytest
import support
from fmha_gen.emulator.copies import Copies
from fmha_gen.emulator.parts import Box
from fmha_gen.evidence import rehearsal

from tests.emulator.rehearsals import emulated_cases, rehearsals

ELEMENT_BYTES = 2
KERNELS = (
    "sm90_d128_bf16_full_c2x1_kvmc",
    "sm90_d128_bf16_causal_gqa8_c1x2_kvmc",
    "sm100_d128_bf16_causal_gqa4_c2x1_cta2_lse",
    "sm100_d128_bf16_causal_gqa4_c2x1_kvmc_lse",
)


class Enough(Exception):
    """Every CTA has loaded a tile of each tensor."""


class Recorder:
    """Boxes of the first tiles, by tensor and CTA, and who received them."""

    def __init__(self, monkeypatch, stem, problem):
        self.plan = support.shipped_plan(stem)
        self.boxes = defaultdict(set)  # (first row, rows, first column, columns)
        self.receivers = defaultdict(set)
        tensors = {name.upper(): problem[name] for name in "qkv"}
        self._names = {tensor.address: name for name, tensor in tensors.items()}
        self._now = None
        check, receive = Box.check, Copies._receivers

        def checked(box, machine):
            name = self._names.get(box.tensor_map.address)  # none: O, which is stored
            self._now = (name, box.tensor_map.box, box.coordinates)
            return check(box, machine)

        def received(copies, cta, owner, bits, pair):
            found = receive(copies, cta, owner, bits, pair)
            self.add(cta.rank, [each.rank for each, _ in found])
            return found

        monkeypatch.setattr(Box, "check", checked)
        monkeypatch.setattr(Copies, "_receivers", received)

    def add(self, rank, receivers):
        tensor, (columns, rows, *_), (first_column, first_row, *_) = self._now
        tile, *_ = (
            load.tile for load in self.plan.kernels[0].loads if load.tensor == tensor
        )
        key = (tensor, rank)
        self.boxes[key].add((first_row % tile[0], rows, first_column, columns))
        self.receivers[key].add(tuple(receivers))
        if all(self.loaded(load) >= load.nbytes for load in self.plan.kernels[0].loads):
            raise Enough

    def loaded(self, load):
        boxes = self.boxes[load.tensor, load.cta]
        return sum(rows * columns for _, rows, _, columns in boxes) * ELEMENT_BYTES


@pytest.mark.parametrize("stem", KERNELS)
def test_loads(monkeypatch, stem):
    path = support.GENERATED / f"{stem}.py"
    _, (ready,) = rehearsals(path, cases=emulated_cases(path)[:1])
    recorder = Recorder(monkeypatch, stem, ready.problem)
    with pytest.raises(Enough):
        ready.run(rehearsal.schedules(0)[0])
    for load in recorder.plan.kernels[0].loads:
        boxes = recorder.boxes[load.tensor, load.cta]
        assert recorder.receivers[load.tensor, load.cta] == {load.receivers}
        assert span((row, rows) for row, rows, _, _ in boxes) == load.rows
        assert (
            span((column, columns) for _, _, column, columns in boxes) == load.columns
        )
        assert recorder.loaded(load) == load.nbytes  # each part once


def span(ranges):
    """The first of all and how many there are to the last."""
    found = list(ranges)
    first = min(start for start, _ in found)
    return first, max(start + count for start, count in found) - first
