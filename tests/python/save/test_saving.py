"""A save writes what safetensors writes, byte for byte; and a file is there whole or not at all."""

import os
import random
import stat

import ckptfs
import ckptfs.numpy
import ckptfs.torch
import numpy
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from compare import check_same
from writers import loose_tensors


@pytest.mark.parametrize("seed", range(100))
def test_files_equal_those_of_safetensors(tmp_path, seed):
    rng = random.Random(f"saving {seed}")
    tensors = loose_tensors(rng, rng.randint(0, 12))
    # safetensors writes several entries of metadata in any order, and no valid file without tensors and metadata.
    metadata = rng.choice([None, {} if tensors else None, {"format": "pt"}, {"größe\n\x01": 'a "b" \\ \x7f \U0001f600'}])
    expected = safetensors.torch.save(tensors, metadata)
    assert ckptfs.torch.save(tensors, metadata) == expected
    ckptfs.torch.save_file(tensors, tmp_path / "x.safetensors", metadata)
    assert (tmp_path / "x.safetensors").read_bytes() == expected
    check_same(ckptfs.torch.load(expected), tensors)


def test_arrays_are_saved_as_safetensors_saves_them(tmp_path):
    arrays = {
        "a": numpy.arange(6.0).reshape(2, 3), "b": numpy.array(True), "c": numpy.zeros((0, 2), "u2"),
        "d": numpy.arange(5, dtype=">i4"), "e": numpy.ones(3, "c8"),
    }  # fmt: skip
    expected = safetensors.numpy.save(arrays)
    assert ckptfs.numpy.save(arrays) == expected
    ckptfs.numpy.save_file(arrays, str(tmp_path / "x.safetensors"), {"a": "b"})
    got = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert all(numpy.array_equal(got[name], arrays[name]) for name in arrays)


def test_arrays_are_written_in_the_order_of_their_indexes():
    turned = numpy.arange(6.0).reshape(2, 3).T
    got = safetensors.numpy.load(ckptfs.numpy.save({"a": turned, "b": turned[::2]}))
    assert numpy.array_equal(got["a"], turned) and numpy.array_equal(got["b"], turned[::2])


def test_tensors_with_gradients_and_conjugates_are_saved():
    made = torch.ones(2, 2, dtype=torch.complex64) * 1j
    tensors = {"a": torch.nn.Parameter(torch.ones(3)), "b": made.conj()}
    got = ckptfs.torch.load(ckptfs.torch.save(tensors))
    assert torch.equal(got["a"], torch.ones(3)) and torch.equal(got["b"], made.conj())


def test_a_file_that_is_mapped_keeps_its_bytes_when_it_is_replaced(tmp_path):
    path = tmp_path / "x.safetensors"
    ckptfs.torch.save_file({"a": torch.ones(100_000)}, path)
    path.chmod(0o640)
    mapped = ckptfs.torch.load_file(path, backend="mmap")["a"]
    ckptfs.torch.save_file({"a": torch.zeros(3)}, path)
    assert mapped.sum() == 100_000
    assert ckptfs.torch.load_file(path)["a"].tolist() == [0, 0, 0]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_a_link_stays_one_and_a_device_is_written(tmp_path):
    (tmp_path / "link").symlink_to("x.safetensors")
    ckptfs.torch.save_file({"a": torch.ones(2)}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert ckptfs.torch.load_file(tmp_path / "x.safetensors")["a"].tolist() == [1, 1]
    ckptfs.torch.save_file({"a": torch.ones(2)}, "/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.safetensors"
    ckptfs.torch.save_file({"a": torch.ones(2)}, path)
    before = path.read_bytes()
    for wrong, raised in [
        ({"a": torch.ones(4, 4).t()[:2]}, ValueError), ({"a": "text"}, ValueError),
        ({"a": torch.ones(2, dtype=torch.complex128)}, ckptfs.SafetensorError),
        ({"a": torch.ones(2, device="meta")}, RuntimeError),
    ]:  # fmt: skip
        with pytest.raises(raised):
            ckptfs.torch.save_file(wrong, path)
    with pytest.raises(TypeError, match="metadata"):
        ckptfs.torch.save_file({"a": torch.ones(2)}, path, metadata={"a": 3})
    with pytest.raises(OSError):
        ckptfs.torch.save_file({"a": torch.ones(2)}, tmp_path / "nowhere" / "x.safetensors")
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["x.safetensors"]


def test_a_specification_must_be_true():
    spec = ckptfs.TensorSpec(dtype="float32", shape=[3], data_ptr=0, data_len=8)
    with pytest.raises(ckptfs.SafetensorError, match="8 bytes"):
        ckptfs.serialize({"a": spec})


def test_a_model_of_any_format_is_loaded(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    torch.save(model.state_dict(), tmp_path / "model.bin")
    ckptfs.torch.save_model(model, tmp_path / "model.safetensors")
    for path in tmp_path / "model.bin", tmp_path / "model.safetensors":
        other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        other[1].weight = other[0].weight
        strict = path.suffix == ".safetensors"
        missing, unexpected = ckptfs.torch.load_model(other, path, strict=strict)
        assert not missing and unexpected == ([] if strict else ["1.weight"])
        check_same(other.state_dict(), model.state_dict())
