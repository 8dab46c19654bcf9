"""A store on this machine, behind a proxy that makes faults: see stubs/store-proxy."""

import http.client
import json
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

from program import REPOSITORY

PATIENCE = 60

MOTO = os.environ.get("CKPTFS_MOTO_PYTHON")

MISSING = "NOT TESTED: stores; `. scripts/setup.sh` sets CKPTFS_MOTO_PYTHON"

# Nothing of the user's own is found.
NO_CREDENTIALS = {
    "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "AWS_REGION": "us-east-1",
}  # fmt: skip

SECRET = "a-secret-of-the-tests"


def find_proxy():
    named = os.environ.get("CKPTFS_STORE_PROXY")
    proxy = Path(named) if named else REPOSITORY / "target/store-proxy/release/store-proxy"
    if not proxy.is_file():
        raise FileNotFoundError("no store-proxy: cargo build --release --manifest-path stubs/store-proxy/Cargo.toml")
    return proxy


def start(*command):
    """A process that ends with its test."""
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip


class Store:
    """A bucket of moto, through the proxy."""

    def __init__(self):
        # moto takes any free port, and says which in its log alone.
        code = (
            "from moto.server import DomainDispatcherApplication, create_backend_app\n"
            "from werkzeug.serving import make_server\n"
            "app = DomainDispatcherApplication(create_backend_app)\n"
            "server = make_server('127.0.0.1', 0, app, threaded=True)\n"
            "print(server.server_port, flush=True)\n"
            "server.serve_forever()\n"
        )
        self.server = start(MOTO, "-c", code)
        self.server_port = int(self.server.stdout.readline())
        self.proxy = start(find_proxy(), f"http://127.0.0.1:{self.server_port}")
        self.port = int(self.proxy.stdout.readline())
        self._send("PUT", "/bucket")

    @property
    def address(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self):
        return NO_CREDENTIALS | {
            "AWS_ENDPOINT_URL": self.address, "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "key-of-the-tests",
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }  # fmt: skip

    def _send(self, method, path, body=b""):
        connection = http.client.HTTPConnection("127.0.0.1", self.server_port, timeout=PATIENCE)
        # moto wants to see that a request is signed, and does not look at how.
        credential = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        connection.request(method, path, body, {"Authorization": credential})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status < 300, (answer.status, text)
        return answer

    def put(self, key, body):
        self._send("PUT", f"/bucket/{key}", body)

    def delete(self, key):
        self._send("DELETE", f"/bucket/{key}")

    def upload(self, folder, prefix):
        """Copies a folder into the bucket, and returns its URL."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
        return f"s3://bucket/{prefix}"

    def _control(self, method, path, body=None):
        request = urllib.request.Request(self.address + path, method=method, data=body)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.read()

    def fault(self, **faults):
        """What is done to requests from now on: nothing, without arguments."""
        self._control("PUT", "/__faults", json.dumps(faults).encode())
        self._control("PUT", "/__stats", b"")

    @property
    def stats(self):
        return json.loads(self._control("GET", "/__stats"))

    def end(self):
        for process in (self.proxy, self.server):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
