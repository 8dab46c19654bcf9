"""Loads tensors from any checkpoint as if it were one safetensors file.

`path` may be a `.safetensors` file, a directory of shards or its index, or a `.bin`, `.pt`, `.ckpt` or `.pth` of
torch. It may also be any file of a ckptfs mount, which is then read from where its bytes lie. No byte of a pickle is
executed.

    import ckptfs
    import ckptfs.torch

    tensors = ckptfs.torch.load_file("models/llama")             # a directory of shards
    tensors = ckptfs.torch.load_file("runs/last.ckpt", names="encoder.*", dtype="bfloat16")

    with ckptfs.safe_open("pytorch_model.bin", framework="pt") as f:
        for name in f.keys():
            print(name, f.get_slice(name).get_shape())
        part = f.get_slice("lm_head.weight")[:, 128:256]         # reads only these columns

    unet, vae = ckptfs.load_many(["sdxl/unet", "sdxl/vae"])      # together, in one plan

    print(ckptfs.last_report())                                  # what the last load did, and how fast

Programs that do not use ckptfs read a mount, which lasts as long as its block:

    with ckptfs.mount("models") as path:
        model = AutoModel.from_pretrained(path / "llama")

An index of a slice means what it means in safetensors. With torch it may be anything that torch takes, except two
ellipses. An axis that a list, a tensor or an array indexes is read whole. With numpy it may have integers, slices and
one ellipsis, and no slice may lead out of the tensor.

The names and calls are those of the package safetensors. A program only has to say `import ckptfs as safetensors` and
`from ckptfs.torch import load_file`. Those of fastsafetensors are in `ckptfs.fastsafetensors`. It and `ckptfs.torch`
need torch, and `ckptfs.numpy` needs numpy; this module needs neither. Every other module of the package is internal.

Every refusal is a `SafetensorError` that names the file and the tensor, and says what to do. A path that does not
exist is a `FileNotFoundError`, and a lack of memory is a `MemoryError`.
"""

# The module of each name. None is imported before its name is used: the command `ckptfs` needs none of them.
_MODULES = {
    "Array": "load.dlpack",
    "Mount": "mounting",
    "MountInfo": "mounting",
    "PrefetchLoader": "load.prefetch",
    "PySafeSlice": "load.safe_open",
    "Report": "load.report",
    "SafetensorError": "errors",
    "TensorMeta": "load.safe_open",
    "TensorSpec": "save.serialize",
    "_safe_open_handle": "load.safe_open",
    "configure": "settings",
    "fetch": "fetching",
    "deserialize": "save.serialize",
    "install": "shims.install",
    "installed": "shims.install",
    "last_report": "load.report",
    "load_many": "load.load_many",
    "mount": "mounting",
    "mounts": "mounting",
    "safe_open": "load.safe_open",
    "serialize": "save.serialize",
    "serialize_file": "save.serialize",
    "stats": "load.report",
    "uninstall": "shims.install",
    "__version__": "_ckptfs",
}

__all__ = [name for name in _MODULES if not name.startswith("_")]


def __getattr__(name):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_MODULES})
