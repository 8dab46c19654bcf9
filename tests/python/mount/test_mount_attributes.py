"""Files of a mount tell programs that know ckptfs where their bytes lie, and tell others nothing."""

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from samples import numbers, write_shards

SOURCE, LAYOUT, IDENTITY = (f"user.ckptfs.{name}" for name in ("source", "layout", "identity"))
STATS = "user.ckptfs.stats"
MAX_STATS_BYTES = 64 << 10


@pytest.fixture
def source(tmp_path):
    source = tmp_path / "source"
    write_shards(source / "sharded", 1, 2, 2, 100)
    (source / "loose").mkdir()
    saved = {"ema": {"a": numbers(1, 9)}, "state_dict": {"b": numbers(2, 9)}}
    torch.save(saved, source / "loose/model.pt")
    torch.save({"x": 1}, source / "loose/optimizer.pt")
    return source


def attribute(path, name):
    return os.getxattr(path, name)


def fails(number, call, *arguments):
    with pytest.raises(OSError) as failed:
        call(*arguments)
    assert failed.value.errno == number, failed.value


@pytest.mark.parametrize("itself", [False, True], ids=["elsewhere", "over itself"])
def test_attributes_lead_to_the_source(ckptfs, mounts, source, itself):
    if itself:
        # The mountpoint that the next mount gets.
        source = source.rename(mounts.folder / "mnt0")
    mount = mounts(source, "--root", "ema", "--allow-partial")
    assert (mount.point == source) == itself
    shown = {
        "sharded/model.safetensors": ("sharded/model.safetensors.index.json", True),
        "loose/model.safetensors": ("loose/model.pt", True),
        "loose/optimizer.pt": ("loose/optimizer.pt", False),
        "sharded": ("sharded", False),
    }
    real = {}
    for name, (path, is_virtual) in shown.items():
        told = json.loads(attribute(mount / name, SOURCE))
        assert (told["version"], told["pid"], told["source"]) == (1, mount.pid, str(source))
        assert (told["path"], told["virtual_file"]) == (path, is_virtual)
        assert told["options"]["allow_partial"] is True
        assert told["options"]["follow_symlinks"] is False
        real[name] = Path(f"/proc/{told['pid']}/fd/{told['rootfd']}", told["path"])
        if name == "loose/model.safetensors":
            assert told["options"]["root"] == "ema"
    # The descriptor leads to the source even where the mount lies over it.
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(path.name for path in real["sharded"].glob("*-of-*")) == shards
    assert torch.load(real["loose/model.safetensors"]).keys() == {"ema", "state_dict"}
    assert torch.load(real["loose/optimizer.pt"]) == {"x": 1}
    mount.unmount()


def test_a_copy_has_the_same_layout_and_another_identity(mounts, source):
    mount = mounts(source)
    virtual_file = mount / "sharded/model.safetensors"
    layout, identity = attribute(virtual_file, LAYOUT), attribute(virtual_file, IDENTITY)
    assert len(layout) == len(identity) == 32 and layout != identity
    assert int(layout, 16) and int(identity, 16)
    again = mounts(source)
    assert attribute(again / "sharded/model.safetensors", IDENTITY) == identity
    # The same checkpoint elsewhere: the same layout, another identity.
    copied = mounts(shutil.copytree(source, source.with_name("copy")))
    assert attribute(copied / "sharded/model.safetensors", LAYOUT) == layout
    assert attribute(copied / "sharded/model.safetensors", IDENTITY) != identity


def test_other_files_have_no_attributes(mounts, source):
    mount = mounts(source)
    passed, virtual_file = mount / "loose/optimizer.pt", mount / "loose/model.safetensors"
    for path, name in [
        (passed, LAYOUT), (passed, IDENTITY), (mount / "loose", LAYOUT),
        (mount / "loose", STATS), (virtual_file, STATS), (virtual_file, "user.other"), (virtual_file, "user.ckptfs.x"),
    ]:  # fmt: skip
        fails(errno.ENODATA, os.getxattr, path, name)
    for path in [mount.point, mount / "loose", passed, virtual_file]:
        assert os.listxattr(path) == []


def test_the_mountpoint_has_the_statistics_of_the_mount(mounts, source):
    mount = mounts(source, "--memory", "64M")
    (mount / "sharded/model.safetensors").read_bytes()
    raw = attribute(mount.point, STATS)
    assert len(raw) <= MAX_STATS_BYTES
    stats = json.loads(raw)
    assert stats["version"] == 1
    assert stats["memory"]["budget"] == 64 << 20
    assert stats["virtual_files"]["known"] >= 1
    assert stats["bytes_served"] > 0 and stats["reads"] > 0


def test_getfattr_reads_attributes_and_cp_copies_none(mounts, source, tmp_path):
    mount = mounts(source)
    virtual_file = mount / "loose/model.safetensors"

    def getfattr(*arguments):
        command = ["getfattr", "--absolute-names", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert getfattr("-d", "-m", "-", virtual_file) == ""
    layout = getfattr("--only-values", "-n", LAYOUT, virtual_file)
    assert layout.encode() == attribute(virtual_file, LAYOUT)
    assert json.loads(getfattr("--only-values", "-n", STATS, mount.point))["pid"] == mount.pid
    for options in [["-a"], ["--reflink=auto", "--sparse=auto"], ["--sparse=always"]]:
        out = tmp_path / "out"
        subprocess.run(["cp", *options, virtual_file, out], check=True)
        assert out.read_bytes() == virtual_file.read_bytes()
        assert os.listxattr(out) == []
        out.unlink()


def test_a_buffer_too_small_for_an_attribute_is_erange(mounts, source):
    """As getxattr(2) has it: the size for no room, ERANGE for too little."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    mount = mounts(source)
    for path, name in [(mount.point, STATS), (mount / "loose/model.safetensors", LAYOUT)]:
        path, name = os.fsencode(path), name.encode()
        size = libc.getxattr(path, name, None, 0)
        # Statistics grow: the mount's counters gain a digit now and then.
        buffer = ctypes.create_string_buffer(size + 64)
        assert size <= libc.getxattr(path, name, buffer, len(buffer)) + 8
        assert libc.getxattr(path, name, buffer, 5) == -1
        assert ctypes.get_errno() == errno.ERANGE
        assert libc.listxattr(path, None, 0) == 0
