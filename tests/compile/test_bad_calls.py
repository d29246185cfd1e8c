# SPDX-License-Identifier: Apache-2.0
"""What a kernel's Python refuses, where the emulator's stand-ins do not reach.

What `fmha` refuses of tensors is in tests/emulator/test_fmha_calls.py.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from support import GENERATED

STEM = "sm90_d128_fp16_causal_lse_gqa4"
SHAPES = (
    (2, 40, 12, 128),
    (2, 24, 3, 128),
    (2, 24, 3, 128),
    (2, 40, 12, 128),
    (2, 12, 40),
)


@pytest.fixture(scope="module")
def kernel() -> Any:
    spec = importlib.util.spec_from_file_location(STEM, GENERATED / f"{STEM}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def given(kernel: Any, **gradients: bool) -> list[tuple[Any, ...]]:
    """Contiguous tensors far apart, as `check_tensors` takes them."""
    found = []
    for number, (name, shape) in enumerate(
        zip(kernel.arguments(), SHAPES, strict=True), 1
    ):
        steps = [1]
        for size in reversed(shape[1:]):
            steps.insert(0, steps[0] * size)
        found.append((number << 40, shape, tuple(steps), gradients.get(name, False)))
    return found


def test_what_is_public(kernel: Any) -> None:
    assert kernel.__all__ == ["SPEC", "compile", "fmha"]
    hints = kernel.fmha.__annotations__
    assert set(hints) == {
        "q",
        "k",
        "v",
        "softmax_scale",
        "out",
        "lse",
        "stream",
        "return",
    }
    assert kernel.fmha.__kwdefaults__ == dict.fromkeys(
        ("softmax_scale", "out", "lse", "stream")
    )


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse"])
def test_a_gradient_is_refused(kernel: Any, name: str) -> None:
    kernel.check_tensors(*given(kernel))
    with pytest.raises(
        ValueError, match=f"^{name}: requires a gradient, and there is no"
    ):
        kernel.check_tensors(*given(kernel, **{name: True}))


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (
            TypeError("Mismatched type on argument #3, expected Tensor"),
            r"^out: Mismatched type",
        ),
        (ValueError("no number"), r"^no number$"),
        (RuntimeError("no GPU on argument #3"), r"^no GPU"),
    ],
)
def test_a_refusal_gets_the_name_of_its_argument(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: str
) -> None:
    def launch(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(kernel, "compile", lambda: launch)
    monkeypatch.setattr(kernel, "sm_count", lambda _device: 132)
    kind = ValueError if expected.startswith("^out") else type(raised)
    with pytest.raises(kind, match=expected):
        kernel.run((), 1.0, 0)


def test_the_gpu_must_be_of_the_architecture(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attribute = kernel.cuda.CUdevice_attribute
    found = {
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 10,
        attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 148,
    }
    monkeypatch.setattr(
        kernel.cuda, "cuDeviceGetAttribute", lambda key, _device: (0, found[key])
    )
    with pytest.raises(ValueError, match=r"^q: is on a GPU of sm_10x, not sm_9x"):
        kernel.sm_count(0)
    found[attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] = 9
    assert kernel.sm_count(0) == 148  # the refusal was not remembered
