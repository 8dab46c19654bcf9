"""A model saved in shards. Libraries load it, it is there whole or not at all, and saving takes no second copy of it in
memory."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time

import ckptfs.torch
import pytest
import safetensors.torch
import torch

import models
import preloaded
from ckptfs.save import atomic_file, sharded
from compare import check_same
from denied_calls import deny_nameless_files, succeeds_after
from samples import numbers


@pytest.fixture
def tensors():
    made = {f"layers.{n}.weight": numbers(n, 8, 16) for n in range(7)}
    return made | {"head": numbers(9, 40, 16), "norm": numbers(8, 16).half(), "empty": torch.zeros(0, 3)}


def held(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_saved_set_loads_again(tmp_path, tensors):
    names = ckptfs.torch.save_sharded(tensors, tmp_path / "new" / "model", max_shard_size=1600)
    folder = tmp_path / "new" / "model"
    assert held(folder) == sorted(names) and len(names) > 3
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    found = {}
    for file in set(index["weight_map"].values()):
        part = safetensors.torch.load_file(folder / file)
        assert {name for name, of in index["weight_map"].items() if of == file} == set(part)
        with safetensors.safe_open(folder / file, "pt") as f:
            assert f.metadata() == {"format": "pt"}
        # At most the limit, except a tensor that is larger by itself.
        assert sum(tensor.nbytes for tensor in part.values()) <= 1600 or len(part) == 1
        found |= part
    check_same(found, tensors)
    check_same(ckptfs.torch.load_sharded(folder), tensors)


def test_a_model_that_fits_is_one_file(tmp_path, tensors):
    metadata = {"about": "größe"}
    assert ckptfs.torch.save_sharded(tensors, tmp_path, metadata=metadata) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == safetensors.torch.save(tensors, metadata)
    check_same(ckptfs.torch.load_sharded(tmp_path), tensors)


def test_an_empty_model_is_one_file_too(tmp_path):
    ckptfs.torch.save_sharded({}, tmp_path)
    assert ckptfs.torch.load_sharded(tmp_path) == {}


@pytest.mark.parametrize("before, after", [("600", "1600"), ("1600", "600"), ("600", "1GB"), ("1GB", "600"), ("600", "600")])
def test_an_earlier_set_is_replaced_and_nothing_else(tmp_path, tensors, before, after):
    beside = ["config.json", "model-notes.safetensors", "other-00001-of-00002.safetensors", "optimizer.pt"]
    for name in beside:
        (tmp_path / name).write_text(name)
    ckptfs.torch.save_sharded({name: tensor + 1 for name, tensor in tensors.items()}, tmp_path, before)
    mapped = ckptfs.torch.load_file(next(tmp_path.glob("model-0*")) if before != "1GB" else tmp_path / "model.safetensors")
    kept = {name: tensor.clone() for name, tensor in mapped.items()}
    names = ckptfs.torch.save_sharded(tensors, tmp_path, after)
    assert held(tmp_path) == sorted(names + beside)
    for name in beside:
        assert (tmp_path / name).read_text() == name
        (tmp_path / name).unlink()
    check_same(ckptfs.torch.load_sharded(tmp_path), tensors)
    # A process that has the old set mapped keeps it.
    check_same(mapped, kept)


def test_a_set_of_the_same_names_has_a_digit_more_and_takes_the_old_files_away(tmp_path, tensors):
    def shards():
        return set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values())

    ckptfs.torch.save_sharded(tensors, tmp_path, 600)
    old = shards()
    ckptfs.torch.save_sharded(tensors, tmp_path, 600)
    assert {re.sub(r"-0(\d{5})", r"-\1", name) for name in shards()} == old and shards().isdisjoint(old)
    # A load that read the old index finds none of them.
    for name in old:
        with pytest.raises(FileNotFoundError):
            ckptfs.torch.load_file(tmp_path / name)


def test_transformers_and_diffusers_load_it(tmp_path):
    from diffusers import AutoencoderKL

    made = models.llama()
    made.config.save_pretrained(tmp_path / "llama")
    ckptfs.torch.save_sharded(made.state_dict(), tmp_path / "llama", max_shard_size="20K")
    assert len(held(tmp_path / "llama")) > 4
    models.check_same(type(made).from_pretrained(tmp_path / "llama"), made)

    torch.manual_seed(1)
    vae = AutoencoderKL(block_out_channels=(8, 16), down_block_types=["DownEncoderBlock2D"] * 2,
                        up_block_types=["UpDecoderBlock2D"] * 2, norm_num_groups=4)  # fmt: skip
    vae.save_config(tmp_path / "vae")
    stem = "diffusion_pytorch_model.safetensors"
    ckptfs.torch.save_sharded(vae.state_dict(), tmp_path / "vae", "30K", name=stem)
    assert f"{stem}.index.json" in held(tmp_path / "vae")
    check_same(AutoencoderKL.from_pretrained(tmp_path / "vae").state_dict(), vae.state_dict())

    # A variant has the names that both libraries look for, and takes the place of one with another index.
    variant = f"{stem.removesuffix('.safetensors')}.fp16.safetensors"
    for folder, name, model in (("llama", "model.fp16.safetensors", made), ("vae", variant, vae)):
        other = {"tensor": torch.ones(9)}
        old = ckptfs.torch.save_sharded(other, tmp_path / folder, 1, name=name)
        old = (tmp_path / folder / old[-1]).rename(tmp_path / folder / f"{name}.index.json")
        ckptfs.torch.save_sharded(model.state_dict(), tmp_path / folder, "20K", name=name)
        found = type(model).from_pretrained(tmp_path / folder, variant="fp16")
        check_same(found.state_dict(), model.state_dict())
        assert not old.exists() and f"{name.replace('.fp16', '')}.index.fp16.json" in held(tmp_path / folder)


@pytest.mark.parametrize("size", ["0", 0, -1, "big", 1.5, None])
def test_impossible_sizes_are_refused(tmp_path, tensors, size):
    with pytest.raises(ckptfs.SafetensorError, match="max_shard_size"):
        ckptfs.torch.save_sharded(tensors, tmp_path / "x", size)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["model", "a/model.safetensors", ".safetensors", "model.bin", "../model.safetensors"])
def test_impossible_names_are_refused(tmp_path, tensors, name):
    with pytest.raises(ckptfs.SafetensorError, match="no name"):
        ckptfs.torch.save_sharded(tensors, tmp_path / "x", name=name)


def test_tensors_that_save_file_refuses_are_refused(tmp_path):
    whole = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="non contiguous"):
        ckptfs.torch.save_sharded({"a": whole.t()[1:]}, tmp_path / "x")
    with pytest.raises(TypeError, match="metadata"):
        ckptfs.torch.save_sharded({"a": whole}, tmp_path / "x", metadata={"a": 1})
    assert held(tmp_path) in ([], ["x"]) and not list(tmp_path.glob("x/*"))


@pytest.mark.parametrize("save", [ckptfs.torch.save_file, ckptfs.torch.save_sharded])
def test_a_name_that_is_no_text_is_refused_by_the_users_words(tmp_path, save):
    weight = torch.ones(2, 3)
    for tensors in ({3: weight}, {3: weight, "tied": weight}, {3: weight.t()}):
        with pytest.raises(TypeError, match="^3: the name of a tensor must be text, got <class 'int'>$"):
            save(tensors, tmp_path / "x.safetensors")
    assert os.listdir(tmp_path) == []


def test_only_a_directory_is_loaded_as_shards(tmp_path):
    (tmp_path / "file").touch()
    for name, kind in ("nothing", FileNotFoundError), ("file", NotADirectoryError):
        with pytest.raises(kind) as fault:
            ckptfs.torch.load_sharded(tmp_path / name)
        assert fault.value.filename == str(tmp_path / name) and fault.value.errno


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path, tensors):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError) as fault:
        ckptfs.torch.save_sharded(tensors, tmp_path / "file")
    assert fault.value.errno in (errno.EEXIST, errno.ENOTDIR) and (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def small_disk(tmp_path):
    point = tmp_path / "disk"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", point], check=True)
    yield point
    subprocess.run(["umount", point], check=True)


@pytest.fixture
def few(request, monkeypatch):
    """Limits the files that a save may have open; without a number, the limit stays."""
    if request.param:
        monkeypatch.setattr(sharded, "max_open_files", lambda: request.param)


@pytest.mark.parametrize("few", [None, 1, 3], indirect=True)
@pytest.mark.parametrize("size", ["100K", "1GB"])
def test_a_full_disk_leaves_the_old_set_and_no_litter(small_disk, tensors, size, few):
    names = ckptfs.torch.save_sharded(tensors, small_disk, 1600)
    large = {f"{n}": torch.zeros(16 << 10) for n in range(32)}
    with pytest.raises(OSError) as fault:
        ckptfs.torch.save_sharded(large, small_disk, size)
    assert fault.value.errno == errno.ENOSPC
    assert held(small_disk) == sorted(names)
    check_same(ckptfs.torch.load_sharded(small_disk), tensors)


ORDER = """
import os, sys, torch, ckptfs.torch
from denied_calls import deny_nameless_files
from samples import numbers
folder, named = sys.argv[1], sys.argv[2] == "True"
if named:
    deny_nameless_files()
tensors = {f"layers.{n}.weight": numbers(n, 8, 16) for n in range(7)}
for save in (
    lambda: ckptfs.torch.save_file(tensors, f"{folder}/x.safetensors"),
    lambda: ckptfs.torch.save_file(tensors, f"{folder}/x.safetensors"),
    lambda: ckptfs.torch.save_sharded(tensors, folder, 1600, sync=False),
    lambda: ckptfs.torch.save_sharded(tensors, folder, 1600),
):
    os.access("save", os.F_OK)
    save()
os.access("end", os.F_OK)
"""

# Of the system, by what they do.
CALLS = {"fsync": "fsync", "linkat": "link", "rename": "replace", "renameat": "replace", "renameat2": "replace"}


def traced(folder, named):
    """The calls that give a file its name, and those that write it to the disk: a list for each of the saves."""
    log = folder.with_name("calls")
    # Not every architecture has each.
    names = ",".join(f"?{name}" for name in ["access", "faccessat", "faccessat2", *CALLS])
    words = ["strace", "-f", "-qq", "--seccomp-bpf", "-e", f"trace={names}", "-o", log, sys.executable, "-c", ORDER]
    # Python itself renames what it compiles.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([*words, str(folder), str(named)], env=env, check=True)
    saves = []
    for line in log.read_text().splitlines():
        call = re.match(r"\d+ +(\w+)\(", line)
        if '"save"' in line:
            saves.append([])
        elif '"end"' in line:
            return saves
        elif call and call[1] in CALLS and saves:
            saves[-1].append(CALLS[call[1]])
    raise AssertionError("the saves did not end")


@pytest.mark.parametrize("named", [False, True])
def test_without_nameless_files_it_works_too(tmp_path, tensors, named):
    folder = tmp_path / "model"
    folder.mkdir()
    new, replaced, unsynced, synced = traced(folder, named)
    # The bytes are on the disk before the name is given, and then the name is.
    assert new == ["fsync", "replace" if named else "link", "fsync"]
    # Only a replacement takes two steps.
    assert replaced == (["fsync", "replace", "fsync"] if named else ["fsync", "link", "link", "replace", "fsync"])
    assert "fsync" not in unsynced and ("replace" if named else "link") in unsynced
    assert synced.count("fsync") == len(held(folder))
    for name in held(folder):
        if name != "x.safetensors":
            (folder / name).unlink()

    def fails(self, part):
        raise OSError(errno.EIO, "Input/output error")

    def all_fail():
        atomic_file.AtomicFile.write = fails
        for save in (lambda: ckptfs.torch.save_file({"a": torch.ones(1)}, folder / "x.safetensors"),
                     lambda: ckptfs.torch.save_sharded(tensors, folder, 1600)):  # fmt: skip
            with pytest.raises(OSError):
                save()
            assert held(folder) == ["x.safetensors"]

    assert succeeds_after(deny_nameless_files if named else (lambda: None), all_fail)
    layers = {name: tensor for name, tensor in tensors.items() if name.startswith("layers")}
    check_same(ckptfs.torch.load_file(folder / "x.safetensors"), layers)


class Died(BaseException):
    """Stands for a signal, at a moment of our choice."""


@pytest.mark.parametrize("few, before, after", [
    (None, "8K", "8K"), (None, "8K", "4K"), (None, "8K", "1GB"), (None, "1GB", "8K"), (None, "1GB", "1GB"),
    (1, "8K", "8K"), (3, "1GB", "8K"), (1, "8K", "1GB"),
], indirect=["few"])
def test_between_any_two_names_loaders_find_one_whole_set(tmp_path, monkeypatch, few, before, after):
    made = models.llama()
    old, new = made.state_dict(), {name: tensor + 1 for name, tensor in made.state_dict().items()}
    calls, number = [(atomic_file.AtomicFile, "take"), (os, "unlink")], 0
    while True:
        folder, left = tmp_path / str(number), [number]
        made.config.save_pretrained(folder)
        ckptfs.torch.save_sharded(old, folder, before)
        with monkeypatch.context() as patched:
            for module, name in calls:
                def counted(*given, real=getattr(module, name), **how):
                    if not left[0]:
                        raise Died
                    left[0] -= 1
                    return real(*given, **how)
                patched.setattr(module, name, counted)
            try:
                ckptfs.torch.save_sharded(new, folder, after)
                break
            except Died:
                pass
        found = type(made).from_pretrained(folder).state_dict()
        wanted = old if all(torch.equal(found[name], old[name]) for name in old) else new
        check_same(found, wanted)
        check_same(ckptfs.torch.load_sharded(folder), wanted)
        number += 1
        # Whatever was left, the next save makes a set of it again, and nothing else is there.
        names = ckptfs.torch.save_sharded(new, folder, after)
        there = {name for name in held(folder) if "safetensors" in name and not name.startswith(".")}
        assert there == set(names)
        check_same(ckptfs.torch.load_sharded(folder), new)
    assert number > 1 or before == after == "1GB"


FEW = """
import json, os, resource, sys, threading, time, torch, ckptfs.torch
folder, open_now = sys.argv[1], lambda: len(os.listdir("/proc/self/fd"))
tensors = {f"{n:03}": torch.full((4,), float(n)) for n in range(400)}
told, before = [], open_now()
resource.setrlimit(resource.RLIMIT_NOFILE, (before + 40,) * 2)
take = ckptfs.save.atomic_file.AtomicFile.take
ckptfs.save.atomic_file.AtomicFile.take = lambda *given: (told.append(open_now() - before), take(*given))
names = ckptfs.torch.save_sharded(tensors, folder, 16, sync=False)
after = open_now() - before

def full(self, part, real=ckptfs.save.atomic_file.AtomicFile.write):
    # One is slow: the others meanwhile leave enough for it.
    if threading.current_thread().name.endswith("_0"):
        time.sleep(0.05)
    if any(name.startswith(".ckptfs-") for name in os.listdir(folder)):
        raise OSError(28, "No space left on device")
    real(self, part)

ckptfs.save.atomic_file.AtomicFile.write = full
try:
    ckptfs.torch.save_sharded(tensors, folder, 16, sync=False)
    failed = 0
except OSError as fault:
    failed = fault.errno
print(json.dumps([names, told[0], after, failed, open_now() - before]))
"""


def test_there_may_be_more_shards_than_files_that_can_be_open(tmp_path):
    folder, env = tmp_path / "model", {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", FEW, str(folder)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names, held_open, after, failed, at_the_end = json.loads(done.stdout)
    # As many as possible stay nameless, so that a killed process leaves little.
    assert len(names) == 401 and 10 <= held_open <= 20 and (after, at_the_end) == (0, 0)
    assert failed == errno.ENOSPC and held(folder) == sorted(names)
    found = ckptfs.torch.load_sharded(folder)
    assert len(found) == 400 and all((tensor == float(name)).all() for name, tensor in found.items())


def test_where_one_file_cannot_be_made_the_others_are_closed_at_once(tmp_path, monkeypatch, tensors):
    made = []

    class Fifth(atomic_file.AtomicFile):
        def __new__(cls, *given):
            if len(made) == 4:
                raise OSError(errno.EMFILE, "Too many open files")
            made.append(super().__new__(cls, *given))
            return made[-1]

    monkeypatch.setattr(sharded, "AtomicFile", Fifth)
    with pytest.raises(OSError) as fault:
        ckptfs.torch.save_sharded(tensors, tmp_path, 600, num_threads=1)
    assert fault.value.errno == errno.EMFILE
    assert len(made) == 4 and not held(tmp_path)
    for file in made:
        with pytest.raises(ValueError, match="closed"):
            file.fileno()


KILLED = """
import os, resource, sys, torch, ckptfs.torch
print(os.getpid(), flush=True)
if sys.argv[3] != "None":
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + int(sys.argv[3]),) * 2)
tensors = {f"{n}": torch.full((1 << 20,), float(sys.argv[2])) for n in range(24)}
print("ready", flush=True)
ckptfs.torch.save_sharded(tensors, sys.argv[1], "8M")
print("done", flush=True)
"""


@pytest.mark.parametrize("files", [None, 8])
def test_killed_at_any_moment_a_set_is_whole_and_of_one_time(tmp_path, files):
    folder = tmp_path / "model"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def start(value):
        command = preloaded.command("-c", KILLED, folder, value, files)
        child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        pid = int(child.stdout.readline())
        assert child.stdout.readline() == "ready\n"
        return child, pid

    child, _ = start(0)
    began = time.monotonic()
    assert child.wait() == 0
    took, killed = time.monotonic() - began, 0
    for turn in range(1, 7):
        child, pid = start(turn)
        time.sleep(took * turn / 8)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        killed += child.wait() == -signal.SIGKILL
        found = ckptfs.torch.load_sharded(folder)
        assert len(found) == 24 and len({tensor[0].item() for tensor in found.values()}) == 1
        hidden = list(folder.glob(".*"))
        assert all(path.match(".ckptfs-*.part") for path in hidden) if files else not hidden
    assert killed


def test_no_second_copy_is_made(tmp_path):
    code = """
import resource, sys, torch, ckptfs.torch
tensors = {f"{n}": torch.ones(4 << 20, dtype=torch.float32) for n in range(16)}
open("/proc/self/clear_refs", "w").write("5")
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
ckptfs.torch.save_sharded(tensors, sys.argv[1], "32M")
peak = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print((peak - before) / sum(tensor.nbytes for tensor in tensors.values()))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # A second copy of one tensor would be 0.06.
    assert float(done.stdout) < 0.05


def test_tensors_on_devices_are_fetched_one_at_a_time(tmp_path, monkeypatch):
    at_once, most = [0], [0]
    real = ckptfs.save.torch._on_host

    def fetched(tensor):
        import weakref

        here = real(tensor).clone()
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        weakref.finalize(here, lambda: at_once.__setitem__(0, at_once[0] - 1))
        return here

    monkeypatch.setattr(ckptfs.save.torch, "_on_host", fetched)
    tensors = {f"{n}": numbers(n, 64, 64) for n in range(12)}
    ckptfs.torch.save_sharded(tensors, tmp_path, "40K", num_threads=2)
    check_same(ckptfs.torch.load_sharded(tmp_path), tensors)
    assert 1 <= most[0] <= 4 and at_once[0] == 0
