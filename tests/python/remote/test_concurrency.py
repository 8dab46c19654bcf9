"""The number of requests in flight: it grows while more bring more bytes, and is halved when the store asks for less."""

import json
import time

import pytest
from ckptfs.torch import load_file

from stores import ServedFolder

PART_BYTES = 8 << 20

# What bounds a request is the wait for it: more at once bring more bytes.
LATENCY = {"latency_ms": 400}

# The first limit, and that of a store that asks for nothing.
FIRST, MOST = 16, 64


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


def most_at_once(store, url, **faults):
    """Loads a model, and returns how many requests were in flight at once."""
    store.fault(**LATENCY, **faults)
    load_file(url)
    return store.stats["most_at_once"]


def test_a_store_that_asks_for_less_halves_the_requests_in_flight_and_they_grow_again(parts):
    store, write = parts
    url, short_url = write("busy", 40), write("short", 20)
    calm = most_at_once(store, url)
    assert calm >= FIRST
    # One refusal of many: the requests in flight go on, and the next load begins with half.
    before = most_at_once(store, url, path="/busy/", method="GET", status=503, status_every=30, retry_after="0")
    assert store.stats["faulted"] == 1
    halved = most_at_once(store, short_url)
    # The limit may have grown by half after most requests were seen.
    assert halved <= max(calm, before) * 1.5 / 2 + 1, (calm, before, halved)
    # For two seconds it does not grow.
    time.sleep(2)
    again = [halved]
    while again[-1] < halved * 1.4 and len(again) < 10:
        again.append(most_at_once(store, url))
    assert halved * 1.4 <= again[-1] <= MOST, (calm, before, again)


def test_a_stated_number_of_connections_is_kept(parts, monkeypatch):
    store, write = parts
    url = write("stated", 12)
    monkeypatch.setenv("CKPTFS_CONNECTIONS", "5")
    assert [most_at_once(store, url), most_at_once(store, url, status=503, status_every=4, retry_after="0")] == [5, 5]
