# SPDX-License-Identifier: Apache-2.0
"""A trial of packed sequences on the CPU: right kernels, and one that reads lengths only once."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip(
    "torch", reason="needs PyTorch (CPU): pip install 'fmha-gen[torch]'"
)

from fake_kernel import CpuDevice, spec  # noqa: E402
from fmha_gen.evidence import trial  # noqa: E402
from fmha_gen.ops import operation_of  # noqa: E402
from fmha_gen.ops.cases import REPEATS, Case, Layout  # noqa: E402
from fmha_gen.ops.operation import Given  # noqa: E402

LENGTHS = ((3, 40), (0, 7), (33, 0), (2, 64), (9, 1), (4, 48), (1, 17))
PAGED = {"kv": {"paged": {"page": 16}}}
IN_8_BITS = {"dtype": "e4m3", "out_dtype": "bf16", "descale": "head"}
KINDS = {
    **{"packed": {}, "paged": PAGED},
    **{"packed, 8 bits": IN_8_BITS, "paged, 8 bits": IN_8_BITS | PAGED},
}


class Packed:
    """What a generated module offers. keeps: integers and factors of its first call, for all."""

    TILE_Q, TILE_KV, Q_STAGES, RESCALE_SLACK = 64, 64, 1, 8.0

    def __init__(self, SPEC: dict[str, Any], keeps: bool) -> None:
        self.SPEC, self._keeps, self._kept = SPEC, keeps, {}
        self._exact: dict[tuple[int, ...], Any] = {}

    @staticmethod
    def sm_count(_device: int) -> int:
        return 132

    def fmha(
        self, q: Any, k: Any, v: Any, *, out: Any, lse: Any, **integers: Any
    ) -> Any:
        if self._keeps:
            integers = self._kept = self._kept or {
                n: x.clone() for n, x in integers.items()
            }
        given = Given(
            self.SPEC, {"q": q, "k": k, "v": v, **integers}, q.shape[-1] ** -0.5
        )
        lengths = tuple(torch.cat([x.reshape(-1) for x in integers.values()]).tolist())
        if lengths not in self._exact:
            self._exact[lengths] = operation_of(self.SPEC).exact(given)
        for name, found in self._exact[lengths].items():
            into = {"out": out, "lse": lse}[name]
            into.copy_(torch.where(found.isnan(), into.double(), found))
        return out, lse


def case(layout: Layout) -> Case:
    pages = sum(-(-kv // 16) for _, kv in LENGTHS)
    many = {"layout": layout, "lengths": LENGTHS, "repeats": REPEATS}
    return Case("many", len(LENGTHS), 2, 70, (pages + 2) * 16, **many)


@pytest.mark.parametrize("layout", ["own", "bhsd", "mixed", "fused", "cache"])
@pytest.mark.parametrize("kind", KINDS)
def test_right_kernel_holds(kind: str, layout: Layout) -> None:
    kernel = Packed(
        spec(batch="varlen", q_per_kv=2, mask="causal", **KINDS[kind]), False
    )
    assert trial.check_case(kernel, case(layout), CpuDevice()).findings == []


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_that_are_read_once_are_found(kind: str) -> None:
    kernel = Packed(spec(batch="varlen", mask="causal", **KINDS[kind]), True)
    found = trial.check_case(kernel, case("own"), CpuDevice()).findings
    assert found and all("graph replay with other lengths" in x for x in found)
