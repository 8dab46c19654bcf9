"""Streams, memory that is used again at once, a device without memory, and forks."""

import os
import selectors
import signal

import ckptfs
import safetensors.torch
import torch
from ckptfs.torch import load_file

from gpu_check.assertions import Skipped, check, same
from gpu_check.check_api import model
from ckptfs.bench.tables import fault_line

# A forked process that says nothing for so long hangs.
_FORK_LIMIT_SECONDS = 60


def needs_gpu(place):
    if not place.is_gpu:
        raise Skipped("there is no GPU")


@check("under a stream that is not the default")
def _(place):
    needs_gpu(place)
    path, expected = model(place)
    stream = torch.cuda.Stream(place.device)
    busy = torch.ones(4096, 4096, device=place.device)
    for _ in range(4 * place.times):
        with torch.cuda.stream(stream):
            # Work that is not over yet when the load begins, and whose memory the load is given.
            for _ in range(8):
                scratch = [torch.mm(busy, busy) for _ in range(4)]
                del scratch
            loaded = load_file(path, place.device)
            # On the same stream, with no wait between.
            doubled = {name: tensor * 2 for name, tensor in loaded.items()}
        stream.synchronize()
        same(doubled, {name: tensor * 2 for name, tensor in expected.items()}, place.device)
        same(loaded, expected, place.device)


@check("memory that is used again at once")
def _(place):
    needs_gpu(place)
    path, expected = model(place)
    for n in range(10 * place.times):
        loaded = load_file(path, place.device, backend=("mmap", "pread")[n % 2])
        copies = {name: tensor.clone() for name, tensor in loaded.items()}
        del loaded
        # The allocator gives them the same places.
        others = [torch.full((500, 500), float(n), device=place.device) for _ in expected]
        same(copies, expected, place.device)
        assert all(bool((other == n).all()) for other in others), "a load wrote to memory of others"


@check("no memory left on the device")
def _(place):
    needs_gpu(place)
    path = place.folder / "large.safetensors"
    tensors = {f"t{n}": torch.full((16 << 20,), float(n)) for n in range(4 if place.quick else 16)}
    size = sum(tensor.nbytes for tensor in tensors.values())
    safetensors.torch.save_file(tensors, path)
    load_file(path, place.device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    free = torch.cuda.mem_get_info(place.device)[0]
    filled = torch.empty(free - size // 2, dtype=torch.uint8, device=place.device)
    with_that, words = torch.cuda.memory_allocated(), set()
    for backend in "mmap", "pread":
        try:
            load_file(path, place.device, backend=backend)
        except (torch.cuda.OutOfMemoryError, MemoryError, ckptfs.SafetensorError) as refused:
            words.add(type(refused).__name__)
        else:
            raise AssertionError("it was loaded where there is no room")
        assert torch.cuda.memory_allocated() == with_that, "what was loaded before the error is still held"
    del filled
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == before
    same(load_file(path, place.device), tensors, place.device)
    return ", ".join(sorted(words))


@check("after a fork")
def _(place):
    path, expected = model(place)
    same(load_file(path, place.device), expected, place.device)
    told = []
    for device in dict.fromkeys(["cpu", place.device]):
        told.append(f"{device}: {forked(path, device, expected)}")
    # This process is as before.
    same(load_file(path, place.device, backend="pread"), expected, place.device)
    if place.is_gpu:
        assert told[0] == "cpu: works", told[0]
    return "; ".join(told)


def forked(path, device, expected):
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # The threads that torch had in this process are not there to compare tensors.
            torch.set_num_threads(1)
            same(load_file(path, device, backend="pread"), expected, device)
            words = "works"
        except BaseException as fault:
            words = fault_line(fault)
            if isinstance(fault, AssertionError):
                words = f"wrong: {words}"
        os.write(writes, words.encode())
        os._exit(0)
    os.close(writes)
    with selectors.DefaultSelector() as waits, open(reads, "rb") as out:
        waits.register(out, selectors.EVENT_READ)
        hangs = not waits.select(_FORK_LIMIT_SECONDS)
        if hangs:
            os.kill(child, signal.SIGKILL)
        words = out.read().decode()
    _, status = os.waitpid(child, 0)
    assert not hangs, f"a load to {device} hangs in a forked process"
    assert words, f"a load to {device} ends a forked process: {os.waitstatus_to_exitcode(status)}"
    assert not words.startswith("wrong"), words
    return words


@check("several devices")
def _(place):
    needs_gpu(place)
    if torch.cuda.device_count() < 2:
        raise Skipped("there is one GPU")
    path, expected = model(place)
    for n in range(torch.cuda.device_count()):
        same(load_file(path, f"cuda:{n}"), expected, f"cuda:{n}")
