"""A save over a file that is killed leaves hidden files. The next save of that name removes them, and never those of
a living process."""

import errno
import fcntl
import functools
import multiprocessing
import os
import signal
import subprocess
import sys

import ckptfs.torch
import pytest
import torch

import preloaded
from compare import check_same
from denied_calls import deny, deny_nameless_files, succeeds_after, succeeds_without
from samples import numbers

TARGET = "x.safetensors"


def old():
    return {f"{n}": numbers(n, 8, 8) for n in range(4)}


def hidden(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def hidden_name(name):
    """The hidden name that goes with a name: docs/semantics/saving.md has the rule."""
    value = 0xCBF29CE484222325
    for byte in os.fsencode(name):
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return f".ckptfs-{value:016x}.part"


def part_of(folder, name=TARGET):
    """The hidden file of a name."""
    return folder / hidden_name(name)


def killed(folder, act, at, named=False):
    """A process that is killed at its first system call of this name."""
    code = f"""
import sys, torch, ckptfs.torch
from denied_calls import deny_nameless_files, die_at
tensors = {{f"{{n}}": torch.full((8, 8), n + 0.5) for n in range(4)}}
folder = sys.argv[1]
{"deny_nameless_files()" if named else ""}
die_at("{at}")
{act}
"""
    # Python itself renames what it compiles.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(preloaded.command("-c", code, folder), env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGSYS, done.stderr


def save_there(folder, named=False):
    """Saves to the target; `named` in a process that finds no nameless files."""
    save = functools.partial(ckptfs.torch.save_file, old(), folder / TARGET)
    assert succeeds_after(deny_nameless_files, save) if named else save() is None


def test_python_and_rust_use_the_same_hidden_names():
    # The unit tests of src/temp_file.rs have the same names.
    assert hidden_name("model.safetensors") == ".ckptfs-f92548523eb0edb1.part"
    assert hidden_name("größe.bin") == ".ckptfs-a7631d0a463cca65.part"
    assert len(hidden_name("n" * 255)) == 29


@pytest.mark.parametrize("at, named", [("rename", False), ("rename", True), ("fsync", True)])
def test_the_next_save_removes_what_a_killed_one_left(tmp_path, at, named):
    ckptfs.torch.save_file(old(), tmp_path / TARGET)
    (tmp_path / ".ckptfs-0123456789abcdef.part").write_bytes(b"another's")
    killed(tmp_path, f"ckptfs.torch.save_file(tensors, folder + '/{TARGET}')", at, named)
    assert part_of(tmp_path).exists() and len(hidden(tmp_path)) == 2
    check_same(ckptfs.torch.load_file(tmp_path / TARGET), old())
    # Another name's save leaves it, this one's removes it, and so does one that finds nothing to replace.
    ckptfs.torch.save_file(old(), tmp_path / "other.safetensors")
    assert part_of(tmp_path).exists()
    new = {name: tensor + 1 for name, tensor in old().items()}
    ckptfs.torch.save_file(new, tmp_path / TARGET)
    assert hidden(tmp_path) == [".ckptfs-0123456789abcdef.part"]
    check_same(ckptfs.torch.load_file(tmp_path / TARGET), new)
    part_of(tmp_path).write_bytes(b"left")
    (tmp_path / TARGET).unlink()
    ckptfs.torch.save_file(new, tmp_path / TARGET)
    assert hidden(tmp_path) == [".ckptfs-0123456789abcdef.part"]


@pytest.mark.parametrize("before, during, after", [("1GB", "1GB", "400"), ("400", "400", "1GB"), ("400", "1GB", "400")])
def test_the_next_set_removes_what_a_killed_one_left(tmp_path, before, during, after):
    ckptfs.torch.save_sharded(old(), tmp_path, before)
    act = f"ckptfs.torch.save_sharded(tensors, folder, '{during}')"
    if before == during:
        killed(tmp_path, act, "rename")
        assert len(hidden(tmp_path)) == 1
    else:
        # One file replaces nothing where there are shards, so that this one is renamed into place.
        part_of(tmp_path, "model.safetensors").write_bytes(b"left")
    ckptfs.torch.save_sharded(old(), tmp_path, after)
    assert not hidden(tmp_path)
    check_same(ckptfs.torch.load_sharded(tmp_path), old())


@pytest.mark.parametrize("named", [False, True])
def test_files_of_a_living_process_stay(tmp_path, named):
    part = part_of(tmp_path)
    with open(part, "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for _ in range(2):
            save_there(tmp_path, named)
            assert hidden(tmp_path) == [part.name]
    save_there(tmp_path, named)
    assert not hidden(tmp_path)
    check_same(ckptfs.torch.load_file(tmp_path / TARGET), old())


@pytest.mark.parametrize("what", ["directory", "pipe", "link"])
def test_other_kinds_of_files_are_not_opened_and_stay(tmp_path, what):
    part = part_of(tmp_path)
    {"directory": part.mkdir, "pipe": lambda: os.mkfifo(part), "link": lambda: part.symlink_to(TARGET)}[what]()
    for _ in range(2):
        ckptfs.torch.save_file(old(), tmp_path / TARGET)
    assert hidden(tmp_path) == [part.name]
    check_same(ckptfs.torch.load_file(tmp_path / TARGET), old())


def test_without_locks_no_file_counts_as_abandoned(tmp_path):
    part_of(tmp_path).write_bytes(b"whose?")
    for _ in range(2):
        assert succeeds_without(
            "flock", errno.EOPNOTSUPP, lambda: ckptfs.torch.save_file(old(), tmp_path / TARGET)
        )
    assert part_of(tmp_path).read_bytes() == b"whose?" and len(hidden(tmp_path)) == 1


@pytest.mark.parametrize("says", ["locked", "another"])
def test_a_filesystem_with_wrong_answers_does_not_stop_a_save(tmp_path, says):
    """It has no unnamed files. Of each it says that it is locked, or does not say which has a name."""
    denied = ("flock", errno.EWOULDBLOCK) if says == "locked" else ("statx", errno.EIO)

    def prepare():
        deny_nameless_files()
        deny(*denied)

    assert succeeds_after(prepare, lambda: ckptfs.torch.save_file(old(), tmp_path / TARGET))
    check_same(ckptfs.torch.load_file(tmp_path / TARGET), old())
    assert len(hidden(tmp_path)) <= 1


# Enough for each pair of system calls to fall between any other.
ROUNDS, SAVERS = 400, 4


def saves(folder, number, named):
    deny("fsync", 0)
    if named:
        deny_nameless_files()
    for turn in range(ROUNDS):
        tensors = {"a": torch.full((64,), float(number)), "b": torch.full((64,), float(number))}
        ckptfs.torch.save_file(tensors, folder / TARGET)
        if turn % 3 == 0:
            # As a killed process leaves it: whole, under its name, and unlocked.
            made = folder / f"made-{number}"
            made.write_bytes(b"left")
            try:
                os.link(made, part_of(folder))
            except FileExistsError:
                pass
            made.unlink()
        if turn % 5 == 0:
            found = ckptfs.torch.load_file(folder / TARGET, backend="pread")
            assert found["a"][0] == found["b"][-1] and len(set(found["a"].tolist() + found["b"].tolist())) == 1


@pytest.mark.parametrize("kinds", ["nameless", "named", "both"])
def test_savers_of_one_name_at_once_never_fail_and_leave_nothing(tmp_path, kinds):
    start = multiprocessing.get_context("fork").Process
    named = {"nameless": [False], "named": [True], "both": [False, True]}[kinds]
    savers = [start(target=saves, args=(tmp_path, n, named[n % len(named)])) for n in range(SAVERS)]
    for saver in savers:
        saver.start()
    for saver in savers:
        saver.join()
    assert [saver.exitcode for saver in savers] == [0] * SAVERS
    ckptfs.torch.save_file(old(), tmp_path / TARGET)
    assert [path.name for path in tmp_path.iterdir()] == [TARGET]
    check_same(ckptfs.torch.load_file(tmp_path / TARGET), old())
