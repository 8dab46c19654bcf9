"""Loads of one checkpoint by several loaders: they are verified once, then measured in turn.

In: a `Case`, and a process of `process.WorkerProcess`. Out: the loaders that give equal tensors, and numbers.
"""

import statistics
from typing import Any, NamedTuple

from ckptfs.bench.loaders import MOUNTED, OURS
from ckptfs.errors import REMEDY_MARK, error


class Case(NamedTuple):
    """What is loaded. `request` goes to every loader. `mount` is the `mount.CheckpointMount` that some loaders read.
    `daemon` returns the processor seconds of the daemon of a mount that was there before."""

    request: dict
    mount: Any = None
    daemon: Any = None

    def request_for(self, loader, digests=False):
        """The request to one loader."""
        request = {**self.request, "loader": loader, "fork": True, "digests": digests}
        if loader in MOUNTED:
            request["path"] = self.mount.file
            request["files"] = [request["path"]]
        return request

    def daemon_for(self, loader):
        """The processor seconds of the daemon that this loader reads from, as a call; `None` without a daemon."""
        return self.mount.seconds if loader in MOUNTED else self.daemon


def take_turns(names, runs):
    """Yields pairs of a run and a name: every name once a run, in the orders of a Williams design. After as many runs as
    there are names, or twice as many if that is odd, each name was first equally often. So was each followed by each
    other one within a run: a load may free memory that makes the next one faster."""
    count = len(names)
    # 0, 1, -1, 2, -2 and so on. An odd number of names needs each order backwards, too.
    offsets = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(count)]
    # The first run has them in their own order.
    name_at = {offset % count: name for offset, name in zip(offsets, names)}
    for run in range(runs):
        shift, backwards = divmod(run, 2) if count % 2 else (run, 0)
        order = [name_at[(shift + offset) % count] for offset in offsets]
        yield from ((run, name) for name in (reversed(order) if backwards else order))


def verify(process, case, loaders, progress):
    """The loaders that load the checkpoint, notes on the others, and the device's name. Tensors that differ are an
    error."""
    notes, loaded, device = [], {}, None
    for loader in loaders:
        progress(f"comparing: {loader}")
        result = process.measure(case.request_for(loader, digests=True))
        if "fault" not in result:
            loaded[loader], device = result["tensors"], result["device"]
            notes += [f"{loader}: tensors {why}: {count:,}" for why, count in result["fallbacks"].items()]
        elif loader in OURS:
            raise _failed(case, loader, result, "load it without bench to see more")
        else:
            notes.append(f"{loader} does not load it: {result['fault']}")
    [first, expected], *others = loaded.items()
    for loader, tensors in others:
        if differing := sorted(name for name in {*expected, *tensors} if expected.get(name) != tensors.get(name)):
            message = f"{case.request['path']}: {first} and {loader} give different tensors: {differing[0]}"
            more = f", and {len(differing) - 1} more" * (len(differing) > 1)
            raise error(message + more, "see that nothing writes to it, and which files each of them reads")
    return [*loaded], notes, device


def load_once(process, case):
    """Loads the checkpoint with ckptfs, unmeasured."""
    loader = OURS[0]
    result = process.measure(case.request_for(loader))
    if "fault" in result:
        raise _failed(case, loader, result, "see that nothing changes it")


def measure(process, case, loaders, runs, clear, progress):
    """The results of each loader, and notes. With `clear`, which is called before each load, nothing is cached and
    daemons are new. A loader that fails is an error if it is ours, and else left out with a note."""
    results, notes, state = {loader: [] for loader in loaders}, [], "cold" if clear else "cached"
    for run, loader in take_turns(loaders, runs):
        progress(f"{state}: {loader}, {run + 1} of {runs}")
        if loader not in results:
            continue
        if clear and loader in MOUNTED:
            case.mount.renew()
        result = process.measure(case.request_for(loader), clear, case.daemon_for(loader))
        if "fault" not in result:
            results[loader].append(result)
        elif loader in OURS:
            raise _failed(case, loader, result, "see that nothing changes it")
        else:
            del results[loader]
            notes.append(f"{loader} failed, {state}, in round {run + 1}: {result['fault']}")
    return results, notes


def _failed(case, loader, result, remedy):
    fault, _, own_remedy = result["fault"].partition(REMEDY_MARK)
    return error(f"{case.request['path']}: {loader}: {fault.strip()}", own_remedy or remedy)


def summarize(results, size, against):
    """What is reported of each loader. A speed-up is the ratio of the medians, its spread that of single rounds."""
    seconds = {loader: [one["end"] - one["start"] for one in all] for loader, all in results.items()}
    medians = {loader: statistics.median(all) for loader, all in seconds.items()}
    reference, summaries = against in results, {}
    for loader, all in results.items():
        ratios = [theirs / ours for theirs, ours in zip(seconds.get(against, []), seconds[loader])]
        summaries[loader] = {
            "returned_seconds": [one["returned"] - one["start"] for one in all],
            "seconds": seconds[loader],
            "median_seconds": medians[loader],
            "gb_per_second": size / medians[loader] / 1e9,
            "cpu_seconds": [one["cpu"] for one in all],
            "daemon_cpu_seconds": [one["daemon"] for one in all] if all[0]["daemon"] is not None else None,
            "peak_bytes": [one["peak"] for one in all] if all[0]["peak"] is not None else None,
            "speedup": medians[against] / medians[loader] if reference else None,
            "speedup_least": min(ratios, default=None),
            "speedup_most": max(ratios, default=None),
        }
    return summaries
