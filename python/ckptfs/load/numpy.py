"""Arrays of numpy, with the calls that tensors of torch have in `load.torch`."""

import functools
import operator

from ckptfs._errors import error
from ckptfs.load.torch import TYPES, refuse_into


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
    def shaped(array, name, shape):
        """The same bytes in another shape."""
        return array.reshape(shape)

    @staticmethod
    def empty(kind, shape, device):
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
            raise refuse_into(name, f"it is {target.dtype} {list(target.shape)}, not {kind} {shape}")
        if not target.flags.c_contiguous or not target.flags.writeable:
            raise refuse_into(name, "it is not contiguous, or not writeable")
        return operator.index(target.__array_interface__["data"][0])

    @staticmethod
    def where(target):
        """In this machine's memory."""

    @staticmethod
    def changed(targets):
        """Nobody keeps count."""
