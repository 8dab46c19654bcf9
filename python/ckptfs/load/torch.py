"""Tensors of torch: made of memory, cast, moved, and landed in.

The arrays of numpy (`load.numpy`) and those for DLPack (`load.dlpack`) have the same calls, so that what loads need not
know which it is. No package is imported before a tensor of it is made.
"""

import functools

from ckptfs._errors import error
from ckptfs.load.device_map import Placement

# The types of a safetensors header, by the names that torch has for them.
TYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
}  # fmt: skip

# Types of numbers that can be cast one into the other; of F4 two share a byte.
FLOATS = {name for name, of in TYPES.items() if "float" in of} - {"F4"}

_NAMES = {"pt": "torch", "torch": "torch", "pytorch": "torch", "np": "numpy", "numpy": "numpy",
          "dlpack": "dlpack"}  # fmt: skip


def framework(name):
    """The one of a name, as safetensors calls them."""
    if _NAMES.get(name) is None:
        raise error(f"framework {name!r} is invalid",
                    'use "pt" or "np" and convert what comes of it, or "dlpack"')  # fmt: skip
    if _NAMES[name] == "torch":
        return Torch
    if _NAMES[name] == "numpy":
        from ckptfs.load.numpy import Numpy

        return Numpy
    from ckptfs.load.dlpack import DLPack

    return DLPack


def type_of(name, of, package):
    """A type of a package, or the refusal of one that it lacks."""
    found = getattr(package, TYPES.get(name, ""), None)
    if found is None:
        raise error(f"Dtype not understood: {name} ({of})", "use a version of torch that has it")
    return found


def refuse_into(name, why, remedy="give a contiguous tensor in memory of the tensor's own type and shape"):
    return error(f"{name}: cannot be loaded into what was given: {why}", remedy)


def lacking(tensor):
    """Why the bytes of a tensor of torch are not all in memory of its own, with what to do; nothing if
    they are. Only where they are may its address be used."""
    import torch

    if tensor.is_nested:
        return "it is nested", "give its parts one by one, such as of .unbind()"
    wrapper = type(tensor) not in (torch.Tensor, torch.nn.Parameter)
    try:
        if not tensor.nbytes:
            return None
        storage = tensor.untyped_storage()
        here = storage.device.type == tensor.device.type
        at, holds = tensor.data_ptr() if here else 0, storage.nbytes()
        needs = tensor.storage_offset() * tensor.element_size() + tensor.nbytes
    except Exception:
        at = holds = needs = 0
    if at and needs <= holds:
        return None
    if wrapper:
        return (f"it is a {type(tensor).__name__}, which has no memory of its own",
                "give its local tensor, such as .to_local()")  # fmt: skip
    if not at:
        return "it has no memory: that was freed, or never there", "give a tensor that has"
    return f"its memory has {holds} bytes, and it needs {needs}", "give a tensor that has them"


class Torch:
    """Tensors."""

    # How they are loaded unless it is said: where they lie, as safetensors does.
    BACKEND = "mmap"

    @staticmethod
    @functools.cache
    def type(name):
        """Of a name in a header."""
        import torch

        return type_of(name, "torch", torch)

    @staticmethod
    def alike(kind):
        """Integers of the same size, which can be copied whatever they mean."""
        import torch

        return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.itemsize]

    @staticmethod
    def type_named(given):
        """Of what a user calls one."""
        import torch

        found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
        if not isinstance(found, torch.dtype):
            raise error(f"{given!r} is no type of torch")
        try:
            torch.empty(1, dtype=torch.float32, device="cpu").to(found)
        except RuntimeError as fault:
            raise error(f"nothing can be cast to {found}: {fault}", "load it as it is") from None
        return found

    @staticmethod
    def device(given):
        """Where tensors go, or nothing if they stay."""
        if given is None or given == "cpu":
            return None
        if isinstance(given, dict):
            return Placement({module: Torch.device(one) for module, one in given.items()})
        import torch

        try:
            device = torch.device(given)
        except (RuntimeError, TypeError, ValueError) as fault:
            raise error(f"device {given} is invalid: {fault}") from None
        return None if device.type == "cpu" else device

    @staticmethod
    def lacks(device):
        """Why nothing can be loaded straight to a CUDA device; nothing if it can."""
        from ckptfs.load import cuda

        return cuda.lacks(device)

    @staticmethod
    def load_there(parts, devices, load, stop, threads):
        """A tensor of each part, on its device."""
        from ckptfs.load import cuda

        return cuda.load(parts, devices, load, stop, threads)

    @staticmethod
    def fill_there(parts, targets, stop=None):
        """Loads each into a tensor on a device. Gives what that did."""
        from ckptfs.load import cuda

        return cuda.into(parts, targets, stop)

    @staticmethod
    def shape(name, shape):
        """As torch counts: of types that share a byte, the bytes."""
        if name != "F4":
            return list(shape)
        if not shape or shape[-1] % 2:
            raise error(f"F4 of shape {shape}: torch has two elements of a row in each byte, and no half of one")
        return [*shape[:-1], shape[-1] // 2]

    @staticmethod
    def of(memory, name, shape):
        """A tensor of these bytes, which it keeps alive."""
        import torch

        kind, shape = Torch.type(name), Torch.shape(name, shape)
        if len(memory) == 0:
            return torch.empty(shape, dtype=kind, device="cpu")
        flat = torch.frombuffer(memory, dtype=kind)
        # A view of numbers one by one takes half as long as one of a list.
        return flat if len(shape) == 1 else flat.view(*shape) if shape else flat.view(shape)

    @staticmethod
    def shaped(tensor, name, shape):
        """The same bytes in another shape."""
        return tensor.view(Torch.shape(name, shape))

    @staticmethod
    def empty(kind, shape, device):
        import torch

        return torch.empty(shape, dtype=kind, device=device or "cpu")

    @staticmethod
    def cast(tensor, kind):
        return tensor.to(kind)

    @staticmethod
    def put(tensor, device):
        return tensor if device is None else tensor.to(device)

    @staticmethod
    def copy(target, source):
        import torch

        with torch.no_grad():
            target.copy_(source)

    @staticmethod
    def place(name, target, kind, shape):
        """The address of what is to be loaded into, after a look at whether it can be."""
        import torch

        if not isinstance(target, torch.Tensor):
            raise TypeError(f"{name}: expected torch.Tensor to load into, got {type(target)}")
        if target.is_nested:
            raise refuse_into(name, *lacking(target))
        if target.layout != torch.strided or target.device.type == "meta":
            raise refuse_into(name, f"it is {target.layout} on {target.device}")
        if (target.dtype, list(target.shape)) != (kind, shape):
            raise refuse_into(name, f"it is {target.dtype} {list(target.shape)}, not {kind} {shape}")
        if not target.is_contiguous() or target.is_conj() or target.is_neg():
            raise refuse_into(name, "it is not contiguous")
        missing = lacking(target)
        if missing:
            raise refuse_into(name, *missing)
        return target.data_ptr()

    @staticmethod
    def where(target):
        """The device that has it, or nothing if this machine's memory does."""
        return None if target.device.type == "cpu" else target.device

    @staticmethod
    def changed(targets):
        """Tells autograd that other bytes are in them now."""
        import torch

        # Versions of torch without it see no change that was not made by torch.
        increment = getattr(torch.autograd.graph, "increment_version", None)
        for target in targets if increment else ():
            increment(target)
