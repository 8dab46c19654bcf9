"""A path's source is found out, and never guessed. Wherever a mount shows, and whatever became of its source or its
daemon, the bytes are right or the error says why."""

import itertools
import json
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import ckptfs
import ckptfs.numpy
import numpy
import pytest

from forks import as_another, let_others_through
from mounts import PATIENCE, is_mounted, until
from samples import write_all

Refused = ckptfs.SafetensorError


@pytest.fixture
def source(tmp_path):
    return tmp_path / "source", write_all(tmp_path / "source", 12)[0]


@pytest.fixture
def shows(tmp_path):
    """Mounts something beside the source: `shows("name", "-t", "tmpfs", "none")`."""
    points = []

    def shows(name, *arguments):
        points.append(tmp_path / name)
        subprocess.run(["mount", *arguments, points[-1]], check=True, timeout=PATIENCE)
        return points[-1]

    yield shows
    for point in filter(is_mounted, points):
        subprocess.run(["umount", "-l", point], check=True, timeout=PATIENCE)


def loaded(path, backend="pread"):
    return ckptfs.numpy.load_file(path, backend=backend)


def route(path):
    with ckptfs.safe_open(path, "np") as file, file._handle.use() as opened:
        return opened.route


def check(path, backend, kind, expected):
    """The bytes, the route to them, and why the route was not direct."""
    got = loaded(path, backend)
    whys = [why for why in ckptfs.last_report().fallbacks if "mapped" not in why]
    assert sorted(got) == sorted(expected)
    for name, tensor in expected.items():
        numpy.testing.assert_array_equal(got[name], tensor, name)
    got = route(path)
    assert got[0] == kind, got
    assert whys == ([got[1]] if kind == "through" else [])
    return got[1]


def test_a_mount_with_the_number_of_one_that_is_gone_is_found(mounts, source, shows):
    """The kernel gives a mount the number of the last that went, and its device number too."""
    folder, virtual_files = source
    shown, made_of = next((shown, of) for shown, of in virtual_files.items() if shown != of)
    expected = loaded(folder / made_of)
    (folder.parent / "gone").mkdir()
    gone = shows("gone", "-t", "tmpfs", "none")
    ckptfs.numpy.save_file({"x": numpy.zeros(9)}, gone / "x.safetensors")
    for _ in range(2):
        loaded(gone / "x.safetensors")
    subprocess.run(["umount", gone], check=True, timeout=PATIENCE)
    check(mounts(folder) / shown, "pread", "direct", expected)


def test_a_mount_over_its_own_source_is_read_from_beneath(mounts, source, backend):
    folder, virtual_files = source
    expected = {shown: loaded(folder / made_of) for shown, made_of in virtual_files.items()}
    mount = mounts(folder, at=folder)
    for shown, tensors in expected.items():
        # By the same name, but from beneath the mount, which is not asked.
        assert check(folder / shown, backend, "direct", tensors).startswith(str(folder))
    assert mount.stats()["reads"] == 0


def test_bind_mounts_of_a_mount_are_read_from_the_source(mounts, source, shows, tmp_path, backend):
    folder, virtual_files = source
    mount = mounts(folder)
    (tmp_path / "whole").mkdir()
    (tmp_path / "part").mkdir()
    (tmp_path / "one.safetensors").touch()
    whole, part = shows("whole", "--bind", mount.point), shows("part", "--bind", mount / "loose")
    one = shows("one.safetensors", "--bind", mount / "loose/strided.safetensors")
    for shown, made_of in virtual_files.items():
        expected = loaded(folder / made_of)
        assert check(whole / shown, backend, "direct", expected).startswith(str(folder))
    for path in part / "strided.safetensors", one:
        check(path, backend, "direct", loaded(folder / "loose/strided.pt"))
    assert mount.stats()["reads"] == 0


def test_a_mount_whose_source_is_closed_to_the_user_is_read_through(mounts, source, backend):
    folder, virtual_files = source
    expected = {shown: loaded(folder / made_of) for shown, made_of in virtual_files.items()}
    for shard in (folder / "sharded").iterdir():
        shard.chmod(0o644)
    mount = mounts(folder, "--allow-other")
    # Others may pass through to their files, and no one to the source.
    let_others_through(folder.parent)
    hidden = folder.with_name("hidden")
    hidden.mkdir(mode=0o700)
    folder.rename(hidden / "source")

    def load_all():
        for shown, tensors in expected.items():
            why = check(mount / shown, backend, "through", tensors)
            assert "its source cannot be read" in why or "cannot be seen" in why, why

    assert as_another(load_all)
    assert mount.stats()["reads"] > 0
    # The same mount for root, to which nothing is closed.
    check(mount / "sharded", backend, "direct", expected["sharded/model.safetensors"])


def test_a_dead_mount_is_refused_and_open_handles_go_on(mounts, source, backend):
    folder, virtual_files = source
    mount = mounts(folder)
    virtual_file = mount / "loose/strided.safetensors"
    expected = loaded(folder / "loose/strided.pt")
    with ckptfs.safe_open(virtual_file, "np", backend=backend) as held:
        mount.kill()
        for path in [mount.point, virtual_file, mount / "sharded", mount / "nothing.safetensors"]:
            for ask in ckptfs.numpy.load_file, lambda path: ckptfs.safe_open(path, "np"):
                with pytest.raises(Refused, match="lies on a mount whose daemon has gone") as refused:
                    ask(path)
                assert "remove the mount: ckptfs unmount " in refused.value.__notes__[0]
        # An open file is read from its source, which needs no daemon.
        for name, tensor in held.get_tensors().items():
            numpy.testing.assert_array_equal(tensor, expected[name])


def write(path, version, in_place):
    """A model whose every number is its version, of a size of its own."""
    new = path.with_name("new")
    names = [f"layer.{n}" for n in range(8 + version % 3)]
    ckptfs.numpy.save_file({name: numpy.full(40_000, version, "f4") for name in names}, new)
    if in_place:
        path.write_bytes(new.read_bytes())
    else:
        os.replace(new, path)


def version_of(tensors):
    versions = {number for tensor in tensors.values() for number in numpy.unique(tensor)}
    [version] = versions
    assert len(tensors) == 8 + version % 3, "of one version the names, of another the numbers"
    return version


@pytest.mark.parametrize("in_place", [False, True], ids=["replaced", "in-place"])
def test_a_source_that_changes_is_never_mixed(mounts, tmp_path, backend, in_place):
    folder = tmp_path / "source"
    folder.mkdir()
    path = folder / "model-00001-of-00001.safetensors"
    write(path, 0, False)
    mount = mounts(folder)
    virtual_file = mount / "model.safetensors"
    assert version_of(loaded(virtual_file, backend)) == 0
    for version in range(1, 12):
        held = ckptfs.safe_open(virtual_file, "np", backend=backend)
        write(path, version, in_place)
        # Before the daemon was asked, and after it has looked again.
        assert version_of(loaded(virtual_file, backend)) == version
        if in_place:
            with pytest.raises(Refused, match="changed on disk"):
                held.get_tensors()
        else:
            assert version_of(held.get_tensors()) == version - 1
        until("the new is shown", lambda: virtual_file.stat().st_mtime_ns == path.stat().st_mtime_ns)
        assert version_of(loaded(virtual_file, backend)) == version
        assert route(virtual_file)[0] == "direct"


def test_a_source_that_is_replaced_again_and_again_gives_whole_versions(mounts, tmp_path, backend):
    folder = tmp_path / "source"
    folder.mkdir()
    path = folder / "model-00001-of-00001.safetensors"
    write(path, 0, False)
    mount = mounts(folder)
    stop, seen = threading.Event(), set()

    def replace():
        for version in itertools.count(1):
            write(path, version, False)
            if stop.is_set():
                return version

    def look():
        for _ in range(20):
            try:
                seen.add(version_of(loaded(mount / "model.safetensors", backend)))
            except Refused as refused:
                [what_to_do] = refused.__notes__
                assert "wait until the program that writes it is done" in what_to_do, refused
        return len(seen) > 20

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(replace)
        try:
            until("it was seen in many states", look)
        finally:
            stop.set()
        last = writing.result()
    assert version_of(loaded(mount / "model.safetensors", backend)) == last


def test_a_file_with_forged_attributes_is_read_as_it_is(mounts, source, shows, tmp_path, backend):
    folder, _ = source
    mount = mounts(folder)
    (tmp_path / "elsewhere").mkdir()
    forged = shows("elsewhere", "-t", "tmpfs", "none") / "model.safetensors"
    ckptfs.numpy.save_file({"mine": numpy.arange(9)}, forged)
    other = mount / "loose/strided.safetensors"
    told = json.loads(os.getxattr(other, "user.ckptfs.source"))
    assert told["pid"] == mount.pid
    try:
        for name in "source", "layout", "identity":
            name = f"user.ckptfs.{name}"
            os.setxattr(forged, name, os.getxattr(other, name))
    except OSError as unsupported:
        pytest.skip(f"no file on tmpfs has such attributes here: {unsupported}")
    assert check(forged, backend, "plain", {"mine": numpy.arange(9)}) is None
