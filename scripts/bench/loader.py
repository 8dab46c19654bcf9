"""The loader beside what people load with today, in one run: each in a process of its own, in turn, on the same
files; cold, and with all of them in the page cache. Measures seconds, seconds of processor, and the memory at the peak
above what the imports took, as a share of the model. Needs root.

    bench.loader              measures everything
    bench.loader opening      measures opening alone

In: RUNS, and CKPTFS_SAFETENSORS_NEXT, a folder with another version of safetensors. Out: `loader.json` and
`opening.json`, and their tables.
"""

import os
import sys

from bench import workloads as ways
from bench.fixtures import write_shards
from bench.machine import machine
from bench.models import apart
from bench.results import Results

STATES = ("cold", "cached")

# Of the other version of safetensors.
NEXT = "safetensors 0.9rc1"

OWNED = {
    "ckptfs, `backend=\"pread\"`": ways.ckptfs_owned,
    "ckptfs, `into=` new tensors": ways.ckptfs_into,
    "safetensors 0.8, `backend=\"pread\"`": ways.safetensors_owned,
    "safetensors 0.8 and `clone()`": ways.safetensors_cloned,
    f"{NEXT}, `backend=\"pread\"`": ways.safetensors_owned,
    "fastsafetensors, views of its buffer": ways.fastsafetensors_buffer,
    "runai-model-streamer, views of its buffer": ways.runai_buffer,
}
OWNED_BIN = {"ckptfs, `backend=\"pread\"`": ways.ckptfs_owned, "`torch.load`": ways.torch_load}
MAPPED = {
    "ckptfs, `backend=\"mmap\"`": ways.ckptfs_mapped,
    "safetensors 0.8": ways.safetensors_mapped,
    NEXT: ways.safetensors_mapped,
}
MAPPED_BIN = {"ckptfs, `backend=\"mmap\"`": ways.ckptfs_mapped, "`torch.load(mmap=True)`": ways.torch_load_mapped}
OPENED = {"ckptfs": ways.ckptfs_opened, "safetensors": ways.safetensors_opened}


def environment(name):
    if not name.startswith(NEXT):
        return None
    return os.environ | {"PYTHONPATH": f"{os.environ['CKPTFS_SAFETENSORS_NEXT']}:{os.environ['PYTHONPATH']}"}


def loaders(machine, way, those, tiny, model, prepare):
    """Each of those loaders' loads of the model, as `Machine.compared` wants them."""
    def load(name):
        return lambda: machine.apart((way, those[name]), tiny, model, prepare=prepare, env=environment(name))

    return {name: load(name) for name in those}


def compare(results, machine, table, those, tiny, model):
    """All of them in turn, several times. Before that what they load is compared."""
    prepares = {"cold": machine.cold, "cached": lambda: machine.warm(model)}
    size = sum(file.stat().st_size for file in model.iterdir())
    machine.compared(loaders(machine, ways.checking, those, None, model, lambda: None), 1)
    for state in STATES:
        runs = machine.compared(loaders(machine, ways.touching, those, tiny, model, prepares[state]))
        for name in those:
            shares = [{**run[name], "peak": run[name]["peak"] / size} for run in runs]
            results.add(table, [name, state], shares)


def measure_loading(machine):
    results = Results("loader")
    model, tiny, pickled, tiny_pickled = (machine.folder / name for name in ("model", "tiny", "bin", "tiny-bin"))
    write_shards(model, 4, 50, 5 << 20)
    write_shards(tiny, 2, 2, 1 << 10)
    apart("bin", model, pickled)
    apart("bin", tiny, tiny_pickled)
    compare(results, machine, "owned", OWNED, tiny, model)
    compare(results, machine, "owned-bin", OWNED_BIN, tiny_pickled, pickled)
    compare(results, machine, "mapped", MAPPED, tiny, model)
    compare(results, machine, "mapped-bin", MAPPED_BIN, tiny_pickled, pickled)


def measure_opening(machine):
    results = Results("opening")
    many, tiny = machine.folder / "many", machine.folder / "few"
    write_shards(many, 160, 625, 32)
    write_shards(tiny, 2, 2, 32)
    for state in STATES:
        prepare = machine.cold if state == "cold" else lambda: machine.warm(many)

        def load(name):
            return lambda: machine.apart((OPENED[name],), tiny, many, prepare=prepare)

        runs = machine.compared({name: load(name) for name in OPENED})
        for name in OPENED:
            results.add("opening", [name, state], [run[name] for run in runs])


def main(words):
    with machine() as measuring:
        if words != ["opening"]:
            measure_loading(measuring)
        measure_opening(measuring)


if __name__ == "__main__":
    main(sys.argv[1:])
