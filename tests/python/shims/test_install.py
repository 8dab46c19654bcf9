"""`install` puts our reads in the place of safetensors': everywhere, only while they are installed, and never in the
way. The original does what ours cannot."""

import json
import os
import signal
import subprocess
import sys
import threading
import types

import ckptfs
import ckptfs.torch
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from ckptfs.shims import install

from compare import check_same
from forks import in_a_fork
from installed import ORIGINALS, file, left, nothing_is_left, originals, run
from samples import write_shards

__all__ = ["file", "nothing_is_left"]


def test_both_calls_are_ours_while_it_is_installed(file, tmp_path):
    path, tensors = file
    write_shards(tmp_path / "shards", 3, 3, 4, 8)
    before = originals()
    with ckptfs.installed():
        check_same(safetensors.torch.load_file(path), tensors)
        assert ckptfs.last_report().tensors == 2
        # A path that the original cannot open at all.
        assert len(safetensors.torch.load_file(tmp_path / "shards")) == 12
        with safetensors.safe_open(path, framework="pt", device="cpu") as f:
            assert isinstance(f, safetensors.safe_open)
            assert f.keys() == ["a", "b"] and f.metadata() == {"format": "pt"}
            assert torch.equal(f.get_slice("a")[1:3], tensors["a"][1:3])
            assert {"keys", "get_tensor", "metadata"} <= set(dir(f))
            assert f.get_slice("a").get_shape() == [4, 6] and f.get_slice("a").get_dtype() == "F32"
            check_same(f.get_tensors(), tensors)
        assert len(safetensors.numpy.load_file(path)) == 2
    assert originals() == before
    with pytest.raises(OSError):
        safetensors.torch.load_file(tmp_path / "shards")


def test_names_imported_earlier_and_later_are_ours(file):
    path, tensors = file
    early = types.ModuleType("an_early_program")
    sys.modules[early.__name__] = early
    exec("from safetensors import safe_open\nfrom safetensors.torch import load_file as load", vars(early))
    late = types.ModuleType("a_late_program")
    try:
        with ckptfs.installed():
            exec("from safetensors import safe_open\nfrom safetensors.torch import load_file", vars(late))
            sys.modules[late.__name__] = late
            assert early.load is late.load_file is not ORIGINALS[1]
            assert early.safe_open is late.safe_open is not ORIGINALS[0]
            before = ckptfs.stats()["loads"]
            check_same(early.load(str(path)), tensors)
            assert ckptfs.stats()["loads"] == before + 1
        assert (early.safe_open, early.load) == (late.safe_open, late.load_file) == ORIGINALS
    finally:
        for module in (early, late):
            sys.modules.pop(module.__name__, None)


def test_a_call_that_ours_fails_goes_to_the_original_once(file, monkeypatch, caplog):
    path, tensors = file
    called = []

    def fails(*given, **how):
        called.append(given)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(ckptfs.load.torch, "load_file", fails)
    before = originals()
    with ckptfs.installed():
        check_same(safetensors.torch.load_file(path), tensors)
    assert (len(called), originals()) == (1, before + 1)
    assert "left to safetensors.torch.load_file: RuntimeError: out of luck" in caplog.text


def test_a_handle_of_ours_that_fails_goes_to_the_original(file, monkeypatch):
    path, tensors = file
    before = originals()
    with ckptfs.installed(), safetensors.safe_open(path, "pt") as f:
        part = f.get_slice("a")

        def fails(*given, **how):
            raise OSError("the disk is gone")

        for name in ("get_tensor", "keys"):
            monkeypatch.setattr(ckptfs.safe_open, name, fails)
        monkeypatch.setattr(ckptfs.PySafeSlice, "__getitem__", fails)
        assert torch.equal(f.get_tensor("a"), tensors["a"]) and f.keys() == ["a", "b"]
        assert torch.equal(part[:, 2], tensors["a"][:, 2])
        assert originals() == before + 3
        # The calls that work are still ours.
        assert f.metadata() == {"format": "pt"} and originals() == before + 3


def test_a_bad_file_raises_what_the_original_raises(tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"\xff" * 64)

    def raised(*wanted):
        with pytest.raises(Exception) as fault:
            safetensors.torch.load_file(*wanted)
        return type(fault.value), str(fault.value)

    missing = tmp_path / "missing.safetensors"
    plain = [raised(path), raised(missing)]
    before = originals()
    with ckptfs.installed():
        assert [raised(path), raised(missing)] == plain
    assert originals() == before + 2


def test_an_unknown_tensor_raises_what_the_original_raises(file):
    path, _ = file
    with safetensors.safe_open(path, "pt") as f, pytest.raises(safetensors.SafetensorError) as plain:
        f.get_tensor("c")
    with ckptfs.installed(), safetensors.safe_open(path, "pt") as f:
        with pytest.raises(safetensors.SafetensorError) as fault:
            f.get_tensor("c")
        assert str(fault.value) == str(plain.value) and type(fault.value) is type(plain.value)


def test_a_closed_handle_stays_closed(file):
    path, _ = file
    before = originals()
    with ckptfs.installed():
        with safetensors.safe_open(path, "pt") as f:
            pass
        for use in (f.keys, lambda: f.get_tensor("a"), lambda: f.get_slice("a"), lambda: f.no_such_call):
            with pytest.raises(safetensors.SafetensorError, match="closed"):
                use()
        assert "closed" in repr(f)
    assert originals() == before


def test_a_slice_of_a_closed_handle_reads_on_as_the_original_does(file):
    path, tensors = file
    before = originals()

    def part():
        with safetensors.safe_open(path, "pt") as f:
            return f.get_slice("a")

    assert torch.equal(part()[1:3], tensors["a"][1:3])
    with ckptfs.installed():
        held = len(os.listdir("/proc/self/fd"))
        assert torch.equal(part()[1:3], tensors["a"][1:3])
        assert len(os.listdir("/proc/self/fd")) == held
    assert originals() == before


@pytest.mark.parametrize("is_open", [True, False])
def test_a_slice_that_fails_to_go_straight_to_a_device_is_copied(file, monkeypatch, caplog, is_open):
    from transformers import core_model_loading
    path, tensors = file

    def fails(part, device):
        raise RuntimeError("no way there")

    monkeypatch.setattr(ckptfs.PySafeSlice, "_load_to", fails)
    before = originals()
    with ckptfs.installed():
        f = safetensors.safe_open(path, "pt")
        part = f.get_slice("a")
        if not is_open:
            f.__exit__(None, None, None)
        made = core_model_loading._materialize_copy(part, torch.device("cpu"), torch.float64)
        assert torch.equal(made, tensors["a"].double())
    assert originals() == before + 1 and "no way there" in caplog.text


def test_a_log_that_is_set_wrong_keeps_nothing_from_the_original(file, monkeypatch, caplog):
    path, tensors = file
    monkeypatch.setenv("CKPTFS_LOG", "loud")
    ckptfs.configure(log=None)
    before = originals()
    with ckptfs.installed(), safetensors.safe_open(path, "pt") as f:
        assert torch.equal(f.get_slice("a")[..., ...], tensors["a"])
    assert originals() == before + 1
    assert "CKPTFS_LOG" in caplog.text and "ellipsis" in caplog.text
    monkeypatch.delenv("CKPTFS_LOG")
    ckptfs.configure(log=None)


def test_a_framework_that_is_not_ours_is_left_to_the_original(file):
    path, _ = file
    before = originals()
    with ckptfs.installed():
        try:
            f = safetensors.safe_open(path, "flax")
        except Exception as fault:
            # As without us, where that framework is not installed.
            assert "ckptfs" not in str(fault)
        else:
            assert type(f) is ORIGINALS[0]
    assert originals() == before + 1


@pytest.mark.parametrize("how", ["environment", "configure"])
def test_disabled_nothing_is_taken_over(file, monkeypatch, how):
    path, tensors = file
    before = ckptfs.stats()
    if how == "environment":
        monkeypatch.setenv("CKPTFS_DISABLE", "1")
    else:
        ckptfs.configure(disable=True)
    try:
        with ckptfs.installed():
            with safetensors.safe_open(path, "pt") as f:
                assert type(f) is ORIGINALS[0]
            check_same(safetensors.torch.load_file(path), tensors)
    finally:
        ckptfs.configure(disable=None)
    assert ckptfs.stats() == before


def test_installed_twice_it_is_taken_away_once():
    ckptfs.install()
    ours = safetensors.safe_open
    ckptfs.install()
    with ckptfs.installed():
        assert safetensors.safe_open is ours is not ORIGINALS[0]
    assert safetensors.safe_open is ours
    ckptfs.uninstall()
    assert safetensors.safe_open is ORIGINALS[0]
    ckptfs.uninstall()


def test_blocks_of_threads_that_overlap_each_have_it_to_their_end():
    began, end = threading.Event(), threading.Event()

    def first():
        with ckptfs.installed():
            began.set()
            end.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    assert began.wait(60)
    with ckptfs.installed():
        end.set()
        thread.join()
        assert safetensors.safe_open is not ORIGINALS[0]
    assert (safetensors.safe_open, safetensors.torch.load_file) == ORIGINALS


def test_installed_within_a_block_it_stays():
    with ckptfs.installed():
        ckptfs.install()
    assert safetensors.safe_open is not ORIGINALS[0]
    ckptfs.uninstall()
    assert safetensors.safe_open is ORIGINALS[0]


def test_taken_away_within_a_block_it_is_away():
    with ckptfs.installed():
        with ckptfs.installed():
            assert safetensors.safe_open is not ORIGINALS[0]
        assert safetensors.safe_open is not ORIGINALS[0]
        ckptfs.uninstall()
        assert (safetensors.safe_open, safetensors.torch.load_file) == ORIGINALS
        with ckptfs.installed():
            assert safetensors.safe_open is not ORIGINALS[0]
        assert safetensors.safe_open is ORIGINALS[0]
    assert not left()


def test_threads_load_while_it_comes_and_goes(file):
    path, tensors = file
    wrong, stop = [], threading.Event()

    def loads():
        while not stop.is_set():
            try:
                check_same(safetensors.torch.load_file(path), tensors)
                with safetensors.safe_open(path, "pt") as f:
                    assert torch.equal(f.get_tensor("b"), tensors["b"])
            except BaseException as fault:
                wrong.append(fault)
                return

    threads = [threading.Thread(target=loads) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        with ckptfs.installed():
            pass
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_can_install(file):
    path, _ = file

    def installs():
        ckptfs.install()
        before = ckptfs.stats()["loads"]
        return len(safetensors.torch.load_file(path)) == 2 and ckptfs.stats()["loads"] == before + 1

    assert in_a_fork(installs)


def test_a_child_that_takes_it_away_takes_it_from_itself_alone(file):
    path, tensors = file

    def takes_away():
        ours = safetensors.safe_open is not ORIGINALS[0]
        ckptfs.uninstall()
        before = ckptfs.stats()["loads"]
        check_same(safetensors.torch.load_file(path), tensors)
        away = (safetensors.safe_open, safetensors.torch.load_file) == ORIGINALS and not left()
        return ours and away and ckptfs.stats()["loads"] == before

    with ckptfs.installed():
        assert in_a_fork(takes_away)
        before = ckptfs.stats()["loads"]
        check_same(safetensors.torch.load_file(path), tensors)
        assert ckptfs.stats()["loads"] == before + 1


def test_a_child_forked_while_a_thread_installs_can_install_too(file):
    path, _ = file
    held, done = threading.Event(), threading.Event()

    def holds():
        with install._lock:
            held.set()
            done.wait(60)

    def installs():
        # Where it would wait for a thread that is not here.
        signal.alarm(20)
        ckptfs.install()
        before = ckptfs.stats()["loads"]
        return len(safetensors.torch.load_file(path)) == 2 and ckptfs.stats()["loads"] == before + 1

    thread = threading.Thread(target=holds)
    thread.start()
    try:
        assert held.wait(60) and in_a_fork(installs)
    finally:
        done.set()
        thread.join()


def test_installed_before_safetensors_is_imported(file):
    path, _ = file
    code = """
import json, sys
import ckptfs
ckptfs.install()
early = "safetensors" in sys.modules
from safetensors import safe_open
from safetensors.torch import load_file
import safetensors.torch, safetensors
loaded = len(load_file(sys.argv[1]))
loads = ckptfs.stats()["loads"]
loader = type(safetensors.__spec__.loader).__module__ + type(safetensors.__loader__).__module__
ckptfs.uninstall()
back = "ckptfs" not in repr(type(safetensors.safe_open)) and "ckptfs" not in repr(sys.meta_path)
load_file_is_back = load_file is safetensors.torch.load_file and "shims" not in load_file.__code__.co_filename
print(json.dumps([early, loaded, loads, "ckptfs" in loader, back, load_file_is_back]))
"""
    assert run(code, path) == [False, 2, 1, False, True, True]


SCRIPT = """
import json, os, sys
import beside
from safetensors.torch import load_file
loaded = len(load_file(sys.argv[1]))
import ckptfs
print(json.dumps([__name__, sys.argv[1:], loaded, ckptfs.stats()["loads"], beside.HERE]))
sys.exit(7)
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_runs_as_it_is(file, tmp_path, as_module):
    path, _ = file
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("HERE = 1")
    what = ["-m", "script"] if as_module else [str(folder / "script.py")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "ckptfs", "run", *what, str(path), "--two"],
        capture_output=True, text=True, env=env, cwd=folder if as_module else tmp_path,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout) == ["__main__", [str(path), "--two"], 2, 1, 1]


def test_a_program_that_cannot_run_is_reported(tmp_path):
    for words, code, said in (
        ([], 2, "arguments were not provided: <SCRIPT>..."), (["-m"], 2, "a value is required for '-m <MODULE>...'"),
        (["nowhere.py"], 1, "nowhere.py: no such file or directory"), (["--nothing"], 2, "unexpected argument"),
        (["."], 1, "a directory without __main__.py"), (["a\nb"], 1, "a\\nb: no such file"),
        (["-m", "nowhere"], 1, "no module named 'nowhere'"), (["-m", "nowhere.at.all"], 1, "'nowhere.at.all'"),
    ):  # fmt: skip
        done = subprocess.run([sys.executable, "-m", "ckptfs", "run", *words], capture_output=True, text=True,
                              cwd=tmp_path)  # fmt: skip
        assert (done.returncode, done.stdout) == (code, "") and said in done.stderr
        assert done.stderr.startswith("ckptfs: ") and done.stderr.count("\n  what to do: ") == 1


@pytest.mark.parametrize("words", [["fails.py"], ["-m", "fails"]])
def test_a_failing_program_shows_its_own_frames(tmp_path, words):
    (tmp_path / "fails.py").write_text("def fail():\n    raise KeyError('mine')\n\nfail()\n")
    done = subprocess.run([sys.executable, "-m", "ckptfs", "run", *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.endswith("KeyError: 'mine'\n")
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert len(frames) == 2 and all("fails.py" in frame for frame in frames), done.stderr
