"""What programs that change nothing, or little, get: `from_pretrained` under `ckptfs.install`, on the plain
filesystem and on a mount, and thousands of small files; beside the same without ckptfs, in one run, each in a
process of its own, in any order; cold, with caches dropped (which needs root), and with the files in the page cache.

    bench_adopting.py                            measures everything
    bench_adopting.py model STATE WAY FOLDER     does it once, here, and prints what it took as JSON
    bench_adopting.py small STATE WAY BACKEND FOLDER

In: RUNS. Out: `adopting.json`, and its tables.
"""

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_common import RUNS, drop_caches, settle, warm
from bench_models import apart
from bench_results import Results

# Files of the small kind: an embedding and a latent, as trainers cache them.
SMALL = 2000

STATES = ("cold", "cached")


@contextlib.contextmanager
def plain(folder):
    yield folder


@contextlib.contextmanager
def installed(folder):
    import ckptfs

    with ckptfs.installed():
        yield folder


@contextlib.contextmanager
def disabled(folder):
    import ckptfs

    ckptfs.configure(disable=True)
    with ckptfs.installed():
        yield folder


@contextlib.contextmanager
def mounted(folder):
    import ckptfs

    with ckptfs.installed(), ckptfs.mount(folder) as point:
        yield point


@contextlib.contextmanager
def mounted_alone(folder):
    import ckptfs

    with ckptfs.mount(folder) as point:
        yield point


MODEL = {
    "plain, without ckptfs": plain,
    "plain, installed and disabled": disabled,
    "plain, installed": installed,
    "mount, installed": mounted,
    "mount, without `install`": mounted_alone,
}


def model_once(state, way, folder):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    files = sorted(Path(folder).glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    with MODEL[way](folder) as path:
        settle(size * 9 // 4)
        if state == "cached":
            warm(files)
        else:
            # Here, so that what is measured is the model's files and not the programs'.
            drop_caches()
        start, used = time.perf_counter(), time.process_time()
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        sums = [tensor.view(torch.uint8).reshape(-1)[::4096].sum().item() for tensor in model.state_dict().values()]
        took = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - used, "sum": sum(sums)}
        import ckptfs

        # What stands in does, or leaves it alone.
        assert (ckptfs.stats()["loads"] > 0) == (way in ("plain, installed", "mount, installed"))
        assert ckptfs.stats()["originals"] == 0
        del model
    print(json.dumps(took))


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


def small_once(state, way, backend, folder):
    import torch

    torch.set_num_threads(1)
    load, paths = (FILES | ARRAYS)[way](), [f"{folder}/{n}.safetensors" for n in range(SMALL)]
    load(paths[:10], backend=backend)
    if state == "cached":
        load(paths, backend=backend)
    else:
        drop_caches()
    start, used, total = time.perf_counter(), time.process_time(), 0
    for tensors in load(paths, backend=backend):
        for tensor in tensors.values():
            total += tensor.reshape(-1)[::1000].sum().item()
    print(json.dumps({"seconds": time.perf_counter() - start, "cpu": time.process_time() - used, "sum": total}))


def once(*words):
    done = subprocess.run([sys.executable, __file__, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


shuffled = random.Random(1)


def compared(what, state, ways, *more):
    """The runs of each: all of them in turn, several times. What they load has one sum."""
    took = {name: [] for name in ways}
    for _ in range(RUNS):
        # What went before leaves the machine's memory in one state or another.
        for name in shuffled.sample(list(ways), len(ways)):
            took[name].append(once(what, state, name, *more))
    assert len({run["sum"] for runs in took.values() for run in runs}) == 1
    return {name: [{key: run[key] for key in ("seconds", "cpu")} for run in runs] for name, runs in took.items()}


def of_each_file(runs):
    return [run["seconds"] / SMALL for run in runs]


def main():
    assert os.geteuid() == 0, "dropping caches needs root"
    results = Results("adopting")
    with tempfile.TemporaryDirectory() as folder:
        apart("llama", folder, 1)
        for state in STATES:
            for name, runs in compared("model", state, MODEL, folder).items():
                results.add("adopting", [name, state], runs)
    with tempfile.TemporaryDirectory() as folder:
        import torch
        from safetensors.torch import save_file

        for n in range(SMALL):
            save_file({"latent": torch.randn(4, 32, 32), "embed": torch.randn(77, 16)}, f"{folder}/{n}.safetensors")
        for state in STATES:
            mapped, read = (compared("small", state, FILES, backend, folder) for backend in ("mmap", "pread"))
            for name in FILES:
                pairs = zip(of_each_file(mapped[name]), of_each_file(read[name]), strict=True)
                results.add("small-files", [name, state], [{"mmap": one, "pread": other} for one, other in pairs])
        for state in STATES:
            for name, runs in compared("small", state, ARRAYS, "pread", folder).items():
                results.add("arrays", [name, state], [{"seconds": seconds} for seconds in of_each_file(runs)])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["model", *words]:
            model_once(*words)
        case ["small", state, way, backend, folder]:
            small_once(state, way, backend, folder)
        case _:
            main()
