"""Files of a mount load like their sources, and straight from these where they can be seen. Otherwise they load through
the mount, with the reason in the report."""

import os
import subprocess
import sys

import ckptfs
import ckptfs.torch
import pytest
import torch

from compare import check_same
from samples import write_all


@pytest.fixture
def source(tmp_path):
    return tmp_path / "source", write_all(tmp_path / "source", 11)


def route(path):
    with ckptfs.safe_open(path, "pt") as file, file._handle.use() as opened:
        return opened.route


def test_every_virtual_file_is_loaded_from_its_source(mounts, source, backend):
    folder, (virtual_files, _) = source
    mount = mounts(folder)
    for shown, made_of in virtual_files.items():
        expected = ckptfs.torch.load_file(folder / made_of, backend="pread")
        check_same(ckptfs.torch.load_file(mount / shown, backend=backend), expected)
        assert not [why for why in ckptfs.last_report().fallbacks if "mount" in why]
        kind, where = route(mount / shown)
        assert kind == "direct" and where.startswith(str(folder)), where
        # Metadata and offsets are those of the virtual file.
        with ckptfs.safe_open(mount / shown, "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert sorted(file.offset_keys()) == file.keys() == sorted(expected)
    check_same(ckptfs.torch.load_file(mount / "sharded"), ckptfs.torch.load_file(folder / "sharded"))


def test_a_handle_keeps_the_source_that_it_opened(mounts, source, backend):
    folder, _ = source
    mount = mounts(folder)
    virtual_file = mount / "loose/small.safetensors"
    expected = ckptfs.torch.load_file(virtual_file, backend="pread")
    torch.save({"other": torch.ones(3)}, folder / "loose/new.bin")
    with ckptfs.safe_open(virtual_file, "pt", backend=backend) as file:
        os.replace(folder / "loose/new.bin", folder / "loose/small.bin")
        check_same(file.get_tensors(), expected)
    check_same(ckptfs.torch.load_file(folder / "loose/small.bin"), {"other": torch.ones(3)})


def test_without_its_source_it_is_read_through_the_mount(mounts, source, backend):
    folder, (virtual_files, _) = source
    expected = ckptfs.torch.load_file(folder / "sharded", backend="pread")
    # Something else lies in its place, and the daemon is out of sight.
    mount = mounts(folder)
    alone = 'mount -t tmpfs none "$0" && exec "$@"'
    hidden = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", alone, folder]
    script = (
        "import sys, ckptfs, ckptfs.torch, torch\n"
        "got = ckptfs.torch.load_file(sys.argv[1], backend=sys.argv[2])\n"
        "torch.save(got, sys.argv[3])\n"
        "print(list(ckptfs.last_report().fallbacks))"
    )
    out = folder.with_name("out.pt")
    command = [*hidden, sys.executable, "-c", script, mount / "sharded/model.safetensors", backend, out]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_same(torch.load(out), expected)
    assert "source" in done.stdout, done.stdout


def test_a_mount_that_cannot_be_believed_is_read_like_any_file(mounts, source, tmp_path, backend):
    folder, _ = source
    mount = mounts(folder)
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes((mount / "loose/strided.safetensors").read_bytes())
    stale = os.getxattr(mount / "loose/strided.safetensors", "user.ckptfs.source")
    os.setxattr(copy, "user.ckptfs.source", stale)
    expected = ckptfs.torch.load_file(folder / "loose/strided.pt")
    check_same(ckptfs.torch.load_file(copy, backend=backend), expected)
    assert route(copy) == ("plain", None)
