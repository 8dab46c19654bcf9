"""`ckptfs run`: a program as it is, with our reads under safetensors' calls.

In: the words after `run`. Out: the program runs in this process, as Python itself would run it.
"""

import os
import runpy
import sys

_USAGE = """\
Runs a Python program with the reads of ckptfs in the place of safetensors': see help(ckptfs.install).

Usage: ckptfs run SCRIPT [ARGUMENTS]...
       ckptfs run -m MODULE [ARGUMENTS]...

Environment: CKPTFS_BACKEND, CKPTFS_THREADS, CKPTFS_MEMORY, CKPTFS_LOG, CKPTFS_DISABLE: see
help(ckptfs.configure).
"""


def main(words):
    """Runs it. Gives the exit code, where the program does not end this process itself."""
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE, end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    is_module = words[0] == "-m"
    words = words[1:] if is_module else words
    if not words:
        print(_USAGE, end="", file=sys.stderr)
        return 2
    if not is_module and not os.path.exists(words[0]):
        print(f"error: {words[0]}: no such file\n\n{_USAGE}", end="", file=sys.stderr)
        return 2
    from ckptfs.shims.install import install

    install()
    sys.argv[:] = words
    if not sys.flags.safe_path:
        # In the place of the directory that this command was found in.
        first = os.getcwd() if is_module else os.path.dirname(os.path.realpath(words[0]))
        sys.path[0] = first
    if is_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")
    return 0
