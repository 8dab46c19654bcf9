"""Stores on this machine, each behind a proxy that makes faults: see stubs/store-proxy. store_kinds.py has the others."""

import http.client
import json
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from urllib.parse import quote

from mounts import PATIENCE
from program import REPOSITORY

MOTO = os.environ.get("CKPTFS_MOTO_PYTHON")

MISSING = "NOT TESTED: stores; `. scripts/setup.sh` sets CKPTFS_MOTO_PYTHON"

# The bucket, container or folder of every store.
BUCKET = "bucket"

# Hides the user's own settings and credentials.
NO_CREDENTIALS = {
    "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "AWS_REGION": "us-east-1",
}  # fmt: skip

SECRET = "a-secret-of-the-tests"


def s3_environment(address):
    """The environment of a user of S3 at an address."""
    return NO_CREDENTIALS | {
        "AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "key-of-the-tests",
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }  # fmt: skip


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
    """A server of some kind with a bucket, behind the proxy. A kind starts its server, and puts and deletes objects."""

    # The URL of the bucket.
    url = f"s3://{BUCKET}"
    # Whether directories are listed.
    lists = True
    # Whether a key can mark a directory, and keys that it takes and no file can have.
    takes_any_key = True
    # Names of a long directory: more than a page of a real S3 has.
    long_count = 1050
    keys_that_are_no_paths = ["/twice", "../b", "new\nline"]

    def __init__(self, server, port):
        self.server, self.server_port, self.proxy = server, port, None
        try:
            self.proxy = start(find_proxy(), f"http://127.0.0.1:{port}")
            self.port = int(self.proxy.stdout.readline())
        except BaseException:
            self.end()
            raise

    @property
    def address(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self):
        return NO_CREDENTIALS | {"CKPTFS_ALLOW_HTTP": "1"}

    def send(self, method, path, body=b"", **headers):
        """Sends a request to the server itself; `path` is encoded."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server_port, timeout=PATIENCE)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status < 300, (answer.status, text)
        return answer

    def upload(self, folder, prefix):
        """Copies a folder into the bucket, and returns its URL."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
        return f"{self.url}/{prefix}"

    def _control(self, method, path, body=None):
        request = urllib.request.Request(self.address + path, method=method, data=body)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.read()

    def fault(self, **faults):
        """Sets the faults of later requests; without arguments, there are none."""
        self._control("PUT", "/__faults", json.dumps(faults).encode())
        self._control("PUT", "/__stats", b"")

    @property
    def stats(self):
        return json.loads(self._control("GET", "/__stats"))

    def end(self):
        for process in filter(None, (self.proxy, self.server)):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class ServedFolder(Store):
    """A folder that the proxy itself serves as S3, for large objects. Each folder in it is a bucket."""

    def __init__(self, folder):
        self.folder = folder
        (folder / BUCKET).mkdir()
        self.proxy = start(find_proxy(), "--folder", folder)
        self.port = int(self.proxy.stdout.readline())
        self.server, self.server_port = None, self.port

    @property
    def environment(self):
        return s3_environment(self.address)


class Moto(Store):
    """A bucket of moto."""

    # moto refuses keys that no file can have, or makes paths of them.
    keys_that_are_no_paths = []

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
        server = start(MOTO, "-c", code)
        super().__init__(server, int(server.stdout.readline()))
        self.send("PUT", f"/{BUCKET}")

    @property
    def environment(self):
        return s3_environment(self.address)

    def send(self, method, path, body=b"", **headers):
        # moto requires a signature, and does not check it.
        credential = "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        return super().send(method, path, body, Authorization=credential, **headers)

    def put(self, key, body):
        self.send("PUT", f"/{BUCKET}/{quote(key)}", body)

    def delete(self, key):
        self.send("DELETE", f"/{BUCKET}/{quote(key)}")
