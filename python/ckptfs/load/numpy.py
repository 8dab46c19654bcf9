"""Arrays of numpy: `load_file`, and the framework that makes them of memory."""

import functools
import operator

from ckptfs.dtypes import TYPES, load_elsewhere
from ckptfs.errors import error, refuse_target
from ckptfs.load.pipeline import load_named, open_checkpoint
from ckptfs.settings import PREAD, LoadOptions


class Numpy:
    """The framework of numpy. Types that numpy lacks are there once ml_dtypes was imported."""

    # As in safetensors: each array has memory of its own.
    BACKEND = PREAD
    VECTOR_ALIGNED = False

    @staticmethod
    @functools.cache
    def dtype(name):
        """The type for a name in a header."""
        import numpy

        if name == "F4" or name not in TYPES:
            raise error(f"Dtype not understood: {name} (numpy)", load_elsewhere(name))
        try:
            return numpy.dtype(TYPES[name])
        except TypeError as fault:
            remedy = "import ml_dtypes, or load it with torch"
            raise error(f"Dtype not understood: {name} (numpy): {fault}", remedy, TypeError) from None

    @staticmethod
    def parse_dtype(value):
        """A type of numpy, by itself or by its name; refuses one that nothing can be cast to."""
        import numpy

        try:
            found = numpy.dtype(value)
        except TypeError as fault:
            raise error(f"{value!r} is no type of numpy: {fault}") from None
        try:
            numpy.zeros(1, numpy.float32).astype(found)
        except (TypeError, ValueError) as fault:
            raise error(f"nothing can be cast to {found}: {fault}", "load it as it is") from None
        return found

    @staticmethod
    def parse_device(value):
        """`None`: arrays stay on the host."""
        if value not in (None, "cpu"):
            raise error(f"Device {value} is not supported for framework numpy")

    @staticmethod
    def shape(name, shape):
        """The same shape."""
        return list(shape)

    @staticmethod
    def from_memory(memory, name, shape):
        """An array of these bytes, which it keeps alive."""
        import numpy

        return numpy.ndarray(shape, Numpy.dtype(name), memory)

    @staticmethod
    def reshape(array, name, shape):
        """The same bytes in another shape."""
        return array.reshape(shape)

    @staticmethod
    def empty(dtype, shape, device):
        """An array without values."""
        import numpy

        return numpy.empty(shape, dtype=dtype)

    @staticmethod
    def cast(array, dtype):
        """The same values in another type."""
        return array.astype(dtype, copy=False)

    @staticmethod
    def move(array, device):
        """The same array."""
        return array

    @staticmethod
    def copy(target, source):
        """Copies values, cast to the type of the target."""
        target[...] = source

    @staticmethod
    def target_address(name, target, dtype, shape):
        """The address of an array to load into; refuses one that cannot be loaded into."""
        import numpy

        if not isinstance(target, numpy.ndarray):
            raise TypeError(f"{name}: expected numpy.ndarray to load into, got {type(target)}")
        if (target.dtype, list(target.shape)) != (dtype, shape):
            raise refuse_target(name, f"it is {target.dtype} {list(target.shape)}, not {dtype} {shape}")
        if not target.flags.c_contiguous or not target.flags.writeable:
            raise refuse_target(name, "it is not contiguous, or not writeable")
        return operator.index(target.__array_interface__["data"][0])

    @staticmethod
    def memory_key(target):
        """Equal for targets that are the same memory; `None` for one without."""
        import numpy

        if not isinstance(target, numpy.ndarray) or not target.nbytes:
            return None
        return target.__array_interface__["data"][0], target.dtype, target.shape, target.strides

    @staticmethod
    def device_of(target):
        """`None`: arrays are on the host."""

    @staticmethod
    def mark_changed(targets):
        """Does nothing: numpy counts no changes."""


def load_file(filename, *, backend=None, names=None, into=None, dtype=None, root=None,
              allow_partial=False, follow_symlinks=False, ranks=None, delta_base=None, views=None, num_threads=None, memory=None,
              leave_cache=False, cache=True, progress=False, report=None):
    """The arrays of a checkpoint, by their names. `help(ckptfs.torch.load_file)` explains the options.

    `backend` is "pread" by default: arrays of safetensors have memory of their own, too. Once ml_dtypes is imported,
    its types are loaded as well.

        from ckptfs.numpy import load_file

        arrays = load_file("model.safetensors", names=["embedding", "head"])
    """
    options = LoadOptions.resolve(
        Numpy, backend=backend, names=names, into=into, dtype=dtype, root=root, allow_partial=allow_partial,
        follow_symlinks=follow_symlinks, ranks=ranks, delta_base=delta_base, views=views, num_threads=num_threads, memory=memory, leave_cache=leave_cache, cache=cache,
        progress=progress, report=report,
    )  # fmt: skip
    checkpoint, note = open_checkpoint(filename, options)
    return load_named(checkpoint, options, note)
