# SPDX-License-Identifier: Apache-2.0
"""DLPack's capsules as another library reads them: here over memory that is there."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tvm_ffi
from fmha_gen.emulator import dlpack, launch

CPU = (1, 0)


def described(array, **options):
    dtype = {1: "uint8", 2: "fp16", 4: "fp32"}[array.itemsize]
    strides = [step // array.itemsize for step in array.strides]
    address = array.ctypes.data - options.get("byte_offset", 0)
    return launch.tensor_at(dtype, address, array.shape, strides, **options)


class Unversioned:
    """An exporter of before versions were."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **_options):
        return self.tensor.__dlpack__(stream=None)

    def __dlpack_device__(self):
        return CPU


@pytest.mark.parametrize("wrap", [lambda tensor: tensor, Unversioned])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32])
def test_another_library_reads_what_is_there(wrap, dtype):
    storage = np.arange(2 * 5 * 3 * 8).astype(dtype).reshape(2, 5, 3, 8)
    array = storage.transpose(0, 2, 1, 3)[:, 1:, ::2]
    told = described(array, byte_offset=32, device=CPU)
    found = np.from_dlpack(wrap(dlpack.Tensor(told, device=7)))
    assert found.dtype == dtype
    assert found.strides == array.strides
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "uint8"])
def test_tvm_ffi_reads_8_bit_elements(name):
    array = np.arange(48, dtype=np.uint8).reshape(2, 3, 8)
    dtype = {"float8_e4m3fn": "e4m3"}.get(name, name)
    told = {**described(array[:, 1:]), "dtype": dtype}
    found = tvm_ffi.from_dlpack(dlpack.Tensor(told, device=7))
    assert str(found.dtype) == name
    assert (tuple(found.shape), tuple(found.strides)) == ((2, 2, 8), (24, 8, 1))
    assert found.data_ptr() == array.ctypes.data + 8


def test_torch_s_stand_in_shares_8_bit_floats_as_torch_does():
    told = {**described(np.zeros((4, 16), np.uint8)[:, ::2]), "dtype": "e4m3"}
    tensor = dlpack.TorchTensor({**told, "byte_offset": 32}, 2, lambda *_: told)
    assert (tensor.itemsize, tensor.dtype) == (1, "e4m3")
    with pytest.raises(BufferError, match="float8"):
        tensor.__dlpack__()
    # TVM-FFI asks the exchange API, not the method.
    assert str(tvm_ffi.from_dlpack(tensor).dtype) == "float8_e4m3fn"
    torch = dlpack.torch_module(device=2, stream=0)
    assert tensor.dtype == torch.float8_e4m3fn
    view = tensor.view(torch.uint8)
    assert isinstance(view, torch.Tensor) and '"dltensor"' in repr(view.__dlpack__())
    assert (view.data_ptr(), view.shape, view.stride()) == (
        told["address"] + 32,
        (4, 8),
        (16, 2),
    )
    assert view.view(torch.float8_e4m3fn).dtype == torch.float8_e4m3fn
    with pytest.raises(RuntimeError, match="of another size"):
        tensor.view(torch.bfloat16)


def test_every_type_has_torch_s_name():
    torch = dlpack.torch_module(device=2, stream=0)
    assert {getattr(torch, name) for name in dlpack._TORCH_NAMES.values()} == set(
        dlpack.TYPES
    )


def test_structures_live_until_the_consumer_calls_the_deleter():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = dlpack.Tensor(described(array, device=CPU), device=7)
    before = len(dlpack._exported)
    found = np.from_dlpack(tensor)
    del tensor
    assert len(dlpack._exported) == before + 1, "the array still reads them"
    del found
    assert len(dlpack._exported) == before


def test_whoever_knows_versions_gets_one():
    tensor = dlpack.Tensor(described(np.zeros((2, 3), np.float32)), device=7)
    assert tensor.__dlpack_device__() == (dlpack.CUDA, 7)
    assert '"dltensor_versioned"' in repr(tensor.__dlpack__(max_version=(1, 0)))
    for options in ({}, {"stream": -1}, {"max_version": (0, 8)}):
        assert '"dltensor"' in repr(tensor.__dlpack__(**options))


def test_torch_s_stand_in_is_contiguous_where_it_is_made():
    made = []

    def allocate(shape, dtype):
        made.append((shape, dtype))
        return launch.tensor_at(dtype, 64, shape, (3, 1))

    told = described(np.zeros((4, 6), np.float16)[:, ::2], byte_offset=16)
    tensor = dlpack.TorchTensor(told, 2, allocate)
    assert tensor.data_ptr() == told["address"] + 16 == tensor.first
    assert (tensor.stride(), tensor.stride(1), tensor.size(0)) == ((6, 2), 2, 4)
    assert (tensor.numel(), tensor.element_size(), tensor.get_device()) == (12, 2, 2)
    torch = dlpack.torch_module(device=2, stream=9)
    assert isinstance(tensor, torch.Tensor)
    tensor.new_empty(2, 3)
    assert isinstance(tensor.new_empty((2, 3), dtype=torch.float32), torch.Tensor)
    assert made == [((2, 3), "fp16"), ((2, 3), "fp32")]
    assert torch.cuda.current_device() == 2
    assert dlpack._current_streams == {2: 9}
    assert tvm_ffi.from_dlpack(tensor).data_ptr() == tensor.first


def test_a_module_is_replaced_for_a_while(monkeypatch):
    known, other = SimpleNamespace(), SimpleNamespace()
    monkeypatch.setitem(sys.modules, "replaced_here", known)
    for value in (other, None):
        with dlpack.replaced(sys.modules, "replaced_here", value):
            assert sys.modules.get("replaced_here") is value
        assert sys.modules["replaced_here"] is known
    with dlpack.replaced(sys.modules, "replaced_there", None):
        pass
    assert "replaced_there" not in sys.modules
