"""Checkpoints in a store are read as those on disk: by every command, through a mount, and by the package. What is fetched
is bounded."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import ckptfs as package
import pytest
import torch
from ckptfs.torch import load_file
from safetensors.torch import load_file as load_plain

from compare import check_same
from mounts import until
from program import DONE, FAILED, find_binary

MODELS = ["sharded", "pickled", "dcp", "zero"]


@pytest.mark.parametrize("model", MODELS)
def test_a_checkpoint_in_a_store_is_the_same_by_every_way(ckptfs, mounts, store, models, tmp_path, model):
    folder, url, _ = models
    expected = load_file(folder / model, backend="pread")
    local, remote = ckptfs.inspect(folder / model), ckptfs.inspect(f"{url}/{model}")
    assert local["virtual_file"]["layout"] == remote["virtual_file"]["layout"]
    for backend in ("mmap", "pread"):
        check_same(load_file(f"{url}/{model}", backend=backend), expected)
        assert package.last_report().remote + package.last_report().gathered > 0
    check_same(load_plain(ckptfs.export(f"{url}/{model}", tmp_path / "out.safetensors")), expected)
    same = ckptfs("verify", f"{url}/{model}", "--against", folder / model)
    assert same.code == DONE, same.stderr
    mount = mounts(url)
    path = mount / model / "model.safetensors"
    whole = (tmp_path / "out.safetensors").read_bytes()
    assert path.read_bytes() == whole
    rng = random.Random(7)
    with path.open("rb") as file:
        for _ in range(30):
            start = rng.randrange(len(whole))
            length = rng.randint(1, 200_000)
            file.seek(start)
            assert file.read(length) == whole[start : start + length]
    check_same(load_plain(path), expected)


@pytest.fixture(scope="module")
def many_small(tmp_path_factory):
    """A pickle of 36 MB with 300 tensors: more than pages of a file, less than a request each."""
    path = tmp_path_factory.mktemp("small") / "pytorch_model.bin"
    torch.save({f"layers.{n}": torch.full((30_000,), float(n)) for n in range(300)}, path)
    return path


@pytest.mark.parametrize("program", ["export", "stream", "verify"])
def test_a_whole_file_is_read_by_few_requests_at_once(ckptfs, store, many_small, tmp_path, program):
    store.put("small/pytorch_model.bin", many_small.read_bytes())
    url, out = "s3://bucket/small", tmp_path / "out.safetensors"
    expected = Path(ckptfs.export(many_small, tmp_path / "expected.safetensors")).read_bytes()
    store.fault(latency_ms=100)
    if program == "export":
        assert ckptfs("export", url, out).code == DONE
    elif program == "stream":
        with out.open("wb") as file:
            subprocess.run([find_binary(), "export", url, "-"], stdout=file, check=True)
    else:
        assert ckptfs("verify", url).code == DONE
    stats = store.stats
    assert 4 <= stats["requests"] <= 25 and stats["most_at_once"] >= 4, stats
    assert program == "verify" or out.read_bytes() == expected


def test_an_error_ends_a_stream(store, many_small):
    store.put("broken/pytorch_model.bin", many_small.read_bytes())
    store.fault(latency_ms=50, method="GET", path="/broken/", status=403, status_every=4)
    done = subprocess.run([find_binary(), "export", "s3://bucket/broken", "-"], capture_output=True, timeout=60)
    assert done.returncode == FAILED and b"s3://bucket/broken" in done.stderr


@pytest.mark.parametrize("command", [["export", "-"], ["export"], ["verify"]])
def test_a_signal_does_not_wait_for_a_store(store, many_small, tmp_path, command):
    name, *out = command
    out = out or ([str(tmp_path / "out.safetensors")] if name == "export" else [])
    store.put("stuck/pytorch_model.bin", many_small.read_bytes())
    store.fault(path="/stuck/", method="GET", stall_after=100_000, stall_every=1)
    started = [find_binary(), name, "s3://bucket/stuck", *out]
    with subprocess.Popen(started, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        until("it fetches", lambda: store.stats["most_at_once"] >= 4)
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == FAILED
        assert "stopped before" in running.stderr.read()
    assert not list(tmp_path.iterdir())


def test_a_signal_ends_a_fetch_of_python(cache, store, many_small):
    store.put("stuck/pytorch_model.bin", many_small.read_bytes())
    store.fault(path="/stuck/", method="GET", stall_after=100_000, stall_every=1)
    code = "import ckptfs; ckptfs.fetch('s3://bucket/stuck')"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as running:
        until("it fetches", lambda: store.stats["most_at_once"] >= 4)
        running.send_signal(signal.SIGINT)
        # The store would be waited for three times as long.
        assert running.wait(20) == -signal.SIGINT
        assert "KeyboardInterrupt" in running.stderr.read()


@pytest.mark.parametrize("path, says", [("nowhere", "no such file or directory"), ("hf://org/model", "hf download org/model")])
def test_a_fetch_of_what_is_in_no_store_says_so(ckptfs, path, says):
    refused = ckptfs("fetch", path)
    assert refused.code == FAILED and says in refused.stderr


@pytest.mark.parametrize("model", MODELS)
def test_a_slice_is_the_same_as_on_disk(store, models, model):
    folder, url, _ = models
    with package.safe_open(f"{url}/{model}", framework="pt") as remote, package.safe_open(folder / model, framework="pt") as local:
        assert sorted(remote.keys()) == sorted(local.keys())
        for name in local.keys():
            part, whole = remote.get_slice(name), local.get_tensor(name)
            assert part.get_shape() == list(whole.shape)
            if whole.dim() and whole.shape[0] > 2:
                check_same({"part": part[1:3]}, {"part": whole[1:3]})


def test_a_directory_is_listed_as_on_disk(ckptfs, store, models):
    folder, url, _ = models
    local = ckptfs("ls", "-r", "--json", folder).json()
    remote = ckptfs("ls", "-r", "--json", url).json()
    names = lambda listings: [(one["path"], [(e["name"], e["kind"]) for e in one["entries"]]) for one in listings]
    assert names(remote) == names(local)


def test_a_load_of_everything_fetches_little_more_than_the_model(store, models):
    folder, url, _ = models
    size = sum(path.stat().st_size for path in (folder / "sharded").glob("*.safetensors"))
    store.fault()
    load_file(f"{url}/sharded", backend="pread")
    # A page of 64 KiB for each header comes on top.
    assert store.stats["bytes"] <= 1.03 * size + 5 * (64 << 10)


def test_one_tensor_fetches_its_bytes_and_the_headers(store, models):
    folder, url, _ = models
    name = "layers.1.2.weight"
    store.fault()
    [(_, tensor)] = load_file(f"{url}/sharded", names=name, backend="pread").items()
    assert store.stats["bytes"] <= tensor.nbytes + 5 * (64 << 10)


def test_shards_are_opened_with_one_request_each_and_at_once(ckptfs, store, tmp_path):
    from samples import write_shards

    count = 40
    write_shards(tmp_path / "forty", 1, count, 1, 8)
    url = store.upload(tmp_path / "forty", "forty")
    store.fault(latency_ms=30)
    assert ckptfs("ls", url).code == DONE
    stats = store.stats
    # One for each shard, the index, and a few to look at the directory.
    assert stats["requests"] <= count + 8
    assert stats["most_at_once"] >= 4


def test_what_is_not_there_is_told_as_that(ckptfs, store):
    for url in ("s3://bucket/nothing", "s3://bucket/nothing.safetensors", "s3://no-bucket/x"):
        missing = ckptfs("inspect", url)
        assert missing.code == FAILED and url in missing.stderr and "what to do: check the URL" in missing.stderr
    with pytest.raises(FileNotFoundError, match="s3://bucket/nothing"):
        load_file("s3://bucket/nothing")


def test_a_forked_child_loads_by_connections_of_its_own(store, models):
    _, url, _ = models
    # Not compared by torch, whose own threads a child lacks.
    load = lambda: load_file(f"{url}/pickled")["a"].numpy().tobytes()
    with package.safe_open(f"{url}/pickled", framework="np") as held:
        expected = held.get_tensor("a").tobytes()
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if load() == expected == held.get_tensor("a").tobytes() else 1)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert load() == expected == held.get_tensor("a").tobytes()


def read_if_possible(path):
    """The bytes of a file, which are not mapped: until a change is seen, reading the old version is an error."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def test_a_changed_object_is_a_new_file_for_the_next_open(mounts, store, tmp_path):
    from safetensors.torch import save

    first, second = ({"a": torch.full((70_000,), float(n))} for n in (1, 2))
    store.put("changing/model.safetensors", save(first))
    mount = mounts("s3://bucket/changing")
    path = mount / "model.safetensors"
    check_same(load_plain(path), first)
    with path.open("rb") as held:
        held.read(10)
        store.put("changing/model.safetensors", save(second))
        until("the new version is shown", lambda: read_if_possible(path) == save(second))
    check_same(load_file("s3://bucket/changing"), second)


def test_a_mount_shows_what_comes_and_goes(mounts, store):
    from safetensors.torch import save

    import torch

    store.put("growing/step-1/model.safetensors", save({"a": torch.ones(3)}))
    mount = mounts("s3://bucket/growing")
    assert os.listdir(mount.point) == ["step-1"]
    store.put("growing/step-2/model.safetensors", save({"a": torch.ones(4)}))
    until("the new step is shown", lambda: sorted(os.listdir(mount.point)) == ["step-1", "step-2"])
    assert load_plain(mount / "step-2/model.safetensors")["a"].shape == (4,)
    store.delete("growing/step-1/model.safetensors")
    until("the old step is gone", lambda: os.listdir(mount.point) == ["step-2"])


def test_objects_that_mark_directories_are_no_files(ckptfs, mounts, store):
    from safetensors.torch import save

    import torch

    for marker in ("marked/", "marked/inner/", "marked/inner"):
        store.put(marker, b"")
    store.put("marked/inner/model.safetensors", save({"a": torch.ones(3)}))
    listings = ckptfs("ls", "-r", "--json", "s3://bucket/marked").json()
    names = {one["path"]: [entry["name"] for entry in one["entries"]] for one in listings}
    assert names == {"": ["inner"], "inner": ["model.safetensors"]}
    assert load_file("s3://bucket/marked/inner")["a"].tolist() == [1, 1, 1]
    assert load_plain(mounts("s3://bucket/marked") / "inner/model.safetensors")["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("model", MODELS)
def test_a_file_of_an_own_mount_is_loaded_from_the_store_itself(mounts, store, models, monkeypatch, model):
    folder, url, _ = models
    path = mounts(url) / model / "model.safetensors"
    expected = load_file(folder / model, backend="pread")
    check_same(load_file(path, backend="pread"), expected)
    report = package.last_report()
    assert not report.fallbacks and report.remote + report.gathered > 0
    # Another store of that name has other files. The mount is right.
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.server_port}")
    check_same(load_file(path, backend="pread"), expected)
    assert any("not what the mount shows" in reason for reason in package.last_report().fallbacks)


def test_a_daemon_takes_little_memory_beside_its_limit(mounts, monkeypatch, tmp_path):
    from concurrent.futures import ThreadPoolExecutor
    from contextlib import ExitStack

    import torch
    from safetensors.torch import save_file

    from stores import BUCKET, ServedFolder

    limit, readers, tensors = 32 << 20, 8, 64
    server = ServedFolder(tmp_path)
    (tmp_path / BUCKET / "large").mkdir()
    save_file({f"{n:02}": torch.full((8 << 20,), n, dtype=torch.uint8) for n in range(tensors)},
              tmp_path / BUCKET / "large/model.safetensors")  # fmt: skip
    with ExitStack() as stack:
        stack.callback(server.end)
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.fault(latency_ms=10)
        mount = mounts(f"{server.url}/large", "--memory", "32M")
        path = mount / "model.safetensors"
        size = path.stat().st_size

        def read(part):
            with path.open("rb", buffering=0) as file:
                file.seek(part * size // readers)
                while file.tell() < (part + 1) * size // readers:
                    assert file.read(1 << 20)

        with ThreadPoolExecutor(readers) as pool:
            list(pool.map(read, range(readers)))
        _, peak = mount.resident()
        # A debug build has more pages of its own, which do not count.
        program = next(line for line in open(f"/proc/{mount.pid}/status") if line.startswith("RssFile:"))
        assert peak - (int(program.split()[1]) << 10) <= limit + (52 << 20)
