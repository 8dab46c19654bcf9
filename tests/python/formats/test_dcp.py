"""Folders of torch.distributed.checkpoint are shown as the tensors that were saved, bit for bit, through every door.

Training resumes from them through a mount, and an incomplete folder is refused.
"""

import contextlib
import dataclasses
import io
import itertools
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import time
import warnings

import ckptfs as package
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from ckptfs import SafetensorError, safe_open
from ckptfs.torch import load_distributed, load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from compare import any_index, check_same, check_tensors
from mounts import PATIENCE, python
from program import COMMON, DONE, FAILED, REFUSED
from refusals import check_refused
from training import (
    BY_RANKS,
    DTYPES,
    any_tensor,
    check_doors,
    check_mounted,
    consolidate,
    deal_boxes,
    edit_table,
    one_rank,
    save_pieces,
    save_whole,
    whole_box,
)

FULL = torch.arange(24, dtype=torch.float32).reshape(6, 4)
MODEL = {"a": FULL, "b.c": torch.arange(5), "d": torch.ones(2, dtype=torch.bfloat16)}


def model_tensors(tensors):
    """The tensors of the model among those of a whole state, without its key."""
    found = {name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(("model.", "state_dict."))}
    return {name: tensor.contiguous() for name, tensor in found.items()}


@pytest.mark.parametrize("name", BY_RANKS)
def test_what_ranks_saved_is_the_same_through_every_door(ckptfs, saved_by_ranks, tmp_path, name):
    folder = saved_by_ranks / name
    expected = torch.load(f"{folder}.expected")
    out = tmp_path / "out.safetensors"
    check_doors(ckptfs, folder, expected, out)
    if not name.endswith("-tables"):
        # torch joins no tables of ranks.
        check_same(model_tensors(consolidate(folder)), expected)
    other = tmp_path / "other.pt"
    torch.save(expected | {"scalar": torch.tensor(4), "rows.rows": torch.zeros(1)}, other)
    assert ckptfs("verify", folder, "--against", other).code == FAILED


@pytest.fixture(scope="module")
def mounted(saved_by_ranks):
    """What ranks saved, through a mount."""
    with package.mount(saved_by_ranks) as path:
        yield path


@pytest.mark.parametrize("name", BY_RANKS)
def test_what_ranks_saved_is_the_same_through_a_mount(ckptfs, saved_by_ranks, mounted, tmp_path, name):
    out = ckptfs.export(saved_by_ranks / name, tmp_path / "out.safetensors")
    expected = torch.load(f"{saved_by_ranks / name}.expected")
    check_mounted(mounted / name / "model.safetensors", expected, out)
    check_same(load_file(mounted / name), expected)


@pytest.mark.parametrize("name", BY_RANKS)
def test_originals_stay_as_they_are_in_a_mount(saved_by_ranks, mounted, name):
    originals = sorted(os.listdir(saved_by_ranks / name))
    assert sorted(os.listdir(mounted / name)) == sorted([*originals, "model.safetensors"])
    for original in originals:
        assert (mounted / name / original).read_bytes() == (saved_by_ranks / name / original).read_bytes()


@pytest.mark.parametrize("name", ["dcp-4-plain", "dcp-4-files", "dcp-2-threads", "dcp-1-plain"])
def test_training_resumes_through_a_mount(saved_by_ranks, mounted, name):
    expected = torch.load(f"{saved_by_ranks / name}.expected")
    names = [name for name in expected if not name.startswith("layers.")]
    state = {"model": {name: torch.zeros_like(expected[name]) for name in names}, "step": 0}
    state["model"]["layers"] = [{"w": torch.zeros(7, 4), "b": torch.zeros(n)} for n in range(3)]
    state["optimizer"] = {"state": {"rows": {"exp_avg": torch.zeros(7, 4)}}}
    dcp.load(state, checkpoint_id=mounted / name, no_dist=True)
    check_same({name: state["model"][name] for name in names}, {name: expected[name] for name in names})
    for n, layer in enumerate(state["model"]["layers"]):
        check_same(layer, {key: expected[f"layers.{n}.{key}"] for key in "wb"})
    assert state["step"] == 5 and torch.equal(state["optimizer"]["state"]["rows"]["exp_avg"], expected["rows"])


def test_a_group_of_ranks_loads_a_folder(saved_by_ranks):
    with one_rank():
        check_same(load_distributed(saved_by_ranks / "mesh-4"), torch.load(saved_by_ranks / "mesh-4.expected"))


def test_optimizer_state_can_be_chosen(ckptfs, saved_by_ranks, tmp_path):
    out = ckptfs.export(saved_by_ranks / "dcp-4-plain", tmp_path / "out.safetensors", "--root", "optimizer")
    check_tensors(out, {"state.rows.exp_avg": torch.arange(28.0).reshape(7, 4)})


# Hundreds of cases of any boxes, in folders that a fixture writes at once.
SEEDS = range(300)


def random_store(rng):
    """A random way to store a piece in memory."""
    turned = lambda tensor: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor.contiguous()
    return rng.choice([torch.Tensor.contiguous, turned, lambda tensor: tensor])


def random_case(folder, seed):
    rng = random.Random(seed)
    tensors = {}
    for n in range(rng.randint(1, 4)):
        shape = [rng.choice((0, 1, 1, 2, 3, 4, 5, 6, 7)) for _ in range(rng.randint(0, 4))]
        tensors[f"t{n}.{'x' * rng.randint(0, 30)}"] = any_tensor(rng, shape, rng.choice(DTYPES))
    writer = FileSystemWriter(
        folder, single_file_per_rank=rng.random() < 0.7, sync_files=False, thread_count=rng.randint(1, 3)
    )
    ranks = deal_boxes(rng, tensors, rng.randint(1, 5), cuts=rng.choice((0, 3, 12)))
    key = rng.choice(["", "model."])
    keys = {f"{key}{name}": ("model", name) for name in tensors} if key else {}
    ranks = [[(f"{key}{name}", box) for name, box in rank] for rank in ranks]
    whole = {f"{key}{name}": tensor for name, tensor in tensors.items()}
    save_pieces(writer, whole, ranks, keys=keys, store=random_store(rng))
    return tensors


@pytest.fixture(scope="module")
def random_cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    cases = {seed: random_case(folder / str(seed), seed) for seed in SEEDS}
    with package.mount(folder) as path:
        yield folder, path, cases


@pytest.mark.parametrize("seed", SEEDS)
def test_any_boxes_are_joined(ckptfs, random_cases, tmp_path, seed):
    folder, mounted, cases = random_cases
    expected, path = cases[seed], folder / str(seed)
    rng = random.Random(seed)
    check_same(load_file(path, backend=rng.choice(("mmap", "pread"))), expected)
    with safe_open(path, "pt") as file:
        for name, tensor in expected.items():
            index = any_index(rng, tensor.shape)
            check_same({name: file.get_slice(name)[index].contiguous()}, {name: tensor[index].contiguous()})
    out = ckptfs.export(path, tmp_path / "out.safetensors")
    check_mounted(mounted / str(seed) / "model.safetensors", expected, out)
    joined = consolidate(path)
    check_same({name.removeprefix("model."): tensor for name, tensor in joined.items()}, expected)


# The states that programs save, and the tensors that are shown of each. Each tensor has a value of its own.
def numbered_tensors(*names):
    return {name: torch.full((2,), float(n)) for n, name in enumerate(names)}


W = numbered_tensors("a.weight", "b.weight")
OPTIMIZER = {"state": {"a.weight": numbered_tensors("exp_avg")}, "param_groups": [{"lr": 0.1}]}
SELECTED = {
    "model": ({"model": W, "optimizer": OPTIMIZER, "step": 1}, W),
    "state-dict": ({"state_dict": W, "optimizer_0": OPTIMIZER}, W),
    "lightning": ({"state_dict": W, "optimizer_states": [OPTIMIZER], "loops": {"x": torch.ones(1)}}, W),
    "torchtitan": (
        {**W, "optimizer": OPTIMIZER, "dataloader": {"dp_rank_0": torch.ones(1)}, "train_state": {"step": torch.ones(1)},
         "lr_scheduler": {"last_epoch": torch.ones(1)}}, W,
    ),
    "flat-torchtitan": (
        {**W, "lr_scheduler.last": torch.ones(1), "train_state": torch.ones(1), "optimizer_0.state.a.exp_avg": torch.ones(1),
         "optimizer_0.param_groups.a.lr": 0.1}, W,
    ),
    "app": ({"app": {"model": W, "optim": OPTIMIZER}}, W),
    "network": ({"net": W, "optimizer": OPTIMIZER, "rng_state": {"cpu": torch.ones(3)}}, W),
    "model-alone": (W, W),
    "nested": ({"model": {"layers": [W, W], "head": W}}, {
        f"{prefix}.{name}": tensor for prefix in ("layers.0", "layers.1", "head") for name, tensor in W.items()
    }),
    "hugging-face": (numbered_tensors("model.a.weight", "lm_head.weight"), numbered_tensors("model.a.weight", "lm_head.weight")),
}  # fmt: skip


@pytest.mark.parametrize("kind", SELECTED)
def test_the_model_is_found_in_the_state_of_a_run(ckptfs, tmp_path, kind):
    state, expected = SELECTED[kind]
    save_whole(tmp_path / "step-1", state)
    check_doors(ckptfs, tmp_path / "step-1", expected, tmp_path / "out.safetensors")


def test_several_dictionaries_are_refused_with_their_keys(ckptfs, tmp_path):
    path = tmp_path / "step-1"
    save_whole(path, {"actor": W, "critic": numbered_tensors("v.weight"), "optimizer": OPTIMIZER})
    check_refused(ckptfs, path, "it is unclear which of its dictionaries is the model", "`actor`", "`critic`", "--root actor")
    with package.mount(tmp_path) as mount:
        assert "model.safetensors" not in os.listdir(mount / "step-1")
    with package.mount(path, root="critic") as mount:
        check_same(load_file(mount / "model.safetensors"), numbered_tensors("v.weight"))
    out = ckptfs.export(path, tmp_path / "out.safetensors", "--root", "actor")
    check_tensors(out, W)
    check_same(load_file(path, root="critic"), numbered_tensors("v.weight"))
    check_refused(ckptfs, path, "no tensors under `nothing`", "`actor`", options=("--root", "nothing"))


def test_a_folder_of_training_state_alone_shows_no_virtual_file(ckptfs, tmp_path):
    path = tmp_path / "optimizer_0"
    save_whole(path, {"optimizer": OPTIMIZER})
    check_refused(ckptfs, path, "it holds training state (`optimizer`) and no model", "--root optimizer")
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for n, state in enumerate(
        [
            get_optimizer_state_dict(model, optimizer),
            get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)),
            optimizer.state_dict(),
        ]
    ):
        other = tmp_path / f"optimizer-{n}"
        save_whole(other, state)
        check_refused(ckptfs, other, "it holds training state (`state`) and no model", "--root state")
        shutil.rmtree(other)
    (listing,) = ckptfs("ls", "--json", path).json()
    assert {entry["kind"] for entry in listing["entries"]} == {"file"}
    assert "it holds training state" in str(listing)
    with package.mount(tmp_path) as mount:
        assert sorted(os.listdir(mount / "optimizer_0")) == [".metadata", "__0_0.distcp"]


def test_a_real_file_wins(tmp_path):
    save_whole(tmp_path / "step-1", {"model": W})
    (tmp_path / "step-1/model.safetensors").write_bytes(b"real")
    with package.mount(tmp_path) as mount:
        assert (mount / "step-1/model.safetensors").read_bytes() == b"real"


def test_ls_says_what_a_virtual_file_is_joined_from(ckptfs, saved_by_ranks):
    listed = ckptfs("ls", saved_by_ranks / "dcp-4-plain").stdout
    assert "joined from torch.distributed.checkpoint: 4 ranks" in listed
    assert "shown: `model`; not shown, choose with --root: `list`, `optimizer`" in listed


@pytest.fixture
def saved(tmp_path):
    """A folder of two files, in which `a` is cut by rows over both."""
    path = tmp_path / "step-1"
    save_by_rows(path)
    return path


def save_by_rows(path, rows=FULL, at=2, **how):
    halves = [((0, 0), (at, rows.shape[1])), ((at, 0), (rows.shape[0] - at, rows.shape[1]))]
    ranks = [[("a", halves[0]), ("b", ((0,), (5,)))], [("a", halves[1])]]
    save_pieces(FileSystemWriter(path, sync_files=False), {"a": rows, "b": torch.arange(5)}, ranks, **how)


def test_a_folder_without_its_table_is_refused(ckptfs, saved):
    (saved / ".metadata").unlink()
    check_refused(ckptfs, saved, "the save did not end: .metadata is missing", "give the folder of another step")


def test_a_save_that_has_not_ended_is_refused(ckptfs, saved):
    shutil.copy(saved / ".metadata", saved / ".metadata.tmp")
    check_refused(ckptfs, saved, "a save into this folder has not ended: .metadata.tmp is there", "wait until")


def test_a_missing_file_of_a_rank_is_named(ckptfs, saved):
    (saved / "__1_0.distcp").unlink()
    check_refused(ckptfs, saved, "the file of a rank is missing: __1_0.distcp", f"fetch {saved}/__1_0.distcp")


def test_an_empty_file_is_named(ckptfs, saved):
    os.truncate(saved / "__1_0.distcp", 0)
    check_refused(ckptfs, saved, "__1_0.distcp is empty", f"fetch {saved}/__1_0.distcp again")


def test_a_file_shorter_than_recorded_is_refused_whatever_it_lacks(ckptfs, tmp_path):
    path = tmp_path / "step-1"
    save_whole(path, {"model": W, "optimizer": OPTIMIZER})
    end = max(place.offset + place.length for place in pickle.loads((path / ".metadata").read_bytes()).storage_data.values())
    os.truncate(path / "__0_0.distcp", end - 1)
    words = f"__0_0.distcp has {end - 1} bytes and is shorter than recorded: its last item ends at {end}"
    check_refused(ckptfs, path, words, f"fetch {path}/__0_0.distcp again")


@pytest.mark.parametrize("name", ["./__1_0.distcp", "__1_0.distcp\0", "", "x/./y", "./" * 1900 + "__1_0.distcp"])
def test_file_names_that_torch_does_not_write_are_refused_as_such(ckptfs, saved, name):
    edit_table(saved, change_place(relative_path=name))
    check_refused(ckptfs, saved, "the table names a file by `", "which has a NUL or a part such as `./` in it")
    assert "--follow-symlinks" not in ckptfs("inspect", saved).stderr


def test_a_save_over_an_earlier_one_is_refused_until_it_ends(ckptfs, saved, tmp_path):
    """The data of one file is new, and the table is not."""
    save_by_rows(tmp_path / "new", rows=FULL + 100)
    shutil.copy(tmp_path / "new/__0_0.distcp", saved)
    inspect = subprocess.Popen([ckptfs.binary, "inspect", saved], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    time.sleep(0.3)
    assert inspect.poll() is None
    for name in ("__1_0.distcp", ".metadata"):
        shutil.copy(tmp_path / "new" / name, saved)
    assert "a save into this folder has not ended: __0_0.distcp is newer than its table" in inspect.communicate()[1]
    assert inspect.returncode == REFUSED
    check_same(load_file(saved), {"a": FULL + 100, "b": torch.arange(5)})


@pytest.mark.parametrize("age", [0, 1, 1000, -1000])
def test_a_copy_is_read_whatever_its_times_are(ckptfs, saved, age):
    now = time.time()
    os.utime(saved / ".metadata", (now, now - age - 5))
    for name in ("__0_0.distcp", "__1_0.distcp"):
        os.utime(saved / name, (now, now - age))
    assert ckptfs("inspect", saved).code == DONE


@pytest.mark.parametrize("size", [1, 100, -1])
def test_a_truncated_file_is_named(ckptfs, saved, size):
    path = saved / "__1_0.distcp"
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    check_refused(ckptfs, saved, "its piece reaches past the end of __1_0.distcp", f"fetch {path} again", tensor=None)


@pytest.mark.parametrize("other", ["rows", "type"])
def test_a_file_of_another_save_is_refused(ckptfs, saved, tmp_path, other):
    save_by_rows(tmp_path / "other", **({"at": 3} if other == "rows" else {"rows": FULL.int()}))
    shutil.copy(tmp_path / "other/__1_0.distcp", saved / "__1_0.distcp")
    what = {"rows": "reaches past the end of", "type": "its values have another type"}[other]
    check_refused(ckptfs, saved, "tensor `a`", "__1_0.distcp", what)
    shutil.copy(tmp_path / "other/__0_0.distcp", saved / "__1_0.distcp")
    check_refused(ckptfs, saved, "tensor `a`", "its piece in __1_0.distcp is not", "files of two saves")


def test_files_that_were_swapped_are_refused(ckptfs, saved):
    first, second = (saved / f"__{n}_0.distcp" for n in range(2))
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    check_refused(ckptfs, saved, ".distcp")


def test_tables_of_two_ways_to_save_are_refused(ckptfs, saved):
    shutil.copy(saved / ".metadata", saved / "__0.metadata")
    check_refused(ckptfs, saved, "files of two saves", ".metadata and __0.metadata do not belong together", "move the files")


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


def test_the_number_of_ranks_is_enforced(ckptfs, saved_by_ranks, saved):
    by_rank = saved_by_ranks / "dcp-4-tables"
    assert "4 ranks found, the number is not recorded: --ranks N enforces it" in ckptfs("inspect", by_rank).stdout
    for path, ranks, wrong in (by_rank, 4, 5), (saved, 2, 3):
        found = ckptfs("inspect", "--ranks", str(ranks), path)
        assert found.code == DONE and "not recorded" not in found.stdout
        check_refused(ckptfs, path, f"{ranks} ranks found, and {wrong} were asked for", options=("--ranks", str(wrong)))


def test_a_tensor_without_keys_is_refused(ckptfs, saved):
    edit_table(saved, lambda table: table.planner_data.pop("a") and None)
    check_refused(ckptfs, saved, "tensor `a`: planner_data of .metadata lacks it", "fetch the folder again")
    edit_table(saved, lambda table: table.planner_data.update(a=("b",)))
    check_refused(ckptfs, saved, "tensor `a`: planner_data of .metadata", "other keys than those in its name")


def test_what_is_left_out_is_named(ckptfs, tmp_path):
    save_whole(tmp_path / "step-1", {"model": W, "extra": torch.ones(1), "step": torch.ones(1)})
    listed = ckptfs("inspect", tmp_path / "step-1").stdout
    assert "not shown: 1 tensor: `extra`" in listed and "not shown: 1 tensor of training state: `step`" in listed
    save_whole(tmp_path / "step-2", {**W, "trainer.w": torch.ones(1)})
    assert "not shown: 1 tensor: `trainer.w`" in ckptfs("export", tmp_path / "step-2", tmp_path / "out.safetensors").stderr


def test_replicas_in_tables_of_ranks_are_found_soon(ckptfs, saved):
    """Comparing every pair of pieces would take twenty seconds."""
    table = pickle.loads((saved / ".metadata").read_bytes())
    (saved / ".metadata").unlink()
    place = table.storage_data[MetadataIndex("a", (0, 0))]
    count = 60_000
    for rank in range(2):
        starts = [torch.Size((n, 0)) for n in range(rank * count, (rank + 1) * count)]
        tensor = dataclasses.replace(table.state_dict_metadata["a"], size=torch.Size((2 * count, 4)))
        tensor.chunks = [ChunkStorageMetadata(start, torch.Size((1, 4))) for start in starts]
        of_rank = dataclasses.replace(table, state_dict_metadata={"a": tensor}, planner_data={})
        of_rank.storage_data = {MetadataIndex("a", start): place for start in starts}
        (saved / f"__{rank}.metadata").write_bytes(pickle.dumps(of_rank))
    spent = lambda: resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    before = spent()
    outcome = ckptfs("inspect", saved, bounded=True)
    assert outcome.code == REFUSED and "it has another shape" in outcome.stderr + outcome.stdout
    assert spent() - before < 8


def chunks_of(table, name="a"):
    return table.state_dict_metadata[name].chunks


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
def test_an_inconsistent_table_is_refused(ckptfs, saved, kind):
    change, *words = TABLE_FAULTS[kind]
    edit_table(saved, change)
    check_refused(ckptfs, saved, *words)


@pytest.mark.parametrize("where", ["above", "absolute", "inside-and-out", "link"])
def test_a_file_outside_of_the_folder_is_not_read(ckptfs, saved, tmp_path, where):
    outside = tmp_path / "outside.distcp"
    (saved / "__1_0.distcp").rename(outside)
    name = {"above": "../outside.distcp", "absolute": str(outside), "inside-and-out": "x/../../outside.distcp"}.get(where)
    if name is None:
        (saved / "__1_0.distcp").symlink_to(outside)
    else:
        edit_table(saved, change_place(relative_path=name))
    for words in (["inspect", saved], ["export", saved, tmp_path / "out.safetensors"]):
        outcome = ckptfs(*words, bounded=True)
        assert outcome.code in (FAILED, REFUSED), outcome
        assert "outside.distcp" in outcome.stderr or "__1_0.distcp" in outcome.stderr
        assert "--follow-symlinks" in outcome.stderr
    assert not (tmp_path / "out.safetensors").exists()
    with pytest.raises((SafetensorError, OSError)):
        load_file(saved)
    with package.mount(saved) as mount:
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


def test_absurd_tables_are_refused_in_bounded_time_and_memory(ckptfs, saved):
    plain = (saved / ".metadata").read_bytes()

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
        (saved / ".metadata").write_bytes(plain)
        edit_table(saved, change)
        started = time.monotonic()
        check_refused(ckptfs, saved)
        assert time.monotonic() - started < 15, change.__name__


def test_a_table_that_is_cut_off_is_refused(ckptfs, saved):
    table = (saved / ".metadata").read_bytes()
    for size in [*range(0, len(table), 97), len(table) - 1]:
        (saved / ".metadata").write_bytes(table[:size])
        outcome = ckptfs("inspect", saved, bounded=True)
        assert outcome.code == REFUSED and ".metadata is not readable" in outcome.stdout + outcome.stderr, size
    (saved / ".metadata").write_bytes(table + b"more")
    check_refused(ckptfs, saved, "4 bytes")


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


@pytest.mark.parametrize("where", ["storage_meta", "planner_data", "version", "surplus"])
def test_nothing_of_a_table_is_executed(ckptfs, saved, tmp_path, where):
    marker = tmp_path / "marker"
    edit_table(saved, set_key(where, Touch(marker)))
    check_same(load_file(saved), {"a": FULL, "b": torch.arange(5)})
    assert ckptfs("inspect", saved).code == DONE and ckptfs("verify", saved).code == DONE
    assert not marker.exists()
    # torch cannot go on with the result of the call, but makes the call.
    with contextlib.suppress(CheckpointException), warnings.catch_warnings(action="ignore"):
        dcp.load({"a": torch.zeros(6, 4)}, checkpoint_id=saved, no_dist=True)
    assert marker.exists()


def test_a_call_in_the_place_of_a_size_is_refused(ckptfs, saved, tmp_path):
    marker = tmp_path / "markers/marker"
    marker.parent.mkdir()

    def change(table):
        table.state_dict_metadata["a"].size = Touch(marker)

    edit_table(saved, change)
    check_refused(ckptfs, saved, ".metadata is not as torch.distributed.checkpoint writes it", "a tensor has no size")
    assert not marker.exists()
    pickle.loads((saved / ".metadata").read_bytes())
    assert marker.exists()


def test_pieces_are_not_executed_either(ckptfs, saved, tmp_path):
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


def test_tables_of_older_versions_are_read(ckptfs, tmp_path, saved):
    """Without the newer fields, and with the properties of tensors in their older module and form."""

    def change(table):
        for field in ("storage_meta", "version", "planner_data"):
            del table.__dict__[field]
        for info in table.storage_data.values():
            info.__dict__.pop("transform_descriptors", None)

    edit_table(saved, change)
    table = (saved / ".metadata").read_bytes()
    check_same(load_file(saved), {"a": FULL, "b": torch.arange(5)})
    new, old = b"torch.distributed.checkpoint.metadata", b"torch.distributed._shard.sharded_tensor.metadata"
    older = pickle.loads(table)
    (saved / ".metadata").write_bytes(dump_renamed(older, {"TensorProperties": old.decode(), "_MEM_FORMAT_ENCODING": old.decode()}))
    assert old in (saved / ".metadata").read_bytes() and new in (saved / ".metadata").read_bytes()
    check_doors(ckptfs, saved, {"a": FULL, "b": torch.arange(5)}, tmp_path / "out.safetensors")


def dump_renamed(table, modules):
    """Pickles a table with some classes in other modules, and with properties of five fields."""
    class Old(pickle._Pickler):
        def save_global(self, obj, name=None):
            module = modules.get(getattr(obj, "__name__", ""))
            if module is None:
                return super().save_global(obj, name)
            self.save(module)
            self.save(obj.__name__)
            self.write(pickle.STACK_GLOBAL)
            self.memoize(obj)

        dispatch = {**pickle._Pickler.dispatch, type: save_global}

        def reducer_override(self, obj):
            if isinstance(obj, TensorProperties):
                made = obj.__reduce_ex__(4)
                return (*made[:2], made[2][:5], *made[3:])
            return NotImplemented

    out = io.BytesIO()
    Old(out, 4).dump(table)
    return out.getvalue()


def test_files_of_other_names_are_found_by_the_table(tmp_path, saved):
    """Megatron puts the name of a group in front."""
    (saved / "__1_0.distcp").rename(saved / "default__1_0.distcp")
    edit_table(saved, change_place(relative_path="default__1_0.distcp"))
    check_same(load_file(saved), {"a": FULL, "b": torch.arange(5)})
    (saved / "deeper").mkdir()
    (saved / "default__1_0.distcp").rename(saved / "deeper/1.distcp")
    edit_table(saved, change_place(relative_path="deeper/1.distcp"))
    check_same(load_file(saved), {"a": FULL, "b": torch.arange(5)})


OPENS = """
import resource, sys
import ckptfs.torch
soft, hard = int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    print(ckptfs.torch.load_file(sys.argv[1])["a"].sum().item())
except OSError as fault:
    print(fault, *fault.__notes__)
"""


def test_a_thousand_ranks_need_as_many_open_files(ckptfs, tmp_path):
    """The command and Python raise the soft limit. Where the hard one does not suffice, the error says what does."""
    path = tmp_path / "step-1"
    rows = torch.arange(3000.0).reshape(1500, 2)
    ranks = [[("a", ((n, 0), (1, 2)))] for n in range(1500)]
    save_pieces(FileSystemWriter(path, sync_files=False), {"a": rows}, ranks)
    out = tmp_path / "out.safetensors"
    words = ["sh", "-c", 'ulimit -S -n 300 && exec "$@"', "sh", ckptfs.binary, "export", path, out]
    subprocess.run(list(map(str, words)), check=True, capture_output=True)
    check_tensors(out, {"a": rows})
    assert python("-c", OPENS, path, 300, 4000).stdout == f"{rows.sum().item()}\n"
    done = python("-c", OPENS, path, 300, 300)
    assert "Too many open files" in done.stdout and "ulimit -n" in done.stdout, done


def read_whole(path):
    return safetensors.torch.load((path / "model.safetensors").read_bytes())


def test_steps_that_come_and_go_are_whole_or_not_there(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    saver = subprocess.Popen([sys.executable, COMMON / "saving_loop.py", runs], stdin=subprocess.PIPE)
    new = {"mount": 0, "folder": 0}
    replaced = dict(new)
    ways = {"mount": read_whole, "folder": lambda path: load_file(path, backend="pread")}
    try:
        with package.mount(runs) as mount:
            roots = {"mount": mount, "folder": runs}
            end = time.monotonic() + PATIENCE
            while min(new.values()) < 10 or min(replaced.values()) < 5:
                assert time.monotonic() < end and saver.poll() is None, (new, replaced)
                for way, step in itertools.product(ways, os.listdir(mount)):
                    try:
                        state = ways[way](roots[way] / step)
                    except (SafetensorError, OSError):
                        continue
                    numbers = {float(value) for tensor in state.values() for value in tensor.unique()}
                    assert len(numbers) == 1, f"{way} {step} is a mixture: {numbers}"
                    assert sorted(state) == ["columns", "rows", "scalar"]
                    if step == "same":
                        replaced[way] += 1
                    else:
                        assert {step} == {f"step-{number:.0f}" for number in numbers}
                        new[way] += 1
    finally:
        saver.kill()
        saver.wait()
