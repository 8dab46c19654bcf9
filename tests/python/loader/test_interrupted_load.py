"""Ctrl-C is heard while a silent mount is opened or read: it ends the wait, and the program goes on, and can end."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import ckptfs.numpy
import numpy
import pytest

from forks import OTHER, let_others_through
from mounts import PATIENCE, until

# Opens or reads a path that hangs. A signal raises an exception, or is only recorded.
PROGRAM = """
import os, signal, sys
import ckptfs, ckptfs.numpy
virtual_file, elsewhere, what, heard, user = sys.argv[1:]

def hear(*_):
    print("heard", flush=True)
    if heard == "raise":
        raise KeyboardInterrupt

signal.signal(signal.SIGINT, hear)
expected = ckptfs.numpy.load_file(elsewhere, backend="pread")
os.setgroups([])
os.setresgid(int(user), int(user), int(user))
os.setresuid(int(user), int(user), int(user))
if what != "open":
    file = ckptfs.safe_open(virtual_file, "np", backend="pread")

def work():
    if what == "open":
        with ckptfs.safe_open(virtual_file, "np") as opened:
            return {"small": opened.get_tensor("small")}
    if what == "load":
        return {name: file.get_tensor(name) for name in ("first", "small")}
    return {"small": file.get_tensor("small")}

def same(got):
    assert got and all((expected[name] == tensor).all() for name, tensor in got.items())

print("ready", flush=True)
sys.stdin.readline()
try:
    got = work()
except KeyboardInterrupt:
    assert heard == "raise"
    same(ckptfs.numpy.load_file(elsewhere))
    print("interrupted", flush=True)
    if sys.stdin.readline() == "again\\n":
        same(work())
else:
    assert heard == "note"
    same(got)
print("done", flush=True)
"""

ROOT = 0


# Where a thread waits in the kernel for an answer of FUSE, or for a page of a file.
WAIT_CHANNELS = {"request_wait_answer", "folio_wait_bit_common"}


def wait_channels(pid):
    """Where each thread of a process waits in the kernel."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            yield (task / "wchan").read_text()


@pytest.fixture
def mount(mounts, tmp_path):
    """A mount that others may use, of a source that is closed to them."""
    let_others_through(tmp_path)
    closed, elsewhere = tmp_path / "closed", tmp_path / "elsewhere.safetensors"
    (closed / "source").mkdir(parents=True)
    closed.chmod(0o700)
    tensors = {
        "first": numpy.arange(1 << 20, dtype="f4"), "second": numpy.ones(1 << 22, "f4"),
        "small": numpy.arange(100, dtype="i1"),
    }  # fmt: skip
    for path in elsewhere, closed / "source/model-00001-of-00001.safetensors":
        ckptfs.numpy.save_file(tensors, path)
        path.chmod(0o644)
    return mounts(closed / "source", "--allow-other")


@pytest.fixture
def waits(mount, tmp_path):
    """Tells whether a process waits for an answer of the mount. Others may, too: `ckptfs status` looks at all mounts."""
    control = tmp_path / "control"
    control.mkdir()
    subprocess.run(["mount", "-t", "fusectl", "none", control], check=True)
    waiting = control / str(os.minor(os.stat(mount.point).st_dev)) / "waiting"
    yield lambda pid: int(waiting.read_text()) > 0 and WAIT_CHANNELS & {*wait_channels(pid)}
    subprocess.run(["umount", control], check=True)


class Program:
    """Starts the program to interrupt, and lets it run up to its wait."""

    def __init__(self, mount, what, heard, folder):
        user = ROOT if what == "open" else OTHER
        paths = [mount / "model.safetensors", folder / "elsewhere.safetensors"]
        command = [sys.executable, "-c", PROGRAM, *paths, what, heard, user]
        self.out = folder / "out"
        with self.out.open("w") as out:
            self.runs = subprocess.Popen(
                list(map(str, command)), stdin=subprocess.PIPE, stdout=out, text=True, bufsize=1
            )
        self.says("ready")

    def says(self, word):
        until(f"it says {word}", lambda: word in self.out.read_text().split() or self.has_ended())
        assert word in self.out.read_text().split()

    def has_ended(self):
        return self.runs.poll() is not None

    def is_told(self, line):
        self.runs.stdin.write(f"{line}\n")

    def ends(self):
        assert self.runs.wait(PATIENCE) == 0


@pytest.fixture
def hanging(mount, waits, tmp_path):
    """A program that waits for a silent mount."""
    started = []

    def hanging(what, heard):
        started.append(Program(mount, what, heard, tmp_path))
        mount.stop()
        started[0].is_told("begin")
        until("it waits for the mount", lambda: waits(started[0].runs.pid))
        return started[0]

    yield hanging
    mount.go_on()
    for program in started:
        program.runs.kill()
        program.runs.communicate(timeout=PATIENCE)


# A small tensor is read without a thread of its own where that cannot hang.
@pytest.mark.parametrize("what", ["open", "load", "load-small"])
@pytest.mark.parametrize("then", ["again", "end"])
def test_ctrl_c_ends_a_hanging_load(mount, hanging, what, then):
    program = hanging(what, "raise")
    program.runs.send_signal(signal.SIGINT)
    program.says("interrupted")
    if then == "again":
        mount.go_on()
    program.is_told(then)
    program.says("done")
    program.ends()


@pytest.mark.parametrize("what", ["open", "load", "load-small"])
def test_a_handler_that_does_not_raise_lets_it_go_on(mount, hanging, what):
    program = hanging(what, "note")
    program.runs.send_signal(signal.SIGINT)
    program.says("heard")
    mount.go_on()
    program.says("done")
    program.ends()
