"""An S3 server on this machine, behind a latency and a bandwidth limit: stubs/store-proxy serves a folder."""

import json
import os
import subprocess
import urllib.request

from ckptfs.bench.usage import processor_seconds

from bench import REPOSITORY

PROXY = REPOSITORY / "target/store-proxy/release/store-proxy"

LATENCY_MS = 30
BYTES_PER_SECOND = 50_000_000


class StoreServer:
    """Serves the folders in a folder as buckets. Every reader finds the server by the environment."""

    def __init__(self, folder):
        self._process = subprocess.Popen([PROXY, "--folder", folder], stdout=subprocess.PIPE, text=True)
        self.address = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.address, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null", "AWS_EC2_METADATA_DISABLED": "true",
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        }  # fmt: skip
        os.environ |= self.environment
        self.limit()

    def limit(self, bytes_per_second=BYTES_PER_SECOND):
        """Limits each connection, and resets the counters."""
        self._control("PUT", "/__faults", {"latency_ms": LATENCY_MS, "bytes_per_second": bytes_per_second})
        self._control("PUT", "/__stats")

    @property
    def stats(self):
        return json.loads(self._control("GET", "/__stats"))

    @property
    def cpu(self):
        """Processor seconds so far."""
        return processor_seconds(self._process.pid)

    def _control(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, method=method, data=data)
        with urllib.request.urlopen(request) as answer:
            return answer.read()

    def close(self):
        self._process.kill()
        self._process.wait()
