# SPDX-License-Identifier: Apache-2.0
"""Launches captured from the DSL's compiled host code: no driver, no GPU."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from fmha_gen.build import calls, captures
from fmha_gen.build.kernel_text import read_constants
from fmha_gen.emulator import launch, ptx
from fmha_gen.emulator.launch import CaptureError, Launch, open_host_program
from fmha_gen.emulator.tma import TensorMap
from fmha_gen.evidence import tensors
from fmha_gen.host import cache
from fmha_gen.ops.cases import Case, tiles_of
from fmha_gen.planning.plan import resolve
from fmha_gen.spec.model import load_specs

DATA = Path(__file__).parent / "data"
A, B, C = 0x7F00_0000_0000, 0x7F01_0000_0000, 0x7F02_0000_0010


def arguments(**changes):
    return {
        "a": launch.pointer("Float32", A, 4),
        "b": launch.pointer("Float32", B, 4),
        "c": launch.pointer("Float32", C, 4),
        "strides": launch.int64s((3, 5)),
        "blocks": launch.int32(2),
        "scale": launch.float32(0.5),
        "stream": launch.stream(),
        **changes,
    }


@pytest.fixture(scope="module")
def program():
    with open_host_program(DATA / "add_vectors.py") as opened:
        yield opened


def value(module, captured, name, kind):
    (param,) = [param for param in module.params if param.name == name]
    return struct.unpack_from(kind, captured.params, param.offset)


def test_a_launch_is_what_the_host_function_asks_for(program):
    (captured,) = program.launch(arguments())
    assert program.parameters == tuple(arguments())
    assert (captured.grid, captured.block) == ((2, 1, 1), (64, 1, 1))
    assert captured.cluster == (1, 1, 1)
    assert captured.smem_bytes == 0
    module = ptx.parse(program.ptx)
    assert captured.kernel == module.name
    assert len(captured.params) == module.param_bytes
    first = [param.name for param in module.params]
    for name, address in zip(first, (A, B, C), strict=False):
        assert value(module, captured, name, "<Q") == (address,)
    assert value(module, captured, first[-1], "<f") == (0.5,)


def test_one_compile_serves_many_launches(program):
    grids = []
    for blocks in (1, 5, 2):
        (one,) = program.launch(arguments(blocks=launch.int32(blocks)))
        grids.append(one.grid[0])
    assert grids == [1, 5, 2]


def test_what_it_does_not_take_is_left_out_and_what_it_lacks_is_named(program):
    assert program.launch(arguments(more=launch.int32(1)))[0].grid == (2, 1, 1)
    lacking = arguments()
    del lacking["scale"]
    with pytest.raises(CaptureError, match="no value for scale"):
        program.launch(lacking)


def test_a_bad_argument_is_told_and_the_program_goes_on(program):
    with pytest.raises(CaptureError, match="no such kind of argument: int8"):
        program.launch(arguments(blocks=("int8", 1)))
    assert program.launch(arguments())[0].grid == (2, 1, 1)


def test_a_launch_survives_json(program):
    (captured,) = program.launch(arguments())
    assert Launch.from_json(captured.to_json()) == captured


def broken(folder: Path, line: str) -> Path:
    text = (DATA / "add_vectors.py").read_text(encoding="utf-8")
    path = folder / "broken.py"
    path.write_text(f"{text}\n\n{line}\n", encoding="utf-8")
    return path


def test_a_module_that_does_not_compile_is_told_with_its_last_words(tmp_path):
    path = broken(tmp_path, "raise RuntimeError('not today')")
    with (
        pytest.raises(CaptureError, match=r"status 1(.|\n)*not today"),
        open_host_program(path),
    ):
        pass


def test_a_module_that_hangs_costs_its_time_limit(tmp_path):
    path = broken(tmp_path, "import time; time.sleep(60)")
    program = open_host_program(path, timeout=2)
    with pytest.raises(CaptureError, match="no answer in 2 s"), program:
        pass


def test_what_a_module_prints_does_not_disturb_the_answers(tmp_path):
    path = broken(tmp_path, "print('hello'); import os; os.write(1, b'there')")
    with open_host_program(path) as opened:
        assert opened.launch(arguments())[0].grid == (2, 1, 1)


# --- a shipped kernel -----------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "generated" / "sm90_d128_bf16_causal_c2x1_kvmc_lse.py"


@pytest.fixture(scope="module")
def pair():
    with open_host_program(PAIR) as opened:
        yield opened


@pytest.mark.parametrize("layout", ["own", "bhsd", "mixed", "fused"])
def test_a_shipped_kernel_is_launched_as_its_plan_says(pair, layout):
    constants = read_constants(PAIR.read_text(encoding="utf-8"))
    spec = constants["SPEC"]
    case = Case("x", batch=3, kv_heads=2, q=300, kv=301, sm_count=5, layout=layout)
    problem = tensors.make_problem(spec, tiles_of(constants), case)
    (captured,) = pair.call(calls.arguments(spec, case)).launched
    assert captured.stream == calls.STREAM

    (spec_file,) = load_specs([ROOT / "specs" / f"{PAIR.stem}.yaml"])
    plan = resolve(spec_file)
    assert captured.smem_bytes == plan.smem_bytes
    assert captured.grid == (4, 1, 1)  # two clusters fit on five SMs
    assert captured.cluster == (2, 1, 1)
    assert captured.block == (constants["THREADS"], 1, 1)

    module = ptx.parse(pair.ptx)
    maps = [
        TensorMap.decode(captured.params[param.offset : param.offset + param.size])
        for param in module.params
        if param.size == 128
    ]
    expected = (*problem.inputs, problem["out"])
    rows = (constants["TILE_Q"], constants["TILE_KV"] // 2, constants["TILE_KV"] // 2)
    for found, tensor, box_rows in zip(maps, expected, (*rows, 64), strict=True):
        batch, seqlen, heads, dim = tensor.view.shape
        assert found.address == tensor.address
        assert found.element_type == "bf16"
        assert found.swizzle_bits == 3
        assert found.box[:2] == (64, box_rows)
        # The modes behind the first two may come in any order.
        of_mode = dict(zip(found.dimensions[2:], found.strides[2:], strict=True))
        assert found.dimensions[:2] == (dim, seqlen)
        steps = {"batch": 0, "seqlen": 1, "heads": 2}
        strides = {
            name: tensor.placed.strides[mode] * 2 for name, mode in steps.items()
        }
        assert found.strides[:2] == (2, strides["seqlen"])
        assert of_mode == {heads: strides["heads"], batch: strides["batch"]}


def test_a_capture_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "cache"))
    kernel = DATA / "add_vectors.py"
    calls = [arguments(), arguments(blocks=launch.int32(3))]
    capture = captures.capture_launches
    ptx_text, launches = capture(kernel, calls, arch="sm90")
    assert [found.grid[0] for (found,) in launches] == [2, 3]

    def refuse(*_arguments, **_options):
        raise AssertionError("compiled again")

    monkeypatch.setattr(captures, "open_host_program", refuse)
    assert capture(kernel, calls[1:], arch="sm90") == (ptx_text, launches[1:])
    with pytest.raises(AssertionError, match="compiled again"):
        other = [arguments(blocks=launch.int32(4))]
        capture(kernel, other, arch="sm90")
    with pytest.raises(AssertionError, match="compiled again"):
        capture(broken(tmp_path, "MORE = 1"), calls, arch="sm90")
