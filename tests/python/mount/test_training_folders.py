"""Training folders are shown where loaders look for weights: beside the config, even if it lies in another folder."""

import json
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckptfs.torch import load_file as load_through_package
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from compare import check_same
from mounts import until
from program import REFUSED

RANKS = 2


def weights(number=1):
    """Values that tell one save from another."""
    return {"a.weight": torch.full((5, 3), float(number)), "b.bias": torch.arange(4.0) + number}


def write_dcp(folder, tensors):
    dcp.save({"model": tensors}, checkpoint_id=str(folder), no_dist=True)


def write_shards_of_ranks(folder, tensors):
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=dict.fromkeys(tensors, 1), save_distributed=True
    )
    dcp.save(tensors, storage_writer=writer, no_dist=True)


def write_zero(folder, tensors, step=1):
    """Writes the part of DeepSpeed's stage 3 that says where the weights are."""
    folder.mkdir(parents=True)
    flat = [[] for _ in range(RANKS)]
    for tensor in tensors.values():
        part = -(-tensor.numel() // RANKS)
        # What follows the last value is never shown.
        padded = torch.cat([tensor.flatten(), torch.full((part * RANKS - tensor.numel(),), torch.nan)])
        for rank in range(RANKS):
            flat[rank].append(padded[rank * part : (rank + 1) * part])
    states = {
        "module": {name: torch.empty(0) for name in tensors}, "buffer_names": [], "shared_params": {},
        "param_shapes": [{name: tensor.shape for name, tensor in tensors.items()}], "global_steps": step,
    }  # fmt: skip
    for rank in range(RANKS):
        optimizer = {"zero_stage": 3, "partition_count": RANKS, "fp32_flat_groups": [torch.cat(flat[rank])]}
        torch.save(states, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch.save(
            {"optimizer_state_dict": optimizer}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        )


def write_run(run, step, tensors):
    write_zero(run / f"global_step{step}", tensors, step)
    (run / "latest").write_text(f"global_step{step}")


def write_verl(actor, tensors):
    actor.mkdir(parents=True)
    torch.save(tensors, actor / "model_world_size_1_rank_0.pt")
    (actor / "huggingface").mkdir()
    (actor / "huggingface/config.json").write_text("{}")


def write_trainer(folder, tensors):
    write_dcp(folder / "pytorch_model_fsdp_0", tensors)
    (folder / "config.json").write_text("{}")
    torch.save({"state": {}}, folder / "optimizer.bin")


# The writer of each run, and the folders in which its weights are shown.
RUNS = {
    "trainer": (write_trainer, [".", "pytorch_model_fsdp_0"]),
    "deepspeed": (lambda run, tensors: write_run(run, 7, tensors), [".", "global_step7"]),
    "verl": (write_verl, [".", "huggingface"]),
}


@pytest.mark.parametrize("kind", RUNS)
def test_the_weights_of_a_run_are_shown_beside_its_config(ckptfs, mounts, tmp_path, kind):
    write, folders = RUNS[kind]
    source = tmp_path / "runs"
    write(source / "run", weights())
    originals = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    mount = mounts(source)
    for folder in folders:
        check_same(load_file(mount / "run" / folder / "model.safetensors"), weights())
    listings = ckptfs("ls", "--json", "--recursive", source / "run").json()
    shown = {
        (listing["path"] or ".", entry["name"])
        for listing in listings for entry in listing["entries"] if entry["kind"] == "virtual_file"
    }  # fmt: skip
    assert shown == {(folder, "model.safetensors") for folder in folders}
    # Training resumes from the files of the ranks.
    for path, text in originals.items():
        assert (mount / path.relative_to(source)).read_bytes() == text
    check_same(load_file(ckptfs.export(source / "run", tmp_path / "out.safetensors")), weights())
    assert ckptfs("verify", source / "run", "--against", mount / "run/model.safetensors").code == 0


@pytest.mark.parametrize("kind", RUNS)
def test_a_folder_with_weights_of_its_own_shows_those(ckptfs, tmp_path, kind):
    write, _ = RUNS[kind]
    write(tmp_path / "run", weights(1))
    folder = tmp_path / "run/huggingface" if kind == "verl" else tmp_path / "run"
    save_file(weights(2), folder / "model.safetensors")
    listings = {tmp_path / "run" / one["path"]: one for one in ckptfs("ls", "--json", "-r", tmp_path / "run").json()}
    assert not any(entry["kind"] == "virtual_file" for entry in listings[folder]["entries"])
    check_same(load_file(ckptfs.export(folder, tmp_path / "out.safetensors")), weights(2))


@pytest.mark.parametrize("place", [".", "huggingface", "model.safetensors", "huggingface/model.safetensors"])
@pytest.mark.parametrize("is_mounted", [False, True], ids=["on-disk", "mounted"])
def test_every_place_of_verls_model_can_be_given(ckptfs, mounts, tmp_path, place, is_mounted):
    actor = tmp_path / "runs/actor"
    write_verl(actor, weights())
    torch.save({"state": {0: {"exp_avg": torch.ones(2)}}}, actor / "optim_world_size_1_rank_0.pt")
    torch.save({"rng": {"cpu": torch.ones(3)}}, actor / "extra_state_world_size_1_rank_0.pt")
    path = (mounts(tmp_path / "runs") / "actor" if is_mounted else actor) / place
    check_same(load_file(ckptfs.export(path, tmp_path / "out.safetensors")), weights())
    check_same(load_through_package(path), weights())


def test_links_of_a_config_folder_stay_in_its_parent(ckptfs, tmp_path):
    write_verl(tmp_path / "actor", weights())
    name = "model_world_size_1_rank_0.pt"
    (tmp_path / "actor" / name).rename(tmp_path / name)
    (tmp_path / "actor" / name).symlink_to(f"../{name}")
    refused = ckptfs("inspect", tmp_path / "actor/huggingface")
    assert refused.code != 0 and "leads out" in refused.stderr
    assert ckptfs("inspect", tmp_path / "actor/huggingface", "--follow-symlinks").code == 0


def remedy(ckptfs, path):
    """The message for a path, and the path that its remedy ends with, if it can be opened."""
    refused = ckptfs("inspect", path)
    assert refused.code != 0
    suggested = refused.stderr.strip().rsplit(" ", 1)[-1]
    return refused.stderr, suggested if ckptfs("inspect", suggested).code == 0 else None


def test_a_latest_that_names_a_missing_step_is_said(ckptfs, tmp_path):
    write_run(tmp_path, 7, weights())
    (tmp_path / "latest").write_text("global_step9")
    said, suggested = remedy(ckptfs, tmp_path)
    assert "`latest` names global_step9, which is not there" in said and suggested == str(tmp_path / "global_step7")


def test_a_dangling_latest_does_not_hide_other_checkpoints(ckptfs, tmp_path):
    (tmp_path / "latest").symlink_to("removed")
    (tmp_path / "model").mkdir()
    torch.save(weights(), tmp_path / "model/a.pt")
    said, suggested = remedy(ckptfs, tmp_path)
    assert "no checkpoint" in said and suggested == str(tmp_path / "model")


def test_the_file_latest_leads_to_its_folder(ckptfs, tmp_path):
    write_run(tmp_path, 7, weights())
    said, suggested = remedy(ckptfs, tmp_path / "latest")
    assert "names the folder that DeepSpeed saved last" in said and suggested == str(tmp_path)


@pytest.mark.parametrize("folder", [".", "global_step7"])
def test_a_model_of_deepspeed_without_zero_is_named(ckptfs, tmp_path, folder):
    states = tmp_path / "global_step7/mp_rank_00_model_states.pt"
    states.parent.mkdir()
    torch.save({"module": weights(), "ds_version": "0.19"}, states)
    (tmp_path / "latest").write_text("global_step7")
    said, suggested = remedy(ckptfs, tmp_path / folder)
    assert "without ZeRO" in said and suggested == str(states)


def test_the_parameters_of_a_universal_checkpoint_lead_to_its_folder(ckptfs, tmp_path):
    (tmp_path / "zero/a").mkdir(parents=True)
    torch.save({"param": torch.ones(2)}, tmp_path / "zero/a/fp32.pt")
    said, suggested = remedy(ckptfs, tmp_path / "zero")
    assert "universal checkpoint" in said and suggested == str(tmp_path)


def test_a_checkpoint_that_can_be_read_is_suggested(ckptfs, tmp_path):
    (tmp_path / "a.pt").write_bytes(b"PK\3\4" + bytes(100))
    for name in ("b.pt", "c.pt"):
        torch.save(weights(), tmp_path / name)
    said, suggested = remedy(ckptfs, tmp_path)
    assert "several checkpoints" in said and suggested == str(tmp_path / "b.pt")


def test_a_shard_beside_a_real_file_leads_to_both(ckptfs, tmp_path):
    write_shards_of_ranks(tmp_path, weights())
    (shard,) = tmp_path.iterdir()
    save_file(weights(2), tmp_path / "model.safetensors")
    said, _ = remedy(ckptfs, shard)
    assert f"give the whole model: {tmp_path / 'model.safetensors'}; or move that file away" in said


def test_a_mount_shows_the_step_that_was_saved_last(mounts, tmp_path):
    source = tmp_path / "run"
    write_run(source, 1, weights(1))
    mount = mounts(source)
    latest = mount / "model.safetensors"
    check_same(load_file(latest), weights(1))
    for step in (2, 3):
        write_run(source, step, weights(step))
        until("the new step is shown", lambda: load_file(latest)["b.bias"][0] == step)
        check_same(load_file(latest), weights(step))
        check_same(load_file(mount / f"global_step{step - 1}/model.safetensors"), weights(step - 1))
    shutil.rmtree(source / "global_step3")
    until("it is gone with its step", lambda: not latest.exists())


def test_a_save_shows_when_it_is_complete(mounts, tmp_path):
    """The folder of the ranks is there first, and `.metadata` last."""
    done, run = tmp_path / "done", tmp_path / "runs/checkpoint-5"
    write_trainer(done, weights())
    (run / "pytorch_model_fsdp_0").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    mount = mounts(tmp_path / "runs")
    shown = mount / "checkpoint-5/model.safetensors"
    assert not shown.exists()
    for path in sorted((done / "pytorch_model_fsdp_0").iterdir(), reverse=True):
        assert not shown.exists()
        shutil.copy(path, run / "pytorch_model_fsdp_0")
    until("it is shown", shown.exists)
    check_same(load_file(shown), weights())


def test_shards_of_ranks_are_hidden_beside_the_joined_file(ckptfs, mounts, tmp_path):
    source = tmp_path / "model"
    write_shards_of_ranks(source, weights())
    shards = sorted(os.listdir(source))
    assert all(name.startswith("shard-") for name in shards)
    assert os.listdir(mounts(source).point) == ["model.safetensors"]
    assert sorted(os.listdir(mounts(source, "--show-originals").point)) == shards
    done = ckptfs("inspect", source)
    assert "1 rank found, the number is not recorded: --ranks N enforces it" in done.stdout
    assert "not recorded" not in ckptfs("inspect", "--ranks", "1", source).stdout
    refused = ckptfs("inspect", "--ranks", "2", source)
    assert refused.code == REFUSED and "1 rank found, and 2 were asked for" in refused.stderr
    (listing,) = ckptfs("ls", "--json", "--ranks", "2", source).json()
    assert [refused["names"] for refused in listing["refused"]] == [shards]


def test_a_mount_refuses_another_number_of_ranks(mounts, tmp_path):
    source = tmp_path / "runs"
    write_shards_of_ranks(source / "model", weights())
    assert os.listdir(mounts(source, "--ranks", "1") / "model") == ["model.safetensors"]
    mount = mounts(source, "--ranks", "2")
    assert all(name.startswith("shard-") for name in os.listdir(mount / "model"))
    attribute = os.getxattr(mounts(source, "--ranks", "1") / "model/model.safetensors", "user.ckptfs.source")
    assert json.loads(attribute)["options"]["ranks"] == 1


@pytest.mark.parametrize("write", [write_dcp, write_zero])
def test_a_tensor_with_the_reserved_name_is_refused(ckptfs, tmp_path, write):
    write(tmp_path / "run", {"__metadata__": torch.ones(4)})
    refused = ckptfs("inspect", tmp_path / "run")
    assert refused.code == REFUSED and "the name that safetensors keeps for metadata" in refused.stderr


def test_a_piece_that_repeats_its_bytes_is_refused(ckptfs, tmp_path):
    write_dcp(tmp_path / "run", {"a": torch.ones(4, 4096)})
    data = tmp_path / "run/__0_0.distcp"
    size = data.stat().st_size
    # A tensor that is larger than its bytes in the file.
    with open(data, "wb") as file:
        torch.save(torch.ones(4, 1).expand(4, 4096), file)
        written = file.tell()
    table = tmp_path / "run/.metadata"
    metadata = pickle.loads(table.read_bytes())
    for place in metadata.storage_data.values():
        assert place.length == size
        place.length = written
    table.write_bytes(pickle.dumps(metadata))
    refused = ckptfs("inspect", tmp_path / "run")
    assert refused.code == REFUSED and "it repeats its bytes" in refused.stderr


def test_python_takes_the_number_of_ranks(tmp_path):
    import ckptfs
    from ckptfs.torch import load_file as load

    write_shards_of_ranks(tmp_path / "model", weights())
    check_same(load(tmp_path / "model", ranks=1), weights())
    with pytest.raises(ckptfs.SafetensorError, match="1 rank found, and 2 were asked for"):
        load(tmp_path / "model", ranks=2)
    for wrong in (0, "2", True):
        with pytest.raises(TypeError, match="ranks"):
            load(tmp_path / "model", ranks=wrong)
