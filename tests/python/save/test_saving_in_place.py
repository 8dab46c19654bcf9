"""Saves over a file, and where they must not happen: links, permissions, directories that cannot be written to. The
old file stays whole, and nothing is left beside it."""

import errno
import os
import stat
import subprocess

import ckptfs
import ckptfs.torch
import pytest
import torch

from compare import check_same
from forks import OTHER, as_another, let_others_through
from samples import numbers


@pytest.fixture
def folder(tmp_path):
    """A directory that everybody may write to, with a file and a set of shards."""
    made = tmp_path / "models"
    made.mkdir()
    let_others_through(tmp_path)
    ckptfs.torch.save_file(old(), made / "x.safetensors", {"a": "b"})
    ckptfs.torch.save_sharded(old(), made, 400)
    made.chmod(0o777)
    return made


def old():
    return {f"{n}": numbers(n, 8, 8) for n in range(4)}


def new():
    return {name: tensor + 1 for name, tensor in old().items()}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refuses(folder, code):
    """Every way of saving there is refused by the system, in words that name the given path."""
    path = folder / "x.safetensors"
    for save, named in [
        (lambda: ckptfs.torch.save_file(new(), path), path),
        (lambda: ckptfs.torch.save_file(new(), folder / "other.safetensors"), folder / "other.safetensors"),
        (lambda: ckptfs.torch.save_sharded(new(), folder, 400), folder),
        (lambda: ckptfs.torch.save_sharded(new(), folder, "1GB"), folder),
        (lambda: ckptfs.torch.save_sharded(new(), folder / "inside", 400), folder / "inside"),
    ]:
        with pytest.raises(OSError) as fault:
            save()
        assert isinstance(fault.value, ckptfs.SafetensorError) and fault.value.errno == code, fault.value
        assert os.strerror(code) in str(fault.value) and str(named) in str(fault.value), fault.value


def test_a_directory_without_write_permission_is_refused(folder):
    before = contents(folder)
    folder.chmod(0o555)
    # Even where the file itself is writable: it would have to be written in place.
    (folder / "x.safetensors").chmod(0o666)
    assert as_another(lambda: refuses(folder, errno.EACCES))
    assert contents(folder) == before


def test_a_read_only_filesystem_is_refused(folder, tmp_path):
    before = contents(folder)
    point = tmp_path / "point"
    point.mkdir()
    subprocess.run(["mount", "--bind", folder, point], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", point], check=True)
        refuses(point, errno.EROFS)
        (tmp_path / "link.safetensors").symlink_to(point / "x.safetensors")
        with pytest.raises(OSError) as fault:
            ckptfs.torch.save_file(new(), tmp_path / "link.safetensors")
        assert fault.value.errno == errno.EROFS and "link.safetensors" in str(fault.value)
        assert contents(point) == before
        check_same(ckptfs.torch.load_file(point / "model.safetensors.index.json"), old())
    finally:
        subprocess.run(["umount", point], check=True)
    assert contents(folder) == before and sorted(os.listdir(tmp_path)) == ["link.safetensors", "models", "point"]


def test_a_file_of_another_user_is_replaced_unless_the_directory_is_sticky(folder):
    path = folder / "x.safetensors"
    path.chmod(0o444)
    assert as_another(lambda: ckptfs.torch.save_file(new(), path))
    # A new file takes the name, and belongs to the user that saved it.
    assert path.stat().st_uid == OTHER and stat.S_IMODE(path.stat().st_mode) == 0o444
    check_same(ckptfs.torch.load_file(path), new())
    # Where the directory hides that from others, it stays hidden.
    ckptfs.torch.save_file(old(), path)
    os.chown(path, 0, 0)
    folder.chmod(0o1777)
    before = contents(folder)

    def refused():
        with pytest.raises(PermissionError):
            ckptfs.torch.save_file(new(), path)

    assert as_another(refused)
    assert contents(folder) == before


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444, 0o755])
def test_permissions_are_those_of_the_file_that_was_there(folder, mode):
    path = folder / "x.safetensors"
    path.chmod(mode)
    ckptfs.torch.save_file(new(), path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    check_same(ckptfs.torch.load_file(path), new())


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_of_a_new_file_are_what_the_process_has_for_new_files(folder, mask):
    before = os.umask(mask)
    try:
        ckptfs.torch.save_file(new(), folder / "new.safetensors")
        ckptfs.torch.save_sharded(new(), folder / "set", 400)
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    for path in [folder / "new.safetensors", *(folder / "set").iterdir()]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask, path


def test_a_link_is_followed_to_the_end_of_it(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    blob = elsewhere / "blob"
    blob.write_bytes(b"old")
    blob.chmod(0o640)
    (folder / "middle").symlink_to(blob)
    (folder / "first.safetensors").symlink_to("middle")
    (folder / "dangling.safetensors").symlink_to(elsewhere / "not yet")
    names = sorted(os.listdir(folder))
    ckptfs.torch.save_file(new(), folder / "first.safetensors")
    ckptfs.torch.save_file(new(), folder / "dangling.safetensors")
    assert sorted(os.listdir(folder)) == names and sorted(os.listdir(elsewhere)) == ["blob", "not yet"]
    assert all((folder / name).is_symlink() for name in ("middle", "first.safetensors", "dangling.safetensors"))
    assert stat.S_IMODE(blob.stat().st_mode) == 0o640
    for path in (blob, elsewhere / "not yet"):
        check_same(ckptfs.torch.load_file(path), new())


def test_links_that_lead_nowhere_are_refused(folder):
    (folder / "round.safetensors").symlink_to("round.safetensors")
    (folder / "lost.safetensors").symlink_to("nowhere/x.safetensors")
    before = sorted(os.listdir(folder))
    for name, code in ("round", errno.ELOOP), ("lost", errno.ENOENT):
        with pytest.raises(OSError) as fault:
            ckptfs.torch.save_file(new(), folder / f"{name}.safetensors")
        assert fault.value.errno == code and f"{name}.safetensors" in str(fault.value)
    assert sorted(os.listdir(folder)) == before


def test_a_name_that_is_a_directorys_is_refused(folder):
    with pytest.raises(IsADirectoryError) as refused:
        ckptfs.torch.save_file({"a": torch.ones(2)}, f"{folder}/new.safetensors/")
    assert isinstance(refused.value, ckptfs.SafetensorError) and refused.value.filename.endswith("/")
    assert not (folder / "new.safetensors").exists()


def test_another_name_of_the_file_keeps_the_old(folder):
    path, twin = folder / "x.safetensors", folder / "twin.safetensors"
    twin.hardlink_to(path)
    ckptfs.torch.save_file(new(), path)
    check_same(ckptfs.torch.load_file(path), new())
    check_same(ckptfs.torch.load_file(twin), old())


def test_a_link_to_a_directory_is_followed(folder, tmp_path):
    (tmp_path / "link").symlink_to("models")
    names = ckptfs.torch.save_sharded(new(), tmp_path / "link", "1GB")
    assert (tmp_path / "link").is_symlink() and names == ["model.safetensors"]
    assert sorted(os.listdir(folder)) == ["model.safetensors", "x.safetensors"]
    assert torch.equal(ckptfs.torch.load_file(folder / names[0])["1"], new()["1"])
