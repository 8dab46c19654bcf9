"""`ckptfs.fastsafetensors` refuses a meaningless request in words that help, and by fastsafetensors' exception where
programs may catch it."""

import ckptfs
import ckptfs.fastsafetensors as ours
import fastsafetensors as theirs
import pytest
import torch
from safetensors.torch import save_file

from compare import same
from fastsafetensors_files import TENSORS, both, files, loaded  # noqa: F401

Refused = ckptfs.SafetensorError


def test_no_files_are_no_tensors():
    for package in (ours, theirs):
        loader, buffers = loaded(package, [])
        assert loader.get_keys() == [] and buffers.key_to_rank_lidx == {}
        with pytest.raises(ValueError):
            buffers.get_tensor("floats")
        buffers.close()
        loader.close()


def test_missing_names_raise_what_theirs_raises(both):
    for loader, buffers in both:
        for ask in (buffers.get_tensor, buffers.get_shape, buffers.get_filename):
            with pytest.raises(ValueError):
                ask("nobody")
        with pytest.raises(ValueError):
            buffers.get_multi_cols(["floats", "nobody"], 0)
        with pytest.raises(KeyError):
            loader.get_shape("nobody")
    with pytest.raises(Refused, match="nobody: is in none of the files") as refused:
        both[0][1].get_sharded("nobody", 0)
    assert any("what to do" in note for note in refused.value.__notes__)


def test_files_of_missing_ranks_are_refused(files):
    for package in (ours, theirs):
        loader = package.SafeTensorsFileLoader(None, "cpu", nogds=True)
        loader.add_filenames({1: files[:1]})
        with pytest.raises(KeyError):
            loader.copy_files_to_device()
    with pytest.raises(Refused, match=r"b\.safetensors: is for rank 1"):
        ours.fastsafe_open({1: files[:1]})


def test_one_name_in_two_files_is_refused(files, tmp_path):
    save_file({"floats": torch.ones(1)}, tmp_path / "z.safetensors")
    paths = [files[0], str(tmp_path / "z.safetensors")]
    for package in (ours, theirs):
        with pytest.raises(Exception, match="floats"):
            loaded(package, paths)
    with pytest.raises(Refused, match=r"floats: is in .*b\.safetensors and in .*z\.safetensors"):
        loaded(ours, paths)
    loader = ours.SafeTensorsFileLoader(None)
    loader.add_filenames({0: [files[0], files[0]]})
    same(loader.copy_files_to_device().get_tensor("floats"), TENSORS["floats"])


def test_closed_loaders_are_refused(files):
    for package in (ours, theirs):
        loader, buffers = loaded(package, files)
        buffers.close()
        buffers.close()
        with pytest.raises((KeyError, Refused)):
            buffers.get_tensor("floats")
        loader.close()
        loader.close()
        assert loader.get_keys() == [] and loader.meta == {}
    loader, _ = loaded(ours, files)
    loader.close()
    for ask in (loader.copy_files_to_device, lambda: loader.add_filenames({0: files})):
        with pytest.raises(Refused, match="closed"):
            ask()
    with ours.fastsafe_open(files) as file:
        names = file.keys()
    assert file.keys() == names
    with pytest.raises(Refused, match="floats: the buffers are closed"):
        file.get_tensor("floats")


def test_missing_and_unreadable_paths_are_refused(tmp_path, files):
    for package in (ours, theirs):
        with pytest.raises(FileNotFoundError, match="nothing"):
            loaded(package, [str(tmp_path / "nothing.safetensors")])
    (tmp_path / "text.safetensors").write_text("a text that is no checkpoint at all")
    with pytest.raises(Refused, match=r"text\.safetensors"):
        loaded(ours, [tmp_path / "text.safetensors"])
    for asked in (files, {0: files[0]}):
        with pytest.raises(TypeError):
            ours.SafeTensorsFileLoader(None).add_filenames(asked)
    with pytest.raises(TypeError):
        ours.fastsafe_open(3)


WRONG = {
    "framework": ({"framework": "paddle"}, "framework"), "group": ({"pg": "all"}, "pg must be"),
    "no member": ({"pg": torch.distributed.GroupMember.NON_GROUP_MEMBER}, "no member of pg"),
    "threads": ({"max_threads": 0}, "num_threads"), "device": ({"device": "nowhere"}, "nowhere"),
    "no device": ({"device": None}, "device"), "meta": ({"device": "meta"}, "meta"),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "words"), WRONG.values(), ids=WRONG)
def test_meaningless_loaders_are_refused(asked, words):
    with pytest.raises(Refused, match=words):
        ours.SafeTensorsFileLoader(**{"pg": None} | asked)


def test_meaningless_calls_are_refused(both):
    loader, buffers = both[0]
    for call, words in [
        (lambda: loader.copy_files_to_device("F12"), "F12"),
        (lambda: loader.copy_files_to_device(max_copy_block_size=0), "max_copy_block_size"),
        (lambda: buffers.get_tensor("floats", dtype=3), "dtype 3"),
        (lambda: buffers.get_multi_cols([], 0), "no tensor"),
        (lambda: buffers.get_multi_cols(["floats"], 2), "floats: cannot be cut along 2"),
        (lambda: buffers.get_multi_cols(["one"], 0), "one: cannot be cut along 0"),
        (lambda: buffers.get_multi_cols(["floats", "brains"], 0), "brains: is BF16 .* behind floats"),
        (lambda: buffers.get_multi_cols(["floats", "other.wide"], 0), "other.wide: is F32"),
        (lambda: buffers.get_multi_cols(["floats", "halves"], 0), "halves: is F16"),
    ]:  # fmt: skip
        with pytest.raises(Refused, match=words):
            call()


def test_an_impossible_cast_names_the_tensor(tmp_path, files):
    loader = ours.SafeTensorsFileLoader(None)
    loader.add_filenames({0: files[:1]})
    with pytest.raises(Refused, match="pairs: cannot be cast from F4 to F16"):
        loader.copy_files_to_device(ours.DType.F16)
    torch.save({"c": torch.ones(2, dtype=torch.complex64)}, tmp_path / "c.pt")
    with pytest.raises(Refused, match="c: cannot be cast from C64"):
        loaded(ours, [tmp_path / "c.pt"], "F16")
