"""What programs that change nothing, or little, get: `from_pretrained` under `ckptfs.install`, on the plain filesystem
and on a mount, and thousands of small files; beside the same without ckptfs, in one run, each in a process of its
own, in turn; cold, and with the files in the page cache. Needs root.

In: RUNS, CKPTFS. Out: `install-overhead.json`, and its tables.
"""

from bench import workloads as ways
from bench.machine import machine
from bench.models import apart
from bench.results import Results

# Files of the small kind: an embedding and a latent, as trainers cache them.
SMALL = 2000

STATES = ("cold", "cached")

# Where, and what loads there.
MODEL = {
    "plain, without ckptfs": ("plain", ways.from_pretrained),
    "plain, installed and disabled": ("plain", ways.from_pretrained_disabled),
    "plain, installed": ("plain", ways.from_pretrained_installed),
    "mount, installed": ("mount", ways.from_pretrained_installed),
    "mount, without `install`": ("mount", ways.from_pretrained),
}

# Each imports what it needs and gives what loads: paths in, a list of tensors by name out.


def one_by_one(load_file):
    def load(paths, **how):
        return [load_file(path, **how) for path in paths]

    return load


def safetensors():
    from safetensors.torch import load_file

    return one_by_one(load_file)


def ours():
    from ckptfs.torch import load_file

    return one_by_one(load_file)


def installed_but_disabled():
    import ckptfs
    from safetensors import torch

    ckptfs.configure(disable=True)
    ckptfs.install()
    return one_by_one(torch.load_file)


def together():
    import ckptfs

    return ckptfs.load_many


def arrays():
    from safetensors.numpy import load_file

    return one_by_one(load_file)


def our_arrays():
    from ckptfs.numpy import load_file

    return one_by_one(load_file)


FILES = {
    "safetensors, `load_file`": safetensors,
    "the same, ckptfs installed and disabled": installed_but_disabled,
    "ckptfs, `load_file`": ours,
    "ckptfs, `load_many`": together,
}

ARRAYS = {"safetensors, `numpy.load_file`": arrays, "ckptfs, `numpy.load_file`": our_arrays}


def small_files(folder, kind, backend):
    """One number of every thousand of each array; the files are named by their numbers."""
    ways.with_one_thread()
    load, paths, kept = (FILES | ARRAYS)[kind](), ways.files_of(folder), []

    def loaded():
        kept.extend(load(paths, backend=backend))
        return sum(array.reshape(-1)[::1000].sum().item() for arrays in kept for array in arrays.values())

    return loaded


def models(results, machine):
    model, tiny = machine.folder / "model", machine.folder / "tiny"
    apart("llama", model, 1)
    apart("llama", tiny, 0)
    for state in STATES:
        prepare = machine.cold if state == "cold" else lambda: machine.warm(model)

        def load(place, loader):
            path, source = (model, None) if place == "plain" else (machine.point, model)
            return lambda: machine.apart((ways.touching, loader), tiny, path, source=source, prepare=prepare)

        runs = machine.compared({name: load(*way) for name, way in MODEL.items()})
        for name in MODEL:
            results.add("install-overhead", [name, state], [run[name] for run in runs])


def files(results, machine):
    import torch
    from safetensors.torch import save_file

    many, few = machine.folder / "many", machine.folder / "few"
    for folder, count in ((many, SMALL), (few, 10)):
        folder.mkdir()
        for n in range(count):
            save_file({"latent": torch.randn(4, 32, 32), "embed": torch.randn(77, 16)}, folder / f"{n}.safetensors")

    def of_each_file(state, kinds, backend):
        """Seconds, run by run."""
        prepare = machine.cold if state == "cold" else lambda: machine.warm(many)

        def load(kind):
            return lambda: machine.apart((small_files, kind, backend), few, many, prepare=prepare)

        runs = machine.compared({kind: load(kind) for kind in kinds})
        return [{kind: took["seconds"] / SMALL for kind, took in run.items()} for run in runs]

    for state in STATES:
        mapped, read = (of_each_file(state, FILES, backend) for backend in ("mmap", "pread"))
        for kind in FILES:
            pairs = [{"mmap": one[kind], "pread": other[kind]} for one, other in zip(mapped, read, strict=True)]
            results.add("small-files", [kind, state], pairs)
    for state in STATES:
        runs = of_each_file(state, ARRAYS, "pread")
        for kind in ARRAYS:
            results.add("arrays", [kind, state], [{"seconds": run[kind]} for run in runs])


def main():
    results = Results("install-overhead")
    with machine() as measuring:
        models(results, measuring)
        files(results, measuring)


if __name__ == "__main__":
    main()
