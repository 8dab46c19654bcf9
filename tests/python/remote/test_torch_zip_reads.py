"""Torch archives in a store: a listing costs two requests a file. Deduced offsets are checked before any byte of their
record is used."""

import json
import re
import struct
import zipfile

import ckptfs as package
import pytest
import torch
from ckptfs.torch import load_file
from safetensors.torch import load_file as load_plain

from compare import check_same
from program import DONE, FAILED, REFUSED
from samples import numbers

SHARD_COUNT = 40

TENSOR_COUNT = 20

# Offsets in the header of a record: method, lengths of the name and of the extra field.
METHOD, NAME_LENGTH, EXTRA_LENGTH = 8, 26, 28


def write_pickles(folder):
    """Writes a model in shards of torch.save. Each tensor takes more than a page of 64 KiB."""
    folder.mkdir()
    index = {}
    for shard in range(SHARD_COUNT):
        name = f"pytorch_model-{shard + 1:05}-of-{SHARD_COUNT:05}.bin"
        part = {f"layers.{shard}.{n}.weight": numbers(shard * 100 + n, 140, 140) for n in range(TENSOR_COUNT)}
        torch.save(part, folder / name)
        index |= dict.fromkeys(part, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def headers(path):
    """The offset of the header of each record, by its name in the folder of the archive."""
    with zipfile.ZipFile(path) as archive:
        return {info.filename.split("/", 1)[1]: info.header_offset for info in archive.infolist()}


def repack(path, **options):
    """Writes the records of an archive anew, as the zip files of other programs."""
    with zipfile.ZipFile(path) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in records:
            archive.writestr(name, content)


@pytest.fixture(scope="module")
def pickles(server, tmp_path_factory):
    folder = write_pickles(tmp_path_factory.mktemp("zip") / "pickles")
    return folder, server.upload(folder, "torch-zip/pickles")


def load_torch(folder):
    tensors = {}
    for path in sorted(folder.glob("*.bin")):
        tensors |= torch.load(path)
    return tensors


def test_a_listing_costs_two_requests_a_file(ckptfs, store, pickles):
    _, url = pickles
    store.fault(latency_ms=60)
    assert ckptfs("ls", url).code == DONE
    stats = store.stats
    # The index and the directory come on top.
    assert stats["requests"] <= 2 * SHARD_COUNT + 8
    assert stats["most_at_once"] >= 4


def test_a_load_checks_headers_by_the_requests_for_tensors(store, pickles):
    folder, url = pickles
    size = sum(path.stat().st_size for path in folder.glob("*.bin"))
    check_same(load_file(url, backend="pread"), load_torch(folder))
    store.fault()
    load_file(url, backend="pread")
    stats = store.stats
    # A shard takes one request for its tensors.
    assert stats["requests"] <= 3 * SHARD_COUNT + 8
    # Two pages of 64 KiB for the headers of each come on top.
    assert stats["bytes"] <= size + 2 * SHARD_COUNT * (64 << 10) + (256 << 10)


def test_a_tensor_of_many_parts_is_checked_once(store, tmp_path):
    tensors = {"large": numbers(1, 3000, 3000), "small": numbers(2, 10)}
    torch.save(tensors, tmp_path / "large.bin")
    store.put("torch-zip/large/large.bin", (tmp_path / "large.bin").read_bytes())
    store.fault()
    check_same(load_file("s3://bucket/torch-zip/large", backend="pread"), tensors)
    # Two for the pickle and the central directory, two edges, five parts, and at most one for the header.
    stats = store.stats
    assert stats["requests"] <= 2 + 2 + 5 + 1


@pytest.mark.parametrize("alignment", [1, 4096])
def test_archives_of_other_layouts_are_read_by_their_headers_at_once(ckptfs, store, tmp_path, alignment):
    path = tmp_path / "model.bin"
    tensors = {f"t{n}": numbers(n, 100, 700) for n in range(TENSOR_COUNT)}
    if alignment == 1:
        torch.save(tensors, path)
        repack(path)
    else:
        config = torch.utils.serialization.config.save
        before, config.storage_alignment = config.storage_alignment, alignment
        try:
            torch.save(tensors, path)
        finally:
            config.storage_alignment = before
    key = f"torch-zip/other-{alignment}"
    store.put(f"{key}/model.bin", path.read_bytes())
    store.fault(latency_ms=30)
    assert ckptfs("ls", f"s3://bucket/{key}").code == DONE
    stats = store.stats
    assert stats["most_at_once"] >= 4 and stats["requests"] <= TENSOR_COUNT + 8
    # Only headers are read, and no tensors.
    assert stats["bytes"] <= 4 * (64 << 10)
    check_same(load_file(f"s3://bucket/{key}"), tensors)
    check_same(load_file(f"s3://bucket/{key}"), torch.load(path))


# Changes to the header of a record that leave the central directory, and all offsets, as they are.
HEADER_CHANGES = {
    "extra": lambda data, at: struct.pack_into("<H", data, at + EXTRA_LENGTH, data[at + EXTRA_LENGTH] + 64),
    "name": lambda data, at: struct.pack_into("<H", data, at + NAME_LENGTH, data[at + NAME_LENGTH] - 1),
    "signature": lambda data, at: struct.pack_into("<I", data, at, 0),
    "method": lambda data, at: struct.pack_into("<H", data, at + METHOD, 8),
    "other": lambda data, at: struct.pack_into("<c", data, at + 30, b"X"),
}


def write_changed(path, record, change):
    tensors = {"a": numbers(1, 300), "large": numbers(2, 600, 500), "z": numbers(3, 30)}
    torch.save(tensors, path)
    data = bytearray(path.read_bytes())
    HEADER_CHANGES[change](data, headers(path)[record])
    path.write_bytes(data)


@pytest.mark.parametrize("change", HEADER_CHANGES)
def test_a_wrong_header_refuses_its_record(ckptfs, mounts, store, tmp_path, change):
    path = tmp_path / "wrong.bin"
    write_changed(path, "data/1", change)
    on_disk = ckptfs("inspect", path)
    assert on_disk.code == REFUSED and "wrong.bin: not a safe torch archive: record" in on_disk.stderr
    key = f"torch-zip/wrong-{change}"
    url = f"s3://bucket/{key}"
    store.put(f"{key}/wrong.bin", path.read_bytes())
    exported = ckptfs("export", url, tmp_path / "out.safetensors")
    assert exported.code == REFUSED and f"{url}/wrong.bin: not a safe torch archive: record" in exported.stderr
    assert not (tmp_path / "out.safetensors").exists()
    for backend in ("mmap", "pread"):
        for names in (None, "large"):
            with pytest.raises(package.SafetensorError, match=f"{url}/wrong.bin: not a safe torch archive"):
                load_file(url, backend=backend, names=names)
    with package.safe_open(url, framework="pt") as opened:
        # The end of a tensor, far from its header.
        with pytest.raises(package.SafetensorError, match="not a safe torch archive"):
            opened.get_slice("large")[590:]
        assert opened.get_tensor("a").shape == (300,)
    mount = mounts(url)
    shown = mount / "wrong.safetensors"
    with shown.open("rb") as file, pytest.raises(OSError):
        file.seek(shown.stat().st_size - 40_000)
        file.read(4096)
    assert "not a safe torch archive" in mount.logged()


@pytest.mark.parametrize("record", ["data.pkl", "byteorder"])
def test_a_wrong_header_of_the_pickle_refuses_the_file(ckptfs, store, tmp_path, record):
    path = tmp_path / "wrong.bin"
    write_changed(path, record, "extra")
    key = f"torch-zip/wrong-{record}"
    store.put(f"{key}/wrong.bin", path.read_bytes())
    for shown in (path, f"s3://bucket/{key}", f"s3://bucket/{key}/wrong.bin"):
        refused = ckptfs("inspect", shown)
        assert refused.code == REFUSED, refused
        assert "wrong.bin: not a safe torch archive: record" in refused.stderr
        assert "what to do: fetch it again, and do not trust it" in refused.stderr


@pytest.mark.parametrize("change", HEADER_CHANGES)
def test_a_wrong_header_in_another_layout_is_refused_as_on_disk(ckptfs, store, tmp_path, change):
    path = tmp_path / "wrong.bin"
    torch.save({"a": numbers(1, 300), "b": numbers(2, 30)}, path)
    repack(path)
    data = bytearray(path.read_bytes())
    HEADER_CHANGES[change](data, headers(path)["data/0"])
    path.write_bytes(data)
    key = f"torch-zip/other-wrong-{change}"
    store.put(f"{key}/wrong.bin", data)
    local, remote = ckptfs("inspect", path), ckptfs("inspect", f"s3://bucket/{key}/wrong.bin")
    assert local.code == remote.code == REFUSED
    assert local.stderr.replace(str(tmp_path), f"s3://bucket/{key}") == remote.stderr


def test_what_was_fetched_is_checked_offline(ckptfs, store, tmp_path, cache):
    # The headers of the tensors that are shown lie after those that are not, and before the tail of the file.
    model = {"a": numbers(1, 300, 300), "b": numbers(2, 300, 300)}
    torch.save({"optimizer": {"a": numbers(3, 300, 300)}, "model": model}, tmp_path / "model.pt")
    url = "s3://bucket/torch-zip/trained"
    store.put("torch-zip/trained/model.pt", (tmp_path / "model.pt").read_bytes())
    fetched = ckptfs("fetch", url)
    assert fetched.code == DONE, fetched.stderr
    store.fault()
    out = ckptfs.export(url, tmp_path / "out.safetensors", "--offline")
    assert store.stats["requests"] == 0
    check_same(load_plain(out), model)


@pytest.mark.parametrize("part", [slice(400_000, 600_000), slice(399_984, None), slice(0, 100)])
def test_a_part_of_a_storage_that_was_fetched_is_checked_offline(ckptfs, store, tmp_path, cache, part):
    whole = torch.arange(1_000_000, dtype=torch.float32)
    model = {"before": numbers(1, 300, 300), "part": whole[part], "after": numbers(2, 300, 300)}
    torch.save(model, tmp_path / "model.pt")
    key = f"torch-zip/part-{part.start}-{part.stop}"
    store.put(f"{key}/model.pt", (tmp_path / "model.pt").read_bytes())
    fetched = ckptfs("fetch", f"s3://bucket/{key}")
    assert fetched.code == DONE, fetched.stderr
    check_same(load_plain(ckptfs.export(f"s3://bucket/{key}", tmp_path / "out.safetensors", "--offline")), model)


def overlapping_archive(count=400, distance=16, name_bytes=40_000):
    """An archive whose directory has more headers than there is room for: each starts within the one before."""
    body = b"PK\3\4" + bytes(200 << 10)
    names = [b"a/%06d" % n + b"x" * name_bytes for n in range(count)]
    names[7] = names[7][:-8] + b"data.pkl"
    entries = b"".join(
        struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, 0, 0, 0, 0, 10, 10, len(name), 0, 0, 0, 0, 0, n * distance)
        + name
        for n, name in enumerate(names)
    )
    return body + entries + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(entries), len(body), 0)


def test_headers_that_overlap_are_refused_and_harm_no_other_file(ckptfs, store, tmp_path, cache):
    torch.save({"w": numbers(1, 30)}, tmp_path / "good.pt")
    store.put("torch-zip/overlapping/evil.pt", overlapping_archive())
    store.put("torch-zip/overlapping/good.pt", (tmp_path / "good.pt").read_bytes())
    for _ in range(2):
        refused = ckptfs("inspect", "s3://bucket/torch-zip/overlapping/evil.pt")
        assert refused.code == REFUSED and "evil.pt" in refused.stderr
        listed = ckptfs("ls", "s3://bucket/torch-zip/overlapping")
        assert "panicked" not in listed.stderr and "good.safetensors" in listed.stdout


@pytest.mark.parametrize("fault", [
    {"status": 403, "status_every": 1}, {"status": 500, "status_every": 1}, {"stall_after": 0, "stall_every": 1},
])  # fmt: skip
def test_a_pickle_that_cannot_be_read_is_an_error_of_that_file(ckptfs, store, tmp_path, monkeypatch, fault):
    monkeypatch.setenv("CKPTFS_STALL_TIMEOUT", "1")
    monkeypatch.setenv("CKPTFS_OUTAGE_TIMEOUT", "2")
    torch.save({"a": torch.ones(3)}, tmp_path / "model.bin")
    key = "torch-zip/unreadable"
    store.put(f"{key}/model.bin", (tmp_path / "model.bin").read_bytes())
    store.fault(path=f"/{key}/model.bin", method="GET", **fault)
    failed = ckptfs("inspect", f"s3://bucket/{key}")
    assert failed.code == FAILED
    assert re.search(f"s3://bucket/{key}/model.bin: cannot read bytes [0-9]+ to [0-9]+: ", failed.stderr)
    remedy = "check that these credentials may read it" if fault.get("status") == 403 else "check the network"
    assert f"what to do: {remedy}" in failed.stderr


def test_unreadable_pickles_are_an_error_of_the_first(ckptfs, store, tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "model.bin")
    key = "torch-zip/denied"
    for name in ("first.bin", "second.bin"):
        store.put(f"{key}/{name}", (tmp_path / "model.bin").read_bytes())
    store.fault(path=f"/{key}/", method="GET", status=403, status_every=1)
    failed = ckptfs("inspect", f"s3://bucket/{key}")
    denied = f"s3://bucket/{key}/first.bin: cannot read bytes [0-9]+ to [0-9]+: the store denies it"
    assert failed.code == FAILED and re.search(denied, failed.stderr)
    # If one can be read, the user is asked to choose.
    store.fault(path=f"/{key}/first", method="GET", status=403, status_every=1)
    several = ckptfs("inspect", f"s3://bucket/{key}")
    assert "several checkpoints" in several.stderr and f"such as s3://bucket/{key}/second.bin" in several.stderr
