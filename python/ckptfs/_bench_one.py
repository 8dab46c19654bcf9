"""One load with one library, in a process that does nothing else: what `ckptfs bench` measures.

In, as JSON on standard input: which loader, the path, its files, the names of its tensors, the device, and
whether to tell what was loaded. Out, as JSON on standard output: seconds until the call returned and until
every byte was there; or, if asked for, each tensor's type, shape and digest; or what went wrong.
"""

import ctypes
import hashlib
import json
import sys
import time
from collections import deque

import torch

_PAGE = 4096


def _ckptfs(backend):
    from ckptfs.torch import load_file

    return lambda asked: load_file(asked["path"], device=asked["device"], backend=backend)


def _safetensors():
    from safetensors.torch import load_file

    def load(asked):
        parts = [load_file(path, device=asked["device"]) for path in asked["files"]]
        return {name: tensor for part in parts for name, tensor in part.items()}

    return load


def _torch():
    def load(asked):
        parts = [
            torch.load(path, map_location=asked["device"], weights_only=True) for path in asked["files"]
        ]
        if len(parts) > 1:
            return {name: tensor for part in parts for name, tensor in part.items()}
        return _holding(parts[0], asked["names"])

    return load


def _holding(value, names):
    """The dictionary of a training checkpoint that has these tensors."""
    inside = deque([value])
    while inside:
        found = inside.popleft()
        if isinstance(found, dict):
            if all(isinstance(found.get(name), torch.Tensor) for name in names):
                return {name: found[name] for name in names}
            inside.extend(found.values())
    raise ValueError("no dictionary in it has the tensors that ckptfs shows")


LOADERS = {
    "ckptfs owned": lambda: _ckptfs("pread"),
    "ckptfs mapped": lambda: _ckptfs("mmap"),
    "safetensors": _safetensors,
    "torch.load": _torch,
}


def _have(tensors, device):
    """Waits until every byte is there: a mapped page is read when it is first looked at."""
    if device.type != "cpu":
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
    for storage in storages.values():
        torch.empty(0, dtype=torch.uint8).set_(storage)[::_PAGE].sum()


def _digest(tensor):
    tensor = tensor.detach().cpu().contiguous()
    size = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b""
    digest = hashlib.blake2b(memory, digest_size=16).hexdigest()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest]


def measured(asked):
    """What is told of one load."""
    load = LOADERS[asked["loader"]]()
    device = torch.device(asked["device"])
    # The first use of a device sets it up.
    torch.zeros(1, device=device)
    begun = time.perf_counter()
    tensors = load(asked)
    returned = time.perf_counter()
    _have(tensors, device)
    had = time.perf_counter()
    if asked["tell"]:
        return {"tensors": {name: _digest(tensor) for name, tensor in tensors.items()}}
    return {"returned": returned - begun, "had": had - begun}


if __name__ == "__main__":
    try:
        told = measured(json.load(sys.stdin))
    except Exception as fault:
        told = {"fault": f"{type(fault).__name__}: {fault}"}
    json.dump(told, sys.stdout)
