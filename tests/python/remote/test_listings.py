"""Requests that list directories and open shards: their number, and how many are in flight at once."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save

import store_kinds
from mounts import until
from program import DONE
from samples import write_shards

SHARD_COUNT = 40


@pytest.fixture(scope="module")
def gcs_server():
    # Its pages are short, and it answers fast.
    store = store_kinds.Gcs()
    yield store
    store.end()


@pytest.fixture
def gcs(gcs_server, monkeypatch):
    for name, value in gcs_server.environment.items():
        monkeypatch.setenv(name, value)
    gcs_server.fault()
    yield gcs_server
    gcs_server.fault()


def put_many(store, prefix, count):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.put(f"{prefix}/{n:05}.txt", b"x"), range(count)))


def test_a_page_that_fails_is_asked_for_again_by_itself(ckptfs, mounts, gcs):
    put_many(gcs, "paged", 1000)
    # Ten pages, of which each second answer is a failure.
    gcs.fault(path="/bucket", method="GET", status=503, status_every=2, retry_after="0")
    listing = ckptfs("ls", "--json", f"{gcs.url}/paged")
    stats = gcs.stats
    assert listing.code == DONE, listing.stderr
    assert stats["faulted"] >= 9
    # From the first page on again, it would be hundreds.
    assert stats["requests"] <= 30
    gcs.fault()
    assert len(os.listdir(mounts(f"{gcs.url}/paged").point)) == 1000


def test_shards_are_opened_with_two_requests_at_most_and_many_at_once(ckptfs, gcs, tmp_path):
    write_shards(tmp_path / "many", 1, SHARD_COUNT, 1, 8)
    url = gcs.upload(tmp_path / "many", "shards")
    gcs.fault(latency_ms=30)
    assert ckptfs("ls", url).code == DONE
    stats = gcs.stats
    assert stats["requests"] <= 2 * SHARD_COUNT
    assert stats["most_at_once"] >= 4


def test_the_poll_interval_is_an_option(mounts, gcs, monkeypatch):
    gcs.put("polled/a.txt", b"x")
    monkeypatch.setenv("CKPTFS_POLL_INTERVAL", "3600")
    seldom = mounts(f"{gcs.url}/polled")
    monkeypatch.setenv("CKPTFS_POLL_INTERVAL", "1")
    often = mounts(f"{gcs.url}/polled")
    for mount in (seldom, often):
        assert os.listdir(mount.point) == ["a.txt"]
    gcs.put("polled/b.txt", b"x")
    until("the new name is shown", lambda: sorted(os.listdir(often.point)) == ["a.txt", "b.txt"])
    assert os.listdir(seldom.point) == ["a.txt"]


@pytest.mark.skipif(not store_kinds.is_installed("s3s-fs"), reason="s3s-fs is not installed")
def test_versions_that_are_times_are_noted_once(mounts, tmp_path_factory, monkeypatch):
    # It states no ETags in its listings.
    store = store_kinds.make("s3s-fs", tmp_path_factory.mktemp("store"))
    try:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        for name in ("a", "b"):
            store.put(f"{name}.safetensors", save({name: torch.ones(3)}))
        mount = mounts(store.url)
        assert [(mount / f"{name}.safetensors").stat().st_size > 0 for name in ("a", "b")] == [True, True]
        until("the note is there", lambda: "a change within one second cannot be seen" in mount.logged())
        assert mount.logged().count("a change within one second cannot be seen") == 1
    finally:
        store.end()
