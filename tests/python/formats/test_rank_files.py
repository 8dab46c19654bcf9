"""A file that holds one rank's share of a checkpoint is refused by itself. Its tensors are pieces, or empty, under the
names of whole ones. Files of the same writers with whole tensors are shown."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from compare import check_export
from refusals import check_refused

WEIGHTS = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(5)}


@pytest.fixture
def save_by_dcp(tmp_path):
    """Saves the weights with torch.distributed.checkpoint as safetensors, and returns the one file."""

    def write(*, by_rank):
        writer = HuggingFaceStorageWriter(
            str(tmp_path / "saved"), fqn_to_index_mapping=dict.fromkeys(WEIGHTS, 1),
            save_distributed=by_rank,
        )  # fmt: skip
        dcp.save(dict(WEIGHTS), storage_writer=writer, no_dist=True)
        (file,) = (tmp_path / "saved").glob("*.safetensors")
        return file

    return write


def test_a_ranks_file_is_refused(ckptfs, save_by_dcp):
    file = save_by_dcp(by_rank=True)
    assert file.name.startswith("shard-00001-")
    check_refused(ckptfs, file, "one rank's part of a sharded checkpoint")


def test_the_directory_of_a_ranks_file_is_joined(ckptfs, save_by_dcp, tmp_path):
    file = save_by_dcp(by_rank=True)
    check_export(ckptfs, file.parent, WEIGHTS, tmp_path / "out.safetensors")
    (listing,) = ckptfs("ls", "--json", file.parent).json()
    assert [entry["kind"] for entry in listing["entries"]] == ["virtual_file"] and not listing["refused"]
    assert [hidden["name"] for hidden in listing["hidden"]] == [file.name]


def test_a_file_that_was_saved_whole_is_shown(ckptfs, save_by_dcp, tmp_path):
    file = save_by_dcp(by_rank=False)
    check_export(ckptfs, file, WEIGHTS, tmp_path / "out.safetensors")


SHARDING = {
    "a-piece-that-begins-later": json.dumps({"a": {"saved_offsets": [0, 0]}, "b": {"saved_offsets": [5]}}),
    "another-form": json.dumps({"a": [0, 0]}),
    "no-json": "a",
}  # fmt: skip


@pytest.mark.parametrize("sharding", SHARDING)
def test_a_renamed_piece_is_refused_by_its_offsets(ckptfs, tmp_path, sharding):
    file = tmp_path / "model.safetensors"
    save_file(WEIGHTS, file, metadata={"format": "pt", "DCP_SHARDING_INFO": SHARDING[sharding]})
    check_refused(ckptfs, file, "one rank's part of a sharded checkpoint")


def zero_stage_3(module):
    """The file that DeepSpeed writes for a rank at stage 3: parameters are empty, buffers are not."""
    return {
        "module": module,
        "buffer_names": ["buffer"],
        "param_shapes": [{"a": torch.Size([4, 3])}],
        "ds_version": "0.19.6",
    }


@pytest.mark.parametrize("name", ["zero_pp_rank_0_mp_rank_00_model_states.pt", "renamed.pt"])
@pytest.mark.parametrize("options", [(), ("--root", "module")], ids=["by-the-rule", "by-key"])
def test_empty_parameters_of_zero_stage_3_are_refused(ckptfs, tmp_path, name, options):
    file = tmp_path / name
    module = {"a": torch.empty(0, dtype=torch.bfloat16), "buffer": torch.arange(4.0)}
    torch.save(zero_stage_3(module), file)
    words = ["ZeRO stage 3", "*_optim_states.pt", f"give the folder with the files of all ranks: {tmp_path}"]
    check_refused(ckptfs, file, *words, options=options)


def test_full_parameters_of_zero_are_shown(ckptfs, tmp_path):
    file = tmp_path / "mp_rank_00_model_states.pt"
    torch.save(zero_stage_3(WEIGHTS), file)
    check_export(ckptfs, file, WEIGHTS, tmp_path / "out.safetensors")


def test_empty_tensors_of_others_are_shown(ckptfs, tmp_path):
    file = tmp_path / "model.pt"
    torch.save({"module": {"a": torch.empty(0)}, "epoch": 1}, file)
    check_export(ckptfs, file, {"a": torch.empty(0)}, tmp_path / "out.safetensors")
