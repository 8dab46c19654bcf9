"""The loaders that benchmarks compare: ckptfs, and libraries that others load with today.

A loader is a function that imports what it needs and returns the function that loads: a request in, tensors by
name out. A request is a dictionary: "loader", "path", "device", and where needed "files", "names", "options".
What must stay alive for the tensors is in `kept`.
"""

import importlib
import importlib.util
import os
from collections import deque
from functools import partial
from typing import NamedTuple

from ckptfs.errors import error

OURS = ["ckptfs owned", "ckptfs mapped"]

# These read the one file that a mount shows, with unmodified safetensors.
MOUNTED = ["mount owned", "mount mapped"]

kept = []


class Peer(NamedTuple):
    """A word of `--against`: its module, its name for pip, the format that it reads, and its loaders. `schemes` are the URL
    schemes that it reads."""

    module: str
    package: str
    reads: str
    loaders: list
    on_cuda: list = []
    schemes: list = []


PEERS = {
    "safetensors": Peer("safetensors", "safetensors", "safetensors", ["safetensors owned", "safetensors"]),
    "fastsafetensors": Peer(
        "fastsafetensors", "fastsafetensors", "safetensors", ["fastsafetensors"], ["fastsafetensors nogds"]
    ),
    "runai": Peer("runai_model_streamer", "runai-model-streamer", "safetensors", ["runai"], schemes=["s3", "gs", "az"]),
    "instanttensor": Peer("instanttensor", "instanttensor", "safetensors", ["instanttensor"]),
    "torch": Peer("torch", "torch", "torch", ["torch.load", "torch.load mapped"]),
}

# What the others are compared with: the first of these that loads the checkpoint.
REFERENCES = ["safetensors", "torch.load"]


def select(words, form, device, scheme=None):
    """Names of the other loaders to measure, and notes. `words` are those of `--against`; `None` means all that
    are installed and read `form`, which is "safetensors" or "torch". `scheme` is that of the checkpoint's URL, and
    `None` for a path."""
    loaders, notes = [], []
    for word in words or PEERS:
        peer = PEERS[word]
        if not is_installed(peer.module):
            if words:
                raise error(f"--against {word}: it is not installed", f"pip install {peer.package}")
        elif scheme and scheme not in peer.schemes:
            notes += [f"{word} reads no {scheme}:// URLs, and was left out"] * bool(words)
        elif peer.reads == form:
            loaders += peer.loaders + (peer.on_cuda if device.startswith("cuda") else [])
        elif words:
            notes.append(f"{word} does not read {form} checkpoints, and was left out")
    return loaders, notes


def is_installed(module):
    """Whether Python finds this module."""
    return importlib.util.find_spec(module) is not None


def prepare(request):
    """The function that loads, with its imports done. A loader outside `LOADERS` is named "module:function"."""
    module, _, name = request["loader"].rpartition(":")
    loader = getattr(importlib.import_module(module), name) if module else LOADERS[name]
    return loader(**request.get("options", {}))


def files_of(request):
    """The files of a request; without a list of them those of its folder, found when the load begins."""
    if "files" in request:
        return request["files"]
    path = request["path"]
    if not os.path.isdir(path):
        return [path]
    return sorted(entry.path for entry in os.scandir(path) if entry.name.endswith((".safetensors", ".bin")))


def _ckptfs(**options):
    from ckptfs.torch import load_file

    return lambda request: load_file(request["path"], device=request["device"], **options)


def _ckptfs_into():
    """Into tensors that the program has made."""
    import ckptfs
    import torch
    from ckptfs.torch import load_file

    def load(request):
        with ckptfs.safe_open(request["path"], "pt") as f:
            into = {name: torch.empty(f.get_slice(name).get_shape(), dtype=torch.bfloat16) for name in f.keys()}
        return load_file(request["path"], into=into)

    return load


def _safetensors(clone=False, **options):
    import inspect

    from safetensors import __version__
    from safetensors.torch import load_file

    if options and "backend" not in inspect.signature(load_file).parameters:
        raise RuntimeError(f"safetensors {__version__} has no backend=, which came with 0.8")

    def load_one(path, request):
        tensors = load_file(path, device=request["device"], **options)
        return {name: tensor.clone() for name, tensor in tensors.items()} if clone else tensors

    return lambda request: _merged(load_one(path, request) for path in files_of(request))


def _safetensors_prefetch():
    from safetensors import safe_open

    def load_one(path, request):
        with safe_open(path, "pt", device=request["device"]) as file, file.prefetch() as loader:
            return dict(loader)

    return lambda request: _merged(load_one(path, request) for path in files_of(request))


def _fastsafetensors(nogds=False):
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load(request):
        # On the host there is no GPUDirect Storage to turn off.
        on_host = request["device"] == "cpu"
        loader = SafeTensorsFileLoader(SingleGroup(), request["device"], nogds=nogds or on_host)
        loader.add_filenames({0: files_of(request)})
        buffer = loader.copy_files_to_device()
        # The tensors are views of memory that closing these would free.
        kept.append((loader, buffer))
        return {name: buffer.get_tensor(name) for name in loader.get_keys()}

    return load


def _runai():
    from runai_model_streamer import SafetensorsStreamer

    def load(request):
        streamer = SafetensorsStreamer()
        kept.append(streamer)
        streamer.__enter__()
        streamer.stream_files(files_of(request), device=request["device"])
        return dict(streamer.get_tensors())

    return load


def _instanttensor():
    from instanttensor import safe_open

    def load(request):
        with safe_open(files_of(request), framework="pt", device=request["device"]) as file:
            return dict(file.tensors())

    return load


def _torch(**options):
    import torch

    def load(request):
        parts = [
            torch.load(path, map_location=request["device"], weights_only=True, **options)
            for path in files_of(request)
        ]
        return _merged(parts) if len(parts) > 1 else _dictionary_of(parts[0], request["names"])

    return load


def _merged(parts):
    return {name: tensor for part in parts for name, tensor in part.items()}


def _dictionary_of(value, names):
    """The dictionary inside a training checkpoint that has these tensors."""
    import torch

    inside = deque([value])
    while inside:
        found = inside.popleft()
        if isinstance(found, dict):
            if all(isinstance(found.get(name), torch.Tensor) for name in names):
                return {name: found[name] for name in names}
            inside.extend(found.values())
    raise ValueError("no dictionary in it has the tensors that ckptfs shows")


LOADERS = {
    "ckptfs": _ckptfs,
    "ckptfs owned": partial(_ckptfs, backend="pread"),
    "ckptfs mapped": partial(_ckptfs, backend="mmap"),
    "ckptfs into": _ckptfs_into,
    "mount owned": partial(_safetensors, backend="pread"),
    "mount mapped": _safetensors,
    "safetensors owned": partial(_safetensors, backend="pread"),
    "safetensors": _safetensors,
    "safetensors cloned": partial(_safetensors, clone=True),
    "safetensors prefetch": _safetensors_prefetch,
    "fastsafetensors": _fastsafetensors,
    "fastsafetensors nogds": partial(_fastsafetensors, nogds=True),
    "runai": _runai,
    "instanttensor": _instanttensor,
    "torch.load": _torch,
    "torch.load mapped": partial(_torch, mmap=True),
}
