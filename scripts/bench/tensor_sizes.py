"""Models whose tensors are of other sizes than most: a few huge ones, and very many small ones. Each loader, and the
mount, beside safetensors on the plain filesystem, in turn, each load in a process of its own; every page touched. Needs
root.

In: RUNS, CKPTFS. Out: `tensor-sizes.json`, and its tables.
"""

import shutil

from bench import workloads as ways
from bench.fixtures import write_shards
from bench.machine import machine
from bench.results import Results

# Shards, tensors of each, elements of two bytes of each of those.
SHAPES = {"few-huge": (2, 2, 256 << 20), "many-small": (4, 25_000, 8 << 10)}


def loads(machine, tiny, model, prepare):
    def load(loader, path=model, **how):
        return lambda: machine.apart((ways.touching, loader), tiny, path, prepare=prepare, **how)

    return {
        "safetensors, mapped": load(ways.safetensors_mapped),
        "the same through the mount, of one file": load(ways.safetensors_mapped, machine.image, source=model),
        "ckptfs, mapped": load(ways.ckptfs_mapped),
        "safetensors, owned": load(ways.safetensors_owned),
        "ckptfs, owned": load(ways.ckptfs_owned),
    }


def main():
    results = Results("tensor-sizes")
    with machine() as measuring:
        tiny, model = measuring.folder / "tiny", measuring.folder / "model"
        write_shards(tiny, 1, 2, 1 << 10)
        for table, shape in SHAPES.items():
            write_shards(model, *shape)
            for state in ("cold", "cached"):
                prepare = measuring.cold if state == "cold" else lambda: measuring.warm(model)
                runs = measuring.compared(loads(measuring, tiny, model, prepare))
                for name in runs[0]:
                    results.add(table, [name, state], [run[name] for run in runs])
            shutil.rmtree(model)


if __name__ == "__main__":
    main()
