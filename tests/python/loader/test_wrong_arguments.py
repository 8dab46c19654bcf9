"""An argument of the wrong kind is refused in words that name it, before anything is read or written."""

import os

import ckptfs
import ckptfs.numpy
import ckptfs.torch
import numpy
import pytest
import torch

Refused = ckptfs.SafetensorError


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ckptfs.torch.save_file({"a": torch.ones(3, 4), "b": torch.arange(5)}, "x.safetensors")
    return "x.safetensors"


WRONG_OPTIONS = [
    ({"root": 3}, "root must be text or None, got 3"),
    ({"allow_partial": "no"}, "allow_partial must be True or False, got 'no'"),
    ({"follow_symlinks": None}, "follow_symlinks must be True or False, got None"),
    ({"leave_cache": 1}, "leave_cache must be True or False, got 1"),
    ({"progress": "yes"}, "progress must be True or False, got 'yes'"),
    ({"report": 3}, "report must be a function or None, got 3"),
    ({"names": 3}, "names must be .* a list of names, got 3"),
    ({"names": ["a", 3]}, r"names must be .* a list of names, got \['a', 3\]"),
    ({"names": b"a"}, "names must be .* a list of names, got b'a'"),
    ({"into": ["a"]}, r"into must be a dictionary of tensors by their names, got \['a'\]"),
    ({"into": {3: torch.ones(30, 40)}}, "into must be a dictionary of tensors by their names, got a dict"),
    ({"device": []}, r"device \[\] is invalid"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG_OPTIONS, ids=lambda given: str(given)[:30])
def test_a_wrong_option_is_named(path, wrong, words):
    calls = [ckptfs.torch.load_file] if "device" in wrong else [ckptfs.torch.load_file, ckptfs.numpy.load_file]
    for load in calls:
        with pytest.raises(Refused, match=words) as refused:
            load(path, **wrong)
        assert isinstance(refused.value, TypeError)


def test_other_wrong_arguments_of_loads_are_named(path):
    with ckptfs.safe_open(path, "pt") as f:
        for call, words in [
            (lambda: f.get_tensors(3), "names must be"), (lambda: f.prefetch(["a"]), "plan must be a dictionary"),
            (lambda: f.prefetch({"a": slice("x", None)}), "must have integers"),
            (lambda: ckptfs.load_many(3), "filenames must be a list or a dictionary"),
            (lambda: ckptfs.load_many([path], report=3), "report must be"),
            (lambda: ckptfs.torch.load(path), "data must be the bytes .*load_file takes a path.*, got 'x.safetensors'"),
            (lambda: ckptfs.numpy.load(3), "data must be the bytes"),
            (lambda: ckptfs.deserialize(None), "data must be the bytes"),
            (lambda: ckptfs.torch.load_distributed(path, shard=3), "shard must be a dictionary"),
            (lambda: ckptfs.torch.cached("new.safetensors", {}), "make must be a function that returns the tensors"),
        ]:  # fmt: skip
            with pytest.raises(Refused, match=words) as refused:
                call()
            assert isinstance(refused.value, TypeError), words
    with pytest.raises(Refused, match=r"framework \[\] is invalid"):
        ckptfs.safe_open(path, [])
    with pytest.raises(Refused, match="b: device= names no device for it"):
        ckptfs.torch.load_file(path, {"a": "cpu"})
    assert os.listdir() == [path]


def test_bytes_may_be_in_any_buffer(path):
    with open(path, "rb") as file:
        data = file.read()
    for given in data, bytearray(data), memoryview(data):
        assert [*ckptfs.numpy.load(given)] == [*ckptfs.torch.load(given)] == [n for n, _ in ckptfs.deserialize(given)]


@pytest.mark.parametrize("asked", ["zz*", ["zz"]], ids=str)
def test_a_missing_name_has_the_command_that_lists_names(tmp_path, asked):
    path = tmp_path / "a model.safetensors"
    ckptfs.torch.save_file({"a": torch.ones(3)}, path)
    with pytest.raises(Refused, match="a model.safetensors: .*zz") as refused:
        ckptfs.torch.load_file(path, names=asked)
    assert refused.value.__notes__ == [f"what to do: see which there are: ckptfs inspect --tensors '{path}'"]


def test_an_empty_path_is_missing(path):
    for call in [
        lambda: ckptfs.torch.load_file(""), lambda: ckptfs.safe_open("", "pt"), lambda: ckptfs.torch.load_sharded(""),
        lambda: ckptfs.torch.save_file({}, ""), lambda: ckptfs.torch.save_sharded({}, ""),
        lambda: ckptfs.torch.cached("", dict), lambda: ckptfs.load_many([""]),
    ]:  # fmt: skip
        with pytest.raises(FileNotFoundError, match="No such file or directory: the path is empty"):
            call()
    assert os.listdir() == [path]


WRONG_TENSORS = {
    "no-text-as-name": ({3: torch.ones(1)}, TypeError, "3: the name of a tensor must be text"),
    "a-surrogate": ({"a\udcff": torch.ones(1)}, ValueError, r"a.udcff.*lone surrogate"),
    "another-type": ({"a": torch.ones(1, dtype=torch.complex128)}, Refused, "a: the format has no type complex128"),
    "no-values": ({"a": torch.ones(1, device="meta")}, RuntimeError, "a: cannot be saved: it is on the device meta"),
}


@pytest.mark.parametrize(("tensors", "kind", "words"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
def test_tensors_that_cannot_be_saved_are_named(path, tensors, kind, words):
    for save in lambda: ckptfs.torch.save_file(tensors, "y"), lambda: ckptfs.torch.save_sharded(tensors, "."):
        with pytest.raises(kind, match=words):
            save()
    assert os.listdir() == [path]


def test_arrays_that_cannot_be_saved_are_named(path):
    for arrays, kind, words in [
        (3, ValueError, "Expected a dict"), ({"a": [1]}, ValueError, "Key `a` is invalid"),
        ({"a": numpy.array(["x"])}, Refused, "a: the format has no type str"),
    ]:  # fmt: skip
        with pytest.raises(kind, match=words):
            ckptfs.numpy.save_file(arrays, "y")
    with pytest.raises(TypeError, match="a: expected TensorSpec"):
        ckptfs.serialize({"a": 3})
    for dtype in [], "float3":
        with pytest.raises(Refused, match="Unknown dtype"):
            ckptfs.TensorSpec(dtype=dtype, shape=[1], data_ptr=0, data_len=0)
    for name in 3, None:
        with pytest.raises(Refused, match="is no name for a checkpoint"):
            ckptfs.torch.save_sharded({}, ".", name=name)
    assert os.listdir() == [path]


def test_a_path_to_save_at_has_a_remedy(path):
    os.mkdir("folder")
    for target, kind, remedy in [
        ("a folder/x.safetensors", FileNotFoundError, "make its directory: mkdir -p 'a folder'"),
        ("folder", IsADirectoryError, "name a file in it, such as folder/model.safetensors"),
    ]:  # fmt: skip
        for save in ckptfs.torch.save_file, ckptfs.numpy.save_file:
            with pytest.raises(kind) as refused:
                save({}, target)
            assert refused.value.filename == target
            assert refused.value.__notes__ == [f"what to do: {remedy}"]
    with pytest.raises(NotADirectoryError) as refused:
        ckptfs.torch.save_sharded({}, "x.safetensors/below")
    assert refused.value.filename == "x.safetensors/below"
