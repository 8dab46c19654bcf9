"""`ckptfs bench` reports in an HTML page that needs no other file, and on the terminal while it measures."""

import io
import json
import sys
from html.parser import HTMLParser

from ckptfs.bench import cli, html, report

from program import DONE, run_bench
from samples import write_shards

HOSTILE = "<img src=x onerror=alert(1)> & \"'\x1b[31m\u202e\n"


class Page(HTMLParser):
    """The contents of a page: its tags, which must close in order, their attributes, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.values, self.text, self._open = [], [], "", []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.values += [f"{name}={value}" for name, value in attrs]

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data


def one(seconds, daemon=None):
    return {
        "returned_seconds": seconds, "seconds": seconds, "median_seconds": seconds[0], "gb_per_second": 0.5,
        "cpu_seconds": seconds, "daemon_cpu_seconds": daemon, "peak_bytes": [1_500_000] * len(seconds),
        "speedup": 1.5, "speedup_least": 1.25, "speedup_most": 2.0,
    }  # fmt: skip


LARGE_BYTES = 100_000_000
LEGEND_MARKS = 3


def found(**more):
    told = {"ckptfs owned": one([2.0, 1.0, 4.0]), "mount mapped": one([3.0, 3.0, 3.0], [0.5, 0.5, 0.5])}
    return {
        "path": "model", "format": "safetensors", "device": "cpu", "runs": 3, "bytes": LARGE_BYTES, "tensors": 1,
        "summary": "It took 3 s.",
        "files": [], "loaders": [*told], "against": "safetensors", "cleared_by": "posix_fadvise",
        "cold": told, "cached": told, "notes": [], **more,
        "machine": {"processor": "P", "cores": 2, "memory_bytes": 1, "system": "S", "filesystem": "ext4",
                    "python": "3", "libraries": {"torch": "2"}, "device": HOSTILE},
    }  # fmt: skip


def test_a_page_is_written_beside_the_table(tmp_path, capsys, left):
    folder = tmp_path / HOSTILE
    write_shards(folder, 1, 1, 1, 30)
    written = tmp_path / "page.html"
    written.write_text("an older one")
    words = [str(folder), "--runs", "1", "--against", "safetensors", "--html", str(written)]
    assert run_bench(words) == DONE
    said = capsys.readouterr()
    assert "ckptfs mapped" in said.out and "\x1b" not in said.out and "\u202e" not in said.out
    page = Page(written.read_text())
    assert "<img src=x onerror=alert(1)> & \"'\\x1b[31m\\u202e\\n" in page.text
    assert page.tags.count("svg") == 6 + LEGEND_MARKS and page.tags.count("table") == 2
    assert page.text.count("mount mapped") == 2 * 4 and "torch" in page.text


def test_hostile_text_is_escaped_in_a_page():
    page = html.page(found(path=HOSTILE, notes=[HOSTILE], summary=HOSTILE, against=HOSTILE))
    parsed = Page(page.decode())
    assert not {"img", "script", "link", "iframe", "object"} & {*parsed.tags}
    assert not any(value.startswith(("on", "src=", "href=")) for value in parsed.values)
    assert b"\x1b" not in page and "\u202e" not in page.decode()
    # The path twice, the note, the summary, the reference in two tables, and the device.
    assert parsed.text.count("<img src=x") == 7
    assert html.page(found(path="\udcff")).decode().count("\\udcff") == 2
    assert "http" not in page.decode().replace("http-equiv", "")


def test_bars_are_as_long_as_medians_with_their_spread():
    parsed = Page(html.page(found()).decode())
    # Of 420 for the largest value, 4 seconds; from there on the left edge of the bars, at 170.
    assert "width=210.0" in parsed.values and "width=315.0" in parsed.values
    assert "d=M275.0 9.0v8m0 -4H590.0m0 -4v8" in parsed.values
    assert "2.0000 s (1.0000 to 4.0000)" in parsed.text
    # With the daemon's.
    assert "3.500 s (3.500 to 3.500)" in parsed.text


def test_a_page_says_what_its_marks_mean_and_sums_up():
    page = html.page(found()).decode()
    text = Page(page).text
    for words in ("ckptfs, by itself or through its mount", "another library", "from the least to the most", "each tensor has memory"):
        assert text.count(words) == 1, words
    # A number and its unit stay on one line.
    assert "It took 3\N{NO-BREAK SPACE}s." in text and "td, .key { white-space: nowrap; }" in page


def test_a_summary_compares_the_fastest_of_each_kind():
    slow, close = one([4.0]), one([2.0]) | {"speedup": 1.1, "speedup_least": 0.9, "speedup_most": 1.2}
    loaders = {"ckptfs owned": slow, "ckptfs mapped": one([2.0]), "mount mapped": close, "safetensors": slow}
    assert report.summary(found(cold=loaders, cached=None)) == (
        "From the disk, ckptfs mapped takes 2.000 s (0.50 GB/s) and is 1.50 times as fast as safetensors; "
        "safetensors through a mount is about as fast as safetensors."
    )
    alone = {"ckptfs owned": one([2.0])}
    said = report.summary(found(cold=alone, cached=alone, against=None))
    numbers = "ckptfs owned takes 2.000 s (0.50 GB/s)."
    assert said == f"From the disk, {numbers} From the page cache, {numbers}"
    small = report.summary(found(bytes=LARGE_BYTES - 1))
    assert small.startswith("Too small to judge: ") and "times" not in small


def test_a_table_has_the_columns_that_are_known():
    lines = [*report.lines(found())]
    assert "cold, these files evicted; speed-up against safetensors" in lines
    at = next(n for n, line in enumerate(lines) if line.startswith("cold"))
    times, costs = lines[at + 1 : at + 4], lines[at + 4 : at + 7]
    assert times[0].split() == ["all", "there,", "s", "GB/s", "speed-up"] and "daemon's CPU, s" in costs[0]
    assert times[1].startswith("  ckptfs owned  ") and times[1].endswith("  1.50 (1.25 to 2.00)")
    assert len({*map(len, times)}) == 1 and len({*map(len, costs)}) == 1
    told = one([1.0]) | {"speedup": None, "peak_bytes": None}
    lines = "\n".join(report.lines(found(cold=None, cached={"a": told}, against=None)))
    assert "cold" not in lines and "daemon" not in lines and "peak" not in lines and "speed-up" not in lines


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_progress_and_keeps_none_of_it(tmp_path, monkeypatch, capsys, left):
    write_shards(tmp_path / "model", 1, 1, 1, 30)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    words = [str(tmp_path / "model"), "--runs", "1", "--json", "--against", "safetensors"]
    assert run_bench(words) == DONE
    json.loads(capsys.readouterr().out)
    shown = terminal.getvalue().split("\r")
    assert "  0%  comparing: ckptfs owned" in shown[1] and "cached: safetensors, 1 of 1" in shown[-3]
    assert shown[-2].strip() == shown[-1] == "" and len(shown[-2]) >= max(map(len, shown))
