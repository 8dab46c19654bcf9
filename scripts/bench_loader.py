"""The loader beside what people load with today, in one run: each in a process of its own, in turn, on
the same files; cold, with caches dropped (which needs root), and with all of them in the page cache.
Measures seconds, seconds of processor, and the memory at the peak above what the imports took, as a share of
the model.

    bench_loader.py                          measures everything
    bench_loader.py opening                  measures opening alone
    bench_loader.py load STATE WAY PATH...   does it once, here, and prints what it took as JSON

In: RUNS. Out: `loader.json` and `opening.json`, and their tables.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_common import drop_caches, in_turn, of_status, settle, warm, write_shards
from bench_models import apart
from bench_results import Results

# Each of these imports what it needs and gives what loads: a list of files in, tensors by name out.


def ckptfs_owned():
    from ckptfs.torch import load_file

    return lambda paths: load_file(os.path.dirname(paths[0]), backend="pread")


def ckptfs_mapped():
    from ckptfs.torch import load_file

    return lambda paths: load_file(os.path.dirname(paths[0]), backend="mmap")


def ckptfs_into():
    import ckptfs
    import torch
    from ckptfs.torch import load_file

    def load(paths):
        with ckptfs.safe_open(os.path.dirname(paths[0]), "pt") as f:
            into = {name: torch.empty(f.get_slice(name).get_shape(), dtype=torch.bfloat16) for name in f.keys()}
        return load_file(os.path.dirname(paths[0]), into=into)

    return load


def each(load):
    return lambda paths: {name: tensor for path in paths for name, tensor in load(path).items()}


def safetensors_cloned():
    from safetensors.torch import load_file

    return each(lambda path: {name: tensor.clone() for name, tensor in load_file(path).items()})


def safetensors_pread():
    from safetensors.torch import load_file

    return each(lambda path: load_file(path, backend="pread"))


def safetensors_mapped():
    from safetensors.torch import load_file

    return each(load_file)


def fastsafetensors_buffer():
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load(paths):
        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
        loader.add_filenames({0: paths})
        buffer = loader.copy_files_to_device()
        tensors = {name: buffer.get_tensor(name) for name in loader.get_keys()}
        # They are views of memory that closing it would free.
        load.kept = loader, buffer
        return tensors

    return load


def runai_buffer():
    from runai_model_streamer import SafetensorsStreamer

    def load(paths):
        streamer = SafetensorsStreamer()
        streamer.__enter__()
        streamer.stream_files(paths)
        # They are views of one buffer as large as the model, which is not used twice.
        load.kept = streamer
        return dict(streamer.get_tensors())

    return load


def torch_load():
    import torch

    return each(lambda path: torch.load(path, weights_only=True))


def torch_load_mapped():
    import torch

    return each(lambda path: torch.load(path, weights_only=True, mmap=True))


OWNED = {
    "safetensors": [
        ("ckptfs, `backend=\"pread\"`", ckptfs_owned, None),
        ("ckptfs, `into=` new tensors", ckptfs_into, None),
        ("safetensors 0.8, `backend=\"pread\"`", safetensors_pread, None),
        ("safetensors 0.8 and `clone()`", safetensors_cloned, None),
        ("safetensors 0.9rc1, `backend=\"pread\"`", safetensors_pread, "0.9"),
        ("fastsafetensors, views of its buffer", fastsafetensors_buffer, None),
        ("runai-model-streamer, views of its buffer", runai_buffer, None),
    ],
    "bin": [
        ("ckptfs, `backend=\"pread\"`", ckptfs_owned, None),
        ("`torch.load`", torch_load, None),
    ],
}
MAPPED = {
    "safetensors": [
        ("ckptfs, `backend=\"mmap\"`", ckptfs_mapped, None),
        ("safetensors 0.8", safetensors_mapped, None),
        ("safetensors 0.9rc1", safetensors_mapped, "0.9"),
    ],
    "bin": [
        ("ckptfs, `backend=\"mmap\"`", ckptfs_mapped, None),
        ("`torch.load(mmap=True)`", torch_load_mapped, None),
    ],
}
WAYS = {way.__name__: way for table in (OWNED, MAPPED) for rows in table.values() for _, way, _ in rows}


def ckptfs_opened(paths):
    import ckptfs

    def opened():
        with ckptfs.safe_open(os.path.dirname(paths[0]), "pt") as f:
            return len(f.keys())

    return opened


def safetensors_opened(paths):
    import safetensors

    def opened():
        # Open at once, as who loads from all of them has them.
        files = [safetensors.safe_open(path, "pt") for path in paths]
        return sum(len(f.keys()) for f in files)

    return opened


OPENED = {way.__name__: way for way in (ckptfs_opened, safetensors_opened)}


def load_once(state, way, paths):
    load = WAYS[way]()
    import torch

    torch.set_num_threads(1)
    torch.zeros(1).view(torch.uint8)[::4096].sum()
    size = sum(os.path.getsize(path) for path in paths)
    if state == "cached":
        warm(paths)
    # Here, because it does not last: for the tensors, and for the page cache where it has nothing yet.
    settle(size * (9 if state == "cold" else 5) // 4)
    if state == "cached":
        warm(paths)
    Path("/proc/self/clear_refs").write_text("5")
    before = of_status("VmRSS")
    start, used = time.perf_counter(), time.process_time()
    tensors = load(paths)
    for tensor in tensors.values():
        tensor.view(torch.uint8).reshape(-1)[::4096].sum()
    took = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - used}
    size = sum(tensor.nbytes for tensor in tensors.values())
    took["peak"] = (of_status("VmHWM") - before) / size
    if state == "checked":
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(name.encode() + tensors[name].view(torch.uint8).numpy().tobytes())
        took["digest"] = digest.hexdigest()
    print(json.dumps(took), flush=True)
    # What the peers do at their end is not measured.
    os._exit(0)


def open_once(state, way, paths):
    import torch  # noqa: F401 It is there before whatever is opened with it.

    opened = OPENED[way](paths)
    settle(512 << 20)
    if state == "cached":
        warm([*paths, os.path.dirname(paths[0]) + "/model.safetensors.index.json"])
    else:
        # Here, so that what is measured is the checkpoint's files and not the programs'.
        drop_caches()
    start, used = time.perf_counter(), time.process_time()
    count = opened()
    took = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - used, "count": count}
    print(json.dumps(took))


def once(what, state, way, version, paths):
    env = dict(os.environ)
    if version:
        env["PYTHONPATH"] = f"{env['CKPTFS_SAFETENSORS_NEXT']}:{env['PYTHONPATH']}"
    if (what, state) == ("load", "cold"):
        drop_caches()
    command = [sys.executable, __file__, what, state, way.__name__, *map(str, paths)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def compare(results, table, rows, paths):
    """All of them in turn, several times. Before that what they load is compared."""
    digests = {once("load", "checked", way, version, paths)["digest"] for _, way, version in rows}
    assert len(digests) == 1, digests
    for state in ("cold", "cached"):
        ways = {name: (way, version) for name, way, version in rows}
        runs = in_turn(list(ways), lambda name: once("load", state, *ways[name], paths))
        for name in ways:
            results.add(table, [name, state], [run[name] for run in runs])


def main():
    assert os.geteuid() == 0, "dropping caches needs root"
    results = Results("loader")
    with tempfile.TemporaryDirectory() as folder:
        model, pickled = Path(folder) / "model", Path(folder) / "pickled"
        write_shards(model, 4, 50, 5 << 20)
        apart("bin", model, pickled)
        shards, bins = sorted(model.glob("*.safetensors")), sorted(pickled.glob("*.bin"))
        compare(results, "owned", OWNED["safetensors"], shards)
        compare(results, "owned-bin", OWNED["bin"], bins)
        compare(results, "mapped", MAPPED["safetensors"], shards)
        compare(results, "mapped-bin", MAPPED["bin"], bins)
    measure_opening()


def measure_opening():
    results = Results("opening")
    with tempfile.TemporaryDirectory() as folder:
        many = Path(folder) / "many"
        write_shards(many, 160, 625, 32)
        paths = sorted(many.glob("*.safetensors"))
        for state in ("cold", "cached"):
            runs = in_turn(list(OPENED), lambda name: once("open", state, OPENED[name], None, paths))
            assert {took["count"] for run in runs for took in run.values()} == {100_000}
            for name in OPENED:
                results.add("opening", [name.removesuffix("_opened"), state], [run[name] for run in runs])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["load", state, way, *paths]:
            load_once(state, way, paths)
        case ["open", state, way, *paths]:
            open_once(state, way, paths)
        case ["opening"]:
            measure_opening()
        case _:
            main()
