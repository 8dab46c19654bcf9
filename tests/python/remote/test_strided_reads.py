"""Tensors that are strided in their files are fetched once from a store, by few requests, also without a cache on disk."""

import subprocess

import ckptfs as package
import pytest
import torch
from ckptfs.torch import load_file
from safetensors.torch import load_file as load_plain
from torch.distributed.checkpoint import FileSystemWriter

from compare import check_same
from program import DONE, find_binary
from training import save_pieces

MIB = 1 << 20

# Loads of a mapped file until the kernel has kept all pages of one.
MAX_LOADS = 10


def write_strided(path):
    """Writes a transposed matrix, columns of a matrix that others have the rest of, and experts that are each transposed."""
    generator = torch.Generator().manual_seed(7)
    numbers = lambda *shape: torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=generator)
    fused = numbers(1500, 1536)
    torch.save(
        {
            "transposed": numbers(2900, 3000).t(),
            "q": fused[:, :512],
            "k": fused[:, 512:1024],
            "v": fused[:, 1024:],
            "experts": numbers(4, 700, 1100).transpose(1, 2),
            "whole": numbers(300_000),
        },
        path,
    )
    return path


@pytest.fixture(scope="module")
def strided(server, tmp_path_factory):
    """The folder of a pickle with strided tensors, and its URL."""
    folder = tmp_path_factory.mktemp("strided")
    write_strided(folder / "pytorch_model.bin")
    return folder, server.upload(folder, "strided")


def check_fetched_once(store, folder, most=1.1):
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    stats = store.stats
    assert stats["bytes"] <= most * size, (stats, size)
    assert stats["requests"] <= 32 + most * size / (2 * MIB), (stats, size)


def read_through(path):
    with path.open("rb") as file:
        while file.read(MIB):
            pass


@pytest.mark.parametrize("memory", [None, 16 * MIB])
def test_a_load_fetches_strided_tensors_once(store, strided, memory):
    folder, url = strided
    store.fault(latency_ms=5)
    loaded = load_file(url, backend="pread", memory=memory)
    check_fetched_once(store, folder)
    assert memory or store.stats["most_at_once"] >= 4
    check_same(loaded, torch.load(folder / "pytorch_model.bin"))
    assert package.last_report().remote >= 0.99 * sum(tensor.nbytes for tensor in loaded.values())


def test_one_strided_tensor_fetches_its_span(store, strided):
    folder, url = strided
    store.fault()
    [loaded] = load_file(url, names="transposed", backend="pread").values()
    stats = store.stats
    assert stats["bytes"] <= 1.1 * loaded.nbytes and stats["requests"] <= 20, stats
    assert torch.equal(loaded, torch.load(folder / "pytorch_model.bin")["transposed"])


@pytest.mark.parametrize("program", ["export", "stream", "verify", "compare"])
def test_a_command_fetches_strided_tensors_once(ckptfs, store, strided, tmp_path, program):
    folder, url = strided
    out = tmp_path / "out.safetensors"
    store.fault(latency_ms=5)
    if program == "export":
        assert ckptfs("export", url, out).code == DONE
    elif program == "stream":
        with out.open("wb") as file:
            subprocess.run([find_binary(), "export", url, "-"], stdout=file, check=True)
    else:
        against = ["--against", folder] if program == "compare" else []
        assert ckptfs("verify", url, *against).code == DONE
    # Tensors are compared one by one, so that columns of one matrix are fetched with their neighbors.
    check_fetched_once(store, folder, most=1.5 if program == "compare" else 1.1)
    if out.exists():
        check_same(load_plain(out), torch.load(folder / "pytorch_model.bin"))


def test_a_mount_fetches_strided_tensors_once(mounts, store, strided):
    folder, url = strided
    mount = mounts(url, "--memory", "192M")
    store.fault(latency_ms=5)
    read_through(mount / "model.safetensors")
    check_fetched_once(store, folder)
    check_same(load_plain(mount / "model.safetensors"), torch.load(folder / "pytorch_model.bin"))
    assert mount.resident()[1] <= (192 + 64) * MIB


def test_a_tensor_larger_than_the_memory_is_fetched_once_for_each_window(mounts, store, strided):
    folder, url = strided
    mount = mounts(url, "--memory", "64M")
    store.fault()
    read_through(mount / "model.safetensors")
    # The transposed matrix, three fifths of the file, has two windows, and each needs nearly all of it. The three parts of
    # the fused one do not fit together, and each needs all of it. Another fetch of a window would exceed this.
    check_fetched_once(store, folder, most=2.2)


def test_a_tensor_larger_than_the_memory_is_fetched_a_few_times(mounts, store, strided):
    folder, url = strided
    expected = torch.load(folder / "pytorch_model.bin")
    for _ in range(MAX_LOADS):
        mount = mounts(url, "--memory", "64M")
        store.fault()
        check_same(load_plain(mount / "model.safetensors"), expected)
        # A kernel that reclaims pages of the mapping requests them a second time.
        if mount.stats()["bytes_served"] == (mount / "model.safetensors").stat().st_size:
            break
    else:
        pytest.fail(f"the kernel reclaimed pages during each of {MAX_LOADS} loads")
    # Not once for each block.
    check_fetched_once(store, folder, most=3)


def test_a_checkpoint_cut_by_columns_is_fetched_once(ckptfs, mounts, store, tmp_path):
    folder = tmp_path / "columns"
    weight = torch.arange(1600 * 2048, dtype=torch.float32).reshape(1600, 2048)
    boxes = [[("weight", ((0, start), (1600, 512)))] for start in range(0, 2048, 512)]
    save_pieces(FileSystemWriter(folder, sync_files=False), {"weight": weight}, boxes)
    url = store.upload(folder, "columns")
    store.fault()
    check_same(load_file(url, backend="pread"), {"weight": weight})
    check_fetched_once(store, folder)
    store.fault()
    assert ckptfs("verify", url).code == DONE
    check_fetched_once(store, folder)
    mount = mounts(url)
    store.fault()
    check_same(load_plain(mount / "model.safetensors"), {"weight": weight})
    check_fetched_once(store, folder)


def test_the_cache_on_disk_keeps_strided_tensors(store, cache, strided):
    folder, url = strided
    store.fault()
    loaded = load_file(url, backend="pread")
    check_fetched_once(store, folder)
    store.fault()
    check_same(load_file(url, backend="pread"), loaded)
    assert store.stats["bytes"] < MIB and package.last_report().disk_cached > 0
