"""`scripts/gpu-check` runs to its end on the CPU and reports its checks; a wrong load fails it."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ckptfs.bench.process import WorkerProcess

from program import REPOSITORY

OK, FAILED, USAGE, NO_GPU = 0, 1, 2, 2

# Seconds that no run here comes near.
PATIENCE = 300

# Code that every child runs first: it changes the tensors of each load.
BREAKS = """
import ckptfs.torch, torch
whole, kept = ckptfs.torch.load_file, []

def load_file(*words, **more):
    tensors = whole(*words, **more)
    {breaks}
    return tensors

ckptfs.torch.load_file = load_file
"""

# One bit is flipped; a descriptor is never closed.
BIT = "[t.view(-1).view(torch.uint8)[2:3].bitwise_xor_(1) for t in tensors.values() if t.numel() > 2]"
DESCRIPTOR = "kept.append(open('/dev/null'))"


@pytest.fixture
def check(tmp_path):
    def run(*words, before=None):
        path = [str(before)] if before else []
        environment = {
            **os.environ, "PYTHON": sys.executable, "TMPDIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }  # fmt: skip
        command = [str(REPOSITORY / "scripts/gpu-check"), *map(str, words), "--out", str(tmp_path / "out")]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)

    return run


def rows(tmp_path):
    found = json.loads((tmp_path / "out/gpu-check.json").read_text())
    return found, {(row["part"], row["what"], row["where"]): row for row in found["rows"]}


def test_a_run_reports_its_checks(tmp_path, check):
    done = check("--installed", "--device", "cpu", "--quick", "--runs", 1, "--sizes", 0.01)
    assert done.returncode == OK, done.stdout + done.stderr
    found, table = rows(tmp_path)
    assert not found["missing"] and {row["result"] for row in found["rows"]} <= {"ok", "skipped", "fails", "not there"}
    checked = {what: row["result"] for (part, what, _), row in table.items() if part == "correctness"}
    for what in "every type, whole", "get_slice with many kinds of index", "from several threads", "after a fork":
        assert checked[what] == "ok", what
    assert checked["no memory left on the device"] == "skipped"
    timed = [row for row in found["rows"] if row["part"] == "bench" and row["result"] == "ok"]
    for state in "page cache", "disk, cold", "tmpfs":
        for way in "ckptfs", "safetensors 0.8 load_file":
            mine = [row for row in timed if row["what"] == way and f", {state}" in row["where"]]
            # Of large, small and tiny tensors.
            assert len(mine) == 3, (way, state)
            for row in mine:
                assert row["gb_per_second"] == pytest.approx(row["bytes"] / row["seconds"][0] / 1e9)
                assert row["of_ceiling"] == pytest.approx(row["gb_per_second"] / row["ceiling"])
    leaks = {what for part, what, _ in table if part == "leaks"}
    assert leaks == {"VmRSS", "VmLck", "VmPin", "descriptors"}
    text = (tmp_path / "out/gpu-check.md").read_text()
    assert text in done.stdout and text.count("|---|") > 0
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(found["rows"]) and len({line.count(" | ") for line in lines}) <= 2
    for known in "processor", "memory", "system", "python", "disk", "date":
        assert f"- {known}: {found['known'][known]}" in text
    assert not [*tmp_path.glob("gpu-check-*")], "what it wrote on the way is gone"


@pytest.mark.parametrize(
    ("part", "breaks"), [("correctness", BIT), ("bench", BIT), ("leaks", DESCRIPTOR)], ids=["checks", "bench", "leaks"]
)
def test_a_wrong_load_fails_the_run(tmp_path, check, part, breaks):
    (tmp_path / "breaks").mkdir()
    (tmp_path / "breaks/sitecustomize.py").write_text(BREAKS.format(breaks=breaks))
    words = ["--installed", "--device", "cpu", "--quick", "--runs", 1, "--sizes", 0.001, "--only", part]
    done = check(*words, before=tmp_path / "breaks")
    assert done.returncode == FAILED, done.stdout + done.stderr
    found, _ = rows(tmp_path)
    failed = {row["what"]: row["why"] for row in found["rows"] if row["result"] == "FAILED"}
    if part == "bench":
        assert failed == {"ckptfs": "gives other tensors than the files say"}
        assert not [row for row in found["rows"] if row["what"] == "ckptfs" and row["seconds"]]
    elif part == "leaks":
        assert [*failed] == ["descriptors"]
    else:
        assert "has other values" in failed["every type, whole"] and "load_many" not in failed


def test_skipped_checks_are_reported(tmp_path, check):
    done = check("--installed", "--device", "cpu", "--quick", "--sizes", 0.001, "--minutes", 0)
    assert done.returncode == OK, done.stderr
    found, _ = rows(tmp_path)
    assert {"leaks", "correctness: all of it", "ceilings: reads"} <= {*found["missing"]}
    assert not [row for row in found["rows"] if row["result"] == "ok"]
    assert "- leaks\n" in (tmp_path / "out/gpu-check.md").read_text()


def test_missing_parts_are_reported(tmp_path, check):
    done = check("--from", tmp_path / "nowhere")
    assert done.returncode == FAILED and "make one with `scripts/gpu-check --pack`" in done.stderr
    import torch

    if not torch.cuda.is_available():
        done = check("--installed")
        assert done.returncode == NO_GPU and done.stderr.startswith("gpu-check: no GPU:")
        assert len(done.stderr.splitlines()) == 1 and not done.stdout
    for wrong in ["--device", "gpu"], ["--sizes", "0"], ["--only", "all"]:
        assert check(*wrong).returncode == USAGE


@pytest.fixture
def parts(monkeypatch):
    """The modules of the script."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    from gpu_check import benchmarks, checks, models

    return SimpleNamespace(benchmarks=benchmarks, checks=checks, models=models)


@pytest.fixture
def program(tmp_path):
    """A worker process, and the name of a function of this body in it."""

    def make(body):
        (tmp_path / "program.py").write_text(f"import os, threading\ndef answer(report, **asked):\n    {body}\n")
        return WorkerProcess([tmp_path]), "program:answer"

    return make


def test_a_hanging_program_is_killed_and_a_dead_one_is_reported(program):
    for body, limit, why in [
        ("report({'pid': os.getpid()}); threading.Event().wait()", 2, "hung: killed after 2 s"),
        ("report({'pid': os.getpid()}); os.abort()", 60, "its process ended with -6"),
        ("report({'pid': os.getpid()}); raise ValueError('no')", 60, "ValueError: no"),
    ]:
        worker, function = program(body)
        with worker:
            # Importing torch takes longer than a silence may.
            [_] = worker.call("builtins:print")
            began, ended = worker.call(function, limit)
            assert ended["fault"].startswith(why), ended
        with pytest.raises(ProcessLookupError):
            os.kill(began["pid"], 0)


def test_prints_of_a_program_are_no_answer(program):
    worker, function = program("print('{}'); return asked")
    with worker:
        assert [*worker.call(function, a=1)] == [{"done": True, "a": 1}]


class Rows(list):
    """A table that keeps its rows."""

    def add(self, part, what, result, reason="", **_):
        self.append((what, result, reason))


def test_checks_go_on_after_one_that_hangs(parts):
    job = SimpleNamespace(table=Rows(), deadline=None)
    told = [{"names": ["a", "b", "c"]}, {"began": "a"}, {"result": "ok", "why": "", "seconds": 1.0}, {"began": "b"}]
    assert parts.checks.add_checks(job, [*told, {"fault": "hung"}], []) == ["c"]
    assert job.table == [("a", "ok", ""), ("b", "FAILED", "hung")]
    # A check that was not begun does not count as checked.
    job.table.clear()
    assert parts.checks.add_checks(job, [*told[:3], {"fault": "gone"}], []) == []
    assert job.table[1:] == [("the process of the checks", "FAILED", "gone; not checked: b, c")]


def test_where_a_fork_cannot_use_the_device_each_load_begins_from_nothing(parts, monkeypatch):
    asked = []

    class Worker:
        is_over = False

        def measure(self, request, limit):
            asked.append(request["fork"])
            return {"fault": "CUDA error: initialization error"} if request["fork"] else {"start": 0.0, "end": 1.0}

        def close(self):
            pass

    def worker(*_, environment):
        asked.append("new")
        return Worker()

    entry = parts.benchmarks.BenchEntry("runai-model-streamer", "runai", ("runai",))
    with parts.benchmarks.Workers(SimpleNamespace(device="cuda:0", worker=worker)) as workers:
        for _ in range(2):
            assert workers.load(entry, ["model/a"], 1) == {"start": 0.0, "end": 1.0}
    assert asked == ["new", True, "new", False, "new", False]


def test_the_models_size_follows_the_free_memory(parts, monkeypatch):
    notes = []
    job = SimpleNamespace(disk=None, free_device_bytes=None, sizes=[4.0, 16.0], table=SimpleNamespace(note=notes.append))
    monkeypatch.setattr(parts.models, "find_room", lambda *_: (10 * 10**9, "memory"))
    planned = [title for title, _ in parts.benchmarks.plan_models(job)]
    assert [title.split(", ")[-1] for title in planned] == ["4.03 GB", "10.20 GB", "4.00 GB", "0.41 GB"], planned
    assert notes == ["16.00 GB are too much for memory: 10.00 GB instead"]


def test_a_pack_that_is_too_large_is_an_error_and_other_folders_are_left_alone(tmp_path, parts, monkeypatch, capsys):
    from gpu_check import bundle

    (tmp_path / bundle.TEST).write_bytes(b"..GLIBC_2.4\0GLIBC_2.17\0..")
    (tmp_path / "other-1.whl").write_bytes(b"12345")
    bundle.print_contents(tmp_path)
    said = capsys.readouterr().out
    assert f"25  {bundle.TEST}  (needs glibc 2.17)\n" in said and "5  other-1.whl\n" in said and "30  the pack" in said
    monkeypatch.setattr(bundle, "MAX_PACK_BYTES", 1000)
    with pytest.raises(SystemExit, match="bytes are more than the 1,000 that may travel"):
        bundle.print_contents(tmp_path)
    (tmp_path / "notes.txt").touch()
    monkeypatch.setattr(sys, "argv", ["gpu-check --pack", str(tmp_path)])
    with pytest.raises(SystemExit, match="holds other things than a pack"):
        bundle.main()
    assert len([*tmp_path.iterdir()]) == 3
