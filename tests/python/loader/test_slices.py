"""An index of a slice means what it means in safetensors, for torch and for numpy."""

import os

import ckptfs
import numpy
import pytest
import safetensors
import torch
from safetensors.torch import save_file

from compare import check_same
from samples import numbers, write_shards

Refused = ckptfs.SafetensorError
s = numpy.s_


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("slices") / "x.safetensors"
    save_file({"a": numbers(1, 6, 5, 4), "b": torch.arange(8).reshape(2, 4), "z": torch.zeros(0, 5)}, path)
    return path


def both(path, framework, index, name="a"):
    with ckptfs.safe_open(path, framework) as ours, safetensors.safe_open(path, framework) as theirs:
        return ours.get_slice(name)[index], theirs.get_slice(name)[index]


MASK = torch.tensor([True, False, True, False, True, True])
OF_TORCH = [
    s[0:7], s[7:], s[6:], s[:2**70], s[-9:], s[:-9], s[-2:], s[4:2], s[:, -9:99:2], s[0, 7:], s[-6], s[5:-1],
    True, False, s[True], s[0, True], s[None], s[None, 3], s[3, None, ..., None], s[...], (),
    ([0, 1],), s[:, [0, 1]], s[2, [0, 1]], s[[0, 1], [1, 2]], s[0, :, [0, 1]], s[1:3, :, [3, -1]],
    range(3), s[..., range(2)], numpy.array([0, 1]), s[numpy.array([0, 1]), ...], torch.tensor([[0, 1]]),
    MASK, s[MASK, 0], s[torch.ones(6, 5, dtype=torch.bool)], s[..., [True, False, True, False]],
    torch.tensor(3), numpy.int64(3), s[torch.tensor(2), 1:], [], ([],), [0, 3], ((0, 1),), torch.tensor(True),
    slice(True, 5),
]  # fmt: skip


@pytest.mark.parametrize("index", OF_TORCH, ids=str)
def test_torch_slices_are_those_of_safetensors(path, index):
    ours, theirs = both(path, "pt", index)
    assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("index", [
    s[0:6], s[5:5], s[:0], s[-6], s[1:6:2, 0], s[..., 1], numpy.int64(2), [],
], ids=str)  # fmt: skip
def test_numpy_slices_are_those_of_safetensors(path, index):
    ours, theirs = both(path, "np", index)
    assert numpy.array_equal(ours, theirs)


@pytest.mark.parametrize("index", [
    s[0:7], s[7:], s[6:], s[40:35], s[:, 3:6], s[1:7:2], 6, -7, s[0, 0, 0, 0],
], ids=str)  # fmt: skip
def test_numpy_is_refused_what_leads_out_in_the_same_words(path, index):
    with pytest.raises(safetensors.SafetensorError) as theirs, safetensors.safe_open(path, "np") as file:
        file.get_slice("a")[index]
    with pytest.raises(Refused) as ours, ckptfs.safe_open(path, "np") as file:
        file.get_slice("a")[index]
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("index", [
    True, None, [0, 1], s[:, [0]], range(2), s[numpy.array([0, 1]), ...], s[-7:],
], ids=str)  # fmt: skip
def test_numpy_is_refused_what_only_torch_takes(path, index):
    with pytest.raises(Refused), ckptfs.safe_open(path, "np") as file:
        file.get_slice("a")[index]


def test_numpy_may_count_bounds_from_the_end_and_choose_nothing(path):
    with ckptfs.safe_open(path, "np") as file:
        assert numpy.array_equal(file.get_slice("a")[-2:], numbers(1, 6, 5, 4).numpy()[-2:])
        assert file.get_slice("a")[4:2].shape == (0, 5, 4) and file.get_slice("z")[:].shape == (0, 5)


@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("index", [6, -7, 2**70, s[:, 5], s[0, 0, 0, 0]], ids=str)
def test_integers_that_lead_out_are_errors_of_both_kinds(path, framework, index):
    for kind in IndexError, Refused, safetensors.SafetensorError:
        with pytest.raises(kind), ckptfs.safe_open(path, framework) as file:
            file.get_slice("a")[index]


def test_lists_that_lead_out_are_errors_of_both_kinds(path):
    with ckptfs.safe_open(path, "pt") as file:
        for kind in IndexError, Refused:
            with pytest.raises(kind):
                file.get_slice("a")[[0, 40],]
            with pytest.raises(kind):
                file.get_slice("a")[MASK[:4]]


@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("index", [
    s[1.5:], s[::0], s[::-1], "a", 1.5, {0}, s[..., ...], numpy.array(1.5), torch.tensor(1.5),
], ids=str)  # fmt: skip
def test_meaningless_indexes_are_refused(path, framework, index):
    with pytest.raises(Refused), ckptfs.safe_open(path, framework) as file:
        file.get_slice("a")[index]


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_a_step_past_the_end_chooses_the_first(path, framework):
    with ckptfs.safe_open(path, framework) as file:
        assert file.get_slice("a")[1 :: 2**70].shape == (1, 5, 4)
        assert file.get_slice("z")[:: 2**70].shape == (0, 5)


def test_only_the_slice_is_read(path):
    with ckptfs.safe_open(path, "pt", backend="pread") as file:
        file.get_slice("a")[2, :, [0, 1]]
    assert ckptfs.last_report().bytes == 5 * 4 * 4


@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_a_slice_is_read_after_its_handle_was_closed(path, framework, backend):
    def parts(opened):
        with opened as file:
            yield from [file.get_slice("a"), file.get_slice("b")]

    ours = parts(ckptfs.safe_open(path, framework, backend=backend))
    theirs = parts(safetensors.safe_open(path, framework))
    for mine, other in zip(list(ours), list(theirs), strict=True):
        assert mine.get_shape() == other.get_shape() and mine.get_dtype() == other.get_dtype()
        assert torch.equal(torch.as_tensor(mine[:, 1:3]), torch.as_tensor(other[:, 1:3]))
        assert torch.equal(torch.as_tensor(mine[:]), torch.as_tensor(other[:]))


def test_slices_hold_the_files_until_they_are_gone(tmp_path):
    tensors = write_shards(tmp_path / "llama", 1, 3, 2, 100)
    before = len(os.listdir("/proc/self/fd"))
    file = ckptfs.safe_open(tmp_path / "llama", "pt", backend="pread")
    parts = {name: file.get_slice(name) for name in file.keys()}
    file.close()
    check_same({name: part[...] for name, part in parts.items()}, tensors)
    parts.clear()
    assert len(os.listdir("/proc/self/fd")) == before
