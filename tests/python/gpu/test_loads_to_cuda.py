"""Loads to CUDA devices give every bit to the next user of the stream, or an error and nothing.

PyTorch is the real one, on stubs of CUDA's runtime and driver.
"""

import tempfile
from pathlib import Path

import pytest
import torch
from ckptfs.dtypes import TYPES
from safetensors.torch import save_file

import cuda_arrays
import cuda_loads
import training
from cuda_stubs import run
from pickles import turned_round
from program import REPOSITORY
from samples import numbers, small_tensors, write_all, write_shards

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda")
    write_all(folder / "all", 5)
    every = {}
    for name in set(TYPES.values()):
        kind = getattr(torch, name)
        size = 24 * kind.itemsize
        every[name] = (torch.arange(3 * size) % 2).to(torch.uint8).view(3, size).view(kind)
    every |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(2.5), "one": torch.tensor([7])}
    save_file(every, folder / "kinds.safetensors")
    mixed = {"small.a": numbers(2, 100), "large": numbers(3, 5, MIB), "small.b": numbers(4, 3, 5),
             "large.b": numbers(5, 4 * MIB + 1), "none": torch.empty(2, 0), "small.c": torch.arange(9)}
    save_file(mixed, folder / "mixed.safetensors")
    save_file(small_tensors(6, 400), folder / "small.safetensors")
    return folder


def is_clean(report, pinned=64 * MIB):
    """Asserts that the stub found no fault, and that only the chunks kept for the next load stay pinned."""
    assert report["faults"] == [] and report["sticky"] is None, report
    assert report["allocated"]["pinned"]["bytes"] <= pinned, report


def test_every_kind_of_checkpoint_loads_to_a_device(folder):
    virtual_files = ["sharded", "loose/small.bin", "loose/strided.pt", "loose/swapped.pt", "loose/legacy.pth"]
    paths = [folder / "all" / virtual_file for virtual_file in virtual_files]
    paths += [folder / name for name in ("kinds.safetensors", "mixed.safetensors", "small.safetensors")]
    is_clean(run(cuda_loads.loads, [str(path) for path in paths]))


@pytest.mark.parametrize(("what", "name"), [
    (cuda_loads.small_tensors_share_blocks, "small.safetensors"),
    (cuda_loads.streams_keep_their_order, "mixed.safetensors"),
    (cuda_loads.prefetch_hands_over, "mixed.safetensors"),
    (cuda_loads.handed_over_memory_stays, "mixed.safetensors"),
    (cuda_loads.is_stopped, "mixed.safetensors"),
    (cuda_loads.lands_in_place, "mixed.safetensors"),
    (cuda_loads.casts_there, "mixed.safetensors"),
    (cuda_loads.casts_of_a_recipe, "mixed.safetensors"),
    (cuda_loads.many_threads, "mixed.safetensors"),
    (cuda_loads.forked, "small.safetensors"),
    (cuda_loads.in_steps, "mixed.safetensors"),
    (cuda_arrays.as_fastsafetensors_does, "mixed.safetensors"),
    (cuda_arrays.uses_memory_of_a_device, "mixed.safetensors"),
    (cuda_loads.nothing_is_held, "mixed.safetensors"),
    (cuda_loads.refuses_a_capture, "mixed.safetensors"),
    (cuda_arrays.forked_arrays, "mixed.safetensors"),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_every_use_of_a_device_ends_without_fault_or_leak(what, name, folder):
    is_clean(run(what, str(folder / name)))


def test_tensors_of_any_layout_are_cast_on_the_way_to_a_device(tmp_path):
    # Few values: the stub interprets the kernels.
    torch.save({"w": numbers(1, 12, 5)}, tmp_path / "plain.pt")
    torch.save({"w": numbers(1, 12, 5).t()}, tmp_path / "strided.pt")
    turned_round(tmp_path / "plain.pt", tmp_path / "swapped.pt", 4)
    columns = [("w", ((0, 0), (12, 2))), ("w", ((0, 2), (12, 3)))]
    writer = training.FileSystemWriter(tmp_path / "boxed", sync_files=False)
    training.save_pieces(writer, {"w": numbers(1, 12, 5)}, [columns])
    torch.save({f"layers.{n}.w": numbers(n, 4, 3) for n in range(3)}, tmp_path / "layers.pt")
    is_clean(run(cuda_loads.casts_of_any_layout, str(tmp_path)))


def test_parts_of_a_model_load_to_devices_of_their_own(tmp_path):
    write_shards(tmp_path / "model", 3, 3, 4, 300)
    is_clean(run(cuda_loads.is_placed, str(tmp_path / "model"), ["layers.0", "layers.2"], DEVICES=2))


def test_a_full_device_is_an_error(folder):
    is_clean(run(cuda_loads.has_no_room, str(folder / "mixed.safetensors"), MEMORY=24 * MIB))


def test_a_load_without_pinned_memory_works(folder):
    report = run(cuda_loads.pins_nothing, str(folder / "mixed.safetensors"), PINNED=0)
    is_clean(report)
    assert report["peak"]["pinned"] == 0


def test_a_load_with_little_pinned_memory_works(folder):
    report = run(cuda_loads.pins_little, str(folder / "mixed.safetensors"), "4M", PINNED=8 * MIB)
    is_clean(report)
    assert report["peak"]["pinned"] == 8 * MIB


@pytest.mark.parametrize(("call", "told"), [
    ("cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync"), ("cuEventRecord", "cuEventRecord"),
    ("cuStreamWaitEvent", "cuStreamWaitEvent"),
])  # fmt: skip
def test_a_driver_call_that_fails_is_an_error(folder, call, told):
    run(cuda_loads.fails_and_goes_on, str(folder / "mixed.safetensors"), told, FAIL=f"{call}:1=2")


def test_a_file_that_is_truncated_meanwhile_is_an_error(folder, tmp_path):
    path = tmp_path / "mixed.safetensors"
    path.write_bytes((folder / "mixed.safetensors").read_bytes())
    is_clean(run(cuda_loads.truncated_meanwhile, str(path)))


def test_storage_writes_straight_to_the_device(tmp_path):
    # Storage writes straight to a device only from files on a disk.
    with tempfile.TemporaryDirectory(dir=REPOSITORY / "target") as place:
        path = Path(place) / "large.safetensors"
        save_file({"a": numbers(1, 3 * MIB), "b": numbers(2, 100), "c": numbers(3, 2 * MIB)}, path)
        is_clean(run(cuda_loads.storage_writes, str(path)))


def test_transformers_loads_to_a_device(tmp_path):
    import models

    models.save_shards(models.llama(), tmp_path / "model")
    # Nothing waits for the copies meanwhile, so that no chunk is seen to be idle.
    is_clean(run(cuda_loads.transformers_on_a_device, str(tmp_path / "model")), pinned=512 * MIB)


def test_several_ranks_load_to_devices(folder):
    run(cuda_loads.several_ranks, str(folder))


def test_an_integrated_device_uses_host_memory_without_a_copy(folder):
    """Nothing is copied there, and nothing is given back while work of the device may use it."""
    report = run(cuda_loads.shares_memory, str(folder / "mixed.safetensors"), ATTRIBUTES="INTEGRATED=1")
    is_clean(report, pinned=0)
    assert "cuMemcpyHtoDAsync_v2" not in report["calls"]
