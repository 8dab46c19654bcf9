"""What is no checkpoint that ckptfs reads is told by what it is. `inspect`, `export`, `verify`, `ls`, the mount's log and
Python's exceptions say the same, and the command that they name to type next works."""

import os
import pickle
import shlex
import struct
import subprocess
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ckptfs import SafetensorError, deserialize, errors, safe_open
from ckptfs.numpy import load_file as load_numpy
from ckptfs.torch import load_file
from safetensors.torch import save_file

import preloaded
from compare import check_export
from mounts import until
from pickles import call, dict_of, name, program, write_zip
from program import DONE, FAILED, REFUSED, USAGE

WEIGHTS = {"a": torch.arange(12.0).view(4, 3), "b": torch.arange(5)}


def write(content):
    return lambda path: path.write_bytes(content)


def write_zip_of(path, record):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(record, "x")


def write_script(path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


def write_dtensors(path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        torch.save({"a": distribute_tensor(WEIGHTS["a"], mesh, [Shard(0)])}, path)
    finally:
        dist.destroy_process_group()


def write_sharded(path):
    piece = call(name("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"))
    write_zip(path, program(dict_of({"a": piece})))


def save(value):
    return lambda path: torch.save(value, path)


def header(entry):
    text = ('{"a": ' + entry + "}").encode()
    return struct.pack("<Q", len(text)) + text


# Files: what writes each, words that say what it is, and words of what to do about it.
FILES = {
    "empty": (write(b""), "an empty file", "again"),
    "gguf": (write(b"GGUF\x03\0\0\0{" + bytes(40)), "a GGUF file", "llama.cpp"),
    "hdf5": (write(b"\x89HDF\r\n\x1a\n" + bytes(40)), "an HDF5 file", "Keras"),
    "array": (write(b"\x93NUMPY\x01\0v\0{'descr': '<f4'"), "an array of numpy", "numpy.load"),
    "arrays": (lambda path: numpy.savez(path.open("wb"), a=numpy.ones(2)), "arrays of numpy (npz)", "numpy.load"),
    "zip": (lambda path: write_zip_of(path, "notes.txt"), "a zip archive of another kind", "python -m zipfile -l {path}"),
    "gzip": (write(b"\x1f\x8b\x08" + bytes(40)), "a compressed file", "gunzip < {path} > "),
    "tar": (write(bytes(257) + b"ustar" + bytes(300)), "a tar archive", "tar -tvf {path}"),
    "web-page": (write(b"<!DOCTYPE html>\n<html><body>Log in"), "a web page (HTML)", "head -c 500 {path}"),
    "xml": (write(b"<?xml version='1.0'?><Error>NoSuchKey"), "XML", "head -c 500 {path}"),
    "json": (write(b'{"error": "Repository not found"}'), "JSON text", "head -c 500 {path}"),
    "text": (write(b"Entry not found"), "text, not a checkpoint", "head -c 500 {path}"),
    "lfs-pointer": (
        write(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "a Git LFS pointer", "git -C {folder} lfs pull --include={name}",
    ),
    "pickle": (write(pickle.dumps({"a": 1})), "a pickle that torch.save did not write", "torch.save"),
    "pickled-object": (
        write(pickle.dumps(torch.nn.Linear(1, 1).double)), "a pickle of", "torch.save",
    ),
    "torchscript": (write_script, "a TorchScript program", "torch.jit.load"),
    "dtensors": (write_dtensors, "one rank's part of a sharded checkpoint", "the files of all ranks: {folder}"),
    "sharded": (write_sharded, "one rank's part of a sharded checkpoint", "the files of all ranks: {folder}"),
    "flat-parameter": (save({"layer._flat_param": torch.ones(3)}), "one rank's part", "StateDictType.SHARDED_STATE_DICT"),
    "module": (save(torch.nn.Linear(2, 2)), "torch.nn.modules.linear.Linear", "state_dict()"),
    "module-beside": (
        save({"model": torch.nn.Linear(2, 2), "optimizer": {"state": {0: torch.ones(2)}, "param_groups": []}}),
        "torch.nn.modules.linear.Linear under `model`", "state_dict()",
    ),
}  # fmt: skip


def dcp_folder(path, state=None):
    dcp.save(state or {"model": dict(WEIGHTS), "step": 5}, checkpoint_id=str(path), no_dist=True)


def unfinished_dcp(path):
    dcp_folder(path)
    (path / ".metadata").unlink()


def dcp_of_an_optimizer(path):
    dcp_folder(path, {"optimizer": {"state": WEIGHTS}})


def dcp_of_two_models(path):
    dcp_folder(path, {"actor": dict(WEIGHTS), "critic": dict(WEIGHTS)})


def folder_of(**files):
    def write(path):
        path.mkdir()
        for file, value in files.items():
            torch.save(value, path / f"{file}.pt")

    return write


STATES = {"module": WEIGHTS, "param_shapes": [{"a": torch.Size([4, 3])}], "ds_version": "0.19.8"}
EMPTY_STATES = STATES | {"module": {"a": torch.empty(0)}}

# Training folders: the writer of each, words of the message, and words of the remedy.
FOLDERS = {
    "dcp-unfinished": (unfinished_dcp, "the save did not end: .metadata is missing", "another step"),
    "dcp-of-an-optimizer": (dcp_of_an_optimizer, "training state (`optimizer`)", "--root optimizer"),
    "dcp-of-two-models": (dcp_of_two_models, "unclear which of its dictionaries is the model", "--root actor"),
    "deepspeed": (
        folder_of(mp_rank_00_model_states=STATES, bf16_zero_pp_rank_0_mp_rank_00_optim_states={"a": 1}),
        "is not as DeepSpeed writes it", "fetch the folder again",
    ),
    "deepspeed-stage-3": (
        folder_of(
            zero_pp_rank_0_mp_rank_00_model_states=EMPTY_STATES, zero_pp_rank_0_mp_rank_00_optim_states={"a": 1}
        ),
        "is not as DeepSpeed writes it", "fetch the folder again",
    ),
}  # fmt: skip


class Told:
    """What each of the doors says of a path: a reason and a remedy."""

    def __init__(self, ckptfs, path):
        self.ckptfs, self.path = ckptfs, path

    def by_commands(self):
        out = self.path.parent / "out.safetensors"
        for words in (["inspect", self.path], ["export", self.path, out], ["verify", self.path]):
            outcome = self.ckptfs(*words)
            assert outcome.code == REFUSED, outcome
            reason, _, remedy = outcome.stderr.partition("\n  what to do: ")
            if outcome.stderr:
                yield reason.removeprefix("ckptfs: "), remedy.strip()
        assert not out.exists()

    def by_json(self):
        outcome = self.ckptfs("inspect", "--json", self.path)
        assert outcome.code == REFUSED, outcome
        (refused,) = outcome.json()["refused"]
        return refused["reason"], refused["remedy"]

    def by_listing(self, folder):
        (listing,) = self.ckptfs("ls", "--json", folder).json()
        assert not any(entry["kind"] == "virtual_file" for entry in listing["entries"])
        for refused in listing["refused"]:
            yield refused["reason"], refused["remedy"]
        for left in listing["left"]:
            if "remedy" in left:
                yield f"{folder}/{left['name']}: {left['reason']}", left["remedy"]

    def by_python(self):
        with pytest.raises(SafetensorError) as fault:
            load_file(self.path)
        (note,) = fault.value.__notes__
        return str(fault.value), note.removeprefix("what to do: ")


def check_told(ckptfs, path, listed, says, remedy):
    told = Told(ckptfs, path)
    reason, todo = told.by_json()
    assert says in reason and str(path) in reason
    words = {"path": shlex.quote(str(path)), "folder": shlex.quote(str(path.parent)), "name": path.name}
    assert remedy.format(**words) in todo
    assert "--allow-partial" not in todo
    assert list(told.by_commands()) == [(reason, todo)] * 3
    assert told.by_python() == (reason, errors.in_python(todo))
    assert list(told.by_listing(listed)) == [(reason, todo)]


@pytest.mark.parametrize("kind", FILES)
def test_a_file_is_told_by_what_it_is(ckptfs, tmp_path, kind):
    make, says, remedy = FILES[kind]
    path = tmp_path / "its folder" / "net.pt"
    path.parent.mkdir()
    make(path)
    check_told(ckptfs, path, path.parent, says, remedy)


@pytest.mark.parametrize("kind", ["web-page", "lfs-pointer", "gguf", "json", "text", "empty"])
def test_a_file_named_safetensors_is_told_by_what_it_is(ckptfs, tmp_path, kind):
    make, says, remedy = FILES[kind]
    path = tmp_path / "model.safetensors"
    make(path)
    check_told(ckptfs, path, tmp_path, says, remedy)


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_is_told_by_what_it_is(ckptfs, tmp_path, kind):
    make, says, remedy = FOLDERS[kind]
    path = tmp_path / "global_step100"
    make(path)
    check_told(ckptfs, path, path, says, remedy)


@pytest.mark.parametrize("kind", ["dcp-unfinished", "deepspeed"])
def test_a_mount_says_the_same_in_its_log(ckptfs, tmp_path, mounts, kind):
    make, says, _ = FOLDERS[kind]
    source = tmp_path / "runs"
    source.mkdir()
    make(source / "step")
    mount = mounts(source)
    assert sorted(os.listdir(mount / "step")) == sorted(os.listdir(source / "step"))
    until("the log has it", lambda: says in mount.logged())
    assert "what to do" in mount.logged() or "remedy" in mount.logged()
    assert mount.stats()["virtual_files"]["refused"] >= 1


def test_the_folder_above_names_the_last_step_of_a_run(ckptfs, tmp_path):
    runs = tmp_path / "runs"
    (runs / "logs").mkdir(parents=True)
    for step in ("step-9", "step-100"):
        dcp_folder(runs / step)
    (runs / "newest").write_text("step-100")
    outcome = ckptfs("inspect", runs)
    assert outcome.code == FAILED
    assert "no checkpoint in this directory itself" in outcome.stderr
    assert f"such as {runs}/step-100\n" in outcome.stderr
    check_export(ckptfs, runs / "step-100", WEIGHTS, tmp_path / "out.safetensors")


def test_a_folder_of_runs_names_the_last_step(ckptfs, tmp_path):
    for step in ("checkpoint-500", "checkpoint-1000"):
        (tmp_path / step).mkdir()
        save_file(WEIGHTS, tmp_path / step / "model.safetensors")
    outcome = ckptfs("inspect", tmp_path)
    assert outcome.code == FAILED
    assert f"such as {tmp_path}/checkpoint-1000\n" in outcome.stderr


def test_a_folder_with_a_pointer_says_so(ckptfs, tmp_path):
    FILES["lfs-pointer"][0](tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    outcome = ckptfs("inspect", tmp_path)
    assert outcome.code == REFUSED
    assert f"{tmp_path}/pytorch_model.bin: a Git LFS pointer" in outcome.stderr
    assert f"git -C {tmp_path} lfs pull --include=pytorch_model.bin" in outcome.stderr


@pytest.mark.parametrize("names", [["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"],
                                   ["sharded_rank0.bin", "sharded_rank1.bin"]])  # fmt: skip
def test_a_folder_of_rank_files_is_one_sharded_checkpoint(ckptfs, tmp_path, names):
    for file in names:
        write_sharded(tmp_path / file)
    outcome = ckptfs("inspect", tmp_path)
    # Their pieces do not say where they lie.
    assert outcome.code == REFUSED and "not stated as torch states it" in outcome.stdout
    (listing,) = ckptfs("ls", "--json", tmp_path).json()
    assert [refused["names"] for refused in listing["refused"]] == [names]


def test_whole_files_with_names_of_ranks_are_checkpoints_of_their_own(ckptfs, tmp_path):
    names = ["rank_0.pt", "rank_1.pt"]
    folder = tmp_path / "folder"
    folder.mkdir()
    for file in names:
        torch.save(WEIGHTS, folder / file)
    (listing,) = ckptfs("ls", "--json", folder).json()
    assert [entry["kind"] for entry in listing["entries"]] == ["virtual_file"] * 2
    for words in (["inspect", folder], ["export", folder, tmp_path / "out.safetensors"]):
        outcome = ckptfs(*words)
        assert outcome.code == USAGE
        assert f"{folder}: several checkpoints in this directory:" in outcome.stderr
        assert all(f"{folder}/{file}\n" in outcome.stderr for file in names)
    assert f"name one of them, such as {folder}/{names[0]}\n" in outcome.stderr
    outcome = ckptfs("inspect", tmp_path)
    assert outcome.code == FAILED and "sharded" not in outcome.stderr
    check_export(ckptfs, folder / names[1], WEIGHTS, tmp_path / "out.safetensors")


def test_an_unknown_element_type_asks_for_a_newer_ckptfs(ckptfs, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(header('{"dtype": "F5_E2M2", "shape": [0], "data_offsets": [0, 0]}'))
    says = "tensor `a`: this version of ckptfs does not know the element type `F5_E2M2`"
    check_told(ckptfs, path, tmp_path, says, "a newer ckptfs (this is ")


SIX = '{"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}'


@pytest.mark.parametrize("load", [load_file, load_numpy, lambda path: safe_open(path, "dlpack").get_tensor("a")])
def test_a_type_that_no_framework_has_leads_from_none_to_another(ckptfs, tmp_path, load):
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(SIX) + b"abc")
    assert ckptfs("inspect", path).code == DONE
    with pytest.raises(SafetensorError, match="Dtype not understood: F6_E2M3") as fault:
        load(path)
    (note,) = fault.value.__notes__
    assert "torch" not in note and "ckptfs.deserialize" in note and "names=" in note
    # As the remedy says.
    ((name, tensor),) = deserialize(open(path, "rb").read())
    assert (name, tensor["dtype"], tensor["data"]) == ("a", "F6_E2M3", b"abc")


def test_a_pickle_named_safetensors_is_not_advised_to_be_renamed(ckptfs, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps({"a": 1, "text": "x" * 100}))
    check_told(ckptfs, path, tmp_path, "a pickle with the extension .safetensors", "fetch the .safetensors again")


def test_a_torch_file_named_safetensors_is_renamed_as_advised(ckptfs, tmp_path):
    path = tmp_path / "my model.safetensors"
    torch.save(WEIGHTS, path)
    (listing,) = ckptfs("ls", "--json", tmp_path).json()
    (left,) = listing["left"]
    command = left["remedy"].removeprefix("rename it: ")
    assert command.startswith("mv ")
    subprocess.run(command, shell=True, check=True)
    (listing,) = ckptfs("ls", "--json", tmp_path).json()
    assert [entry["kind"] for entry in listing["entries"]] == ["virtual_file"]


@pytest.mark.parametrize("protocol", [0, 1])
def test_an_old_protocol_is_not_advised_to_be_fetched_again(ckptfs, tmp_path, protocol):
    path = tmp_path / "model.pt"
    torch.save(WEIGHTS, path, pickle_protocol=protocol)
    _, remedy = Told(ckptfs, path).by_json()
    assert "save it again with torch.save" in remedy


def test_an_unknown_torch_type_is_named_and_can_be_left_out(ckptfs, tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"fine": torch.ones(2), "odd": torch.ones(2).to(torch.float8_e4m3fn)}, path)
    raw = path.read_bytes()
    assert raw.count(b"float8_e4m3fn") == 1
    path.write_bytes(raw.replace(b"float8_e4m3fn", b"float9_e4m4fn"))
    outcome = ckptfs("inspect", path)
    assert "float9_e4m4fn, which this version of ckptfs does not know" in outcome.stdout
    check_export(ckptfs, path, {"fine": torch.ones(2)}, tmp_path / "out.safetensors", "--allow-partial")


REMOTE = {
    "meta-llama/Llama-3": ("the name of a model on the Hugging Face hub", "hf download meta-llama/Llama-3"),
    "org/name@v1": ("the name of a model on the Hugging Face hub", "hf download org/name --revision v1"),
    "org/name:v1": ("the name of a model on the Hugging Face hub", "hf download org/name --revision v1"),
    "https://huggingface.co/org/name": ("is a URL", "hf download org/name"),
    "hf://org/name": ("is a URL", "hf download org/name"),
    "ftp://example.com/m.pt": ("is a URL", "give the path of the file on disk"),
}


@pytest.mark.parametrize("path", REMOTE)
def test_the_remedy_for_a_remote_name_is_to_fetch_it(ckptfs, tmp_path, monkeypatch, path):
    says, remedy = REMOTE[path]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnt").mkdir()
    commands = (["inspect", path], ["ls", path], ["export", path, "out"], ["verify", path], ["mount", path, "mnt"])
    for words in commands:
        outcome = ckptfs(*words)
        assert outcome.code == FAILED, outcome
        assert outcome.stderr.startswith(f"ckptfs: {path}: ") and says in outcome.stderr
        assert "what to do: fetch it first" in outcome.stderr and remedy in outcome.stderr
    loads = (
        load_file, lambda path: safe_open(path, "pt"),
        lambda path: load_file(Path(path)),
    )  # fmt: skip
    for load in loads:
        with pytest.raises(FileNotFoundError, match="^No such file or directory: ") as missing:
            load(path)
        assert says in str(missing.value) and str(missing.value).lower().count("no such file") == 1
        assert "fetch it first" in missing.value.__notes__[0]


def test_a_single_word_may_be_a_path_or_a_model(ckptfs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnt").mkdir()
    remedy = "check the path: ls .; or, if it is the name of a model on the Hugging Face hub, fetch it"
    for words in (["inspect", "gpt2"], ["ls", "gpt2"], ["export", "gpt2", "out"], ["mount", "gpt2", "mnt"]):
        outcome = ckptfs(*words)
        assert outcome.code == FAILED
        assert outcome.stderr.startswith(f"ckptfs: gpt2: no such file or directory\n  what to do: {remedy}")
        assert outcome.stderr.endswith(": hf download gpt2\n")
    with pytest.raises(FileNotFoundError) as missing:
        load_file("gpt2")
    assert str(missing.value).splitlines()[0] == "No such file or directory: gpt2"
    assert missing.value.__notes__[0].endswith(": hf download gpt2")


def run_remedy(remedy, folder):
    """Runs the command in a remedy in a folder, with the Python of the tests."""
    command = remedy[remedy.index("python ") :].replace("python ", f"{shlex.join(preloaded.command())} ", 1)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, cwd=folder)
    assert done.returncode == 0, (command, done.stderr)


LINEAR = torch.nn.Linear(3, 2)

# What writes each, the state dict that its remedy must give, and the ending of what it gives.
REMEDIED = {
    "module": (save(LINEAR), LINEAR.state_dict(), ".state_dict.pt"),
    "module-in-a-dictionary": (save({"model": LINEAR, "epoch": 1}), LINEAR.state_dict(), ".state_dict.pt"),
    "module-in-two": (save({"state": {"it's": 1, "model": LINEAR}}), LINEAR.state_dict(), ".state_dict.pt"),
    "torchscript": (
        lambda path: torch.jit.save(torch.jit.script(LINEAR), path), LINEAR.state_dict(), ".state_dict.pt"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REMEDIED)
@pytest.mark.parametrize("is_mounted", [False, True], ids=["on-disk", "in-a-mount"])
def test_the_command_of_a_remedy_gives_the_tensors(ckptfs, tmp_path, mounts, kind, is_mounted):
    make, expected, ending = REMEDIED[kind]
    source, cwd = tmp_path / "source", tmp_path / "cwd"
    source.mkdir()
    cwd.mkdir()
    make(source / "it's here.pt")
    path = (mounts(source).point if is_mounted else source) / "it's here.pt"
    _, remedy = Told(ckptfs, path).by_json()
    run_remedy(remedy, cwd)
    assert os.listdir(source) == ["it's here.pt"]
    check_export(ckptfs, cwd / f"it's here.pt{ending}", dict(expected), tmp_path / "out.safetensors")


# A program that saves models whose classes only it has.
SCRIPT = """
import sys, torch
class Net(torch.nn.Linear):
    pass
torch.manual_seed(0)
if len(sys.argv) > 1:
    torch.save(Net(3, 2), "whole it's.pt")
    torch.save({"model": torch.nn.Sequential(Net(3, 2)), "epoch": 1}, "nested.pt")
"""


@pytest.mark.parametrize("name", ["whole it's.pt", "nested.pt"])
def test_a_class_of_a_script_is_converted_in_that_script(ckptfs, tmp_path, name):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    subprocess.run(preloaded.command(script, "save"), cwd=tmp_path, check=True, timeout=60)
    _, remedy = Told(ckptfs, tmp_path / name).by_json()
    assert remedy.startswith("in the program that defines class Net, save the state dict: torch.save(")
    assert "python -c" not in remedy
    _, _, statement = remedy.partition("convert it in that program: ")
    script.write_text(SCRIPT + statement)
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    subprocess.run(preloaded.command(script), cwd=cwd, check=True, timeout=60)
    weights = ckptfs.inspect(cwd / f"{name}.state_dict.pt")["tensors"]
    assert sorted(weight["name"].removeprefix("0.") for weight in weights) == ["bias", "weight"]


def test_what_lies_beside_a_model_that_is_an_object_does_not_take_its_place(ckptfs, tmp_path):
    path = tmp_path / "last.pt"
    torch.save({"model": LINEAR, "optimizer": WEIGHTS}, path)
    for options in ([], ["--allow-partial"]):
        assert ckptfs("inspect", path, *options).code == REFUSED
    check_export(ckptfs, path, WEIGHTS, tmp_path / "out.safetensors", "--root", "optimizer")


def test_leaving_out_is_advised_only_where_something_remains(ckptfs, tmp_path):
    some, none = tmp_path / "some.pt", tmp_path / "none.pt"
    torch.save({"fine": torch.ones(2), "odd": torch.eye(2).to_sparse()}, some)
    torch.save({"odd": torch.eye(2).to_sparse()}, none)
    assert "leave it out with --allow-partial" in ckptfs("export", some, tmp_path / "out.safetensors").stderr
    for options in ([], ["--allow-partial"]):
        for words in (["inspect", none], ["export", none, tmp_path / "out.safetensors"]):
            outcome = ckptfs(*words, *options)
            assert outcome.code == REFUSED
            told = outcome.stdout + outcome.stderr
            assert "to_dense()" in told and "allow-partial" not in told and "ckptfs inspect" not in told
    # What was left out as asked is not advised to be left out.
    assert "allow-partial" not in ckptfs("inspect", some, "--allow-partial").stdout
