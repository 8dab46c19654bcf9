"""A progress bar appears only on a terminal, and no load fails for want of one."""

import io
import sys

import ckptfs.torch
import pytest
from ckptfs.progress import ProgressBar

from compare import check_same
from samples import write_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    write_all(folder, 5)
    return folder


def test_progress_shows_a_bar(folder, capsys):
    ckptfs.torch.load_file(folder / "sharded", progress=True, backend="pread")
    assert "100%" in capsys.readouterr().err
    ckptfs.torch.load_file(folder / "sharded")
    assert capsys.readouterr().err == ""


def broken_stderr():
    closed = io.StringIO()
    closed.close()

    class Odd:
        def isatty(self):
            return True

        def write(self, text):
            raise RuntimeError("nobody reads this")

    return [None, closed, object(), Odd()]


@pytest.mark.parametrize("stderr", broken_stderr(), ids=["none", "closed", "object", "odd"])
def test_a_bar_that_cannot_be_shown_fails_no_load(folder, stderr, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr)
    got = ckptfs.torch.load_file(folder / "sharded", progress=True)
    monkeypatch.undo()
    check_same(got, ckptfs.torch.load_file(folder / "sharded"))


def test_a_bar_fits_the_line(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    bar = ProgressBar()
    for words in "123.45 of 123.45 GB  12.34 GB/s", "a name " * 20:
        bar.show(0.5, words)
        bar.end()
        line = capsys.readouterr().err.rstrip("\n")
        assert len(line) < 80 and (line.endswith(words) or line.endswith("…")), line
