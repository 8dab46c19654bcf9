"""The stub of CUDA's runtime without PyTorch: it has every name that PyTorch's libraries need, and its rare calls do
what they should."""

import ctypes
import re
import struct
from pathlib import Path

import pytest
import torch

from cuda_stubs import folder, run

pytestmark = pytest.mark.skipif(
    not (torch.version.cuda or "").startswith("13."), reason="this PyTorch is not for CUDA 13"
)


def directly():
    torch.cuda.init()
    runtime = ctypes.CDLL("libcudart.so.13")

    def call(name, *arguments):
        code = getattr(runtime, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def given(name, *arguments):
        place = ctypes.c_uint64()
        call(name, ctypes.byref(place), *arguments)
        return place

    TO_DEVICE, FROM_DEVICE, WITHIN, BY_ADDRESS = 1, 2, 3, 4
    bytes, size = ctypes.create_string_buffer(b"ckptfs"), ctypes.c_size_t(6)
    one, two = given("cudaMalloc", size), given("cudaMalloc", size)
    call("cudaMemset", one, 0x41, size)
    call("cudaMemcpy", two, one, size, WITHIN)
    call("cudaMemcpy", one, bytes, size, TO_DEVICE)
    for memory, kind, expected in [(two, BY_ADDRESS, b"AAAAAA"), (one, FROM_DEVICE, b"ckptfs")]:
        call("cudaMemcpy", bytes, memory, size, kind)
        assert bytes.value == expected
    call("cudaMemcpyAsync", one, two, size, BY_ADDRESS, None)
    call("cudaMemcpyPeerAsync", two, 0, one, 0, size, None)
    call("cudaFree", one)
    call("cudaFree", two)
    assert given("cudaMalloc", ctypes.c_size_t(0)).value == 0
    call("cudaFree", None)

    host = torch.zeros(1 << 16, dtype=torch.uint8)
    where = ctypes.c_void_p(host.data_ptr())
    call("cudaHostRegister", where, ctypes.c_size_t(host.nbytes), 0)
    assert host.is_pinned()
    call("cudaHostUnregister", where)
    assert not host.is_pinned()
    pinned = given("cudaMallocHost", size)
    call("cudaFreeHost", pinned)

    streams = [given("cudaStreamCreate"), given("cudaStreamCreateWithFlags", 1)]
    event = given("cudaEventCreate")
    for stream in streams:
        call("cudaEventRecord", event, stream)
        call("cudaStreamDestroy", stream)
    call("cudaEventDestroy", event)

    class Sizes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint32) for name in "xyz"]

    launch = [Sizes(1, 2, 3), Sizes(4, 5, 6), ctypes.c_size_t(7), ctypes.c_uint64(8)]
    call("__cudaPushCallConfiguration", *launch)
    again = [type(one)() for one in launch]
    call("__cudaPopCallConfiguration", *map(ctypes.byref, again))
    assert [*map(bytearray, again)] == [*map(bytearray, launch)]
    MISSING_CONFIGURATION = 52
    assert runtime["__cudaPopCallConfiguration"](*map(ctypes.byref, again)) == MISSING_CONFIGURATION

    place = ctypes.create_string_buffer(16)
    call("cudaDeviceGetPCIBusId", place, len(place), 0)
    assert place.value == b"0000:01:00.0"
    for name in ("cudaGetErrorName", "cudaGetErrorString"):
        getattr(runtime, name).restype = ctypes.c_char_p
    assert runtime.cudaGetErrorName(801) == b"cudaErrorNotSupported"
    assert runtime.cudaGetErrorString(801) == b"operation not supported"


def test_the_functions_do_what_they_are_for():
    report = run(directly)
    assert report["faults"] == [] and report["allocated"]["device"]["count"] == 0
    assert [report["allocated"][what] for what in ("streams", "events")] == [0, 0]
    assert report["allocated"]["pinned"]["count"] == 0


def undefined(library):
    """The names that an ELF library imports."""
    data = library.read_bytes()
    (sections,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, sections + size * n) for n in range(count)]
    DYNAMIC_SYMBOLS = 11
    for _, kind, _, _, start, length, texts, _, _, _ in headers:
        if kind == DYNAMIC_SYMBOLS:
            texts = headers[texts][4]
            for name, _, _, section, _, _ in struct.iter_unpack("<IBBHQQ", data[start : start + length]):
                if section == 0:
                    yield data[texts + name : data.index(b"\0", texts + name)].decode()


def test_every_function_that_pytorch_names_is_there():
    runtime = folder("cudart", "libcudart.so", "libcudart.so.13") / "libcudart.so.13"
    libraries = Path(torch.__file__).parent.glob("lib/lib*torch*.so")
    names = {name for library in [*libraries] for name in undefined(library)}
    names = {name for name in names if re.match("(__)?cuda[A-Z]", name)}
    assert len(names) > 80, names
    there = ctypes.CDLL(str(runtime))
    assert [name for name in sorted(names) if not hasattr(there, name)] == []
