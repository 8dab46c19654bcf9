"""`ckptfs bench` measures loads whose tensors it has compared, with a warm and a cold page cache. It says in words
what it could not measure."""

import json
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import ckptfs
import pytest
import torch
from ckptfs import child_process
from ckptfs.bench import cli, loaders, report, schedule
from ckptfs.bench import page_cache
from ckptfs.bench.process import WorkerProcess
from ckptfs.save import atomic_file

from program import DONE, FAILED, REFUSED, USAGE, run_bench
from samples import numbers, write_shards

Refused = ckptfs.SafetensorError

OURS = ["ckptfs owned", "ckptfs mapped"]
MOUNTED = ["mount owned", "mount mapped"]


def bench(*words):
    command = [sys.executable, "-m", "ckptfs", "bench", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def test_shards_are_measured_against_all_that_is_installed(tmp_path, capsys, left):
    tensors = write_shards(tmp_path / "model", 1, 2, 2, 400)
    assert run_bench([str(tmp_path / "model"), "--runs", "2", "--json"]) == DONE
    said = capsys.readouterr()
    # Standard error is no terminal here.
    assert said.err == "" and left() == []
    found = json.loads(said.out)
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert (found["tensors"], found["bytes"], found["format"]) == (len(tensors), size, "safetensors")
    assert found["against"] == "safetensors" and len(found["files"]) == 3
    others = ["safetensors owned", "safetensors", "fastsafetensors", "runai"]
    assert found["loaders"] == [*OURS, *MOUNTED, *others]
    assert found["cleared_by"] == "posix_fadvise"
    assert found["notes"] == []
    assert found["summary"].startswith("Too small to judge: ") and "at least 100 MB" in found["summary"]
    assert found["machine"]["libraries"]["torch"] == torch.__version__.partition("+")[0]
    assert found["machine"]["memory_bytes"] > 1 << 20 and found["machine"]["filesystem"]
    for state in found["cold"], found["cached"]:
        assert list(state) == found["loaders"]
        for name, one in state.items():
            pairs = [*zip(one["returned_seconds"], one["seconds"], strict=True)]
            assert len(pairs) == 2 and all(0 < returned <= seconds for returned, seconds in pairs)
            assert one["median_seconds"] == pytest.approx(sum(one["seconds"]) / 2)
            assert one["gb_per_second"] == pytest.approx(size / one["median_seconds"] / 1e9)
            reference = state["safetensors"]
            assert one["speedup"] == pytest.approx(reference["median_seconds"] / one["median_seconds"])
            ratios = [a / b for a, b in zip(reference["seconds"], one["seconds"], strict=True)]
            assert (one["speedup_least"], one["speedup_most"]) == (min(ratios), max(ratios))
            # Importing torch alone takes more memory than this.
            assert all(0 <= cpu < 0.7 for cpu in one["cpu_seconds"])
            assert all(size / 2 < peak < 60e6 for peak in one["peak_bytes"]), (name, one)
            assert (one["daemon_cpu_seconds"] is not None) == (name in MOUNTED)


def test_a_training_checkpoint_is_measured_against_torch_load(tmp_path, capsys):
    state = {"state_dict": {"a": numbers(1, 300, 200).t(), "b": torch.tensor(2)}, "epoch": 3}
    torch.save(state, tmp_path / "last.ckpt")
    (tmp_path / "beside.bin").write_bytes(b"no checkpoint")
    assert run_bench([str(tmp_path / "last.ckpt"), "--runs", "1"]) == DONE
    said = capsys.readouterr().out
    lines = said.splitlines()
    loaders = [*OURS, *MOUNTED, "torch.load", "torch.load mapped"]
    assert lines[0] == f"{tmp_path / 'last.ckpt'} (torch zip): 2 tensors, 0.2 MB, to cpu, median of 1"
    assert lines[1] == f"{', '.join(loaders)}: gave equal tensors"
    assert lines[2].startswith("Too small to judge: ") and "outweighs 2 tensors, 0.2 MB." in lines[2]
    for loader in loaders:
        # Times and costs, for two states of the page cache.
        rows = [line for line in lines if line.startswith(f"  {loader}  ")]
        assert len(rows) == 4 and all(row.count(" to ") == 2 for row in rows[::2]), said
    assert "\nnote: ckptfs mapped: tensors read, not mapped: its bytes do not lie in order: 1\n" in said
    assert said.count("speed-up against torch.load") == 2 and said.count("daemon's CPU") == 2
    assert "\nfilesystem: " in said and "torch " in said


def test_a_checkpoint_that_no_other_library_loads_has_a_note(tmp_path, capsys):
    torch.save({"a": numbers(1, 3), "made": Path("somewhere")}, tmp_path / "x.pt")
    assert run_bench([str(tmp_path / "x.pt"), "--runs", "1", "--against", "torch,safetensors"]) == DONE
    said = capsys.readouterr().out
    assert "note: torch.load does not load it: " in said and "note: compared with nothing" in said
    assert "note: safetensors does not read torch checkpoints, and was left out" in said
    assert f"{', '.join([*OURS, *MOUNTED])}: gave equal tensors" in said
    assert "speed-up" not in said


class Told:
    """Loads that print their arguments."""

    def __init__(self, answers):
        self.order, self._answers = [], answers

    def measure(self, request, before, daemon):
        self.order.append(request["loader"])
        if before:
            before()
        answer = next(self._answers)
        return answer if isinstance(answer, dict) else {
            "start": 0.0, "returned": 0.5, "end": answer, "cpu": 0.25, "peak": 7, "daemon": daemon and daemon()
        }  # fmt: skip


def test_runs_take_turns_and_their_median_counts():
    loads = Told(iter([4.0, 2.0, 8.0, 1.0, 1.0, 5.0, 3.0, 9.0]))
    case, steps = schedule.Case({}), []
    clear = lambda: loads.order.append("clear")
    taken, notes = schedule.measure(loads, case, ["a", "b"], 4, clear, steps.append)
    assert loads.order == ["clear" if n % 2 else "ab"[n // 2 % 4 in (1, 2)] for n in range(16)]
    assert steps[0] == "cold: a, 1 of 4" and len(steps) == 8 and not notes
    numbers = schedule.summarize(taken, 12_000_000, "b")
    assert numbers["a"]["seconds"] == [4.0, 1.0, 1.0, 9.0] and numbers["a"]["median_seconds"] == 2.5
    assert numbers["b"]["seconds"] == [2.0, 8.0, 5.0, 3.0] and numbers["b"]["median_seconds"] == 4.0
    assert numbers["a"]["speedup"] == 1.6 and numbers["a"]["gb_per_second"] == 0.0048
    assert (numbers["a"]["speedup_least"], numbers["a"]["speedup_most"]) == (3 / 9, 8.0)


def test_a_load_that_is_killed_early_does_not_end_the_next(tmp_path):
    write_shards(tmp_path / "model", 1, 1, 1, 100)
    file = str(next((tmp_path / "model").glob("*.safetensors")))
    asked = {
        "loader": "ckptfs owned", "path": file, "files": [file], "names": ["layers.0.0.weight"], "device": "cpu",
        "fork": True,
    }  # fmt: skip
    with WorkerProcess() as process:
        pid = process.pid

        def kill():
            (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            os.kill(int(child), signal.SIGKILL)

        for _ in range(2):
            assert process.measure(asked, kill)["fault"] == "its process ended with -9"
            loaded = process.measure(asked)
            assert loaded["end"] > loaded["start"] > 0
            assert list(process.measure({**asked, "digests": True})["tensors"]) == asked["names"]


def test_tables_fit_on_a_terminal_of_80_columns():
    one = {
        "returned_seconds": [0.01234] * 3, "seconds": [0.0123, 123.45, 999.9], "median_seconds": 123.45,
        "gb_per_second": 0.0001234, "cpu_seconds": [1234.567] * 3, "daemon_cpu_seconds": [98.76] * 3,
        "peak_bytes": [123_456_789_012] * 3, "speedup": 12.345, "speedup_least": 0.1234, "speedup_most": 123.45,
    }  # fmt: skip
    longest = max((*loaders.LOADERS, *MOUNTED), key=len)
    for heads, rows in report._narrow_tables({"cold": {longest: one}}, "cold"):
        for line in report.aligned(heads, [[f"  {name}", *cells] for name, *cells in rows]):
            assert len(line) <= 80, line


@pytest.mark.parametrize(("value", "shown"), [
    (0, "0"), (0.00001, "0.0000"), (0.012345, "0.0123"), (0.999, "0.999"), (1, "1.00"), (12.345, "12.3"), (1234.5, "1,234"),
])  # fmt: skip
def test_figures_have_three_digits(value, shown):
    assert report._figure(value) == shown


def test_a_library_that_fails_midway_is_left_out_unless_it_is_ours():
    fault = {"fault": "OSError: gone"}
    case, quiet = schedule.Case({"path": "x"}, daemon=lambda: 3), lambda _: None
    loads = Told(iter([1.0, 2.0, fault, 4.0]))
    taken, notes = schedule.measure(loads, case, ["ckptfs owned", "runai"], 2, None, quiet)
    assert [*taken] == ["ckptfs owned"] and [one["daemon"] for one in taken["ckptfs owned"]] == [3, 3]
    assert notes == ["runai failed, cached, in round 2: OSError: gone"]
    assert schedule.summarize(taken, 1, "runai")["ckptfs owned"]["speedup"] is None
    with pytest.raises(Refused, match="x: ckptfs owned: OSError: gone"):
        schedule.measure(Told(iter([fault])), case, ["ckptfs owned"], 1, None, quiet)


@pytest.mark.parametrize("other", ["safetensors", "mount mapped"])
def test_tensors_that_differ_are_an_error(other, tmp_path, monkeypatch, capsys, left):
    write_shards(tmp_path / "model", 1, 1, 2, 30)
    measure = WorkerProcess.measure

    def changed(process, request, *more):
        answer = measure(process, request, *more)
        if request["loader"] == other:
            answer["tensors"]["layers.0.1.weight"][2] = "0" * 32
        return answer

    monkeypatch.setattr(WorkerProcess, "measure", changed)
    assert run_bench([str(tmp_path / "model"), "--against", "safetensors"]) == FAILED
    said = capsys.readouterr()
    assert f"{other} give different tensors: layers.0.1.weight\n" in said.err and not said.out
    assert left() == []


def test_a_source_that_cannot_be_loaded_is_refused_in_words(tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"no checkpoint")
    cases = [
        ([tmp_path / "nothing"], FAILED, f"ckptfs: {tmp_path}/nothing: no such file or directory"),
        ([tmp_path / "broken.safetensors"], REFUSED, "text, not a checkpoint of torch or safetensors"),
        ([tmp_path], REFUSED, "what to do: "),
        ([tmp_path, "--runs", 0], USAGE, "0 is not in 1..=1000"),
        ([tmp_path, "--against", "safetensors,nobody"], USAGE, f"[possible values: {', '.join(loaders.PEERS)}]"),
        ([tmp_path, "--html", tmp_path / "no/x.html"], FAILED, "no/x.html: cannot be written: No such file"),
        ([], USAGE, "PATH"),
    ]
    for words, code, said in cases:
        done = bench(*words)
        assert (done.returncode, done.stdout) == (code, "") and said in done.stderr, done.stderr
        # Wrong arguments are reported as everything else.
        assert done.stderr.startswith("ckptfs: ") and "\n  what to do: " in done.stderr
    assert "what to do: check the path" in bench(tmp_path / "nothing").stderr
    for words, code in ([tmp_path / "nothing"], FAILED), ([tmp_path, "--runs", 0], USAGE):
        done = bench(*words, "--json")
        told = json.loads(done.stderr)["error"]
        assert (done.returncode, done.stdout, told["code"]) == (code, "", code) and told["message"] and told["remedy"]


def test_help_names_every_library_that_can_be_measured():
    told = " ".join(bench("--help").stdout.split())
    assert f"[possible values: {', '.join(loaders.PEERS)}]" in told


def test_quiet_shows_no_progress(tmp_path, monkeypatch):
    write_shards(tmp_path / "model", 1, 1, 1, 30)
    monkeypatch.setattr(cli, "ProgressBar", None)
    assert run_bench([str(tmp_path / "model"), "-q", "--runs", "1", "--against", "safetensors"]) == DONE


def test_a_page_to_an_unread_pipe_is_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "ckptfs", "bench", str(tmp_path), "--html", str(pipe)]
    # A program that waits for a reader is killed, and the test fails.
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = f"ckptfs: {pipe}: no program reads this pipe\n  what to do: start its reader first, or name a regular file\n"
    assert (done.returncode, done.stdout, done.stderr) == (FAILED, "", said)


def test_a_pipe_that_is_read_gets_the_whole_page(tmp_path):
    pipe, read, page = tmp_path / "pipe", tmp_path / "read", b"x" * (1 << 20)
    os.mkfifo(pipe)
    with open(read, "wb") as out, subprocess.Popen(["cat", pipe], stdout=out) as cat:
        # A plain open waits for the reader.
        with open(pipe, "wb"), atomic_file.replacing(pipe, waits=False) as file:
            file.write(page)
        assert cat.wait() == 0
    assert read.read_bytes() == page


def test_a_missing_package_is_reported(monkeypatch, capsys, tmp_path):
    installed = {"torch", "safetensors"}
    found = lambda name: name if name in installed else None
    monkeypatch.setattr(loaders.importlib.util, "find_spec", found)
    assert loaders.select(None, "safetensors", "cpu") == (["safetensors owned", "safetensors"], [])
    with pytest.raises(Refused, match="--against runai: it is not installed") as refused:
        loaders.select(["safetensors", "runai"], "safetensors", "cpu")
    assert refused.value.__notes__ == ["what to do: pip install runai-model-streamer"]
    installed.add("fastsafetensors")
    names, _ = loaders.select(["fastsafetensors"], "safetensors", "cuda:0")
    assert names == ["fastsafetensors", "fastsafetensors nogds"]
    installed.remove("torch")
    # An error of the path is reported first.
    assert run_bench([str(tmp_path / "nothing")]) == FAILED
    assert f"ckptfs: {tmp_path}/nothing: no such file or directory\n" in capsys.readouterr().err
    (tmp_path / "broken.pt").write_bytes(b"no checkpoint")
    assert run_bench([str(tmp_path / "broken.pt")]) == REFUSED
    assert "text, not a checkpoint" in capsys.readouterr().err
    write_shards(tmp_path / "model", 1, 1, 1, 30)
    assert run_bench([str(tmp_path / "model")]) == FAILED
    assert "what to do: pip install torch" in capsys.readouterr().err


def test_a_remedy_with_an_option_that_bench_lacks_is_a_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = "its model.pt"
    torch.save({"weight": torch.ones(2), "odd": torch.eye(2).to_sparse()}, path)
    done = bench(path)
    command = f"ckptfs export --allow-partial '{path}' exported.safetensors && ckptfs bench exported.safetensors"
    assert done.returncode == REFUSED and "allow_partial" not in done.stderr
    says = f"ckptfs: {path}: has entries that cannot be shown: `odd`: is a sparse tensor"
    assert done.stderr.startswith(says) and f" with --allow-partial: {command}; or, " in done.stderr, done.stderr
    torch.save({"model": torch.nn.Linear(2, 2), "optimizer": {"weight": torch.ones(2)}}, path)
    done = bench(path)
    command = command.replace("--allow-partial", "--root optimizer")
    assert done.returncode == REFUSED and "root=" not in done.stderr
    assert done.stderr.endswith(f": --root optimizer: {command}\n"), done.stderr


def test_a_missing_device_is_reported(tmp_path):
    write_shards(tmp_path / "model", 1, 1, 1, 30)
    done = bench(tmp_path / "model", "--device", "nonsense")
    assert done.returncode == FAILED and "nonsense" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("at_once", [1 << 30, 1 << 20])
def test_files_leave_the_page_cache_and_come_back(at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(page_cache, "_MAPPING_BYTES", at_once)
    paths = [tmp_path / "large", tmp_path / "small", tmp_path / "empty"]
    for path, size in zip(paths, (5 << 20, 100, 0), strict=True):
        path.write_bytes(os.urandom(size))
    assert page_cache.cached(paths) == 1
    assert page_cache.clear(paths) == "posix_fadvise"
    assert page_cache.cached(paths) == 0
    page_cache.warm(paths)
    assert page_cache.cached(paths) == 1


def test_all_caches_are_dropped_only_when_asked(tmp_path, monkeypatch, capsys):
    write_shards(tmp_path / "model", 1, 1, 1, 30)
    drop = tmp_path / "drop_caches"
    drop.touch()
    monkeypatch.setattr(page_cache, "_DROP", str(drop))
    words = [str(tmp_path / "model"), "--runs", "1", "--json", "--against", "safetensors"]
    assert run_bench(words) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["cleared_by"] == "posix_fadvise" and drop.read_text() == "" and found["cold"]
    assert run_bench([*words, "--cold"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["cleared_by"] == str(drop) and drop.read_text() == "3\n" and found["cold"]


def test_caches_that_cannot_be_dropped_are_refused_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(child_process, "run", None)
    assert run_bench([str(tmp_path), "--cold"]) == FAILED
    said = capsys.readouterr().err
    assert "--cold drops all caches" in said and f"{page_cache._DROP} cannot be written" in said
    assert "\n  what to do: run it as root, or leave --cold out" in said


def test_files_that_stay_cached_are_not_called_cold(tmp_path):
    path, other = tmp_path / "used", tmp_path / "other"
    path.write_bytes(os.urandom(1 << 20))
    other.write_bytes(os.urandom(1 << 20))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        assert sum(memory[::mmap.PAGESIZE])
        with pytest.raises(Refused, match=f"{path}: 100% of it stays in the page cache") as refused:
            page_cache.clear([other, path])
        assert refused.value.__notes__[0].endswith("or drop all caches, with --cold")
    in_memory = Path("/dev/shm", f"ckptfs-test-{os.getpid()}")
    in_memory.write_bytes(b"x")
    try:
        with pytest.raises(Refused, match="lies in memory"):
            page_cache.clear([in_memory])
    finally:
        in_memory.unlink()
