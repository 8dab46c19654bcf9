"""What nothing that loads can exceed: how fast bytes get to the device, into pinned memory, and off the disk.

Files are read by `os.preadv` on threads, which hold no lock meanwhile.
"""

import ctypes
import itertools
import mmap
import os
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from ckptfs.bench import page_cache

from gpu_check import models

# What a thread reads at once, as ckptfs does.
_PIECE_BYTES = 4 << 20

_RUNS = 5

# For one measurement, which may read a file of several GB a dozen times.
_LIMIT_SECONDS = 300


def measure_ceilings(job):
    max_bytes, _ = models.find_room(job.disk, job.free_device_bytes)
    size = min(max_bytes, int(min(job.sizes) * models.GB), 2 * models.GB)
    folder = job.disk / "ceiling"
    disk = shm = None
    try:
        [disk] = models.write_shards(folder, [size])
        page_cache.warm([disk])
        if job.shm and shutil.disk_usage(job.shm).free > 2 * size:
            [shm] = models.copy([disk], job.shm / "ceiling")
        for kind in "copies", "reads", "registered", "cold":
            if job.device == "cpu" and kind in ("copies", "registered"):
                job.table.add("ceilings", kind, "skipped", reason="there is no device to copy to")
            elif not job.is_out_of_time(f"ceilings: {kind}"):
                add_measurements(job, kind, disk, shm)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if shm:
            shutil.rmtree(job.shm / "ceiling", ignore_errors=True)


def add_measurements(job, kind, disk, shm):
    """Adds what a worker measures."""
    with job.worker("ckptfs") as worker:
        for message in worker.call(f"{__name__}:measure", _LIMIT_SECONDS, kind=kind, device=job.device, disk=disk,
                                   shm=shm, quick=job.quick):  # fmt: skip
            if "fault" in message:
                job.table.add("ceilings", kind, "fails", reason=message["fault"])
            elif "name" in message and message["speed"] is None:
                job.table.add("ceilings", message["name"], "fails", reason=message["how"])
            elif "name" in message:
                name, speed = message["name"], message["speed"]
                job.table.add("ceilings", name, "ok", where=message["how"], speed=speed)
                job.table.ceilings[name] = max(speed, job.table.ceilings.get(name, 0))


# What follows is for the worker, which has torch.


def measure(report, kind, device, disk, shm, quick):
    """Reports each measurement: its name, GB/s, and how it was made."""
    measurements = {
        "copies": measure_copies, "reads": measure_cached_reads, "cold": measure_cold_reads,
        "registered": measure_registered_pages,
    }[kind]  # fmt: skip
    for name, speed, method in measurements(device, disk, shm, 2 if quick else _RUNS, quick):
        report({"name": name, "speed": speed, "how": method})


def measure_copies(device, disk, shm, repeats, quick):
    """Host to device, out of pinned memory and out of any other."""
    import torch

    sizes = [16 << 20, 256 << 20] if quick else [4 << 20, 64 << 20, 256 << 20, 1 << 30]
    for pinned in True, False:
        for size in sizes:
            source = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
            target = torch.empty(size, dtype=torch.uint8, device=device)

            def copy():
                # Short copies one after the other, as in a load.
                for _ in range(max(1, (256 << 20) // size)):
                    target.copy_(source, non_blocking=pinned)
                torch.cuda.synchronize()

            speed = _measure_speed(copy, max(size, 256 << 20), repeats)
            yield f"copy, {'pinned' if pinned else 'pageable'}", speed, f"{size >> 20} MiB at a time"


def measure_cached_reads(device, disk, shm, repeats, quick):
    """Out of the page cache and out of memory, into pinned memory."""
    import torch

    for name, path in (("page cache", disk), ("tmpfs", shm)):
        if path is None:
            continue
        _read_file(path, 8, [mmap.mmap(-1, _PIECE_BYTES) for _ in range(8)], os.O_RDONLY)
        for threads in [4] if quick else [1, 4, 8, 16, 32]:
            if device == "cpu":
                memory = [mmap.mmap(-1, _PIECE_BYTES) for _ in range(threads)]
            else:
                tensors = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(threads)]
                memory = [(ctypes.c_char * _PIECE_BYTES).from_address(tensor.data_ptr()) for tensor in tensors]
            size = os.path.getsize(path)
            speed = _measure_speed(lambda: _read_file(path, threads, memory, os.O_RDONLY), size, repeats)
            memory_kind = "memory" if device == "cpu" else "pinned memory"
            yield f"{name} to {memory_kind}", speed, f"{threads} threads"


def measure_cold_reads(device, disk, shm, repeats, quick):
    """Off the disk, past the page cache, once it has nothing of the file."""
    for threads in [8] if quick else [4, 8, 16, 32]:
        # Memory of a mapping begins with a page, which reads past the page cache need.
        memory, durations = [mmap.mmap(-1, _PIECE_BYTES) for _ in range(threads)], []
        for _ in range(min(repeats, 3)):
            method = page_cache.clear([disk])
            start = time.perf_counter()
            _read_file(disk, threads, memory, os.O_RDONLY | os.O_DIRECT)
            durations.append(time.perf_counter() - start)
        speed = os.path.getsize(disk) / statistics.median(durations) / 1e9
        yield "disk, O_DIRECT", speed, f"{threads} threads, after {method}"


# Of cuMemHostRegister: the pages are only read.
_READ_ONLY = 8


def measure_registered_pages(device, disk, shm, repeats, quick):
    """Pages of the page cache themselves, registered with the driver and copied from: no copy between."""
    import torch

    cuda, libc = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    cuda.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    cuda.cuMemHostUnregister.argtypes = [ctypes.c_void_p]
    cuda.cuMemcpyHtoD_v2.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]

    def raise_on_error(code, call):
        if code:
            words = ctypes.c_char_p()
            cuda.cuGetErrorString(code, ctypes.byref(words))
            raise RuntimeError(f"{call} answers {code}: {(words.value or b'').decode()}")

    # torch's context is this thread's from here on.
    target = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    for name, path in (("page cache", disk), ("tmpfs", shm)):
        if path is None:
            continue
        size = os.path.getsize(path) // len(target) * len(target)
        fd = os.open(path, os.O_RDONLY)
        step_seconds = [0.0, 0.0, 0.0]

        def copy_file():
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            if address == ctypes.c_void_p(-1).value:
                raise OSError(ctypes.get_errno(), "mmap")
            try:
                for piece in range(address, address + size, len(target)):
                    start = time.perf_counter()
                    raise_on_error(cuda.cuMemHostRegister_v2(piece, len(target), _READ_ONLY), "cuMemHostRegister")
                    registration_end = time.perf_counter()
                    raise_on_error(cuda.cuMemcpyHtoD_v2(target.data_ptr(), piece, len(target)), "cuMemcpyHtoD")
                    copy_end = time.perf_counter()
                    raise_on_error(cuda.cuMemHostUnregister(piece), "cuMemHostUnregister")
                    steps = (registration_end - start, copy_end - registration_end, time.perf_counter() - copy_end)
                    step_seconds[:] = map(sum, zip(step_seconds, steps))
            finally:
                libc.munmap(address, size)

        try:
            speed = _measure_speed(copy_file, size, repeats)
        except (OSError, RuntimeError) as fault:
            yield f"{name}, registered", None, str(fault)
        else:
            shares = ", ".join(f"{step} {seconds / sum(step_seconds):.0%}" for step, seconds in
                              zip(("registering", "copying", "unregistering"), step_seconds))  # fmt: skip
            yield f"{name}, registered", speed, f"mapped READ_ONLY, 64 MiB at a time, one thread: {shares}"
        finally:
            os.close(fd)


def _measure_speed(work, size, repeats):
    durations = []
    for n in range(repeats + 1):
        start = time.perf_counter()
        work()
        # The first touches what is new.
        durations += [time.perf_counter() - start] if n else []
    return size / statistics.median(durations) / 1e9


def _read_file(path, threads, memory, flags):
    """All of a file, by several threads, each into its own memory over and over."""
    offsets, size, fd = itertools.count(0, _PIECE_BYTES), os.path.getsize(path), os.open(path, flags)

    def read_pieces(buffer):
        # Taking the next offset is one step of the interpreter.
        while (offset := next(offsets)) < size:
            if os.preadv(fd, [buffer], offset) < min(_PIECE_BYTES, size - offset):
                raise OSError(f"{path}: too little was read")

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read_pieces, memory))
    finally:
        os.close(fd)
