"""A mount shows no user what the source would not show them."""

import os
import subprocess
import sys

import pytest
import torch

from forks import let_others_through
from samples import numbers, write_shards

# Unprivileged users without names here.
OWNER, OTHER = 4001, 4002

TRY = """
import os, sys
for path in sys.argv[1:]:
    try:
        if os.path.isdir(path):
            os.listdir(path)
        else:
            with open(path, "rb") as file:
                file.read()
        print("yes")
    except OSError as error:
        print(error.strerror)
"""

NO = "Permission denied"


def tries(user, *paths):
    """The result of a read by a user."""
    command = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    command += ["/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable]
    done = subprocess.run(
        [*command, "-I", "-c", TRY, *map(str, paths)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def source(tmp_path):
    let_others_through(tmp_path)
    source = tmp_path / "source"
    write_shards(source / "sharded", 1, 2, 2, 50)
    torch.save({"a": numbers(1, 9)}, source / "private.pt")
    (source / "notes.txt").write_text("text")
    (source / "secret.txt").write_text("text")
    (source / "closed").mkdir()
    (source / "closed/notes.txt").write_text("text")
    for path in source.rglob("*"):
        os.chown(path, OWNER, OWNER)
        path.chmod(0o755 if path.is_dir() else 0o644)
    first, second = sorted((source / "sharded").glob("*-of-*"))
    first.chmod(0o644)
    second.chmod(0o660)
    (source / "private.pt").chmod(0o600)
    (source / "secret.txt").chmod(0o400)
    (source / "closed").chmod(0o700)
    return source


NAMES = ["sharded/model.safetensors", "private.safetensors", "notes.txt", "secret.txt", "closed",
         "closed/notes.txt", "sharded", "."]  # fmt: skip


def test_other_users_are_kept_out(mounts, source):
    mount = mounts(source)
    paths = [mount / name for name in NAMES]
    # Not even the owner of the files: another user mounted it.
    for user in (OWNER, OTHER):
        assert set(tries(user, *paths)) == {NO}
    assert paths[0].read_bytes()


@pytest.mark.parametrize("options", [[], ["--no-passthrough"]], ids=str)
def test_allowed_users_see_what_the_source_shows_them(mounts, source, options):
    mount = mounts(source, "--allow-other", *options)
    paths = [mount / name for name in NAMES]
    originals = ["sharded/model-00002-of-00002.safetensors", "private.pt", *NAMES[2:]]
    for user in (OWNER, OTHER):
        assert tries(user, *paths) == tries(user, *[source / name for name in originals])
    assert tries(OTHER, *paths) == [NO, NO, "yes", NO, NO, NO, "yes", "yes"]
    # Also of bytes that others have read before.
    for path in paths:
        if path.is_file():
            path.read_bytes()
    assert tries(OTHER, paths[0], paths[1]) == [NO, NO]


def test_modes_are_those_that_all_sources_grant(mounts, source):
    os.chown(source / "sharded/model-00002-of-00002.safetensors", OTHER, OTHER)
    mount = mounts(source)
    about = lambda name: (
        (mount / name).stat().st_mode & 0o7777, (mount / name).stat().st_uid,
        (mount / name).stat().st_gid,
    )  # fmt: skip
    # The permission that all of its sources give; the owner of the first.
    assert about("sharded/model.safetensors") == (0o640, OWNER, OWNER)
    assert about("private.safetensors") == (0o600, OWNER, OWNER)
    assert about("notes.txt") == (0o644, OWNER, OWNER)
    assert about("closed") == (0o700, OWNER, OWNER)


def test_all_files_belong_to_the_user_that_was_asked_for(mounts, source):
    mount = mounts(source, "--allow-other", "--uid", str(OTHER), "--gid", "7")
    for path in [mount.point, *mount.point.rglob("*")]:
        assert (path.stat().st_uid, path.stat().st_gid) == (OTHER, 7)
    assert set(tries(OTHER, *[mount / name for name in NAMES])) == {"yes"}
    assert tries(OWNER, mount / "private.safetensors") == [NO]


def test_setuid_and_devices_have_no_effect(mounts, source):
    tool = source / "tool"
    tool.write_bytes(open("/bin/true", "rb").read())
    tool.chmod(0o4755)
    mount = mounts(source, "--allow-other")
    line = next(
        line for line in open("/proc/self/mounts") if line.split(" ")[1] == str(mount.point)
    )
    options = line.split(" ")[3].split(",")
    assert {"ro", "nosuid", "nodev", "default_permissions", "allow_other"} <= set(options)
    # The program runs all the same.
    subprocess.run([mount / "tool"], check=True)


@pytest.mark.parametrize("options", [[], ["--no-passthrough"], ["--follow-symlinks"]], ids=str)
def test_links_bypass_no_permission(mounts, source, tmp_path, options):
    """A link does not let a user read a directory that is closed to them."""
    torch.save({"b": numbers(2, 9)}, source / "closed/model.pt")
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / "key.txt").write_text("text")
    torch.save({"c": numbers(3, 9)}, outside / "model.pt")
    os.chown(source / "closed/model.pt", OWNER, OWNER)
    links = source / "links"
    links.mkdir()
    targets = {"a.pt": "../closed/model.pt", "raw.txt": "../closed/notes.txt", "b.pt": "../closed/model.pt",
               "folder": "../closed", "key.txt": "../../outside/key.txt",
               "c.pt": "../../outside/model.pt", "out": "../../outside", "open.txt": "../notes.txt"}  # fmt: skip
    for name, target in targets.items():
        (links / name).symlink_to(target)
    mount = mounts(source, "--allow-other", *options)
    for user in (OWNER, OTHER):
        for name, target in targets.items():
            real = tries(user, links / name) if (links / name).exists() else [NO]
            shown = mount / "links" / (name.replace(".pt", ".safetensors"))
            if not os.path.lexists(shown):
                shown = mount / "links" / name
            assert tries(user, shown) == real or tries(user, shown) == [NO], (user, name)
    assert tries(OTHER, mount / "links/open.txt") == ["yes"]
    assert tries(OTHER, mount / "links/a.safetensors") == [NO]
    assert tries(OWNER, mount / "links/a.safetensors") == ["yes"]
    assert set(tries(OTHER, *(mount / "links").iterdir())) <= {"yes", NO}
