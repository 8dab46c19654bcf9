"""Models whose tensors are of other sizes than most: a few huge ones, and very many small ones. Each loader, and the
mount, beside safetensors on the plain filesystem."""

import shutil

from bench.fixtures import uniform, write_model
from bench.machine import load, machine
from bench.results import Results

# The shards of a model, the tensors of each shard, and the elements of two bytes of each tensor.
COUNTS = {"few-huge": (2, 2, 256 << 20), "many-small": (4, 25_000, 8 << 10)}


def loads(machine, tiny, model, prepare):
    def run(loader, path=model, **options):
        return lambda: machine.run(load(loader), path, tiny, prepare=prepare, **options)

    return {
        "safetensors, mapped": run("safetensors"),
        "the same through the mount, of one file": run("safetensors", machine.virtual_file, source=model),
        "ckptfs, mapped": run("ckptfs mapped"),
        "safetensors, owned": run("safetensors owned"),
        "ckptfs, owned": run("ckptfs owned"),
    }


def main():
    results = Results("tensor-sizes")
    with machine(has_ballast=False) as measuring:
        tiny, model = measuring.folder / "tiny", measuring.folder / "model"
        write_model(tiny, uniform(1, 2, 1 << 10))
        for table, counts in COUNTS.items():
            write_model(model, uniform(*counts))
            for state, prepare in measuring.states(model):
                runs = measuring.compare_with_and_without_ballast(loads(measuring, tiny, model, prepare))
                results.add_all(table, state, runs)
            shutil.rmtree(model)
