"""PyTorch itself runs on the stubs of CUDA's driver and runtime. Memory, copies, streams and events work as on a GPU,
as late as one may do them; kernels are refused."""

import ctypes
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

from cuda_stubs import peek, run

pytestmark = pytest.mark.skipif(
    not (torch.version.cuda or "").startswith("13."), reason="this PyTorch is not for CUDA 13"
)

# The contents of device memory before the first write.
POISON = 0xD5

NOT_SUPPORTED = "operation not supported"


def numbers(count=64):
    return torch.arange(count, dtype=torch.uint8)


def same(on_device, expected):
    assert on_device.is_cuda, on_device.device
    assert torch.equal(on_device.cpu(), expected)


def raises(error, words, does):
    with pytest.raises(error, match=words):
        does()


def devices():
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    torch.cuda.init()
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_capability() == (9, 0)
    like = torch.cuda.get_device_properties(0)
    assert (like.name, like.major, like.minor) == ("Stub device 0", 9, 0)
    assert like.total_memory == 3 << 30 and like.multi_processor_count == 132
    assert (like.pci_bus_id, like.pci_device_id, like.pci_domain_id) == (7, 8, 9)
    assert like.L2_cache_size == 50 << 20 and like.warp_size == 32 and like.is_integrated == 0
    assert like.max_threads_per_multi_processor == 2048 and like.regs_per_multiprocessor == 65536
    assert like.shared_memory_per_block == 48 << 10
    assert like.shared_memory_per_block_optin == 227 << 10
    assert like.shared_memory_per_multiprocessor == 228 << 10
    assert str(like.uuid) == "73747562-2043-5544-4120-000000000000"


def test_a_device_is_like_an_h100():
    places = "PCI_BUS_ID=7,PCI_DEVICE_ID=8,PCI_DOMAIN_ID=9"
    run(devices, MEMORY=3 << 30, ATTRIBUTES=places)


def memory():
    free, total = torch.cuda.mem_get_info()
    assert (free, total) == (64 << 20, 64 << 20)
    one = torch.empty(22 << 20, dtype=torch.uint8, device="cuda:0")
    assert one.cpu().eq(POISON).all()
    assert torch.cuda.memory_allocated() == 22 << 20
    taken = torch.cuda.memory_reserved()
    assert torch.cuda.mem_get_info()[0] == total - taken
    raises(torch.cuda.OutOfMemoryError, "CUDA out of memory", lambda: torch.empty(60 << 20, device="cuda"))
    same(numbers().to("cuda"), numbers())
    # PyTorch frees memory that is still to be copied from.
    copy = one.clone()
    del one, copy
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 0
    assert torch.cuda.mem_get_info()[0] == total


def test_memory_comes_from_the_driver_and_goes_back():
    report = run(memory, MEMORY=64 << 20)
    assert report["allocated"]["device"] == {"count": 0, "bytes": 0}
    assert report["peak"]["device"] >= 44 << 20


def copies():
    host = numbers()
    there = host.to("cuda")
    same(there.narrow(0, 8, 16), host.narrow(0, 8, 16))
    same(there.view(torch.int16), host.view(torch.int16))
    same(there.as_strided((4, 4), (4, 1), 8), host.as_strided((4, 4), (4, 1), 8))
    same(there.view(8, 8)[2], host.view(8, 8)[2])
    same(there.clone(), host)
    other = torch.empty_like(there)
    other.narrow(0, 32, 32).copy_(there.narrow(0, 0, 32))
    same(other.narrow(0, 32, 32), host[:32])
    same(torch.zeros(100, device="cuda"), torch.zeros(100))
    assert torch.tensor(5, device="cuda").item() == 5

    for shared in [torch.from_dlpack(there), torch.utils.dlpack.from_dlpack(there.__dlpack__())]:
        assert shared.data_ptr() == there.data_ptr()
        same(shared, host)

    module = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for name, value in module.to("cuda").state_dict().items():
        same(value, before[name])


def files():
    saved = {"a": torch.randn(10, 10), "b": torch.arange(5), "empty": torch.empty(0), "one": torch.tensor(3.5)}
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.safetensors"
        save_file(saved, path)
        loaded = load_file(path, device="cuda")
        assert loaded.keys() == saved.keys()
        for name, value in saved.items():
            same(loaded[name], value)
        with safe_open(path, "pt", device="cuda:0") as file:
            same(file.get_slice("a")[2:4], saved["a"][2:4])
        again = Path(place) / "again.safetensors"
        save_file(loaded, again)
        assert again.read_bytes() == path.read_bytes()
        pickled = Path(place) / "model.pt"
        torch.save(loaded, pickled)
        same(torch.load(pickled)["a"], saved["a"])


def test_bytes_arrive():
    report = run(copies)
    assert report["faults"] == [] and report["calls"]["cuMemcpyDtoDAsync_v2"] >= 2


def test_files_are_loaded_and_saved():
    run(files)


def a_model():
    from transformers import AutoModelForCausalLM

    from models import llama

    before = llama()
    with tempfile.TemporaryDirectory() as place:
        before.save_pretrained(place)
        loaded = AutoModelForCausalLM.from_pretrained(place, device_map="cuda")
    there = loaded.state_dict() | dict(loaded.named_buffers())
    expected = before.state_dict() | dict(before.named_buffers())
    assert there.keys() == expected.keys()
    for name, value in expected.items():
        same(there[name], value)


def test_transformers_loads_a_model():
    assert run(a_model)["faults"] == []


def streams():
    host = numbers().pin_memory()
    assert host.is_pinned() and not numbers().is_pinned()
    there = host.to("cuda", non_blocking=True)
    assert peek(there) == bytes([POISON] * 64)
    # Without a wait, the copy takes what is there later.
    host.fill_(7)
    torch.cuda.synchronize()
    assert peek(there) == bytes([7] * 64)
    host.copy_(numbers())

    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    assert here.cuda_stream == 0 and side.cuda_stream != 0
    done = torch.cuda.Event()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        there = host.to("cuda", non_blocking=True)
        done.record()
        there.record_stream(here)
    assert torch.cuda.current_stream() == here
    # As late as possible: this copy does not wait for the one before it.
    assert there.clone().cpu().eq(POISON).all()
    assert not side.query() and not done.query()
    here.wait_event(done)
    same(there.clone(), numbers())
    assert done.query()
    side.synchronize()
    assert side.query()

    with torch.cuda.stream(torch.cuda.ExternalStream(side.cuda_stream)):
        there = host.to("cuda", non_blocking=True)
    here.wait_stream(side)
    same(there.clone(), numbers())

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 0

    found = []
    thread = threading.Thread(target=lambda: found.append(host.to("cuda").cpu()))
    thread.start()
    thread.join()
    assert torch.equal(*found, numbers())


def test_work_of_streams_is_late_and_in_order():
    report = run(streams)
    assert report["faults"] == [] and report["calls"]["cuStreamWaitEvent"] == 2


def two_devices():
    assert torch.cuda.device_count() == 2
    host = numbers().pin_memory()
    second = host.to("cuda:1")
    assert second.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    same(second, host)
    assert [torch.cuda.memory_allocated(device) > 0 for device in (0, 1)] == [False, True]
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
        assert torch.empty(4, device="cuda").device.index == 1
    assert torch.cuda.current_device() == 0
    assert not torch.cuda.can_device_access_peer(0, 1)
    same(second.to("cuda:0"), host)

    streams = [torch.cuda.Stream(device) for device in (0, 1)]
    for device, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            there = host.to(f"cuda:{device}", non_blocking=True)
        stream.synchronize()
        assert peek(there) == host.numpy().tobytes()
    raises(RuntimeError, "invalid device ordinal", lambda: torch.empty(1, device="cuda:2"))

    torch.cuda.set_device(1)
    assert torch.empty(1, device="cuda").device.index == 1
    # Each thread has a device of its own.
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.cuda.current_device()))
    thread.start()
    thread.join()
    assert found == [0]


def test_devices_are_told_apart():
    report = run(two_devices, DEVICES=2)
    assert report["faults"] == [] and report["allocated"]["contexts"] == 2


def refusals():
    there = numbers().to("cuda")
    for kernel in [
        lambda: there + 1,
        lambda: there.fill_(3),
        lambda: there.to(torch.float32),
        lambda: there.view(8, 8)[:, 2:4].contiguous(),
        lambda: torch.equal(there, there.clone()),
    ]:
        raises(RuntimeError, NOT_SUPPORTED, kernel)
        # All else is intact.
        same(there.clone(), numbers())
    # A graph would consist of kernels.
    with pytest.raises(RuntimeError, match=NOT_SUPPORTED), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.CUDAGraph().capture_begin()

    runtime = ctypes.CDLL("libcudart.so.13")
    assert runtime.cudaGetLastError() == 0
    assert runtime.cudaSetDevice(5) == 101
    assert [runtime.cudaPeekAtLastError(), runtime.cudaGetLastError(), runtime.cudaGetLastError()] == [101, 101, 0]

    stranger = torch.cuda.ExternalStream(0x1230)
    raises(RuntimeError, "invalid resource handle", stranger.synchronize)


def test_unsupported_calls_are_refused():
    report = run(refusals, FAULTS="count")
    assert report["faults"] == ["cuStreamSynchronize: 0x1230 is not a stream"]


def broken():
    same(numbers().to("cuda"), numbers())
    for _ in range(2):
        raises(RuntimeError, "an illegal memory access", lambda: numbers().to("cuda"))


def test_a_spoiled_device_stays_so():
    assert run(broken, FAIL="cuMemcpyHtoDAsync_v2:2=700")["sticky"] == 700


def nothing(words):
    raises(RuntimeError, words, lambda: torch.empty(1, device="cuda"))


@pytest.mark.parametrize(
    "settings, words",
    [({"DEVICES": 0}, "No CUDA GPUs are available"), ({"DRIVER_VERSION": 12080}, "too old")],
)
def test_without_a_device_or_with_an_old_driver_there_is_nothing(settings, words):
    assert "cuMemAlloc_v2" not in run(nothing, words, **settings)["calls"]
