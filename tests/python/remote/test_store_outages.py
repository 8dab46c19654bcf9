"""A mount whose server is away: errors after a bounded time for all readers together, and no wait for what needs no bytes."""

import os
import socket
import subprocess
import threading
import time

import pytest
import torch
from safetensors.torch import load_file as load_plain

from compare import check_same
from mounts import PATIENCE, is_mounted, until
from program import FAILED, find_binary

# The outage that is waited for, in seconds.
OUTAGE = 4

READERS = 48


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setenv("CKPTFS_STALL_TIMEOUT", "2")
    monkeypatch.setenv("CKPTFS_OUTAGE_TIMEOUT", str(OUTAGE))
    # The cache on disk would have the bytes.
    monkeypatch.setenv("CKPTFS_NO_CACHE", "1")


@pytest.fixture
def many(store, tmp_path):
    """A directory with a model for each reader, of 2 MB each."""
    folder = tmp_path / "many"
    for number in range(READERS):
        (folder / f"{number}").mkdir(parents=True)
        torch.save({"w": torch.randn(500_000)}, folder / f"{number}/pytorch_model.bin")
    return folder, store.upload(folder, "many")


def read_all(paths):
    """Reads each file by a thread of its own. Returns what came of each, and the time it took."""
    outcomes = [None] * len(paths)

    def read(number):
        began = time.monotonic()
        try:
            outcome = len(paths[number].read_bytes())
        except OSError as fault:
            outcome = fault
        outcomes[number] = outcome, time.monotonic() - began

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(paths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_an_address_that_never_answers_is_given_up_soon(ckptfs, store, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        # The first look asks twice, for an object and for a listing.
        failed = ckptfs("ls", "s3://bucket/models", "--outage-timeout", "3")
        assert failed.code == FAILED and "gave nothing for 3 s" in failed.stderr, failed
        assert time.monotonic() - began < 6


# A server that refuses, and one whose answers stall: to these requests it says nothing more.
@pytest.mark.parametrize("faults", [
    {"is_down": True}, {"path": "/many/", "method": "GET", "stall_after": 0, "stall_every": 1},
], ids=["refuses", "stalls"])  # fmt: skip
def test_many_readers_wait_for_one_outage_together(mounts, store, many, impatient, monkeypatch, faults):
    folder, url = many
    # Long enough that the delays of a busy machine are shorter.
    outage = 20
    monkeypatch.setenv("CKPTFS_OUTAGE_TIMEOUT", str(outage))
    # An answer to another request would end the outage.
    monkeypatch.setenv("CKPTFS_POLL_INTERVAL", "600")
    mount = mounts(url)
    paths = [mount / f"{number}/model.safetensors" for number in range(READERS)]
    for path in paths:
        path.stat()
    store.fault(**faults)
    outcomes = read_all(paths)
    assert all(isinstance(outcome, OSError) for outcome, _ in outcomes), outcomes
    assert max(took for _, took in outcomes) < 2 * outage
    store.fault()
    # Where requests take long to fail, the readers of the next seconds fail with the last one.
    until("it is read again", lambda: not isinstance(read_all(paths[:1])[0][0], OSError))
    for number, (outcome, _) in enumerate(read_all(paths)):
        assert outcome == paths[number].stat().st_size, (number, outcome)
    check_same(load_plain(paths[7]), torch.load(folder / "7/pytorch_model.bin"))


def test_what_needs_no_bytes_is_answered_during_an_outage(mounts, store, many, impatient):
    _, url = many
    mount = mounts(url)
    names = sorted(os.listdir(mount / "3"))
    size = (mount / "3/model.safetensors").stat().st_size
    store.fault(is_down=True)
    reader = threading.Thread(target=lambda: read_all([mount / "3/model.safetensors"]))
    reader.start()
    # By now each listing is asked for again.
    time.sleep(OUTAGE + 2)
    reader.join()

    def outcome_of(act):
        try:
            return act()
        except OSError as fault:
            return fault

    for act, expected in [
        (lambda: (mount / "3/model.safetensors").stat().st_size, size),
        (lambda: sorted(os.listdir(mount / "3")), names),
        (lambda: mount.stats()["store"]["retries"] > 0, True),
        (lambda: subprocess.run([find_binary(), "status"], capture_output=True, timeout=PATIENCE).returncode, 0),
    ]:
        began = time.monotonic()
        outcome = outcome_of(act)
        # A name that must be asked for is an error, and no wrong answer.
        assert outcome == expected or isinstance(outcome, OSError), outcome
        assert time.monotonic() - began < OUTAGE + 60, outcome
    store.fault()
    until("it is listed again", lambda: outcome_of(lambda: sorted(os.listdir(mount / "3"))) == names)


def test_an_outage_before_the_first_look_hides_nothing_later(mounts, store, many, impatient):
    _, url = many
    mount = mounts(url)
    store.fault(path="/many/9/", is_down=True)
    for _ in range(2):
        try:
            assert "model.safetensors" not in os.listdir(mount / "9")
        except OSError:
            pass
    store.fault()
    until("it is shown", lambda: "model.safetensors" in os.listdir(mount / "9"))
    assert (mount / "9/model.safetensors").read_bytes()


def test_an_outage_is_logged_once_and_so_is_its_end(mounts, store, many, impatient, monkeypatch):
    _, url = many
    # A pause as long as this between two failures would make two outages of one.
    monkeypatch.setenv("CKPTFS_OUTAGE_TIMEOUT", "20")
    # Requests are refused at once. On a busy machine, a slow answer is not to count as silence.
    monkeypatch.setenv("CKPTFS_STALL_TIMEOUT", "60")
    mount = mounts(url)
    paths = [mount / f"{number}/model.safetensors" for number in range(READERS)]
    for path in paths:
        path.stat()
    store.fault(is_down=True)
    read_all(paths)
    read_all(paths[:8])
    store.fault()
    read_all(paths)
    lines = [line for line in mount.logged().splitlines() if " WARN " in line or " ERROR " in line]
    # On a busy machine one outage may become a few, but never one for each reader.
    assert 2 <= len(lines) <= READERS // 4, lines
    assert "s3://bucket: gave nothing for" in lines[0], lines
    assert "s3://bucket: answers again, after" in lines[-1], lines


def test_status_shows_what_is_in_flight_and_how_fast(ckptfs, mounts, store, many, monkeypatch):
    monkeypatch.setenv("CKPTFS_NO_CACHE", "1")
    _, url = many
    mount = mounts(url)
    store.fault(path="/many/", method="GET", bytes_per_second=500_000)
    outcomes = []
    paths = [mount / f"{number}/model.safetensors" for number in range(4)]
    reader = threading.Thread(target=lambda: outcomes.extend(read_all(paths)))
    reader.start()
    seen = []

    def is_busy():
        stats = mount.stats()["store"]
        seen.append((stats["in_flight"], stats["bytes_per_second"]))
        text = ckptfs("status").stdout
        return stats["in_flight"] > 0 and stats["bytes_per_second"] > 0 and "in flight" in text and "B/s" in text

    until("requests are in flight", is_busy)
    reader.join()
    store.fault()
    assert [outcome for outcome, _ in outcomes] == [path.stat().st_size for path in paths], outcomes
    until("none is in flight", lambda: mount.stats()["store"]["in_flight"] == 0)
    assert mount.stats()["store"]["bytes"] >= 4 * 2_000_000, seen


def test_a_mount_whose_server_has_gone_is_unmounted_at_once(mounts, store, many, monkeypatch):
    _, url = many
    monkeypatch.setenv("CKPTFS_POLL_INTERVAL", "1")
    # Much longer than an unmount takes on a busy machine.
    monkeypatch.setenv("CKPTFS_OUTAGE_TIMEOUT", "120")
    mount = mounts(url)
    paths = [mount / f"{number}/model.safetensors" for number in range(4)]
    for path in paths:
        path.stat()
    os.listdir(mount.point)
    store.fault(path="/many/", method="GET", bytes_per_second=500_000)
    reader = threading.Thread(target=read_all, args=(paths,))
    reader.start()
    until("reads are in flight", lambda: mount.stats()["store"]["in_flight"] > 0)
    # The attributes of the root that the kernel and the mount keep have expired by now.
    time.sleep(2)
    store.fault(is_down=True)
    began = time.monotonic()
    busy = subprocess.run([find_binary(), "unmount", mount.point], capture_output=True, text=True, timeout=PATIENCE)
    assert busy.returncode == FAILED and "in use: a program has a file" in busy.stderr, busy
    assert time.monotonic() - began < 60
    store.fault()
    reader.join()
    store.fault(is_down=True)
    mount.unmount()
    assert not is_mounted(mount.point)


def test_a_stat_of_the_root_of_a_mount_needs_no_request(mounts, store, many, monkeypatch):
    _, url = many
    monkeypatch.setenv("CKPTFS_POLL_INTERVAL", "1")
    # Much longer than a stat takes on a busy machine.
    monkeypatch.setenv("CKPTFS_OUTAGE_TIMEOUT", "120")
    mount = mounts(url)
    os.listdir(mount.point)
    time.sleep(2)
    store.fault(is_down=True)
    for _ in range(3):
        began = time.monotonic()
        assert mount.point.stat().st_mode and mount.stats()["pid"] == mount.pid
        assert time.monotonic() - began < 60
        time.sleep(1.1)
    mount.unmount()
