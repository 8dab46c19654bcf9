"""Tables of torch.distributed.checkpoint that were made to do harm execute nothing, and take bounded time and memory."""

import contextlib
import dataclasses
import os
import pickle
import time
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptfs.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from compare import check_same
from dcp_tables import FULL, chunks_of, set_key
from program import DONE, REFUSED
from refusals import check_refused
from training import edit_table, save_pieces, whole_box


def test_absurd_tables_are_refused_in_bounded_time_and_memory(ckptfs, saved_by_rows):
    plain = (saved_by_rows / ".metadata").read_bytes()

    def many_chunks(table):
        chunk = chunks_of(table)[1]
        table.state_dict_metadata["a"].chunks = [chunks_of(table)[0]] + [chunk] * 1_000_000

    def shared_lists(table):
        chunks = chunks_of(table) * 1000
        tensor = table.state_dict_metadata["a"]
        tensor.chunks = chunks
        table.state_dict_metadata |= {f"t{n}": tensor for n in range(10_000)}
        table.storage_data |= {MetadataIndex(f"t{n}", (0, 0)): table.storage_data[MetadataIndex("a", (0, 0))] for n in range(10_000)}

    def long_keys(table):
        name = "x" * 100_000
        table.planner_data = {"a": (name,) * 10_000}
        table.state_dict_metadata |= {f"t{n}": table.state_dict_metadata["a"] for n in range(1000)}
        table.planner_data |= {f"t{n}": table.planner_data["a"] for n in range(1000)}

    def wide_shape(table):
        tensor = table.state_dict_metadata["a"]
        tensor.size = torch.Size((1,) * 1_000_000)

    def wide_shapes(table):
        wide = torch.Size((1,) * 100_000)
        tensor = table.state_dict_metadata["a"]
        tensor.size = wide
        tensor.chunks = [ChunkStorageMetadata(wide, wide)] * 10
        table.state_dict_metadata |= {f"t{n}": tensor for n in range(10_000)}

    def copies(table, count):
        """Adds tensors like `a`."""
        for n in range(count):
            table.state_dict_metadata[f"t{n}"] = table.state_dict_metadata["a"]
            for start in ((0, 0), (2, 0)):
                table.storage_data[MetadataIndex(f"t{n}", start)] = table.storage_data[MetadataIndex("a", start)]
            yield f"t{n}"

    def share_path(*keys):
        def change(table):
            table.planner_data |= {name: keys for name in copies(table, 3000)}

        return change

    def shared_shape(table):
        """A shape of 64 axes that every tensor has, and no values."""
        wide = torch.Size((0,) + (1,) * 63)
        tensor = dataclasses.replace(table.state_dict_metadata["a"], size=wide, chunks=[])
        table.state_dict_metadata |= {f"t{n}": tensor for n in range(500_000)}
        table.planner_data = {}

    def shared_empty_chunks(table):
        empty = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((0, 0)))
        tensor = dataclasses.replace(table.state_dict_metadata["a"], chunks=[empty] * 100_000)
        table.state_dict_metadata |= {f"t{n}": tensor for n in range(100_000)}
        table.planner_data = {}

    def shared_attributes(table):
        chunk = chunks_of(table)[1]
        chunk.__dict__.update({f"x{n}": None for n in range(100_000)})
        table.state_dict_metadata["a"].chunks = [chunks_of(table)[0]] + [chunk] * 100_000

    long_path, wide_path = share_path("k" * 1000, *["k" * 1000] * 1000), share_path(*[7] * 100_000)
    empty_path = share_path("t", *[""] * 100_000)
    changes = [many_chunks, shared_lists, long_keys, wide_shape, wide_shapes, long_path, wide_path, empty_path]
    for change in [*changes, shared_shape, shared_empty_chunks, shared_attributes]:
        (saved_by_rows / ".metadata").write_bytes(plain)
        edit_table(saved_by_rows, change)
        started = time.monotonic()
        check_refused(ckptfs, saved_by_rows)
        assert time.monotonic() - started < 15, change.__name__


def test_a_table_that_is_cut_off_is_refused(ckptfs, saved_by_rows):
    table = (saved_by_rows / ".metadata").read_bytes()
    for size in [*range(0, len(table), 97), len(table) - 1]:
        (saved_by_rows / ".metadata").write_bytes(table[:size])
        outcome = ckptfs("inspect", saved_by_rows, bounded=True)
        assert outcome.code == REFUSED and ".metadata is not readable" in outcome.stdout + outcome.stderr, size
    (saved_by_rows / ".metadata").write_bytes(table + b"more")
    check_refused(ckptfs, saved_by_rows, "4 bytes")


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


@pytest.mark.parametrize("where", ["storage_meta", "planner_data", "version", "surplus"])
def test_nothing_of_a_table_is_executed(ckptfs, saved_by_rows, tmp_path, where):
    marker = tmp_path / "marker"
    edit_table(saved_by_rows, set_key(where, Touch(marker)))
    check_same(load_file(saved_by_rows), {"a": FULL, "b": torch.arange(5)})
    assert ckptfs("inspect", saved_by_rows).code == DONE and ckptfs("verify", saved_by_rows).code == DONE
    assert not marker.exists()
    # torch cannot go on with the result of the call, but makes the call.
    with contextlib.suppress(CheckpointException), warnings.catch_warnings(action="ignore"):
        dcp.load({"a": torch.zeros(6, 4)}, checkpoint_id=saved_by_rows, no_dist=True)
    assert marker.exists()


def test_a_call_in_the_place_of_a_size_is_refused(ckptfs, saved_by_rows, tmp_path):
    marker = tmp_path / "markers/marker"
    marker.parent.mkdir()

    def change(table):
        table.state_dict_metadata["a"].size = Touch(marker)

    edit_table(saved_by_rows, change)
    check_refused(ckptfs, saved_by_rows, ".metadata is not as torch.distributed.checkpoint writes it", "a tensor has no size")
    assert not marker.exists()
    pickle.loads((saved_by_rows / ".metadata").read_bytes())
    assert marker.exists()


def test_pieces_are_not_executed_either(ckptfs, saved_by_rows, tmp_path):
    marker = tmp_path / "markers/marker"
    marker.parent.mkdir()
    path = tmp_path / "other"
    save_pieces(FileSystemWriter(path, sync_files=False), {"a": FULL}, [[("a", whole_box(FULL)[0])]])
    torch.save(Touch(marker), path / "__0_0.distcp")
    size = (path / "__0_0.distcp").stat().st_size

    def change(table):
        index = MetadataIndex("a", (0, 0))
        table.storage_data[index] = dataclasses.replace(table.storage_data[index], offset=0, length=size)

    edit_table(path, change)
    check_refused(ckptfs, path, "tensor `a`: its piece in __0_0.distcp")
    assert not marker.exists()
