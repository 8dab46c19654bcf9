"""States that programs save by torch.distributed.checkpoint, folders of two files, and changes of their tables."""

import dataclasses

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex

from training import save_pieces

FULL = torch.arange(24, dtype=torch.float32).reshape(6, 4)


def numbered_tensors(*names):
    """Tensors of which each has a value of its own."""
    return {name: torch.full((2,), float(n)) for n, name in enumerate(names)}


# The tensors of a model, and the state of its optimizer.
W = numbered_tensors("a.weight", "b.weight")
OPTIMIZER = {"state": {"a.weight": numbered_tensors("exp_avg")}, "param_groups": [{"lr": 0.1}]}


def save_by_rows(path, rows=FULL, at=2, **how):
    """Saves `a`, cut by rows over both files, and `b` in the first."""
    halves = [((0, 0), (at, rows.shape[1])), ((at, 0), (rows.shape[0] - at, rows.shape[1]))]
    ranks = [[("a", halves[0]), ("b", ((0,), (5,)))], [("a", halves[1])]]
    save_pieces(FileSystemWriter(path, sync_files=False), {"a": rows, "b": torch.arange(5)}, ranks, **how)


def chunks_of(table, name="a"):
    return table.state_dict_metadata[name].chunks


def change_place(**fields):
    """Changes the recorded place of the second piece of `a`."""

    def change(table):
        index = MetadataIndex("a", chunks_of(table)[1].offsets)
        table.storage_data[index] = dataclasses.replace(table.storage_data[index], **fields)

    return change


def set_key(key, value):
    def change(table):
        setattr(table, key, value)

    return change
