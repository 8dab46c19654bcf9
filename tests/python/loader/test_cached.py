"""Tensors that are computed once for all processes, and older files in the place of new ones."""

import os
import signal
import subprocess
import sys
import threading
import time

import ckptfs.torch
import pytest
import torch

import preloaded
from compare import check_same
from samples import numbers

TENSORS = {"latent": numbers(1, 4, 4), "mask": numbers(2, 4) > 0}


def test_a_value_is_made_once(tmp_path):
    path, made = tmp_path / "x.safetensors", []

    def make():
        made.append(1)
        return TENSORS

    for _ in range(3):
        check_same(ckptfs.torch.cached(path, make, metadata={"of": "x"}), TENSORS)
    assert len(made) == 1 and os.listdir(tmp_path) == ["x.safetensors"]
    with ckptfs.safe_open(path, "pt") as f:
        assert f.metadata() == {"of": "x"}
    halves = ckptfs.torch.cached(path, make, dtype="float16", names="latent")
    check_same(halves, {"latent": TENSORS["latent"].half()})


def test_a_value_that_cannot_be_made_or_saved_leaves_nothing(tmp_path):
    def fails():
        raise KeyError("no such entry")

    with pytest.raises(KeyError, match="no such entry"):
        ckptfs.torch.cached(tmp_path / "x.safetensors", fails)
    with pytest.raises(ValueError):
        ckptfs.torch.cached(tmp_path / "x.safetensors", lambda: [1])
    assert os.listdir(tmp_path) == []


def test_a_broken_file_is_refused_and_not_replaced(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"half of it")
    with pytest.raises(ckptfs.SafetensorError):
        ckptfs.torch.cached(path, lambda: TENSORS)
    assert path.read_bytes() == b"half of it"


def test_threads_wait_for_the_maker(tmp_path):
    path, made, got = tmp_path / "x.safetensors", [], []

    def make():
        made.append(1)
        time.sleep(0.2)
        return TENSORS

    threads = [threading.Thread(target=lambda: got.append(ckptfs.torch.cached(path, make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and len(got) == 8 and os.listdir(tmp_path) == ["x.safetensors"]
    for tensors in got:
        check_same(tensors, TENSORS)


@pytest.mark.parametrize("wrong", [{"dtype": "nonsense"}, {"dtype": 3}, {"dtype": torch.float32, "backend": "none"},
                                   {"device": "nowhere"}, {"num_threads": 0}, {"memory": "much"}], ids=str)  # fmt: skip
def test_arguments_that_load_file_refuses_are_refused_first(tmp_path, wrong):
    made = []
    with pytest.raises(ckptfs.SafetensorError, match=str(next(reversed(wrong.values())))):
        ckptfs.torch.cached(tmp_path / "x.safetensors", lambda: made.append(1) or TENSORS, **wrong)
    assert not made and not os.listdir(tmp_path)


RACER = """
import os, sys, time, torch, ckptfs.torch
folder, count, mine = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def make():
    with open(f"{folder}/made-{n}", "a") as file:
        file.write(mine)
    time.sleep(float(sys.argv[4]))
    return {"a": torch.full((1000,), float(n))}
print("ready", flush=True)
sys.stdin.readline()
for n in range(count):
    tensors = ckptfs.torch.cached(f"{folder}/{n}.safetensors", make)
    assert tensors["a"].shape == (1000,) and (tensors["a"] == n).all()
"""


def racers(folder, names, count, seconds):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = preloaded.command("-c", RACER, folder, count)
    running = [
        subprocess.Popen([*words, name, str(seconds)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in names
    ]
    for one in running:
        assert one.stdout.readline() == "ready\n"
    for one in running:
        one.stdin.write("\n")
        one.stdin.flush()
    return running


def test_processes_race_and_one_makes_each(tmp_path):
    for one in racers(tmp_path, "abcd", 40, 0.002):
        assert one.wait() == 0
    made = [path.read_text() for path in tmp_path.glob("made-*")]
    assert len(made) == 40 and all(len(who) == 1 for who in made), made
    assert not list(tmp_path.glob(".*"))


def test_a_killed_maker_leaves_it_to_the_next(tmp_path):
    (first,) = racers(tmp_path, "a", 1, 60)
    while not (tmp_path / "made-0").exists() or not (tmp_path / "made-0").read_text():
        time.sleep(0.01)
    (second,) = racers(tmp_path, "b", 1, 0)
    time.sleep(0.2)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert second.wait() == 0 and (tmp_path / "made-0").read_text() == "ab"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("beside", ["", "config.json"])
def test_an_older_file_is_loaded_in_its_place(tmp_path, beside):
    torch.save(TENSORS, tmp_path / "x.pt")
    if beside:
        # Where a mount would not show it under that name.
        (tmp_path / beside).write_text("{}")
    check_same(ckptfs.torch.load_file(tmp_path / "x.safetensors"), TENSORS)
    assert ckptfs.last_report().fallbacks.popitem()[0].endswith(f"{tmp_path / 'x.pt'} was loaded")
    check_same(ckptfs.torch.cached(str(tmp_path / "x.safetensors"), None), TENSORS)
    newer = {"latent": numbers(5, 2)}
    ckptfs.torch.save_file(newer, tmp_path / "x.safetensors")
    check_same(ckptfs.torch.load_file(tmp_path / "x.safetensors"), newer)
    assert not ckptfs.last_report().fallbacks
    for name in ("y.safetensors", "x.bin", "x"):
        with pytest.raises(FileNotFoundError, match=name):
            ckptfs.torch.load_file(tmp_path / name)


def test_a_maker_cannot_wait_for_itself(tmp_path):
    path = tmp_path / "x.safetensors"
    again = tmp_path / "." / "x.safetensors"
    with pytest.raises(ckptfs.SafetensorError, match="asks for the file"):
        ckptfs.torch.cached(path, lambda: ckptfs.torch.cached(again, lambda: TENSORS))
    assert os.listdir(tmp_path) == []
    other = tmp_path / "y.safetensors"
    check_same(ckptfs.torch.cached(path, lambda: ckptfs.torch.cached(other, lambda: TENSORS)), TENSORS)
    assert sorted(os.listdir(tmp_path)) == ["x.safetensors", "y.safetensors"]


@pytest.mark.parametrize("length", [249, 250, 255])
def test_a_name_may_be_as_long_as_any(tmp_path, length):
    path = tmp_path / f"{'x' * (length - len('.safetensors'))}.safetensors"
    check_same(ckptfs.torch.cached(path, lambda: TENSORS), TENSORS)
    assert os.listdir(tmp_path) == [path.name]


def test_its_directory_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in tmp_path / "new/cache/x.safetensors", "beside/x.safetensors", "x.safetensors":
        check_same(ckptfs.torch.cached(path, lambda: TENSORS), TENSORS)
    assert os.listdir(tmp_path / "new/cache") == os.listdir(tmp_path / "beside") == ["x.safetensors"]


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    made = []
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(FileExistsError) as fault:
        ckptfs.torch.cached(tmp_path / "dangling" / "x.safetensors", lambda: made.append(1) or TENSORS)
    assert fault.value.filename == str(tmp_path / "dangling") and not made
    assert os.listdir(tmp_path) == ["dangling"]


def test_a_makers_child_releases_no_lock(tmp_path):
    path, there = tmp_path / "x.safetensors", []

    def make():
        child = os.fork()
        if not child:
            raise SystemExit
        os.waitpid(child, 0)
        there.extend(os.listdir(tmp_path))
        return TENSORS

    maker = os.getpid()
    try:
        check_same(ckptfs.torch.cached(path, make), TENSORS)
    finally:
        if os.getpid() != maker:
            os._exit(0)
    assert there == [".x.safetensors.lock"] and os.listdir(tmp_path) == [path.name]
