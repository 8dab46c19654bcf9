"""The command `ckptfs`: the arguments of this process in, its exit code out.

It imports neither torch nor numpy nor anything that would open a file: the daemon of a mount is this
process started once more.
"""

import signal
import sys

from ckptfs import _ckptfs


def main():
    """Runs the command line of this process."""
    if sys.argv[1:2] == ["run"]:
        # With Ctrl-C as Python programs have it.
        from ckptfs import _run

        return _run.main(sys.argv[2:])
    # Python would only take note of Ctrl-C, and look at the note when Rust is done.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.argv[1:2] == ["bench"]:
        from ckptfs import _bench

        return _bench.main(sys.argv[2:])
    # What starts this command again must find the same package, and none in the current directory.
    apart = "-I" if sys.flags.isolated else "-P"
    return _ckptfs.command(["ckptfs", *sys.argv[1:]], sys.executable, [apart, "-m", "ckptfs"])
