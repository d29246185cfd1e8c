# SPDX-License-Identifier: Apache-2.0
"""From a spec to every number and choice of its kernel, each with where it came from.

Pure: the same spec gives the same plan. What a template shows is decided here; templates only place it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from .arch import sm90
from .errors import Diagnostic, SpecError
from .spec import Spec, SpecFile

ELEMENT_BYTES: Final = 2  # bf16 and fp16
KV_TILES: Final = (128, 112, 96, 80, 64, 48, 32, 16)  # tried in this order
MAX_PLANNED_KV_STAGES: Final = 3  # d64: 3 and 4 stages ran alike on an H200

_SMEM_ATOMS: Final = {0: "K_SW128", 32: "K_SW64"}  # by head_dim modulo 64
_DTYPES: Final = {"bf16": "cutlass.BFloat16", "fp16": "cutlass.Float16"}


@dataclass(frozen=True)
class Number:
    """One constant of the generated file.

    `origin` is "given" (the spec says so), "planned" (chosen here; `reason` says by which rule) or
    "derived" (`formula`, Python over the constants above it).
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
    registers_needed: int
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


@dataclass(frozen=True)
class _Sizes:
    tile_q: int
    tile_kv: int
    q_stages: int
    kv_stages: int


def resolve(spec_file: SpecFile) -> KernelPlan:
    """Plan a kernel, or raise SpecError (FG401, FG402) with the sum that does not fit."""
    spec = spec_file.spec
    sizes, reasons = _choose(spec_file)
    warpgroups = sizes.tile_q // sm90.WARPGROUP_ROWS
    chosen = tuple(_chosen(spec, sizes, reasons))
    derived = tuple(_derived(spec, sizes))
    smem = _smem(spec, sizes)
    return KernelPlan(
        spec_file=spec_file,
        chosen=chosen,
        derived=derived,
        smem=smem,
        barriers=tuple(_barriers(spec, sizes)),
        registers=sm90.REGISTERS[warpgroups],
        registers_needed=_registers(spec, sizes.tile_kv),
        context=_context(spec_file, sizes, chosen, derived, smem),
    )


def _choose(spec_file: SpecFile) -> tuple[_Sizes, dict[str, str]]:
    """Tile and stages: as given, else the largest KV tile that fits, then Q and KV stages."""
    spec = spec_file.spec
    tile_q = spec.tile.q or (192 if spec.head_dim.v <= 64 else 128)
    reasons = {
        "TILE_Q": "192 up to head_dim 64, whose accumulators leave room for a third warpgroup, else 128"
    }
    kv_tiles = (spec.tile.kv,) if spec.tile.kv else KV_TILES
    q_stages = (spec.stages.q,) if spec.stages.q else (2, 1)
    kv_stages = (
        (spec.stages.kv,)
        if spec.stages.kv
        else tuple(range(MAX_PLANNED_KV_STAGES, 1, -1))
    )
    budget = sm90.REGISTERS[tile_q // sm90.WARPGROUP_ROWS].consumer
    reasons["TILE_KV"] = "the largest that registers and shared memory take"
    reasons["Q_STAGES"] = (
        "2 where it fits: the next tile's first QK then overlaps this tile's end"
    )
    reasons["KV_STAGES"] = f"the most that fit, up to {MAX_PLANNED_KV_STAGES}"
    fitting = [n for n in kv_tiles if _registers(spec, n) <= budget]
    if not fitting:
        raise _too_many_registers(spec_file, kv_tiles[-1], budget)
    for tile_kv in fitting:
        for q in q_stages:
            for kv in kv_stages:
                sizes = _Sizes(tile_q, tile_kv, q, kv)
                if _total(_smem(spec, sizes)) <= sm90.SMEM_BYTES:
                    return sizes, reasons
    raise _too_much_smem(
        spec_file, _Sizes(tile_q, fitting[-1], q_stages[-1], kv_stages[-1])
    )


def _registers(spec: Spec, tile_kv: int) -> int:
    """Registers per consumer thread: S and O in fp32, P in 16 bits, and the rest."""
    return (
        tile_kv // 2 + tile_kv // 4 + spec.head_dim.v // 2 + sm90.REGISTERS_BESIDE_TILES
    )


def _smem(spec: Spec, sizes: _Sizes) -> tuple[Region, ...]:
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


def _too_many_registers(spec_file: SpecFile, tile_kv: int, budget: int) -> SpecError:
    spec = spec_file.spec
    v = spec.head_dim.v
    message = (
        f"a consumer thread needs about {_registers(spec, tile_kv)} registers, tile.q leaves {budget}: "
        f"S {tile_kv // 2} + P {tile_kv // 4} + O {v // 2} + others {sm90.REGISTERS_BESIDE_TILES}"
    )
    field = ("tile", "kv") if spec.tile.kv else ("tile", "q")
    hint = "a smaller tile.kv" if spec.tile.kv else "tile: {q: 128}"
    return SpecError([Diagnostic(spec_file.locate(*field), "FG402", message, hint)])


def _too_much_smem(spec_file: SpecFile, sizes: _Sizes) -> SpecError:
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


def _chosen(spec: Spec, sizes: _Sizes, reasons: Mapping[str, str]) -> Iterator[Number]:
    yield Number("HEAD_DIM_QK", spec.head_dim.qk, "elements", "given")
    yield Number("HEAD_DIM_V", spec.head_dim.v, "elements", "given")
    if spec.seqlen.q != "dynamic":
        yield Number("SEQLEN_Q", spec.seqlen.q, "rows", "given")
    if spec.seqlen.kv != "dynamic":
        yield Number("SEQLEN_KV", spec.seqlen.kv, "rows", "given")
    yield Number("Q_PER_KV", spec.heads.q_per_kv, "query heads per KV head", "given")
    if _cluster_size(spec) > 1:
        unit = (
            "query tiles of one head"
            if spec.cluster[0] > 1
            else "query heads of one KV head"
        )
        yield Number("CLUSTER_SIZE", _cluster_size(spec), f"CTAs, {unit}", "given")
    for name, value, unit, given in (
        ("TILE_Q", sizes.tile_q, "rows per CTA", spec.tile.q),
        ("TILE_KV", sizes.tile_kv, "rows per stage", spec.tile.kv),
        ("Q_STAGES", sizes.q_stages, "tiles", spec.stages.q),
        ("KV_STAGES", sizes.kv_stages, "tiles each of K and V", spec.stages.kv),
    ):
        if given:
            yield Number(name, value, unit, "given")
        else:
            yield Number(name, value, unit, "planned", reason=reasons[name])


def _derived(spec: Spec, sizes: _Sizes) -> Iterator[Number]:
    qk, v = spec.head_dim.qk, spec.head_dim.v
    warpgroups = sizes.tile_q // sm90.WARPGROUP_ROWS
    warps = 4 * warpgroups
    split = sm90.REGISTERS[warpgroups]
    shared_k = _cluster_size(spec) if "k" in _multicast(spec) else 1
    shared_v = _cluster_size(spec) if "v" in _multicast(spec) else 1

    def derived(name: str, value: int, unit: str, formula: str) -> Number:
        return Number(name, value, unit, "derived", formula)

    yield derived("WARPGROUPS", warpgroups, "that compute", "TILE_Q // 64")
    yield derived(
        "THREADS", 128 * (warpgroups + 1), "per CTA", "128 * (WARPGROUPS + 1)"
    )
    yield derived(
        "CONSUMER_REGS", split.consumer, "per thread", "240 if WARPGROUPS == 2 else 160"
    )
    yield derived(
        "PRODUCER_REGS", split.producer, "per thread", "24 if WARPGROUPS == 2 else 32"
    )
    yield derived(
        "Q_TX_BYTES",
        sizes.tile_q * qk * ELEMENT_BYTES,
        "bytes per stage",
        "TILE_Q * HEAD_DIM_QK * 2",
    )
    yield derived(
        "K_TX_BYTES",
        sizes.tile_kv * qk * ELEMENT_BYTES,
        "bytes per stage",
        "TILE_KV * HEAD_DIM_QK * 2",
    )
    yield derived(
        "V_TX_BYTES",
        sizes.tile_kv * v * ELEMENT_BYTES,
        "bytes per stage",
        "TILE_KV * HEAD_DIM_V * 2",
    )
    for name, shared in (("K_RELEASES", shared_k), ("V_RELEASES", shared_v)):
        formula = "4 * WARPGROUPS" + (" * CLUSTER_SIZE" if shared > 1 else "")
        yield derived(name, warps * shared, "warps free a stage", formula)
    if _fixed(spec.seqlen.q):
        rows = sizes.tile_q * spec.cluster[0]
        per = "(TILE_Q * CLUSTER_SIZE)" if spec.cluster[0] > 1 else "TILE_Q"
        unit = "clusters along a head" if spec.cluster[0] > 1 else "per head"
        yield derived("Q_TILES", -(-spec.seqlen.q // rows), unit, f"-(-SEQLEN_Q // {per})")  # type: ignore[operator]
    if _fixed(spec.seqlen.kv) and spec.mask == "none":
        blocks = -(-spec.seqlen.kv // sizes.tile_kv)  # type: ignore[operator]
        yield derived("KV_BLOCKS", blocks, "per query tile", "-(-SEQLEN_KV // TILE_KV)")


def _barriers(spec: Spec, sizes: _Sizes) -> Iterator[Barrier]:
    warpgroups = sizes.tile_q // sm90.WARPGROUP_ROWS
    warps = 4 * warpgroups
    for name, stages in (
        ("q", sizes.q_stages),
        ("k", sizes.kv_stages),
        ("v", sizes.kv_stages),
    ):
        shared = name in _multicast(spec)
        size = _cluster_size(spec) if shared else 1
        who = f"{size} CTAs' TMA, a slice each" if size > 1 else "TMA"
        yield Barrier(
            f"{name}_full",
            stages,
            f"1 + {name.upper()}_TX_BYTES by {who}",
            "consumer warps",
        )
        if name == "q":
            arrivals = (
                f"{warpgroups}: one warp per warpgroup, when O has left the stage"
            )
        else:
            arrivals = f"{warps * size}: {warps} warps" + (
                f" of each of {size} CTAs" if size > 1 else ""
            )
        yield Barrier(f"{name}_empty", stages, arrivals, "producer warp")
    yield Barrier(
        "order", warpgroups, "256 threads: two neighbouring warpgroups", "one warpgroup"
    )
    yield Barrier("store", warpgroups, "128 threads of a warpgroup", "the same")


def _cluster_size(spec: Spec) -> int:
    return spec.cluster[0] * spec.cluster[1]


def _multicast(spec: Spec) -> str:
    return "" if spec.multicast == "none" else spec.multicast


def _fixed(length: int | str) -> bool:
    return length != "dynamic"


def _context(
    spec_file: SpecFile,
    sizes: _Sizes,
    chosen: tuple[Number, ...],
    derived: tuple[Number, ...],
    smem: tuple[Region, ...],
) -> dict[str, Any]:
    """What the templates read: flags for whole statements, and expressions as text."""
    spec = spec_file.spec
    q, kv = spec.seqlen.q, spec.seqlen.kv
    causal = spec.mask == "causal"
    fixed_q, fixed_kv = _fixed(q), _fixed(kv)
    cluster_q, cluster_heads = spec.cluster
    warpgroups = sizes.tile_q // sm90.WARPGROUP_ROWS
    kv_tail = not fixed_kv or kv % sizes.tile_kv != 0  # type: ignore[operator]
    # The diagonal stays inside the first block of every tile: no further block needs a mask.
    one_diagonal_block = (
        isinstance(q, int)
        and isinstance(kv, int)
        and cluster_q == 1
        and sizes.tile_kv % sizes.tile_q == 0
        and kv % sizes.tile_kv == 0
        and (kv - q) % sizes.tile_q == 0
        and kv >= q
    )
    masked_loop = causal and not one_diagonal_block
    dynamic_blocks = causal or not fixed_kv
    needs_problem = not (fixed_q and fixed_kv) if causal else not fixed_kv
    problem = ["problem"] if needs_problem else []
    count_args = [*(["q_tile"] if causal else []), *problem]
    count_params = [
        *(["q_tile: Int32"] if causal else []),
        *(["problem: Problem"] if needs_problem else []),
    ]
    mask_params = [
        *(["row: Int32"] if causal else []),
        "block: Int32",
        *(["problem: Problem"] if needs_problem else []),
    ]
    run_time = [
        name
        for name, fixed in (("seqlen_q", fixed_q), ("seqlen_kv", fixed_kv))
        if not fixed
    ]
    q_tiles = [] if fixed_q else ["q_tiles"]
    global_row = "q_tile * TILE_Q + row"
    blocks = "blocks" if dynamic_blocks else "KV_BLOCKS"

    def mask_args(block: str) -> str:
        return ", ".join([*([global_row] if causal else []), block, *problem])

    lse_predicate = not fixed_q or q % (sizes.tile_q * cluster_q) != 0  # type: ignore[operator]
    empty_rows = causal and not (isinstance(q, int) and isinstance(kv, int) and kv >= q)
    rows = "TILE_Q" if cluster_q == 1 else "TILE_Q * CLUSTER_SIZE"
    return {
        "stem": spec_file.stem,
        "title": _title(spec),
        "spec_path": f"specs/{spec_file.stem}.yaml",
        "dtype": spec.dtype,
        "dtype_class": _DTYPES[spec.dtype],
        "packed_type": "bf16x2" if spec.dtype == "bf16" else "f16x2",
        "head_dim_qk": spec.head_dim.qk,
        "head_dim_v": spec.head_dim.v,
        "q_per_kv": spec.heads.q_per_kv,
        "seqlen_q_text": str(q) if fixed_q else "seqlen_q",
        "seqlen_kv_text": str(kv) if fixed_kv else "seqlen_kv",
        "smem_bytes": _total(smem),
        "compute_warps": f"4 to {4 * warpgroups + 3}",
        "spec_items": _spec_items(spec_file),
        "chosen": chosen,
        "derived": derived,
        "smem_atom": _SMEM_ATOMS[max(spec.head_dim.qk % 64, spec.head_dim.v % 64)],
        "causal": causal,
        "lse": spec.lse,
        "lse_predicate": lse_predicate,
        "lse_row": global_row,
        "fixed_q": fixed_q,
        "fixed_kv": fixed_kv,
        "kv_tail": kv_tail,
        "masks": causal or kv_tail,
        "uses_rows": causal or spec.lse,
        "masked_loop": masked_loop,
        "hidden_rows": masked_loop,
        "empty_rows": empty_rows,
        "cross_tile": sizes.q_stages == 2,
        "cluster_size": _cluster_size(spec),
        "cluster_q": cluster_q,
        "cluster_heads": cluster_heads,
        "multicast_k": "k" in _multicast(spec),
        "multicast_v": "v" in _multicast(spec),
        "dynamic_blocks": dynamic_blocks,
        "blocks": blocks,
        "count_args": ", ".join(count_args),
        "count_params": ", ".join(count_params),
        "mask_params": ", ".join(mask_params),
        "first_mask_args": mask_args(f"{blocks} - 1"),
        "loop_mask_args": mask_args(f"{blocks} - 2 - i"),
        "q_tiles": "Q_TILES" if fixed_q else "problem.q_tiles",
        "q_tiles_formula": f"cute.ceil_div(seqlen_q, {rows})",
        "q_tiles_unit": "clusters along a head" if cluster_q > 1 else "per head",
        "heads_unit": "pairs of query heads" if cluster_heads > 1 else "query heads",
        "tiles_unit": "of all clusters" if _cluster_size(spec) > 1 else "of all CTAs",
        "tile_owner": "cluster" if _cluster_size(spec) > 1 else "CTA",
        "seqlen_q": "SEQLEN_Q" if fixed_q else "problem.seqlen_q",
        "seqlen_kv": "SEQLEN_KV" if fixed_kv else "problem.seqlen_kv",
        "host_seqlen_q": "SEQLEN_Q" if fixed_q else "seqlen_q",
        "host_seqlen_kv": "SEQLEN_KV" if fixed_kv else "seqlen_kv",
        "problem_fields": ", ".join([*run_time, *q_tiles, "heads", "num_tiles"]),
        "size_args": ", ".join(["batch", "heads_kv", *run_time]),
        "one_per_size": ", ".join(["1"] * (2 + len(run_time))),
        "host_q_tiles": "Q_TILES" if fixed_q else "q_tiles",
    }


def _title(spec: Spec) -> str:
    qk, v = spec.head_dim.qk, spec.head_dim.v
    head_dim = str(qk) if qk == v else f"{qk} and {v}"
    parts = [
        f"head_dim {head_dim}",
        spec.dtype,
        "causal" if spec.mask == "causal" else "full mask",
    ]
    if spec.heads.q_per_kv > 1:
        parts.append(f"GQA {spec.heads.q_per_kv}")
    if _cluster_size(spec) > 1:
        parts.append(f"cluster {spec.cluster[0]}x{spec.cluster[1]}")
        shared = {"": "no", "k": "K", "v": "V", "kv": "K and V"}[_multicast(spec)]
        parts.append(f"{shared} multicast")
    return f"FMHA forward for sm90: {', '.join(parts)}"


def _spec_items(spec_file: SpecFile) -> tuple[tuple[str, str], ...]:
    """The SPEC dict of the generated file, as source text."""
    spec = spec_file.spec
    values: dict[str, object] = {
        "name": spec_file.stem,
        "arch": spec.arch,
        "op": spec.op,
        "dtype": spec.dtype,
        "head_dim": {"qk": spec.head_dim.qk, "v": spec.head_dim.v},
        "seqlen": {"q": spec.seqlen.q, "kv": spec.seqlen.kv},
        "q_per_kv": spec.heads.q_per_kv,
        "mask": spec.mask,
        "lse": spec.lse,
        "cluster": list(spec.cluster),
        "multicast": spec.multicast,
    }
    return tuple((repr(key), repr(value)) for key, value in values.items())
