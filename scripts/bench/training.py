"""Training checkpoints: `export` and reads through a mount beside their own files, and loads beside the consolidation of the
library that wrote them."""

import os
import pickle
import shutil
import subprocess
import sys
import time

from bench.fixtures import CKPTFS, RUNS, alternate
from bench.machine import machine
from bench.results import Results

# 2.1 GB of 32-bit weights.
TENSORS, ROWS, COLUMNS = 50, 2560, 4096

ITEMS, FILES = 100_000, 64

# What a peer does from the folder to tensors in memory, and what ckptfs does: each prints its seconds after imports.
LOAD = """
import sys, time
import torch, ckptfs.torch
start = time.perf_counter()
tensors = ckptfs.torch.load_file(sys.argv[1], backend="pread")
print(time.perf_counter() - start, len(tensors))
"""

DCP_TO_TORCH = """
import sys, time
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
start = time.perf_counter()
dcp_to_torch_save(sys.argv[1], sys.argv[2] + "/joined.pt")
tensors = torch.load(sys.argv[2] + "/joined.pt", weights_only=True)["model"]
print(time.perf_counter() - start, len(tensors))
"""

ZERO_TO_FP32 = """
import sys, time, os
os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert
start = time.perf_counter()
convert(os.path.dirname(sys.argv[1]), sys.argv[2], tag=os.path.basename(sys.argv[1]), max_shard_size="100GB")
tensors = torch.load(sys.argv[2] + "/pytorch_model.bin", weights_only=True)
print(time.perf_counter() - start, len(tensors))
"""


# The seconds and the peak memory of a command. A process of its own starts it: a child's peak is at least its parent's, and
# the models were made by this one.
OPEN = """
import os, subprocess, sys, time
start = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
assert status == 0
print(time.perf_counter() - start, usage.ru_maxrss)
"""

# `cp` of all files, until they are on the disk as `export`'s is.
COPY = 'out=$1; shift; cp "$@" "$out" && sync "$out"/*'


def name_of(n):
    return f"model.layers.{n}.mlp.experts.gate_up_proj.weight"


def write_dcp(folder, tensors, pieces):
    """Writes a folder as torch does. `tensors` has the shape of each by name. `pieces` gives of each name the file, first
    steps and values of its pieces."""
    import torch
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder.mkdir(parents=True)
    chunks, places, files = {name: [] for name in tensors}, {}, {}
    for name, file, start, values in pieces:
        out = files.get(file) or files.setdefault(file, open(folder / file, "wb"))
        at = out.tell()
        torch.save(values, out)
        index = metadata.MetadataIndex(name, torch.Size(start))
        places[index] = _StorageInfo(file, at, out.tell() - at)
        chunks[name].append(metadata.ChunkStorageMetadata(torch.Size(start), values.shape))
    for out in files.values():
        out.close()
    properties = metadata.TensorProperties(dtype=torch.float32)
    state = {
        name: metadata.TensorStorageMetadata(properties, torch.Size(shape), chunks[name])
        for name, shape in tensors.items()
    }
    keys = {name: tuple(name.split(".", 1)) for name in tensors}
    with open(folder / ".metadata", "wb") as out:
        pickle.dump(metadata.Metadata(state, planner_data=keys, storage_data=places), out)


def cut(ranks, axis):
    """A model that is cut over so many ranks along an axis."""
    import torch

    tensors = {name_of(n): (ROWS, COLUMNS) for n in range(TENSORS)}
    for name in tensors:
        for rank, part in enumerate(torch.rand(ROWS, COLUMNS).chunk(ranks, axis)):
            start = [0, 0]
            start[axis] = rank * part.shape[axis]
            # Not a view, of which torch saves the whole tensor.
            yield name, f"__{rank}_0.distcp", start, part.clone(memory_format=torch.contiguous_format)


def write_many_items(folder):
    import torch

    count = ITEMS // FILES
    tensors = {name_of(n): (4 * FILES, 64) for n in range(count)}
    pieces = (
        (name, f"__{rank}_0.distcp", (4 * rank, 0), torch.rand(4, 64)) for rank in range(FILES) for name in tensors
    )
    write_dcp(folder, tensors, pieces)


def write_zero(folder, ranks, shapes):
    """Writes what DeepSpeed does at stage 3, without the state of the optimizer."""
    import torch

    folder.mkdir(parents=True)
    shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
    count = sum(-(-shape.numel() // ranks) for shape in shapes.values())
    states = {
        "module": {name: torch.empty(0, dtype=torch.bfloat16) for name in shapes}, "buffer_names": [],
        "param_shapes": [shapes], "shared_params": {}, "global_steps": 1, "ds_version": "0.19.8",
    }  # fmt: skip
    for rank in range(ranks):
        optimizer = {"zero_stage": 3, "partition_count": ranks, "fp32_flat_groups": [torch.rand(count)]}
        torch.save(states, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch.save(
            {"optimizer_state_dict": optimizer, "ds_version": "0.19.8"},
            folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )


def took(*command):
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main():
    results = Results("training")
    with machine() as measuring:
        folder, out = measuring.folder, measuring.folder / "out"
        models = {
            "DCP, 2 ranks, cut by rows": folder / "rows",
            "DCP, 8 ranks, cut by columns": folder / "columns",
            "ZeRO-3, 2 ranks": folder / "global_step1",
        }
        write_dcp(folder / "rows", {name_of(n): (ROWS, COLUMNS) for n in range(TENSORS)}, cut(2, 0))
        write_dcp(folder / "columns", {name_of(n): (ROWS, COLUMNS) for n in range(TENSORS)}, cut(8, 1))
        write_zero(folder / "global_step1", 2, {name_of(n): (ROWS, COLUMNS) for n in range(TENSORS)})
        write_many_items(folder / "items")
        write_zero(folder / "small", 8, {name_of(n): (65, 33) for n in range(1000)})

        def fresh(command):
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            measuring.cold()
            return command()

        def read_mounted(model):
            shutil.rmtree(out, ignore_errors=True)
            measuring.cold()
            with measuring.mounted(model):
                return took("cat", str(measuring.virtual_file))

        def loaded(code, model, python=sys.executable):
            done = fresh(lambda: subprocess.run(
                [python, "-c", code, str(model), str(out)], check=True, capture_output=True, text=True
            ))  # fmt: skip
            seconds, tensors = done.stdout.splitlines()[-1].split()
            assert int(tensors) == TENSORS
            return float(seconds)

        def compare(table, label, ours, other):
            runs = alternate(["ours", "other"], lambda name: {"ours": ours, "other": other}[name](), RUNS)
            results.add(table, [label], runs)

        for label, model in models.items():
            files = [str(path) for path in sorted(model.iterdir())]
            exported = str(out / "model.safetensors")
            compare(
                "training-exports", label,
                lambda: fresh(lambda: took(CKPTFS, "export", "--quiet", str(model), exported)),
                lambda: fresh(lambda: took("sh", "-c", COPY, "sh", str(out), *files)),
            )  # fmt: skip
            compare(
                "training-reads", label, lambda: read_mounted(model), lambda: fresh(lambda: took("cat", *files))
            )
        compare(
            "training-loads", "DCP, beside `dcp_to_torch_save` and `torch.load`",
            lambda: loaded(LOAD, folder / "rows"), lambda: loaded(DCP_TO_TORCH, folder / "rows"),
        )  # fmt: skip
        if python := os.environ.get("CKPTFS_DEEPSPEED_PYTHON"):
            compare(
                "training-loads", "ZeRO-3, beside `zero_to_fp32` and `torch.load`",
                lambda: loaded(LOAD, folder / "global_step1"),
                lambda: loaded(ZERO_TO_FP32, folder / "global_step1", python),
            )  # fmt: skip
        opened = {f"{ITEMS:,} items in {FILES} files of DCP": "items", "ZeRO-3, 8 ranks, 1,000 parameters": "small"}
        for label, path in opened.items():
            command = [CKPTFS, "inspect", "--json", str(folder / path)]
            runs = []
            for _ in range(RUNS):
                took(*command)
                done = subprocess.run([sys.executable, "-c", OPEN, *command], check=True, capture_output=True, text=True)
                seconds, peak = done.stdout.split()
                runs.append({"seconds": float(seconds), "peak": int(peak) << 10})
            results.add("training-opens", [label], runs)
