"""`ckptfs.mount` shows a source to any program under its options, or says why it cannot; `ckptfs.mounts` lists the
mounts."""

import errno
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ckptfs
import pytest
import safetensors
import torch
from ckptfs import child_process
from safetensors.torch import load_file

from compare import check_same
from mounts import has_ended, is_mounted, python, until
from program import find_binary
from samples import numbers

Refused = ckptfs.SafetensorError


def test_shards_are_read_through_it_while_the_block_lasts(source, left):
    folder, expected = source
    mount = ckptfs.mount(folder)
    with mount as path:
        assert is_mounted(path) and path == mount.path and left()
        check_same(load_file(path / "llama/model.safetensors"), expected)
        assert sorted(os.listdir(path / "llama")) == ["config.json", "model.safetensors"]
    assert not path.exists() and not left()
    until("its daemon has ended", lambda: has_ended(mount.pid))


def test_a_mountpoint_can_be_given(source, point, monkeypatch):
    folder, expected = source
    monkeypatch.chdir(point.parent)
    mount = ckptfs.mount("models", b"mnt")
    monkeypatch.chdir("/")
    assert mount.path == point
    check_same(load_file(point / "llama/model.safetensors"), expected)
    mount.close()
    assert point.is_dir() and not is_mounted(point)


def test_a_mount_can_lie_over_its_source(source):
    folder, expected = source
    shards = sorted(os.listdir(folder / "llama"))
    with ckptfs.mount(folder, folder) as path:
        assert path == folder
        check_same(load_file(folder / "llama/model.safetensors"), expected)
    assert sorted(os.listdir(folder / "llama")) == shards


def test_one_file_can_be_the_source(tmp_path):
    expected = {"a": numbers(1, 30, 20), "b": torch.arange(9)}
    torch.save(expected, tmp_path / "last.ckpt")
    with ckptfs.mount(tmp_path / "last.ckpt") as path:
        [virtual_file] = path.iterdir()
        check_same(load_file(virtual_file), expected)


def test_options_are_those_of_the_command(source, tmp_path):
    folder, expected = source
    nested = {"state_dict": {"a": numbers(1, 3)}, "ema": {"a": numbers(2, 3)}}
    torch.save(nested, folder / "last.ckpt")
    torch.save(expected, folder / "-kept.bin")
    torch.save(expected, folder / "kept.pt")
    log = tmp_path / "log"
    how = {
        "show_originals": True, "keep": ["-kept.*", "kept.*"], "root": "ema", "uid": 0, "gid": 12,
        "memory": 64 << 20, "threads": 2, "readahead": "1M", "no_passthrough": True, "log_file": log,
        "remember": "none", "verbose": 1, "metrics": "127.0.0.1:0", "allow_partial": True,
        "follow_symlinks": True, "allow_other": True,
    }  # fmt: skip
    mount = ckptfs.mount(folder, **how)
    with mount as path:
        [info] = [info for info in ckptfs.mounts() if info.mountpoint == str(path)]
        assert info.stats["memory"]["budget"] == 64 << 20 and not info.stats["passthrough"]
        assert {"-kept.bin", "kept.pt", "last.ckpt", "last.safetensors"} <= set(os.listdir(path))
        check_same(load_file(path / "last.safetensors"), nested["ema"])
        assert (path / "llama/config.json").stat().st_gid == 12
        assert [note for note in mount.notes if note.startswith("metrics at http://127.0.0.1:")]
        words = Path(f"/proc/{mount.pid}/cmdline").read_text().split("\0")
        assert {"--threads=2", "--readahead=1M", "--follow-symlinks", "--allow-partial", "--remember=none"} <= set(words)
    assert str(path) in log.read_text()


def test_help_explains_every_option():
    arguments = set(inspect.signature(ckptfs.mount).parameters) - {"source", "mountpoint"}
    explained = re.search(r"The options are.*?\n\n(?=    What)", ckptfs.mount.__doc__, re.DOTALL)[0]
    assert {name for line in re.findall(r"- (`.*?): ", explained) for name in re.findall(r"`(\w+)`", line)} == arguments


def test_one_pattern_is_enough_to_keep(source):
    folder, expected = source
    with ckptfs.mount(folder, keep="*.safetensors") as path:
        assert len([*path.glob("llama/*.safetensors")]) == 3


def test_a_directory_that_is_not_empty_is_hidden_when_asked(source, point):
    (point / "here").touch()
    with ckptfs.mount(source[0], point, nonempty=True):
        assert os.listdir(point) == ["llama"]
    assert os.listdir(point) == ["here"]


REFUSALS = {
    "its source is missing": ("nothing", "mnt", {}, "no such file or directory", "check the path"),
    "its mountpoint is missing": ("models", "nothing", {}, "does not exist", "mkdir"),
    "its mountpoint is a file": ("models", "file", {}, "is not a directory", "empty directory"),
    "its mountpoint is not empty": ("models", "full", {}, "is not empty", "nonempty=True"),
    "its mountpoint lies in its source": ("models", "models/llama", {"nonempty": True}, "inside", "outside"),
    "its source is no checkpoint": ("file", "mnt", {}, "file", ""),
    "a path has a NUL in it": ("models", "m\0t", {}, "NUL", "leave it out"),
    "an option is too small": ("models", "mnt", {"threads": 0}, "threads=", "help(ckptfs.mount)"),
    "an option has no value": ("models", "mnt", {"memory": True}, "memory=", "help(ckptfs.mount)"),
    "a pattern is no text": ("models", "mnt", {"keep": [b"*.bin"]}, "keep must be a glob or a list of globs", None),
    "an option is neither on nor off": ("models", "mnt", {"nonempty": "yes"}, "nonempty must be True or", None),
    "an option is no text": ("models", "mnt", {"root": ["ema"]}, "root must be text or None, got ['ema']", None),
    "a path is empty and so missing": ("", "mnt", {}, "the path is empty", None),
    "a word is no number of times": ("models", "mnt", {"verbose": "very"}, "verbose='very'", "give"),
    "its log would lie under it": ("models", "mnt", {"log_file": "mnt/log"}, "mnt/log", ""),
}


# Without a mountpoint, nothing can be wrong with one.
CASES = [(why, False) for why in REFUSALS]
CASES += [(why, True) for why, case in REFUSALS.items() if case[1] == "mnt" and "log_file" not in case[2]]


@pytest.mark.parametrize(("why", "private"), CASES)
def test_a_refusal_has_the_words_of_the_command(why, private, source, point, left, monkeypatch):
    name, mountpoint, how, words, remedy = REFUSALS[why]
    monkeypatch.chdir(point.parent)
    Path("full/of").mkdir(parents=True)
    Path("file").write_text("no checkpoint")
    with pytest.raises((Refused, FileNotFoundError)) as refused:
        ckptfs.mount(name, None if private else mountpoint, **how)
    assert isinstance(refused.value, safetensors.SafetensorError) or not name
    fault = refused.value
    assert words in str(fault) and (remedy is None or any(remedy in note for note in fault.__notes__))
    assert isinstance(fault, FileNotFoundError) == why.endswith(" missing")
    assert isinstance(fault, NotADirectoryError) == why.endswith(" is a file")
    if isinstance(fault, OSError):
        assert fault.errno and fault.filename == (mountpoint if "mountpoint" in why else name)
    assert not left() and os.listdir("mnt") == []


def test_a_source_that_may_not_be_read_is_a_permission_error(monkeypatch):
    popen = subprocess.Popen

    def popen_as_nobody(words, **how):
        nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        return popen([*nobody, "./ckptfs", *words[words.index("ckptfs") + 1 :]], **how)

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.chdir(folder)
        shutil.copy(find_binary(), "ckptfs")
        monkeypatch.setattr(child_process.subprocess, "Popen", popen_as_nobody)
        os.mkdir("locked", mode=0)
        os.mkdir("mnt")
        Path("locked.pt").touch(mode=0)
        for name in ("locked", "locked.pt", "locked/model"):
            with pytest.raises(PermissionError) as refused:
                ckptfs.mount(name, "mnt")
            fault = refused.value
            assert isinstance(fault, Refused) and (fault.errno, fault.filename) == (errno.EACCES, name)
            assert str(fault) == f"[Errno 13] Permission denied: {name!r}" and "ask for read" in fault.__notes__[0]
        # Out of the directory, before it is removed.
        monkeypatch.undo()


def test_an_unknown_option_is_no_option(source):
    with pytest.raises(TypeError):
        ckptfs.mount(source[0], foreground=True)


def test_an_existing_mount_stays(source, point):
    with ckptfs.mount(source[0], point):
        with pytest.raises(Refused, match="already shows") as refused:
            ckptfs.mount(source[0], point)
        assert "ckptfs unmount" in refused.value.__notes__[0]
        check_same(load_file(point / "llama/model.safetensors"), source[1])
    assert not is_mounted(point)


def test_two_mounts_are_listed_and_end_separately(source, point, left):
    folder, expected = source
    with ckptfs.mount(folder) as first:
        with ckptfs.mount(folder, point) as second:
            known = {info.mountpoint: info for info in ckptfs.mounts()}
            for path in first, second:
                info = known[str(path)]
                assert (info.source, info.state, info.reason) == (str(folder), "alive", None)
                assert info.stats["pid"] == info.pid and not has_ended(info.pid)
                check_same(load_file(path / "llama/model.safetensors"), expected)
        assert is_mounted(first) and not is_mounted(second)
    assert not left()


def test_threads_mount_and_close_at_once(source, left):
    folder, expected = source

    def work(_):
        with ckptfs.mount(folder) as path:
            check_same(load_file(path / "llama/model.safetensors"), expected)
            return path

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(work, range(8)))) == 8
    mount = ckptfs.mount(folder)
    threads = [threading.Thread(target=mount.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not left()


def test_a_mount_needs_neither_torch_nor_numpy_and_is_listed(source, tmp_path):
    home = Path(ckptfs.__file__).parents[1]
    (tmp_path / "ckptfs").mkdir()
    script = f"import sys; sys.path.insert(0, {str(home)!r}); import ckptfs\n" \
             "assert not {'subprocess', 'json', 'ckptfs.mounting'} & set(sys.modules)\n" \
             "with ckptfs.mount(sys.argv[1]) as path: assert ckptfs.mounts() and path.is_mount()\n" \
             "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)"
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for flag in "-P", "-I", "-E":
        done = python(flag, "-c", script, source[0], env=bare, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_of_two_for_one_mountpoint_the_refused_one_leaves_the_other(source, point, monkeypatch):
    run, others = child_process.run, []

    def later(*words, **how):
        monkeypatch.setattr(child_process, "run", run)
        others.append(ckptfs.mount(source[0], point))
        return run(*words, **how)

    monkeypatch.setattr(child_process, "run", later)
    with pytest.raises(Refused, match="already shows"):
        ckptfs.mount(source[0], point)
    with others[0] as path:
        check_same(load_file(path / "llama/model.safetensors"), source[1])


def test_an_interpreter_without_a_path_is_an_error(source, monkeypatch):
    monkeypatch.setattr(sys, "executable", None)
    with pytest.raises(Refused, match="sys.executable"):
        ckptfs.mount(source[0])
    monkeypatch.setattr(sys, "executable", "/nothing/python")
    with pytest.raises(Refused, match="/nothing/python: cannot be run"):
        ckptfs.mounts()
