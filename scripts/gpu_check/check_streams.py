"""Streams, memory that is used again at once, a device without memory, and forks."""

import os
import selectors
import signal

import ckptfs
import safetensors.torch
import torch
from ckptfs.torch import load_file

from gpu_check.assertions import Skipped, check, assert_same
from gpu_check.check_api import write_model
from ckptfs.bench.tables import fault_line

# A forked process that says nothing for so long hangs.
_FORK_LIMIT_SECONDS = 60


def require_gpu(context):
    if not context.is_gpu:
        raise Skipped("there is no GPU")


@check("under a stream that is not the default")
def _(context):
    require_gpu(context)
    path, expected = write_model(context)
    stream = torch.cuda.Stream(context.device)
    busy = torch.ones(4096, 4096, device=context.device)
    for _ in range(4 * context.repeats):
        with torch.cuda.stream(stream):
            # Work that is not over yet when the load begins, and whose memory the load is given.
            for _ in range(8):
                scratch = [torch.mm(busy, busy) for _ in range(4)]
                del scratch
            loaded = load_file(path, context.device)
            # On the same stream, with no wait between.
            doubled = {name: tensor * 2 for name, tensor in loaded.items()}
        stream.synchronize()
        assert_same(doubled, {name: tensor * 2 for name, tensor in expected.items()}, context.device)
        assert_same(loaded, expected, context.device)


@check("memory that is used again at once")
def _(context):
    require_gpu(context)
    path, expected = write_model(context)
    for n in range(10 * context.repeats):
        loaded = load_file(path, context.device, backend=("mmap", "pread")[n % 2])
        copies = {name: tensor.clone() for name, tensor in loaded.items()}
        del loaded
        # The allocator gives them the same places.
        others = [torch.full((500, 500), float(n), device=context.device) for _ in expected]
        assert_same(copies, expected, context.device)
        assert all(bool((other == n).all()) for other in others), "a load wrote to memory of others"


@check("no memory left on the device")
def _(context):
    require_gpu(context)
    path = context.folder / "large.safetensors"
    tensors = {f"t{n}": torch.full((16 << 20,), float(n)) for n in range(4 if context.quick else 16)}
    size = sum(tensor.nbytes for tensor in tensors.values())
    safetensors.torch.save_file(tensors, path)
    load_file(path, context.device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    free_bytes = torch.cuda.mem_get_info(context.device)[0]
    filled = torch.empty(free_bytes - size // 2, dtype=torch.uint8, device=context.device)
    allocated_when_full, error_names = torch.cuda.memory_allocated(), set()
    for backend in "mmap", "pread":
        try:
            load_file(path, context.device, backend=backend)
        except (torch.cuda.OutOfMemoryError, MemoryError, ckptfs.SafetensorError) as refused:
            error_names.add(type(refused).__name__)
        else:
            raise AssertionError("it was loaded where there is no room")
        assert torch.cuda.memory_allocated() == allocated_when_full, "what was loaded before the error is still held"
    del filled
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == before
    assert_same(load_file(path, context.device), tensors, context.device)
    return ", ".join(sorted(error_names))


@check("after a fork")
def _(context):
    path, expected = write_model(context)
    assert_same(load_file(path, context.device), expected, context.device)
    results = []
    for device in dict.fromkeys(["cpu", context.device]):
        results.append(f"{device}: {load_in_fork(path, device, expected)}")
    # This process is as before.
    assert_same(load_file(path, context.device, backend="pread"), expected, context.device)
    if context.is_gpu:
        assert results[0] == "cpu: works", results[0]
    return "; ".join(results)


def load_in_fork(path, device, expected):
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # The threads that torch had in this process are not there to compare tensors.
            torch.set_num_threads(1)
            assert_same(load_file(path, device, backend="pread"), expected, device)
            message = "works"
        except BaseException as fault:
            message = fault_line(fault)
            if isinstance(fault, AssertionError):
                message = f"wrong: {message}"
        os.write(write_end, message.encode())
        os._exit(0)
    os.close(write_end)
    with selectors.DefaultSelector() as selector, open(read_end, "rb") as out:
        selector.register(out, selectors.EVENT_READ)
        timed_out = not selector.select(_FORK_LIMIT_SECONDS)
        if timed_out:
            os.kill(child, signal.SIGKILL)
        message = out.read().decode()
    _, status = os.waitpid(child, 0)
    assert not timed_out, f"a load to {device} hangs in a forked process"
    assert message, f"a load to {device} ends a forked process: {os.waitstatus_to_exitcode(status)}"
    assert not message.startswith("wrong"), message
    return message


@check("several devices")
def _(context):
    require_gpu(context)
    if torch.cuda.device_count() < 2:
        raise Skipped("there is one GPU")
    path, expected = write_model(context)
    for n in range(torch.cuda.device_count()):
        assert_same(load_file(path, f"cuda:{n}"), expected, f"cuda:{n}")
