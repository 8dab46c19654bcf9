"""Mounts for tests: each is gone when its test is, however that ended."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# Longer than anything takes on the slowest machine; only a failing test waits for it.
PATIENCE = 240


def until(what, holds, seen=None):
    """Waits until something holds, and returns the seconds; fails if it never does, and tells what is seen instead."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() < start + PATIENCE, f"still not so: {what}" + (f", but {seen()}" if seen else "")
        time.sleep(0.05)
    return time.monotonic() - start


def is_mounted(point):
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split(" ")[4] == str(point) for line in lines)


def has_ended(pid):
    return not os.path.exists(f"/proc/{pid}")


def python(*words, **how):
    """Runs a Python program of its own to the end."""
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=PATIENCE, **how
    )


class Mount:
    """A mount and the daemon that serves it."""

    def __init__(self, binary, source, point, log, options, prefix=()):
        self.binary, self.point, self.log = binary, point, log
        point.mkdir(exist_ok=True)
        command = [*prefix, binary, "mount", source, point, "--log-file", log, *options]
        # Its access traces are this test's, and go with it.
        env = os.environ | {"XDG_CACHE_HOME": str(log.parent / "cache")}
        done = subprocess.run(
            list(map(str, command)), stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE, env=env
        )
        assert done.returncode == 0, done.stderr.decode()
        self.pid = self.stats()["pid"]

    def __truediv__(self, name):
        return self.point / name

    def stats(self):
        return json.loads(os.getxattr(self.point, "user.ckptfs.stats"))

    def logged(self):
        return self.log.read_text() if self.log.exists() else ""

    def resident(self):
        """The daemon's resident memory now, and its peak."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return tuple(int(found[name].split()[0]) << 10 for name in ("RssAnon", "VmHWM"))

    def kill(self):
        """Kills the daemon, which leaves a dead mount behind."""
        os.kill(self.pid, signal.SIGKILL)
        until("its daemon is gone", lambda: not _command_line(self.pid))

    def stop(self):
        """Stops the daemon: it answers no more. After the signal alone its threads still answer for a moment."""
        os.kill(self.pid, signal.SIGSTOP)
        threads = [path / "stat" for path in Path(f"/proc/{self.pid}/task").iterdir()]
        is_stopped = lambda path: path.read_text().rsplit(") ", 1)[1].startswith("T")
        until("every thread of it is stopped", lambda: all(map(is_stopped, threads)))

    def go_on(self):
        os.kill(self.pid, signal.SIGCONT)

    def unmount(self):
        done = subprocess.run(
            [self.binary, "unmount", self.point], capture_output=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr.decode()

    def remove(self):
        """Unmounts by force if the mount is still there."""
        while is_mounted(self.point):
            subprocess.run(["umount", "-l", self.point], check=True, timeout=PATIENCE)
        pid = getattr(self, "pid", None)
        if pid and str(self.point) in _command_line(pid):
            os.kill(pid, signal.SIGKILL)


def _command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


class Mounts:
    """Mounts things in a directory: `mounts(source, "--option")`."""

    def __init__(self, binary, folder):
        assert os.geteuid() == 0 and Path("/dev/fuse").exists(), "needs root and /dev/fuse"
        self.binary, self.folder, self.all = binary, folder, []

    def __call__(self, source, *options, prefix=(), at=None):
        number = len(self.all)
        mount = Mount.__new__(Mount)
        # Recorded before it is made, so that a half-made one is unmounted too.
        self.all.append(mount)
        mount.__init__(
            self.binary, source, at or self.folder / f"mnt{number}", self.folder / f"log{number}",
            options, prefix,
        )  # fmt: skip
        return mount

    def end(self):
        for mount in self.all:
            if hasattr(mount, "point"):
                mount.remove()
