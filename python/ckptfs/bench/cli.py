"""`ckptfs bench PATH|URL`: how fast a checkpoint loads here, with ckptfs and with other libraries.

The loaders are ckptfs itself, safetensors through a mount made for this, and the other libraries. They are measured
cold and cached (see `cache_states`), once all were seen to give equal tensors. Each load has a process of its own, and the
loaders take turns, so that none finds what another left behind.
"""

import contextlib
import errno
import json
import os
import re
import shlex
import stat
import sys
from typing import NamedTuple

from ckptfs import _ckptfs, child_process
from ckptfs.bench import html, machine, page_cache, report, schedule, signals
from ckptfs.bench.cache_states import LocalCacheState, StoreCacheState
from ckptfs.bench.loaders import MOUNTED, OURS, REFERENCES, is_installed, select
from ckptfs.bench.mount import CheckpointMount, daemon_of
from ckptfs.bench.process import WorkerProcess
from ckptfs.errors import REMEDY_MARK, SafetensorError, error, in_words, print_error
from ckptfs.progress import ProgressBar
from ckptfs.save import atomic_file
from ckptfs.settings import setting

_DONE, _FAILED = 0, 1

# An option for parsing a checkpoint, with its value.
_PARSE_OPTION = re.compile(r"(?<![\w-])--(?:allow-partial|follow-symlinks|root (?!KEY)(?:'[^']*'|[^\s;]+))")


class Options(NamedTuple):
    """The options of the command, which `src/cli/python_commands.rs` declares."""

    path: str
    device: str
    against: list | None
    runs: int
    cold: bool
    json: bool
    html: str | None
    quiet: bool


def main(options):
    """Runs `ckptfs bench` with these options, and returns its exit code."""
    bar = None if options.quiet else ProgressBar(vanishes=True)
    try:
        with signals.defer_signals(), contextlib.ExitStack() as ends:
            if bar:
                ends.callback(bar.end)
            # Before anything is measured: it may not be possible to write there.
            file = _new_page(options.html, ends)
            results = measure(options.path, options.device, options.runs, options.against, options.cold, bar)
            if file:
                file.write(html.page(results))
    except signals.SignalExit as stopped:
        return stopped.die()
    except SafetensorError as refused:
        remedy = "\n".join(getattr(refused, "__notes__", [])).removeprefix(REMEDY_MARK)
        remedy = _add_exports(remedy, options.path)
        return print_error(str(refused), remedy, getattr(refused, "code", _FAILED), options.json)
    except OSError as fault:
        return print_error(f"{fault.filename or options.path}: {fault.strerror}", "", _FAILED, options.json)
    print(json.dumps(results, indent=2) if options.json else "\n".join(report.lines(results)))
    return _DONE


def _add_exports(remedy, path):
    """Adds to a remedy, for each option that this command lacks, an export with the option."""
    path = shlex.quote(f"./{path}" if path.startswith("-") else path)
    clauses = remedy.split("; ")
    for place, clause in enumerate(clauses):
        option = _PARSE_OPTION.search(clause)
        if option and "ckptfs " not in clause:
            export = f"ckptfs export {option[0]} {path} exported.safetensors && ckptfs bench exported.safetensors"
            clauses[place] = f"{clause}: {export}"
    return "; ".join(clauses)


def _new_page(path, ends):
    """The file that takes its name when all has gone well; `None` without a path."""
    try:
        return path and ends.enter_context(atomic_file.replacing(path, waits=False))
    except OSError as fault:
        if fault.errno == errno.ENXIO and stat.S_ISFIFO(os.stat(path).st_mode):
            remedy = "start its reader first, or name a regular file"
            raise error(f"{path}: no program reads this pipe", remedy) from None
        raise error(f"{path}: cannot be written: {fault.strerror}", "check that its directory exists") from None


def measure(path, device="cpu", runs=5, against=None, drops_all=False, bar=None):
    """The results that `--json` prints: docs/formats.md describes them. With `drops_all`, all caches of the machine are
    dropped before each cold load."""
    if drops_all and (why := page_cache.obstacle()):
        remedy = "run it as root, or leave --cold out: then only the files of the checkpoint are evicted"
        raise error(f"--cold drops all caches of the machine, which is not allowed here: {why}", remedy)
    is_in_store = _ckptfs.is_source_url(path)
    if is_in_store and setting("offline"):
        raise error("bench loads from the store, and CKPTFS_OFFLINE=1 forbids requests", "unset CKPTFS_OFFLINE")
    with signals.interruptible():
        about = json.loads(child_process.run("inspect", "--json", "--tensors", "--", path, is_command=True).text)
    # A wrong path is reported first: installing torch would not help.
    if not is_installed("torch"):
        raise error("ckptfs bench loads with torch, which is not installed", "pip install torch")
    files = [file["path"] for file in about["files"]]
    request = {
        "path": path, "device": device, "names": [tensor["name"] for tensor in about["tensors"]],
        "files": [file for file in files if not file.endswith(".json")],
    }  # fmt: skip
    form = "safetensors" if about["format"] == "safetensors" else "torch"
    if path.endswith(".safetensors") and os.path.isfile(path):
        # Also the virtual file of a pickle in a mount, which is what another library reads.
        request["files"], form = [path], "safetensors"
    others, notes = select(against, form, device, path.partition(":")[0].lower() if is_in_store else None)
    with contextlib.ExitStack() as ends:
        daemon = daemon_of(request["files"][0])
        # In a mount of ours the others read that mount, and no other is made.
        mount = None if daemon else _mounted(path, about, notes, ends)
        loaders = [*OURS, *(MOUNTED if mount else []), *others]
        process = ends.enter_context(WorkerProcess())
        case = schedule.Case(request, mount, daemon)
        progress = _Progress(bar, len(loaders), runs)
        loaders, refused, device_name = schedule.verify(process, case, loaders, progress)
        results = {
            "path": path, "format": about["format"], "device": device, "runs": runs,
            "bytes": sum(tensor["nbytes"] for tensor in about["tensors"]), "tensors": len(about["tensors"]),
            "files": about["files"], "loaders": loaders, "against": _reference(loaders),
            "summary": None, "cleared_by": None, "cold": None, "cached": None, "notes": notes + refused,
            "machine": machine.describe(files[0]) | {"device": device_name},
        }  # fmt: skip
        if results["against"] is None:
            results["notes"].append("compared with nothing: none of the requested libraries loads it")
        if is_in_store:
            cached_loaders = OURS + MOUNTED
            cache_state = StoreCacheState(
                about["files"], results["bytes"], lambda: schedule.load_once(process, case), drops_all
            )
            if {*loaders} - {*cached_loaders}:
                results["notes"].append("other libraries fetch from the store each time, and are not measured cached")
        else:
            cache_state, cached_loaders = LocalCacheState(files, drops_all), loaders
        _measure_states(results, cache_state, cached_loaders, process, case, progress)
        results["summary"] = report.summary(results)
        return results


def _mounted(path, about, notes, ends):
    """The checkpoint in a mount of its own; `None`, and a note, where there can be none."""
    if not is_installed("safetensors"):
        notes.append("nothing was loaded through a mount: that needs safetensors, which is not installed")
        return None
    try:
        return ends.enter_context(CheckpointMount(path, about))
    except SafetensorError as refused:
        notes.append(f"nothing was loaded through a mount: {in_words(refused)}")
        return None


def _reference(loaders):
    """The loader that the others are compared with; `None` if no other library loads the checkpoint."""
    others = [name for name in [*REFERENCES, *loaders] if name in loaders and name not in OURS + MOUNTED]
    return others[0] if others else None


def _measure_states(results, cache_state, cached_loaders, process, case, progress):
    """Adds what is measured cold and cached."""

    def measured(state, loaders, clear=None):
        taken, failed = schedule.measure(process, case, loaders, results["runs"], clear, progress)
        results["notes"] += failed
        results[state] = schedule.summarize(taken, results["bytes"], results["against"])

    def clear():
        results["cleared_by"] = cache_state.clear()

    try:
        with signals.interruptible():
            clear()
    except SafetensorError as refused:
        results["notes"].append(f"nothing was loaded cold: {in_words(refused)}")
    else:
        measured("cold", results["loaders"], clear)
    if case.mount:
        case.mount.renew()
    try:
        with signals.interruptible():
            results["notes"] += cache_state.fill([case.mount.file] if case.mount else [])
    except SafetensorError as refused:
        results["notes"].append(f"nothing was loaded cached: {in_words(refused)}")
    else:
        measured("cached", [loader for loader in results["loaders"] if loader in cached_loaders])


class _Progress:
    """Shows on a bar how many of the loads are done: those that are compared, and two states of all rounds."""

    def __init__(self, bar, loaders, runs):
        self._bar, self._all, self._done = bar, loaders * (1 + 2 * runs), 0

    def __call__(self, words):
        if self._bar:
            self._bar.show(min(1, self._done / self._all), words)
        self._done += 1
