"""Loads and mounts in bad weather: servers that die and return, and answers that fail or break all the time. Bytes are right."""

import threading
import time

import ckptfs
import pytest
import torch
from ckptfs.torch import load_file
from safetensors.torch import load, save_file

from compare import check_same
from mounts import until

CUT_BYTES = 64 << 10


@pytest.fixture(scope="module")
def large(server, tmp_path_factory):
    """The URL of a model of some parts, and its tensors."""
    folder = tmp_path_factory.mktemp("large")
    rng = torch.Generator().manual_seed(1)
    # Three parts and more.
    shapes = {"t": (6, 1 << 20)} | {f"u{n}": (700, 1000 + n) for n in range(4)}
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return server.upload(folder, "weather"), tensors


def by_load(mounts, url):
    return load_file(url)


def by_mount(mounts, url):
    mount = mounts(url)
    # Not mapped: a page fault would hold the lock of the interpreter, and with it the thread that changes the weather.
    return load((mount / "model.safetensors").read_bytes())


every_way = pytest.mark.parametrize("read", [by_load, by_mount])


@every_way
@pytest.mark.parametrize("status", [500, 503])
def test_every_tenth_request_fails(mounts, store, models, large, read, status):
    folder, url, _ = models
    store.fault(status=status, status_every=10, retry_after="0" if status == 503 else "")
    for _ in range(2):
        check_same(read(mounts, large[0]), large[1])
        check_same(read(mounts, f"{url}/sharded"), load_file(folder / "sharded", backend="pread"))
    stats = store.stats
    assert stats["faulted"] == stats["requests"] // 10 > 0


@every_way
def test_a_body_is_cut_at_each_64_kib_of_a_part(mounts, store, tmp_path, read):
    # One whole part.
    tensors = {"t": torch.randn(2, 1 << 20)}
    (tmp_path / "cut").mkdir()
    save_file(tensors, tmp_path / "cut/model.safetensors")
    url = store.upload(tmp_path / "cut", "cut")
    store.fault(path="/cut/", method="GET", cut_after=CUT_BYTES, cut_every=1)
    check_same(read(mounts, url), tensors)
    stats = store.stats
    size = tensors["t"].nbytes
    # Each request goes on where the one before it broke: nothing is sent twice.
    assert stats["faulted"] >= size // CUT_BYTES - 1 and stats["bytes"] < 1.05 * size


@every_way
def test_the_server_dies_while_it_is_read_and_returns(mounts, store, large, read):
    url, tensors = large
    # Some seconds of bytes.
    speed = {"path": "/weather/", "bytes_per_second": 3_000_000}
    store.fault(**speed)
    found = []
    reader = threading.Thread(target=lambda: found.append(read(mounts, url)))
    reader.start()
    until("parts are under way", lambda: store.stats["bytes"] > 4_000_000)
    sent = store.stats["bytes"]
    store.fault(is_down=True)
    time.sleep(2)
    failed = store.stats["faulted"]
    store.fault(**speed)
    reader.join()
    assert sent < sum(tensor.nbytes for tensor in tensors.values()) and failed > 0
    check_same(found[0], tensors)


@every_way
def test_the_version_changes_between_two_parts(mounts, store, large, read):
    url, tensors = large
    # The header and a part come before.
    store.fault(path="/weather/", method="GET", etag_from=3)
    with pytest.raises((ckptfs.SafetensorError, OSError), match="changed|Stale|Input/output"):
        read(mounts, url)
    assert store.stats["bytes"] < sum(tensor.nbytes for tensor in tensors.values())
    store.fault()
    check_same(read(mounts, url), tensors)
