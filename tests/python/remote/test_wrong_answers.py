"""Answers that are wrong or too long: refused at once, and never called an outage. Names that no file can have are left out
of listings."""

import os
import time
from contextlib import contextmanager
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import torch
from safetensors.torch import save

from http_server import serve_with
from mounts import until
from program import DONE, FAILED, REFUSED
from stores import s3_environment

MODEL = save({"a": torch.ones(3)})

# A refusal needs no retries. The shortest outage takes longer.
MAX_REFUSAL_SECONDS = 8

MODIFIED = "Wed, 25 Nov 2026 10:00:00 GMT"


def list_entry(key, size=len(MODEL)):
    """The entry of an object in a listing. The key is XML."""
    return (
        f"<Contents><Key>{key}</Key><LastModified>2026-11-25T10:00:00.000Z</LastModified><ETag>&quot;a&quot;</ETag>"
        f"<Size>{size}</Size></Contents>"
    )


def page(*entries):
    """The last page of a listing."""
    return f'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated>{"".join(entries)}</ListBucketResult>'


class Bucket:
    """A bucket of S3 with answers that a test sets: the page of every listing, and the objects by their keys."""

    def __init__(self):
        self.page, self.objects, self.headers = page(), {}, {}
        # Sent in place of objects: a status, a body, and perhaps headers.
        self.error = None
        self.requests = []

    def answer(self, handler):
        url = urlsplit(handler.path)
        self.requests.append((handler.command, handler.path, handler.headers))
        if "list-type" in parse_qs(url.query):
            return self.send(handler, 200, self.page.encode("utf-8", "surrogateescape"))
        if self.error:
            return self.send(handler, *self.error)
        found = self.objects.get(unquote(url.path).removeprefix("/bucket/"))
        if found is None:
            return self.send(handler, 404, b"<Error><Code>NoSuchKey</Code></Error>")
        headers = {"ETag": '"a"', "Last-Modified": MODIFIED} | self.headers
        byte_range = handler.headers["Range"]
        if not byte_range or handler.command == "HEAD":
            return self.send(handler, 200, found, headers)
        start, end = map(int, byte_range.removeprefix("bytes=").split("-"))
        end = min(end, len(found) - 1)
        headers = {"Content-Range": f"bytes {start}-{end}/{len(found)}"} | headers
        return self.send(handler, 206, found[start : end + 1], headers)

    def send(self, handler, status, body, headers=()):
        headers = {"Content-Length": str(len(body))} | dict(headers)
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)


@pytest.fixture
def bucket(monkeypatch):
    store = Bucket()
    with serve_with(store.answer) as address:
        store.address = address
        for name, value in (s3_environment(address) | {"CKPTFS_NO_CACHE": "1"}).items():
            monkeypatch.setenv(name, value)
        yield store


@contextmanager
def limit_refusal_time():
    """Fails if its block takes as long as an outage."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < MAX_REFUSAL_SECONDS


def check_refused(done, *words):
    """Checks that a command was refused, with a remedy, and not by an outage."""
    assert done.code in (FAILED, REFUSED), done
    assert all(word in done.stderr for word in (*words, "what to do: ")), done.stderr
    assert "gave nothing for" not in done.stderr, done.stderr


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, zstd"])
@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_an_answer_that_is_compressed_is_refused_at_once(ckptfs, bucket, scheme, encoding):
    bucket.objects["m.safetensors"] = MODEL
    # The body is shorter than the range that it stands for.
    bucket.headers = {"Content-Encoding": encoding, "Content-Length": "20"}
    url = "s3://bucket/m.safetensors" if scheme == "s3" else f"{bucket.address}/bucket/m.safetensors"
    with limit_refusal_time():
        refused = ckptfs("inspect", url)
    check_refused(refused, url, "Content-Encoding", encoding.split(", ")[-1], "without compression")
    assert refused.code == REFUSED
    assert {headers["Accept-Encoding"] for _, _, headers in bucket.requests} == {"identity"}
    # Encodings that change nothing, such as one that some stores keep from the upload.
    for harmless in ("identity", "aws-chunked", ""):
        bucket.headers = {"Content-Encoding": harmless}
        assert ckptfs("inspect", url).code == DONE, harmless


def test_a_body_longer_than_its_range_is_refused_at_once(ckptfs, bucket):
    bucket.objects["m.safetensors"] = MODEL
    bucket.headers = {"Content-Range": f"bytes 0-{len(MODEL) - 3}/{len(MODEL) - 2}"}
    with limit_refusal_time():
        check_refused(ckptfs("inspect", "s3://bucket/m.safetensors"), "s3://bucket/m.safetensors")


def test_a_range_that_no_file_has_is_refused(ckptfs, bucket):
    bucket.objects["m.safetensors"] = MODEL
    bucket.headers = {"Content-Range": f"bytes 0-{2**64 - 1}/{2**64 - 1}"}
    with limit_refusal_time():
        check_refused(ckptfs("inspect", "s3://bucket/m.safetensors"), "s3://bucket/m.safetensors", "no valid size")


def test_a_listing_in_one_answer_that_is_too_long_is_refused_at_once(ckptfs, bucket):
    bucket.page = page("<!--" + "x" * (17 << 20) + "-->")
    with limit_refusal_time():
        check_refused(ckptfs("ls", "s3://bucket/models"), "s3://bucket/models", "16 MiB", "give a directory further down")
    assert len([path for _, path, _ in bucket.requests if "list-type" in path]) == 1


def test_a_deeply_nested_listing_is_refused_at_once(ckptfs, bucket):
    for nested in (page("<a>" * 300_000), page(f"<Contents><Key>x</Key>{'<a>' * 100_000}{'</a>' * 100_000}</Contents>")):
        bucket.page = nested
        with limit_refusal_time():
            check_refused(ckptfs("ls", "s3://bucket/models"), "s3://bucket/models")


@pytest.mark.parametrize(("status", "says"), [(400, "have expired"), (403, "HTTP 403"), (409, "HTTP 409")])
def test_an_error_with_a_long_body_is_refused_at_once(ckptfs, bucket, status, says):
    code = "ExpiredToken" if status == 400 else "Conflict"
    bucket.error = (status, f"<Error><Code>{code}</Code><Message>{'x' * (10 << 20)}</Message></Error>".encode())
    with limit_refusal_time():
        refused = ckptfs("inspect", "s3://bucket/m.safetensors")
    check_refused(refused, "s3://bucket/m.safetensors", says)


def names_of(done):
    assert done.code == DONE, done.stderr
    return [entry["name"] for entry in done.json()[0]["entries"]]


@pytest.mark.parametrize(
    "key",
    ["m/&#0;", "m/&#x0;b", "m/\0", "m/&#1;", "m/\x01", "m/\udcff\udcfe", "m/&unknown;", "/m/b", "m//b", "m/../b", "/", "m/&#xD800;"],
)
def test_one_key_that_no_path_can_have_is_left_out_and_logged(ckptfs, mounts, bucket, key):
    bucket.objects["m/a.safetensors"] = MODEL
    prefix = f"<CommonPrefixes><Prefix>{key}/</Prefix></CommonPrefixes>"
    bucket.page = page(list_entry("m/a.safetensors"), list_entry(key), prefix)
    assert names_of(ckptfs("ls", "--json", "s3://bucket/m")) == ["a.safetensors"]
    mount = mounts("s3://bucket/m")
    assert os.listdir(mount.point) == ["a.safetensors"]
    assert (mount / "a.safetensors").read_bytes() == MODEL
    until("the mount says so", lambda: "are not shown" in mount.logged())
    assert "count=2" in mount.logged()


def test_a_key_that_begins_with_a_slash_is_no_other_key(ckptfs, mounts, bucket):
    bucket.page = page(list_entry("/a.safetensors"), list_entry("b.safetensors"))
    bucket.objects |= {"b.safetensors": MODEL, "/a.safetensors": MODEL}
    assert names_of(ckptfs("ls", "--json", "s3://bucket")) == ["b.safetensors"]
    mount = mounts("s3://bucket")
    assert os.listdir(mount.point) == ["b.safetensors"]
    until("the mount names it", lambda: '"/a.safetensors"' in mount.logged())


def test_ranges_without_the_size_of_the_object_are_refused(ckptfs, bucket):
    bucket.objects["m.safetensors"] = MODEL
    bucket.headers = {"Content-Range": f"bytes 0-{len(MODEL) - 1}/*"}
    with limit_refusal_time():
        check_refused(ckptfs("inspect", "s3://bucket/m.safetensors"), "s3://bucket/m.safetensors", "no valid size")


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, 2**64, 10**30, -1])
def test_an_object_of_an_impossible_size_is_refused_by_its_url(ckptfs, mounts, bucket, size):
    bucket.objects["m/a.safetensors"] = MODEL
    bucket.page = page(list_entry("m/a.safetensors"), list_entry("m/huge.safetensors", size))
    assert names_of(ckptfs("ls", "--json", "s3://bucket/m")) == ["a.safetensors"]
    mount = mounts("s3://bucket/m")
    assert (mount / "a.safetensors").read_bytes() == MODEL
    until("the mount names it", lambda: "m/huge.safetensors" in mount.logged() and "size" in mount.logged())
    # Its own URL is refused, too.
    bucket.objects["m/huge.safetensors"] = MODEL
    bucket.headers = {"Content-Length": str(size)}
    with limit_refusal_time():
        check_refused(ckptfs("inspect", "s3://bucket/m/huge.safetensors"), "s3://bucket/m/huge.safetensors", "no valid size")


def test_an_object_without_a_version_is_left_out_and_logged(ckptfs, mounts, bucket):
    bucket.objects["m/a.safetensors"] = MODEL
    bare = "<Contents><Key>m/b.safetensors</Key><LastModified>1970-01-01T00:00:00Z</LastModified><Size>9</Size></Contents>"
    bucket.page = page(list_entry("m/a.safetensors"), bare)
    assert names_of(ckptfs("ls", "--json", "s3://bucket/m")) == ["a.safetensors"]
    mount = mounts("s3://bucket/m")
    assert os.listdir(mount.point) == ["a.safetensors"]
    until("the mount names it", lambda: "b.safetensors" in mount.logged() and "neither an ETag nor a time" in mount.logged())


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("file:///etc/passwd", "redirects to file:"), ("ftp://other.example/x?token=secret", "redirects to ftp://other.example"),
        ("data:text/plain,x", "redirects to data:"), ("http://", "no valid URL"),
    ],
)  # fmt: skip
def test_a_redirect_to_another_scheme_is_not_followed(ckptfs, bucket, location, says):
    bucket.error = (302, b"", {"Location": location})
    with limit_refusal_time():
        refused = ckptfs("inspect", f"{bucket.address}/bucket/m.safetensors")
    check_refused(refused, f"{bucket.address}/bucket/m.safetensors", says)
    assert "secret" not in refused.stderr and ("http://" in location or "neither http:// nor https://" in refused.stderr)
