"""`ckptfs bench` measures loads that were seen to give equal tensors, in the page cache and out of it, and
says in words what it could not do."""

import importlib.util
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import ckptfs
import pytest
import torch
from ckptfs import _bench, _page_cache

from program import DONE, FAILED, REFUSED, USAGE
from samples import numbers, write_shards

Refused = ckptfs.SafetensorError

OURS = ["ckptfs owned", "ckptfs mapped"]


def bench(*words):
    command = [sys.executable, "-m", "ckptfs", "bench", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def never_all(monkeypatch, tmp_path):
    """What other programs have cached is not forgotten for a test."""
    monkeypatch.setattr(_page_cache, "_DROP", str(tmp_path / "no/drop_caches"))


def test_shards_are_measured_against_safetensors(tmp_path):
    tensors = write_shards(tmp_path / "model", 1, 2, 2, 400)
    done = bench(tmp_path / "model", "--runs", 1, "--json")
    assert done.returncode == DONE, done.stderr
    found = json.loads(done.stdout)
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert (found["tensors"], found["bytes"], found["format"]) == (len(tensors), size, "safetensors")
    assert found["against"] == "safetensors" and len(found["files"]) == 3
    assert found["cold"] and found["cleared_by"] and not found["notes"]
    for state in found["cold"], found["cached"]:
        assert list(state) == [*OURS, "safetensors"]
        for one in state.values():
            pairs = [*zip(one["returned_seconds"], one["seconds"], strict=True)]
            assert len(pairs) == 1 and all(0 < returned <= seconds for returned, seconds in pairs)
            assert [one["median_seconds"]] == one["seconds"]
            assert one["mb_per_second"] == pytest.approx(size / one["median_seconds"] / 1e6)
            reference = state["safetensors"]["median_seconds"]
            assert one["speedup"] == pytest.approx(reference / one["median_seconds"])


def test_a_training_checkpoint_is_measured_against_torch_load(tmp_path):
    state = {"state_dict": {"a": numbers(1, 300, 200).t(), "b": torch.tensor(2)}, "epoch": 3}
    torch.save(state, tmp_path / "last.ckpt")
    done = bench(tmp_path / "last.ckpt", "--runs", 1)
    assert done.returncode == DONE, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"{tmp_path / 'last.ckpt'} (torch zip): 2 tensors, 0.2 MB, to cpu, median of 1"
    assert lines[1] == "ckptfs owned, ckptfs mapped, torch.load: gave equal tensors"
    for loader in *OURS, "torch.load":
        rows = [line for line in lines if line.startswith(f"  {loader} ")]
        assert len(rows) == 2 and all(row.endswith("x") for row in rows), done.stdout
    assert done.stdout.count("speed-up against torch.load") == 2


def test_where_the_other_library_cannot_load_it_that_is_told(tmp_path):
    torch.save({"a": numbers(1, 3), "made": Path("somewhere")}, tmp_path / "x.pt")
    done = bench(tmp_path / "x.pt", "--runs", 1)
    assert done.returncode == DONE, done.stderr
    assert "note: compared with nothing: torch.load does not load it" in done.stdout
    assert "ckptfs owned, ckptfs mapped: gave equal tensors" in done.stdout
    assert "speed-up" not in done.stdout


def test_runs_take_turns_and_their_median_counts(monkeypatch):
    said = iter([4.0, 2.0, 8.0, 1.0, 1.0, 5.0, 3.0, 9.0])
    order = []

    def one(_, loader):
        order.append(loader)
        return {"returned": 0.5, "had": next(said)}

    monkeypatch.setattr(_bench, "_one", one)
    times = _bench._times({}, ["a", "b"], 4, lambda: order.append("clear"))
    assert order == ["clear" if n % 2 == 0 else "ab"[n // 2 % 4 in (1, 2)] for n in range(16)]
    numbers = _bench._numbers(times, 12_000_000, "b")
    assert numbers["a"]["seconds"] == [4.0, 1.0, 1.0, 9.0] and numbers["a"]["median_seconds"] == 2.5
    assert numbers["b"]["seconds"] == [2.0, 8.0, 5.0, 3.0] and numbers["b"]["median_seconds"] == 4.0
    assert numbers["a"]["speedup"] == 1.6 and numbers["a"]["mb_per_second"] == 4.8


def test_tensors_that_differ_are_an_error(tmp_path, monkeypatch, capsys, never_all):
    write_shards(tmp_path / "model", 1, 1, 2, 30)
    one = _bench._one

    def other(asked, loader):
        answer = one(asked, loader)
        if loader == "safetensors":
            answer["tensors"]["layers.0.1.weight"][2] = "0" * 32
        return answer

    monkeypatch.setattr(_bench, "_one", other)
    assert _bench.main([str(tmp_path / "model")]) == FAILED
    said = capsys.readouterr()
    assert "safetensors give different tensors: layers.0.1.weight\n" in said.err and not said.out


def test_what_cannot_be_loaded_is_refused_in_words(tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"no checkpoint")
    cases = [
        ([tmp_path / "nothing"], FAILED, f"ckptfs: {tmp_path}/nothing: no such file or directory"),
        ([tmp_path / "broken.safetensors"], REFUSED, "not a valid safetensors file"),
        ([tmp_path], REFUSED, "what to do: "),
        ([tmp_path, "--runs", 0], USAGE, "'0' is no number"),
        ([], USAGE, "FILE"),
    ]
    for words, code, said in cases:
        done = bench(*words)
        assert (done.returncode, done.stdout) == (code, "") and said in done.stderr, done.stderr
    assert "what to do: check the path" in bench(tmp_path / "nothing").stderr


def test_a_package_that_is_not_installed_is_told(monkeypatch, capsys):
    installed = {"torch", "safetensors"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(_bench, "_one", lambda *_: {"tensors": {"a": ["float32", [1], "0"]}})
    assert _bench._checked({}, "safetensors") == ("safetensors", [])
    installed.remove("safetensors")
    alone = "compared with nothing: safetensors is not installed"
    assert _bench._checked({}, "safetensors") == (None, [alone])
    installed.remove("torch")
    assert _bench.main(["x.safetensors"]) == FAILED
    assert "what to do: pip install torch" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_told(tmp_path):
    write_shards(tmp_path / "model", 1, 1, 1, 30)
    done = bench(tmp_path / "model", "--device", "nonsense")
    assert done.returncode == FAILED and "nonsense" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("at_once", [1 << 30, 1 << 20])
def test_files_leave_the_page_cache_and_come_back(at_once, tmp_path, monkeypatch, never_all):
    monkeypatch.setattr(_page_cache, "_AT_ONCE", at_once)
    paths = [tmp_path / "large", tmp_path / "small", tmp_path / "empty"]
    for path, size in zip(paths, (5 << 20, 100, 0), strict=True):
        path.write_bytes(os.urandom(size))
    assert _page_cache.cached(paths) == 1
    assert _page_cache.clear(paths) == "posix_fadvise"
    assert _page_cache.cached(paths) == 0
    _page_cache.warm(paths)
    assert _page_cache.cached(paths) == 1


def test_files_of_a_mount_are_not_called_cold(tmp_path, left):
    tensors = write_shards(tmp_path / "model", 1, 1, 2, 30)
    with ckptfs.mount(tmp_path / "model") as path:
        done = bench(path / "model.safetensors", "--runs", 1, "--json")
        assert done.returncode == DONE, done.stderr
        found = json.loads(done.stdout)
    assert found["cold"] is None and found["tensors"] == len(tensors)
    assert found["cached"]["safetensors"]["speedup"] == 1
    assert "lies in a mount, whose source stays cached; what to do: measure" in found["notes"][0]


def test_files_that_stay_cached_are_not_called_cold(tmp_path, never_all):
    path = tmp_path / "used"
    path.write_bytes(os.urandom(1 << 20))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        assert sum(memory[::mmap.PAGESIZE])
        with pytest.raises(Refused, match="stays in the page cache, after posix_fadvise 100%"):
            _page_cache.clear([path])
    in_memory = Path("/dev/shm", f"ckptfs-test-{os.getpid()}")
    in_memory.write_bytes(b"x")
    try:
        with pytest.raises(Refused, match="lies in memory"):
            _page_cache.clear([in_memory])
    finally:
        in_memory.unlink()
