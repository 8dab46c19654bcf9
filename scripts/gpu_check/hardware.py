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
    """What is known of the machine, whether the device is there, and how much of its memory is free. {"fault": reason}
    where torch cannot be used."""
    with WorkerProcess() as worker:
        *_, report = worker.call(f"{__name__}:describe_in_worker", _LIMIT_SECONDS, device=device, folders=folders)
    return report


def describe_in_worker(_, device, folders):
    """The same in a worker: this process never uses torch."""
    import torch

    machine_facts = machine.describe(*folders.values())
    facts = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "processor": f"{machine_facts['processor']}, {machine_facts['cores']} of {os.cpu_count()} cores",
        "memory": f"{machine_facts['memory_bytes'] / 1e9:.0f} GB",
        "system": f"{machine_facts['system']}, {' '.join(platform.libc_ver())}",
        "python": f"{machine_facts['python']}, torch {torch.__version__}, CUDA {torch.version.cuda}",
        **{name: _describe_disk(folder) for name, folder in folders.items()},
    }  # fmt: skip
    is_available = device == "cpu" or torch.cuda.is_available()
    free_bytes = None
    if device != "cpu" and is_available:
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["driver"] = _find_driver() or "nvidia-smi does not say"
        free_bytes, _ = torch.cuda.mem_get_info(device)
    return {"known": facts, "is_available": is_available, "free": free_bytes}


def _find_driver():
    command = ["nvidia-smi", "--query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current",
               "--format=csv,noheader"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def _describe_disk(folder):
    """The filesystem of a folder, and the device that it is on."""
    number = os.stat(folder).st_dev
    filesystem, root_filesystem = None, "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, source = after.split(" ")[:2]
        if before.split(" ")[2] == f"{os.major(number)}:{os.minor(number)}":
            filesystem = f"{kind} on {source}"
        elif filesystem is None and before.split(" ")[4] == "/":
            root_filesystem = f"{kind} on {source}"
    filesystem = filesystem or root_filesystem
    model = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/device/model")
    return f"{filesystem} ({model.read_text().strip()})" if model.exists() else filesystem
