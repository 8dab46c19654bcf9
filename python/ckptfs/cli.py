"""The command `ckptfs`: the arguments of this process in, its exit code out.

It imports neither torch nor numpy, nor anything that keeps a file open: the daemon of a mount is this command again.
"""

import signal
import sys

from ckptfs import _ckptfs


_RUN_USAGE = """\
Runs a Python program that reads with ckptfs in place of safetensors: see help(ckptfs.install).

Usage: ckptfs run SCRIPT [ARGUMENTS]...
       ckptfs run -m MODULE [ARGUMENTS]...

Environment: CKPTFS_BACKEND, CKPTFS_THREADS, CKPTFS_MEMORY, CKPTFS_LOG, CKPTFS_DISABLE: see
help(ckptfs.configure).
"""


def main():
    """Runs the command line of this process."""
    words = sys.argv[1:]
    if words[:2] in (["help", "run"], ["help", "bench"]):
        words = [words[1], "--help"]
    if words[:1] == ["run"]:
        # Before the handler of Ctrl-C changes: the program has that of Python.
        return run(words[1:])
    # Python's own handler would act on Ctrl-C only once Rust is done.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if words[:1] == ["bench"]:
        from ckptfs.bench import cli

        return cli.main(words[1:])
    # This command, when it is started again, must find the same package, and none in the current directory.
    flag = "-I" if sys.flags.isolated else "-P"
    return _ckptfs.run_command(["ckptfs", *words], sys.executable, [flag, "-m", "ckptfs"])


def run(words):
    """`ckptfs run`: an unchanged program that reads with ckptfs in place of safetensors.

    It runs in this process, as Python itself would run it. Returns the exit code unless the program exits."""
    import os
    import runpy

    if not words or words[0] in ("-h", "--help"):
        print(_RUN_USAGE, end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    is_module = words[0] == "-m"
    words = words[1:] if is_module else words
    if not words:
        print(_RUN_USAGE, end="", file=sys.stderr)
        return 2
    if not is_module and not os.path.exists(words[0]):
        print(f"error: {words[0]}: no such file\n\n{_RUN_USAGE}", end="", file=sys.stderr)
        return 2
    from ckptfs.shims.install import install

    install()
    sys.argv[:] = words
    if not sys.flags.safe_path:
        # Instead of the directory of this command.
        first = os.getcwd() if is_module else os.path.dirname(os.path.realpath(words[0]))
        sys.path[0] = first
    if is_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
    return 0
