"""A mount made for a benchmark, of one checkpoint.

In: the checkpoint. Out: the file that the mount shows for it, and the processor's time that its daemon used.
The mount is of what was named: what else lies beside it is not looked at.
"""

import json
import os

from ckptfs import mounting, mountinfo, child_process
from ckptfs.bench import signals
from ckptfs._errors import error


class Shown:
    """A checkpoint in a mount of its own, at a new directory; `with Shown(...) as shown:`."""

    def __init__(self, path, about):
        self._source = path if os.path.exists(path) else os.path.dirname(path) or "."
        self._name, self._mount = _name(self._source, about), None

    def __enter__(self):
        self.renew()
        return self

    def __exit__(self, *_):
        if self._mount:
            made, self._mount = self._mount, None
            made.close()

    def renew(self):
        """A new daemon, which has read nothing yet, and does not know the order of the load before."""
        self.__exit__()
        self._mount = mounting.mount(self._source, no_remember=True)

    @property
    def image(self):
        return str(self._mount.path / self._name)

    def seconds(self):
        """What its daemon has used of the processors."""
        return _used(self._mount.pid)


def daemon_of(path):
    """What tells the seconds of the daemon that serves this path, if a mount of ours shows there."""
    at = mountinfo.place(path)
    entry = at and mountinfo.table().get(at.mount)
    if entry is None or entry.kind != "fuse.ckptfs":
        return None
    pid = json.loads(os.getxattr(entry.mountpoint, "user.ckptfs.stats"))["pid"]
    return lambda: _used(pid)


def _used(pid):
    """Seconds of the processors that a process has used; `None` where the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name of the program may have anything in it, but ends here.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _name(source, about):
    """What the mount calls the checkpoint."""
    with signals.waits():
        [listed] = json.loads(child_process.run("ls", "--json", "--", source).out)
    plain = os.path.basename(about["files"][0]["path"])
    for entry in listed["entries"]:
        if entry["kind"] == "image" and entry["image"]["identity"] == about["image"]["identity"]:
            return entry["name"]
        if entry["kind"] != "image" and entry["name"] == plain and about["format"] == "safetensors":
            return plain
    raise error(f"{source}: a mount shows no file for it", "ckptfs ls tells what is shown, and why")
