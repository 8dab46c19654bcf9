"""fastsafetensors and the Run:ai Model Streamer read virtual files through a mount as they read an export: every
tensor, bit for bit.

They read past the page cache or with threads of their own. A virtual file may come from shards, a pickle, or a pickle
with strided tensors.
"""

import os
import subprocess
import sys

import pytest
import torch
from fastsafetensors import SafeTensorsFileLoader, fastsafe_open
from runai_model_streamer import SafetensorsStreamer, list_safetensors

from compare import bits
from program import COMMON
from samples import numbers, strided_tensors, write_shards

# More than one of the streamers' blocks, and than one of the mount's.
SIDE = 1500


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """Models, and the tensors of each by name."""
    folder = tmp_path_factory.mktemp("models")
    expected = {"sharded": write_shards(folder / "sharded", 1, 3, 2, SIDE)}
    expected["pickled"] = {f"t{n}": numbers(n, SIDE, 700) for n in range(4)}
    expected["pickled"]["odd"] = numbers(9, 777)[:, None].half()
    expected["strided"] = strided_tensors(2)
    for name in ("pickled", "strided"):
        (folder / name).mkdir()
        torch.save(expected[name], folder / name / "pytorch_model.bin")
    return folder, expected


@pytest.fixture(params=[[], ["--no-passthrough"]], ids=str)
def mounted(source, mounts, request):
    folder, expected = source
    return mounts(folder, *request.param), expected


def check(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        assert torch.equal(bits(got[name]), bits(tensor.contiguous())), name


# By default it reads directly; on a machine with the device, past the processor. A mount must not refuse that.
@pytest.mark.parametrize("direct", [None, "0", "1"])
@pytest.mark.parametrize("nogds", [False, True])
def test_fastsafetensors_reads_every_tensor_with_and_without_direct_reads(mounted, monkeypatch, caplog, capfd, nogds, direct):
    if direct is not None:
        monkeypatch.setenv("FASTSAFETENSORS_ODIRECT", direct)
    mount, models = mounted
    for name, expected in models.items():
        path = str(mount / name / "model.safetensors")
        with fastsafe_open(path, framework="pt", device="cpu", nogds=nogds) as file:
            check({key: file.get_tensor(key) for key in file.keys()}, expected)
    told = caplog.text + "".join(capfd.readouterr())
    assert "O_DIRECT" not in told, "refuses direct reads"


def test_fastsafetensors_reads_several_files_in_one_call(mounted):
    """All in one call, with few and small buffers, as an engine loads the files of a glob."""
    mount, models = mounted
    loader = SafeTensorsFileLoader(None, "cpu", bbuf_size_kb=64, max_threads=4, nogds=True)
    two = ("pickled", "strided")
    loader.add_filenames({0: [str(mount / name / "model.safetensors") for name in two]})
    buffers = loader.copy_files_to_device()
    expected = models["pickled"] | models["strided"]
    check({key: buffers.get_tensor(key) for key in loader.get_keys()}, expected)
    buffers.close()
    loader.close()


def streamed(paths):
    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(path) for path in paths])
        # Copied before the next: the streamer reuses its memory.
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


def test_runai_model_streamer_reads_every_tensor(mounted):
    mount, models = mounted
    for name, expected in models.items():
        paths = list_safetensors(str(mount / name))
        assert paths == [str(mount / name / "model.safetensors")]
        check(streamed(paths), expected)


def test_runai_model_streamer_reads_several_files_in_one_call(mounted):
    mount, models = mounted
    two = ("pickled", "strided")
    got = streamed(mount / name / "model.safetensors" for name in two)
    check(got, models["pickled"] | models["strided"])


# Each alone, so that none can stand in for one that does not work.
@pytest.mark.parametrize("strategy", ["io_uring_direct", "libaio_direct", "sync_buffered"])
def test_runai_model_streamer_reads_the_same_by_every_strategy(source, mounts, ckptfs, tmp_path, strategy):
    folder, _ = source
    mount = mounts(folder)
    exported = ckptfs.export(folder / "strided", tmp_path / "strided.safetensors")
    done = subprocess.run(
        [sys.executable, COMMON / "runai_stream.py",
         mount / "strided/model.safetensors", exported],
        env=os.environ | {
            "RUNAI_STREAMER_FS_STRATEGY": strategy,
            "RUNAI_STREAMER_LOG_LEVEL": "DEBUG",
            "RUNAI_STREAMER_LOG_TO_STDERR": "1",
        },
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = done.stderr
    assert f"Filesystem strategy: {strategy} " in told, told
    # It would read otherwise where direct reads are refused, and say no more than this.
    assert "serves direct reads at a block of" in told, told
    if strategy != "sync_buffered":
        assert f"Async io worker ready: {strategy}" in told, told
    for sign in ("refused", "ould not measure", "does not support O_DIRECT"):
        assert sign not in told, told
