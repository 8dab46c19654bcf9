"""Loading and saving tensors of torch; the calls of `safetensors.torch`, for every kind of checkpoint."""

import errno
import os

import torch

from ckptfs.distributed.load_distributed import load_distributed
from ckptfs.dtypes import TYPES
from ckptfs.errors import of_system
from ckptfs.load.cached import load_or_make
from ckptfs.load.pipeline import load_named, open_bytes
from ckptfs.load.safe_open import safe_open
from ckptfs.load.torch import Torch, load_file
from ckptfs.save.serialize import TensorSpec, deserialize, serialize, serialize_file
from ckptfs.save.shared_tensors import (  # noqa: F401
    _end_ptr,
    _find_shared_tensors,
    _is_complete,
    _remove_duplicate_names,
    storage_ptr,
    storage_size,
)
from ckptfs.save.torch import save, save_file, save_model, save_sharded
from ckptfs.settings import LoadOptions, parse_path

__all__ = [
    "TensorSpec", "cached", "deserialize", "load", "load_distributed", "load_file", "load_model",
    "load_sharded", "safe_open", "save", "save_file", "save_model", "save_sharded", "serialize",
    "serialize_file",
]  # fmt: skip

# As in safetensors: torch's types by their names in a header.
_TYPES = {name: getattr(torch, native) for name, native in TYPES.items() if hasattr(torch, native)}


def cached(path, make, *, device="cpu", metadata=None, **options):
    """The tensors of a file. If it is missing, it is first saved with the tensors that `make()` returns, in a directory
    that is made if it is missing too.

    Any number of processes may ask for the same file: on one machine one of them makes it, and the others wait and
    load it. What `make` raises is raised here, and nothing is saved. `options` are other arguments of `load_file`. What
    `load_file` or `save_file` refuses is refused before `make` is called.

        latents = ckptfs.torch.cached(f"cache/{key}.safetensors", lambda: {"latent": vae.encode(pixels)})
    """
    return load_or_make(
        path,
        lambda: load_file(path, device, **options),
        make,
        lambda tensors: save_file(tensors, path, metadata),
    )


def load(data):
    """The tensors of a checkpoint in memory.

        tensors = load(open("model.safetensors", "rb").read())
    """
    options = LoadOptions(framework=Torch)
    return load_named(open_bytes(data, options), options)


def load_model(model, filename, strict=True, device="cpu", *, backend=None, **options):
    """Loads a checkpoint into a model. Returns the names that the checkpoint lacks, and those that the model lacks;
    with `strict` any of these is a `RuntimeError`. `options` are other arguments of `load_file`."""
    state = load_file(filename, device=device, backend=backend, **options)
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
        lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
        for what, names in (("Missing", missing), ("Unexpected", unexpected)):
            if names:
                lines.append(f"    {what} key(s) in state_dict: "
                            + ", ".join(f'"{name}"' for name in sorted(names)))
        raise RuntimeError("\n".join(lines))
    return missing, unexpected


def load_sharded(directory, device="cpu", **options):
    """The tensors of a directory of shards, with or without an index, by their names. It takes the arguments of
    `load_file`.

        tensors = load_sharded("models/mine", device="cuda:0")
    """
    directory = parse_path(directory)
    if os.path.exists(directory) and not os.path.isdir(directory):
        fault = NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        raise of_system(fault, directory, f"load it with load_file({directory!r})")
    return load_file(directory, device, **options)
