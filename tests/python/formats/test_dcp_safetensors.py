"""Per-rank safetensors files of torch.distributed.checkpoint are joined, bit for bit. The joined file takes their
place, and folders that are clearly incomplete are refused."""

import json
import os
import random
import shutil

import ckptfs as package
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from ckptfs import safe_open
from ckptfs.torch import load_file
from safetensors.torch import save_file
from torch.distributed.checkpoint import _consolidate_hf_safetensors as hf
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from compare import any_index, check_same
from program import DONE
from refusals import check_refused
from training import (
    BY_RANKS_AS_SAFETENSORS,
    DTYPES,
    any_boxes,
    any_tensor,
    check_doors,
    check_mounted,
    save_pieces,
)

FULL = torch.arange(24, dtype=torch.float32).reshape(6, 4)


@pytest.mark.parametrize("name", BY_RANKS_AS_SAFETENSORS)
def test_what_ranks_saved_is_the_same_through_every_door(ckptfs, saved_by_ranks, tmp_path, name):
    expected = torch.load(f"{saved_by_ranks / name}.expected")
    check_doors(ckptfs, saved_by_ranks / name, expected, tmp_path / "out.safetensors")


@pytest.fixture(scope="module")
def mounted(saved_by_ranks):
    """What ranks saved, through a mount."""
    with package.mount(saved_by_ranks) as path:
        yield path


@pytest.mark.parametrize("name", BY_RANKS_AS_SAFETENSORS)
def test_the_joined_file_hides_the_files_of_the_ranks(ckptfs, saved_by_ranks, mounted, tmp_path, name):
    out = ckptfs.export(saved_by_ranks / name, tmp_path / "out.safetensors")
    expected = torch.load(f"{saved_by_ranks / name}.expected")
    assert os.listdir(mounted / name) == ["model.safetensors"]
    check_mounted(mounted / name / "model.safetensors", expected, out)
    check_same(load_file(mounted / name), expected)


def test_originals_are_shown_without_the_joined_file_where_asked_for(saved_by_ranks):
    with package.mount(saved_by_ranks / "hf-4-parts", show_originals=True) as mount:
        originals = sorted(os.listdir(saved_by_ranks / "hf-4-parts"))
        assert sorted(os.listdir(mount)) == originals and len(originals) == 8
        for name in originals:
            assert (mount / name).read_bytes() == (saved_by_ranks / "hf-4-parts" / name).read_bytes()


@pytest.mark.parametrize("show", [False, True], ids=["joined", "originals"])
def test_training_resumes_through_a_mount(saved_by_ranks, show):
    expected = torch.load(saved_by_ranks / "hf-4-parts.expected")
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with package.mount(saved_by_ranks / "hf-4-parts", show_originals=show) as mount:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(mount)), no_dist=True)
    check_same(state, expected)


def test_a_note_says_that_the_number_of_ranks_is_not_recorded(ckptfs, saved_by_ranks):
    for ranks, said in ((1, "1 rank found"), (4, "4 ranks found")):
        folder = saved_by_ranks / f"hf-{ranks}-parts"
        for command in ("inspect", "ls"):
            assert f"{said}, the number is not recorded" in ckptfs(command, folder).stdout


# Hundreds of cases of any boxes, in folders that a fixture writes at once.
SEEDS = range(150)


def random_case(folder, seed):
    """A file has a tensor's name once, so a rank has one box of each."""
    rng = random.Random(seed)
    ranks, parts = rng.randint(1, 5), rng.choice((None, 1, 2))
    tensors, by_rank = {}, [[] for _ in range(ranks)]
    for n in range(rng.randint(1, 4)):
        shape = [rng.choice((0, 1, 2, 3, 4, 5, 6, 7)) for _ in range(rng.randint(0, 4))]
        name = f"t{n}.{'x' * rng.randint(0, 30)}"
        tensors[name] = any_tensor(rng, shape, rng.choice(DTYPES))
        boxes = any_boxes(rng, shape, rng.randint(0, ranks - 1))
        for own, box in zip(rng.sample(by_rank, len(boxes)), boxes, strict=True):
            own.append((name, box))
    # A rank without any item writes no file.
    by_rank = [own for own in by_rank if own]
    index = {name: rng.randint(1, parts) for name in tensors} if parts else None
    if index:
        index[min(tensors)] = 1
        index[max(tensors)] = max(index.values())
        index = {name: sorted(set(index.values())).index(part) + 1 for name, part in index.items()}
    writer = HuggingFaceStorageWriter(str(folder), index, save_distributed=True)
    save_pieces(writer, tensors, by_rank)
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
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    check_same(state, expected)


@pytest.mark.parametrize("name", ["hf-mesh-4", "hf-fsdp-4"])
def test_torch_consolidates_to_the_same(saved_by_ranks, tmp_path, name):
    """Its consolidation takes floating point tensors only."""
    expected = torch.load(f"{saved_by_ranks / name}.expected")
    hf.consolidate_safetensors_files(
        str(saved_by_ranks / name), str(tmp_path), fqn_to_index_mapping=dict.fromkeys(expected, 1)
    )
    (path,) = tmp_path.glob("*.safetensors")
    check_same(safetensors.torch.load_file(path), expected)


@pytest.fixture
def saved(tmp_path):
    """A folder of three ranks and two parts: `a` is cut by rows, `b` is whole."""
    path = tmp_path / "step-1"
    save_by_rows(path)
    return path


def save_by_rows(path):
    thirds = [("a", ((row, 0), (2, 4))) for row in (0, 2, 4)]
    ranks = [[thirds[0], ("b", ((0,), (5,)))], [thirds[1]], [thirds[2], ("c", ((), ()))]]
    tensors = {"a": FULL, "b": torch.arange(5), "c": torch.tensor(1.0)}
    writer = HuggingFaceStorageWriter(str(path), {"a": 1, "b": 2, "c": 2}, save_distributed=True)
    save_pieces(writer, tensors, ranks)


def shard(rank, part=1, parts=2):
    return f"shard-{rank:05}-model-{part:05}-of-{parts:05}.safetensors"


def test_a_missing_rank_in_the_middle_is_named(ckptfs, saved):
    (saved / shard(2)).unlink()
    check_refused(ckptfs, saved, f"the file of a rank is missing: {shard(2)}", f"fetch {saved / shard(2)}")


def test_a_missing_first_rank_is_named(ckptfs, saved):
    for part in (1, 2):
        (saved / shard(1, part)).unlink()
    check_refused(ckptfs, saved, f"the file of a rank is missing: {shard(1)}", f"fetch {saved / shard(1)}")


def test_a_missing_part_of_the_model_is_named(ckptfs, saved):
    for rank in (1, 3):
        (saved / shard(rank, 2)).unlink()
    check_refused(ckptfs, saved, "the file of a rank is missing", "-model-00002-of-00002.safetensors")


def test_ranks_without_pieces_write_no_file(ckptfs, tmp_path):
    """As DefaultSavePlanner(dedup_save_to_lowest_rank=True) leaves those of replicas."""
    halves = [[("a", ((0, 0), (3, 4)))], [], [("a", ((3, 0), (3, 4)))], []]
    save_pieces(HuggingFaceStorageWriter(str(tmp_path / "step-1"), save_distributed=True), {"a": FULL}, halves)
    assert sorted(os.listdir(tmp_path / "step-1")) == [shard(1, parts=1), shard(3, parts=1)]
    check_doors(ckptfs, tmp_path / "step-1", {"a": FULL}, tmp_path / "out.safetensors")
    said = ckptfs("inspect", tmp_path / "step-1").stdout
    assert "3 ranks found, the number is not recorded" in said and "no file for 1 of these ranks" in said
    assert ckptfs("inspect", tmp_path / "step-1", "--ranks", "3").code == DONE


def write_layers(folder):
    """Three layers of three parts, of which each of two ranks has half."""
    tensors = {f"layers.{n}.weight": FULL + n for n in range(3)} | {"layers.1.bias": torch.ones(2)}
    halves = [[(f"layers.{n}.weight", ((row, 0), (3, 4))) for n in range(3)] for row in (0, 3)]
    halves[1].append(("layers.1.bias", ((0,), (2,))))
    index = {name: int(name.split(".")[1]) + 1 for name in tensors}
    save_pieces(HuggingFaceStorageWriter(str(folder), index, save_distributed=True), tensors, halves)
    return tensors


@pytest.mark.parametrize("part", [1, 2, 3])
def test_a_missing_part_of_a_rank_shows_by_the_other_layers(ckptfs, tmp_path, part):
    expected = write_layers(tmp_path / "step-1")
    check_doors(ckptfs, tmp_path / "step-1", expected, tmp_path / "out.safetensors")
    (tmp_path / "step-1" / shard(2, part, 3)).unlink()
    check_refused(ckptfs, tmp_path / "step-1", f"the file of a rank is missing: {shard(2, part, 3)}")


def test_stages_of_a_pipeline_have_parts_of_their_own(ckptfs, tmp_path):
    """Ranks 1 and 2 have the first and the third layer, ranks 3 and 4 the second."""
    tensors = {f"layers.{n}.weight": FULL + n for n in range(3)}
    rows = lambda n, row: (f"layers.{n}.weight", ((row, 0), (3, 4)))
    ranks = [[rows(0, 0), rows(2, 0)], [rows(0, 3), rows(2, 3)], [rows(1, 0)], [rows(1, 3)]]
    index = {name: n for n, name in enumerate(tensors, start=1)}
    save_pieces(HuggingFaceStorageWriter(str(tmp_path / "step-1"), index, save_distributed=True), tensors, ranks)
    check_doors(ckptfs, tmp_path / "step-1", tensors, tmp_path / "out.safetensors")


def test_a_missing_last_rank_is_only_noted(ckptfs, saved, tmp_path):
    for part in (1, 2):
        (saved / shard(3, part)).unlink()
    check_doors(ckptfs, saved, {"a": FULL[:4], "b": torch.arange(5)}, tmp_path / "out.safetensors")
    assert "2 ranks found, the number is not recorded" in ckptfs("inspect", saved).stdout


def test_files_of_two_numberings_are_refused(ckptfs, saved):
    shutil.copy(saved / shard(1), saved / shard(1, 3, 3))
    check_refused(ckptfs, saved, "files of two saves lie in this folder", shard(1, 3, 3), "move the files of one of the saves")


def test_a_file_that_does_not_place_its_pieces_is_refused(ckptfs, saved):
    save_file({"a": FULL[2:4]}, saved / shard(2), metadata={"format": "pt"})
    check_refused(ckptfs, saved, shard(2), "does not say where its pieces lie")


# The metadata of a rank's file about the place of `a`, and words of the message about it.
PLACES = {
    "overlap": ({"a": {"saved_offsets": [1, 0]}}, "tensor `a`: two pieces hold the same values"),
    "hole": ({"a": {"saved_offsets": [20, 0]}}, "tensor `a`: pieces are missing"),
    "twice": ({"a": {"saved_offsets": [0, 0]}}, "tensor `a`: two pieces hold the same values"),
    "far-out": ({"a": {"saved_offsets": [2**62, 0]}}, "tensor `a`"),
    "past-all": ({"a": {"saved_offsets": [2**64 - 1, 0]}}, "tensor `a`"),
    "beyond-numbers": ({"a": {"saved_offsets": [2**70, 0]}}, "does not say where its pieces lie"),
    "negative": ({"a": {"saved_offsets": [-1, 0]}}, "does not say where its pieces lie"),
    "fraction": ({"a": {"saved_offsets": [2.5, 0]}}, "does not say where its pieces lie"),
    "another-rank": ({"a": {"saved_offsets": [2]}}, "tensor `a`", "DCP_SHARDING_INFO lacks its offsets"),
    "another-name": ({"b": {"saved_offsets": [2, 0]}}, "tensor `a`", "DCP_SHARDING_INFO lacks its offsets"),
    "another-form": ({"a": [2, 0]}, "does not say where its pieces lie"),
    "nothing": ({}, "tensor `a`", "DCP_SHARDING_INFO lacks its offsets"),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLACES)
def test_places_that_do_not_fit_are_refused(ckptfs, saved, kind):
    places, *words = PLACES[kind]
    metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0"}
    save_file({"a": FULL[2:4].clone()}, saved / shard(2), metadata=metadata)
    check_refused(ckptfs, saved, *words)


TEXTS = ["", "x", "[]", "{", '{"a": 1}', '{"a": {"saved_offsets": [1, 0]}, "a": {"saved_offsets": [2, 0]}}']


@pytest.mark.parametrize("text", TEXTS)
def test_places_that_are_no_json_or_stated_twice_are_refused(ckptfs, saved, text):
    save_file({"a": FULL[2:4].clone()}, saved / shard(2), metadata={"DCP_SHARDING_INFO": text})
    check_refused(ckptfs, saved, shard(2))


@pytest.mark.parametrize("tensor", [FULL[2:4].half(), FULL[2:4].reshape(2, 2, 2), FULL[2:4, :3].contiguous()],
                         ids=["type", "axes", "size"])  # fmt: skip
def test_a_piece_of_another_save_is_refused(ckptfs, saved, tensor):
    places = {"a": {"saved_offsets": [2] + [0] * (tensor.dim() - 1)}}
    save_file({"a": tensor}, saved / shard(2), metadata={"DCP_SHARDING_INFO": json.dumps(places)})
    check_refused(ckptfs, saved, "tensor `a`")


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_truncated_file_is_named(ckptfs, saved, size):
    path = saved / shard(2)
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    check_refused(ckptfs, saved, shard(2))


def test_absurd_places_are_refused_in_bounded_time_and_memory(ckptfs, saved):
    for places in (
        {"a": {"saved_offsets": [0] * 1_000_000}},
        {"a": {"saved_offsets": [2, 0]}} | {f"x{n}": {"saved_offsets": [n, 0]} for n in range(300_000)},
        {"a": {"saved_offsets": [2, 0]}, "x": {"saved_offsets": [2**62] * 30}},
    ):
        metadata = {"DCP_SHARDING_INFO": json.dumps(places)}
        save_file({"a": FULL[2:4].half()}, saved / shard(2), metadata=metadata)
        check_refused(ckptfs, saved, shard(2))
    metadata = {"DCP_SHARDING_INFO": '{"a":' * 100_000}
    save_file({"a": FULL[2:4].clone()}, saved / shard(2), metadata=metadata)
    check_refused(ckptfs, saved, shard(2))


def test_a_refused_folder_is_shown_as_it_is(saved):
    (saved / shard(2)).unlink()
    with package.mount(saved) as mount:
        assert sorted(os.listdir(mount)) == sorted(os.listdir(saved))


def test_a_real_file_wins(saved):
    save_file({"real": torch.ones(1)}, saved / "model.safetensors")
    with package.mount(saved) as mount:
        check_same(safetensors.torch.load_file(mount / "model.safetensors"), {"real": torch.ones(1)})


def test_other_files_stay_beside_the_joined_one(saved):
    (saved / "config.json").write_text("{}")
    with package.mount(saved) as mount:
        assert sorted(os.listdir(mount)) == ["config.json", "model.safetensors"]


def test_a_single_file_of_a_rank_is_not_taken_for_the_whole(ckptfs, saved):
    check_refused(ckptfs, saved / shard(2), "one rank's part of a sharded checkpoint")
    assert ckptfs("inspect", saved).code == DONE


def test_a_root_is_refused_for_names_without_keys(ckptfs, saved):
    check_refused(ckptfs, saved, "no tensors under `model`", "leave --root out", options=("--root", "model"))
