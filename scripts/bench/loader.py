"""The loader beside what people load with today: the same files, cold and with all of them in the page cache. Peak
memory is that above the imports, as a share of the model. CKPTFS_SAFETENSORS_NEXT names a folder with another version
of safetensors."""

import os

from bench.fixtures import uniform, write_model
from bench.machine import load, machine
from bench.models import in_process, as_bin
from bench.results import Results

# Of the other version of safetensors.
NEXT = "safetensors 0.9rc1"

OWNED = {
    "ckptfs, `backend=\"pread\"`": "ckptfs owned",
    "ckptfs, `into=` new tensors": "ckptfs into",
    "safetensors 0.8, `backend=\"pread\"`": "safetensors owned",
    "safetensors 0.8 and `clone()`": "safetensors cloned",
    f"{NEXT}, `backend=\"pread\"`": "safetensors owned",
    "fastsafetensors, views of its buffer": "fastsafetensors",
    "runai-model-streamer, views of its buffer": "runai",
}
OWNED_BIN = {"ckptfs, `backend=\"pread\"`": "ckptfs owned", "`torch.load`": "torch.load"}
MAPPED = {"ckptfs, `backend=\"mmap\"`": "ckptfs mapped", "safetensors 0.8": "safetensors", NEXT: "safetensors"}
MAPPED_BIN = {"ckptfs, `backend=\"mmap\"`": "ckptfs mapped", "`torch.load(mmap=True)`": "torch.load mapped"}


def paths(name):
    """Where a process finds another version of safetensors first."""
    return [os.environ["CKPTFS_SAFETENSORS_NEXT"]] if name.startswith(NEXT) else []


def compare(results, machine, table, loaders, tiny, model):
    """Measures all of these loaders in turn, several times. Before that what they load is compared."""
    def loads(prepare, warm_up, **options):
        return {
            name: lambda name=name: machine.run(
                {**load(loaders[name]), **options}, model, warm_up, prepare=prepare, paths=paths(name)
            )
            for name in loaders
        }  # fmt: skip

    size = sum(file.stat().st_size for file in model.iterdir())
    machine.compare(loads(lambda: None, None, digests=True), 1)
    for state, prepare in machine.states(model):
        runs = machine.compare_with_and_without_ballast(loads(prepare, tiny))
        results.add_all(table, state, [
            {name: {**took, "peak": took["peak"] / size} for name, took in run.items()} for run in runs
        ])  # fmt: skip


def main():
    results = Results("loader")
    with machine(has_ballast=False) as measuring:
        model, tiny, pickled, tiny_pickled = (measuring.folder / name for name in ("model", "tiny", "bin", "tiny-bin"))
        write_model(model, uniform(4, 50, 5 << 20))
        write_model(tiny, uniform(2, 2, 1 << 10))
        in_process(as_bin, model=model, folder=pickled)
        in_process(as_bin, model=tiny, folder=tiny_pickled)
        compare(results, measuring, "owned", OWNED, tiny, model)
        compare(results, measuring, "owned-bin", OWNED_BIN, tiny_pickled, pickled)
        compare(results, measuring, "mapped", MAPPED, tiny, model)
        compare(results, measuring, "mapped-bin", MAPPED_BIN, tiny_pickled, pickled)
