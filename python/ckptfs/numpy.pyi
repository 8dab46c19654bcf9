from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any, Literal

import numpy as np

from ckptfs import Report
from ckptfs import TensorSpec as TensorSpec
from ckptfs import deserialize as deserialize
from ckptfs import safe_open as safe_open
from ckptfs import serialize as serialize
from ckptfs import serialize_file as serialize_file

_Path = str | bytes | PathLike[str]
_Views = _Path | dict[str, Any]
_Backend = Literal["mmap", "pread"]

def load_file(
    filename: _Path,
    *,
    backend: _Backend | None = None,
    names: str | Iterable[str] | None = None,
    into: Mapping[str, np.ndarray] | None = None,
    dtype: Any = None,
    root: str | None = None,
    allow_partial: bool = False,
    follow_symlinks: bool = False,
    ranks: int | None = None,
    delta_base: _Path | None = None,
    views: _Views | None = None,
    num_threads: int | None = None,
    memory: int | str | None = None,
    leave_cache: bool = False,
    cache: bool = True,
    progress: bool = False,
    report: Callable[[Report], object] | None = None,
) -> dict[str, np.ndarray]: ...
def load(data: bytes | bytearray | memoryview) -> dict[str, np.ndarray]: ...
def save(tensor_dict: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> bytes: ...
def save_file(
    tensor_dict: dict[str, np.ndarray],
    filename: _Path,
    metadata: dict[str, str] | None = None,
    *,
    any_suffix: bool = False,
) -> None: ...
