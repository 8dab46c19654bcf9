"""`mount` and `mounts`: mounts that last as long as a block, and the mounts of this machine.

A `Mount` is unmounted when its block ends, when it is closed, or when the interpreter ends. The command `ckptfs` mounts
and unmounts it: the daemon is no child of this process, and holds nothing of it.
"""

import atexit
import contextlib
import errno
import json
import os
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from ckptfs import _ckptfs, child_process
from ckptfs.errors import SafetensorError, error, in_words, of_system, wrong_type
from ckptfs.settings import STORE_SETTINGS, check_switch, check_text, parse_path, store_environment, views_json

# The command itself waits for less; only an overloaded machine needs so many.
_COMMAND_TIMEOUT_SECONDS = 60

# By then a mount that is not in use is gone, and the command waits for a daemon that is stuck.
_UNMOUNT_TIMEOUT_SECONDS = 8

# How the command reports a failed system call.
_FAILED_CALL = re.compile(r"\Acannot .*\(os error (\d+)\)\Z")

# The mounts of this process, the oldest first: a later one may lie in an earlier one.
_mounts = {}


class Mount:
    """A mount of this process, which `ckptfs.mount` returns.

    `path` is where it shows, `source` what it shows, and `pid` the daemon that serves it. `notes` are messages of the
    command: that nothing becomes a virtual file, for one, or where the metrics are.

    `close` unmounts it, as the end of its block does."""

    def __init__(self, source, path, notes, is_private):
        self.source, self.path, self.notes = source, path, notes
        self._is_private, self._process = is_private, os.getpid()
        # A signal's handler may close what is being closed.
        self._closed, self._lock = False, threading.RLock()
        self._location = _ckptfs.locate(path)
        self._type_and_source = _type_and_source(self._location[1])
        try:
            self.pid = json.loads(os.getxattr(path, "user.ckptfs.stats"))["pid"]
        except OSError as fault:
            message = f"{path}: was mounted, and does not answer like a mount: {fault.strerror}"
            raise error(message, "ckptfs status tells what is there") from None
        _mounts[id(self)] = self

    def close(self):
        """Unmounts it, and removes its directory where that was made for it.

        Programs with a file open there may go on reading. No other program sees the mount any more, and its daemon ends
        with the last of them. Closing once more does nothing, nor does closing in a forked child.

            models = ckptfs.mount("models")
            ...
            models.close()
        """
        if self._process != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._unmount()
            if self._is_private:
                # If somebody has put files there, they stay.
                with contextlib.suppress(OSError):
                    os.rmdir(self.path)
            self._closed = True
            del _mounts[id(self)]

    def __enter__(self):
        if self._closed:
            raise error(f"{self.path}: this mount was closed", "make another")
        return self.path

    def __exit__(self, _kind, value, _trace):
        try:
            self.close()
        except SafetensorError as refused:
            if value is None:
                raise
            # The exception that ended the block goes on.
            value.add_note(f"and then: {in_words(refused)}")

    def __repr__(self):
        return f"<ckptfs.Mount of {self.source!r} at {str(self.path)!r}{', closed' * self._closed}>"

    def _unmount(self):
        refused = None
        for flags, timeout in ([], _UNMOUNT_TIMEOUT_SECONDS), (["--lazy"], _COMMAND_TIMEOUT_SECONDS):
            if not self._is_there():
                return
            try:
                child_process.run("unmount", *flags, "--", self._location[0], timeout=timeout)
                return
            except SafetensorError as fault:
                refused = fault
        if self._is_there():
            raise refused

    def _is_there(self):
        """Whether it is still mounted. A mount that another program made in its place is not this one."""
        if _type_and_source(self._location[1]) != self._type_and_source:
            return False
        if _ckptfs.locate(self._location[0]) == self._location:
            # The daemon may have ended, and left a mount that is dead.
            return _runs(self.pid) or self._is_dead()
        if _runs(self.pid):
            message = f"{self.path}: another mount lies over it, or its directory was moved"
            raise error(message, "unmount that one (umount), or move it back; then close it again")
        return False

    def _is_dead(self):
        shown = os.fsencode(self._location[0]).decode(errors="replace")
        return any(other.mountpoint == shown and other.state == "dead" for other in mounts())


def mount(source, mountpoint=None, *, show_originals=False, keep=(), root=None, allow_partial=False,
          follow_symlinks=False, ranks=None, delta_base=None, views=None, allow_other=False, uid=None, gid=None, memory=None, threads=None,
          readahead=None, no_passthrough=False, remember=None, nonempty=False, log_file=None, verbose=0,
          metrics=None, allow_http=None, anonymous=None, instance_metadata=None, stall_timeout=None,
          outage_timeout=None, poll_interval=None, connections=None, cache_dir=None, cache_size=None,
          cache_min_free=None, no_cache=None, offline=None):
    """Shows the checkpoints of `source`, a directory or one file, as `.safetensors` files that any program
    reads, until the block ends:

        with ckptfs.mount("models") as path:
            model = AutoModel.from_pretrained(path / "llama")

    `mountpoint` is an empty directory, or `source` itself, so that not even a path changes. Without one it is a new
    directory of this user, which is removed afterwards. Outside of `with` the `Mount` lasts until it is closed:

        models = ckptfs.mount("models", "/mnt/models", keep="*.ckpt", memory="2G")
        print(models.path, models.pid)
        models.close()

    The options are those of `ckptfs mount`:

    - `show_originals`: show original files beside their virtual files.
    - `keep`: a glob, or a list of them; files that match one are shown as they are.
    - `root`: the dictionary of a pickle to show, as a dotted path such as "state_dict_ema".
    - `allow_partial`: leave out what cannot be shown, instead of refusing the checkpoint.
    - `follow_symlinks`: let links and index entries lead out of `source`.
    - `ranks`: the number of ranks of a training run; per-rank files of any other number are refused.
    - `delta_base`: the model that training began with, the base of the first delta of its versions.
    - `views`: a recipe that says what is shown beside the files of `source` (docs/views.md): its path, a dictionary, or "auto"
      for `.ckptfs.toml` in `source`.
    - `allow_other`: let other users use the mount.
    - `uid`, `gid`: the owner and the group of every file, as numbers; only root may choose them.
    - `memory`: for all caches of the daemon together, in bytes or as text such as "512M"; at least 16M.
    - `threads`: how many take requests of the kernel, 1 to 256.
    - `readahead`: the most for each stream, in bytes or as text, at least 1M; 0 disables it.
    - `no_passthrough`: serve unchanged files through the daemon too.
    - `remember`: of which models the order of a load is recorded and replayed: "stores" (the default), "all" or "none".
    - `nonempty`: mount over a directory that is not empty.
    - `log_file`: a file for the daemon's log.
    - `verbose`: how much is logged: 1 adds events, 2 requests, 3 everything.
    - `metrics`: serve Prometheus metrics at this local address, such as "127.0.0.1:9100".

    Options of object stores have the values that `ckptfs.configure` set, unless they are given here. It explains each:

    - `allow_http`, `anonymous`, `instance_metadata`: access to a store.
    - `stall_timeout`, `outage_timeout`, `poll_interval`, `connections`: time limits, and requests at once.
    - `cache_dir`, `cache_size`, `cache_min_free`, `no_cache`, `offline`: the cache on disk.

    What the command would print as a note is in the `notes` of the `Mount`.

    A mount that is not closed is unmounted when the interpreter ends. A process that is killed, also by SIGTERM,
    leaves its mount behind: `ckptfs.mounts()` lists it, and `ckptfs unmount` removes it.

    If it cannot mount, it raises a `SafetensorError` with the message of the command. It is also a `FileNotFoundError`
    if `source` or `mountpoint` does not exist, and a `PermissionError` if `source` may not be read.
    """
    options, environment = _command_options({**locals()})
    is_private = mountpoint is None
    source = parse_path(source)
    where = path = before = None
    if not is_private:
        where = parse_path(mountpoint)
        # It must lead there also when the program has changed its directory.
        path = Path(os.path.join(os.getcwd(), where))
        before = _ckptfs.locate(path)
    try:
        if is_private:
            # An exception before its name is known would leave the directory behind.
            with child_process.deferred_signals():
                where = os.path.abspath(tempfile.mkdtemp(prefix="ckptfs-"))
                path = Path(where)
        done = child_process.run("mount", *options, "--", source, where, variables=environment)
        return Mount(source, path, done.notes, is_private)
    except SafetensorError as refused:
        # Another program may have mounted in a given place meanwhile.
        if is_private:
            with contextlib.suppress(OSError):
                os.rmdir(path)
        # A directory that was made for this is gone by now, and was not missing.
        paths = [source] if is_private else [source, where]
        raise _as_system_error(refused, *paths) from None
    except BaseException:
        if path:
            _undo_mount(path, before, is_private)
        raise


def _undo_mount(path, before, is_private):
    """Removes what an interrupted `mount` left. Its daemon may still be mounting, and unmounts later: it has no caller
    to report to."""
    end = time.monotonic() + _UNMOUNT_TIMEOUT_SECONDS
    while True:
        there = _ckptfs.locate(path)
        try:
            if there and there != before and _shows_ckptfs(there):
                child_process.run("unmount", "--lazy", "--", there[0], timeout=_COMMAND_TIMEOUT_SECONDS)
            if is_private:
                os.rmdir(path)
            return
        except SafetensorError:
            # The daemon may have been faster.
            if time.monotonic() > end:
                raise
        except OSError as fault:
            # If somebody has put files there, they stay.
            if fault.errno != errno.EBUSY or time.monotonic() > end:
                return
        time.sleep(0.01)


def _command_options(options):
    """Options as the command takes them, and the variables for those of stores. It checks other values itself."""
    del options["source"], options["mountpoint"]
    environment = store_environment({name: options.pop(name) for name in STORE_SETTINGS})
    for name in [name for name, default in mount.__kwdefaults__.items() if default is False]:
        check_switch(options[name], name)
    check_text(options["root"], "root")
    keep, verbose = options.pop("keep"), options.pop("verbose")
    if not isinstance(verbose, int) or verbose < 0:
        raise error(f"verbose={verbose!r}: is no number of times", "give 0, 1, 2 or 3")
    if isinstance(options["views"], dict):
        options["views"] = views_json(options["views"])
    elif options["views"] is not None:
        options["views"] = parse_path(options["views"])
    words = ["--verbose"] * min(verbose, 3)
    words += [f"--keep={pattern}" for pattern in _patterns(keep)]
    for name in ("log_file", "delta_base"):
        if options[name] is not None:
            options[name] = os.fsdecode(options[name])
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            words.append(f"{option}={value}")
    return words, environment


def _patterns(keep):
    patterns = [keep] if isinstance(keep, str) else list(keep) if hasattr(keep, "__iter__") else [None]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise wrong_type("keep", "a glob or a list of globs", keep)
    return patterns


def _as_system_error(refused, *paths):
    """The same refusal, which is also the `OSError` that it describes. One of these paths is missing, or the system
    refuses it, or the mountpoint (the last of several) is no directory."""
    for path in paths:
        number = None
        if not os.path.lexists(path):
            number = errno.ENOENT
        elif path is not paths[0] and not os.path.isdir(path):
            number = errno.ENOTDIR
        # The command names a source by its whole path, and one that it could not open perhaps with a dot.
        for named in (path, os.path.join(os.getcwd(), path)):
            said = re.match(f"{re.escape(named)}(?:/[.]?)?: (.*)", str(refused), re.DOTALL)
            if not said:
                continue
            words, failed = said[1], _FAILED_CALL.search(said[1])
            if failed:
                number = int(failed[1])
                words = os.strerror(number)
            if number:
                fault = of_system(OSError(number, words), path)
                fault.__notes__ = getattr(refused, "__notes__", [])
                return fault
    return refused


class MountInfo(NamedTuple):
    """A mount of this machine, of any program.

    `state` is "alive", "dead" (its daemon was killed), "not-answering", "not-permitted", "hidden" (another mount lies
    over it) or "failed". A mount that is not permitted is another user's, or below a directory that this user may not
    enter. `reason` says which directory, or why it failed. `pid` is that of the daemon, and `stats` has the mount's
    numbers (`user.ckptfs.stats` in docs/formats.md). Both are `None` where it does not answer.
    """

    source: str
    mountpoint: str
    state: str
    pid: int | None
    reason: str | None
    stats: dict | None


def mounts():
    """The mounts of this machine, as `ckptfs status` lists them: a `MountInfo` for each. One that does not answer
    takes at most two seconds.

        for mount in ckptfs.mounts():
            print(mount.mountpoint, mount.source, mount.state)
    """
    listed = json.loads(child_process.run("status", "--json", timeout=_COMMAND_TIMEOUT_SECONDS).text)
    return [
        MountInfo(
            entry["source"], entry["mountpoint"], entry["state"], (entry["stats"] or {}).get("pid"),
            entry.get("reason"), entry["stats"],
        )
        for entry in listed
    ]  # fmt: skip


def _shows_ckptfs(location):
    """Whether a mount of ckptfs shows at a location."""
    path, number = location
    return _ckptfs.mount_table().get(number, ())[:2] == (path, "fuse.ckptfs")


def _type_and_source(number):
    """The type and the source of a mount. The kernel reuses numbers, so that these tell two mounts apart."""
    return _ckptfs.mount_table().get(number, (None,) * 3)[1:]


def _runs(pid):
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _at_exit():
    for mount in reversed(list(_mounts.values())):
        try:
            mount.close()
        except Exception as fault:
            # The others must be closed, too.
            if sys.stderr is not None:
                print(f"ckptfs: {in_words(fault)}", file=sys.stderr)


atexit.register(_at_exit)
