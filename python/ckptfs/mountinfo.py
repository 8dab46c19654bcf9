"""What shows at a path, and which mounts the system has. In: paths. Out: numbers of mounts.

Nothing here asks whoever serves a mount: its daemon may be stuck, and so would be who asks.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """A path without links, and the number of the mount that shows there."""

    path: str
    mount: int


def place(path):
    """The `Place` of a path; `None` where nothing is."""
    try:
        found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        about = Path(f"/proc/self/fdinfo/{found}").read_text().splitlines()
        number = next(line.split()[1] for line in about if line.startswith("mnt_id:"))
        return Place(os.readlink(f"/proc/self/fd/{found}"), int(number))
    finally:
        os.close(found)


class Entry(NamedTuple):
    """A mount: where it shows, and its type."""

    mountpoint: str
    kind: str


def table():
    """Every mount that this process can see, by its number."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_bytes().rstrip(b"\n").split(b"\n"):
        # Exactly one space separates two fields, and a hyphen ends those that may be missing.
        fields = line.split(b" ")
        kind = fields[fields.index(b"-", 6) + 1]
        mountpoint = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), fields[4])
        found[int(fields[0])] = Entry(os.fsdecode(mountpoint), os.fsdecode(kind))
    return found


def shows_ckptfs(at):
    """Whether a mount of ckptfs shows at this `Place`."""
    return table().get(at.mount) == Entry(at.path, "fuse.ckptfs")


def runs(pid):
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
