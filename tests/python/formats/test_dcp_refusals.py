"""Folders of torch.distributed.checkpoint that are incomplete, mixed or inconsistent are refused by name."""

import dataclasses
import os
import pickle
import resource
import shutil
import subprocess
import time

import ckptfs as package
import pytest
import torch
from ckptfs import SafetensorError
from ckptfs.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from compare import check_same
from dcp_tables import FULL, OPTIMIZER, W, change_place, chunks_of, save_by_rows, set_key
from program import DONE, FAILED, REFUSED
from refusals import check_refused
from training import edit_table, save_pieces, save_whole, whole_box


def remove_a_chunk(table):
    del chunks_of(table)[1]


def move_a_chunk(table, to=(1, 0), sizes=(4, 4)):
    old = chunks_of(table)[1].offsets
    chunks_of(table)[1] = ChunkStorageMetadata(torch.Size(to), torch.Size(sizes))
    table.storage_data[MetadataIndex("a", to)] = table.storage_data.pop(MetadataIndex("a", old))


def repeat_a_chunk(table):
    chunks_of(table).append(chunks_of(table)[1])


def drop_a_place(table):
    del table.storage_data[MetadataIndex("a", chunks_of(table)[1].offsets)]


def resize(size):
    def change(table):
        table.state_dict_metadata["a"].size = torch.Size(size)

    return change


def test_a_folder_without_its_table_is_refused(ckptfs, saved_by_rows):
    (saved_by_rows / ".metadata").unlink()
    check_refused(ckptfs, saved_by_rows, "the save did not end: .metadata is missing", "give the folder of another step")


def test_a_save_that_has_not_ended_is_refused(ckptfs, saved_by_rows):
    shutil.copy(saved_by_rows / ".metadata", saved_by_rows / ".metadata.tmp")
    check_refused(ckptfs, saved_by_rows, "a save into this folder has not ended: .metadata.tmp is there", "wait until")


def test_a_missing_file_of_a_rank_is_named(ckptfs, saved_by_rows):
    (saved_by_rows / "__1_0.distcp").unlink()
    check_refused(ckptfs, saved_by_rows, "the file of a rank is missing: __1_0.distcp", f"fetch {saved_by_rows}/__1_0.distcp")


def test_an_empty_file_is_named(ckptfs, saved_by_rows):
    os.truncate(saved_by_rows / "__1_0.distcp", 0)
    check_refused(ckptfs, saved_by_rows, "__1_0.distcp is empty", f"fetch {saved_by_rows}/__1_0.distcp again")


def test_a_file_shorter_than_recorded_is_refused_whatever_it_lacks(ckptfs, tmp_path):
    path = tmp_path / "step-1"
    save_whole(path, {"model": W, "optimizer": OPTIMIZER})
    end = max(place.offset + place.length for place in pickle.loads((path / ".metadata").read_bytes()).storage_data.values())
    os.truncate(path / "__0_0.distcp", end - 1)
    words = f"__0_0.distcp has {end - 1} bytes and is shorter than recorded: its last item ends at {end}"
    check_refused(ckptfs, path, words, f"fetch {path}/__0_0.distcp again")


@pytest.mark.parametrize("name", ["./__1_0.distcp", "__1_0.distcp\0", "", "x/./y", "./" * 1900 + "__1_0.distcp"])
def test_file_names_that_torch_does_not_write_are_refused_as_such(ckptfs, saved_by_rows, name):
    edit_table(saved_by_rows, change_place(relative_path=name))
    check_refused(ckptfs, saved_by_rows, "the table names a file by `", "which has a NUL or a part such as `./` in it")
    assert "--follow-symlinks" not in ckptfs("inspect", saved_by_rows).stderr


def test_a_save_over_an_earlier_one_is_refused_until_it_ends(ckptfs, saved_by_rows, tmp_path):
    """The data of one file is new, and the table is not."""
    save_by_rows(tmp_path / "new", rows=FULL + 100)
    shutil.copy(tmp_path / "new/__0_0.distcp", saved_by_rows)
    inspect = subprocess.Popen([ckptfs.binary, "inspect", saved_by_rows], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    time.sleep(0.3)
    assert inspect.poll() is None
    for name in ("__1_0.distcp", ".metadata"):
        shutil.copy(tmp_path / "new" / name, saved_by_rows)
    assert "a save into this folder has not ended: __0_0.distcp is newer than its table" in inspect.communicate()[1]
    assert inspect.returncode == REFUSED
    check_same(load_file(saved_by_rows), {"a": FULL + 100, "b": torch.arange(5)})


@pytest.mark.parametrize("age", [0, 1, 1000, -1000])
def test_a_copy_is_read_whatever_its_times_are(ckptfs, saved_by_rows, age):
    now = time.time()
    os.utime(saved_by_rows / ".metadata", (now, now - age - 5))
    for name in ("__0_0.distcp", "__1_0.distcp"):
        os.utime(saved_by_rows / name, (now, now - age))
    assert ckptfs("inspect", saved_by_rows).code == DONE


@pytest.mark.parametrize("size", [1, 100, -1])
def test_a_truncated_file_is_named(ckptfs, saved_by_rows, size):
    path = saved_by_rows / "__1_0.distcp"
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    check_refused(ckptfs, saved_by_rows, "its piece reaches past the end of __1_0.distcp", f"fetch {path} again", tensor=None)


@pytest.mark.parametrize("other", ["rows", "type"])
def test_a_file_of_another_save_is_refused(ckptfs, saved_by_rows, tmp_path, other):
    save_by_rows(tmp_path / "other", **({"at": 3} if other == "rows" else {"rows": FULL.int()}))
    shutil.copy(tmp_path / "other/__1_0.distcp", saved_by_rows / "__1_0.distcp")
    what = {"rows": "reaches past the end of", "type": "its values have another type"}[other]
    check_refused(ckptfs, saved_by_rows, "tensor `a`", "__1_0.distcp", what)
    shutil.copy(tmp_path / "other/__0_0.distcp", saved_by_rows / "__1_0.distcp")
    check_refused(ckptfs, saved_by_rows, "tensor `a`", "its piece in __1_0.distcp is not", "files of two saves")


def test_files_that_were_swapped_are_refused(ckptfs, saved_by_rows):
    first, second = (saved_by_rows / f"__{n}_0.distcp" for n in range(2))
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    check_refused(ckptfs, saved_by_rows, ".distcp")


def test_tables_of_two_ways_to_save_are_refused(ckptfs, saved_by_rows):
    shutil.copy(saved_by_rows / ".metadata", saved_by_rows / "__0.metadata")
    check_refused(ckptfs, saved_by_rows, "files of two saves", ".metadata and __0.metadata do not belong together", "move the files")


def test_a_missing_table_of_a_rank_is_named(ckptfs, saved_by_ranks, tmp_path):
    path = tmp_path / "step-1"
    shutil.copytree(saved_by_ranks / "dcp-4-tables", path)
    (path / "__1.metadata").unlink()
    check_refused(ckptfs, path, "the file of a rank is missing: __1.metadata", f"fetch {path}/__1.metadata")


def test_a_missing_last_table_is_seen_by_its_data_or_its_hole(ckptfs, saved_by_ranks, tmp_path):
    path = tmp_path / "step-1"
    shutil.copytree(saved_by_ranks / "dcp-4-tables", path)
    (path / "__3.metadata").unlink()
    words = "__3_0.distcp is there and __3.metadata is not: the save has not ended, or the table of a rank is missing"
    check_refused(ckptfs, path, words, f"fetch {path}/__3.metadata")
    (path / "__3_0.distcp").unlink()
    check_refused(ckptfs, path, "pieces are missing", "fetch the folder again")


def test_the_number_of_ranks_is_enforced(ckptfs, saved_by_ranks, saved_by_rows):
    by_rank = saved_by_ranks / "dcp-4-tables"
    assert "4 ranks found, the number is not recorded: --ranks N enforces it" in ckptfs("inspect", by_rank).stdout
    for path, ranks, wrong in (by_rank, 4, 5), (saved_by_rows, 2, 3):
        found = ckptfs("inspect", "--ranks", str(ranks), path)
        assert found.code == DONE and "not recorded" not in found.stdout
        check_refused(ckptfs, path, f"{ranks} ranks found, and {wrong} were asked for", options=("--ranks", str(wrong)))


def test_a_tensor_without_keys_is_refused(ckptfs, saved_by_rows):
    edit_table(saved_by_rows, lambda table: table.planner_data.pop("a") and None)
    check_refused(ckptfs, saved_by_rows, "tensor `a`: planner_data of .metadata lacks it", "fetch the folder again")
    edit_table(saved_by_rows, lambda table: table.planner_data.update(a=("b",)))
    check_refused(ckptfs, saved_by_rows, "tensor `a`: planner_data of .metadata", "other keys than those in its name")


def test_what_is_left_out_is_named(ckptfs, tmp_path):
    save_whole(tmp_path / "step-1", {"model": W, "extra": torch.ones(1), "step": torch.ones(1)})
    listed = ckptfs("inspect", tmp_path / "step-1").stdout
    assert "not shown: 1 tensor: `extra`" in listed and "not shown: 1 tensor of training state: `step`" in listed
    save_whole(tmp_path / "step-2", {**W, "trainer.w": torch.ones(1)})
    assert "not shown: 1 tensor: `trainer.w`" in ckptfs("export", tmp_path / "step-2", tmp_path / "out.safetensors").stderr


def test_replicas_in_tables_of_ranks_are_found_soon(ckptfs, saved_by_rows):
    """Comparing every pair of pieces would take twenty seconds."""
    table = pickle.loads((saved_by_rows / ".metadata").read_bytes())
    (saved_by_rows / ".metadata").unlink()
    place = table.storage_data[MetadataIndex("a", (0, 0))]
    count = 60_000
    for rank in range(2):
        starts = [torch.Size((n, 0)) for n in range(rank * count, (rank + 1) * count)]
        tensor = dataclasses.replace(table.state_dict_metadata["a"], size=torch.Size((2 * count, 4)))
        tensor.chunks = [ChunkStorageMetadata(start, torch.Size((1, 4))) for start in starts]
        of_rank = dataclasses.replace(table, state_dict_metadata={"a": tensor}, planner_data={})
        of_rank.storage_data = {MetadataIndex("a", start): place for start in starts}
        (saved_by_rows / f"__{rank}.metadata").write_bytes(pickle.dumps(of_rank))
    spent = lambda: resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    before = spent()
    outcome = ckptfs("inspect", saved_by_rows, bounded=True)
    assert outcome.code == REFUSED and "it has another shape" in outcome.stderr + outcome.stdout
    assert spent() - before < 8


# Changes of the table, each with words of the message about it.
TABLE_FAULTS = {
    "hole": (remove_a_chunk, "tensor `a`: pieces are missing: those found hold 8 of 24 values"),
    "overlap": (move_a_chunk, "tensor `a`: two pieces hold the same values: those at [0, 0] and [1, 0]"),
    "out-of-bounds": (lambda table: move_a_chunk(table, (3, 0)), "tensor `a`: the piece at [3, 0] with shape [4, 4] reaches past"),
    "other-axes": (lambda table: move_a_chunk(table, (2,), (4,)), "tensor `a`"),
    "far-out": (lambda table: move_a_chunk(table, (2**62, 0)), "reaches past its shape"),
    "huge-piece": (lambda table: move_a_chunk(table, (2, 0), (2**62, 4)), "it has another shape"),
    "larger-than-all": (resize((2**62, 4)), "the size of its shape overflows"),
    "larger": (resize((2**40, 4)), "tensor `a`: pieces are missing"),
    "smaller": (resize((5, 4)), "reaches past its shape [5, 4]"),
    "negative": (lambda table: move_a_chunk(table, (-1, 0)), "a chunk has no valid offsets and sizes"),
    "a-chunk-twice": (repeat_a_chunk, "tensor `a`: .metadata does not say where its piece at [2, 0] is"),
    "no-place": (drop_a_place, "tensor `a`: .metadata does not say where its piece at [2, 0] is"),
    "no-places": (set_key("storage_data", None), ".metadata is not as torch.distributed.checkpoint writes it", "it has no storage_data"),
    "no-tensors": (set_key("state_dict_metadata", {}), "it holds no tensors"),
    "zstd": (change_place(transform_descriptors=["stream.zstd/1"]), "its pieces are stored as stream.zstd/1", "without extensions"),
    "past-the-end": (change_place(offset=2**62), "its piece reaches past the end of __1_0.distcp"),
    "past-all-ends": (change_place(offset=2**63 - 1, length=2**63 - 1), "its piece reaches past the end of __1_0.distcp"),
    "too-short": (change_place(length=100), "its piece in __1_0.distcp is not readable"),
    "empty-place": (change_place(length=0), "its piece in __1_0.distcp is not"),
    "inside-another": (change_place(offset=64, length=300), "its piece in __1_0.distcp is not"),
    "huge-length": (change_place(length=2**62), "its piece reaches past the end of __1_0.distcp"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TABLE_FAULTS)
def test_an_inconsistent_table_is_refused(ckptfs, saved_by_rows, kind):
    change, *words = TABLE_FAULTS[kind]
    edit_table(saved_by_rows, change)
    check_refused(ckptfs, saved_by_rows, *words)


@pytest.mark.parametrize("where", ["above", "absolute", "inside-and-out", "link"])
def test_a_file_outside_of_the_folder_is_not_read(ckptfs, saved_by_rows, tmp_path, where):
    outside = tmp_path / "outside.distcp"
    (saved_by_rows / "__1_0.distcp").rename(outside)
    name = {"above": "../outside.distcp", "absolute": str(outside), "inside-and-out": "x/../../outside.distcp"}.get(where)
    if name is None:
        (saved_by_rows / "__1_0.distcp").symlink_to(outside)
    else:
        edit_table(saved_by_rows, change_place(relative_path=name))
    for words in (["inspect", saved_by_rows], ["export", saved_by_rows, tmp_path / "out.safetensors"]):
        outcome = ckptfs(*words, bounded=True)
        assert outcome.code in (FAILED, REFUSED), outcome
        assert "outside.distcp" in outcome.stderr or "__1_0.distcp" in outcome.stderr
        assert "--follow-symlinks" in outcome.stderr
    assert not (tmp_path / "out.safetensors").exists()
    with pytest.raises((SafetensorError, OSError)):
        load_file(saved_by_rows)
    with package.mount(saved_by_rows) as mount:
        assert "model.safetensors" not in os.listdir(mount)


def test_tensors_of_one_name_are_refused(ckptfs, tmp_path):
    path = tmp_path / "step-1"
    tensors = {"xa": FULL, "xb": FULL}
    ranks = [[(name, box) for name in tensors for box in whole_box(FULL)]]
    save_pieces(FileSystemWriter(path, sync_files=False), tensors, ranks)
    table = (path / ".metadata").read_bytes()
    assert table.count(b"xb") == 1
    (path / ".metadata").write_bytes(table.replace(b"xb", b"xa"))
    check_refused(ckptfs, path, ".metadata is not as torch.distributed.checkpoint writes it", "twice")
