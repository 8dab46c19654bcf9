"""Saving tensors of torch: as bytes, as a file, as a model, as a set of shards."""

import torch

from ckptfs import settings
from ckptfs.errors import error
from ckptfs.load.torch import memory_obstacle
from ckptfs.save import sharded
from ckptfs.save.serialize import TensorSpec, check_dtype, serialize, serialize_file
from ckptfs.save.shared_tensors import _find_shared_tensors, _remove_duplicate_names, split_tied


# Shards that are written at once where neither the call nor a setting says how many.
_SAVING_THREADS = 4


def save(tensors, metadata=None):
    """The bytes of a safetensors file with these tensors."""
    keep = []
    return serialize(_specs(tensors, keep), metadata)


def save_file(tensors, filename, metadata=None, *, any_suffix=False):
    """Writes these tensors as a safetensors file, which has its name only when it is whole. Tensors must be dense and
    contiguous, and share no memory; `save_model` and `save_sharded` also write tied weights. A name with the suffix of
    another format, such as "x.bin", is refused unless `any_suffix` is true.

        save_file({"weight": torch.ones(2, 3)}, "model.safetensors", metadata={"format": "pt"})
    """
    keep = []
    serialize_file(_specs(tensors, keep), filename, metadata, any_suffix=any_suffix)


def save_model(model, filename, metadata=None, force_contiguous=True, *, any_suffix=False):
    """Writes the tensors of a model as a safetensors file. Of those that share memory one is written, and the metadata
    names it for the others."""
    state = model.state_dict()
    metadata = dict(metadata) if metadata else {}
    for kept, removed in _remove_duplicate_names(state).items():
        for name in removed:
            metadata.setdefault(name, kept)
            del state[name]
    if force_contiguous:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    try:
        save_file(state, filename, metadata=metadata or None, any_suffix=any_suffix)
    except ValueError as fault:
        hint = "Or use save_model(..., force_contiguous=True), read the docs for potential caveats."
        raise ValueError(f"{fault} {hint}") from None


def save_sharded(tensors, directory, max_shard_size="5GB", metadata=None, *, name="model.safetensors",
                 num_threads=4, sync=True):
    """Writes tensors as a set of shards with an index, as transformers and diffusers load it. Returns the names of the
    files.

    A shard has at most `max_shard_size` (bytes, or text such as "5GB"). Where all tensors fit in one, it is one file
    without an index. `directory` is made if it is not there. `name` is the name of the checkpoint as one file. An
    earlier set of that name is replaced once the new one is whole and on the disk. Until then, whatever goes wrong, it
    stays as it was. `metadata` is that of every shard, `{"format": "pt"}` by default.

    Tied weights, which are several names of one tensor, are written once, under the first name. The metadata names it
    for the others. transformers and `load_model` tie them again; `load_file` with `into` takes them too.

    Tensors are fetched one after the other, also from devices, so that there is no second copy of the model.
    `num_threads` shards are written at once. With `sync=False` it returns as soon as the system has the bytes, as other
    libraries do. Then the old set or the new one is whole whatever becomes of this process. A power cut in the next half
    minute may destroy both.

        save_sharded(model.state_dict(), "models/mine", max_shard_size="2GB")
    """
    _check_tensors(tensors)
    tensors, tied = split_tied(tensors)
    max_bytes, threads = settings.parse_size(max_shard_size, "max_shard_size"), settings.limits(num_threads, None)[0] or _SAVING_THREADS
    specs = {key: _LazySpec(key, tensor) for key, tensor in tensors.items()}
    metadata = {"format": "pt"} if metadata is None else metadata
    if tied and isinstance(metadata, dict):
        metadata = {**tied, **metadata}
    return sharded.write(specs, directory, max_bytes, metadata, name, threads, sync)


class _LazySpec(TensorSpec):
    """A tensor that is fetched to the host when it is written."""

    __slots__ = ("_tensor",)

    def __init__(self, name, tensor):
        _check_contiguous(name, tensor)
        super().__init__(**_spec_arguments(tensor))
        self._tensor = tensor

    def _bytes(self):
        tensor = _on_host(self._tensor)
        yield from TensorSpec(**_spec_arguments(tensor))._bytes()
        # Held until here, and by nothing else.
        del tensor


def _on_host(tensor):
    """The tensor's values in memory of the host."""
    return tensor.detach().to("cpu").resolve_conj().resolve_neg()


def _spec_arguments(tensor):
    return {
        "dtype": _dtype_name(tensor), "shape": tensor.shape, "data_ptr": tensor.data_ptr(), "data_len": tensor.nbytes,
    }  # fmt: skip


def _dtype_name(tensor):
    return str(tensor.dtype).removeprefix("torch.")


def _specs(tensors, keep):
    """What to write; tensors that hold the bytes are appended to `keep`."""
    _check_tensors(tensors)
    shared = [sorted(names) for names in _find_shared_tensors(tensors) if len(names) > 1]
    if shared:
        raise RuntimeError(
            f"Some tensors share memory: {shared}. Each would be written whole, and they would no longer share it when"
            " they are loaded. `save_model(model, filename)` and `save_sharded(model.state_dict(), directory)` write"
            " tied weights once."
        )
    specs = {}
    for name, tensor in tensors.items():
        _check_contiguous(name, tensor)
        tensor = _on_host(tensor)
        keep.append(tensor)
        specs[name] = TensorSpec(**_spec_arguments(tensor))
    return specs


def _check_contiguous(name, tensor):
    if not tensor.is_contiguous():
        raise ValueError(
            f"You are trying to save a non contiguous tensor: `{name}` which is not allowed. It either"
            " shares its memory with others: then save the whole, and take the part of it when it is"
            " loaded; or call `.contiguous()` on it before saving."
        )


def _check_tensors(tensors):
    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"{name!r}: the name of a tensor must be text, got {type(name)}")
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}"
            )
    sparse = [name for name, tensor in tensors.items() if tensor.layout != torch.strided]
    if sparse:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{sparse}` which this library does not support."
            " You can make it a dense tensor before saving with `.to_dense()` but be aware this might"
            " make a much larger file than needed."
        )
    for name, tensor in tensors.items():
        if tensor.device.type == "meta":
            # torch's words, which programs look for.
            reason = "it is on the device meta, without values (Cannot copy out of meta tensor)"
            raise error(f"{name}: cannot be saved: {reason}", "load it first", RuntimeError)
        check_dtype(name, _dtype_name(tensor))
        obstacle = memory_obstacle(tensor)
        if obstacle:
            raise error(f"{name}: cannot be saved: {obstacle[0]}", obstacle[1])
