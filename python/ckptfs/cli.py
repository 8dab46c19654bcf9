"""The command `ckptfs`: the arguments of this process in, its exit code out.

It imports neither torch nor numpy nor anything that would open a file: the daemon of a mount is this
process started once more.
"""

import signal
import sys

from ckptfs import _ckptfs


def main():
    """Runs the command line of this process."""
    words = sys.argv[1:]
    if words[:2] in (["help", "run"], ["help", "bench"]):
        words = [words[1], "--help"]
    if words[:1] == ["run"]:
        # With Ctrl-C as Python programs have it.
        from ckptfs import _run

        return _run.main(words[1:])
    # Python would only take note of Ctrl-C, and look at the note when Rust is done.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if words[:1] == ["bench"]:
        from ckptfs.bench import cli

        return cli.main(words[1:])
    # What starts this command again must find the same package, and none in the current directory.
    apart = "-I" if sys.flags.isolated else "-P"
    return _ckptfs.run_command(["ckptfs", *words], sys.executable, [apart, "-m", "ckptfs"])
