"""Files of one torch.save per rank are joined to whole tensors: DTensors of FSDP2 and tensor parallelism, as verl saves
them, and ShardedTensors of FSDP1. Faults that the files show are refused by name."""

import contextlib
import random
import shutil
import subprocess
import sys

import pytest
import torch
from ckptfs.torch import load_file
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import preloaded
import rank_pieces
from compare import check_export, check_same
from doors import check_every_door
from program import COMMON, REFUSED, USAGE
from rank_pieces import MODULES_OF_2_4, as_rank, file_name, rewrite_pickle, write_ranks

# Seconds. The processes that train a model start in a few, and share the CPUs.
PATIENCE = 240

FULL = torch.arange(70.0).view(10, 7)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Models that FSDP2, tensor parallelism and FSDP1 trained and saved, by the number of ranks."""
    folder = tmp_path_factory.mktemp("trained")
    subprocess.run(preloaded.command(COMMON / "fsdp_run.py", folder), check=True, timeout=PATIENCE)
    return folder


def expected_of(folder):
    return torch.load(folder.with_name(f"{folder.name}.expected"))


@pytest.mark.parametrize(
    "run",
    ["fsdp2-2", "fsdp2-4", "hybrid-4", "fsdp-and-tensor-parallel-4", "tensor-parallel-4", "fsdp1-2", "fsdp1-4"],
)
def test_a_trained_model_is_joined(ckptfs, mounts, trained, tmp_path, run):
    folder = trained / run
    name = "pytorch_model_fsdp_0.safetensors" if run.startswith("fsdp1") else "model.safetensors"
    report = check_every_door(ckptfs, mounts, folder, expected_of(folder), tmp_path / "out.safetensors", name)
    assert f"joined from per-rank files of torch: {run[-1]} ranks" in report["notes"]


def test_local_state_dicts_are_refused_by_name(ckptfs, trained):
    folder = trained / "local-2"
    outcome = ckptfs("export", folder, folder.with_name("out.safetensors"))
    assert outcome.code == REFUSED
    assert "LOCAL_STATE_DICT" in outcome.error and "pytorch_model_fsdp_0_rank0.bin" in outcome.error
    assert "SHARDED_STATE_DICT" in outcome.error and not folder.with_name("out.safetensors").exists()


CUTS = {
    "rows": ([2], [Shard(0)]),
    "columns": ([2], [Shard(1)]),
    "replicas": ([4], [Replicate()]),
    "one-rank": ([1], [Shard(0)]),
    "hybrid": ([2, 2], [Replicate(), Shard(0)]),
    "rows-and-columns": ([2, 2], [Shard(1), Shard(0)]),
    "rows-twice": ([2, 2], [Shard(0), Shard(0)]),
    "fsdp-after-tensor-parallel": ([2, 2], [_StridedShard(0, split_factor=2), Shard(0)]),
    "three-axes-of-a-mesh": ([2, 2, 2], [_StridedShard(0, split_factor=2), Shard(1), Shard(0)]),
    "fused-weights": ([2], [_StridedShard(0, split_factor=2)]),
}


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_is_joined(ckptfs, tmp_path, cut):
    mesh_shape, placements = CUTS[cut]
    tensors = {
        "uneven": (FULL, placements),
        "even": (torch.arange(64).view(8, 8), placements),
        "one-row": (torch.ones(1, 3), placements),
        "empty": (torch.empty(0, 3), placements),
        "half": (FULL.bfloat16(), placements),
        "eighth": (FULL.to(torch.float8_e4m3fn), placements),
        "transposed": {"full": FULL, "placements": placements, "transpose": True},
        "scalar": (torch.tensor(3), [Replicate()] * len(mesh_shape)),
        "buffer": (torch.ones(3, dtype=torch.bfloat16), None),
    }
    expected = write_ranks(tmp_path / "ranks", mesh_shape, tensors)
    check_export(ckptfs, tmp_path / "ranks", expected, tmp_path / "out.safetensors")


@pytest.mark.parametrize("seed", range(200), ids="seed-{}".format)
def test_random_cuts_are_joined(tmp_path, seed):
    rng = random.Random(seed)
    mesh_shape = rng.choice([[1], [2], [3], [4], [2, 2], [2, 3], [3, 2], [1, 2], [2, 1, 2], [2, 2, 2]])
    tensors = rank_pieces.random_tensors(rng, len(mesh_shape))
    expected = write_ranks(tmp_path / "ranks", mesh_shape, tensors)
    check_same(load_file(tmp_path / "ranks", backend="pread"), expected)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_a_recorded_order_of_cuts_is_followed(ckptfs, tmp_path, order):
    def change(state, mesh, rank):
        rows = FULL
        for axis in order:
            rows = [*rows.chunk(mesh.size(axis)), FULL[:0]][mesh.get_coordinate()[axis]]
        entry = ShardOrderEntry(tensor_dim=0, mesh_dims=order)
        meta = TensorMeta(FULL.shape, FULL.stride(), FULL.dtype)
        spec = DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=(entry,))
        state["a"] = DTensor(rows.clone(), spec, requires_grad=False)

    write_ranks(tmp_path / "ranks", [2, 2], {}, change=change)
    check_export(ckptfs, tmp_path / "ranks", {"a": FULL}, tmp_path / "out.safetensors")


@pytest.mark.parametrize("mesh_shape", [[2], [2, 2]], ids=str)
@pytest.mark.parametrize("version", ["2.4", "2.9"])
def test_older_spellings_of_the_mesh_are_read(ckptfs, tmp_path, version, mesh_shape):
    spell = {"2.4": rank_pieces.spell_mesh_as_2_4, "2.9": rank_pieces.spell_mesh_as_2_9}[version]
    placements = [Shard(n) for n in range(len(mesh_shape))]
    with rank_pieces.layouts_as_2_9():
        expected = write_ranks(
            tmp_path / "ranks", mesh_shape, {"a": (FULL, placements), "b": (FULL + 1, placements)},
            change=lambda state, mesh, rank: spell(mesh),
        )  # fmt: skip
    if version == "2.4":
        for path in (tmp_path / "ranks").iterdir():
            rewrite_pickle(path, *MODULES_OF_2_4)
    check_export(ckptfs, tmp_path / "ranks", expected, tmp_path / "out.safetensors")


def test_the_older_form_of_torch_files_is_joined(ckptfs, tmp_path, monkeypatch):
    newer = torch.save
    monkeypatch.setattr(torch, "save", lambda *args: newer(*args, _use_new_zipfile_serialization=False))
    for name in (file_name, unnumbered):
        folder = tmp_path / name.__name__
        expected = write_ranks(folder, [2, 2], {"a": (FULL, [Shard(0), Shard(1)]), "b": (FULL[0], None)}, name=name)
        check_export(ckptfs, folder, expected, folder / "out.safetensors")


def test_a_rank_outside_the_mesh_has_no_part(ckptfs, tmp_path):
    """The mesh has the first two of three ranks."""
    from torch.distributed.device_mesh import DeviceMesh

    (tmp_path / "ranks").mkdir()
    for rank in range(3):
        with as_rank(rank, 3):
            mesh = DeviceMesh("cpu", [0, 1])
            rows = FULL[rank * 5 : rank * 5 + 5].clone()
            a = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=FULL.shape, stride=FULL.stride())
            torch.save({"a": a}, tmp_path / "ranks" / file_name(rank, 3))
    check_export(ckptfs, tmp_path / "ranks", {"a": FULL}, tmp_path / "out.safetensors")


def unnumbered(rank, world):
    return f"rank{rank}.pt"


def write_stages(folder, name=unnumbered):
    """Two pipeline stages of two ranks each. Every rank names the tensors of both."""
    from torch.distributed.device_mesh import DeviceMesh

    folder.mkdir()
    whole = {"first": FULL, "second": FULL[:5] + 100}
    for rank in range(4):
        with as_rank(rank, 4):
            meshes = {"first": DeviceMesh("cpu", [0, 1]), "second": DeviceMesh("cpu", [2, 3])}
            cut = {key: distribute_tensor(full, meshes[key], [Shard(0)], src_data_rank=None) for key, full in whole.items()}
            torch.save(cut, folder / name(rank, 4))
    return whole


def test_the_stages_of_a_pipeline_are_joined(ckptfs, tmp_path):
    expected = write_stages(tmp_path / "ranks")
    check_export(ckptfs, tmp_path / "ranks", expected, tmp_path / "out.safetensors")


def test_a_missing_stage_of_a_pipeline_is_named(ckptfs, tmp_path):
    write_stages(tmp_path / "ranks")
    for rank in (2, 3):
        (tmp_path / "ranks" / unnumbered(rank, 4)).unlink()
    check_refused(ckptfs, tmp_path / "ranks", "missing", f"{unnumbered(2, 4)} and 1 more")


def test_the_size_of_a_mesh_is_not_taken_for_the_number_of_ranks(ckptfs, tmp_path):
    """The mesh may be that of one stage of a pipeline, and the files of the others may be missing."""
    expected = write_ranks(tmp_path / "ranks", [2], {"a": (FULL, [Shard(0)])}, name=unnumbered)
    check_export(ckptfs, tmp_path / "ranks", expected, tmp_path / "out.safetensors")
    notes = ckptfs("inspect", "--json", tmp_path / "ranks").json()["notes"]
    assert "2 ranks found, the number is not recorded: --ranks N enforces it" in notes
    assert ckptfs("inspect", tmp_path / "ranks", "--ranks", "4").code == REFUSED


def test_a_tensor_without_a_piece_in_any_file_is_refused(ckptfs, tmp_path):
    change = change_mesh(_coordinate_on_dim=None)
    write_ranks(tmp_path / "ranks", [2], {"a": (FULL, [Shard(0)]), "b": (FULL, None)}, change=change)
    check_refused(ckptfs, tmp_path / "ranks", "`a`", "0 of 70 values")


@pytest.mark.parametrize("shape", [(0,), (0, 0), (0, 7), (7, 0)], ids=str)
def test_an_empty_piece_has_any_empty_shape(ckptfs, tmp_path, shape):
    """torch keeps the empty rows of tensor parallelism as (0, 0)."""

    def change(state, mesh, rank):
        if rank == 3:
            state["a"]._local_tensor = torch.zeros(shape)

    expected = write_ranks(tmp_path / "ranks", [4], {"a": (FULL[:3], [Shard(0)])}, change=change)
    check_export(ckptfs, tmp_path / "ranks", expected, tmp_path / "out.safetensors")


@pytest.mark.parametrize("name", [lambda rank, world: f"model_world_size_4_rank_{rank}.pt", unnumbered], ids=["named", "by-mesh"])
def test_the_file_of_a_rank_that_the_run_did_not_have_is_refused(ckptfs, tmp_path, name):
    save(tmp_path / "ranks", name=name)
    shutil.copy(tmp_path / "ranks" / name(3, 4), tmp_path / "ranks" / name(4, 4))
    check_refused(ckptfs, tmp_path / "ranks", name(4, 4), "4 ranks")


def test_the_folder_of_verl_shows_the_model_beside_its_files(ckptfs, mounts, tmp_path):
    folder = tmp_path / "actor"
    expected = write_ranks(folder, [2], {"a": (FULL, [Shard(0)])})
    for rank in range(2):
        torch.save({"state": {0: {"exp_avg": torch.ones(2)}}}, folder / f"optim_world_size_2_rank_{rank}.pt")
        torch.save({"rng": {"cpu": torch.ones(3)}}, folder / f"extra_state_world_size_2_rank_{rank}.pt")
    (folder / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    check_every_door(ckptfs, mounts, folder, expected, tmp_path / "out.safetensors")


# Faults


def save(folder, **how):
    return write_ranks(folder, [4], {"a": (FULL, [Shard(0)]), "b": (FULL, [Shard(1)])}, **how)


def check_refused(ckptfs, folder, *words):
    """Asserts that a folder is refused in these words, within bounds of time and memory, with nothing written."""
    out = folder.with_name("out.safetensors")
    for outcome in (
        ckptfs("export", folder, out, bounded=True),
        ckptfs("inspect", "--json", folder, bounded=True),
    ):
        assert outcome.code == REFUSED, outcome
        for word in ["what to do: ", *words]:
            assert word in outcome.error
    assert not out.exists()
    return outcome


@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("name", [file_name, lambda rank, world: f"rank{rank}.pt"], ids=["with-the-number", "without"])
def test_a_missing_rank_is_named(ckptfs, tmp_path, rank, name):
    save(tmp_path / "ranks", name=name)
    (tmp_path / "ranks" / name(rank, 4)).unlink()
    check_refused(ckptfs, tmp_path / "ranks", "missing", name(rank, 4))


def test_a_missing_rank_of_fsdp1_is_named(ckptfs, trained, tmp_path):
    shutil.copytree(trained / "fsdp1-4", tmp_path / "ranks")
    (tmp_path / "ranks/pytorch_model_fsdp_0_rank3.bin").unlink()
    check_refused(ckptfs, tmp_path / "ranks", "missing", "pytorch_model_fsdp_0_rank3.bin")


@pytest.mark.parametrize("part", [0, 0.5, 0.99])
def test_a_truncated_file_is_named(ckptfs, tmp_path, part):
    save(tmp_path / "ranks")
    path = tmp_path / "ranks" / file_name(2, 4)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    check_refused(ckptfs, tmp_path / "ranks", path.name)


def test_files_of_two_saves_are_refused(ckptfs, tmp_path):
    save(tmp_path / "ranks")
    write_ranks(tmp_path / "other", [4], {"a": (FULL[:9], [Shard(0)]), "b": (FULL, [Shard(1)])})
    shutil.copy(tmp_path / "other" / file_name(1, 4), tmp_path / "ranks")
    check_refused(ckptfs, tmp_path / "ranks", "`a`", file_name(1, 4), "another shape or type")


def test_saves_of_runs_of_other_sizes_are_told_apart(ckptfs, tmp_path):
    expected = {size: write_ranks(tmp_path / "ranks", [size], {"a": (FULL + size, [Shard(0)])}) for size in (2, 4)}
    outcome = ckptfs("inspect", tmp_path / "ranks")
    assert outcome.code == USAGE
    assert "model_world_size_2.safetensors" in outcome.error and "model_world_size_4.safetensors" in outcome.error
    for size, tensors in expected.items():
        named = tmp_path / f"ranks/model_world_size_{size}.safetensors"
        check_same(load_file(named), tensors)


def test_plain_tensors_of_every_rank_are_refused(ckptfs, tmp_path):
    write_ranks(tmp_path / "ranks", [2], {"a": (FULL, None)})
    check_refused(ckptfs, tmp_path / "ranks", "not recorded", "full_state_dict=True")


def test_files_of_whole_models_are_checkpoints_of_their_own(ckptfs, tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    for rank in range(2):
        torch.save({"a": FULL + rank}, folder / f"rank_{rank}.pt")
        check_export(ckptfs, folder / f"rank_{rank}.pt", {"a": FULL + rank}, tmp_path / "out.safetensors")
        (tmp_path / "out.safetensors").unlink()
        (tmp_path / "again.safetensors").unlink()
    (listing,) = ckptfs("ls", "--json", folder).json()
    shown = [entry["name"] for entry in listing["entries"] if entry["kind"] == "virtual_file"]
    assert shown == ["rank_0.safetensors", "rank_1.safetensors"]
    outcome = ckptfs("inspect", folder)
    assert outcome.code == USAGE
    assert "rank_0.pt" in outcome.error and "rank_1.pt" in outcome.error


def change_spec(**attributes):
    """Changes attributes of a piece's spec."""

    def change(state, mesh, rank):
        for name, value in attributes.items():
            object.__setattr__(state["a"]._spec, name, value)

    return change


def change_mesh(**attributes):
    """Changes attributes of the mesh."""
    return lambda state, mesh, rank: mesh.__dict__.update(attributes)


def change_layout(*shape):
    return lambda state, mesh, rank: rank_pieces.spell_mesh_as_2_9(mesh, shape)


def other_rows(state, mesh, rank):
    local = state["a"].to_local()[:1]
    meta = {"shape": FULL.shape, "stride": FULL.stride()}
    state["a"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **meta)


HOSTILE = {
    "a-huge-mesh": (change_layout(1 << 40), ["`a`"]),
    "a-mesh-that-overflows": (change_layout(*[1 << 40] * 2), ["`a`"]),
    "a-mesh-with-many-axes": (change_layout(*[1] * 1000), ["`a`"]),
    "a-mesh-without-ranks": (change_layout(0), ["`a`"]),
    "a-place-out-of-range": (change_mesh(_coordinate_on_dim=(7,)), ["`a`"]),
    "a-place-with-other-axes": (change_mesh(_coordinate_on_dim=(0, 0)), ["`a`"]),
    "a-negative-place": (change_mesh(_coordinate_on_dim=(-1,)), ["`a`"]),
    "a-huge-split-factor": (change_spec(placements=(_StridedShard(0, split_factor=2**62),)), ["`a`"]),
    "no-placements": (change_spec(placements=()), ["`a`"]),
    "an-axis-out-of-range": (change_spec(placements=(Shard(9),)), ["`a`"]),
    "another-local-shape": (other_rows, ["`a`", "shape is not that of this rank's part"]),
    "a-partial-sum": (change_spec(placements=(Partial(),)), ["`a`", "partial sum"]),
    "an-order-that-names-no-cut": (change_spec(shard_order=(ShardOrderEntry(0, (5,)),)), ["`a`"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_spec_is_refused_by_name(ckptfs, tmp_path, monkeypatch, fault):
    change, words = HOSTILE[fault]
    monkeypatch.setattr(DTensorSpec, "_verify_shard_order", lambda *_: None)
    with rank_pieces.layouts_as_2_9() if "mesh" in fault else contextlib.nullcontext():
        write_ranks(tmp_path / "ranks", [2], {"a": (FULL, [Shard(0)])}, change=change)
    check_refused(ckptfs, tmp_path / "ranks", *words)


def test_cuts_without_end_are_refused_soon(ckptfs, tmp_path):
    """Thousands of tensors, each cut into as many pieces as one may be."""
    rows = torch.zeros(1 << 16)
    placements = (_StridedShard(0, split_factor=1 << 15),)

    def change(state, mesh, rank):
        local = torch.zeros(1 << 15)
        spec = DTensorSpec(mesh, placements, TensorMeta(rows.shape, rows.stride(), rows.dtype))
        state |= {f"a.{n}": DTensor(local, spec, requires_grad=False) for n in range(3000)}

    write_ranks(tmp_path / "ranks", [2], {}, change=change)
    check_refused(ckptfs, tmp_path / "ranks", "more pieces than any training run")


@pytest.mark.parametrize("rank", [0, 1])
def test_plain_tensors_of_other_shapes_are_refused(ckptfs, tmp_path, rank):
    def change(state, mesh, own):
        if own == rank:
            state["b"] = torch.ones(4)

    write_ranks(tmp_path / "ranks", [2], {"a": (FULL, [Shard(0)]), "b": (torch.ones(3), None)}, change=change)
    check_refused(ckptfs, tmp_path / "ranks", "`b`", "another shape or type")


def test_a_range_of_a_joined_tensor_equals_the_whole(tmp_path):
    from ckptfs import safe_open

    full = torch.arange(4000).view(40, 10, 10)
    write_ranks(tmp_path / "ranks", [2, 2], {"a": (full, [Shard(2), Shard(0)])})
    rng = random.Random(0)
    with safe_open(tmp_path / "ranks", "pt") as file:
        for _ in range(100):
            pick = lambda size: slice(*sorted((rng.randint(0, size), rng.randint(0, size))))
            index = tuple(map(pick, full.shape))
            assert torch.equal(file.get_slice("a")[index], full[index])


LOAD_UNDER_LIMIT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 4096))
from ckptfs import safe_open
from ckptfs.torch import load_file
with safe_open(sys.argv[1], framework="pt") as opened:
    assert opened.get_tensor("a").sum() == load_file(sys.argv[1])["a"].sum() == 2415
"""


def test_more_files_than_the_soft_limit_on_open_files_are_joined(tmp_path):
    write_ranks(tmp_path / "ranks", [100], {"a": (FULL, [Shard(0)])})
    subprocess.run([sys.executable, "-c", LOAD_UNDER_LIMIT, tmp_path / "ranks"], check=True, timeout=PATIENCE)
