"""Stores of every kind but moto's, for the tests that all kinds must pass."""

import base64
import datetime
import hashlib
import hmac
import os
import shutil
import socket
import sys
import threading
import time
from urllib.parse import quote

from program import COMMON
from stores import BUCKET, MOTO, NO_CREDENTIALS, PATIENCE, SECRET, Moto, Store, start

S3S = os.environ.get("CKPTFS_S3S_FS")
AZURITE = os.environ.get("CKPTFS_AZURITE")
RCLONE = shutil.which("rclone")

# The account that azurite has, with the key that its documentation states.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
AZURE_VERSION = "2021-12-02"


def free_port():
    """A port that nothing listens on, for servers that cannot choose one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_on_free_port(*command):
    """A server whose command ends with its port, and the port."""
    port = free_port()
    server = start(*command[:-1], command[-1].format(port=port))
    end = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return server, port
        except OSError:
            assert server.poll() is None and time.monotonic() < end, f"{command[0]} does not start"
            time.sleep(0.02)


class S3sFs(Store):
    """A bucket of s3s-fs, which compares signatures and keeps objects in a folder."""

    takes_any_key = False
    keys_that_are_no_paths = []

    def __init__(self, folder):
        (folder / BUCKET).mkdir()
        keys = ("--access-key", "key-of-the-tests", "--secret-key", SECRET)
        super().__init__(*start_on_free_port(S3S, folder, *keys, "--host", "127.0.0.1", "--port={port}"))

    environment = Moto.environment

    def _send(self, method, key, body=b""):
        path = quote(f"/{BUCKET}/{key}")
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        scope = f"{now[:8]}/us-east-1/s3/aws4_request"
        digest = hashlib.sha256(body).hexdigest()
        headers = {"host": f"127.0.0.1:{self.server_port}", "x-amz-content-sha256": digest, "x-amz-date": now}
        names = ";".join(headers)
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        request = hashlib.sha256(f"{method}\n{path}\n\n{lines}\n{names}\n{digest}".encode()).hexdigest()
        key = f"AWS4{SECRET}".encode()
        for part in [*scope.split("/"), f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{request}"]:
            key = hmac.digest(key, part.encode(), "sha256")
        credential = f"Credential=key-of-the-tests/{scope}, SignedHeaders={names}, Signature={key.hex()}"
        self.send(method, path, body, authorization=f"AWS4-HMAC-SHA256 {credential}", **headers)

    def put(self, key, body):
        self._send("PUT", key, body)

    def delete(self, key):
        self._send("DELETE", key)


class Azurite(Store):
    """A container of azurite."""

    url = f"az://{BUCKET}"

    def __init__(self):
        words = ("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent")
        super().__init__(*start_on_free_port(AZURITE, *words, "--blobPort={port}"))
        self._send("PUT", f"/{ACCOUNT}/{BUCKET}", query="restype:container")

    @property
    def environment(self):
        return NO_CREDENTIALS | {
            "CKPTFS_ALLOW_HTTP": "1", "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
            "AZURE_STORAGE_ENDPOINT": f"{self.address}/{ACCOUNT}",
        }  # fmt: skip

    def _send(self, method, path, body=b"", query="", **more):
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {"x-ms-date": now, "x-ms-version": AZURE_VERSION} | more
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        length = len(body) or ""
        resource = f"/{ACCOUNT}{path}" + (f"\n{query}" if query else "")
        text = f"{method}\n\n\n{length}\n\n\n\n\n\n\n\n\n{lines}{resource}"
        signature = base64.b64encode(hmac.digest(base64.b64decode(ACCOUNT_KEY), text.encode(), "sha256")).decode()
        target = path + ("?" + query.replace(":", "=") if query else "")
        self.send(method, target, body, Authorization=f"SharedKey {ACCOUNT}:{signature}", **headers)

    def put(self, key, body):
        self._send("PUT", quote(f"/{ACCOUNT}/{BUCKET}/{key}"), body, **{"x-ms-blob-type": "BlockBlob"})

    def delete(self, key):
        self._send("DELETE", quote(f"/{ACCOUNT}/{BUCKET}/{key}"))


class Gcs(Store):
    """A bucket of our own server, which answers as Google Cloud Storage does by XML."""

    url = f"gs://{BUCKET}"

    def __init__(self):
        server = start(sys.executable, COMMON / "gcs_server.py")
        super().__init__(server, int(server.stdout.readline()))

    @property
    def environment(self):
        return NO_CREDENTIALS | {
            "CKPTFS_ALLOW_HTTP": "1", "CKPTFS_ANONYMOUS": "1", "STORAGE_EMULATOR_HOST": self.address,
        }  # fmt: skip

    def put(self, key, body):
        self.send("PUT", quote(f"/{BUCKET}/{key}"), body)

    def delete(self, key):
        self.send("DELETE", quote(f"/{BUCKET}/{key}"))


class Folder:
    """Objects that are files of a folder."""

    takes_any_key = False
    keys_that_are_no_paths = []

    def put(self, key, body):
        path = self.folder / BUCKET / key
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when it is whole: no reader sees half a file.
        written = self.folder / f"written-{threading.get_ident()}"
        written.write_bytes(body)
        written.rename(path)

    def delete(self, key):
        path = self.folder / BUCKET / key
        path.unlink()
        while path.parent.name != BUCKET and not any(path.parent.iterdir()):
            path = path.parent
            path.rmdir()


class WebDav(Folder, Store):
    """A folder that rclone serves by WebDAV."""

    # Without its cache, rclone reads the directory anew for each name of a listing.
    words = ("webdav", "--dir-cache-time", "0")
    long_count = 150

    def __init__(self, folder):
        self.folder = folder
        (folder / BUCKET).mkdir()
        super().__init__(*start_on_free_port(RCLONE, "serve", *self.words, folder, "--addr=127.0.0.1:{port}"))

    @property
    def url(self):
        return f"{self.address}/{BUCKET}"


class WebServer(WebDav):
    """A folder that rclone serves to browsers: without ETags, and without listings that a program can read."""

    lists = False
    words = ("http", "--dir-cache-time", "0")


class Local(Folder):
    """A folder of this machine, beside the stores."""

    lists = True
    long_count = Store.long_count
    environment = {}

    def __init__(self, folder):
        self.folder = folder
        self.url = str(folder / BUCKET)
        (folder / BUCKET).mkdir()

    upload = Store.upload

    def fault(self, **faults):
        assert not faults, "only stores have faults"

    def end(self):
        pass


# Each kind by name: its class, whether it needs a folder, and the programs that it needs.
KINDS = {
    "local": (Local, True, sys.executable),
    "moto": (Moto, False, MOTO),
    "s3s-fs": (S3sFs, True, S3S),
    "azurite": (Azurite, False, AZURITE),
    "gcs": (Gcs, False, sys.executable),
    "webdav": (WebDav, True, RCLONE),
    "web server": (WebServer, True, RCLONE),
}


def make(kind, folder):
    """A store of a kind, whose folder is empty."""
    store, needs_folder, _ = KINDS[kind]
    return store(folder) if needs_folder else store()


def is_installed(kind):
    return KINDS[kind][2] is not None
