"""`ckptfs.fastsafetensors` reads metadata as fastsafetensors does, from a path, a descriptor and memory. It makes
tensors of memory that has the file's bytes. Every public name of fastsafetensors is there, or
docs/from-fastsafetensors.md says that it is not."""

import errno
import gc
import inspect
import json
import os
import random
import re
import weakref

import ckptfs.fastsafetensors as ours
import fastsafetensors as theirs
import fastsafetensors.cpp
import fastsafetensors.st_types as their_types
import pytest
import torch
from ckptfs import SafetensorError as Refused
from fastsafetensors.frameworks import get_framework_op
from safetensors.torch import load_file, save_file

from compare import same
from fastsafetensors_files import TENSORS, files  # noqa: F401
from program import REPOSITORY
from samples import numbers, strided_tensors, write_shards

OP = get_framework_op("pytorch")
FRAME = {"dtype": "F32", "shape": [6, 5, 4], "data_offsets": [8, 488]}


class Buffer:
    """Memory with a file's bytes, aligned as devices align theirs."""

    def __init__(self, data):
        self.held = torch.tensor(list(data), dtype=torch.uint8)

    def get_base_address(self):
        return self.held.data_ptr()


def said(metadata):
    frames = {
        name: (frame.dtype.value, frame.shape, frame.data_offsets, frame.strides, frame.offsets, frame.sliced)
        for name, frame in metadata.tensors.items()
    }  # fmt: skip
    return (metadata.metadata or {}, metadata.header_length, metadata.size_bytes, metadata.aligned, frames)


def by_path(package, path, framework):
    return package.SafeTensorsMetadata.from_file(path, framework)


def by_descriptor(package, path, framework):
    number = os.open(path, os.O_RDONLY)
    try:
        return package.SafeTensorsMetadata.from_fd(number, path, framework, keep_orig_dict=True)
    finally:
        os.close(number)


def by_memory(package, path, framework):
    buffer = Buffer(open(path, "rb").read())
    return package.SafeTensorsMetadata.from_buffer(
        buffer.get_base_address(), len(buffer.held), path, framework
    )


def by_header(package, path, framework):
    data = open(path, "rb").read()
    end = 8 + int.from_bytes(data[:8], "little")
    return package.SafeTensorsMetadata(data[8:end].decode(), end, len(data), framework, path, True)


WAYS = [by_path, by_descriptor, by_memory, by_header]


@pytest.mark.parametrize("way", WAYS)
def test_the_metadata_of_a_file_is_theirs(files, way):
    for path in files:
        mine, other = way(ours, path, "pytorch"), way(theirs, path, OP)
        assert said(mine) == said(other) and mine.src == path
        assert said(way(ours, path, OP)) == said(mine)
        if hasattr(other, "ser"):
            assert mine.ser == dict(other.ser)


@pytest.mark.parametrize("way", [by_path, by_descriptor, by_memory])
def test_any_checkpoint_has_the_metadata_of_its_virtual_file(tmp_path, ckptfs, way):
    torch.save(strided_tensors(1), tmp_path / "x.pt")
    ckptfs("export", tmp_path / "x.pt", tmp_path / "x.safetensors")
    mine, real = way(ours, str(tmp_path / "x.pt"), "pt"), by_path(theirs, str(tmp_path / "x.safetensors"), OP)
    assert said(mine) == said(real)
    buffer = Buffer((tmp_path / "x.safetensors").read_bytes())
    expected = load_file(tmp_path / "x.safetensors")
    got = mine.get_tensors(buffer, "cpu", 0)
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        same(tensor.get_raw(), expected[name])


def test_a_directory_has_metadata_too(tmp_path):
    tensors = write_shards(tmp_path / "llama", 1, 3, 2, 100)
    assert set(by_path(ours, tmp_path / "llama", "pytorch").tensors) == set(tensors)


def test_a_descriptor_is_read_from_its_start_and_stays_where_it_is(files, tmp_path):
    number = os.open(files[0], os.O_RDONLY)
    os.lseek(number, 100, os.SEEK_SET)
    assert said(ours.SafeTensorsMetadata.from_fd(number, "x", "pt")) == said(by_path(ours, files[0], "pt"))
    assert os.lseek(number, 0, os.SEEK_CUR) == 100
    os.close(number)
    with pytest.raises(OSError) as closed:
        ours.SafeTensorsMetadata.from_fd(number, "x", "pt")
    assert closed.value.errno == errno.EBADF
    with open(tmp_path / "removed", "w+b") as file:
        os.unlink(tmp_path / "removed")
        file.write(open(files[0], "rb").read())
        file.flush()
        assert said(ours.SafeTensorsMetadata.from_fd(file.fileno(), "x", "pt")) == said(by_path(ours, files[0], "pt"))


WRONG = {
    "text": b"a text that is no checkpoint at all", "short": b"\1", "empty": b"",
    "long": (1 << 40).to_bytes(8, "little") + b"{}", "past the end": (2).to_bytes(8, "little") + b"{",
    "json": (2).to_bytes(8, "little") + b"{]",
    "overlap": None,
}  # fmt: skip


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG)
def test_a_broken_file_is_refused_by_its_name(tmp_path, data):
    if data is None:
        entry = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
        header = json.dumps({"a": entry, "b": entry}).encode()
        data = len(header).to_bytes(8, "little") + header + b"xx"
    path = str(tmp_path / "wrong.safetensors")
    open(path, "wb").write(data)
    for way in [by_path, by_descriptor, by_memory]:
        with pytest.raises(Refused, match="wrong.safetensors") as refused:
            way(ours, path, "pt")
        assert "/proc" not in str(refused.value)
        with pytest.raises(Exception):
            way(theirs, path, OP)


def test_inconsistent_headers_are_refused(files):
    with pytest.raises(ValueError, match="header_length=10"):
        ours.SafeTensorsMetadata("{}{}", 10, 100, "pt")
    with pytest.raises(Refused, match="x.safetensors"):
        ours.SafeTensorsMetadata('{"a": 3}', 16, 100, "pt", "x.safetensors")
    header = json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}})
    for size in (0, len(header) + 8, len(header) + 9):
        with pytest.raises(Refused):
            ours.SafeTensorsMetadata(header, len(header) + 8, size, "pt")
    for framework in ("paddle", None):
        with pytest.raises(Refused, match="framework"):
            by_path(ours, files[0], framework)


def test_a_large_header_in_memory_takes_no_copy_of_the_data():
    size = 1 << 36
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    metadata = ours.SafeTensorsMetadata(header, len(header) + 8, len(header) + 8 + size, "pt")
    assert metadata.tensors["a"].shape == [size] and metadata.size_bytes == len(header) + 8 + size


@pytest.mark.parametrize("from_start", [True, False])
@pytest.mark.parametrize("dtype", ["AUTO", "F16"])
def test_tensors_are_made_of_memory_that_has_the_bytes(tmp_path, dtype, from_start):
    tensors = TENSORS if dtype == "AUTO" else {"floats": TENSORS["floats"], "none": TENSORS["none"]}
    path = str(tmp_path / "x.safetensors")
    save_file(tensors, path)
    mine, other = by_path(ours, path, "pt"), by_path(theirs, path, OP)
    data = open(path, "rb").read()
    offset = 0 if from_start else mine.header_length
    buffers = [Buffer(data[offset:]) for _ in range(2)]
    theirs_of = fastsafetensors.cpp.gds_device_buffer(
        buffers[1].get_base_address(), len(buffers[1].held), False
    )
    got = mine.get_tensors(buffers[0], ours.Device(), offset, ours.DType(dtype))
    expected = other.get_tensors(theirs_of, their_types.Device(), offset, their_types.DType(dtype))
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        same(tensor.get_raw(), expected[name].get_raw())
        assert tensor.dtype.value == expected[name].dtype.value
        assert tensor.get_shape() == expected[name].get_shape()
    if dtype == "AUTO":
        at = mine.tensors["floats"].data_offsets[0] + mine.header_length - offset
        assert got["floats"].data_ptr() == buffers[0].get_base_address() + at


def test_tensors_keep_their_memory_alive_and_unaligned_ones_are_copied():
    data = (b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[1,13]},'
            b'"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}')  # fmt: skip
    data += b" " * (-len(data) % 8)
    values = numbers(1, 3)
    whole = len(data).to_bytes(8, "little") + data + b"x" + values.numpy().tobytes()
    metadata = ours.SafeTensorsMetadata(data.decode(), len(data) + 8, len(whole), "pt")

    class Owner:
        pass

    buffer, owner = Buffer(whole), Owner()
    held = weakref.ref(buffer), weakref.ref(owner)
    tensors = metadata.get_tensors(buffer, "cpu", 0, owner=owner)
    del buffer, owner
    gc.collect()
    assert torch.equal(tensors["a"].get_raw(), values) and tensors["b"].get_raw().item() == ord("x")
    assert all(one() is not None for one in held)
    assert tensors["a"].data_ptr() % 4 == 0
    del tensors["b"]
    gc.collect()
    assert not any(one() is not None for one in held)


INDEXES = [
    0, -1, 5, slice(None), slice(1, 3), slice(-2, None), slice(None, None, 2), slice(5, 1, -2), slice(None, None, -1),
    slice(0, 99), slice(3, 3), slice(4, 2), (0, 0), (slice(1, 3), -1), (slice(None), slice(1, 4, 3), 2),
    (1, slice(2, 2)), (slice(0, 6, 4), slice(None), slice(3, None, -3)), (),
]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=str)
def test_a_part_of_a_frame_is_theirs(index):
    mine, other = (package.TensorFrame.from_buffer(dict(FRAME)) for package in (ours, theirs))
    for _ in range(2):
        mine, other = mine[index], other[index]
        for name in ("shape", "data_offsets", "strides", "offsets", "sliced"):
            assert getattr(mine, name) == getattr(other, name), name
        if len(mine.shape) < 3 or any(size < 6 for size in mine.shape[:1]):
            break


@pytest.mark.parametrize("index", [6, -7, (0, 5), (0, 0, 0, 0), "a", (0, "a"), None, slice(0, 1, 0), 1.5], ids=str)
def test_a_bad_index_of_a_frame_is_refused(index):
    for package in (ours, theirs):
        with pytest.raises(Exception) as refused:
            package.TensorFrame.from_buffer(dict(FRAME))[index]
        # An exception of a built-in type has the same type here.
    assert isinstance(refused.value, Exception)
    with pytest.raises((IndexError, TypeError, ValueError)):
        ours.TensorFrame.from_buffer(dict(FRAME))[index]


@pytest.mark.parametrize("wrong", [{"shape": (2,)}, {"shape": [-1]}, {"shape": [True]}, {"dtype": "F12"}], ids=str)
def test_a_bad_entry_of_a_header_is_refused(wrong):
    for package in (ours, theirs):
        with pytest.raises(ValueError):
            package.TensorFrame.from_buffer(FRAME | wrong)


def test_byte_ranges_of_some_tensors_are_theirs(tmp_path):
    chance = random.Random(7)
    for round in range(40):
        sizes = [chance.choice([0, 1, 3, 100, 5000]) for _ in range(20)]
        path = str(tmp_path / f"{round}.safetensors")
        save_file({f"{n:02}": torch.zeros(size, dtype=torch.uint8) for n, size in enumerate(sizes)}, path)
        mine, other = by_path(ours, path, "pt"), by_path(theirs, path, OP)
        kept = {name for name in mine.tensors if chance.random() < 0.5}
        for how in ({}, {"merge_gap": 0}, {"merge_gap": 3}, {"merge_gap": 100}):
            assert mine.select_byte_ranges(kept.__contains__, **how) == other.select_byte_ranges(kept.__contains__, **how)


def test_settings_of_a_loader_are_theirs():
    for section in ({}, {"copier_type": "gds"}, {"copier_type": "nogds", "max_threads": 3}, {"copier_type": "fgds"},
                    {"use_fgds": True}, {"copier_type": "unified", "nogds": False}):  # fmt: skip
        before = dict(section)
        made = ours.SafeTensorsFileLoader.process_extension_config(section, hf_weights_files=[])
        assert made == theirs.SafeTensorsFileLoader.process_extension_config(section, hf_weights_files=[])
        assert section == before
        ours.SafeTensorsFileLoader(None, **made).close()
    loader, before = ours.SafeTensorsFileLoader(None), os.sched_getaffinity(0)
    loader.init_numa()
    loader.init_numa(False)
    assert os.sched_getaffinity(0) == before


def test_experts_of_a_rank_are_theirs(monkeypatch):
    names = [f"model.layers.0.mlp.experts.{n}.w1.weight" for n in range(30)] + ["model.norm.weight", "a.experts.b"]
    for experts, size in [(8, 2), (7, 3), (2, 5), (0, 1), (30, 4)]:
        for rank in range(size):
            assert ours.owned_expert_range(experts, size, rank) == theirs.owned_expert_range(experts, size, rank)
            keeps = [package.expert_parallel_filter(experts, size, rank) for package in (ours, theirs)]
            assert [keeps[0](name) for name in names] == [keeps[1](name) for name in names]
    for asked in [(8, 0, 0), (8, 2, 2), (8, 2, -1)]:
        for package in (ours, theirs):
            with pytest.raises(ValueError):
                package.owned_expert_range(*asked)
    pattern = re.compile(r"layers\.(\d+)")
    assert ours.expert_parallel_filter(4, 2, 0, pattern)(names[0])
    settings = [
        {}, {"EP_SLICE": "1"}, {"EP_SLICE": "1", "EP_NUM_EXPERTS": "8"},
        {"EP_SLICE": "1", "EP_NUM_EXPERTS": "8", "EP_SIZE": "2", "EP_RANK": "1"},
        {"EP_SLICE": "0", "EP_NUM_EXPERTS": "8", "EP_SIZE": "2", "EP_RANK": "1"},
    ]  # fmt: skip
    for world in ({}, {"WORLD_SIZE": "4", "RANK": "3"}):
        for setting in settings:
            with monkeypatch.context() as patched:
                for name, value in ({f"FASTSAFETENSORS_{name}": value for name, value in setting.items()} | world).items():
                    patched.setenv(name, value)
                keeps = [package.expert_parallel_filter_from_env() for package in (ours, theirs)]
                assert (keeps[0] is None) == (keeps[1] is None)
                if keeps[0]:
                    assert [keeps[0](name) for name in names] == [keeps[1](name) for name in names]


def public(of):
    """The public names of a class, or those that a package defines itself."""
    names = {name: getattr(of, name) for name in dir(of) if not name.startswith("_")}
    if inspect.isclass(of):
        return set(names)
    package = of.__name__.partition(".")[0]
    return {name for name, value in names.items() if getattr(value, "__module__", "").startswith(package)}


def test_every_public_name_is_here_or_in_the_table_of_differences():
    page = (REPOSITORY / "docs/from-fastsafetensors.md").read_text()
    missing = public(theirs) - public(ours)
    assert missing and all(f"`{name}`" in page for name in missing), missing
    for name in public(theirs) & public(ours):
        of = getattr(theirs, name)
        if inspect.isclass(of):
            lacks = public(of) - public(getattr(ours, name))
            assert not lacks, (name, lacks)
            for method in {"__getitem__", "__enter__", "__exit__"} & set(vars(of)):
                assert hasattr(getattr(ours, name), method)
