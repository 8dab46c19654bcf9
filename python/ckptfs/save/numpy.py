"""Saving arrays of numpy: as bytes, as a file."""

import sys

import numpy as np

from ckptfs.save.serialize import TensorSpec, check_dtype, serialize, serialize_file


def save(tensor_dict, metadata=None):
    """The bytes of a safetensors file with these arrays."""
    keep = []
    return serialize(_specs(tensor_dict, keep), metadata)


def save_file(tensor_dict, filename, metadata=None, *, any_suffix=False):
    """Writes these arrays as a safetensors file, which has its name only when it is whole. A name with the suffix of
    another format, such as "x.npz", is refused unless `any_suffix` is true."""
    keep = []
    serialize_file(_specs(tensor_dict, keep), filename, metadata, any_suffix=any_suffix)


def _specs(arrays, keep):
    if not isinstance(arrays, dict):
        raise ValueError(f"Expected a dict of [str, numpy.ndarray] but received {type(arrays)}")
    specs = {}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray | np.generic):
            raise ValueError(f"Key `{name}` is invalid, expected numpy.ndarray but received {type(array)}")
        array = np.asarray(array)
        check_dtype(name, array.dtype.name)
        if not _is_little_endian(array):
            array = array.byteswap(inplace=False).view(array.dtype.newbyteorder("<"))
        # With its elements in the order of its indexes.
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
