"""The command `ckptfs`: the arguments of this process in, its exit code out.

It imports neither torch nor numpy, nor anything that keeps a file open: the daemon of a mount is this command again.
"""

import signal
import sys

from ckptfs import _ckptfs


_DONE, _FAILED, _USAGE = 0, 1, 2


def main():
    """Runs the command line of this process."""
    words = ["ckptfs", *sys.argv[1:]]
    parsed = _ckptfs.parse_command(words)
    if isinstance(parsed, int):
        return parsed
    command, options = parsed or (None, {})
    if command == "run":
        # Before the handler of Ctrl-C changes: the program has that of Python.
        return run(**options)
    # Python's own handler would act on Ctrl-C only once Rust is done.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if command == "bench":
        from ckptfs.bench import cli

        return cli.main(cli.Options(**options))
    if command in ("enable", "disable"):
        from ckptfs import enable

        return enable.run(command, **options)
    environment = None
    if not {"status", "doctor"}.isdisjoint(words):
        from ckptfs.enable import describe

        environment = describe()
    # This command, when it is started again, must find the same package, and none in the current directory.
    flag = "-I" if sys.flags.isolated else "-P"
    return _ckptfs.run_command(words, sys.executable, [flag, "-m", "ckptfs"], environment)


def run(words, is_module, quiet):
    """`ckptfs run`: an unchanged program that reads with ckptfs in place of safetensors.

    `words` are the script or the module, and its arguments. It runs in this process, as Python itself would run it.
    Returns the exit code unless the program exits."""
    import importlib.util
    import os
    import runpy

    from ckptfs.errors import print_error

    if not is_module and not os.path.exists(words[0]):
        if words[0].startswith("-"):
            return print_error(f"unexpected argument '{words[0]}'", "ckptfs run --help explains all options", _USAGE)
        return print_error(f"{words[0]}: no such file or directory", "check the path of the program", _FAILED)
    if not is_module and os.path.isdir(words[0]) and not os.path.exists(os.path.join(words[0], "__main__.py")):
        message = f"{words[0]}: a directory without __main__.py"
        return print_error(message, "give the path of the program in it", _FAILED)
    if quiet:
        from ckptfs.settings import configure

        configure(log="error")
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
            message = f"no module named {words[0]!r}"
            return print_error(message, "check its name, and the directory to start from", _FAILED)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
    return _DONE


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
