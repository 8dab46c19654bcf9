"""`ckptfs bench FILE`: how fast ckptfs loads a checkpoint here, beside the library that it was written for.

In: a checkpoint. Out: a table, or JSON, of what each loader took with a cold and with a filled page cache,
after all of them were seen to give equal tensors. Each load is in a process of its own, and the loaders
take turns, so that none has what another left behind.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys

from ckptfs import _page_cache, _process
from ckptfs._errors import SafetensorError, error, in_words

_DONE, _FAILED = 0, 1

_OURS = ["ckptfs owned", "ckptfs mapped"]


def main(words):
    """Runs `ckptfs bench` with these words, and gives its exit code."""
    asked = _parser().parse_args(words)
    try:
        found = measure(asked.file, asked.device, asked.runs)
    except SafetensorError as refused:
        print(f"ckptfs: {refused}", *getattr(refused, "__notes__", []), sep="\n  ", file=sys.stderr)
        return getattr(refused, "code", _FAILED)
    print(json.dumps(found, indent=2) if asked.json else "\n".join(_table(found)))
    return _DONE


def _parser():
    parser = argparse.ArgumentParser(
        prog="ckptfs bench",
        description="Tell how fast a checkpoint loads with ckptfs, and with safetensors or torch.load",
    )
    parser.add_argument("file", metavar="FILE", help="a checkpoint file, or a directory that holds one")
    parser.add_argument("--device", default="cpu", help="where the tensors go, such as cuda:0")
    parser.add_argument("--runs", type=_count, default=5, metavar="N", help="loads of each kind (5)")
    parser.add_argument("--json", action="store_true", help="print JSON, with the time of every load")
    return parser


def _count(text):
    if not text.isdecimal() or not 0 < int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 1000")
    return int(text)


def measure(path, device="cpu", runs=5):
    """What `--json` prints: see `_table` for what is what."""
    if importlib.util.find_spec("torch") is None:
        raise error("ckptfs bench loads with torch, which is not installed", "pip install torch")
    about = json.loads(_process.run("inspect", "--json", "--tensors", path).out)
    files = [file["path"] for file in about["files"]]
    asked = {
        "path": path, "device": device, "names": [tensor["name"] for tensor in about["tensors"]],
        "files": [file for file in files if not file.endswith(".json")], "tell": False,
    }  # fmt: skip
    if path.endswith(".safetensors") and os.path.isfile(path):
        # Also the image of a pickle in a mount, which is what another library reads.
        asked["files"], against = [path], "safetensors"
    else:
        against = "safetensors" if about["format"] == "safetensors" else "torch.load"
    against, notes = _checked(asked, against)
    loaders = [*_OURS, against] if against else _OURS
    size = sum(tensor["nbytes"] for tensor in about["tensors"])
    found = {
        "path": path, "format": about["format"], "device": device, "runs": runs, "bytes": size,
        "tensors": len(about["tensors"]), "files": about["files"], "against": against, "cleared_by": None,
        "cold": None, "cached": None, "notes": notes,
    }  # fmt: skip

    def clear():
        found["cleared_by"] = _page_cache.clear(files)

    try:
        clear()
    except SafetensorError as refused:
        notes.append(f"nothing was loaded cold: {in_words(refused)}")
    else:
        found["cold"] = _numbers(_times(asked, loaders, runs, clear), size, against)
    _page_cache.warm(files)
    found["cached"] = _numbers(_times(asked, loaders, runs, lambda: None), size, against)
    return found


def _checked(asked, against):
    """Which other loader there is to compare with, and why none; a difference is an error."""
    notes, told = [], {}
    if against == "safetensors" and importlib.util.find_spec("safetensors") is None:
        against, notes = None, ["compared with nothing: safetensors is not installed"]
    for loader in [*_OURS, against] if against else _OURS:
        answer = _one({**asked, "tell": True}, loader)
        if "fault" not in answer:
            told[loader] = answer["tensors"]
        elif loader in _OURS:
            raise error(f"{asked['path']}: {loader}: {answer['fault']}", "load it without bench to see more")
        else:
            against, notes = None, [f"compared with nothing: {loader} does not load it: {answer['fault']}"]
    [first, expected], *others = told.items()
    for loader, tensors in others:
        differing = sorted(name for name in {*expected, *tensors} if expected.get(name) != tensors.get(name))
        if differing:
            message = f"{asked['path']}: {first} and {loader} give different tensors: {differing[0]}"
            more = f", and {len(differing) - 1} more" * (len(differing) > 1)
            raise error(message + more, "see that nothing writes to it, and which files each of them reads")
    return against, notes


def _times(asked, loaders, runs, before):
    times = {loader: [] for loader in loaders}
    for run in range(runs):
        turn = run % len(loaders)
        for loader in loaders[turn:] + loaders[:turn]:
            before()
            answer = _one(asked, loader)
            if "fault" in answer:
                raise error(f"{asked['path']}: {loader}: {answer['fault']}", "see that nothing changes it")
            times[loader].append(answer)
    return times


def _one(asked, loader):
    """What a process of its own tells of one load."""
    start, environment = _process.python()
    done = subprocess.run(
        [*start, "-m", "ckptfs._bench_one"], input=json.dumps({**asked, "loader": loader}).encode(),
        capture_output=True, env=environment,
    )  # fmt: skip
    try:
        return json.loads(done.stdout)
    except ValueError:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return {"fault": said[-1] if said else f"its process ended with {done.returncode}"}


def _numbers(times, size, against):
    middle = {loader: statistics.median(one["had"] for one in all) for loader, all in times.items()}
    return {
        loader: {
            "returned_seconds": [one["returned"] for one in all],
            "seconds": [one["had"] for one in all],
            "median_seconds": middle[loader],
            "mb_per_second": size / middle[loader] / 1e6,
            "speedup": middle[against] / middle[loader] if against else None,
        }
        for loader, all in times.items()
    }


def _table(found):
    count = f"{found['tensors']:,} tensors, {found['bytes'] / 1e6:,.1f} MB"
    yield f"{found['path']} ({found['format']}): {count}, to {found['device']}, median of {found['runs']}"
    loaders = ", ".join(found["cached"])
    yield f"{loaders}: gave equal tensors"
    for state, words in (("cold", f"cold, by {found['cleared_by']}"), ("cached", "in the page cache")):
        if found[state] is None:
            continue
        against = f"  speed-up against {found['against']}" if found["against"] else ""
        yield f"\n{words:<32}  {'returned':>10}  {'all there':>10}  {'MB/s':>10}{against}"
        for loader, numbers in found[state].items():
            returned = statistics.median(numbers["returned_seconds"])
            line = f"  {loader:<30}  {returned:>8.4f} s  {numbers['median_seconds']:>8.4f} s"
            line += f"  {numbers['mb_per_second']:>10,.0f}"
            yield line + (f"  {numbers['speedup']:.2f}x" if found["against"] else "")
    yield from (f"\nnote: {note}" for note in found["notes"])
