from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any, Literal

import torch

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
    device: Any = "cpu",
    *,
    backend: _Backend | None = None,
    names: str | Iterable[str] | None = None,
    into: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype | str | None = None,
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
) -> dict[str, torch.Tensor]: ...
def load_distributed(
    filename: _Path,
    group: Any = None,
    device: Any = "cpu",
    *,
    names: str | Iterable[str] | None = None,
    shard: Mapping[str, int | None] | None = None,
    dtype: torch.dtype | str | None = None,
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
) -> dict[str, torch.Tensor]: ...
def cached(
    path: _Path,
    make: Callable[[], dict[str, torch.Tensor]],
    *,
    device: Any = "cpu",
    metadata: dict[str, str] | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]: ...
def load(data: bytes | bytearray | memoryview) -> dict[str, torch.Tensor]: ...
def save(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes: ...
def save_file(
    tensors: dict[str, torch.Tensor],
    filename: _Path,
    metadata: dict[str, str] | None = None,
    *,
    any_suffix: bool = False,
) -> None: ...
def save_model(
    model: torch.nn.Module,
    filename: _Path,
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    any_suffix: bool = False,
) -> None: ...
def save_sharded(
    tensors: dict[str, torch.Tensor],
    directory: _Path,
    max_shard_size: int | str = "5GB",
    metadata: dict[str, str] | None = None,
    *,
    name: str = "model.safetensors",
    num_threads: int = 4,
    sync: bool = True,
) -> list[str]: ...
def load_sharded(directory: _Path, device: Any = "cpu", **options: Any) -> dict[str, torch.Tensor]: ...
def load_model(
    model: torch.nn.Module,
    filename: _Path,
    strict: bool = True,
    device: Any = "cpu",
    *,
    backend: _Backend | None = None,
    **options: Any,
) -> tuple[set[str], list[str]]: ...
def storage_ptr(tensor: torch.Tensor) -> int: ...
def storage_size(tensor: torch.Tensor) -> int: ...
