"""Loads of programs that change nothing, or little, beside the same without ckptfs. They are `from_pretrained` under
`ckptfs.install`, on the plain filesystem and on a mount, and thousands of small files."""

from ckptfs.bench.loaders import kept

from bench import workloads
from bench.machine import load, machine
from bench.models import in_process, llama
from bench.results import Results
from bench.workloads import make_request

# Files of the small kind: an embedding and a latent, as trainers cache them.
SMALL_COUNT = 2000

# Where, and what loads there.
MODEL = {
    "plain, without ckptfs": ("plain", "from_pretrained"),
    "plain, installed and disabled": ("plain", "from_pretrained_with_install_disabled"),
    "plain, installed": ("plain", "from_pretrained_with_install"),
    "mount, installed": ("mount", "from_pretrained_with_install"),
    "mount, without `install`": ("mount", "from_pretrained"),
}

# Each imports what it needs and returns the function that loads: paths in, a list of tensors by name out.


def one_by_one(load_file):
    return lambda paths, **options: [load_file(path, **options) for path in paths]


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


def small_files(request):
    """Loads all files of a folder, and touches one number of every thousand of each array."""
    read, paths = (FILES | ARRAYS)[request["kind"]](), workloads.files_of(request)
    yield
    files = read(paths, backend=request["backend"])
    kept.append(files)
    yield {"number": sum(array.reshape(-1)[::1000].sum().item() for arrays in files for array in arrays.values())}


def models(results, machine):
    model, tiny = machine.folder / "model", machine.folder / "tiny"
    in_process(llama, folder=model, size=1)
    in_process(llama, folder=tiny, size=0)
    for state, prepare in machine.states(model):

        def loads(place, loader):
            path, source = (model, None) if place == "plain" else (machine.point, model)
            request = load(f"{workloads.__name__}:{loader}")
            return lambda: machine.run(request, path, tiny, source=source, prepare=prepare)

        runs = machine.compare({name: loads(*way) for name, way in MODEL.items()})
        results.add_all("install-overhead", state, runs)


def files(results, machine):
    import torch
    from safetensors.torch import save_file

    many, few = machine.folder / "many", machine.folder / "few"
    for folder, count in ((many, SMALL_COUNT), (few, 10)):
        folder.mkdir()
        for n in range(count):
            save_file({"latent": torch.randn(4, 32, 32), "embed": torch.randn(77, 16)}, folder / f"{n}.safetensors")

    def of_each_file(prepare, kinds, backend):
        """Seconds, run by run."""

        def loads(kind):
            request = make_request(small_files, kind=kind, backend=backend)
            return lambda: machine.run(request, many, few, prepare=prepare)

        runs = machine.compare({kind: loads(kind) for kind in kinds})
        return [{kind: took["seconds"] / SMALL_COUNT for kind, took in run.items()} for run in runs]

    for state, prepare in machine.states(many):
        mapped, read = (of_each_file(prepare, FILES, backend) for backend in ("mmap", "pread"))
        for kind in FILES:
            pairs = [{"mmap": one[kind], "pread": other[kind]} for one, other in zip(mapped, read, strict=True)]
            results.add("small-files", [kind, state], pairs)
    for state, prepare in machine.states(many):
        runs = of_each_file(prepare, ARRAYS, "pread")
        for kind in ARRAYS:
            results.add("arrays", [kind, state], [{"seconds": run[kind]} for run in runs])


def main():
    results = Results("install-overhead")
    with machine() as measuring:
        models(results, measuring)
        files(results, measuring)
