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
        elements = output.view(np.float32)  # of sparse operands half are 0
        assert np.count_nonzero(elements) > elements.size // 4
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


# -- the capture and the comparison, with a device that answers what is predicted


class Oracle:
    """Stands in for the driver; `fails` names the kernel at which it gives up."""

    fails = ""

    def name(self):
        return "Oracle H200"

    def version(self):
        return 13000

    def run(self, micro):
        if micro.name == self.fails:
            raise capture.DriverError("CUDA_ERROR_ILLEGAL_ADDRESS")
        answer = predict.predict(micro)
        if micro.tensor is not None:
            raw = predict.encode(micro.tensor, 0x7F1234500000)
            answer["map"] = np.frombuffer(raw, np.uint8)
        return answer


def test_a_group_is_kept_with_what_it_was_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(capture, "Device", Oracle)
    assert capture.run_group("tma_stores", tmp_path / "part.npz") == 0
    with np.load(tmp_path / "part.npz") as saved:
        assert str(saved["device"]) == "Oracle H200"
        for micro in kernels.tma_stores():
            assert str(saved[f"{micro.name}.digest"]) == capture.digest(micro)
            changed = saved[f"{micro.name}.tensor"] != micro.tensor.content
            assert changed.any() and not changed.all()
            assert len(saved[f"{micro.name}.map"]) == 128


def test_what_ran_before_a_failure_is_kept(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(capture, "Device", Oracle)
    monkeypatch.setattr(Oracle, "fails", "stmatrix")
    assert capture.run_group("warps", tmp_path / "part.npz") == 1
    with np.load(tmp_path / "part.npz") as saved:
        assert {"device", "warps.output"} <= set(saved.files)
        assert "stmatrix.output" not in saved.files
    out, err = capsys.readouterr()
    assert (out.split()[-1], err) == ("stmatrix", "CUDA_ERROR_ILLEGAL_ADDRESS\n")


@pytest.mark.parametrize("micro", MICROS, ids=lambda micro: micro.name)
def test_a_wrong_answer_is_noticed(micro):
    for key, right in predict.predict(micro).items():
        assert predict.agree(micro, right, right) == ""
        assert (
            micro.tensor is None
            or len(right)
            == {
                "output": micro.output_bytes,
                "tensor": len(micro.tensor.content),
            }[key]
        )
        wrong = right.copy()
        wrong[
            3
        ] ^= 0x20  # an exponent's bit, where floats are compared with a tolerance
        assert predict.agree(micro, wrong, right)


def test_approximations_may_differ_by_their_error_and_no_more():
    micro = next(m for m in MICROS if m.name == "approximations")
    right = predict.predict(micro)["output"]
    for ulps, agrees in ((1, True), (64, False)):
        bits = right.view(np.uint32).copy()
        finite = np.isfinite(right.view(np.float32)) & (right.view(np.float32) != 0)
        bits[np.flatnonzero(finite)[1000]] += ulps
        assert (predict.agree(micro, bits.view(np.uint8), right) == "") == agrees
