"""Runs this package in a process of its own: as the command `ckptfs`, or as a script that uses it."""

import contextlib
import json
import os
import signal
import site
import subprocess
import sys
import threading
from typing import NamedTuple

from ckptfs.errors import error, in_python

_REFUSAL, _NOTE, _REMEDY = "ckptfs: ", "ckptfs: note: ", "\n  what to do: "


class CommandOutput(NamedTuple):
    """The output of a command that succeeded, and its notes for the user."""

    text: str
    notes: list


def python_command():
    """The start of a command line, and an environment: an interpreter like this one, in which `ckptfs` is this package.

    It imports nothing from the current directory."""
    if not sys.executable:
        raise error(
            "sys.executable is empty, so that ckptfs cannot be started as a command",
            "let the program that Python runs in set it to an interpreter that has ckptfs",
        )
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    flag, environment = "-I" if sys.flags.isolated else "-P", dict(os.environ)
    if home not in (*site.getsitepackages(), site.getusersitepackages()):
        # With -I an interpreter ignores PYTHONPATH.
        flag = "-P"
        inherited = "" if sys.flags.ignore_environment else environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (home, inherited)))
    return [sys.executable, flag], environment


def run(*words, timeout=None, is_command=False, variables=()):
    """Runs the command `ckptfs`. `timeout` is in seconds; without one Ctrl-C ends it. A refusal is raised, with the
    exit code as `code`. Its message names arguments of Python instead of options, unless the caller `is_command`.
    `variables` are added to its environment."""
    words = [os.fsdecode(word) for word in words]
    for word in words:
        if "\0" in word:
            raise error(f"{word!r}: no path and no option of a command can have a NUL in it", "leave it out")
    start, environment = python_command()
    environment.update(variables)
    try:
        output, errors, code = _run_to_end([*start, "-m", "ckptfs", *words], environment, timeout)
    except subprocess.TimeoutExpired:
        message = f"ckptfs {words[0]} has not ended within {timeout} seconds"
        raise error(message, "see what the machine is busy with, and do it again") from None
    errors = errors.decode(errors="replace")
    if code:
        refused = _refusal(words[0], code, errors, is_command)
        refused.code = code
        raise refused
    notes = [line.removeprefix(_NOTE) for line in errors.splitlines() if line.startswith(_NOTE)]
    return CommandOutput(output.decode(errors="replace"), notes)


def _run_to_end(command, environment, timeout):
    """Returns the output, the errors and the exit code of a process. An exception, such as Ctrl-C, kills it."""
    process = None
    try:
        with deferred_signals():
            process = _start(command, environment)
        return *process.communicate(timeout=timeout), process.returncode
    except BaseException:
        if process is not None:
            with process:
                process.kill()
        raise


def _start(command, environment):
    try:
        # In a session of its own: Ctrl-C is for this program, which may go on.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment, start_new_session=True,
        )  # fmt: skip
    except OSError as fault:
        message = f"{command[0]}: cannot be run: {fault.strerror}"
        raise error(message, "see that it is there, and raise the limit on processes (ulimit -u)") from None


@contextlib.contextmanager
def deferred_signals():
    """Runs Python's signal handlers at the end of the block, not within it.

    One that raises in `Popen` after its fork would lose a running process, for example."""
    handlers, pending = {}, []
    if threading.current_thread() is threading.main_thread():
        # Only the main thread may change handlers, and only there they run.
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        handlers = {number: handler for number, handler in handlers.items() if _may_raise(handler)}

    def run_pending():
        with contextlib.ExitStack() as calls:
            for number, frame in reversed(pending):
                calls.callback(handlers[number], number, frame)

    # A handler that raises keeps no other one from being restored or run.
    with contextlib.ExitStack() as restored:
        restored.callback(run_pending)
        for number, handler in handlers.items():
            restored.callback(signal.signal, number, handler)
            signal.signal(number, lambda *arguments: pending.append(arguments))
        yield


def _may_raise(handler):
    # A loop of asyncio has one that does nothing. Set again, it would interrupt system calls.
    return callable(handler) and getattr(handler, "__module__", None) != "asyncio.unix_events"


def _refusal(command, code, errors, is_command):
    convert = (lambda text: text) if is_command else in_python
    lines = errors.strip().splitlines()
    for place, line in enumerate(lines):
        if line.startswith(_REFUSAL) and not line.startswith(_NOTE):
            message, _, remedy = "\n".join(lines[place:]).removeprefix(_REFUSAL).partition(_REMEDY)
            return error(convert(message), convert(remedy))
        if line.startswith('{"error":'):
            # With --json, the last line is the error as an object.
            refused = json.loads(line)["error"]
            # A command prints its message on one line.
            message = (" " if is_command else "\n    ").join([refused["message"], *refused.get("details", [])])
            return error(convert(message), convert(refused["remedy"]))
    outcome = f"was ended by signal {-code}" if code < 0 else f"failed ({code})"
    return error(
        f"ckptfs {command} {outcome}: {errors.strip() or 'it said nothing'}",
        f"see what `{sys.executable} -m ckptfs doctor` says of this machine",
    )
