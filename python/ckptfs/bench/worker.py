"""Loads with one library each, every one in a process that does nothing else: what `ckptfs bench` measures.

In, by a connection: which loader, the path, its files, the names of its tensors, the device, and whether to
tell what was loaded. Out: that all is imported; and then, when that is answered, what the load took from
there on; or, if asked for, each tensor's type, shape and digest, and what ckptfs did in another way than was
asked; or what went wrong.

This process imports torch and nothing else. Each load is in a fork of it, which begins with torch in memory
and with no thread, no device and no memory that another load had.
"""

import ctypes
import hashlib
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ckptfs.bench import loaders

_PAGE = 4096

_PR_SET_PDEATHSIG = 1


def _have(tensors, device):
    """Waits until every byte is there: a mapped page is read when it is first looked at."""
    if device.type != "cpu":
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
    for storage in storages.values():
        torch.empty(0, dtype=torch.uint8).set_(storage)[::_PAGE].sum()


def _digest(tensor):
    tensor = tensor.detach().cpu().contiguous()
    size = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b""
    digest = hashlib.blake2b(memory, digest_size=16).hexdigest()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest]


def _memory(name):
    """Bytes that the system tells of this process, such as `VmRSS`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def _peak_begins():
    """What this process holds now, from where on its peak counts; nothing where the system does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _memory("VmRSS")
    except OSError:
        return None


def _measured(asked, wait):
    """What is told of one load, which begins when `wait` returns."""
    load = loaders.LOADERS[asked["loader"]]()
    device = torch.device(asked["device"])
    # The first use of a device sets it up.
    torch.zeros(1, device=device)
    wait()
    before = _peak_begins()
    begun, used = time.perf_counter(), time.process_time()
    tensors = load(asked)
    returned = time.perf_counter()
    _have(tensors, device)
    had, spent = time.perf_counter(), time.process_time()
    peak = None if before is None else max(0, _memory("VmHWM") - before)
    if asked["tell"]:
        called = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        # Of ours alone: what was not done as it was asked for.
        report = sys.modules["ckptfs"].last_report() if asked["loader"] in loaders.OURS else None
        fallbacks = report.fallbacks if report else {}
        digests = {name: _digest(tensor) for name, tensor in tensors.items()}
        return {"tensors": digests, "device": called, "fallbacks": fallbacks}
    return {"returned": returned - begun, "had": had - begun, "cpu": spent - used, "peak": peak}


def _load(asked, to):
    """In a process of its own, which ends with this."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait():
        to.send({"ready": True})
        to.recv()

    try:
        told = _measured(asked, wait)
    except Exception as fault:
        told = {"fault": f"{type(fault).__name__}: {fault}"}
    to.send(told)
    # What a library does at its end is not measured.
    os._exit(0)


def main(number):
    """Does what is asked until nobody asks any more."""
    to = Connection(number)
    while True:
        try:
            asked = to.recv()
        except EOFError:
            return
        if asked == "go":
            # For a load whose process ended before it heard that.
            continue
        child = os.fork()
        if child == 0:
            try:
                _load(asked, to)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if status:
            to.send({"fault": f"its process ended with {os.waitstatus_to_exitcode(status)}"})


if __name__ == "__main__":
    main(int(sys.argv[1]))
