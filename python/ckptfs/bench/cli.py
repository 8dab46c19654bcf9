"""`ckptfs bench PATH`: how fast a checkpoint loads here, with ckptfs and with what people load with today.

In: a checkpoint. Out: a table, JSON or a page of HTML of what each loader took with a cold and with a filled
page cache, after all of them were seen to give equal tensors: ckptfs itself, a mount that is made for it, and
the other libraries. Each load is in a process of its own, and the loaders take turns, so that none has what
another left behind.
"""

import argparse
import contextlib
import errno
import json
import os
import stat
import sys

from ckptfs import child_process
from ckptfs.bench import page_cache, signals
from ckptfs.save import atomic_file
from ckptfs.progress import Bar
from ckptfs._errors import SafetensorError, error, in_words
from ckptfs.bench import html, report, schedule
from ckptfs.bench.loaders import MOUNTED, OURS, PEERS, REFERENCES, chosen, is_installed
from ckptfs.bench.machine import machine
from ckptfs.bench.mount import Shown, daemon_of

_DONE, _FAILED = 0, 1

# The share of what was loaded cached that must be in the page cache for it to be called that.
_CACHED = 0.99

_HELP = f"""\
The loaders: `ckptfs` is this package, owned (in memory of its own) and mapped; `mount` is safetensors reading
the file that a mount shows, which is made for this, owned (backend="pread") and mapped. The others, by their
words for --against: {", ".join(PEERS)}.

Cold: as root all caches of the machine are dropped before each load; as another user those of the files.
Cached: the files, and what the mount shows, are in the page cache.

Exit codes: 0 done, 1 failed, 2 usage, 3 refused checkpoint.
"""


def main(words):
    """Runs `ckptfs bench` with these words, and gives its exit code."""
    asked = _parser().parse_args(words)
    bar = Bar(vanishes=True)
    try:
        with signals.heeded(), contextlib.ExitStack() as ends:
            ends.callback(bar.end)
            # Before anything is measured: it may not be possible to write there.
            file = _new_page(asked.html, ends)
            found = measure(asked.path, asked.device, asked.runs, asked.against, bar)
            if file:
                file.write(html.page(found))
    except signals.Stopped as stopped:
        return stopped.die()
    except SafetensorError as refused:
        print(f"ckptfs: {refused}", *getattr(refused, "__notes__", []), sep="\n  ", file=sys.stderr)
        return getattr(refused, "code", _FAILED)
    except OSError as fault:
        print(f"ckptfs: {fault.filename or asked.path}: {fault.strerror}", file=sys.stderr)
        return _FAILED
    print(json.dumps(found, indent=2) if asked.json else "\n".join(report.table(found)))
    return _DONE


def _parser():
    parser = argparse.ArgumentParser(
        prog="ckptfs bench", epilog=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Tell how fast a checkpoint loads with ckptfs, through a mount, and with other libraries",
    )  # fmt: skip
    parser.add_argument("path", metavar="PATH", help="a checkpoint file, or a directory that holds one")
    parser.add_argument("--device", default="cpu", help="where the tensors go, such as cuda:0 (cpu)")
    parser.add_argument(
        "--against", type=_peers, metavar="NAME,...", help="what to compare with (all that is installed)"
    )
    parser.add_argument("--runs", type=_count, default=5, metavar="N", help="loads of each kind (5)")
    parser.add_argument("--json", action="store_true", help="print JSON, with the numbers of every load")
    parser.add_argument("--html", metavar="FILE", help="write a page with the table and charts, too")
    return parser


def _count(text):
    if not text.isdecimal() or not 0 < int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 1000")
    return int(text)


def _peers(text):
    names = [*dict.fromkeys(text.split(","))]
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PEERS)}")
    return names


def _new_page(path, ends):
    """The file that has its name when all is well at the end; nothing where none is asked for."""
    try:
        return path and ends.enter_context(atomic_file.replacing(path, waits=False))
    except OSError as fault:
        if fault.errno == errno.ENXIO and stat.S_ISFIFO(os.stat(path).st_mode):
            raise error(f"{path}: no program reads this pipe", "start its reader first, or name a regular file") from None
        raise error(f"{path}: cannot be written: {fault.strerror}", "see that its directory is there") from None


def measure(path, device="cpu", runs=5, against=None, bar=None):
    """What `--json` prints: see docs/formats.md for what is what."""
    if not is_installed("torch"):
        raise error("ckptfs bench loads with torch, which is not installed", "pip install torch")
    with signals.waits():
        about = json.loads(child_process.run("inspect", "--json", "--tensors", "--", path).out)
    files = [file["path"] for file in about["files"]]
    asked = {
        "path": path, "device": device, "names": [tensor["name"] for tensor in about["tensors"]],
        "files": [file for file in files if not file.endswith(".json")],
    }  # fmt: skip
    form = "safetensors" if about["format"] == "safetensors" else "torch"
    if path.endswith(".safetensors") and os.path.isfile(path):
        # Also the image of a pickle in a mount, which is what another library reads.
        asked["files"], form = [path], "safetensors"
    others, notes = chosen(against, form, device)
    with contextlib.ExitStack() as ends:
        daemon = daemon_of(asked["files"][0])
        # Others read the mount that is there already: another one would be of that.
        shown = None if daemon else _shown(path, about, notes, ends)
        loaders = [*OURS, *(MOUNTED if shown else []), *others]
        loads = ends.enter_context(schedule.Loads())
        case = schedule.Case(asked, shown, daemon)
        tick = _Steps(bar, len(loaders), runs)
        loaders, refused, called = schedule.checked(loads, case, loaders, tick)
        found = {
            "path": path, "format": about["format"], "device": device, "runs": runs,
            "bytes": sum(tensor["nbytes"] for tensor in about["tensors"]), "tensors": len(about["tensors"]),
            "files": about["files"], "loaders": loaders, "against": _reference(loaders),
            "cleared_by": None, "cold": None, "cached": None, "notes": notes + refused,
            "machine": machine(files[0]) | {"device": called},
        }  # fmt: skip
        if found["against"] is None:
            found["notes"].append("compared with nothing: no other library that was asked loads it")
        _measure_states(found, files, loads, case, tick)
        return found


def _shown(path, about, notes, ends):
    """The checkpoint in a mount of its own; nothing, and a note, where there can be none."""
    if not is_installed("safetensors"):
        notes.append("nothing was loaded through a mount: safetensors is not installed, which would read it")
        return None
    try:
        return ends.enter_context(Shown(path, about))
    except SafetensorError as refused:
        notes.append(f"nothing was loaded through a mount: {in_words(refused)}")
        return None


def _reference(loaders):
    """Which of those that load it the others are compared with."""
    others = [name for name in [*REFERENCES, *loaders] if name in loaders and name not in OURS + MOUNTED]
    return others[0] if others else None


def _measure_states(found, files, loads, case, tick):
    """Fills in what is found cold and cached."""

    def measured(state, clear=None):
        taken, failed = schedule.times(loads, case, found["loaders"], found["runs"], clear, tick)
        found["notes"] += failed
        found[state] = schedule.numbers(taken, found["bytes"], found["against"])

    def clear():
        how = page_cache.clear(files)
        try:
            found["cleared_by"] = page_cache.drop_all()
        except OSError:
            found["cleared_by"] = how

    try:
        with signals.waits():
            clear()
    except SafetensorError as told:
        found["notes"].append(f"nothing was loaded cold: {in_words(told)}")
    else:
        if found["cleared_by"].startswith("posix_fadvise"):
            found["notes"].append("cold is the page cache without these files: only root may drop all caches")
        measured("cold", clear)
    warmed = list(files)
    if case.shown:
        case.shown.renew()
        warmed.append(case.shown.image)
    with signals.waits():
        page_cache.warm(warmed)
        share = page_cache.cached(files)
    if share is not None and share < _CACHED:
        found["notes"].append(f"only {share:.0%} of the files stay in the page cache: there is no memory for more")
    measured("cached")


class _Steps:
    """Tells a bar how far it is, of comparing and of two states with all their rounds."""

    def __init__(self, bar, loaders, runs):
        self._bar, self._all, self._done = bar, loaders * (1 + 2 * runs), 0

    def __call__(self, words):
        if self._bar:
            self._bar.show(min(1, self._done / self._all), words)
        self._done += 1
