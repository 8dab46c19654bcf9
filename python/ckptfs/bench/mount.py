"""A mount of one checkpoint, made for a benchmark.

What lies beside the checkpoint is not shown. A renewed mount has a daemon that has read nothing yet.
"""

import json
import os

from ckptfs import _ckptfs, child_process, mounting
from ckptfs.bench import signals
from ckptfs.bench.usage import processor_seconds
from ckptfs.errors import error


class CheckpointMount:
    """A checkpoint in a mount of its own, at a new directory; `with CheckpointMount(...) as mount:`."""

    def __init__(self, path, about):
        is_source = _ckptfs.is_source_url(path) or os.path.exists(path)
        self._source = path if is_source else os.path.dirname(path) or "."
        self._name, self._mount = _name(self._source, about), None

    def __enter__(self):
        self.renew()
        return self

    def __exit__(self, *_):
        if self._mount:
            made, self._mount = self._mount, None
            made.close()

    def renew(self):
        """Starts a new daemon, which has read nothing and knows no earlier access order."""
        self.__exit__()
        self._mount = mounting.mount(self._source, remember="none")

    @property
    def file(self):
        """The file that the mount shows for the checkpoint."""
        return str(self._mount.path / self._name)

    def seconds(self):
        """The processor seconds that its daemon has used."""
        return processor_seconds(self._mount.pid)


def daemon_of(path):
    """The processor seconds of the daemon that serves this path, as a call; `None` outside a mount of ours."""
    location = _ckptfs.locate(path)
    mountpoint, kind, _ = (location and _ckptfs.mount_table().get(location[1])) or (None, None, None)
    if kind != "fuse.ckptfs":
        return None
    pid = json.loads(os.getxattr(mountpoint, "user.ckptfs.stats"))["pid"]
    return lambda: processor_seconds(pid)


def _name(source, about):
    """The name of the checkpoint in the mount."""
    with signals.interruptible():
        [listed] = json.loads(child_process.run("ls", "--json", "--", source, is_command=True).text)
    plain = os.path.basename(about["files"][0]["path"])
    for entry in listed["entries"]:
        if entry["kind"] == "virtual_file" and entry["virtual_file"]["identity"] == about["virtual_file"]["identity"]:
            return entry["name"]
        if entry["kind"] != "virtual_file" and entry["name"] == plain and about["format"] == "safetensors":
            return plain
    raise error(f"{source}: a mount shows no file for it", "ckptfs ls tells what is shown, and why")
