"""Web servers: with WebDAV or without, with ETags, weak ones or none."""

import http.server
import re
from functools import partial

import ckptfs as package
import pytest
import torch
from ckptfs.torch import load_file
from safetensors.torch import save

import store_kinds
from compare import check_same
from http_server import serve, serve_with
from mounts import until
from program import DONE, FAILED, REFUSED
from samples import write_shards


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    made = {}
    for kind in ("webdav", "web server"):
        if store_kinds.is_installed(kind):
            made[kind] = store_kinds.make(kind, tmp_path_factory.mktemp("web"))
    yield made
    for server in made.values():
        server.end()


@pytest.fixture
def server(request, servers, monkeypatch):
    if request.param not in servers:
        pytest.skip(f"{request.param} is not installed")
    server = servers[request.param]
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.fault()
    yield server
    server.fault()


webdav = pytest.mark.parametrize("server", ["webdav"], indirect=True)
plain = pytest.mark.parametrize("server", ["web server"], indirect=True)


@plain
def test_a_server_without_listings_says_how_to_go_on(ckptfs, server, tmp_path):
    expected = write_shards(tmp_path / "model", 1, 3, 2, 8)
    url = server.upload(tmp_path / "model", "model")
    listed = ckptfs("ls", server.url.rsplit("/", 1)[0])
    assert listed.code == FAILED and "lists no directories" in listed.stderr
    assert "what to do: give the URL of a file, or of the index of its shards" in listed.stderr
    check_same(load_file(f"{url}/model.safetensors.index.json", backend="pread"), expected)
    assert ckptfs("inspect", f"{url}/model-00001-of-00003.safetensors").code == DONE


@webdav
def test_an_object_is_looked_at_before_a_listing_is_asked_for(ckptfs, server):
    server.put("plain/model.safetensors", save({"a": torch.ones(3)}))
    server.fault()
    assert ckptfs("inspect", f"{server.url}/plain/model.safetensors").code == DONE
    methods = server.stats["methods"]
    assert "PROPFIND" not in methods and methods["HEAD"] >= 1


@webdav
def test_answers_without_the_etag_of_the_listing_are_refused(mounts, server):
    server.put("untagged/model.safetensors", save({"a": torch.ones(900_000)}))
    mount = mounts(f"{server.url}/untagged")
    server.fault(remove=["etag"])
    with pytest.raises(OSError):
        (mount / "model.safetensors").read_bytes()


@plain
def test_a_server_without_any_version_is_refused(server):
    server.put("unversioned/model.safetensors", save({"a": torch.ones(3)}))
    url = f"{server.url}/unversioned/model.safetensors"
    # Its times are enough.
    assert load_file(url)["a"].tolist() == [1, 1, 1]
    server.fault(remove=["last-modified"])
    with pytest.raises(package.SafetensorError, match="neither an ETag nor Last-Modified"):
        load_file(url)


class WithSlashes(http.server.SimpleHTTPRequestHandler):
    """Python's server: it adds a slash to the names of directories, and answers no ranges."""

    def log_message(self, *_):
        pass


@pytest.fixture
def python_server(tmp_path, monkeypatch):
    monkeypatch.setenv("CKPTFS_ALLOW_HTTP", "1")
    with serve(partial(WithSlashes, directory=str(tmp_path))) as address:
        yield address


class WithWeakEtag(http.server.BaseHTTPRequestHandler):
    """Answers every path with the same bytes, whose ETag is a weak one."""

    protocol_version = "HTTP/1.1"
    content = b""
    version = 1

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, end = 0, len(self.content)
        if wanted:
            start, end = int(wanted[1]), min(end, int(wanted[2] or end) + 1)
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(self.content)}")
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", f'W/"{self.version}"')
        self.send_header("Last-Modified", "Thu, 01 Oct 2026 10:00:00 GMT")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.content[start:end])


@pytest.fixture
def weak_server(monkeypatch):
    monkeypatch.setenv("CKPTFS_ALLOW_HTTP", "1")
    handler = type("Handler", (WithWeakEtag,), {})
    with serve(handler) as address:
        yield handler, f"{address}/model.safetensors"


def test_a_weak_etag_is_compared_in_each_answer_and_noted(mounts, weak_server):
    handler, url = weak_server
    # Larger than what a first request brings.
    handler.content = save({"a": torch.full((1 << 20,), 1.0), "b": torch.full((1 << 20,), 2.0)})
    mount = mounts(url)
    assert (mount / "model.safetensors").read_bytes() == handler.content
    until("the note is there", lambda: "states no strong ETag" in mount.logged())
    with package.safe_open(url, "pt") as opened:
        assert opened.get_tensor("a").unique().tolist() == [1]
        handler.content = save({"a": torch.full((1 << 20,), 3.0), "b": torch.full((1 << 20,), 4.0)})
        handler.version = 2
        with pytest.raises(package.SafetensorError, match="changed"):
            opened.get_tensor("b")
    assert load_file(url)["b"].unique().tolist() == [4]


def test_a_redirect_to_a_slash_is_a_directory(ckptfs, python_server, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/model.safetensors").write_bytes(save({"a": torch.ones(3)}))
    for command in ("ls", "inspect"):
        refused = ckptfs(command, f"{python_server}/folder")
        assert refused.code == FAILED and "lists no directories" in refused.stderr, refused
        assert "what to do: give the URL of a file" in refused.stderr


def test_a_server_without_ranges_is_refused(ckptfs, python_server, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(save({"a": torch.ones(3)}))
    refused = ckptfs("inspect", f"{python_server}/model.safetensors")
    assert refused.code == REFUSED and "does not answer ranges" in refused.stderr, refused
    assert "what to do: download it" in refused.stderr


@pytest.mark.parametrize("path", ["a%2Fb.safetensors", "%2e%2e/b.safetensors", "%ff.safetensors"])
def test_a_url_that_is_no_path_is_refused(ckptfs, python_server, path):
    refused = ckptfs("inspect", f"{python_server}/{path}")
    assert refused.code == FAILED and "the URL " in refused.stderr and "what to do: check the URL" in refused.stderr


@pytest.fixture
def internet(monkeypatch):
    """A proxy that redirects requests for hosts of the internet. Yields the redirects by host, and a list of the requested
    hosts."""
    redirects, asked = {}, []

    def answer(handler):
        host = handler.path.split("/")[2]
        asked.append(host)
        handler.send_response(302)
        handler.send_header("Location", redirects[host])
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with serve_with(answer) as proxy:
        monkeypatch.setenv("CKPTFS_ALLOW_HTTP", "1")
        monkeypatch.setenv("HTTP_PROXY", proxy)
        for name in ("http_proxy", "ALL_PROXY", "all_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        # A name that this machine resolves itself.
        monkeypatch.setenv("NO_PROXY", "localhost")
        yield redirects, asked


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "169.254.169.254", "10.0.0.1", "[fd00:ec2::254]"])
def test_no_redirect_leads_from_the_internet_to_a_private_address(ckptfs, internet, host):
    redirects, asked = internet
    private = []
    with serve_with(lambda handler: private.append(handler.path)) as address:
        port = address.rsplit(":", 1)[1]
        # At once, and after another host of the internet.
        redirects["models.example"] = "http://mirror.example/model.safetensors"
        redirects["mirror.example"] = redirects["direct.example"] = f"http://{host}:{port}/model.safetensors"
        for first in ("direct.example", "models.example"):
            refused = ckptfs("inspect", f"http://{first}/model.safetensors")
            assert refused.code == FAILED and f"redirects to {host.strip('[]')}" in refused.stderr.replace("[", "").replace("]", ""), refused
            assert "what to do: give the URL that it redirects to, if you trust that host" in refused.stderr
    assert private == [] and set(asked) == {"direct.example", "models.example", "mirror.example"}
