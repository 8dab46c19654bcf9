"""Bad weather: servers that are slow, overloaded, gone or wrong. Bytes are right, or an error names the URL and a remedy."""

import json
import os
import re
import shutil
import subprocess
import threading
import time

import pytest
import torch
from ckptfs.torch import load_file
from safetensors.torch import load_file as load_plain
from safetensors.torch import save_file

from compare import check_same
from http_server import serve_with
from program import FAILED, REFUSED, find_binary
from stores import BUCKET, SECRET, ServedFolder, s3_environment

# What a server may do without harm, to requests for objects.
WEATHER = {
    "overloaded": {"status": 503, "status_every": 3, "retry_after": "0"},
    "failing": {"status": 500, "status_every": 2},
    "limiting": {"status": 429, "status_every": 4, "retry_after": "1"},
    "cutting": {"cut_after": 40_000, "cut_every": 3},
    "cutting at the first byte": {"cut_after": 0, "cut_every": 2},
    "stalling": {"stall_after": 70_000, "stall_every": 5},
    "far away": {"latency_ms": 60, "bytes_per_second": 20_000_000},
}


@pytest.fixture
def impatient(monkeypatch):
    """Stalls and outages are over soon. For the command: this process has read its options by now."""
    monkeypatch.setenv("CKPTFS_STALL_TIMEOUT", "1")
    monkeypatch.setenv("CKPTFS_OUTAGE_TIMEOUT", "4")


@pytest.mark.parametrize("weather", WEATHER)
def test_bytes_are_right_whatever_the_weather(ckptfs, store, models, tmp_path, impatient, monkeypatch, weather):
    folder, url, _ = models
    # On a busy machine, an answer may take longer than the outage of the others.
    monkeypatch.setenv("CKPTFS_OUTAGE_TIMEOUT", "60")
    store.fault(path="/models/sharded", method="GET", **WEATHER[weather])
    out = ckptfs.export(f"{url}/sharded", tmp_path / "out.safetensors")
    stats = store.stats
    store.fault()
    assert weather == "far away" or stats["faulted"] > 0
    check_same(load_plain(out), load_file(folder / "sharded"))


def test_a_server_that_returns_is_waited_for(ckptfs, store, models, tmp_path):
    folder, url, _ = models
    store.fault(is_down=True)
    threading.Timer(2, store.fault).start()
    out = ckptfs.export(f"{url}/sharded", tmp_path / "out.safetensors")
    check_same(load_plain(out), load_file(folder / "sharded"))


def test_a_server_that_stays_away_is_an_error_after_a_bounded_time(ckptfs, store, models, impatient):
    _, url, _ = models
    store.fault(is_down=True)
    started = time.monotonic()
    gone = ckptfs("inspect", f"{url}/sharded")
    assert gone.code == FAILED and time.monotonic() - started < 12
    assert url in gone.stderr and "gave nothing for" in gone.stderr
    assert "what to do: check the URL, the endpoint and the network: nothing has answered" in gone.stderr


def test_a_mount_lives_through_an_outage(mounts, store, models, impatient):
    folder, url, _ = models
    mount = mounts(f"{url}/pickled")
    path = mount / "model.safetensors"
    size = path.stat().st_size
    store.fault(is_down=True)
    with pytest.raises(OSError):
        path.read_bytes()
    store.fault()
    check_same(load_plain(path), load_file(folder / "pickled"))
    assert path.stat().st_size == size
    stats = mount.stats()["store"]
    assert stats["requests"] > 0 and stats["retries"] > 0 and stats["bytes"] >= size // 2


@pytest.mark.parametrize("ignores_conditions", [False, True])
def test_parts_of_two_versions_are_never_mixed(ckptfs, store, models, tmp_path, ignores_conditions):
    _, url, _ = models
    out = tmp_path / "out.safetensors"
    ignored = {"ignore": ["if-match"]} if ignores_conditions else {}
    store.fault(path="/models/sharded/model-00002", method="GET", etag_from=3, **ignored)
    changed = ckptfs("export", f"{url}/sharded", out)
    assert changed.code == REFUSED and "changed" in changed.stderr and "model-00002" in changed.stderr
    assert not out.exists()


def test_a_slow_answer_may_take_longer_than_the_time_limits(ckptfs, store, tmp_path, impatient, monkeypatch):
    # The time limits are for silence. This body arrives steadily for 8 s, twice the longer limit.
    monkeypatch.setenv("CKPTFS_STALL_TIMEOUT", "2")
    tensors = {"t": torch.arange(800_000, dtype=torch.int32)}
    save_file(tensors, tmp_path / "model.safetensors")
    store.put("slow/model.safetensors", (tmp_path / "model.safetensors").read_bytes())
    store.fault(path="/slow/", method="GET", bytes_per_second=400_000)
    began = time.monotonic()
    out = ckptfs.export("s3://bucket/slow/model.safetensors", tmp_path / "out.safetensors")
    took, stats = time.monotonic() - began, store.stats
    check_same(load_plain(out), tensors)
    # None was given up and sent again.
    assert took > 7 and stats["bytes"] < 1.2 * tensors["t"].nbytes, (took, stats)


# Faults that never end, each with the reason that the error states.
PERSISTENT_FAULTS = {
    "failing": ({"status": 500, "status_every": 1}, "gave nothing for"),
    "cutting": ({"cut_after": 0, "cut_every": 1}, "gave nothing for"),
    "stalling": ({"stall_after": 0, "stall_every": 1}, "gave nothing for"),
    "denied": ({"status": 403, "status_every": 1}, "denies it"),
    "changed": ({"etag_from": 1}, "changed in its store"),
    "other range": ({"shift_range": 1}, "Requested"),
    "no ranges": ({"ignore": ["range"]}, "does not answer ranges"),
}


@pytest.mark.parametrize("fault", PERSISTENT_FAULTS)
def test_an_error_names_the_url_the_request_and_a_remedy(ckptfs, mounts, store, models, impatient, fault):
    _, url, _ = models
    faults, says = PERSISTENT_FAULTS[fault]
    name = "model-00001-of-00003.safetensors"
    url = f"{url}/sharded/{name}"
    mount = mounts(url)
    expected = rf"{url}: cannot read bytes \d+ to \d+: .*{says}"
    store.fault(path=f"/sharded/{name}", method="GET", **faults)
    failed = ckptfs("verify", url)
    assert failed.code in (FAILED, REFUSED) and re.search(expected, failed.stderr), failed.stderr
    assert "what to do: " in failed.stderr
    with pytest.raises(OSError):
        (mount / name).read_bytes()
    errors = mount.stats()["last_errors"]
    assert errors and all(re.search(expected, error["message"]) and error["remedy"] for error in errors), errors


def test_wrong_answers_are_refused(ckptfs, store, models, tmp_path, impatient):
    _, url, _ = models
    out = tmp_path / "out.safetensors"
    for faults, says in [
        ({"shift_range": 1}, "Requested"),
        ({"ignore": ["range"]}, "does not answer ranges"),
        ({"shorten_by": 100}, "s3://bucket/models/sharded"),
        ({"remove": ["etag", "last-modified"]}, "s3://bucket/models/sharded"),
    ]:
        store.fault(path="/models/sharded/model", method="GET", **faults)
        wrong = ckptfs("export", f"{url}/sharded", out)
        assert wrong.code in (FAILED, REFUSED) and says in wrong.stderr and "what to do: " in wrong.stderr, (faults, wrong)
        assert not out.exists()


def test_a_redirect_to_another_host_has_no_credentials(ckptfs, store, models, tmp_path):
    folder, url, _ = models
    name = "sharded/model-00001-of-00003.safetensors"
    (tmp_path / "other").mkdir()
    # It asks for no credentials.
    other = ServedFolder(tmp_path / "other")
    try:
        shutil.copytree(folder, other.folder / BUCKET / "models")
        store.fault(path="/models/sharded/", redirect_to=other.address)
        check_same(load_plain(ckptfs.export(f"{url}/{name}", tmp_path / "out.safetensors")), load_plain(folder / name))
        stats = other.stats
        assert stats["requests"] > 1 and stats["authenticated"] == 0
    finally:
        other.end()


def test_a_redirect_to_a_host_that_is_away_names_it(ckptfs, store, models, monkeypatch):
    _, url, _ = models
    monkeypatch.setenv("CKPTFS_OUTAGE_TIMEOUT", "1")
    # Nothing listens there.
    store.fault(path="/models/sharded/", redirect_to="http://localhost:9")
    failed = ckptfs("inspect", f"{url}/sharded/model-00001-of-00003.safetensors")
    assert failed.code == FAILED and "localhost, to which it redirects: Connection refused" in failed.stderr


def test_a_redirect_without_end_is_refused(ckptfs, store, models):
    _, url, _ = models
    store.fault(path="/models/sharded/", redirect_to=store.address)
    endless = ckptfs("inspect", f"{url}/sharded/model-00001-of-00003.safetensors")
    assert endless.code == FAILED and "again and again" in endless.stderr


def test_an_address_without_encryption_must_be_allowed(ckptfs, store, models, monkeypatch):
    _, url, _ = models
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    refused = ckptfs("inspect", f"{url}/sharded")
    assert refused.code == FAILED and "not encrypted" in refused.stderr and "CKPTFS_ALLOW_HTTP=1" in refused.stderr
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("CKPTFS_ALLOW_HTTP", "0")
    assert "not encrypted" in ckptfs("inspect", url).stderr
    monkeypatch.setenv("CKPTFS_ALLOW_HTTP", "1")
    assert ckptfs("inspect", f"{url}/sharded").code == 0


def test_the_emulator_of_google_cloud_must_be_allowed(ckptfs, store, monkeypatch):
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.address)
    refused = ckptfs("inspect", "--anonymous", "gs://bucket/model.safetensors")
    assert refused.code == FAILED and "not encrypted" in refused.stderr and store.stats["requests"] == 0


def test_without_credentials_none_is_asked_of_a_metadata_server(ckptfs, store, models, monkeypatch, tmp_path):
    _, url, _ = models
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    started = time.monotonic()
    refused = ckptfs("inspect", f"{url}/sharded")
    assert refused.code == FAILED and "no credentials for S3" in refused.stderr and time.monotonic() - started < 20
    # A profile has credentials.
    (tmp_path / "credentials").write_text(f"[me]\naws_access_key_id = a\naws_secret_access_key = {SECRET}\n")
    (tmp_path / "config").write_text(f"[profile me]\nregion = us-east-1\nendpoint_url = {store.address}\n")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_PROFILE", "me")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert ckptfs("inspect", f"{url}/sharded").code == 0
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    assert "no profile nobody" in ckptfs("inspect", f"{url}/sharded").stderr


def test_a_secret_is_shown_nowhere(ckptfs, mounts, store, models, impatient):
    _, url, _ = models
    mount = mounts(url, "--verbose")
    store.fault(path="/models/pickled", status=403, status_every=1)
    with pytest.raises(OSError):
        (mount / "pickled/model.safetensors").read_bytes()
    texts = [mount.logged(), json.dumps(mount.stats()), open("/proc/mounts").read()]
    texts += [open(f"/proc/{mount.pid}/cmdline").read(), os.getxattr(mount / "sharded/model.safetensors", "user.ckptfs.source").decode()]
    for command in (["status"], ["status", "--json"], ["inspect", f"{url}/pickled"], ["ls", "-r", url]):
        done = subprocess.run([find_binary(), *command], capture_output=True, text=True, timeout=60)
        texts += [done.stdout, done.stderr]
    for secret_url in (
        f"s3://me:{SECRET}@bucket/x", f"https://127.0.0.1/x?signature={SECRET}", f"HTTPS://me@127.0.0.1?{SECRET}",
        f"https://huggingface.co/org/name/x.pt?token={SECRET}",
    ):
        refused = ckptfs("inspect", secret_url)
        assert refused.code == FAILED and "what to do: leave" in refused.stderr
        texts.append(refused.stderr)
    assert not any(SECRET in text or "AWS4-HMAC" in text for text in texts)


@pytest.mark.parametrize("status", [400, 401, 403, 405, 409, 416, 200])
def test_what_a_server_repeats_is_not_shown(ckptfs, tmp_path, monkeypatch, impatient, status):
    token = "IQoJb3Jp" + "Secret" * 20
    signature = "0123456789abcdef" * 4

    def repeat(handler):
        sent = f"{handler.path} {handler.headers}"
        body = f"<Error><Code>InvalidToken</Code><Message>bad {sent}</Message></Error>" if "xml" in handler.path else json.dumps({"e": sent})
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(body.encode())

    with serve_with(repeat) as address:
        (tmp_path / "query").write_text(f"X-Amz-Signature={signature}")
        for name, value in (s3_environment(address) | {"AWS_SESSION_TOKEN": token}).items():
            monkeypatch.setenv(name, value)
        for name in ("json.safetensors", "xml.safetensors"):
            for url in (f"s3://bucket/{name}", f"{address}/{name}?@{tmp_path}/query"):
                refused = ckptfs("inspect", url)
                assert refused.code in (FAILED, REFUSED) and "what to do: " in refused.stderr
                shown = refused.stdout + refused.stderr
                assert not any(part in shown for part in (token[8:24], signature[:12], SECRET, "Signature=")), shown


@pytest.mark.parametrize("dripping", ["errors", "listings", "objects"])
def test_a_server_that_drips_is_an_outage(ckptfs, monkeypatch, impatient, dripping):
    def drip(handler):
        is_listing = "list-type" in handler.path
        if handler.command == "HEAD" and dripping == "objects":
            handler.send_response(200)
            handler.send_header("Content-Length", "5000000")
            handler.send_header("ETag", '"a"')
            handler.send_header("Last-Modified", "Wed, 25 Nov 2026 10:00:00 GMT")
            return handler.end_headers()
        if dripping == "listings" and not is_listing:
            return handler.send_error(404)
        if is_listing and dripping == "objects":
            return handler.send_error(403)
        handler.send_response(403 if dripping == "errors" else 206 if dripping == "objects" else 200)
        start = int((handler.headers["Range"] or "bytes=0-").split("=")[1].split("-")[0])
        handler.send_header("Content-Length", str(65536 - start))
        handler.send_header("Content-Range", f"bytes {start}-65535/5000000")
        handler.send_header("ETag", '"a"')
        handler.send_header("Last-Modified", "Wed, 25 Nov 2026 10:00:00 GMT")
        handler.end_headers()
        for _ in range(600):
            handler.wfile.write(b" ")
            time.sleep(0.1)

    with serve_with(drip) as address:
        for name, value in (s3_environment(address) | {"CKPTFS_NO_CACHE": "1", "CKPTFS_CONNECTIONS": "4"}).items():
            monkeypatch.setenv(name, value)
        began = time.monotonic()
        name = "" if dripping == "listings" else "/x.safetensors"
        refused = ckptfs("inspect", f"s3://bucket/models{name}")
        assert refused.code == FAILED and "what to do: " in refused.stderr and time.monotonic() - began < 25, refused
        assert dripping == "errors" or "gave nothing for" in refused.stderr, refused.stderr
