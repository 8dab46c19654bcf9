"""Programs of this folder in processes of their own, which are ended when they hang.

In: which program, what it is asked, and the folders that it finds packages in. Out: each thing that it tells, as
it tells it, and why it ended where that was no good end. The other side, which such a program uses, is `serve`
and `tell`.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

_HERE = Path(__file__).parent

# What the programs use of the rest of the repository.
_BESIDE = [_HERE, _HERE.parent, _HERE.parents[1] / "tests/python/common"]

# So much of what a program said at its end is repeated.
_WORDS = 300


class Child:
    """A program that answers what it is asked, as often as it is asked, until it is closed."""

    def __init__(self, program, packages=(), env=None):
        self._said = tempfile.TemporaryFile()
        paths = [*map(str, packages), *map(str, _BESIDE), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, **(env or {}), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_HERE / program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._said, env=environment, start_new_session=True,
        )  # fmt: skip
        os.set_blocking(self._process.stdout.fileno(), False)
        self._waits = selectors.DefaultSelector()
        self._waits.register(self._process.stdout, selectors.EVENT_READ)
        self._read = b""

    def ask(self, asked, limit):
        """Asks, and gives each thing that is told, until `{"done": ...}`; if nothing is told for `limit` seconds
        the program is killed. Where it ended without that, the last thing is `{"fault": why}`."""
        try:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            yield {"fault": self._ended()}
            return
        while True:
            line = self._line(limit)
            if line is None:
                yield {"fault": self._ended(limit)}
                return
            if not line:
                yield {"fault": self._ended()}
                return
            told = json.loads(line)
            yield told
            if "done" in told or "fault" in told:
                return

    def one(self, asked, limit):
        """The one answer, or `{"fault": why}`."""
        *_, last = self.ask(asked, limit)
        return last

    def _line(self, limit):
        """A line; nothing at the end; `None` after the limit."""
        while b"\n" not in self._read:
            if not self._waits.select(limit):
                return None
            read = os.read(self._process.stdout.fileno(), 1 << 20)
            if not read:
                return b""
            self._read += read
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _ended(self, limit=None):
        self.close()
        self._said.seek(0)
        words = [line.strip() for line in self._said.read().decode(errors="replace").splitlines() if line.strip()]
        words = f": {words[-1][:_WORDS]}" if words else ""
        if limit is not None:
            return f"hung: killed after {limit:g} s{words}"
        return f"its process ended with {self._process.returncode}{words}"

    @property
    def is_over(self):
        return self._process.poll() is not None

    def close(self):
        """Ends it, and what it started: the group is its own, and named by its process."""
        if self._process.stdin.closed:
            return
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._waits.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def one(program, asked, limit, packages=(), env=None):
    """What a new process answers to one thing."""
    with Child(program, packages, env) as child:
        return child.one(asked, limit)


# What follows is for the programs.

_out = None


def tell(**told):
    """Tells one thing."""
    os.write(_out, json.dumps(told).encode() + b"\n")


def serve(answer):
    """Answers each thing that is asked. What is printed meanwhile does not get between the answers."""
    global _out
    _out = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            told = answer(**json.loads(line))
        except Exception as fault:
            traceback.print_exc()
            tell(fault=in_words(fault))
        else:
            tell(**{"done": True, **(told or {})})


def in_words(fault):
    """An exception on one line."""
    words = " ".join([str(fault), *getattr(fault, "__notes__", [])]).split()
    return f"{type(fault).__name__}: {' '.join(words)}"[:_WORDS]
