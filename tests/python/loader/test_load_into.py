"""A load into the caller's memory lands whole or is refused before anything is read; saving from that memory works."""

import os
import pickle

import ckptfs
from ckptfs import _ckptfs
import ckptfs.numpy
import ckptfs.torch
import numpy
import pytest
import safetensors
import torch
from torch._subclasses import FakeTensorMode

from samples import numbers

Refused = ckptfs.SafetensorError


@pytest.fixture
def path(tmp_path):
    tensors = {"a": numbers(1, 30, 20), "b": torch.arange(9), "c": numbers(2, 30, 20)}
    ckptfs.torch.save_file(tensors, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def freed():
    tensor = torch.zeros(30, 20)
    tensor.untyped_storage().resize_(0)
    return tensor


def too_small():
    whole = torch.zeros(31, 20)
    part = whole[1:]
    whole.untyped_storage().resize_(30 * 20 * 4)
    return part


def fake():
    with FakeTensorMode():
        return torch.zeros(30, 20)


def distributed():
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return distribute_tensor(torch.zeros(30, 20), init_device_mesh("cpu", (1,)), [Replicate()])


@pytest.fixture(scope="module", autouse=True)
def alone():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(params=[freed, too_small, fake, distributed])
def without_memory(request):
    if request.param is distributed and not torch.distributed.is_available():
        pytest.skip("this torch has no tensors that are distributed")
    return request.param()


@pytest.mark.parametrize("how", [{}, {"progress": True}, {"dtype": torch.float16}], ids=str)
def test_targets_without_memory_are_refused(path, without_memory, how):
    if "dtype" in how and type(without_memory) is torch.Tensor:
        storage = without_memory.untyped_storage().nbytes() // 2
        offset = without_memory.storage_offset()
        without_memory = torch.zeros(31, 20, dtype=torch.float16).flatten()[offset:][:600].view(30, 20)
        without_memory.untyped_storage().resize_(storage)
    elif "dtype" in how:
        without_memory = without_memory.half()
    with pytest.raises(Refused, match="a: cannot be loaded into") as refused:
        ckptfs.torch.load_file(path, into={"a": without_memory}, **how)
    if type(without_memory) is not torch.Tensor:
        assert any(".to_local()" in note for note in refused.value.__notes__)


def test_the_local_part_of_a_distributed_tensor_is_a_target(path):
    target = distributed()
    ckptfs.torch.load_file(path, into={"a": target.to_local()})
    assert torch.equal(target.to_local(), numbers(1, 30, 20))


def test_empty_and_subclassed_targets_are_loaded_into(tmp_path, path):
    class Own(torch.Tensor):
        pass

    target = torch.zeros(30, 20).as_subclass(Own)
    ckptfs.torch.load_file(path, into={"a": target})
    assert torch.equal(target.as_subclass(torch.Tensor), numbers(1, 30, 20))
    ckptfs.torch.save_file({"e": torch.zeros(0, 3)}, tmp_path / "e.safetensors")
    ckptfs.torch.load_file(tmp_path / "e.safetensors", into={"e": torch.zeros(0, 3)})


def test_a_nested_target_is_refused(path):
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(Refused, match="nested"):
        ckptfs.torch.load_file(path, into={"a": nested})


def test_the_address_0_is_refused_by_the_engine_too(path):
    opened = ckptfs.safe_open(path, "pt")._handle._checkpoint
    with pytest.raises(ValueError, match="no memory"):
        _ckptfs.load_into([opened.tensor("a")], [0])


def test_tensors_without_memory_are_not_saved(tmp_path, without_memory):
    for save in ckptfs.torch.save, lambda t: ckptfs.torch.save_file(t, tmp_path / "y.safetensors"):
        with pytest.raises(Refused, match="a: cannot be saved"):
            save({"a": without_memory})
    assert not os.listdir(tmp_path)


def test_bytes_at_the_address_0_are_not_saved(tmp_path):
    spec = ckptfs.TensorSpec(dtype="float32", shape=[2], data_ptr=0, data_len=8)
    with pytest.raises(Refused, match="nowhere"):
        ckptfs.serialize({"a": spec})
    assert ckptfs.serialize({"a": ckptfs.TensorSpec(dtype="float32", shape=[0], data_ptr=0, data_len=0)})


@pytest.mark.parametrize("how", [{}, {"progress": True}, {"dtype": "float64"}], ids=str)
def test_places_that_share_memory_are_refused_before_anything_is_read(path, how, monkeypatch):
    monkeypatch.setattr("ckptfs.load.pipeline._PROGRESS_BYTES", 1)
    for module, zeros in (ckptfs.torch, torch.zeros), (ckptfs.numpy, numpy.zeros):
        kind = getattr(torch if zeros is torch.zeros else numpy, how.get("dtype", "float32"))
        whole = zeros(900, dtype=kind)
        into = {"a": whole[:600].reshape(30, 20), "c": whole[300:].reshape(30, 20)}
        with pytest.raises(Refused, match="a and c: .*share memory"):
            module.load_file(path, into=into, **how)
        assert not whole.any()


@pytest.mark.parametrize("saved", [["a", "tied"], ["tied"]], ids=str)
@pytest.mark.parametrize("module", [ckptfs.torch, ckptfs.numpy])
def test_one_target_under_two_names_is_loaded_once(tmp_path, saved, module):
    value = numbers(1, 30, 20)
    torch.save(dict.fromkeys(saved, value) | {"other": numbers(2, 5)}, tmp_path / "x.bin")
    made = torch.zeros(30, 20) if module is ckptfs.torch else numpy.zeros((30, 20), "f4")
    into = {"a": made, "tied": made, "other": made[0, :5] * 1}
    loaded = module.load_file(tmp_path / "x.bin", into=into)
    assert list(loaded) and all(loaded[name] is into[name] for name in into)
    assert torch.equal(torch.as_tensor(made), value) and ckptfs.last_report().tensors == 2


def test_one_target_for_two_tensors_is_refused(path):
    made = torch.zeros(30, 20)
    with pytest.raises(Refused, match="a and c: .*share memory") as refused:
        ckptfs.torch.load_file(path, into={"a": made, "c": made})
    assert "leave one out" in refused.value.__notes__[0] and not made.any()
    for nothing in {"nobody": made}, {"nobody": made, "nothing": made}:
        with pytest.raises(Refused, match="does not contain tensor"):
            ckptfs.torch.load_file(path, into=nothing)


@pytest.mark.parametrize("how", [{}, {"dtype": torch.float64}], ids=str)
def test_autograd_sees_that_a_target_changed(path, how):
    target = torch.zeros(30, 20, dtype=how.get("dtype"))
    weight = torch.ones(30, 20, dtype=how.get("dtype"), requires_grad=True)
    product = (weight * target).sum()
    ckptfs.torch.load_file(path, into={"a": target}, **how)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_elements_of_half_a_byte_have_no_target(tmp_path):
    header = b'{"x":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]}} '
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    memory = torch.zeros(64, dtype=torch.uint8)
    target = memory[:2].view(torch.float4_e2m1fn_x2).reshape(2, 1)
    with pytest.raises(Refused, match="F4 of shape"):
        ckptfs.torch.load_file(tmp_path / "x.safetensors", into={"x": target})
    with pytest.raises(Refused, match="F4 of shape"):
        ckptfs.torch.load_file(tmp_path / "x.safetensors")
    assert not memory.any()


def test_autograd_sees_it_after_a_load_that_failed(path):
    with ckptfs.safe_open(path, "pt", backend="pread") as file:
        os.truncate(path, 3000)
        target = torch.zeros(30, 20)
        from ckptfs.load.pipeline import load_named
        from ckptfs.load.torch import Torch
        from ckptfs.settings import LoadOptions

        with pytest.raises(Refused), file._handle.use() as checkpoint:
            load_named(checkpoint, LoadOptions(framework=Torch, into={"a": target}))
    assert target._version > 0


def test_system_errors_name_the_given_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for wrong, kind in ("nowhere/x.safetensors", FileNotFoundError), (".", IsADirectoryError):
        for save, made in (ckptfs.torch, torch.ones(2)), (ckptfs.numpy, numpy.ones(2)):
            with pytest.raises(kind) as refused:
                save.save_file({"a": made}, wrong)
            assert isinstance(refused.value, Refused | safetensors.SafetensorError)
            assert isinstance(refused.value, Refused)
            assert refused.value.filename == wrong and ".part" not in str(refused.value)
            again = pickle.loads(pickle.dumps(refused.value))
            assert isinstance(again, kind) and str(again) == str(refused.value)
    assert not os.listdir(tmp_path)


def test_metadata_is_a_dictionary_and_no_tensor():
    for wrong in [("a", "b")], "text", 3:
        with pytest.raises(TypeError, match="metadata"):
            ckptfs.torch.save({"a": torch.ones(2)}, metadata=wrong)
    with pytest.raises(Refused, match="__metadata__"):
        ckptfs.torch.save({"__metadata__": torch.ones(2)})
