"""Loading and saving tensors of torch; the calls of `safetensors.torch`, for every kind of checkpoint."""

import os

import torch

from ckptfs import _ckptfs, settings
from ckptfs.load import dtype_cast, pipeline
from ckptfs.save import sharded
from ckptfs.load.cached import loaded_or_made
from ckptfs._errors import error, path_of
from ckptfs.load.torch import TYPES, Torch, lacking
from ckptfs.load.safe_open import safe_open
from ckptfs.save.shared_tensors import (  # noqa: F401
    _end_ptr,
    _find_shared_tensors,
    _is_complete,
    _remove_duplicate_names,
    storage_ptr,
    storage_size,
)
from ckptfs.load.handle import open_one, options
from ckptfs.distributed.load_distributed import load_distributed
from ckptfs.save.serialize import TensorSpec, deserialize, serialize, serialize_file

__all__ = [
    "TensorSpec", "cached", "deserialize", "load", "load_distributed", "load_file", "load_model",
    "load_sharded", "safe_open", "save", "save_file", "save_model", "save_sharded", "serialize",
    "serialize_file",
]  # fmt: skip

# torch's own types, by their names in a header.
_TYPES = {name: getattr(torch, of) for name, of in TYPES.items() if hasattr(torch, of)}


def load_file(filename, device="cpu", *, backend=None, names=None, into=None, dtype=None,
              root=None, allow_partial=False, follow_symlinks=False, num_threads=None, memory=None,
              leave_cache=False, progress=False, report=None):
    """The tensors of a checkpoint, by their names.

    `filename` is any checkpoint: a `.safetensors` file, a directory of shards, a `.bin`, `.pt` or
    `.ckpt`, a file of a ckptfs mount. From a directory with one model in several formats or variants, the one
    is loaded that transformers takes; the report says what was left out. Where `x.safetensors` is missing and
    `x.pt` exists, `x.pt` is loaded; the report says so.
    `device` is where the tensors go: to a CUDA device straight, in memory of torch's own; or a dictionary of
    names of modules with a device for each, as accelerate has them, `""` for all others.

    `backend`: "mmap", the default, uses tensors where they lie in their file; "pread" gives each memory
    of its own. `help(ckptfs.safe_open)` says when to choose which.
    `names`: those to load: a list of whole names, or one string, which may be a glob such as
    "model.layers.0.*"; in a list nothing is taken for a glob.
    `into`: tensors by their names to load into, each of the type and shape of what is loaded, contiguous
    and on any device, with memory of its own that no other has a part of: of a DTensor give what
    `.to_local()` gives. Without `names` those of `into` are loaded, and it is they who are
    returned. After an error what they hold is of no worth.
    `dtype`: the type that tensors of floating point are cast to; others stay as they are.
    `root`: the dictionary of a pickle to load, as a dotted path. `allow_partial` leaves out what cannot
    be loaded, `follow_symlinks` lets links lead out of a directory.
    `num_threads` read at once. `memory`: bytes, or text such as "64M", that may be held beside the
    result, 16 MiB or so being plenty. With `backend="pread"` `leave_cache` leaves in the page cache only what it had; tensors that
    are mapped it does not cover.
    `progress` shows a bar; `report` is called with the `ckptfs.Report` that `ckptfs.last_report()` gives.

        from ckptfs.torch import load_file

        tensors = load_file("models/llama", device="cuda:0")
        halves = load_file("runs/last.ckpt", root="ema", dtype=torch.float16, names="encoder.*")
        load_file("models/llama", into=model.state_dict())
    """
    # What cannot be meant is refused whether the file is there or not: `cached` asks first, and then makes it.
    num_threads, memory = settings.limits(num_threads, memory)
    way, device = settings.backend(backend, Torch.BACKEND), Torch.device(device)
    dtype = None if dtype is None else Torch.type_named(dtype)
    how = options(root, allow_partial, follow_symlinks, num_threads,
                  dtype_cast.for_reading(memory, dtype), leave_cache)
    opened, why = open_one(filename, how)
    return pipeline.load_named(
        opened, names, Torch, way, device=device, into=into, dtype=dtype, memory=memory, progress=progress,
        report=report, why=why,
    )  # fmt: skip


def cached(path, make, *, device="cpu", metadata=None, **how):
    """The tensors of a file; if it is not there, those that `make()` gives, which are saved as it first.

    Any number of processes may ask for the same: on one machine one of them makes it, the others wait and load
    it. What `make` raises is raised here, and nothing is saved. `how` is what else `load_file` takes; what it
    refuses is refused before anything is made.

        latents = ckptfs.torch.cached(f"cache/{key}.safetensors", lambda: {"latent": vae.encode(image)})
    """
    return loaded_or_made(
        path,
        lambda: load_file(path, device, **how),
        make,
        lambda tensors: save_file(tensors, path, metadata),
    )


def load(data):
    """The tensors of a checkpoint whose bytes are in memory.

        tensors = load(open("model.safetensors", "rb").read())
    """
    opened = _ckptfs.Opened.of_bytes(data, options())
    return pipeline.load_named(opened, None, Torch, settings.PREAD)


def save(tensors, metadata=None):
    """The bytes of a safetensors file with these tensors."""
    keep = []
    return serialize(_specs(tensors, keep), metadata)


def save_file(tensors, filename, metadata=None):
    """Writes these tensors as a safetensors file, which is there only when it is whole. Tensors must be
    dense and contiguous and share nothing; `save_model` writes a model whose tensors do.

        save_file({"weight": torch.ones(2, 3)}, "model.safetensors", metadata={"format": "pt"})
    """
    keep = []
    serialize_file(_specs(tensors, keep), filename, metadata)


def save_model(model, filename, metadata=None, force_contiguous=True):
    """Writes the tensors of a model as a safetensors file. Of those that share memory one is written,
    and the metadata names it for the others."""
    state = model.state_dict()
    metadata = dict(metadata) if metadata else {}
    for kept, removed in _remove_duplicate_names(state).items():
        for name in removed:
            metadata.setdefault(name, kept)
            del state[name]
    if force_contiguous:
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    try:
        save_file(state, filename, metadata=metadata or None)
    except ValueError as fault:
        hint = "Or use save_model(..., force_contiguous=True), read the docs for potential caveats."
        raise ValueError(f"{fault} {hint}") from None


def load_model(model, filename, strict=True, device="cpu", *, backend=None, **how):
    """Loads a checkpoint into a model. Gives the names that the model has and the checkpoint lacks, and
    those of the checkpoint that the model lacks; with `strict` any of these is a `RuntimeError`. What
    else `load_file` takes, this takes too."""
    state = load_file(filename, device=device, backend=backend, **how)
    shared = _remove_duplicate_names(model.state_dict(), preferred_names=state.keys())
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = set(missing)
    for removed in shared.values():
        for name in removed:
            if name in missing:
                missing.remove(name)
            else:
                unexpected.append(name)
    if strict and (missing or unexpected):
        told = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
        for what, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                told.append(f"    {what} key(s) in state_dict: "
                            + ", ".join(f'"{name}"' for name in sorted(names)))
        raise RuntimeError("\n".join(told))
    return missing, unexpected


def save_sharded(tensors, directory, max_shard_size="5GB", metadata=None, *, name="model.safetensors",
                 num_threads=4, sync=True):
    """Writes tensors as a set of shards of at most `max_shard_size` (bytes, or text such as "5GB") with an
    index, as transformers and diffusers load it; as one file without one where all fit. Gives the names of
    the files.

    `directory` is made if it is not there. `name` is what the checkpoint would be called as one file. An
    earlier set of that name is replaced once the new one is whole and on the disk: until then, whatever goes
    wrong, it stays as it was. `metadata` is that of every shard, `{"format": "pt"}` if none is given.

    Tensors are taken one after the other, those of another device too, so that no second copy of the model is
    made; `num_threads` shards are written at once. With `sync=False` it returns as soon as the system has the
    bytes, as other libraries do: whatever becomes of this process, the old set or the new one is whole, but a
    power cut in the next half minute may take both.

        save_sharded(model.state_dict(), "models/mine", max_shard_size="2GB")
    """
    _check(tensors)
    most, threads = settings.size(max_shard_size, "max_shard_size"), settings.limits(num_threads, None)[0]
    specs = {key: _Later(key, tensor) for key, tensor in tensors.items()}
    metadata = {"format": "pt"} if metadata is None else metadata
    return sharded.write(specs, directory, most, metadata, name, threads, sync)


def load_sharded(directory, device="cpu", **how):
    """The tensors of a directory of shards, with or without an index, by their names. It takes what
    `load_file` takes.

        tensors = load_sharded("models/mine", device="cuda:0")
    """
    directory = path_of(directory)
    if not os.path.isdir(directory):
        raise error(f"{directory}: is no directory", "load_file loads files", NotADirectoryError)
    return load_file(directory, device, **how)


class _Later(TensorSpec):
    """A tensor whose bytes are fetched when they are written."""

    __slots__ = ("_tensor",)

    def __init__(self, name, tensor):
        _contiguous(name, tensor)
        super().__init__(**_of_header(tensor))
        self._tensor = tensor

    def _bytes(self):
        tensor = _at_hand(self._tensor)
        yield from TensorSpec(**_of_header(tensor))._bytes()
        # Until then nobody else holds it.
        del tensor


def _at_hand(tensor):
    """The values as they are in the machine's memory."""
    return tensor.detach().to("cpu").resolve_conj().resolve_neg()


def _of_header(tensor):
    kind = str(tensor.dtype).split(".")[-1]
    return {
        "dtype": kind, "shape": tensor.shape, "data_ptr": tensor.data_ptr(), "data_len": tensor.nbytes,
    }  # fmt: skip


def _specs(tensors, keep):
    """What to write; `keep` holds the bytes there."""
    _check(tensors)
    specs = {}
    for name, tensor in tensors.items():
        _contiguous(name, tensor)
        tensor = _at_hand(tensor)
        keep.append(tensor)
        specs[name] = TensorSpec(**_of_header(tensor))
    return specs


def _contiguous(name, tensor):
    if not tensor.is_contiguous():
        raise ValueError(
            f"You are trying to save a non contiguous tensor: `{name}` which is not allowed. It either"
            " shares its memory with others: then save the whole, and take the part of it when it is"
            " loaded; or call `.contiguous()` on it before saving."
        )


def _check(tensors):
    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    for name, tensor in tensors.items():
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
        missing = lacking(tensor) if tensor.device.type != "meta" else None
        if missing:
            raise error(f"{name}: cannot be saved: {missing[0]}", missing[1])
    shared = [names for names in _find_shared_tensors(tensors) if len(names) > 1]
    if shared:
        raise RuntimeError(
            f"Some tensors share memory: {shared}. Each would be written whole, and they would no longer"
            " share it when they are loaded. `save_model` writes one of each."
        )
