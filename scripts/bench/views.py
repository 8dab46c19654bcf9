"""Measures what a view costs: casts, renames and slices, each beside the same files without it, or what it replaces.

Arguments name the cases to measure. SIZE is the part of the model to try it out with.
"""

import json
import mmap
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from bench import REPOSITORY, workloads
from bench.fixtures import RUNS, alternate, first_byte
from bench.machine import VIRTUAL_FILE, load, machine
from bench.memory_ballast import Ballast
from bench.models import in_process, llama, many_tensors
from bench.results import Results
from bench.targets import SIZE, count_disk_bytes

FROM_PRETRAINED = load(f"{workloads.__name__}:from_pretrained")

# Bytes of one direct read.
READ_BYTES = 2 << 20

# Cold reads in order differ more from run to run than a rename costs, and loads more than their target allows.
RENAME_RUNS = 2 * RUNS
LOAD_RUNS = 3 * RUNS


class Bench:
    """The machine, and a folder of models with a recipe for each case."""

    def __init__(self, machine):
        self.machine = machine
        self.models = machine.folder / "models"
        self.tiny = machine.folder / "tiny"

    def make_llama(self):
        if not self.tiny.exists():
            in_process(llama, folder=self.models / "llama", size=SIZE, dtype="float32")
            in_process(llama, folder=self.tiny, size=0, dtype="float32")

    def mounted(self, steps=None, name="llama", **more):
        """A mount of the models. With steps, the folder `view` shows the model `name` with them."""
        if steps is None:
            return self.machine.mounted(self.models)
        recipe = self.machine.folder / "views.toml"
        file = {"path": f"view/{VIRTUAL_FILE}", "from": [name], **steps, **more}
        lines = [f"{key} = {toml(value)}\n" for key, value in file.items()]
        recipe.write_text("[[file]]\n" + "".join(lines))
        return self.machine.mounted(self.models, views=recipe)

    @property
    def view(self):
        return self.machine.point / "view" / VIRTUAL_FILE


def toml(value):
    """A value as TOML on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + " }"
    return f"[{', '.join(map(toml, value))}]" if isinstance(value, list) else json.dumps(value)


def measure_casts(bench):
    command = ["cargo", "bench", "--quiet", "--locked", "--features", "remote", "--bench", "casts"]
    env = {**os.environ, "RUNS": str(3 * RUNS)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=env)
    for label, seconds in json.loads(done.stdout).items():
        pairs = zip(seconds["cast"], seconds["memcpy"], strict=True)
        yield "views-casts", label, [{"cast": cast, "memcpy": memcpy} for cast, memcpy in pairs]


def measure_from_pretrained(bench):
    """The model in bf16, from the view and from the files themselves, and the disk alone."""
    bench.make_llama()
    machine = bench.machine
    to_bf16 = {"cast": [{"tensors": "*", "to": "bfloat16"}]}

    def through_view():
        worker = machine.worker(FROM_PRETRAINED, bench.view.parent, bench.tiny)
        machine.cold()
        with bench.mounted(to_bf16, beside=["config.json"], config={"dtype": "bfloat16"}) as daemon:
            (result,) = machine.measure([worker])
            peak = daemon.peak
        machine.cold()
        disk = read_directly(bench.models / "llama")
        return {**took(result), "daemon": peak, "disk": disk}, result["number"]

    def from_files():
        worker = machine.worker(FROM_PRETRAINED, bench.models / "llama", bench.tiny)
        machine.cold()
        (result,) = machine.measure([worker])
        return took(result), result["number"]

    def took(result):
        return {"seconds": result["end"] - result["start"], "cpu": result["cpu"], "peak": result["peak"]}

    runs = machine.compare({"view": through_view, "files": from_files}, LOAD_RUNS)
    yield "views-loads", "`from_pretrained`, cold", [
        {**run["view"], **{f"other {key}": value for key, value in run["files"].items()}} for run in runs
    ]  # fmt: skip


def read_directly(folder):
    """Returns the seconds that four threads take to read the model past the page cache."""
    paths = sorted(folder.glob("*.safetensors"))
    sizes = [path.stat().st_size for path in paths]
    files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
    reads = [(file, at) for file, size in zip(files, sizes, strict=True) for at in range(0, size, READ_BYTES)]
    threads = threading.local()

    def read(file, at):
        if not hasattr(threads, "memory"):
            # Of whole pages, as direct reads need it.
            threads.memory = mmap.mmap(-1, READ_BYTES)
        return os.preadv(file, [threads.memory], at)

    start = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        total = sum(pool.map(lambda one: read(*one), reads))
    seconds = time.perf_counter() - start
    for file in files:
        os.close(file)
    assert total == sum(sizes), "some bytes were not read"
    return seconds


def measure_renames(bench):
    """The model read in order, by its own names and by others."""
    bench.make_llama()
    machine = bench.machine
    steps = {"rename": [{"match": r"^model\.", "to": "transformer."}]}

    def read(side):
        machine.cold()
        path = bench.view if side == "view" else machine.point / "llama" / VIRTUAL_FILE
        with bench.mounted(steps if side == "view" else None) as daemon:
            # To find and parse the files is not measured.
            first_byte(path)
            machine.ready()
            before = daemon.cpu
            return {"seconds": read_in_order(path), "cpu": daemon.cpu - before}

    runs = alternate(["view", "plain"], read, RENAME_RUNS)
    for label, key in (("time", "seconds"), ("the daemon's processor time", "cpu")):
        yield "views-renames", label, [{side: run[side][key] for side in run} for run in runs]


def read_in_order(path):
    """Seconds that `cat` takes."""
    start = time.perf_counter()
    subprocess.run(["cat", path], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def measure_slices(bench):
    """Bytes that are read from the disk for a view of an eighth of the model."""
    bench.make_llama()
    machine, runs = bench.machine, []
    for _ in range(RUNS):
        machine.cold()
        with bench.mounted({"slice": [{"tensors": "*", "dim": 0, "part": "1/8"}]}):
            size = bench.view.stat().st_size
            before = count_disk_bytes(bench.models)
            read_in_order(bench.view)
            runs.append({"read": count_disk_bytes(bench.models) - before, "view": size})
    whole = sum(path.stat().st_size for path in (bench.models / "llama").glob("*.safetensors"))
    assert abs(runs[0]["view"] * 8 / whole - 1) < 0.01, "no eighth of the model"
    yield "views-slices", "1/8 of each tensor along its first axis", runs


def measure_names(bench):
    """The time to mount many tensors and read the first byte, with all of them renamed, and by their own names."""
    machine, many = bench.machine, bench.models / "many"
    in_process(many_tensors, folder=many)
    steps = {"rename": [{"match": r"^model\.language_model\.(.*)$", "to": "$1"}]}

    def wait(side):
        machine.warm(many)
        path = bench.view if side == "view" else machine.point / "many" / VIRTUAL_FILE
        with bench.mounted(steps if side == "view" else None, "many") as daemon:
            machine.ready()
            # A mount with a recipe has opened its files before it returns.
            return daemon.seconds + first_byte(path)

    yield "views-names", "100,000 tensors in 160 shards", alternate(["view", "plain"], wait)


CASES = {
    "casts": measure_casts,
    "from_pretrained": measure_from_pretrained,
    "renames": measure_renames,
    "slices": measure_slices,
    "names": measure_names,
}


def main(*names):
    if unknown := [name for name in names if name not in CASES]:
        raise SystemExit(f"no case {unknown[0]!r}; there are: {', '.join(CASES)}")
    results = Results("views", names)
    with machine(has_ballast=False) as measuring:
        bench = Bench(measuring)
        for name in [name for name in CASES if name in names or not names]:
            with measuring.with_ballast(Ballast()):
                for table, label, runs in CASES[name](bench):
                    results.add(table, [label], runs)
            # Users have no ballast.
            if name == "from_pretrained":
                for table, label, runs in CASES[name](bench):
                    results.add(table, [f"{label}, without ballast"], runs)
