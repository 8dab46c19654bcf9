"""A model hub of the test's own: it serves folders in the hub's protocol, so that the real client writes the cache."""

import hashlib
import json
from urllib.parse import unquote, urlsplit

from http_server import QuietHandler, serve

# A hub keeps larger files apart, and names them by another hash.
LARGE = 10_000


def revision_of(folder):
    return hashlib.sha1(folder.name.encode()).hexdigest()


def _entry(folder, path):
    data = path.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry = {"type": "file", "path": str(path.relative_to(folder)), "size": len(data), "oid": blob}
    if len(data) > LARGE:
        oid = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"oid": oid, "size": len(data), "pointerSize": 134}
    return entry


class _Requests(QuietHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self._answer(is_head=True)

    def do_GET(self):
        self._answer(is_head=False)

    def _answer(self, is_head):
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        owner, name, what = (*parts, "", "", "")[:3]
        # Between the two is the revision: each repository has one.
        rest = parts[4:]
        folder = self.server.repositories.get(f"{owner}/{name}")
        if folder is None:
            return self._send(404, {"X-Error-Code": "RepoNotFound"}, b"{}", is_head)
        commit = revision_of(folder)
        headers = {"X-Repo-Commit": commit}
        if is_api and what in ("", "revision"):
            about = {"id": f"{owner}/{name}", "sha": commit, "siblings": []}
            return self._json(about, headers, is_head)
        if is_api and what == "tree" and not rest:
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            return self._json([_entry(folder, path) for path in files], headers, is_head)
        path = folder.joinpath(*rest)
        if is_api or what != "resolve" or not path.is_file():
            return self._send(404, headers | {"X-Error-Code": "EntryNotFound"}, b"{}", is_head)
        entry = _entry(folder, path)
        if "lfs" in entry:
            headers["X-Linked-Etag"] = f'"{entry["lfs"]["oid"]}"'
            headers["X-Linked-Size"] = str(entry["size"])
        self._send(200, headers | {"ETag": f'"{entry["oid"]}"'}, path.read_bytes(), is_head)

    def _json(self, value, headers, is_head):
        headers = headers | {"Content-Type": "application/json"}
        self._send(200, headers, json.dumps(value).encode(), is_head)

    def _send(self, status, headers, body, is_head):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not is_head:
            self.wfile.write(body)


def hub(repositories):
    """Serves repositories (`owner/name` to folder). Gives the address."""
    return serve(_Requests, repositories=repositories)
