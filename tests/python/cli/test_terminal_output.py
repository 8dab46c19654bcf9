"""What the command shows on a terminal of 80 columns fits there, and `status --watch` draws in place."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time

import pytest

from mounts import PATIENCE
from program import find_binary
from samples import write_shards

ROWS, COLUMNS = 24, 80


class Terminal:
    """A program on a terminal."""

    def __init__(self, *words, rows=ROWS):
        self._master, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", rows, COLUMNS, 0, 0))
        env = os.environ | {"TERM": "xterm"}
        self.program = subprocess.Popen([str(word) for word in words], stdin=inside, stdout=inside, stderr=inside,
                                        env=env)  # fmt: skip
        os.close(inside)

    def read_until(self, holds):
        """What it has shown when that holds, or at its end."""
        shown, end = b"", time.monotonic() + PATIENCE
        while not holds(shown) and time.monotonic() < end:
            if select.select([self._master], [], [], 0.2)[0]:
                try:
                    shown += os.read(self._master, 1 << 16)
                except OSError:
                    # The program has closed the terminal.
                    break
        return shown.decode()

    def close(self):
        if self.program.poll() is None:
            self.program.terminate()
        self.program.wait(PATIENCE)
        os.close(self._master)


@pytest.fixture
def terminal():
    opened = []

    def run(*words, **options):
        opened.append(Terminal(find_binary(), *words, **options))
        return opened[-1]

    yield run
    for one in opened:
        one.close()


def drawn_lines(shown):
    """The lines between the movements of the cursor."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", shown))


@pytest.fixture
def long_mount(mounts, tmp_path):
    """A mount with paths that no line has room for."""
    folder = tmp_path / ("a_long_name_" * 8) / ("longer" * 20)
    write_shards(folder / "models/llama", 1, 2, 2, 100)
    (folder / "mnt").mkdir()
    return mounts(folder / "models", at=folder / "mnt")


def test_status_fits_80_columns_whatever_the_paths(terminal, long_mount, ckptfs):
    piped = ckptfs("status").stdout
    shown = terminal("status").read_until(lambda _: False)
    for text in (piped, "\n".join(drawn_lines(shown))):
        assert max(map(len, text.splitlines())) <= COLUMNS
        assert "".join(str(long_mount.point).split()) in "".join(text.split())


def test_watched_status_is_drawn_in_place(terminal, mounts, tmp_path):
    write_shards(tmp_path / "models/llama", 1, 2, 2, 100)
    mounts(tmp_path / "models")
    shown = terminal("status", "--watch").read_until(lambda shown: shown.count(b"\x1b[J") >= 3)
    first, second, third = shown.split("\x1b[J")[:3]
    lines = first.count("\n")
    assert 0 < lines < ROWS and not first.startswith("\r\x1b[")
    # Each frame goes back to where the one before began, and nothing clears the terminal.
    for frame in (second, third):
        assert frame.startswith(f"\r\x1b[{lines}A"), frame
        lines = frame.count("\n")
    assert "\x1b[2J" not in shown and "\x1b[H" not in shown


def test_a_watch_says_how_many_lines_do_not_fit(terminal, mounts, tmp_path):
    write_shards(tmp_path / "models/llama", 1, 2, 2, 100)
    mounts(tmp_path / "models")
    shown = terminal("status", "--watch", rows=5).read_until(lambda shown: shown.count(b"\x1b[J") >= 1)
    lines = [line for line in drawn_lines(shown.split("\x1b[J")[0]) if line]
    assert len(lines) == 4 and re.fullmatch(r"… \d+ more lines; ckptfs status shows all", lines[-1]), lines


def test_a_watch_that_is_piped_repeats(mounts, tmp_path):
    write_shards(tmp_path / "models/llama", 1, 2, 2, 100)
    mount = mounts(tmp_path / "models")
    with subprocess.Popen([find_binary(), "status", "--watch"], stdout=subprocess.PIPE, text=True) as watching:
        lines = []
        while lines.count(f"{mount.point}\n") < 2:
            lines.append(watching.stdout.readline())
            assert lines[-1], lines
        watching.terminate()
    assert not any("\x1b" in line for line in lines)


def test_progress_fits_80_columns_and_is_whole(terminal, tmp_path):
    write_shards(tmp_path / "models", 1, 2, 1, 4_000)
    export = terminal("export", tmp_path / "models", tmp_path / "out.safetensors")
    bars = [line for line in drawn_lines(export.read_until(lambda _: False)) if " left" in line]
    assert bars and all(len(line) <= COLUMNS and line.rstrip().endswith(" left") for line in bars), bars
    assert all(re.search(r" of .*B, .*B/s, .* left$", line.rstrip()) for line in bars), bars


def test_quiet_commands_show_neither_notes_nor_progress(terminal, ckptfs, tmp_path):
    write_shards(tmp_path / "models", 1, 2, 1, 4_000)
    one = next((tmp_path / "models").glob("*-00001-of-*"))
    assert "note:" in ckptfs("verify", one).stderr and ckptfs("--quiet", "verify", one).stderr == ""
    shown = terminal("verify", "--quiet", one).read_until(lambda _: False)
    assert "could be read" in shown and " left" not in shown and "note:" not in shown


def test_a_note_of_two_checkpoints_is_printed_once(ckptfs, tmp_path):
    write_shards(tmp_path / "models", 1, 2, 1, 100)
    one = next((tmp_path / "models").glob("*-00001-of-*"))
    assert ckptfs("verify", one, "--against", one).stderr.count("note:") == 1
