"""The cache on disk: what was fetched once is read from there, after a comparison of versions. Whatever happens to its
files, bytes are right."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ckptfs as package
import pytest
import torch
from ckptfs.torch import load_file
from safetensors.torch import load_file as load_plain
from safetensors.torch import save_file

from compare import check_same
from mounts import until
from page_cache import cached_bytes
from program import DONE, FAILED, find_binary
from stores import SECRET

# Names of a directory, the state of objects: no bytes of models.
FEW_BYTES = 100_000


@pytest.fixture
def small_disk(tmp_path, monkeypatch, cache):
    """A disk of 3 MiB with the folder of the cache."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3M,mode=700", "tmpfs", disk], check=True)
    monkeypatch.setenv("CKPTFS_CACHE_DIR", str(disk / "blocks"))
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def blocks(cache):
    return [path for path in cache.glob("*/*-*") if path.is_file()]


def exported(ckptfs, url, tmp_path, *options):
    """The tensors of an export, and the bytes that the server sent meanwhile."""
    out = tmp_path / "out.safetensors"
    return load_plain(ckptfs.export(url, out, "--force", *options))


@pytest.mark.parametrize("model", ["sharded", "pickled", "dcp", "zero"])
def test_a_second_read_fetches_no_bytes(ckptfs, mounts, store, models, cache, tmp_path, model):
    _, url, _ = models
    expected = exported(ckptfs, f"{url}/{model}", tmp_path)
    fetched = store.stats["bytes"]
    store.fault()
    check_same(exported(ckptfs, f"{url}/{model}", tmp_path), expected)
    mount = mounts(f"{url}/{model}")
    check_same(load_plain(mount / "model.safetensors"), expected)
    stats = store.stats
    assert stats["bytes"] < fetched / 2 and stats["requests"] > 0
    assert mount.stats()["store"]["cached_bytes"] > 0
    store.fault()
    check_same(exported(ckptfs, f"{url}/{model}", tmp_path, "--no-cache"), expected)
    assert store.stats["bytes"] >= fetched


def test_cached_bytes_count_once_the_store_has_confirmed_their_version(ckptfs, store, cache, tmp_path):
    for name in ("a", "b", "c"):
        store_tensor(store, f"confirmed/{name}.safetensors", ord(name), tmp_path)
    assert ckptfs("fetch", "s3://bucket/confirmed").code == DONE
    store.fault()
    for name in ("a", "b", "c"):
        url = f"s3://bucket/confirmed/{name}.safetensors"
        with package.safe_open(url, "pt") as opened:
            for _ in range(5):
                assert opened.get_tensor("t").unique().tolist() == [ord(name)]
    stats = store.stats
    assert stats["methods"] == {"HEAD": 3} and stats["bytes"] == 0, stats
    store.fault(is_down=True)
    refused = ckptfs("export", "s3://bucket/confirmed/a.safetensors", tmp_path / "out.safetensors", "--outage-timeout", "1")
    assert refused.code == FAILED and not (tmp_path / "out.safetensors").exists()


def test_a_replaced_object_is_read_anew_at_once_and_a_removed_one_is_missing(store, cache, tmp_path):
    url = "s3://bucket/replaced-at-once/model.safetensors"
    for value in (1, 2, 3):
        store_tensor(store, "replaced-at-once/model.safetensors", value, tmp_path)
        assert load_file(url)["t"].unique().tolist() == [value]
    store.delete("replaced-at-once/model.safetensors")
    with pytest.raises(FileNotFoundError):
        load_file(url)


def test_a_changed_object_is_fetched_anew(ckptfs, store, cache, tmp_path):
    for value in (1, 2):
        store_tensor(store, "changing/model.safetensors", value, tmp_path)
        [tensor] = exported(ckptfs, "s3://bucket/changing", tmp_path).values()
        assert tensor.unique().tolist() == [value]
    # Without a server, the version that was seen last counts.
    store.fault(is_down=True)
    [tensor] = exported(ckptfs, "s3://bucket/changing", tmp_path, "--offline").values()
    assert tensor.unique().tolist() == [2]


def store_tensor(store, key, value, tmp_path, length=300_000):
    save_file({"t": torch.full((length,), float(value))}, tmp_path / "t.safetensors")
    store.put(key, (tmp_path / "t.safetensors").read_bytes())


def test_what_was_fetched_is_read_offline(ckptfs, mounts, store, models, cache, tmp_path):
    _, url, kinds = models
    report = ckptfs("fetch", "--json", url).json()
    assert report["files"] >= len(kinds) and report["bytes"] > FEW_BYTES
    again = ckptfs("fetch", "--json", url).json()
    assert again == {**report, "cached_bytes": report["bytes"]}
    expected = {kind: exported(ckptfs, f"{url}/{kind}", tmp_path, "--no-cache") for kind in kinds}
    listed = ckptfs("ls", "-r", "--json", url).json()
    store.fault(is_down=True)
    for kind in kinds:
        check_same(exported(ckptfs, f"{url}/{kind}", tmp_path, "--offline"), expected[kind])
    names = lambda listings: [(one["path"], [(e["name"], e["kind"]) for e in one["entries"]]) for one in listings]
    assert names(ckptfs("ls", "-r", "--json", "--offline", url).json()) == names(listed)
    mount = mounts(url, "--offline")
    for kind in kinds:
        check_same(load_plain(mount / kind / "model.safetensors"), expected[kind])
    assert store.stats["requests"] == 0
    missing = ckptfs("inspect", "--offline", "s3://bucket/elsewhere")
    assert missing.code == FAILED and "ckptfs fetch" in missing.stderr


def test_a_recipe_is_shown_offline_after_a_fetch_with_it(ckptfs, mounts, store, models, cache, tmp_path):
    _, url, _ = models
    recipe = tmp_path / "views.toml"
    recipe.write_text('[[file]]\npath = "half/x.safetensors"\nfrom = ["sharded"]\ncast = [{ tensors = "*", to = "bfloat16" }]\n')
    assert ckptfs("fetch", "--views", recipe, f"{url}").code == DONE
    expected = {name: tensor.bfloat16() for name, tensor in exported(ckptfs, f"{url}/sharded", tmp_path, "--no-cache").items()}
    store.fault(is_down=True)
    mount = mounts(url, "--offline", "--views", recipe)
    check_same(load_plain(mount / "half/x.safetensors"), expected)
    assert store.stats["requests"] == 0


def test_credentials_are_not_needed_offline_and_never_stored(ckptfs, store, models, cache, tmp_path, monkeypatch):
    _, url, _ = models
    assert ckptfs("fetch", f"{url}/sharded").code == DONE
    for path in cache.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert ckptfs("inspect", "--offline", f"{url}/sharded").code == DONE


def test_buckets_of_one_name_at_two_endpoints_are_two(ckptfs, store, models, cache, tmp_path, monkeypatch):
    _, url, _ = models
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    (tmp_path / "config").write_text(f"[default]\nendpoint_url = {store.address}\n")
    assert ckptfs("fetch", f"{url}/sharded").code == DONE
    assert ckptfs("inspect", "--offline", f"{url}/sharded").code == DONE
    (tmp_path / "config").write_text("[default]\nendpoint_url = http://127.0.0.1:1\n")
    other = ckptfs("inspect", "--offline", f"{url}/sharded")
    assert other.code == FAILED and "sends no request" in other.stderr


def test_a_fetch_that_was_killed_goes_on(ckptfs, store, cache, tmp_path):
    tensors = {f"t{n}": torch.full((1 << 20,), float(n)) for n in range(24)}
    save_file(tensors, tmp_path / "t.safetensors")
    size = (tmp_path / "t.safetensors").stat().st_size
    store.put("long/model.safetensors", (tmp_path / "t.safetensors").read_bytes())
    store.fault(path="/long/", bytes_per_second=8_000_000)
    fetch = subprocess.Popen([find_binary(), "fetch", "--connections", "1", "s3://bucket/long"])
    while len(blocks(cache)) < 5:
        assert fetch.poll() is None
        time.sleep(0.02)
    fetch.kill()
    fetch.wait()
    store.fault()
    report = ckptfs("fetch", "--json", "s3://bucket/long").json()
    # What was under way is fetched again, what was there is not.
    assert 4 * (8 << 20) <= report["cached_bytes"] < size
    assert store.stats["bytes"] <= size - report["cached_bytes"] + FEW_BYTES
    check_same(exported(ckptfs, "s3://bucket/long", tmp_path, "--offline"), tensors)


def test_flipped_bytes_are_noticed_and_fetched_anew(ckptfs, store, models, cache, tmp_path):
    _, url, _ = models
    expected = exported(ckptfs, f"{url}/sharded", tmp_path)
    rng = random.Random(3)
    for path in blocks(cache):
        bytes_ = bytearray(path.read_bytes())
        # Near the beginning, in the middle, at the end, or all zero as after a crash. Bytes before the block's are never read.
        before = int(path.name.split("-")[0], 16) % 4096
        at = rng.choice([before, before + 50, len(bytes_) // 2, len(bytes_) - 1])
        bytes_[at] ^= 1 << rng.randrange(8)
        path.write_bytes(rng.choice([bytes(bytes_), bytes(len(bytes_)), bytes_[:-1]]))
    # Of a removed block, one reader may need a part alone. The next one fetches the rest.
    for options in ([], [], ["--offline"]):
        check_same(exported(ckptfs, f"{url}/sharded", tmp_path, *options), expected)
    whole = ckptfs("cache", "verify", "--json")
    assert whole.code == DONE and whole.json()["removed_blocks"] == 0
    for path in blocks(cache):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    verified = ckptfs("cache", "verify", "--json")
    assert verified.code == FAILED and json.loads(verified.stdout)["removed_blocks"] > 0
    check_same(exported(ckptfs, f"{url}/sharded", tmp_path), expected)


def test_bytes_whose_checksums_are_wrong_are_fetched_anew(ckptfs, store, models, cache, tmp_path):
    _, url, _ = models
    expected = exported(ckptfs, f"{url}/sharded", tmp_path)
    for damage in (lambda bytes_: bytes_[:2], lambda bytes_: bytes(len(bytes_)), lambda bytes_: bytes_[::-1]):
        files = list(cache.glob("*/checksums"))
        assert files
        for path in files:
            path.write_bytes(damage(path.read_bytes()))
        store.fault()
        check_same(exported(ckptfs, f"{url}/sharded", tmp_path), expected)
        assert store.stats["bytes"] > 1_000_000
        for options in ([], [], ["--offline"]):
            check_same(exported(ckptfs, f"{url}/sharded", tmp_path, *options), expected)
        whole = ckptfs("cache", "verify", "--json")
        assert whole.code == DONE and whole.json()["removed_blocks"] == 0


def test_a_process_that_is_killed_leaves_whole_blocks_only(ckptfs, store, models, cache, tmp_path):
    _, url, _ = models
    expected = exported(ckptfs, f"{url}/sharded", tmp_path, "--no-cache")
    rng = random.Random(5)
    partial = 0
    for _ in range(200):
        process = subprocess.Popen([find_binary(), "fetch", "-q", f"{url}/sharded"], stdout=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.01, 0.12))
        process.kill()
        process.wait()
        partial += 0 < len(blocks(cache)) < 20
        if rng.random() < 0.3:
            shutil.rmtree(cache, ignore_errors=True)
    assert partial > 10
    whole = ckptfs("cache", "verify", "--json")
    assert whole.code == DONE and whole.json()["removed_blocks"] == 0
    check_same(exported(ckptfs, f"{url}/sharded", tmp_path), expected)
    names = {path.name for path in cache.glob("*/*")}
    assert all(name in ("object.json", "checksums") or "-" in name for name in names), names


def test_two_mounts_fill_one_cache(mounts, ckptfs, store, models, cache, tmp_path):
    _, url, kinds = models
    expected = {kind: exported(ckptfs, f"{url}/{kind}", tmp_path, "--no-cache") for kind in kinds}
    pair = [mounts(url), mounts(url)]
    with ThreadPoolExecutor(8) as pool:
        loads = [(kind, pool.submit(load_plain, mount / kind / "model.safetensors")) for kind in kinds for mount in pair]
        for kind, load in loads:
            check_same(load.result(), expected[kind])
    whole = ckptfs("cache", "verify", "--json")
    assert whole.code == DONE and whole.json()["blocks"] > 0


def test_blocks_that_a_mount_adds_are_dropped_from_the_page_cache(mounts, store, cache, tmp_path, monkeypatch):
    store_tensor(store, "dropped/model.safetensors", 1, tmp_path, length=5 << 20)
    size = (tmp_path / "t.safetensors").stat().st_size
    mount = mounts("s3://bucket/dropped")
    assert (mount / "model.safetensors").read_bytes() == (tmp_path / "t.safetensors").read_bytes()
    assert sum(path.stat().st_size for path in blocks(cache)) >= size
    # The block that was fetched before the file was opened stays.
    until("its pages are gone", lambda: cached_bytes(blocks(cache)) <= FEW_BYTES)
    # A load without a mount keeps its blocks cached for the next one.
    monkeypatch.setenv("CKPTFS_CACHE_DIR", str(tmp_path / "loaded"))
    assert load_file("s3://bucket/dropped")["t"].unique().tolist() == [1]
    assert cached_bytes(blocks(tmp_path / "loaded")) > size / 2


def test_a_full_disk_ends_what_is_kept_and_no_read(ckptfs, store, models, small_disk, tmp_path):
    _, url, _ = models
    expected = exported(ckptfs, f"{url}/sharded", tmp_path, "--no-cache")
    for options in ([], ["--cache-size", "1G"]):
        check_same(exported(ckptfs, f"{url}/sharded", tmp_path, *options), expected)
    store.put("large/model.safetensors", b"")
    store_tensor(store, "large/model.safetensors", 1, tmp_path, length=5 << 20)
    store.fault()
    refused = ckptfs("fetch", "--cache-size", "1G", "s3://bucket/large")
    assert refused.code == FAILED and "the disk of the cache lacks" in refused.stderr
    assert "ckptfs fetch --cache-dir DIR s3://bucket/large" in refused.stderr
    assert store.stats["bytes"] < FEW_BYTES


def test_a_model_that_the_cache_cannot_keep_is_refused_before_it_is_fetched(ckptfs, store, cache, tmp_path):
    # Bytes of another model may be evicted for it.
    for name in ("other", "too-large"):
        store_tensor(store, f"{name}/model.safetensors", 1, tmp_path, length=1 << 20)
    assert ckptfs("fetch", "--cache-size", "8M", "s3://bucket/other").code == DONE
    store.fault()
    refused = ckptfs("fetch", "--cache-size", "4M", "s3://bucket/too-large")
    assert refused.code == FAILED and "limited to 4M: nothing was fetched" in refused.stderr
    assert store.stats["bytes"] < FEW_BYTES
    command = refused.stderr.split("what to do: ")[1].split()
    assert command[:3] == ["ckptfs", "fetch", "--cache-size"] and command[4:] == ["s3://bucket/too-large"]
    package.configure(cache_size="4M")
    try:
        with pytest.raises(package.SafetensorError, match="nothing was fetched") as fault:
            package.fetch("s3://bucket/too-large")
        assert f'ckptfs.configure(cache_size="{command[3]}")' in fault.value.__notes__[0]
        package.configure(cache_size=command[3])
        package.fetch("s3://bucket/too-large")
    finally:
        package.configure(cache_size=None)
    shutil.rmtree(cache)
    assert ckptfs(*command[1:]).code == DONE
    # Bytes that are in the cache need no more room, whatever the limit is.
    assert ckptfs("fetch", "--cache-size", "1M", "s3://bucket/too-large").code == DONE
    no_cache = ckptfs("fetch", "--no-cache", "s3://bucket/too-large")
    assert no_cache.code == FAILED and "leave out --no-cache" in no_cache.stderr


def test_blocks_that_are_removed_during_a_fetch_are_missed_at_its_end(ckptfs, store, cache, tmp_path):
    tensors = {f"t{n}": torch.full((1 << 20,), float(n)) for n in range(12)}
    save_file(tensors, tmp_path / "t.safetensors")
    store.put("pruned/model.safetensors", (tmp_path / "t.safetensors").read_bytes())
    store.fault(path="/pruned/", bytes_per_second=8_000_000)
    command = [find_binary(), "fetch", "--connections", "1", "s3://bucket/pruned"]
    fetch = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while len(blocks(cache)) < 3:
        assert fetch.poll() is None
        time.sleep(0.02)
    assert ckptfs("cache", "prune").code == DONE
    store.fault()
    _, message = fetch.communicate(timeout=60)
    assert fetch.returncode == FAILED and "has not kept" in message and "ckptfs fetch s3://bucket/pruned" in message


def test_a_fetch_seldom_measures_the_disk_and_opens_each_block_once(store, cache, tmp_path):
    # More blocks than stay open.
    for n in range(300):
        store.put(f"many/{n}.txt", b"text")
    trace = tmp_path / "trace"
    strace = ["strace", "-f", "-qq", "-o", trace, "-e"]
    subprocess.run([*strace, "trace=statfs,fstatfs", find_binary(), "fetch", "s3://bucket/many"], check=True)
    # Once a second.
    measured = re.findall(r'statfs\("[^"]*/blocks"', trace.read_text())
    assert 0 < len(measured) < 100
    subprocess.run([*strace, "trace=openat", find_binary(), "fetch", "s3://bucket/many"], check=True)
    opened = re.findall(r'openat\(AT_FDCWD, "([^"]*/[0-9a-f]{32}/[0-9a-f]+-[0-9a-f]+-[0-9a-f]{16})"', trace.read_text())
    assert sorted(opened) == sorted(map(str, blocks(cache))) and len(opened) == 300


def test_a_read_only_cache_is_read(ckptfs, store, models, small_disk, tmp_path):
    _, url, _ = models
    expected = exported(ckptfs, f"{url}/dcp", tmp_path, "--cache-size", "1G")
    assert blocks(small_disk / "blocks")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    store.fault()
    check_same(exported(ckptfs, f"{url}/dcp", tmp_path), expected)
    assert store.stats["bytes"] < FEW_BYTES
    check_same(exported(ckptfs, f"{url}/sharded", tmp_path), exported(ckptfs, f"{url}/sharded", tmp_path, "--no-cache"))
    # Only from there is nothing removed.
    pruned = ckptfs("cache", "prune", f"{url}/dcp")
    assert pruned.code == FAILED and "0 blocks removed" in pruned.stdout
    assert "cannot be removed: Read-only file system" in pruned.stderr


def test_a_cache_that_is_removed_while_in_use_is_made_anew(mounts, ckptfs, store, models, cache, tmp_path):
    _, url, kinds = models
    expected = {kind: exported(ckptfs, f"{url}/{kind}", tmp_path, "--no-cache") for kind in kinds}
    mount = mounts(url)
    stop = threading.Event()

    def remove():
        while not stop.is_set():
            shutil.rmtree(cache, ignore_errors=True)
            time.sleep(0.01)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for kind in kinds:
            check_same(load_plain(mount / kind / "model.safetensors"), expected[kind])
            check_same(exported(ckptfs, f"{url}/{kind}", tmp_path), expected[kind])
    finally:
        stop.set()
        remover.join()
    check_same(exported(ckptfs, f"{url}/sharded", tmp_path), expected["sharded"])
    assert blocks(cache)


def test_a_mount_fills_the_cache_again_after_it_was_removed(mounts, models, cache):
    _, url, kinds = models
    mount = mounts(url)
    first, second, *_ = kinds
    load_plain(mount / first / "model.safetensors")
    assert blocks(cache)
    shutil.rmtree(cache)
    # The free space is measured once a second.
    time.sleep(1.5)
    load_plain(mount / second / "model.safetensors")
    assert blocks(cache)


def test_the_least_recently_used_blocks_make_room(ckptfs, store, cache, tmp_path):
    for n in range(6):
        store_tensor(store, f"evicted/{n}/model.safetensors", n, tmp_path)
    # A twentieth more than needed is removed.
    limit = 4 * 300_000 * 4
    options = ["--cache-size", str(limit)]
    for n in range(6):
        exported(ckptfs, f"s3://bucket/evicted/{n}", tmp_path, *options)
        # The first one is used again and again. The clock that marks uses is coarser than this test.
        for path in blocks(cache):
            if is_of(path, "evicted/0/"):
                os.utime(path, (time.time() + 3600, path.stat().st_mtime))
            else:
                os.utime(path, ns=(path.stat().st_mtime_ns, path.stat().st_mtime_ns))
    left = ckptfs("cache", "ls", "--json").json()
    assert sum(one["disk_bytes"] for one in left) <= limit
    names = {one["url"] for one in left}
    assert "s3://bucket/evicted/0/model.safetensors" in names and "s3://bucket/evicted/5/model.safetensors" in names
    assert "s3://bucket/evicted/1/model.safetensors" not in names


def test_evicted_blocks_take_no_space(mounts, store, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CKPTFS_CACHE_SIZE", "3M")
    for n in range(6):
        store_tensor(store, f"closed/{n}/model.safetensors", n, tmp_path)
    mount = mounts("s3://bucket/closed")
    for n in [*range(6), 0, 1]:
        assert (mount / str(n) / "model.safetensors").read_bytes()
    links = [os.readlink(path) for path in Path(f"/proc/{mount.pid}/fd").iterdir()]
    assert not [link for link in links if link.startswith(str(cache)) and link.endswith("(deleted)")]


def test_children_forked_during_loads_can_load(store, models, cache):
    _, url, _ = models
    code = """
import faulthandler, os, sys, threading, time
from pathlib import Path
from ckptfs.torch import load_file
url, is_over = sys.argv[1], False
load_file(url)
def load():
    while not is_over:
        load_file(url)
threads = [threading.Thread(target=load) for _ in range(4)]
[thread.start() for thread in threads]
for _ in range(60):
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(50)
        load_file(url, names="layers.0.*")
        os._exit(0)
    end = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        threads_of_child = Path(f"/proc/{child}/task").glob("*/syscall")
        assert time.monotonic() < end, [(str(path), path.read_text()) for path in threads_of_child]
        time.sleep(0.002)
is_over = True
[thread.join() for thread in threads]
"""
    subprocess.run([sys.executable, "-c", code, f"{url}/sharded"], check=True, timeout=300)


def is_of(block, part):
    return part in (block.parent / "object.json").read_text()


def test_a_clock_that_was_set_back_does_no_harm(ckptfs, store, models, cache, tmp_path):
    _, url, _ = models
    expected = exported(ckptfs, f"{url}/sharded", tmp_path)
    future = time.time() + 10 * 365 * 86_400
    for path in cache.glob("*/*"):
        os.utime(path, (future, future))
    store.fault()
    check_same(exported(ckptfs, f"{url}/sharded", tmp_path), expected)
    assert store.stats["bytes"] < FEW_BYTES
    assert "min ago" in ckptfs("cache", "ls").stdout
    assert ckptfs("cache", "prune", "--to", "0").code == DONE and not blocks(cache)


def test_the_cache_is_listed_and_pruned(ckptfs, store, models, cache, tmp_path):
    _, url, _ = models
    assert ckptfs("fetch", f"{url}/sharded", f"{url}/dcp").code == DONE
    listed = ckptfs("cache", "ls", "--json").json()
    urls = [one["url"] for one in listed]
    assert urls == sorted(urls) and f"{url}/sharded/model-00001-of-00003.safetensors" in urls
    assert all(one["cached_bytes"] <= one["bytes"] <= one["disk_bytes"] + one["bytes"] for one in listed)
    # In any form of the URL.
    assert ckptfs("cache", "prune", f"{url}/sharded/".replace("s3://", "S3:/")).code == DONE
    left = [one["url"] for one in ckptfs("cache", "ls", "--json").json()]
    assert left and all(one.startswith(f"{url}/dcp/") for one in left)
    assert ckptfs("cache", "prune").code == DONE
    assert ckptfs("cache", "ls", "--json").json() == [] and list(cache.iterdir()) == []


def test_no_other_user_can_read_it_and_one_that_others_can_write_to_is_not_used(ckptfs, store, models, cache, tmp_path):
    _, url, _ = models
    cache.mkdir(mode=0o755)
    expected = exported(ckptfs, f"{url}/dcp", tmp_path)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in cache.rglob("*"))
    shutil.rmtree(cache)
    cache.mkdir()
    cache.chmod(0o777)
    check_same(exported(ckptfs, f"{url}/dcp", tmp_path), expected)
    assert list(cache.iterdir()) == []
    refused = ckptfs("cache", "ls")
    assert refused.code == FAILED and "others may write to it" in refused.stderr


def test_loads_use_the_cache_or_pass_it_by(store, models, cache):
    folder, url, _ = models
    expected = load_file(folder / "sharded", backend="pread")
    size = sum(tensor.nbytes for tensor in expected.values())
    # A load past the cache keeps no tensor.
    check_same(load_file(f"{url}/sharded", cache=False), expected)
    assert package.last_report().remote >= size and package.last_report().disk_cached == 0
    assert sum(path.stat().st_size for path in blocks(cache)) < size / 2
    check_same(load_file(f"{url}/sharded"), expected)
    store.fault()
    check_same(load_file(f"{url}/sharded"), expected)
    report = package.last_report()
    assert report.disk_cached >= size and report.remote == 0 and store.stats["bytes"] == 0
    # One flipped byte costs one block, and the answers without bytes of the model.
    path = max(blocks(cache), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    other = subprocess.run(
        [sys.executable, "-c", "import sys; from ckptfs.torch import load_file; load_file(sys.argv[1])", f"{url}/sharded"],
        check=True, timeout=60,
    )  # fmt: skip
    assert 0 < store.stats["bytes"] <= path.stat().st_size + 4096, other


def test_the_package_fetches_ahead(store, models, cache, capsys):
    folder, url, _ = models
    report = package.fetch(f"{url}/sharded", progress=True)
    assert report.bytes > FEW_BYTES and report.cached_bytes < report.bytes and "100%" in capsys.readouterr().err
    assert package.fetch(f"{url}/sharded") == report._replace(cached_bytes=report.bytes)
    package.configure(offline=True)
    try:
        store.fault(is_down=True)
        check_same(load_file(f"{url}/sharded"), load_file(folder / "sharded", backend="pread"))
        with pytest.raises(package.SafetensorError, match="--offline sends no request"):
            load_file(f"{url}/dcp")
    finally:
        package.configure(offline=None)
    with pytest.raises(package.SafetensorError, match="on this machine already"):
        package.fetch(folder)
