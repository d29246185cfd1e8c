# SPDX-License-Identifier: Apache-2.0
"""The micro-kernels themselves: distinct, reproducible, and no two operands alike."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest

from tests.hardware.micro import capture, kernels

from . import predict

MICROS = kernels.everything()


def test_names_are_unique_and_name_all_groups():
    names = [micro.name for micro in MICROS]
    assert len(set(names)) == len(names)
    assert len(names) == sum(len(group()) for group in kernels.GROUPS.values())


def test_inputs_do_not_change_from_call_to_call():
    again = kernels.everything()
    assert [capture.digest(m) for m in MICROS] == [capture.digest(m) for m in again]
    assert len({capture.digest(m) for m in MICROS}) == len(MICROS)


def test_a_digest_depends_on_every_part():
    micro = next(m for m in MICROS if m.name == "tma_load_128_1")
    tensor = micro.tensor
    changes = [
        {"ptx": micro.ptx + "\n"},
        {"input": micro.input + np.uint8(1)},
        {"grid": 2},
        {"tensor": None},
        {"tensor": kernels.Tensor(**{**vars(tensor), "swizzle_bytes": 64})},
        {
            "tensor": kernels.Tensor(
                **{**vars(tensor), "content": tensor.content[::-1].copy()}
            )
        },
    ]
    digests = {
        capture.digest(kernels.Micro(**{**vars(micro), **change})) for change in changes
    }
    assert len(digests - {capture.digest(micro)}) == len(changes)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "e4m3", "e5m2"])
def test_small_integers_survive_encoding(dtype):
    values = np.arange(-7, 8).astype(np.float32)
    kind = np.uint16 if dtype in ("bf16", "f16") else np.uint8
    bits = kernels.encode(values, dtype).view(kind)
    assert predict.numerics.TO_F32[dtype](bits).tolist() == values.tolist()


def test_every_wgmma_case_answers_something_else():
    """Were two cases alike, one of them would test nothing; were a result zero, none would."""
    outputs = [
        predict.predict(m)["output"] for m in MICROS if m.name.startswith("wgmma")
    ]
    for output in outputs:
        assert np.count_nonzero(output.view(np.float32)) > output.size // 8
    assert len({output.tobytes() for output in outputs}) == len(outputs)


def test_operands_stay_in_the_filled_part():
    for micro in MICROS:
        for role, rows in (("a", 64), ("b", micro.settings.get("n", 0))):
            operand = micro.settings.get(role)
            if operand is None:
                continue
            size = 32 // micro.settings["k"]
            addresses = predict.wgmma.shared_addresses(
                operand.encode(), rows, micro.settings["k"], size, operand.mn_major
            )
            assert addresses.max() + size <= kernels.WGMMA_SMEM, micro.name
            if role == "a":
                assert addresses.max() < kernels.WGMMA_B, micro.name


def test_tensor_maps_are_encoded_as_the_host_does():
    for micro in MICROS:
        if micro.tensor is not None:
            decoded = predict.tma.TensorMap.decode(
                predict.encode(micro.tensor, 1 << 20)
            )
            assert (decoded.address, decoded.dimensions) == (
                1 << 20,
                micro.tensor.dimensions,
            )
            assert decoded.strides[1:] == micro.tensor.strides
            assert (decoded.box, 8 << decoded.swizzle_bits & ~8) == (
                micro.tensor.box,
                micro.tensor.swizzle_bytes // 2,
            )


@pytest.mark.skipif(
    shutil.which("ptxas") is None, reason="no ptxas on this machine's PATH"
)
@pytest.mark.parametrize("group", kernels.GROUPS)
def test_ptxas_takes_them(group, tmp_path):
    for text in {micro.ptx for micro in kernels.GROUPS[group]()}:
        source = tmp_path / "micro.ptx"
        source.write_text(text)
        command = [
            "ptxas",
            "-arch=sm_90a",
            str(source),
            "-o",
            str(tmp_path / "micro.cubin"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
