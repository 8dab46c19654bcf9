"""Imitates Google Cloud Storage: the XML requests by which clients read objects. No emulator that can be installed answers
its listing. Prints its port.

Keys are bytes until a key is parsed: `//` and `..` are names like others, as in the real one."""

import hashlib
import itertools
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

# Fewer than the real one has, so that tests need few objects for many pages.
NAMES_PER_PAGE = 100

objects, lock = {}, Lock()


def list_page(query):
    """A page of the listing, in XML."""
    prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [None])[0]
    after = query.get("continuation-token", [""])[0]
    with lock:
        keys = sorted(key for key in objects if key.startswith(prefix))
    common = lambda key: prefix + key[len(prefix) :].split(delimiter)[0] + delimiter
    is_beneath = lambda key: delimiter and delimiter in key[len(prefix) :]
    names = dict.fromkeys(common(key) if is_beneath(key) else key for key in keys)
    page = list(itertools.islice((name for name in names if name > after), NAMES_PER_PAGE + 1))
    is_last, page = len(page) <= NAMES_PER_PAGE, page[:NAMES_PER_PAGE]
    parts = [f"<Prefix>{escape(prefix)}</Prefix><IsTruncated>{str(not is_last).lower()}</IsTruncated>"]
    if not is_last:
        parts.append(f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>")
    for name in page:
        if name in objects and not is_beneath(name):
            body, etag, modified = objects[name]
            date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(modified))
            inside = f"<Size>{len(body)}</Size><LastModified>{date}</LastModified><ETag>{escape(etag)}</ETag>"
            parts.append(f"<Contents><Key>{escape(name)}</Key>{inside}</Contents>")
        else:
            parts.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
    return f"<?xml version='1.0' encoding='UTF-8'?><ListBucketResult>{''.join(parts)}</ListBucketResult>".encode()


class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    # One packet for the head and a small body.
    wbufsize = -1

    def log_message(self, *_):
        pass

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        headers.setdefault("Content-Length", len(body))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def find_key(self):
        _, bucket, key = [*unquote(urlsplit(self.path).path).split("/", 2), ""][:3]
        return key if bucket == "bucket" else None

    def do_GET(self):
        url, key = urlsplit(self.path), self.find_key()
        if key == "":
            return self.reply(200, list_page(parse_qs(url.query)), Content_Type="application/xml; charset=UTF-8")
        found = objects.get(key)
        if found is None:
            return self.reply(404)
        body, etag, modified = found
        head = {"ETag": etag, "Last-Modified": formatdate(modified, usegmt=True), "Content-Type": "application/octet-stream"}
        if self.headers.get("If-Match", etag) != etag:
            return self.reply(412)
        if (wanted := self.headers.get("Range")) is None:
            return self.reply(200, body, **head)
        first, last = wanted.removeprefix("bytes=").split("-")
        if int(first) >= len(body):
            return self.reply(416)
        part = body[int(first) : int(last or len(body)) + 1]
        span = f"bytes {first}-{int(first) + len(part) - 1}/{len(body)}"
        return self.reply(206, part, **head, Content_Range=span)

    do_HEAD = do_GET

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with lock:
            objects[self.find_key()] = (body, f'"{hashlib.md5(body).hexdigest()}"', time.time())
        self.reply(200)

    def do_DELETE(self):
        with lock:
            objects.pop(self.find_key(), None)
        self.reply(204)


# Connections wait in this queue. The kernel drops those that do not fit, and clients connect again seconds later.
ThreadingHTTPServer.request_queue_size = 128
server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
server.daemon_threads = True
print(server.server_port, flush=True)
server.serve_forever()
