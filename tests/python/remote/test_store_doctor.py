"""`ckptfs doctor URL`: tries access step by step; the step that fails has a remedy."""

import http.server
import socket
import threading

import pytest

from certificates import self_signed
from program import DONE, FAILED
from stores import SECRET

STEPS = [
    "URL", "name", "connection", "encryption", "clock", "credentials", "region", "listing", "object", "version", "range",
    "condition", "speed",
]  # fmt: skip


@pytest.fixture
def doctor(ckptfs, store, monkeypatch):
    """The checks of a URL, without those of the machine: name, verdict, finding and remedy of each."""
    # Denied requests are repeated, for a short time.
    monkeypatch.setenv("CKPTFS_OUTAGE_TIMEOUT", "4")
    machine = ckptfs("doctor", "--json").json()

    def run(url, *options):
        done = ckptfs("doctor", "--json", url, *options)
        assert SECRET not in done.stdout + done.stderr
        checks = done.json()
        assert [check["what"] for check in checks[: len(machine)]] == [check["what"] for check in machine]
        checks = checks[len(machine) :]
        for check in checks:
            assert (check["verdict"] == "ok") == (not check["remedy"]), check
        is_fine = all(check["verdict"] != "problem" for check in machine + checks)
        assert done.code == (DONE if is_fine else FAILED)
        return checks

    return run


def failed(checks):
    """The last check, which is the one that failed."""
    assert [check["verdict"] for check in checks].count("problem") == 1 and checks[-1]["verdict"] == "problem", checks
    return checks[-1]


def test_every_step_of_a_directory_that_can_be_read_is_fine(doctor, models):
    _, url, _ = models
    checks = doctor(f"{url}/sharded")
    assert [check["what"] for check in checks] == STEPS
    assert {check["verdict"] for check in checks} == {"ok"}, checks
    says = {check["what"]: check["says"] for check in checks}
    assert "AWS_ACCESS_KEY_ID" in says["credentials"] and "us-east-1" in says["region"]
    assert says["condition"] == "If-Match is honoured" and "bytes" in says["object"]


def test_the_text_has_a_line_for_each_step(ckptfs, store, models):
    _, url, _ = models
    text = ckptfs("doctor", f"{url}/sharded/model-00001-of-00003.safetensors").stdout
    names = [line[9:25].strip() for line in text.splitlines()]
    assert names[-len(STEPS) :] == STEPS


def test_a_part_that_is_large_enough_has_a_bandwidth(doctor, store):
    store.put("large/model.bin", bytes(10 << 20))
    store.fault(bytes_per_second=50_000_000)
    speed = doctor("s3://bucket/large/model.bin")[-1]
    assert speed["what"] == "speed" and "8.4 MB in" in speed["says"] and "MB/s by one connection" in speed["says"]


def test_a_url_with_a_secret_or_without_a_bucket_is_refused(doctor):
    assert failed(doctor(f"s3://me:{SECRET}@bucket/x"))["what"] == "URL"
    assert failed(doctor("s3://"))["what"] == "URL"


def test_an_address_without_encryption_must_be_allowed(doctor, models, monkeypatch):
    _, url, _ = models
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    refused = failed(doctor(url))
    assert refused["what"] == "encryption" and "--allow-http" in refused["remedy"]
    assert doctor(f"{url}/sharded", "--allow-http")[-1]["verdict"] == "ok"


def test_a_variable_that_means_nothing_is_named(doctor, models, monkeypatch):
    _, url, _ = models
    monkeypatch.setenv("CKPTFS_CONNECTIONS", "many")
    refused = failed(doctor(url))
    assert refused["what"] == "settings" and "CKPTFS_CONNECTIONS" in refused["says"]


def test_a_host_that_nobody_knows_is_named(doctor, models, monkeypatch):
    _, url, _ = models
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://no-such-host.invalid:1")
    refused = failed(doctor(url))
    assert refused["what"] == "name" and "no-such-host.invalid" in refused["says"] and "AWS_ENDPOINT_URL" in refused["remedy"]


def test_a_port_without_a_server_is_named(doctor, models, monkeypatch):
    _, url, _ = models
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    refused = failed(doctor(url))
    assert refused["what"] == "connection" and str(port) in refused["says"] and "firewalls" in refused["remedy"]


def test_a_server_that_closes_connections_does_not_answer(doctor, store, models):
    _, url, _ = models
    store.fault(is_down=True)
    assert failed(doctor(url))["what"] == "answer"


def test_a_certificate_that_nobody_vouches_for_is_named(doctor, ckptfs, models, monkeypatch, tmp_path):
    _, url, _ = models
    context, certificate = self_signed(tmp_path, "IP:127.0.0.1")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(connection, server_side=True) as encrypted:
                    encrypted.recv(4096)
                    encrypted.sendall(b"HTTP/1.1 403 Forbidden\r\nDate: Wed, 21 Oct 2015 07:28:00 GMT\r\nContent-Length: 0\r\n\r\n")
            except OSError:
                pass

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://127.0.0.1:{listener.getsockname()[1]}")
    try:
        refused = failed(doctor(url))
        assert refused["what"] == "encryption" and "certificate" in refused["says"] and "AWS_CA_BUNDLE" in refused["remedy"]
        # No other command waits for it: it will not change.
        listed = ckptfs("ls", url)
        assert listed.code == FAILED and "the encrypted connection is refused" in listed.stderr, listed
        assert "certificate" in listed.stderr and "AWS_CA_BUNDLE" in listed.stderr
        # With it, the server is trusted, and its clock is one of 2015.
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        skewed = failed(doctor(url))
        assert skewed["what"] == "clock" and "ahead of the server's" in skewed["says"]
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none.pem"))
        assert failed(doctor(url))["what"] == "certificates"
        listed = ckptfs("ls", url)
        assert listed.code == FAILED and "none.pem, which cannot be used" in listed.stderr
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_missing_credentials_are_named(doctor, models, monkeypatch, tmp_path):
    _, url, _ = models
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    refused = failed(doctor(url))
    assert refused["what"] == "credentials" and "AWS_PROFILE" in refused["remedy"] and "--anonymous" in refused["remedy"]
    (tmp_path / "credentials").write_text(f"[me]\naws_access_key_id = a\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_PROFILE", "me")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    says = {check["what"]: check["says"] for check in doctor(f"{url}/sharded")}
    assert says["credentials"] == "the profile me of ~/.aws"


def test_a_request_that_is_denied_is_named(doctor, store, models):
    _, url, _ = models
    store.fault(path="/bucket", status=403, status_every=1)
    refused = failed(doctor(f"{url}/sharded"))
    assert refused["what"] == "listing" and "denies" in refused["says"] and "credentials" in refused["remedy"]
    # One object may be read where listings are denied.
    name = "model-00001-of-00003.safetensors"
    store.fault(path="/bucket", method="GET", status=403, status_every=1)
    denied = {check["what"]: check for check in doctor(f"{url}/sharded/{name}")}
    assert denied["listing"]["verdict"] == "note" and denied["range"]["verdict"] == "problem"


def test_a_name_that_nothing_has_is_named(doctor, models):
    _, url, _ = models
    refused = failed(doctor(f"{url}/no-such-model"))
    assert refused["what"] == "listing" and "nothing has this name" in refused["says"]


@pytest.mark.parametrize("faults, what, says", [
    ({"remove": ["etag", "last-modified"]}, "version", "neither an ETag nor Last-Modified"),
    ({"ignore": ["range"]}, "range", "does not answer ranges"),
    ({"status": 503, "status_every": 1}, "object", "503"),
    ({"cut_after": 0, "cut_every": 1}, "range", "gave nothing"),
])  # fmt: skip
def test_a_server_that_lacks_something_is_named(doctor, store, models, faults, what, says):
    _, url, _ = models
    store.fault(path="/models/sharded/model", **faults)
    refused = failed(doctor(f"{url}/sharded"))
    assert refused["what"] == what and says in refused["says"], refused


@pytest.mark.parametrize("faults, what, says", [
    ({"remove": ["etag"]}, "version", "Last-Modified alone"),
    ({"ignore": ["if-match"]}, "condition", "ignores If-Match"),
])  # fmt: skip
def test_a_server_with_less_is_read_all_the_same(doctor, store, models, faults, what, says):
    _, url, _ = models
    store.fault(path="/models/sharded/model", **faults)
    checks = doctor(f"{url}/sharded/model-00001-of-00003.safetensors")
    noted = [check for check in checks if check["verdict"] == "note"]
    assert says in {check["what"]: check["says"] for check in noted}[what] and checks[-1]["what"] == "speed"


class OtherRegion(http.server.BaseHTTPRequestHandler):
    """S3, where it has the bucket in another region."""

    def do_HEAD(self):
        self.send_response(301)
        self.send_header("x-amz-bucket-region", "eu-north-1")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_):
        pass


def test_a_bucket_of_another_region_is_named(doctor, monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OtherRegion) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        refused = failed(doctor("s3://bucket/model"))
        server.shutdown()
    assert refused["what"] == "region" and "eu-north-1" in refused["says"] and "AWS_REGION" in refused["remedy"]
