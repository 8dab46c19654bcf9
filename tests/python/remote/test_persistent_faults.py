"""Loads and mounts while a server dies and returns, and while answers fail or break all the time. Bytes are right."""

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


def load_directly(mounts, url):
    return load_file(url)


def load_through_mount(mounts, url):
    mount = mounts(url)
    # Not mapped: a page fault would hold the lock of the interpreter, which the thread that sets faults needs.
    return load((mount / "model.safetensors").read_bytes())


both_readers = pytest.mark.parametrize("read", [load_directly, load_through_mount])


@both_readers
@pytest.mark.parametrize("status", [500, 503])
def test_every_tenth_request_fails(mounts, store, models, large, read, status):
    folder, url, _ = models
    store.fault(status=status, status_every=10, retry_after="0" if status == 503 else "")
    for _ in range(2):
        check_same(read(mounts, large[0]), large[1])
        check_same(read(mounts, f"{url}/sharded"), load_file(folder / "sharded", backend="pread"))
    stats = store.stats
    assert stats["faulted"] == stats["requests"] // 10 > 0


@both_readers
def test_a_body_that_is_cut_at_each_64_kib_is_resumed(mounts, store, tmp_path, read):
    # One whole part.
    tensors = {"t": torch.randn(2, 1 << 20)}
    (tmp_path / "cut").mkdir()
    save_file(tensors, tmp_path / "cut/model.safetensors")
    url = store.upload(tmp_path / "cut", "cut")
    store.fault(path="/cut/", method="GET", cut_after=CUT_BYTES, cut_every=1)
    check_same(read(mounts, url), tensors)
    stats = store.stats
    size = tensors["t"].nbytes
    # Each request resumes where the one before it broke: nothing is sent twice.
    assert stats["faulted"] >= size // CUT_BYTES - 1 and stats["bytes"] < 1.05 * size


@both_readers
def test_the_server_dies_while_it_is_read_and_returns(mounts, store, large, read):
    url, tensors = large
    # The load takes some seconds.
    speed = {"path": "/weather/", "bytes_per_second": 3_000_000}
    store.fault(**speed)
    results = []
    reader = threading.Thread(target=lambda: results.append(read(mounts, url)))
    reader.start()
    until("parts are under way", lambda: store.stats["bytes"] > 4_000_000)
    sent = store.stats["bytes"]
    store.fault(is_down=True)
    time.sleep(2)
    failed = store.stats["faulted"]
    store.fault(**speed)
    reader.join()
    assert sent < sum(tensor.nbytes for tensor in tensors.values()) and failed > 0
    check_same(results[0], tensors)


@both_readers
def test_the_version_changes_between_two_parts(mounts, store, large, read):
    url, tensors = large
    # The header and a part come before the change.
    store.fault(path="/weather/", method="GET", etag_from=3)
    through_mount = read is load_through_mount
    says = "Stale|Input/output" if through_mount else rf"{url}/model.safetensors: cannot read bytes \d+ to \d+: changed in its store"
    with pytest.raises(OSError if through_mount else ckptfs.SafetensorError, match=says):
        read(mounts, url)
    assert store.stats["bytes"] < sum(tensor.nbytes for tensor in tensors.values())
    store.fault()
    check_same(read(mounts, url), tensors)
