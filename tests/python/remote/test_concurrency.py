"""The number of requests in flight: it grows while more requests bring more bytes, and is halved when the store is busy."""

import json
import time

import pytest
from ckptfs.torch import load_file

from stores import ServedFolder

PART_BYTES = 8 << 20

# Requests mostly wait, so more of them at once bring more bytes. Those of growth wait longest: beside other tests, the
# processors would otherwise be the limit.
LATENCY_MS, GROWTH_LATENCY_MS = 400, 1600

# The limits of requests in flight: at first, and for a store that is never busy.
INITIAL_LIMIT, MAX_LIMIT = 32, 64


@pytest.fixture(scope="module")
def folder_store(tmp_path_factory):
    store = ServedFolder(tmp_path_factory.mktemp("folder"))
    yield store
    store.end()


@pytest.fixture
def parts(folder_store, monkeypatch):
    """A store, and a function that writes a model of some parts and returns its URL."""
    for name, value in folder_store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CKPTFS_NO_CACHE", "1")

    def write(name, count):
        size = count * PART_BYTES
        header = json.dumps({"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        path = folder_store.folder / f"bucket/{name}/model.safetensors"
        path.parent.mkdir()
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            # A hole takes no room.
            file.truncate(8 + len(header) + size)
        return f"s3://bucket/{name}"

    yield folder_store, write
    folder_store.fault()


def load_concurrency(store, url, latency_ms=LATENCY_MS, **faults):
    """Loads a model, and returns the largest number of requests in flight."""
    store.fault(latency_ms=latency_ms, **faults)
    load_file(url)
    return store.stats["most_at_once"]


def test_a_busy_store_halves_the_requests_in_flight_and_they_grow_again(parts):
    store, write = parts
    url, short_url = write("busy", 80), write("short", 60)
    calm = load_concurrency(store, url, GROWTH_LATENCY_MS)
    assert calm >= INITIAL_LIMIT
    # One of many requests is refused: the others go on, and the next load begins with half the limit.
    refusals = {"path": "/busy/", "method": "GET", "status": 503, "status_every": 60, "retry_after": "0"}
    before = load_concurrency(store, url, GROWTH_LATENCY_MS, **refusals)
    assert store.stats["faulted"] == 1
    halved = load_concurrency(store, short_url, GROWTH_LATENCY_MS)
    # The limit may have grown by half after the largest number was seen.
    assert halved <= max(calm, before) * 1.5 / 2 + 1, (calm, before, halved)
    # The limit does not grow for two seconds.
    time.sleep(2)
    grown = [halved]
    while grown[-1] < halved * 1.4 and len(grown) < 10:
        grown.append(load_concurrency(store, url, GROWTH_LATENCY_MS))
    assert halved * 1.4 <= grown[-1] <= MAX_LIMIT, (calm, before, grown)


def test_a_stated_number_of_connections_is_kept(parts, monkeypatch):
    store, write = parts
    url = write("stated", 12)
    monkeypatch.setenv("CKPTFS_CONNECTIONS", "5")
    assert load_concurrency(store, url) == 5
    assert load_concurrency(store, url, status=503, status_every=4, retry_after="0") == 5
