"""Presigned URLs: the query string comes from a file or standard input, and is shown and kept nowhere."""

import json
import os
import subprocess

import ckptfs as package
import pytest
from ckptfs.torch import load_file
from safetensors.torch import load
from safetensors.torch import load_file as load_plain

from cloud import Cloud, new_query
from compare import check_same
from program import DONE, FAILED, find_binary
from stores import SECRET


@pytest.fixture
def web(store_cloud, models, monkeypatch, tmp_path):
    """A server with the files of `models`, which demands one of `queries`; and the URL of its folder."""
    store_cloud.reset()
    monkeypatch.setenv("CKPTFS_ALLOW_HTTP", "1")
    monkeypatch.setenv("CKPTFS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CKPTFS_CACHE_MIN_FREE", "0")
    for path in models[0].rglob("*"):
        if path.is_file():
            store_cloud.files[f"/web/{path.relative_to(models[0])}"] = path.read_bytes()
    store_cloud.url = f"{store_cloud.address}/web"
    return store_cloud


@pytest.fixture
def presigned(web, tmp_path):
    """The query string that the server takes, and the file that has it."""
    query = new_query()
    web.queries = {query}
    file = tmp_path / "query.txt"
    file.write_text(query + "\n")
    return query, file


def test_a_presigned_url_is_read_by_every_way(ckptfs, mounts, web, presigned, models, tmp_path):
    query, file = presigned
    for name in ("pickled/pytorch_model.bin", "sharded/model-00001-of-00003.safetensors"):
        url, expected = f"{web.url}/{name}", load_file(models[0] / name)
        for text in (query, f"?{query}", f"{url}?{query}\n"):
            file.write_text(text)
            check_same(load_plain(ckptfs.export(f"{url}?@{file}", tmp_path / "out.safetensors", "--force")), expected)
        check_same(load_file(f"{url}?@{file}", backend="pread"), expected)
        with package.safe_open(f"{url}?@{file}", framework="pt") as opened:
            assert sorted(opened.keys()) == sorted(expected)
        mount = mounts(f"{url}?@{file}")
        [shown] = [path for path in mount.point.iterdir()]
        # Not mapped: the server runs in this process, and a page fault would hold its lock.
        check_same(load(shown.read_bytes()), expected)
        # The mount keeps its query string to itself.
        check_same(load_file(shown, backend="pread"), expected)
    file.write_text(query)
    # The shards of an index lie beside it.
    check_same(load_file(f"{web.url}/sharded/model.safetensors.index.json?@{file}"), load_file(models[0] / "sharded"))
    assert {method for method, _ in web.requests} == {"GET"}


def test_the_query_comes_from_standard_input_too(ckptfs, web, presigned, models, tmp_path):
    query, _ = presigned
    url = f"{web.url}/pickled/pytorch_model.bin"
    run = lambda *words: subprocess.run([find_binary(), *map(str, words)], input=query, text=True, capture_output=True, timeout=60)
    done = run("export", f"{url}?@-", tmp_path / "out.safetensors")
    assert done.returncode == DONE, done.stderr
    check_same(load_plain(tmp_path / "out.safetensors"), load_file(models[0] / "pickled"))
    (tmp_path / "mnt").mkdir()
    done = run("mount", f"{url}?@-", tmp_path / "mnt")
    try:
        assert done.returncode == DONE, done.stderr
        [shown] = [path for path in (tmp_path / "mnt").iterdir()]
        check_same(load(shown.read_bytes()), load_file(models[0] / "pickled"))
    finally:
        subprocess.run([find_binary(), "unmount", tmp_path / "mnt"], timeout=60)


def test_a_file_that_does_not_fit_is_refused(ckptfs, web, presigned, tmp_path):
    query, file = presigned
    url = f"{web.url}/pickled/pytorch_model.bin"
    for text, why in [
        ("", "it is empty"),
        (f"https://example.com/x?{query}", "another host or path"),
        (f"{web.url}/pickled/optimizer.pt?{query}", "another host or path"),
        (f"{query}\n{query}", "not one line"),
    ]:
        file.write_text(text)
        refused = ckptfs("inspect", f"{url}?@{file}")
        assert refused.code == FAILED and why in refused.stderr and f"write the presigned URL, or what follows its `?`, to {file}" in refused.stderr
        assert SECRET not in refused.stderr
    file.unlink()
    assert "cannot read it: No such file" in ckptfs("inspect", f"{url}?@{file}").stderr
    assert "https:// and az://" in ckptfs("inspect", f"s3://bucket/x?@{file}").stderr
    for typed in (f"{url}?{query}", f"s3://bucket/x?{query}"):
        with pytest.raises(Exception, match=r"\?@FILE") as refusal:
            load_file(typed)
        assert SECRET not in str(refusal.value)


def test_an_expired_query_is_read_again_from_its_file(mounts, web, presigned, models, ckptfs):
    _, file = presigned
    url = f"{web.url}/sharded/model-00001-of-00003.safetensors"
    mount = mounts(f"{url}?@{file}", "--verbose")
    [path] = [path for path in mount.point.iterdir()]
    web.queries = {new_query()}
    with pytest.raises(OSError):
        path.read_bytes()
    refused = ckptfs("inspect", f"{url}?@{file}")
    assert refused.code == FAILED and "it has expired, or belongs to another object" in refused.stderr
    assert f"what to do: presign the URL again, and write it to {file}" in refused.stderr
    assert f"{url}?…" in refused.stderr and f"{url}?…" in mount.logged()
    [query] = web.queries
    file.write_text(query)
    assert path.read_bytes() == web.files["/web/sharded/model-00001-of-00003.safetensors"]
    # The server repeats what it was asked for.
    assert SECRET not in refused.stderr + mount.logged()


def test_a_redirect_to_another_host_does_not_carry_the_query(ckptfs, web, presigned, server):
    _, file = presigned
    other = Cloud(server)
    try:
        name = "/web/pickled/pytorch_model.bin"
        other.files[name] = web.files[name]
        web.redirects[name] = f"{other.address}{name}?own=1"
        assert ckptfs("inspect", f"{web.address}{name}?@{file}").code == DONE
        assert other.requests and {path for _, path in other.requests} == {f"{name}?own=1"}
    finally:
        other.end()


def test_the_query_is_shown_and_kept_nowhere(ckptfs, mounts, web, presigned, tmp_path, monkeypatch):
    query, file = presigned
    monkeypatch.setenv("RUST_LOG", "trace")
    url = f"{web.url}/pickled/pytorch_model.bin"
    file.write_text(f"{url}?{query}")
    mount = mounts(f"{url}?@{file}", "-vvv")
    [path] = [path for path in mount.point.iterdir()]
    first = os.getxattr(path, "user.ckptfs.identity")
    assert path.read_bytes()
    texts = [mount.logged(), json.dumps(mount.stats()), open("/proc/mounts").read()]
    texts += [open(f"/proc/{mount.pid}/cmdline").read(), os.getxattr(path, "user.ckptfs.source").decode()]
    assert mount.stats()["source"] == f"{url}?…" and f"{url}?…" in texts[4] and "?…" in texts[2].replace("\\342\\200\\246", "…")
    for command in (["status"], ["status", "--json"], ["inspect", f"{url}?@{file}"], ["cache", "ls"]):
        done = subprocess.run([find_binary(), *command], capture_output=True, text=True, timeout=60)
        texts += [done.stdout, done.stderr]
    kept = [kept.read_bytes() for kept in (tmp_path / "cache").rglob("*") if kept.is_file()]
    assert kept and len(texts[0]) > 1000
    assert not any(SECRET in text for text in texts) and not any(SECRET.encode() in data for data in kept)
    # Its entry in the cache is chosen by any of these.
    for form in (f"{url}?@{file}", url, f"{url}?…"):
        [entry] = json.loads(subprocess.check_output([find_binary(), "cache", "ls", "--json", form], timeout=60))
        assert entry["url"] == f"{url}?…"
    # Another query of the same object is the same object, also in the cache.
    query = new_query()
    web.queries = {query}
    file.write_text(query)
    other = mounts(f"{url}?@{file}")
    [path] = [path for path in other.point.iterdir()]
    assert os.getxattr(path, "user.ckptfs.identity") == first and path.read_bytes()
    fetched = other.stats()["store"]
    assert fetched["cached_bytes"] >= len(web.files["/web/pickled/pytorch_model.bin"]) > 2 * fetched["bytes"]
