"""Loading and saving arrays of numpy; the calls of `safetensors.numpy`, for every kind of checkpoint."""

import sys

import numpy as np

from ckptfs import settings
from ckptfs.load import dtype_cast, pipeline
from ckptfs.load.numpy import Numpy
from ckptfs.load.safe_open import safe_open
from ckptfs.load.handle import open_one, options
from ckptfs.save.serialize import TensorSpec, deserialize, serialize, serialize_file
from ckptfs import _ckptfs

__all__ = [
    "TensorSpec", "deserialize", "load", "load_file", "safe_open", "save", "save_file", "serialize",
    "serialize_file",
]  # fmt: skip


def load_file(filename, *, backend=None, names=None, into=None, dtype=None, root=None,
              allow_partial=False, follow_symlinks=False, num_threads=None, memory=None,
              leave_cache=False, progress=False, report=None):
    """The arrays of a checkpoint, by their names. What the options do, `help(ckptfs.torch.load_file)`
    says; but `backend` is "pread" by default, as arrays of safetensors have memory of their own. Of types
    that numpy lacks, those are there that ml_dtypes brings, once it was imported.

        from ckptfs.numpy import load_file

        arrays = load_file("model.safetensors", names=["embedding", "head"])
    """
    num_threads, memory = settings.limits(num_threads, memory)
    how = options(root, allow_partial, follow_symlinks, num_threads,
                  dtype_cast.for_reading(memory, dtype), leave_cache)
    opened, why = open_one(filename, how)
    return pipeline.load_named(
        opened, names, Numpy, settings.backend(backend, Numpy.BACKEND), into=into, dtype=dtype,
        memory=memory, progress=progress, report=report, why=why,
    )  # fmt: skip


def load(data):
    """The arrays of a checkpoint whose bytes are in memory."""
    opened = _ckptfs.Opened.of_bytes(data, options())
    return pipeline.load_named(opened, None, Numpy, settings.PREAD)


def save(tensor_dict, metadata=None):
    """The bytes of a safetensors file with these arrays."""
    keep = []
    return serialize(_specs(tensor_dict, keep), metadata)


def save_file(tensor_dict, filename, metadata=None):
    """Writes these arrays as a safetensors file, which is there only when it is whole."""
    keep = []
    serialize_file(_specs(tensor_dict, keep), filename, metadata)


def _specs(arrays, keep):
    specs = {}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray | np.generic):
            raise ValueError(f"Key `{name}` is invalid, expected numpy.ndarray but received {type(array)}")
        array = np.asarray(array)
        if not _is_little_endian(array):
            array = array.byteswap(inplace=False).view(array.dtype.newbyteorder("<"))
        # Its bytes in the order of its indexes, whatever they were.
        array = np.ascontiguousarray(array).reshape(array.shape)
        keep.append(array)
        specs[name] = TensorSpec(
            dtype=array.dtype.name, shape=array.shape,
            data_ptr=array.__array_interface__["data"][0], data_len=array.nbytes,
        )  # fmt: skip
    return specs


def _is_little_endian(array):
    order = array.dtype.byteorder
    return order in "<|" or (order == "=" and sys.byteorder == "little")
