"""Runs a program in several ranks, each a process.

`run(folder, ranks, programs, package, program)` starts one per rank and gives each rank's dictionary of results.

    python ranks.py PROGRAMS PACKAGE PROGRAM RANK RANKS FOLDER STORE

PROGRAMS is a module with a function PROGRAM, which gets the imported PACKAGE, the group, the folder and the
dictionary. `IMPATIENT` of the module names the programs whose group gives up on a missing rank early.
"""

import datetime
import importlib
import subprocess
import sys
import uuid
from pathlib import Path

import preloaded

# Longer than any group here waits for a missing rank.
SECONDS = 120

# The time that an impatient group waits.
PATIENCE = 4


def start(folder, ranks, programs, package, program):
    """Starts a process for each rank."""
    # Of this group alone: a group that lost a rank leaves its own store behind.
    store = folder / f"store-{uuid.uuid4()}"
    return [
        subprocess.Popen(
            preloaded.command(__file__, programs, package, program, rank, ranks, folder, store),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) for rank in range(ranks)
    ]  # fmt: skip


def ended(processes):
    """The exit code and the output of each, after all have ended; none outlives this."""
    try:
        told = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, *words) for process, words in zip(processes, told, strict=True)]


def waited(processes):
    """The first rank's exit code, the time that it says it waited, and its messages, while the last does something
    else. None outlives this."""
    try:
        told, words = processes[0].communicate(timeout=SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return processes[0].returncode, float(told.split("waited")[1]), words


def part(tensor, dim, rank, ranks):
    """A rank's part of a tensor by torch's own rule for chunks; all of it if it is not split."""
    from compare import bits

    if dim is None:
        return tensor
    parts = bits(tensor.contiguous()).chunk(ranks, dim)
    part = parts[rank] if rank < len(parts) else parts[0].narrow(dim, 0, 0)
    return part.contiguous().view(tensor.dtype)


def run(folder, ranks, programs, package, program):
    import torch

    for code, _, words in ended(start(folder, ranks, programs, package, program)):
        assert code == 0, words
    return [torch.load(folder / f"{program}-{package}-{rank}.pt") for rank in range(ranks)]


def main(programs, package, program, rank, ranks, folder, store):
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    programs = importlib.import_module(programs)
    patience = PATIENCE if program in programs.IMPATIENT else SECONDS
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks),
        timeout=datetime.timedelta(seconds=patience),
    )  # fmt: skip
    out = {}
    group = torch.distributed.group.WORLD
    getattr(programs, program)(importlib.import_module(package), group, Path(folder), out)
    torch.save(out, Path(folder) / f"{program}-{package}-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
