"""Tensors of torch and arrays of numpy: made of memory, cast, moved, and landed in.

Each of the two has the same calls, so that what loads need not know which it is. Neither is imported
before a tensor of it is made.
"""

import functools
import operator

from ckptfs._errors import error

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

_NAMES = {"pt": "torch", "torch": "torch", "pytorch": "torch", "np": "numpy", "numpy": "numpy"}


def framework(name):
    """The one of a name, as safetensors calls them."""
    if _NAMES.get(name) is None:
        raise error(f"framework {name!r} is invalid", 'use "pt" or "np", and convert what comes of it')
    return Torch if _NAMES[name] == "torch" else Numpy


def _type(name, of, package):
    """A type of a package, or the refusal of one that it lacks."""
    found = getattr(package, TYPES.get(name, ""), None)
    if found is None:
        raise error(f"Dtype not understood: {name} ({of})", "use a version of torch that has it")
    return found


def _refuse_into(name, why, remedy="give a contiguous tensor in memory of the tensor's own type and shape"):
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

        return _type(name, "torch", torch)

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
        import torch

        try:
            device = torch.device(given)
        except (RuntimeError, TypeError, ValueError) as fault:
            raise error(f"device {given} is invalid: {fault}") from None
        return None if device.type == "cpu" else device

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
    def empty(kind, shape):
        import torch

        return torch.empty(shape, dtype=kind, device="cpu")

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
            raise _refuse_into(name, *lacking(target))
        if target.layout != torch.strided or target.device.type != "cpu":
            raise _refuse_into(name, f"it is {target.layout} on {target.device}")
        if (target.dtype, list(target.shape)) != (kind, shape):
            raise _refuse_into(name, f"it is {target.dtype} {list(target.shape)}, not {kind} {shape}")
        if not target.is_contiguous() or target.is_conj() or target.is_neg():
            raise _refuse_into(name, "it is not contiguous")
        missing = lacking(target)
        if missing:
            raise _refuse_into(name, *missing)
        return target.data_ptr()

    @staticmethod
    def changed(targets):
        """Tells autograd that other bytes are in them now."""
        import torch

        # Versions of torch without it see no change that was not made by torch.
        increment = getattr(torch.autograd.graph, "increment_version", None)
        for target in targets if increment else ():
            increment(target)


class Numpy:
    """Arrays. Types that numpy lacks are there once ml_dtypes was imported."""

    # Each in memory of its own, as safetensors does.
    BACKEND = "pread"

    @staticmethod
    @functools.cache
    def type(name):
        """Of a name in a header."""
        import numpy

        if name == "F4" or name not in TYPES:
            raise error(f"Dtype not understood: {name} (numpy)", "load it with torch")
        try:
            return numpy.dtype(TYPES[name])
        except TypeError as fault:
            remedy = "import ml_dtypes, or load it with torch"
            raise error(f"Dtype not understood: {name} (numpy): {fault}", remedy, TypeError) from None

    @staticmethod
    def type_named(given):
        """Of what a user calls one."""
        import numpy

        try:
            found = numpy.dtype(given)
        except TypeError as fault:
            raise error(f"{given!r} is no type of numpy: {fault}") from None
        try:
            numpy.zeros(1, numpy.float32).astype(found)
        except (TypeError, ValueError) as fault:
            raise error(f"nothing can be cast to {found}: {fault}", "load it as it is") from None
        return found

    @staticmethod
    def device(given):
        """Arrays stay where they are."""
        if given not in (None, "cpu"):
            raise error(f"Device {given} is not supported for framework numpy")

    @staticmethod
    def shape(name, shape):
        return list(shape)

    @staticmethod
    def of(memory, name, shape):
        """An array of these bytes, which it keeps alive."""
        import numpy

        return numpy.ndarray(shape, Numpy.type(name), memory)

    @staticmethod
    def empty(kind, shape):
        import numpy

        return numpy.empty(shape, dtype=kind)

    @staticmethod
    def cast(array, kind):
        return array.astype(kind, copy=False)

    @staticmethod
    def put(array, device):
        return array

    @staticmethod
    def copy(target, source):
        target[...] = source

    @staticmethod
    def place(name, target, kind, shape):
        """The address of what is to be loaded into, after a look at whether it can be."""
        import numpy

        if not isinstance(target, numpy.ndarray):
            raise TypeError(f"{name}: expected numpy.ndarray to load into, got {type(target)}")
        if (target.dtype, list(target.shape)) != (kind, shape):
            raise _refuse_into(name, f"it is {target.dtype} {list(target.shape)}, not {kind} {shape}")
        if not target.flags.c_contiguous or not target.flags.writeable:
            raise _refuse_into(name, "it is not contiguous, or not writeable")
        return operator.index(target.__array_interface__["data"][0])

    @staticmethod
    def changed(targets):
        """Nobody keeps count."""
