"""`ckptfs.fastsafetensors` gives what fastsafetensors gives, value for value, for one process; and the same for files
that fastsafetensors cannot read."""

import gc
import subprocess
import sys

import ckptfs.fastsafetensors as ours
import fastsafetensors as theirs
import fastsafetensors.st_types as their_types
import pytest
import torch
from safetensors.torch import save_file

from compare import same
from fastsafetensors_files import MORE, TENSORS, both, files, loaded  # noqa: F401
from samples import numbers, strided_tensors, write_shards


def test_a_loader_describes_its_files_as_theirs_does(both, files):
    (mine, my_buffers), (other, their_buffers) = both
    assert mine.get_keys() == other.get_keys()
    for name in mine.get_keys():
        assert mine.get_shape(name) == other.get_shape(name)
        assert my_buffers.get_shape(name) == their_buffers.get_shape(name)
        assert my_buffers.get_filename(name) == their_buffers.get_filename(name)
        assert mine.frames[name].dtype.value == other.frames[name].dtype.value
        assert mine.frames[name].data_offsets == other.frames[name].data_offsets
    assert my_buffers.key_to_rank_lidx == their_buffers.key_to_rank_lidx
    assert {path: rank for path, (_, rank) in mine.meta.items()} == dict.fromkeys(files, 0)
    for path, (metadata, _) in other.meta.items():
        assert mine.meta[path][0].metadata == metadata.metadata and mine.meta[path][0].src == path


def test_whole_tensors_are_theirs_and_handed_out_once(both):
    (mine, my_buffers), (_, their_buffers) = both
    for name in mine.get_keys():
        same(my_buffers.get_tensor(name), their_buffers.get_tensor(name))
        one, other = my_buffers.get_tensor_wrapped(name), their_buffers.get_tensor_wrapped(name)
        assert one.get_shape() == other.get_shape() and one.get_nbytes() == other.get_nbytes()
        assert one.dtype.value == other.dtype.value and one.device.as_str() == other.device.as_str()
        assert my_buffers.get_tensor(name) is my_buffers.get_tensor(name)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_parts_in_a_group_of_one_are_the_whole(both, dim):
    (mine, my_buffers), (_, their_buffers) = both
    for name in mine.get_keys():
        same(my_buffers.get_sharded(name, dim), their_buffers.get_sharded(name, dim))
        same(my_buffers.push_tensor(name, 0), their_buffers.push_tensor(name, 0))


COLUMNS = [
    (["floats"], 0), (["floats", "other.floats"], 0), (["floats", "other.wide"], 1),
    (["other.wide", "floats", "other.wide"], -1), (["none", "floats"], 0), (["bytes", "bytes"], 0),
]  # fmt: skip


@pytest.mark.parametrize(("names", "dim"), COLUMNS, ids=str)
def test_columns_of_several_tensors_are_theirs_and_copies(both, names, dim):
    (_, mine), (_, other) = both
    same(mine.get_multi_cols(names, dim).get_raw(), other.get_multi_cols(names, dim).get_raw())
    # Tensors that are handed out share no memory with those that are held.
    mine.get_multi_cols(names, dim).get_raw().zero_()
    same(mine.get_multi_cols(names, dim).get_raw(), other.get_multi_cols(names, dim).get_raw())


def test_columns_of_types_that_torch_cannot_join_are_joined(both):
    (_, buffers), _ = both
    made = buffers.get_multi_cols(["words", "words"], 0).get_raw()
    assert made.dtype == torch.uint16 and made.tolist() == [*range(7), *range(7)]
    joined = buffers.get_multi_cols(["pairs", "pairs"], 1)
    assert joined.get_shape() == [2, 24]
    same(joined.get_raw()[:, 6:], TENSORS["pairs"])


def test_a_dictionary_has_whole_tensors_and_parts(both):
    (mine, my_buffers), (_, their_buffers) = both
    asked = {name: -1 for name in mine.get_keys()} | {"floats": 0, "brains": 1}
    got, expected = my_buffers.as_dict(asked), their_buffers.as_dict(asked)
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        same(got[name].get_raw(), tensor.get_raw())


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F64", "I64", "F8_E5M2"])
def test_handed_out_tensors_are_cast_by_every_name_of_a_type(both, dtype):
    (_, mine), (_, other) = both
    for name in ("floats", "whole", "flags", "one"):
        expected = other.get_tensor(name, dtype=their_types.DType(dtype))
        same(mine.get_tensor(name, dtype=ours.DType(dtype)), expected)
        # The other package's own word, torch's, and the name alone are the same.
        for word in (their_types.DType(dtype), expected.dtype, dtype):
            same(mine.get_tensor(name, dtype=word), expected)
        columns = mine.get_multi_cols([name], 0, dtype=ours.DType(dtype)) if name != "one" else None
        assert columns is None or columns.dtype is ours.DType(dtype)
    for device in (ours.Device(), ours.Device.from_str("cpu:0"), their_types.Device(), "cpu",
                   torch.device("cpu")):  # fmt: skip
        same(mine.get_tensor("floats", device), TENSORS["floats"])


@pytest.mark.parametrize("dtype", ["AUTO", "F16", "BF16", "F8_E4M3"])
def test_everything_is_cast_while_copying(tmp_path, dtype):
    """Everything is cast, integers too, as theirs does where elements become no larger."""
    kept = {name: TENSORS[name] for name in ("floats", "halves", "brains", "whole", "one", "none")}
    save_file(kept, tmp_path / "x.safetensors")
    path = [str(tmp_path / "x.safetensors")]
    mine, my_buffers = loaded(ours, path, ours.DType(dtype))
    other, their_buffers = loaded(theirs, path, their_types.DType(dtype))
    for name in mine.get_keys():
        same(my_buffers.get_tensor(name), their_buffers.get_tensor(name))
        one, other_one = my_buffers.get_tensor_wrapped(name), their_buffers.get_tensor_wrapped(name)
        assert one.dtype.value == other_one.dtype.value
    if dtype != "AUTO":
        columns = (["floats", "halves"], 0)
        same(my_buffers.get_multi_cols(*columns).get_raw(), their_buffers.get_multi_cols(*columns).get_raw())
    # The loader still knows the file's type, and copies it again as it is.
    same(mine.copy_files_to_device().get_tensor("floats"), TENSORS["floats"])
    their_buffers.close()
    other.close()


def test_casting_may_make_elements_larger(files):
    _, buffers = loaded(ours, files[1:], ours.DType.F64)
    same(buffers.get_tensor("other.wide"), MORE["other.wide"].double())


@pytest.mark.parametrize("kind", [str, list, dict])
def test_fastsafe_open_takes_a_path_a_list_and_a_dictionary(files, kind):
    asked = {str: files[0], list: files, dict: {0: files}}[kind]
    with ours.fastsafe_open(asked) as mine, theirs.fastsafe_open(asked, nogds=True) as other:
        assert mine.keys() == other.keys() and mine.metadata() == other.metadata()
        for name in mine.keys():
            same(mine.get_tensor(name), other.get_tensor(name))
            same(mine.get_tensor_wrapped(name).get_raw(), other.get_tensor_wrapped(name).get_raw())


def test_a_filter_hides_tensors_everywhere(files):
    keep = lambda name: "o" in name  # noqa: E731
    made = []
    for package in (ours, theirs):
        loader = package.SafeTensorsFileLoader(package.SingleGroup(), "cpu", nogds=True)
        loader.set_tensor_filter(keep)
        loader.add_filenames({0: files})
        made.append((loader, loader.copy_files_to_device()))
    (mine, my_buffers), (other, their_buffers) = made
    assert mine.get_keys() == other.get_keys() == [name for name in mine.frames if keep(name)]
    assert my_buffers.key_to_rank_lidx == their_buffers.key_to_rank_lidx
    for name, tensor in my_buffers.iter_local_tensors(mine.get_keys()):
        same(tensor, their_buffers.get_tensor(name))
    for loader, buffers in made:
        for ask in (loader.get_shape, buffers.get_tensor, buffers.get_shape, buffers.get_filename):
            with pytest.raises(ValueError):
                ask("halves")
    their_buffers.close()


def test_files_of_other_formats_load_too(tmp_path):
    expected = write_shards(tmp_path / "sharded", 1, 2, 2, 30)
    pickled = strided_tensors(2)
    torch.save({"model": {}, "state_dict": pickled}, tmp_path / "last.ckpt")
    torch.save({"old": numbers(3, 9)}, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    paths = [str(tmp_path / "sharded"), str(tmp_path / "last.ckpt"), tmp_path / "x.bin"]
    with ours.fastsafe_open(paths) as file:
        got = {name: file.get_tensor(name) for name in file.keys()}
        assert file.fb.get_filename("old") == str(tmp_path / "x.bin")
    expected |= pickled | {"old": numbers(3, 9)}
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        same(got[name], tensor.contiguous())


@pytest.mark.parametrize("borrowed", [False, True])
def test_tensors_stay_good_when_all_else_is_gone(files, borrowed):
    loader = ours.SafeTensorsFileLoader(None, "cpu")
    loader.add_filenames({0: files})
    buffers = loader.copy_files_to_device(borrowed_tensors=borrowed)
    got = {name: buffers.get_tensor(name) for name in loader.get_keys()}
    parts = buffers.get_multi_cols(["floats"], 0).get_raw()
    buffers.close()
    loader.close()
    del buffers, loader
    gc.collect()
    for name, tensor in (TENSORS | MORE).items():
        same(got[name], tensor)
        assert got[name].untyped_storage().nbytes() == tensor.nbytes, "keeps more alive than itself"
    same(parts, TENSORS["floats"])


def test_buffers_outlive_their_loader_and_loaders_begin_anew(files):
    for package in (ours, theirs):
        loader, buffers = loaded(package, files[:1])
        loader.reset()
        assert loader.get_keys() == []
        loader.add_filenames({0: files[1:]})
        again = loader.copy_files_to_device()
        loader.close()
        same(buffers.get_tensor("floats"), TENSORS["floats"])
        same(again.get_tensor("other.wide"), MORE["other.wide"])
        buffers.close()
        again.close()


def test_writes_to_tensors_reach_no_file(files):
    with ours.fastsafe_open(files) as file:
        file.get_tensor("floats").zero_()
    with ours.fastsafe_open(files) as file:
        same(file.get_tensor("floats"), TENSORS["floats"])


def test_every_argument_of_theirs_is_accepted(files):
    """By name, and by place."""
    mine = ours.SafeTensorsFileLoader(
        theirs.SingleGroup(), torch.device("cpu"), 1024, 2, True, False, False, True, "pt", False,
        use_shm=True,
    )  # fmt: skip
    mine.add_filenames({0: files})
    buffers = mine.copy_files_to_device(ours.DType.AUTO, False, 1 << 20, True, True)
    same(buffers.get_tensor("brains"), TENSORS["brains"])
    with ours.fastsafe_open(files, "pytorch", None, "cpu", True, True, 1 << 20, False) as file:
        same(file.get_tensor("brains"), TENSORS["brains"])


def test_wrapped_tensors_act_as_theirs_do(both):
    (_, mine), (_, other) = both
    one, another = mine.get_tensor_wrapped("floats"), other.get_tensor_wrapped("floats")
    for act in (
        lambda t, d: t.clone(), lambda t, d: t.detach(), lambda t, d: t[1:3], lambda t, d: t.reshape([3, 8]),
        lambda t, d: t.contiguous(), lambda t, d: t.view(d("I32")), lambda t, d: t.to(dtype=d("F16")),
    ):  # fmt: skip
        got, expected = act(one, ours.DType), act(another, their_types.DType)
        same(got.get_raw(), expected.get_raw())
        assert got.dtype.value == expected.dtype.value
    memory = [bytearray(one.get_nbytes()) for _ in range(2)]
    one.copy_to_buffer(memoryview(memory[0]))
    another.copy_to_buffer(memoryview(memory[1]))
    assert memory[0] == memory[1] and one.data_ptr() == one.get_raw().data_ptr()


def test_a_loader_makes_its_device_the_current_one(monkeypatch):
    """Without files, because there may be no such device."""
    for device, expected in (("cuda:1", ["cuda:1"]), ("cpu", [])):
        made = []
        monkeypatch.setattr(torch.cuda, "set_device", made.append)
        ours.SafeTensorsFileLoader(None, device).copy_files_to_device()
        assert made == expected


def test_torch_is_imported_only_at_its_use():
    script = "import sys, ckptfs; ckptfs.safe_open; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
