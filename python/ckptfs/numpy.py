"""Loading and saving arrays of numpy; the calls of `safetensors.numpy`, for every kind of checkpoint."""

import numpy  # noqa: F401

from ckptfs.load.numpy import Numpy, load_file
from ckptfs.load.pipeline import load_named, open_bytes
from ckptfs.load.safe_open import safe_open
from ckptfs.save.numpy import save, save_file
from ckptfs.save.serialize import TensorSpec, deserialize, serialize, serialize_file
from ckptfs.settings import LoadOptions

__all__ = [
    "TensorSpec", "deserialize", "load", "load_file", "safe_open", "save", "save_file", "serialize",
    "serialize_file",
]  # fmt: skip


def load(data):
    """The arrays of a checkpoint in memory."""
    options = LoadOptions(framework=Numpy)
    return load_named(open_bytes(data, options), options)
