"""Starts Python programs that use torch within milliseconds: a server imports it once, and forks for each program.

    subprocess.run(preloaded.command("-c", "import torch; ..."), env=...)

does what `sys.executable` with these arguments does. It is for tests that check neither the interpreter's start nor the
import of torch. The server imports nothing of ckptfs.

    python preloaded.py serve DESCRIPTOR
    python preloaded.py SOCKET -c CODE|-m MODULE|SCRIPT ARGUMENT...
"""

import json
import os
import select
import signal
import socket
import sys

# The variable that names the socket of the server that a program was forked from.
_SOCKET = "PRELOADED_SOCKET"

# The exit status of a client whose server has gone.
GONE = 70

# The servers of this process, by their variables.
_servers = {}


def command(*words, **variables):
    """The command that runs Python with these words in a fork of a server, which was started with these variables
    besides the environment. A process that is a fork of a server uses that server."""
    name = os.environ.get(_SOCKET) or _server(**variables)
    return [sys.executable, "-I", "-S", __file__, name, *map(str, words)]


def _server(**variables):
    """The socket of a server, which ends with this process."""
    import subprocess

    key = os.getpid(), *sorted(variables.items())
    if key not in _servers:
        with socket.socket(socket.AF_UNIX) as listener:
            # Linux chooses an abstract name, which begins with a zero byte.
            listener.bind("")
            listener.listen(100)
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
            server = subprocess.Popen(
                [sys.executable, "-P", __file__, "serve", str(listener.fileno())],
                env=environment, pass_fds=[listener.fileno()], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            _servers[key] = server, listener.getsockname()[1:].decode()
    return _servers[key][1]


def _serve(listener):
    """Forks for each connection until standard input ends."""
    import gc

    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch  # noqa: F401

    # At its end, a program would otherwise collect all that was imported, and copy its memory.
    gc.freeze()
    # Nothing waits for the processes that keep programs.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            request, descriptors = _receive(connection)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            program = os.fork()
            if program:
                _keep(program, connection, descriptors)
            connection.close()
            _become(request, descriptors)
            return
        connection.close()


def _receive(connection):
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as lines:
        return json.loads(lines.readline()), descriptors


def _keep(program, connection, descriptors):
    """Sends the program's status when it ends. Then, or when its client has gone, ends its process group."""
    for descriptor in [0, 1, 2, *descriptors]:
        os.close(descriptor)
    ended = os.pidfd_open(program)
    ready, _, _ = select.select([ended, connection], [], [])
    try:
        os.killpg(program, signal.SIGKILL)
    except ProcessLookupError:
        # It is not yet the leader of a group, or was the last of it.
        if ended not in ready:
            os.kill(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    try:
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    except OSError:
        pass
    os._exit(0)


def _become(request, descriptors):
    """Runs a program in this process as the interpreter does."""
    import runpy
    import types

    os.setsid()
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    what, *rest = request["words"]
    beside = os.path.dirname(os.path.abspath(what)) if what not in ("-c", "-m") else ""
    sys.path[:0] = [beside, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if what == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if what == "-c":
        code, *rest = rest
        sys.argv = ["-c", *rest]
        exec(compile(code, "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [what, *rest]
        main.__file__ = what
        with open(what, "rb") as script:
            exec(compile(script.read(), what, "exec"), main.__dict__)


def _run(name, words):
    """Has the server run a program with the standard streams of this process, and ends as the program did."""
    request = {"words": words, "cwd": os.getcwd(), "environment": {**os.environ, _SOCKET: name}}
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{name}")
            socket.send_fds(connection, [b"\0"], [0, 1, 2])
            connection.sendall(json.dumps(request).encode() + b"\n")
            code = int(connection.recv(16))
    except (OSError, ValueError) as fault:
        print(f"{__file__}: the server has gone: {fault}", file=sys.stderr)
        sys.exit(GONE)
    if code < 0:
        # The signal that ended the program ends this process, too.
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    if name == "serve":
        _serve(socket.socket(fileno=int(words[0])))
    else:
        _run(name, words)
