"""Worker processes as a benchmark sees them: see `worker` for what they are asked and answer."""

import os
import signal
import subprocess
import tempfile
from multiprocessing import Pipe

from ckptfs import child_process
from ckptfs.bench import GO, signals
from ckptfs.bench.tables import MAX_FAULT_CHARACTERS


class WorkerProcess:
    """A process that runs `worker`; `with WorkerProcess() as process:`. Its modules come first from `paths`, a list
    of folders, and `environment` is added to this process's own. `python` is another interpreter than this one."""

    def __init__(self, paths=(), environment=None, python=None):
        command, inherited = child_process.python_command()
        command[0] = python or command[0]
        if paths:
            # An isolated interpreter would not look there.
            command = [command[0], "-P"]
        search = os.pathsep.join(filter(None, [*map(str, paths), inherited.get("PYTHONPATH", "")]))
        self._output = tempfile.TemporaryFile()
        self._connection, theirs = Pipe()
        with theirs:
            # In a session of its own: a Ctrl-C is for this program, whose end is the worker's.
            self._process = subprocess.Popen(
                [*command, "-m", "ckptfs.bench.worker", str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output, start_new_session=True,
                env={**inherited, **(environment or {}), **({"PYTHONPATH": search} if search else {})},
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def pid(self):
        """The process's number."""
        return self._process.pid

    @property
    def is_over(self):
        """Whether the process has ended."""
        return self._process.poll() is not None

    def close(self):
        """Ends the process and what it started."""
        if self._output.closed:
            return
        self._kill()
        self._connection.close()
        self._output.close()

    def call(self, function, limit=None, **arguments):
        """Calls a function there, named "module:function", and yields each message, the last with "done". A process
        that is silent for `limit` seconds is killed."""
        yield from self._messages({"call": function, "arguments": arguments}, limit)

    def prepare(self, request, limit=None):
        """Has a workload prepared. Returns `None`, or its fault as a result."""
        message = next(self._messages(request, limit))
        return None if "ready" in message else message

    def go(self):
        """Starts the clock of what was prepared."""
        try:
            self._connection.send(GO)
        except OSError:
            # The process has ended, which `result` reports.
            pass

    def result(self, limit=None):
        """What it took, or {"fault": why}."""
        return self._receive(limit)

    def measure(self, request, before=None, daemon=None, limit=None):
        """The result of a workload. `before` is called when it is prepared. `daemon` returns the processor seconds
        that a daemon has used, and those of the workload are the result's "daemon"."""
        if fault := self.prepare(request, limit):
            return fault
        if before:
            before()
        used = daemon and daemon()
        self.go()
        result = self.result(limit)
        after = daemon and daemon()
        result["daemon"] = after - used if used is not None and after is not None else None
        return result

    def _messages(self, request, limit):
        try:
            self._connection.send(request)
        except OSError:
            yield self._fault()
            return
        while True:
            message = self._receive(limit)
            yield message
            if "done" in message:
                return

    def _receive(self, limit):
        try:
            with signals.interruptible():
                if not self._connection.poll(limit):
                    return self._fault(limit)
                return self._connection.recv()
        except (EOFError, OSError):
            return self._fault()

    def _fault(self, limit=None):
        """Why the process ended, or was killed after `limit` seconds of silence, with its last words."""
        if limit is None:
            # A signal to the process group also ends a worker that has not started its own session. Then the signal is
            # reported, and no fault of the worker.
            with signals.interruptible():
                code = self._process.wait()
        else:
            self._kill()
        self._output.seek(0)
        lines = [line.strip() for line in self._output.read().decode(errors="replace").splitlines() if line.strip()]
        words = f": {lines[-1][:MAX_FAULT_CHARACTERS]}" if lines else ""
        why = f"its process ended with {code}" if limit is None else f"hung: killed after {limit:g} s"
        return {"done": False, "fault": why + words}

    def _kill(self):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
