"""The command `ckptfs`: the arguments of this process in, its exit code out.

It imports neither torch nor numpy, nor anything that keeps a file open: the daemon of a mount is this command again.
"""

import signal
import sys

from ckptfs import _ckptfs


_FAILED, _USAGE = 1, 2

_RUN_USAGE = """\
Run a Python program that reads with ckptfs in place of safetensors

Usage: ckptfs run SCRIPT [ARGUMENTS]...
       ckptfs run -m MODULE [ARGUMENTS]...

What is replaced: python -c 'import ckptfs; help(ckptfs.install)'
Environment: CKPTFS_BACKEND, CKPTFS_THREADS, CKPTFS_MEMORY, CKPTFS_PINNED, CKPTFS_GPUDIRECT, CKPTFS_LOG,
CKPTFS_DISABLE; python -c 'import ckptfs; help(ckptfs.configure)' explains them.

Examples:
  ckptfs run generate.py --model models/llama
  CKPTFS_LOG=info ckptfs run -m my_package.serve
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
    import importlib.util
    import os
    import runpy

    if words and words[0] in ("-h", "--help"):
        print(_RUN_USAGE, end="")
        return 0
    is_module = words[:1] == ["-m"]
    words = words[1:] if is_module else words
    if not words:
        return _refuse(f"run needs {'a module after -m' if is_module else 'a program'}", "ckptfs run --help", _USAGE)
    if not is_module and not os.path.exists(words[0]):
        return _refuse(f"{words[0]}: no such file or directory", "check the path of the program", _FAILED)
    from ckptfs.shims.install import install

    install()
    sys.argv[:] = words
    if not sys.flags.safe_path:
        # Instead of the directory of this command.
        first = os.getcwd() if is_module else os.path.dirname(os.path.realpath(words[0]))
        sys.path[0] = first
    sys.excepthook = _show_programs_frames
    if is_module:
        try:
            is_there = importlib.util.find_spec(words[0]) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            return _refuse(f"no module named {words[0]!r}", "check its name, and the directory to start from", _FAILED)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
    return 0


def _show_programs_frames(kind, fault, trace):
    """Shows an exception without the frames that ran the program, as Python itself would."""
    inner = trace
    while inner and inner.tb_frame.f_code is not run.__code__:
        inner = inner.tb_next
    while inner and (inner.tb_frame.f_code is run.__code__ or "runpy" in inner.tb_frame.f_code.co_filename):
        inner = inner.tb_next
    if inner:
        # What it shows is the exception's own, whatever it is given.
        fault.__traceback__ = inner
    sys.__excepthook__(kind, fault, fault.__traceback__)


def _refuse(message, remedy, code):
    """Reports an error as every command does."""
    print(f"ckptfs: {message}\n  what to do: {remedy}", file=sys.stderr)
    return code
