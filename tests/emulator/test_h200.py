# SPDX-License-Identifier: Apache-2.0
"""The data modules against what an H200 answered to the micro-kernels.

The answers are kept in data/h200_micro.npz; on a machine with that GPU they are taken by
`python -m tests.hardware.micro.capture tests/emulator/data/h200_micro.npz`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fmha_gen.emulator import numerics, tma

from tests.hardware.micro import kernels
from tests.hardware.micro.capture import digest

from . import predict

CAPTURE = Path(__file__).parent / "data" / "h200_micro.npz"
MISSING = (
    "captured data missing: on a machine with an H200 run "
    "python -m tests.hardware.micro.capture tests/emulator/data/h200_micro.npz"
)
# Until the capture is committed; without this line the tests fail with the same message.
needs_capture = pytest.mark.skipif(not CAPTURE.exists(), reason=MISSING)
pytestmark = needs_capture

MICROS = kernels.everything()
BY_NAME = {micro.name: micro for micro in MICROS}


@pytest.fixture(scope="module")
def captured():
    if not CAPTURE.exists():
        pytest.fail(MISSING)
    with np.load(CAPTURE) as saved:
        return dict(saved)


def answer(captured, micro, key):
    """Of the device; fails when it was another kernel's."""
    name = f"{micro.name}.digest"
    if name not in captured or str(captured[name]) != digest(micro):
        pytest.fail(f"{micro.name} changed or is new: {MISSING}")
    if f"{micro.name}.{key}" not in captured:
        pytest.fail(f"the device left the {key} of {micro.name} as it was")
    return captured[f"{micro.name}.{key}"]


def test_it_was_an_h200(captured):
    assert "H200" in str(captured["device"])


def test_nothing_else_was_captured(captured):
    assert {name.split(".")[0] for name in captured} - {"device", "driver"} == set(
        BY_NAME
    )
    assert CAPTURE.stat().st_size < 1 << 20


@pytest.mark.parametrize("micro", MICROS, ids=lambda micro: micro.name)
def test_modules_agree_with_the_device(captured, micro):
    raw_map = (
        bytes(answer(captured, micro, "map")) if micro.tensor is not None else None
    )
    for key, want in predict.predict(micro, raw_map).items():
        problem = predict.agree(micro, answer(captured, micro, key), want)
        assert not problem, problem


@pytest.mark.parametrize(
    "micro",
    [micro for micro in MICROS if micro.tensor is not None],
    ids=lambda micro: micro.name,
)
def test_maps_that_the_driver_encoded(captured, micro):
    """Field by field, and all the bits that the model's own encoding sets."""
    raw = bytes(answer(captured, micro, "map"))
    decoded, tensor = tma.TensorMap.decode(raw), micro.tensor
    assert decoded.dimensions == tensor.dimensions
    assert decoded.strides == (2, *tensor.strides)
    assert decoded.box == tensor.box
    assert decoded.element_type == tensor.element_type
    assert decoded == tma.TensorMap.decode(predict.encode(tensor, decoded.address))


def test_accuracy_of_the_approximations(captured):
    """The device is within the documented error of the exact value, and uses some of it."""
    micro = BY_NAME["approximations"]
    got = answer(captured, micro, "output").view(np.float32)
    got = got.reshape(len(kernels.APPROXIMATIONS), kernels.SAMPLES).astype(np.float64)
    x = predict.lanewise_inputs(micro)[0].view(np.float32).astype(np.float64)
    with np.errstate(all="ignore"):
        exact = {"ex2": np.exp2(x), "lg2": np.log2(x), "rcp": 1 / x}
    ranges = {
        "ex2": (x > -126) & (x < 127),
        "lg2": x > 2.0**-126,
        "rcp": (np.abs(x) > 2.0**-126) & (np.abs(x) < 2.0**126),
    }
    limits = {
        "ex2": numerics.EX2_ERROR,
        "lg2": numerics.LG2_ERROR,
        "rcp": numerics.RCP_ERROR,
    }
    for row, name in enumerate(kernels.APPROXIMATIONS):
        inside = ranges[name]
        scale = np.abs(exact[name][inside])
        if name == "lg2":
            scale = np.maximum(scale, 1)
        error = np.abs(got[row][inside] - exact[name][inside]) / scale
        assert 2.0**-26 < error.max() <= limits[name], name
