"""Programs that several ranks run to load a checkpoint together; `ranks` starts them.

A program gets ckptfs.torch, the group, a directory and a dictionary for its results.
"""

import contextlib
import gc
import os
import time
from pathlib import Path

import ckptfs
from ckptfs.distributed import collective, load_distributed

from ranks import SECONDS

# Programs whose group gives up on a missing rank early.
IMPATIENT = ("waits_for_one",)


def read_from_disk():
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def loaded(package, out, key, path, group, **how):
    """Keeps the tensors, and how each was read."""
    before = read_from_disk()
    out[key] = package.load_distributed(path, group, **how)
    out[key, "disk"] = read_from_disk() - before
    out[key, "report"] = ckptfs.last_report().as_dict()


def whole(package, group, folder, out):
    """Every tensor on every rank: of a large checkpoint at once, of others in many small messages."""
    loaded(package, out, "large", folder / "large", group)
    load_distributed._PARCEL_BYTES = 700
    for name in ("types.pt", "sharded", "odd.bin"):
        loaded(package, out, name, folder / name, group)
    loaded(package, out, "cast", folder / "odd.bin", None, dtype="bfloat16", leave_cache=True)


def from_url(package, group, folder, out):
    """Every tensor on every rank, from a URL."""
    out["all"] = package.load_distributed(os.environ["CKPTFS_TESTED_URL"], group)


def cut(package, group, folder, out):
    load_distributed._PARCEL_BYTES = 700
    for dim in (0, 1, 2, -1):
        shard = {"wide.*" if dim != 2 else "wide.three": dim, "none": 0, "one": None}
        out[dim] = package.load_distributed(folder / "wide.safetensors", group, shard=shard)
    shard = {"wide.t*": 0, "wide.two": 1, "wide.five*": -1, "wide.*": 0, "wide.row": None}
    out["globs"] = package.load_distributed(folder / "wide.safetensors", group, shard=shard, dtype="float16")
    load_distributed._PARCEL_BYTES = 1 << 30
    out["memory"] = package.load_distributed(folder / "large", group, shard={"*": 1}, memory="16M")


def subsets(package, group, folder, out):
    """Every rank asks for something else, and some of it is what others ask for."""
    load_distributed._PARCEL_BYTES = 700
    rank, path = group.rank(), folder / "wide.safetensors"
    wants = [["wide.two", "wide.three"], "wide.t*", ["one"], []][rank % 4]
    loaded(package, out, "whole", path, group, names=wants)
    loaded(package, out, "cut", path, group, names=wants, shard={"wide.three": 1, "wide.two": 1})


@contextlib.contextmanager
def broken(group, fault, where="_read"):
    """Rank 1 fails with the exception of `fault()` at that call."""
    does = getattr(collective.Exchange, where)

    def fails(*given):
        if group.rank() == 1:
            raise fault()
        return does(*given)

    setattr(collective.Exchange, where, fails)
    try:
        yield
    finally:
        setattr(collective.Exchange, where, does)


def broken_disk():
    return OSError(5, "this disk is broken")


def refused(package, group, folder, out):
    """One rank fails: all have an error, and none is left behind."""
    rank, path, words = group.rank(), folder / "wide.safetensors", []

    def fails(fault, where="_read"):
        with broken(group, fault, where):
            package.load_distributed(path, group)

    for attempt in (
        lambda: package.load_distributed(folder / "nothing" if rank == 1 else path, group),
        lambda: package.load_distributed(path, group, names="missing.*" if rank == 0 else None),
        lambda: package.load_distributed(folder / "odd.bin" if rank == 1 else path, group),
        lambda: package.load_distributed(path, group, shard={"wide.two": rank}),
        lambda: package.load_distributed(path, group, shard={"wide.two": 2}),
        lambda: package.load_distributed(path, group, memory=8 << 20),
        lambda: fails(broken_disk),
        lambda: fails(MemoryError),
        lambda: package.load_distributed(path, group, device="nowhere" if rank == 1 else "cpu"),
        lambda: package.load_distributed(path, group, device="cuda:999" if rank == 1 else "cpu"),
        lambda: package.load_distributed(folder / "two.pt", group, root="first" if rank == 1 else "second"),
        lambda: package.load_distributed(folder / "half.safetensors", group, names="half"),
        lambda: package.load_distributed(folder / "half.safetensors", group, names="six"),
        lambda: package.load_distributed(folder / "rows.safetensors", group, shard={"*": 1}, memory="16M"),
        # Between collective calls, and after the last message.
        lambda: fails(lambda: MemoryError("no room"), "_buffer"),
        lambda: fails(lambda: MemoryError("no room"), "_land"),
    ):
        try:
            attempt()
        except Exception as fault:
            words.append(f"{type(fault).__name__}: {fault}")
        # All of them ended at the same step.
        loaded(package, out, "after", path, group)
    out["refused"] = words
    out["only"] = package.load_distributed(folder / "half.safetensors", group, names="whole")
    out["rows"] = package.load_distributed(folder / "rows.safetensors", group, memory="16M")


def lets_go(package, group, folder, out):
    """A failed load's files and buffers are gone with its exception."""
    rank, path = group.rank(), folder / "wide.safetensors"
    package.load_distributed(path, group)
    gc.collect()
    gc.disable()
    before = len(os.listdir("/proc/self/fd"))
    for where, names in ((broken(group, broken_disk), None),
                         (contextlib.nullcontext(), "missing.*" if rank == 0 else None)):  # fmt: skip
        try:
            with where:
                package.load_distributed(path, group, names=names)
        except Exception:
            pass
        else:
            raise AssertionError
    out["open"] = len(os.listdir("/proc/self/fd")) - before
    out["held"] = sum(type(it) is collective.Exchange for it in gc.get_objects())
    gc.enable()


def loses_one(package, group, folder, out):
    """The last rank ends in the middle."""
    read, load_distributed._PARCEL_BYTES = collective.Exchange._read, 700

    def dies(exchange, parcel):
        dies.left -= 1
        if not dies.left:
            os._exit(9)
        return read(exchange, parcel)

    dies.left = 3
    if group.rank() == group.size() - 1:
        collective.Exchange._read = dies
    package.load_distributed(folder / "wide.safetensors", group)


def waits_for_one(package, group, folder, out):
    """The last rank does something else."""
    if group.rank() == group.size() - 1:
        time.sleep(SECONDS)
    begun = time.monotonic()
    try:
        package.load_distributed(folder / "wide.safetensors", group)
    finally:
        print("waited", time.monotonic() - begun, flush=True)
