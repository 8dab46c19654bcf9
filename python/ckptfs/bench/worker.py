"""The process that a benchmark measures: it answers requests, each in a fork of its own or in itself.

A request is a dictionary that comes by a connection. The answer to one of these is a message with "done" or "fault":

- {"call": "module:function", "arguments": {...}} calls a function, whose first argument sends further messages.
- Anything else measures a workload, "workload": "module:function" or `load`. {"ready": True} says that all is
  imported; the clock starts when `GO` comes. With "fork" a fork does it, "preload" imports before that fork.
  "warm_up" names a path to try first, "keep_programs" maps what the process runs, "threads" bounds torch.

A workload is a generator of a request. It yields once it is prepared, and again, with a dictionary, once the measured
work is done. What it adds to the dictionary after that is not measured.

This process imports torch and nothing else. A fork begins with torch in memory, and with no thread, no device and
no memory that another load had.
"""

import ctypes
import gc
import hashlib
import importlib
import os
import signal
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import ckptfs
from ckptfs.bench import GO, loaders
from ckptfs.bench.tables import fault_line
from ckptfs.bench.usage import memory

_PAGE_BYTES = 4096

_DIGEST_THREADS = min(8, len(os.sched_getaffinity(0)))

_PR_SET_PDEATHSIG = 1

# Python has no name for it.
_MADV_POPULATE_READ = 22


def load(request):
    """Loads a checkpoint until every byte is there. With "sum" each tensor is touched by itself. The result then is a
    "number", equal for equal tensors. With "digests" it has each tensor's type, shape and digest."""
    read, device = loaders.prepare(request), torch.device(request["device"])
    # The first use of a device sets it up.
    torch.zeros(1, device=device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    yield
    tensors = read(request)
    result = {"returned": time.monotonic()}
    if request.get("sum"):
        result["number"] = sum(map(touch, tensors.values()))
    else:
        _wait_for_bytes(tensors, device)
    yield result
    if not request.get("fork"):
        # Processes that load at once keep what they have until all are done. A fork unmaps its files before it
        # answers: files that are mapped cannot leave the page cache.
        loaders.kept.append(tensors)
    if elsewhere := {tensor.device for tensor in tensors.values()} - {torch.zeros(0, device=device).device}:
        raise RuntimeError(f"there are tensors on {', '.join(map(str, elsewhere))}")
    if request.get("digests"):
        # A report is ckptfs's alone: what was not done as it was asked for.
        report = ckptfs.last_report() if request["loader"].startswith("ckptfs") else None
        result |= {
            "tensors": digests(tensors), "report": repr(report) if report else None,
            "fallbacks": report.fallbacks if report else {},
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        }  # fmt: skip


def touch(tensor):
    """The sum of one byte of each page of a tensor."""
    return tensor.view(torch.uint8).reshape(-1)[::_PAGE_BYTES].sum().item()


def _wait_for_bytes(tensors, device):
    """Waits until every byte is there: a mapped page is read when it is first touched."""
    if device.type != "cpu":
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
    for storage in storages.values():
        torch.empty(0, dtype=torch.uint8).set_(storage)[::_PAGE_BYTES].sum()


def digests(tensors):
    """The type, shape and digest of each tensor, by name."""
    with ThreadPoolExecutor(_DIGEST_THREADS) as pool:
        return dict(zip(tensors, pool.map(_digest, tensors.values())))


def _digest(tensor):
    tensor = tensor.detach().cpu().contiguous()
    size = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b""
    digest = hashlib.blake2b(memory, digest_size=16).hexdigest()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest]


def _reset_peak():
    """The memory that this process holds now, and its peak from here on; `None` where the system reports none."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        memory("VmHWM")
        return memory("VmRSS")
    except OSError:
        return None


def _keep_programs():
    """Maps all pages of this process's programs. Those that are not mapped go when caches are dropped, and the
    kernel then reads half a gigabyte of libraries during the measurement."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, _, *path = line.split(maxsplit=5)
        if access.startswith("r") and path and path[0].startswith("/"):
            start, end = (int(address, 16) for address in place.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_READ)


def _measure(request, wait):
    """What a workload took, which begins when `wait` returns."""
    workload = find(request["workload"]) if "workload" in request else load
    if request.get("threads"):
        torch.set_num_threads(request["threads"])
    if request.get("warm_up"):
        for _ in workload({**request, "path": request["warm_up"]}):
            pass
    steps = workload(request)
    next(steps)
    if request.get("keep_programs"):
        _keep_programs()
    # A full collection takes a quarter of a second after large imports. Without this it falls into some loads.
    gc.collect()
    wait()
    before = _reset_peak()
    start, used = time.monotonic(), time.process_time()
    result = next(steps)
    end, spent = time.monotonic(), time.process_time()
    peak = None if before is None else max(0, memory("VmHWM") - before)
    for _ in steps:
        pass
    return {**result, "start": start, "end": end, "cpu": spent - used, "peak": peak}


def find(name):
    """The function that "module:function" names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _answer(request, parent):
    def wait():
        parent.send({"ready": True})
        parent.recv()

    try:
        if "call" in request:
            answer = find(request["call"])(parent.send, **request["arguments"]) or {}
        else:
            answer = _measure(request, wait)
    except Exception as fault:
        traceback.print_exc()
        answer = {"fault": fault_line(fault)}
    parent.send({"done": "fault" not in answer, **answer})


def _answer_in_fork(request, parent):
    if request.get("preload"):
        loaders.prepare(request)
    child = os.fork()
    if child == 0:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _answer(request, parent)
            # What a library does at its end is not measured.
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if status:
        parent.send({"done": False, "fault": f"its process ended with {os.waitstatus_to_exitcode(status)}"})


def main(descriptor):
    """Answers requests until the connection ends."""
    parent = Connection(descriptor)
    while True:
        try:
            request = parent.recv()
        except EOFError:
            # What a library does at its end is nothing to wait for.
            os._exit(0)
        if request == GO:
            # For a fork that ended before it heard that.
            continue
        (_answer_in_fork if request.get("fork") else _answer)(request, parent)


if __name__ == "__main__":
    main(int(sys.argv[1]))
