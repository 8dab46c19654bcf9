"""The machine in words: what numbers are worth depends on it. A program of `subprocesses`."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import subprocesses


def answer(device, folders):
    import torch

    known = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "processor": f"{_line('/proc/cpuinfo', 'model name') or platform.machine()}, "
                     f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores",
        "memory": f"{int(_line('/proc/meminfo', 'MemTotal').split()[0]) / 1e6:.0f} GB",
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        "python": f"{platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}",
    }  # fmt: skip
    for what, folder in folders.items():
        known[what] = _filesystem(folder)
    there = device == "cpu" or torch.cuda.is_available()
    if device != "cpu" and there:
        known["gpu"] = torch.cuda.get_device_name(device)
        known["driver"] = _nvidia() or "nvidia-smi does not say"
        free, total = torch.cuda.mem_get_info(device)
        return {"known": known, "there": there, "free": free, "total": total}
    return {"known": known, "there": there, "free": None, "total": None}


def _line(path, name):
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return None


def _nvidia():
    command = ["nvidia-smi", "--query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current",
               "--format=csv,noheader"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def _filesystem(folder):
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


if __name__ == "__main__":
    sys.exit(subprocesses.serve(answer))
