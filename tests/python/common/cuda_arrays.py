"""Device memory given to and taken from other libraries, on the stubs: each function runs in a process of its own."""

import gc
import os
import weakref
from pathlib import Path

import ckptfs
import pytest
import torch
from ckptfs.torch import load_file

from cuda_loads import same, straight


def arrays_for_others(paths):
    """Torch takes device memory as it is, and the driver gets it back after the last use."""
    torch.cuda.init()
    for path in paths:
        expected = load_file(path)
        with ckptfs.safe_open(path, "dlpack", device="cuda:0") as file:
            arrays = file.get_tensors()
            straight()
            [name] = [name for name in expected if name in ("large", "float32")]
            rows = torch.from_dlpack(file.get_slice(name)[1:])
            assert torch.equal(rows.cpu(), expected[name][1:])
        assert arrays[name].__dlpack_device__() == (2, 0) and arrays[name].device == "cuda:0"
        with pytest.raises(BufferError):
            memoryview(arrays[name]._memory)
        loaded = {name: torch.from_dlpack(array) for name, array in arrays.items()}
        del arrays, rows
        same(loaded, expected)
        del loaded


def as_fastsafetensors_does(path):
    """Its calls put tensors straight on the device, as they are and cast."""
    from ckptfs.fastsafetensors import fastsafe_open

    expected = load_file(path)
    with fastsafe_open([path], device="cuda:0") as file:
        same({name: file.get_tensor(name) for name in expected}, expected)
        straight()


def uses_memory_of_a_device(path):
    """Tensors use device memory that the caller has filled, and keep it alive."""
    from ckptfs.fastsafetensors import SafeTensorsMetadata

    class Buffer:
        def __init__(self, data):
            self.held = torch.frombuffer(bytearray(data), dtype=torch.uint8).to("cuda:0")

        def get_base_address(self):
            return self.held.data_ptr()

    metadata = SafeTensorsMetadata.from_file(path, "pytorch")
    buffer = Buffer(Path(path).read_bytes()[metadata.header_length :])
    begin = buffer.get_base_address()
    held = weakref.ref(buffer)
    tensors = metadata.get_tensors(buffer, "cuda:0", metadata.header_length)
    del buffer
    same({name: tensor.get_raw() for name, tensor in tensors.items()}, load_file(path))
    for name, tensor in tensors.items():
        assert not tensor.get_nbytes() or tensor.data_ptr() == begin + metadata.tensors[name].data_offsets[0]
    assert held() is not None
    del tensor
    tensors.clear()
    gc.collect()
    assert held() is None


def forked_arrays(path):
    """A forked child of a process with arrays on a device calls nothing of the driver."""
    with ckptfs.safe_open(path, "dlpack", device="cuda:0") as file:
        arrays = [file.get_tensor("large")]
        child = os.fork()
        if not child:
            try:
                arrays.clear()
                file.get_tensor("large")
            except ckptfs.SafetensorError as fault:
                os._exit(0 if "forked" in str(fault) else 2)
            except BaseException:
                os._exit(3)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    array = torch.from_dlpack(arrays.pop())
    assert torch.equal(array.cpu(), load_file(path)["large"])
