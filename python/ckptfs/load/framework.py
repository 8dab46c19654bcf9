"""What makes tensors of memory: `Torch`, `Numpy` and `DLPack`, which have the same calls.

None of them imports its package before a tensor of it is made.

- `BACKEND`: how tensors are loaded where nothing else is said.
- `dtype(name)`, `parse_dtype(value)`: a type by its name in a header, and by what a caller calls it.
- `parse_device(value)`, `devices(device, tensors)`: where tensors go, and the device of each.
- `shape(name, shape)`: the shape that the framework has for one in a header.
- `from_memory(memory, name, shape)`: a tensor of these bytes, which it keeps alive.
- `reshape`, `empty`, `cast`, `move`, `copy`: the framework's own.
- `target_address(name, target, dtype, shape)`, `memory_key(target)`, `device_of(target)`, `mark_changed(targets)`:
  loading into tensors of the caller's.
- `device_obstacle(device)`, `load_to_devices`, `fill_on_devices`: loading to CUDA devices.
"""

from ckptfs.errors import error

_NAMES = {"pt": "torch", "torch": "torch", "pytorch": "torch", "np": "numpy", "numpy": "numpy",
          "dlpack": "dlpack"}  # fmt: skip


def framework_named(name):
    """The framework of a name, as safetensors calls it."""
    if not isinstance(name, str) or name not in _NAMES:
        raise error(f"framework {name!r} is invalid",
                    'use "pt" or "np" and convert the result, or use "dlpack"')  # fmt: skip
    if _NAMES[name] == "torch":
        from ckptfs.load.torch import Torch

        return Torch
    if _NAMES[name] == "numpy":
        from ckptfs.load.numpy import Numpy

        return Numpy
    from ckptfs.load.dlpack import DLPack

    return DLPack
