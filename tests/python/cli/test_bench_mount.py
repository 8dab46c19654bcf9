"""`ckptfs bench` reads through a mount of its own, which is gone however the program ends."""

import json
import os
import signal
import subprocess
import sys
import time

import ckptfs
import pytest
import torch
from ckptfs import mounting, child_process
from ckptfs.bench import cli, mount, schedule, signals
from ckptfs.bench.process import WorkerProcess
from ckptfs.errors import error

from mounts import PATIENCE, until
from program import DONE, run_bench
from samples import numbers, write_shards

# As an unprivileged user, which may not drop all caches.
RUN = """
import sys
from ckptfs import cli
from ckptfs.bench import page_cache
page_cache._DROP = "/nonexistent/drop_caches"
sys.argv[1:1] = ["bench"]
sys.exit(cli.main())
"""


def about(path):
    return json.loads(child_process.run("inspect", "--json", "--tensors", "--", path).text)


def test_the_mounts_name_of_a_checkpoint_is_found(tmp_path, left):
    tensors = write_shards(tmp_path / "model", 1, 2, 1, 30)
    (tmp_path / "loose").mkdir()
    for name in "ab":
        torch.save({name: numbers(1, 30)}, tmp_path / f"loose/{name}.pt")
    torch.save({"x": numbers(1, 3)}, tmp_path / "model/training_args.bin")
    cases = {
        "model": tensors, "model/model.safetensors.index.json": tensors, "model/model.safetensors": tensors,
        "model/model-00001-of-00002.safetensors": ["layers.0.0.weight"],
        "loose/a.pt": ["a"], "loose/b.pt": ["b"], "loose/b.safetensors": ["b"],
    }  # fmt: skip
    for name, names in cases.items():
        path = str(tmp_path / name)
        with mount.CheckpointMount(path, about(path)) as shown:
            with ckptfs.safe_open(shown.file, "pt") as file:
                assert {*file.keys()} == {*names}, name
        assert left() == [], name


def test_each_cold_load_has_a_daemon_that_has_read_nothing(tmp_path, left):
    torch.save({"a": numbers(1, 30)}, tmp_path / "a.pt")
    path, pids = str(tmp_path / "a.pt"), []

    class Loads:
        def measure(self, asked, before, daemon):
            stats = ckptfs.mounts()
            [mount] = [one for one in stats if asked["path"].startswith(one.mountpoint)]
            pids.append((asked["loader"], mount.pid, mount.stats["reads"]))
            open(asked["path"], "rb").read()
            assert daemon() >= 0
            return {"start": 0, "returned": 1, "end": 1, "cpu": 1, "peak": 1, "daemon": 0}

    with mount.CheckpointMount(path, about(path)) as shown:
        case = schedule.Case({"path": path}, shown)
        loaders = ["mount owned", "mount mapped"]
        schedule.measure(Loads(), case, loaders, 2, lambda: None, lambda _: None)
        assert len({pid for _, pid, _ in pids}) == 4 and {reads for _, _, reads in pids} == {0}
        pids.clear()
        schedule.measure(Loads(), case, loaders, 2, None, lambda _: None)
        assert len({pid for _, pid, _ in pids}) == 1
    assert left() == []


def test_where_no_mount_can_be_made_the_rest_is_measured(tmp_path, monkeypatch, capsys, left):
    write_shards(tmp_path / "model", 1, 1, 1, 30)

    def none(_, **options):
        raise error("/dev/fuse: is not there", "modprobe fuse")

    monkeypatch.setattr(mounting, "mount", none)
    words = [str(tmp_path / "model"), "--runs", "1", "--json", "--against", "safetensors"]
    assert run_bench(words) == DONE
    found = json.loads(capsys.readouterr().out)
    why = "/dev/fuse: is not there; what to do: modprobe fuse"
    assert found["notes"][0] == f"nothing was loaded through a mount: {why}"
    assert found["loaders"] == ["ckptfs owned", "ckptfs mapped", "safetensors owned", "safetensors"]
    assert list(found["cold"]) == found["loaders"]


def test_files_of_a_mount_are_not_called_cold(tmp_path, capsys, left):
    tensors = write_shards(tmp_path / "model", 1, 1, 2, 30)
    with ckptfs.mount(tmp_path / "model") as path:
        words = ["--runs", "1", "--json", "--against", "safetensors"]
        assert run_bench([str(path / "model.safetensors"), *words]) == DONE
        found = json.loads(capsys.readouterr().out)
    assert found["cold"] is None and found["tensors"] == len(tensors)
    # Other libraries read the existing mount: a second mount would be one of that.
    assert found["loaders"] == ["ckptfs owned", "ckptfs mapped", "safetensors owned", "safetensors"]
    assert found["cached"]["safetensors"]["speedup"] == 1
    assert len(found["cached"]["safetensors"]["daemon_cpu_seconds"]) == 1
    assert "lies in a mount, whose source stays cached; what to do: measure" in found["notes"][0]
    assert left() == []


def processes(marked):
    """The processes whose environment has this in it."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if marked.encode() in file.read().split(b"\0"):
                    found.append(int(pid))
        except OSError:
            pass
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("state", ["at its mount", "in its loads"])
def test_a_signal_leaves_nothing(number, state, tmp_path, left):
    write_shards(tmp_path / "model", 1, 1, 1, 30)
    page = tmp_path / "page.html"
    mark = f"CKPTFS_TEST_OF={tmp_path}"
    running = subprocess.Popen(
        [sys.executable, "-c", RUN, tmp_path / "model", "--runs", "1000", "--html", page],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "CKPTFS_TEST_OF": str(tmp_path)},
        start_new_session=True,
    )  # fmt: skip
    try:
        until("there is a mount", lambda: len(left()) == 2 or running.poll() is not None)
        if state == "in its loads":
            # The process that imports torch has forked one that loads.
            forks = lambda: [pid for pid in processes(mark) if b"ckptfs.bench.worker" in words_of(pid)]
            until("it loads", lambda: len(forks()) > 1 or running.poll() is not None)
        # As a terminal sends it, to every process of the program. Later signals change nothing.
        os.killpg(running.pid, number)
        time.sleep(0.05)
        os.killpg(running.pid, signal.SIGTERM)
        out, said = running.communicate(timeout=PATIENCE)
    finally:
        running.kill()
    assert (running.returncode, out, said) == (-number, b"", b"")
    assert left() == [] and not page.exists()
    until("nothing of it runs", lambda: not processes(mark))


def test_a_signal_that_also_ends_the_worker_is_reported_as_the_signal():
    with WorkerProcess() as worker, pytest.raises(signals.SignalExit) as told, signals.defer_signals():
        os.kill(worker.pid, signal.SIGTERM)
        until("the worker has ended", lambda: worker.is_over)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError(worker.prepare({}))
    assert told.value.args == (signal.SIGTERM,)


def words_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def test_a_mount_that_is_refused_is_no_missing_file(tmp_path, monkeypatch, left):
    def refused(*words, **_):
        raise error(f"{words[-1]}: mount failed: Operation not permitted", "see that fusermount3 is setuid root")

    monkeypatch.setattr(child_process, "run", refused)
    with pytest.raises(ckptfs.SafetensorError) as told:
        ckptfs.mount(tmp_path)
    assert not isinstance(told.value, OSError) and left() == []
