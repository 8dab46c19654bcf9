"""`status`, metrics and progress show the requests to a store, their bytes, retries and rate, and the hit ratio."""

import re
import urllib.request

import ckptfs as package
import pytest
from ckptfs.torch import load_file

from store_kinds import free_port


@pytest.fixture
def partly_cached(store, models, cache):
    """The URL of a model with one of three shards in the cache on disk. Every third GET fails."""
    _, url, _ = models
    package.fetch(f"{url}/sharded/model-00001-of-00003.safetensors")
    store.fault(path="/models/sharded/", method="GET", status=503, status_every=3, retry_after="0")
    return f"{url}/sharded"


def metrics_at(port):
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20).read().decode()
    assert page.endswith("# EOF\n")
    return {name: float(value) for name, value in re.findall(r"^ckptfs_store_(\w+)\{.*\} (\S+)$", page, re.MULTILINE)}


def test_a_mount_shows_its_requests(ckptfs, mounts, partly_cached):
    port = free_port()
    mount = mounts(partly_cached, "--metrics", f"127.0.0.1:{port}")
    (mount / "model.safetensors").read_bytes()

    def read_all():
        """The statistics, metrics and status of one moment: no request was sent between them."""
        while True:
            stats = mount.stats()["store"]
            metrics, shown = metrics_at(port), " ".join(ckptfs("status").stdout.split())
            if stats["in_flight"] == 0 and stats["requests"] == mount.stats()["store"]["requests"]:
                return stats, metrics, shown

    stats, metrics, shown = read_all()
    for name in ("requests", "bytes", "cached_bytes", "retries"):
        assert metrics[f"{name}_total"] == stats[name] > 0, (name, metrics, stats)
    assert metrics["requests_in_flight"] == 0 and "bytes_per_second" in metrics
    ratio = stats["cached_bytes"] / (stats["cached_bytes"] + stats["bytes"])
    assert metrics["hit_ratio"] == pytest.approx(ratio) and 0.1 < ratio < 0.9
    for words in (f"{stats['requests']} requests, {stats['retries']} sent again", f"from the cache on disk ({ratio:.0%})"):
        assert words in shown, shown


@pytest.mark.parametrize("transfer", [package.fetch, load_file])
def test_a_progress_bar_shows_the_requests(store, partly_cached, capsys, transfer):
    transfer(partly_cached, progress=True)
    shown = capsys.readouterr().err
    requests, retries, ratio = map(int, re.search(r"GB/s  (\d+) requests, (\d+) retries  (\d+)% cached$", shown.strip()).groups())
    stats = store.stats
    # A load opens the checkpoint before its bar begins.
    opening = 0 if transfer is package.fetch else 4
    assert stats["requests"] - opening <= requests <= stats["requests"] and retries == stats["faulted"] > 0 and 10 < ratio < 90, (shown, stats)
