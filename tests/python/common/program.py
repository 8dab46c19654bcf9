"""Runs the ckptfs program as a user does: arguments in; exit code, output and files out."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]

# This folder, whose programs tests start as processes of their own.
COMMON = Path(__file__).parent

DONE, FAILED, USAGE, REFUSED = 0, 1, 2, 3

# The limits of a bounded run.
MAX_MEMORY_BYTES = 2 << 30
TIMEOUT_SECONDS = 20


def find_binary():
    """The binary of CKPTFS_BIN, else the release build, else the debug build. Having none of them is a failure."""
    named = os.environ.get("CKPTFS_BIN")
    builds = [REPOSITORY / "target" / build / "ckptfs" for build in ("release", "debug")]
    for binary in [Path(named)] if named else builds:
        if binary.is_file():
            return binary.resolve()
    raise FileNotFoundError("no ckptfs to test: run `cargo build --release`, or set CKPTFS_BIN")


@dataclass
class Outcome:
    """The outcome of a run."""

    code: int
    stdout: str
    stderr: str

    def json(self):
        return json.loads(self.stdout)

    @property
    def error(self):
        """The text of the error, which is an object with --json."""
        if not self.stderr.startswith('{"error":'):
            return self.stderr
        error = json.loads(self.stderr)["error"]
        assert error["code"] == self.code
        message = "\n    ".join([error["message"], *error.get("details", [])])
        return f"ckptfs: {message}\n  what to do: {error['remedy']}\n"


class Ckptfs:
    def __init__(self, binary):
        self.binary = binary

    def __call__(self, *args, bounded=False):
        """Runs to the end. `bounded` limits its memory; its time is always limited."""
        command = [str(self.binary), *map(str, args)]
        if bounded:
            command = ["sh", "-c", f'ulimit -v {MAX_MEMORY_BYTES >> 10} && exec "$@"', "sh", *command]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_SECONDS
        )
        outcome = Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())
        assert "panicked" not in outcome.stderr, outcome.stderr
        assert outcome.code >= 0, f"killed by signal {-outcome.code}: {outcome.stderr}"
        return outcome

    def export(self, path, out, *options):
        """Exports a source, which must work, and gives the file."""
        done = self("export", path, out, *options)
        assert done.code == DONE, done.stderr
        assert all(line.startswith("ckptfs: note: ") for line in done.stderr.splitlines()), done.stderr
        return out

    def inspect(self, path, *options):
        """The JSON report on a source, which must work."""
        done = self("inspect", "--json", path, *options)
        assert done.code == DONE, done.stderr
        return done.json()


def run_bench(words):
    """Runs `ckptfs bench` in this process, and returns its exit code."""
    from ckptfs import _ckptfs
    from ckptfs.bench import cli

    _, options = _ckptfs.parse_command(["ckptfs", "bench", *words])
    return cli.main(cli.Options(**options))
