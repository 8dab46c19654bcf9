"""The processor time and the memory that a process has used, as the system reports them."""

import os
from pathlib import Path


def processor_seconds(pid):
    """The processor seconds of a process; `None` where the system reports none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # A program's name may have any characters in it, but ends here.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(name, pid="self"):
    """Bytes of a process, such as its `VmRSS`. Some sandboxes report fewer of them, which is an `OSError`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/status has no {name}")
