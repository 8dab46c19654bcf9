"""One load with one way of `loaders`, in a process that begins with everything imported and nothing of CUDA used.
A program of `subprocesses`.

In: the way, the files, and the device. Out: seconds until every byte was there, the memory of the host at its
peak, and what ckptfs reported; or, where that is asked, a digest of all that was loaded.
"""

import hashlib
import json
import os
import struct
import sys
import time
from pathlib import Path

import torch

import subprocesses
import loaders
from bench.fixtures import of_status

# Sums of so many words at once: what they are made of needs eight bytes for each.
_WORDS = 1 << 24


def answer(way, device, files, how=None, tell=False, forks=True):
    load = None if way is None else loaders.LOADERS[way][0](device, **(how or {}))
    if not forks:
        return once(load, device, files, tell)
    # What this process has imported the other has, and it may use CUDA because this one never does.
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = once(load, device, files, tell)
        except BaseException as fault:
            told = {"fault": subprocesses.in_words(fault)}
        os.write(writes, json.dumps(told).encode())
        # What a library does at its end is not measured.
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as out:
        told = out.read()
    _, status = os.waitpid(child, 0)
    if not told:
        raise RuntimeError(f"its process ended with {os.waitstatus_to_exitcode(status)}")
    told = json.loads(told)
    # A fault of a load is an answer, and no end of this process.
    return {"failed": told["fault"]} if "fault" in told else told


def once(load, device, files, tell):
    ready(device)
    before = peak_begins()
    start = time.perf_counter()
    tensors = load(files) if load else by_hand(files, device)
    wait(tensors, device)
    seconds = time.perf_counter() - start
    peak = None if before is None else of_status("VmHWM") - before
    wrong = {str(tensor.device) for tensor in tensors.values()} - {str(torch.device(device))}
    if wrong:
        raise RuntimeError(f"there are tensors on {', '.join(wrong)}")
    told = {"seconds": seconds, "peak": peak, "bytes": sum(tensor.nbytes for tensor in tensors.values())}
    if tell:
        told["digest"] = digest(tensors)
    report = getattr(sys.modules.get("ckptfs"), "last_report", lambda: None)()
    return told | ({"report": repr(report)} if report else {})


def peak_begins():
    """What this process holds now, from where on its peak counts; nothing where the system does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        of_status("VmHWM")
        return of_status("VmRSS")
    except (OSError, KeyError):
        return None


def ready(device):
    """Makes what is made once: a context, and torch's first memory."""
    torch.zeros(1, device=device)
    if device != "cpu":
        torch.cuda.set_device(device)
        torch.cuda.synchronize()


def wait(tensors, device):
    """Until every byte is there: a mapped page is read when it is first looked at."""
    if device != "cpu":
        torch.cuda.synchronize()
        return
    for tensor in tensors.values():
        tensor.view(-1).view(torch.uint8)[::4096].sum()


def by_hand(files, device):
    """The model as its files say it, read plainly: what all others are compared with."""
    tensors = {}
    for file in files:
        with open(file, "rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            header = json.loads(f.read(length))
            for name, about in header.items():
                start, end = about["data_offsets"]
                f.seek(8 + length + start)
                data = bytearray(f.read(end - start))
                tensors[name] = torch.frombuffer(data, dtype=torch.bfloat16).to(device, copy=True).view(about["shape"])
    return tensors


def digest(tensors):
    """Of names, types, shapes, and of every byte by its place; summed up where they are."""
    names, sums = sorted(tensors), []
    for name in names:
        data = tensors[name].reshape(-1).view(torch.uint8)
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8)).view(torch.int64)
        for start in range(0, data.numel(), _WORDS):
            part = data[start : start + _WORDS]
            # Odd factors: no bit of a word is lost in the product.
            places = torch.arange(2 * start + 1, 2 * (start + part.numel()), 2, device=data.device)
            sums.append((part * places).sum() + 3 * part.sum())
    about = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in names]
    sums = torch.stack(sums).tolist() if sums else []
    return hashlib.sha256(json.dumps([about, sums]).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(subprocesses.serve(answer))
