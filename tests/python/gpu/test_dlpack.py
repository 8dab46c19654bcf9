"""numpy and torch take DLPack arrays with every bit, and keep the memory as long as they need it."""

import gc
import threading

import ckptfs
import numpy
import pytest
import torch
from ckptfs.dtypes import TYPES
from ckptfs.torch import load_file
from safetensors.torch import save_file

import cuda_arrays
from compare import bits
from cuda_stubs import run
from samples import numbers, small_tensors, write_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dlpack")
    write_all(folder / "all", 11)
    every = {name: (torch.arange(192) % 2).to(torch.uint8).view(getattr(torch, name)).view(2, -1)
             for name in TYPES.values() if name != "float4_e2m1fn_x2"}  # fmt: skip
    save_file(every | {"scalar": torch.tensor(3.5), "none": torch.empty(0, 3)}, folder / "kinds.safetensors")
    save_file(small_tensors(3, 300) | {"large": numbers(4, 3, 700_000)}, folder / "mixed.safetensors")
    return folder


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("name", ["kinds.safetensors", "mixed.safetensors", "all/loose/strided.pt"])
def test_torch_takes_the_arrays(folder, name, backend):
    expected = load_file(folder / name)
    with ckptfs.safe_open(folder / name, "dlpack", backend=backend) as file:
        arrays = file.get_tensors()
        assert arrays.keys() == expected.keys()
        for name, array in arrays.items():
            got = torch.from_dlpack(array)
            assert (got.dtype, got.shape) == (expected[name].dtype, expected[name].shape)
            assert torch.equal(bits(got), bits(expected[name])), name
            assert (array.device, array.nbytes) == ("cpu", expected[name].nbytes)
        largest = max(expected, key=lambda name: expected[name].nbytes)
        rows = torch.from_dlpack(file.get_slice(largest)[1])
        assert torch.equal(bits(rows), bits(expected[largest][1]))


def test_numpy_takes_the_arrays(folder):
    expected = load_file(folder / "mixed.safetensors")
    [loaded] = ckptfs.load_many([folder / "mixed.safetensors"], framework="dlpack")
    for name, array in loaded.items():
        assert numpy.array_equal(numpy.from_dlpack(array), expected[name].numpy())


def test_memory_lives_as_long_as_it_is_used(folder):
    expected = load_file(folder / "mixed.safetensors")["large"]
    with ckptfs.safe_open(folder / "mixed.safetensors", "dlpack") as file:
        first, second = (torch.from_dlpack(file.get_tensor("large")) for _ in range(2))
        array = file.get_tensor("large")
    for version in (None, (1, 0)):
        # Capsules that are never taken.
        array.__dlpack__(max_version=version)
    del array
    gc.collect()
    assert torch.equal(first, expected)
    # Released by another thread.
    held = [first]
    del first
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert torch.equal(second, expected)


def test_impossible_requests_are_refused(folder, tmp_path):
    with ckptfs.safe_open(folder / "kinds.safetensors", "dlpack") as file:
        array = file.get_tensor("float32")
        for how in ({"copy": True}, {"dl_device": (2, 0)}):
            with pytest.raises(BufferError):
                array.__dlpack__(**how)
        with pytest.raises(ckptfs.SafetensorError, match="prefetch"):
            file.prefetch()
    with pytest.raises(ckptfs.SafetensorError, match="as they are stored"):
        ckptfs.load_many([folder / "kinds.safetensors"], framework="dlpack", dtype="float16")
    with pytest.raises(ckptfs.SafetensorError, match="is invalid for DLPack"):
        ckptfs.safe_open(folder / "kinds.safetensors", "dlpack", device="mps")
    with ckptfs.safe_open(folder / "kinds.safetensors", "dlpack", device="cuda") as file, \
            pytest.raises(ckptfs.SafetensorError, match="CUDA: this machine has no driver|no such device"):
        file.get_tensor("float32")
    save_file({"a": torch.zeros(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, tmp_path / "four.safetensors")
    with ckptfs.safe_open(tmp_path / "four.safetensors", "dlpack") as file, \
            pytest.raises(ckptfs.SafetensorError, match="Dtype not understood"):
        file.get_tensor("a")


def test_arrays_on_a_device_reach_others_and_leak_nothing(folder):
    report = run(cuda_arrays.arrays_for_others, [str(folder / "kinds.safetensors"), str(folder / "mixed.safetensors")])
    assert report["faults"] == [] and report["allocated"]["device"]["count"] == 0, report
