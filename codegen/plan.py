# SPDX-License-Identifier: Apache-2.0
"""From a spec to every number and choice of its kernel, each with where it came from.

Pure: the same spec gives the same plan. Templates place what is decided here and in context.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from .arch import sm90
from .context import Sizes, Traits, template_context
from .errors import Diagnostic, SpecError
from .spec import Spec, SpecFile

ELEMENT_BYTES: Final = 2  # bf16 and fp16
KV_TILES: Final = (128, 112, 96, 80, 64, 48, 32, 16)  # tried in this order
MIN_KV_STAGES: Final = 2
MAX_PLANNED_KV_STAGES: Final = 3  # d64: 3 and 4 stages ran alike on an H200

# Why a number is what it is when the spec leaves it out.
REASONS: Final[Mapping[str, str]] = {
    "TILE_Q": "192 up to head_dim 64, where a third warpgroup has registers enough",
    "TILE_KV": "the largest that registers and two stages in shared memory take",
    "Q_STAGES": "2 where it fits: the next tile's first QK then overlaps this tile's end",
    "KV_STAGES": "3 where they fit, else 2",
}


@dataclass(frozen=True)
class Number:
    """One constant of the generated file.

    `origin` is "given" (the spec says so), "default", "planned" (chosen here; `reason` says by
    which rule) or "derived" (`formula`, Python over the constants above it).
    """

    name: str
    value: int
    unit: str
    origin: str
    formula: str = ""
    reason: str = ""

    @property
    def line(self) -> str:
        """The constant as the file's constants block has it."""
        formula = f" = {self.formula}" if self.formula else ""
        return f"{self.name} = {self.value}  # [{self.unit}]{formula}"


@dataclass(frozen=True)
class Region:
    """A part of the CTA's shared memory."""

    name: str
    nbytes: int
    formula: str


@dataclass(frozen=True)
class Barrier:
    """A row of the synchronisation table: who arrives how often, and who waits."""

    name: str
    stages: int
    arrivals: str
    waiter: str


@dataclass(frozen=True)
class KernelPlan:
    """Everything that the templates and `explain` need to know about one kernel."""

    spec_file: SpecFile
    chosen: tuple[Number, ...]
    derived: tuple[Number, ...]
    smem: tuple[Region, ...]
    barriers: tuple[Barrier, ...]
    registers: sm90.RegisterSplit
    register_parts: Mapping[str, int]  # of a consumer thread, an estimate
    context: Mapping[str, Any]

    arch: str = "sm90"
    compile_arch: str = sm90.COMPILE_ARCH

    @property
    def stem(self) -> str:
        """The kernel's name."""
        return self.spec_file.stem

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one CTA."""
        return sum(region.nbytes for region in self.smem)

    @property
    def registers_needed(self) -> int:
        """What a consumer thread needs, by estimate."""
        return sum(self.register_parts.values())


def resolve(spec_file: SpecFile) -> KernelPlan:
    """Plan a kernel, or raise SpecError (FG401, FG402) with the sum that does not fit."""
    spec = spec_file.spec
    sizes = _choose(spec_file)
    warpgroups = sizes.tile_q // sm90.WARPGROUP_ROWS
    traits = Traits(spec, sizes)
    chosen = tuple(_chosen(traits))
    derived = tuple(_derived(traits))
    smem = _smem(spec, sizes)
    return KernelPlan(
        spec_file=spec_file,
        chosen=chosen,
        derived=derived,
        smem=smem,
        barriers=tuple(_barriers(traits)),
        registers=sm90.REGISTERS[warpgroups],
        register_parts=_register_parts(spec, sizes.tile_kv),
        context=template_context(spec_file, sizes, chosen, derived, _total(smem)),
    )


def _choose(spec_file: SpecFile) -> Sizes:
    """Tile and rings: as given, the rest planned for two KV stages, whatever stages.kv says.

    So a change of stages.kv changes nothing else, and what does not fit is refused.
    """
    spec = spec_file.spec
    tile_q = spec.tile.q or (192 if spec.head_dim.v <= 64 else 128)
    budget = sm90.REGISTERS[tile_q // sm90.WARPGROUP_ROWS].consumer
    kv_tiles = (spec.tile.kv,) if spec.tile.kv else KV_TILES
    fitting = [n for n in kv_tiles if sum(_register_parts(spec, n).values()) <= budget]
    if not fitting:
        raise _too_many_registers(spec_file, tile_q, kv_tiles[-1])

    def fits(sizes: Sizes) -> bool:
        return _total(_smem(spec, sizes)) <= sm90.SMEM_BYTES

    q_stages = (spec.stages.q,) if spec.stages.q else (2, 1)
    choices = [
        Sizes(tile_q, tile_kv, q, MIN_KV_STAGES)
        for tile_kv in fitting
        for q in q_stages
    ]
    sizes = next(filter(fits, choices), choices[-1])
    if spec.stages.kv:
        sizes = replace(sizes, kv_stages=spec.stages.kv)
    else:
        deeper = replace(sizes, kv_stages=MAX_PLANNED_KV_STAGES)
        sizes = deeper if fits(deeper) else sizes
    if not fits(sizes):
        raise _too_much_smem(spec_file, sizes)
    return sizes


def _register_parts(spec: Spec, tile_kv: int) -> dict[str, int]:
    """Registers of a consumer thread: S and O in fp32, P in 16 bits, and the rest."""
    return {
        "S": tile_kv // 2,
        "P": tile_kv // 4,
        "O": spec.head_dim.v // 2,
        "others": sm90.REGISTERS_BESIDE_TILES,
    }


def _smem(spec: Spec, sizes: Sizes) -> tuple[Region, ...]:
    qk, v = spec.head_dim.qk, spec.head_dim.v
    barriers = 2 * sm90.MBARRIER_BYTES * (sizes.q_stages + 2 * sizes.kv_stages)
    padding = -barriers % sm90.SMEM_ALIGN
    return (
        Region(
            "barriers",
            barriers,
            "2 * 8 * (Q_STAGES + 2 * KV_STAGES)",
        ),
        Region("padding", padding, "to a multiple of SMEM_ALIGN"),
        Region(
            "sQ",
            sizes.tile_q * qk * ELEMENT_BYTES * sizes.q_stages,
            "Q_TX_BYTES * Q_STAGES",
        ),
        Region(
            "sK",
            sizes.tile_kv * qk * ELEMENT_BYTES * sizes.kv_stages,
            "K_TX_BYTES * KV_STAGES",
        ),
        Region(
            "sV",
            sizes.tile_kv * v * ELEMENT_BYTES * sizes.kv_stages,
            "V_TX_BYTES * KV_STAGES",
        ),
    )


def _total(regions: tuple[Region, ...]) -> int:
    return sum(region.nbytes for region in regions)


def _too_many_registers(spec_file: SpecFile, tile_q: int, tile_kv: int) -> SpecError:
    spec = spec_file.spec
    parts = _register_parts(spec, tile_kv)
    budget = sm90.REGISTERS[tile_q // sm90.WARPGROUP_ROWS].consumer
    message = (
        f"a consumer thread needs about {sum(parts.values())} registers, "
        f"tile.q leaves {budget}: {' + '.join(f'{k} {n}' for k, n in parts.items())}"
    )
    field = ("tile", "kv") if spec.tile.kv else ("tile", "q")
    ways = ["a smaller tile.kv"] if spec.tile.kv else []
    ways += ["tile.q 128"] if tile_q > 128 else []
    hint = " or ".join(ways)
    return SpecError([Diagnostic(spec_file.locate(*field), "FG402", message, hint)])


def _too_much_smem(spec_file: SpecFile, sizes: Sizes) -> SpecError:
    spec = spec_file.spec
    regions = _smem(spec, sizes)
    parts = " + ".join(f"{region.name} {region.nbytes}" for region in regions)
    message = f"shared memory needs {_total(regions)} B, sm90 allows {sm90.SMEM_BYTES}: {parts}"
    field: tuple[str, ...] = ("head_dim",)
    for name in ("kv", "q"):
        if getattr(spec.stages, name):
            field = ("stages", name)
            break
    else:
        if spec.tile.kv or spec.tile.q:
            field = ("tile", "kv" if spec.tile.kv else "q")
    hint = "fewer stages, a smaller tile.kv, or leave them out to have them planned"
    return SpecError([Diagnostic(spec_file.locate(*field), "FG401", message, hint)])


def _chosen(traits: Traits) -> Iterator[Number]:
    spec, sizes = traits.spec, traits.sizes
    yield Number("HEAD_DIM_QK", spec.head_dim.qk, "elements", "given")
    yield Number("HEAD_DIM_V", spec.head_dim.v, "elements", "given")
    if traits.seqlen_q is not None:
        yield Number("SEQLEN_Q", traits.seqlen_q, "rows", "given")
    if traits.seqlen_kv is not None:
        yield Number("SEQLEN_KV", traits.seqlen_kv, "rows", "given")
    group = "given" if "heads" in spec.model_fields_set else "default"
    yield Number("Q_PER_KV", spec.heads.q_per_kv, "query heads per KV head", group)
    if traits.cluster_size > 1:
        along_q = spec.cluster[0] > 1
        what = "query tiles of one head" if along_q else "query heads of one KV head"
        yield Number("CLUSTER_SIZE", traits.cluster_size, f"CTAs: {what}", "given")
    for name, value, unit, given in (
        ("TILE_Q", sizes.tile_q, "rows per CTA", spec.tile.q),
        ("TILE_KV", sizes.tile_kv, "rows per stage", spec.tile.kv),
        ("Q_STAGES", sizes.q_stages, "tiles", spec.stages.q),
        ("KV_STAGES", sizes.kv_stages, "tiles each of K and V", spec.stages.kv),
    ):
        origin = "given" if given else "planned"
        yield Number(name, value, unit, origin, reason="" if given else REASONS[name])


def _derived(traits: Traits) -> Iterator[Number]:
    spec, sizes = traits.spec, traits.sizes
    qk, v = spec.head_dim.qk, spec.head_dim.v
    warpgroups = sizes.tile_q // sm90.WARPGROUP_ROWS
    split = sm90.REGISTERS[warpgroups]
    k_bytes = sizes.tile_kv * qk * ELEMENT_BYTES
    v_bytes = sizes.tile_kv * v * ELEMENT_BYTES
    per_thread, per_stage = "per thread", "bytes per stage"
    rows = [
        ("WARPGROUPS", warpgroups, "that compute", "TILE_Q // 64"),
        ("THREADS", 128 * (warpgroups + 1), "per CTA", "128 * (WARPGROUPS + 1)"),
        ("CONSUMER_REGS", split.consumer, per_thread, _by_warpgroups("consumer")),
        ("PRODUCER_REGS", split.producer, per_thread, _by_warpgroups("producer")),
        ("Q_TX_BYTES", sizes.tile_q * qk * 2, per_stage, "TILE_Q * HEAD_DIM_QK * 2"),
        ("K_TX_BYTES", k_bytes, per_stage, "TILE_KV * HEAD_DIM_QK * 2"),
        ("V_TX_BYTES", v_bytes, per_stage, "TILE_KV * HEAD_DIM_V * 2"),
    ]
    for name, shared in (
        ("K_RELEASES", traits.multicast_k),
        ("V_RELEASES", traits.multicast_v),
    ):
        ctas = traits.cluster_size if shared else 1
        formula = "4 * WARPGROUPS * CLUSTER_SIZE" if shared else "4 * WARPGROUPS"
        rows.append((name, 4 * warpgroups * ctas, "warps that free a stage", formula))
    if traits.seqlen_q is not None:
        along_q = spec.cluster[0] > 1
        tile = "(TILE_Q * CLUSTER_SIZE)" if along_q else "TILE_Q"
        tiles = -(-traits.seqlen_q // (sizes.tile_q * spec.cluster[0]))
        unit = "clusters along a head" if along_q else "per head"
        rows.append(("Q_TILES", tiles, unit, f"-(-SEQLEN_Q // {tile})"))
    if traits.seqlen_kv is not None and not traits.causal:
        blocks = -(-traits.seqlen_kv // sizes.tile_kv)
        unit = "per query tile"
        rows.append(("KV_BLOCKS", blocks, unit, "-(-SEQLEN_KV // TILE_KV)"))
    for name, value, unit, formula in rows:
        yield Number(name, value, unit, "derived", formula)


def _by_warpgroups(role: str) -> str:
    """The register split of a role as a formula over WARPGROUPS."""
    two, three = (getattr(sm90.REGISTERS[n], role) for n in (2, 3))
    return f"{two} if WARPGROUPS == 2 else {three}"


def _barriers(traits: Traits) -> Iterator[Barrier]:
    sizes = traits.sizes
    warpgroups = sizes.tile_q // sm90.WARPGROUP_ROWS
    by_warpgroup = f"{warpgroups}: a warp of each warpgroup, once O has left the stage"
    yield Barrier("q_full", sizes.q_stages, "1 + Q_TX_BYTES by TMA", "consumers")
    yield Barrier("q_empty", sizes.q_stages, by_warpgroup, "producer")
    for name, shared in (("k", traits.multicast_k), ("v", traits.multicast_v)):
        ctas = traits.cluster_size if shared else 1
        loads = f"by TMA of {ctas} CTAs, a slice each" if shared else "by TMA"
        warps = f"{4 * warpgroups * ctas}: every consumer warp"
        warps += f" of {ctas} CTAs" if shared else ""
        full = f"1 + {name.upper()}_TX_BYTES {loads}"
        yield Barrier(f"{name}_full", sizes.kv_stages, full, "consumers")
        yield Barrier(f"{name}_empty", sizes.kv_stages, warps, "producer")
    turn = "256 threads: a warpgroup and the one before it"
    yield Barrier("order", warpgroups, turn, "the warpgroup")
    yield Barrier("store", warpgroups, "128 threads: a warpgroup", "its first warp")
