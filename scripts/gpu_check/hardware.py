"""The machine in words: what numbers are worth depends on it."""

import os
import platform
import subprocess
import time
from pathlib import Path

from ckptfs.bench import machine
from ckptfs.bench.process import WorkerProcess

# How long torch may take to find the device.
_LIMIT_SECONDS = 120


def describe(device, folders):
    """What is known of the machine, whether the device is there, and how much of its memory is free. {"fault": why}
    where torch cannot be used."""
    with WorkerProcess() as worker:
        *_, last = worker.call("gpu_check.hardware:look", _LIMIT_SECONDS, device=device, folders=folders)
    return last


def look(_, device, folders):
    """The same in a worker: this process never uses torch."""
    import torch

    about = machine.describe(*folders.values())
    known = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "processor": f"{about['processor']}, {about['cores']} of {os.cpu_count()} cores",
        "memory": f"{about['memory_bytes'] / 1e9:.0f} GB",
        "system": f"{about['system']}, {' '.join(platform.libc_ver())}",
        "python": f"{about['python']}, torch {torch.__version__}, CUDA {torch.version.cuda}",
        **{name: _disk(folder) for name, folder in folders.items()},
    }  # fmt: skip
    there = device == "cpu" or torch.cuda.is_available()
    free = None
    if device != "cpu" and there:
        known["gpu"] = torch.cuda.get_device_name(device)
        known["driver"] = _driver() or "nvidia-smi does not say"
        free, _ = torch.cuda.mem_get_info(device)
    return {"known": known, "there": there, "free": free}


def _driver():
    command = ["nvidia-smi", "--query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current",
               "--format=csv,noheader"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def _disk(folder):
    """The filesystem of a folder, and the device that it is on."""
    number = os.stat(folder).st_dev
    best, root = None, "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, source = after.split(" ")[:2]
        if before.split(" ")[2] == f"{os.major(number)}:{os.minor(number)}":
            best = f"{kind} on {source}"
        elif best is None and before.split(" ")[4] == "/":
            root = f"{kind} on {source}"
    best = best or root
    model = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/device/model")
    return f"{best} ({model.read_text().strip()})" if model.exists() else best
