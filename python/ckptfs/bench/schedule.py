"""Loads for a benchmark, one after the other: who is asked, in which order, and what they told.

In: a `Case`: a checkpoint, its files, where a mount shows it. Out: which loaders gave equal tensors, and
numbers.
"""

import statistics
import subprocess
import tempfile
from multiprocessing import Pipe
from typing import Any, NamedTuple

from ckptfs import child_process
from ckptfs.bench import signals
from ckptfs.bench.loaders import MOUNTED, OURS
from ckptfs._errors import error


class Case(NamedTuple):
    """What is loaded: what is asked of every loader; the mount that was made for those that read it, if there
    is one; and what tells the seconds of the daemon of a mount that was there before."""

    asked: dict
    shown: Any = None
    daemon: Any = None

    def of(self, loader, **more):
        asked = {**self.asked, "loader": loader, "tell": False, **more}
        if loader in MOUNTED:
            asked["path"] = self.shown.image
            asked["files"] = [asked["path"]]
        return asked

    def daemon_of(self, loader):
        """What tells the seconds of the daemon that this loader reads from, if there is one."""
        return self.shown.seconds if loader in MOUNTED else self.daemon


class Loads:
    """The process whose forks load; `with Loads() as loads:`."""

    def __enter__(self):
        start, environment = child_process.python()
        self._said = tempfile.TemporaryFile()
        self._to, theirs = Pipe()
        with theirs:
            # In a session of its own: a Ctrl-C is for who waits, and ends this by ending that.
            self._running = subprocess.Popen(
                [*start, "-m", "ckptfs.bench.worker", str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said, env=environment,
                start_new_session=True,
            )  # fmt: skip
        return self

    def __exit__(self, *_):
        self._running.kill()
        self._running.wait()
        self._to.close()
        self._said.close()

    def one(self, asked, before=None, daemon=None):
        """What one load told. `before` is called when all is imported; `daemon` tells the seconds of the
        processors that a daemon has used."""
        try:
            with signals.waits():
                self._to.send(asked)
                told = self._to.recv()
                if "ready" not in told:
                    return told
                if before:
                    before()
            used = daemon and daemon()
            with signals.waits():
                self._to.send("go")
                told = self._to.recv()
        except (EOFError, OSError) as fault:
            if isinstance(fault, OSError) and fault.filename:
                raise
            return {"fault": self._last_words()}
        after = daemon and daemon()
        told["daemon"] = after - used if used is not None and after is not None else None
        return told

    def _last_words(self):
        code = self._running.wait()
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else f"its process ended with {code}"


def checked(loads, case, loaders, tick):
    """Those of the loaders that load it, notes on the others, and the name of the device; a difference is an
    error."""
    notes, told, device = [], {}, None
    for loader in loaders:
        tick(f"comparing: {loader}")
        answer = loads.one(case.of(loader, tell=True))
        if "fault" not in answer:
            told[loader], device = answer["tensors"], answer["device"]
            notes += [f"{loader}: tensors {why}: {count:,}" for why, count in answer["fallbacks"].items()]
        elif loader in OURS:
            raise _failed(case, loader, answer, "load it without bench to see more")
        else:
            notes.append(f"{loader} does not load it: {answer['fault']}")
    [first, expected], *others = told.items()
    for loader, tensors in others:
        differing = sorted(name for name in {*expected, *tensors} if expected.get(name) != tensors.get(name))
        if differing:
            message = f"{case.asked['path']}: {first} and {loader} give different tensors: {differing[0]}"
            more = f", and {len(differing) - 1} more" * (len(differing) > 1)
            raise error(message + more, "see that nothing writes to it, and which files each of them reads")
    return [*told], notes, device


def times(loads, case, loaders, runs, clear, tick):
    """What each loader told, each round begun by another. With `clear` all of it is cold: nothing is cached,
    and daemons are new. Who fails now is an error if it is ours, and else is left out, with a note."""
    taken, notes = {loader: [] for loader in loaders}, []
    for run in range(runs):
        turn = run % len(loaders)
        for loader in loaders[turn:] + loaders[:turn]:
            tick(f"{'cold' if clear else 'cached'}: {loader}, {run + 1} of {runs}")
            if loader not in taken:
                continue
            if clear and loader in MOUNTED:
                case.shown.renew()
            answer = loads.one(case.of(loader), clear, case.daemon_of(loader))
            if "fault" not in answer:
                taken[loader].append(answer)
            elif loader in OURS:
                raise _failed(case, loader, answer, "see that nothing changes it")
            else:
                del taken[loader]
                state = "cold" if clear else "cached"
                notes.append(f"{loader} failed, {state}, in round {run + 1}: {answer['fault']}")
    return taken, notes


def _failed(case, loader, answer, remedy):
    return error(f"{case.asked['path']}: {loader}: {answer['fault']}", remedy)


def numbers(taken, size, against):
    """What is reported of each loader. A speed-up is of the medians, and its spread of the rounds."""
    middle = {loader: statistics.median(one["had"] for one in all) for loader, all in taken.items()}
    reference = taken.get(against)
    found = {}
    for loader, all in taken.items():
        ratios = [theirs["had"] / one["had"] for theirs, one in zip(reference or [], all)]
        found[loader] = {
            "returned_seconds": [one["returned"] for one in all],
            "seconds": [one["had"] for one in all],
            "median_seconds": middle[loader],
            "gb_per_second": size / middle[loader] / 1e9,
            "cpu_seconds": [one["cpu"] for one in all],
            "daemon_cpu_seconds": [one["daemon"] for one in all] if all[0]["daemon"] is not None else None,
            "peak_bytes": [one["peak"] for one in all] if all[0]["peak"] is not None else None,
            "speedup": middle[against] / middle[loader] if reference else None,
            "speedup_least": min(ratios, default=None),
            "speedup_most": max(ratios, default=None),
        }
    return found
