from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, NamedTuple, Self, TypeVar, overload

__version__: str

_Path = str | bytes | PathLike[str]
_Views = _Path | dict[str, Any]
_Framework = Literal["pt", "torch", "pytorch", "np", "numpy", "dlpack"]
_Backend = Literal["mmap", "pread"]
_RememberedLoads = Literal["stores", "all", "none"]
_Name = TypeVar("_Name", bound=Hashable)

class SafetensorError(Exception): ...

class TensorMeta(NamedTuple):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]

class PySafeSlice:
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: Any) -> Any: ...

class PrefetchLoader:
    report: Report | None
    def names(self) -> list[str]: ...
    def __len__(self) -> int: ...
    def take(self, name: str) -> Any: ...
    def __iter__(self) -> Iterator[tuple[str, Any]]: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class safe_open:
    def __init__(
        self,
        filename: _Path,
        framework: _Framework,
        device: Any = "cpu",
        *,
        backend: _Backend | None = None,
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
    ) -> None: ...
    def keys(self) -> list[str]: ...
    def offset_keys(self) -> list[str]: ...
    def metadata(self) -> dict[str, str] | None: ...
    def notes(self) -> list[str]: ...
    def get_tensor(self, name: str) -> Any: ...
    def get_tensors(self, names: str | Iterable[str] | None = None) -> dict[str, Any]: ...
    def get_slice(self, name: str) -> PySafeSlice: ...
    def get_tensor_meta(self, name: str) -> TensorMeta: ...
    def prefetch(
        self, plan: Mapping[str, slice | None] | None = None, *, device: Any = None, threads: int = 8
    ) -> PrefetchLoader: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class _safe_open_handle(safe_open):
    def __init__(
        self, f: IO[Any], framework: _Framework, device: Any = "cpu", *, backend: _Backend | None = None
    ) -> None: ...

class Report:
    tensors: int
    bytes: int
    seconds: float
    cached: int
    direct: int
    gpudirect: int
    buffered: int
    remote: int
    gathered: int
    memory: int
    mapped: int
    received: int
    fallbacks: dict[str, int]
    without_gpudirect: str | None
    notes: tuple[str, ...]
    @property
    def gb_per_second(self) -> float: ...
    def as_dict(self) -> dict[str, Any]: ...

# A mapping from paths is an iterable of paths as well; type checkers take the first overload that fits.
@overload
def load_many(  # type: ignore[overload-overlap]
    filenames: Mapping[_Name, _Path],
    framework: _Framework = "pt",
    device: Any = "cpu",
    *,
    backend: _Backend | None = None,
    names: str | Iterable[str] | None = None,
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
) -> dict[_Name, dict[str, Any]]: ...
@overload
def load_many(
    filenames: Iterable[_Path],
    framework: _Framework = "pt",
    device: Any = "cpu",
    *,
    backend: _Backend | None = None,
    names: str | Iterable[str] | None = None,
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
) -> list[dict[str, Any]]: ...
def configure(
    *,
    backend: _Backend | None = ...,
    threads: int | None = ...,
    memory: int | str | None = ...,
    pinned: int | str | None = ...,
    gpudirect: bool | None = ...,
    log: Literal["debug", "info", "warning", "error"] | None = ...,
    disable: bool | None = ...,
    allow_http: bool | None = ...,
    anonymous: bool | None = ...,
    instance_metadata: bool | None = ...,
    stall_timeout: int | None = ...,
    outage_timeout: int | None = ...,
    poll_interval: int | None = ...,
    connections: int | None = ...,
    cache_dir: _Path | None = ...,
    cache_size: int | str | None = ...,
    cache_min_free: int | None = ...,
    no_cache: bool | None = ...,
    offline: bool | None = ...,
) -> None: ...
def install() -> None: ...
def uninstall() -> None: ...
def installed() -> AbstractContextManager[None]: ...
def last_report() -> Report | None: ...
def stats() -> dict[str, Any]: ...

class Array:
    dtype: str
    shape: tuple[int, ...]
    @property
    def device(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...

class TensorSpec:
    dtype: str
    shape: list[int]
    data_ptr: int
    data_len: int
    def __init__(self, *, dtype: str, shape: Sequence[int], data_ptr: int, data_len: int) -> None: ...

def serialize(tensor_dict: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes: ...
def serialize_file(
    tensor_dict: Mapping[str, TensorSpec],
    filename: _Path,
    metadata: Mapping[str, str] | None = None,
    *,
    any_suffix: bool = False,
) -> None: ...
def deserialize(bytes: bytes | bytearray | memoryview) -> list[tuple[str, dict[str, Any]]]: ...

class Mount:
    source: str
    path: Path
    pid: int
    notes: list[str]
    def close(self) -> None: ...
    def __enter__(self) -> Path: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class MountInfo(NamedTuple):
    source: str
    mountpoint: str
    state: Literal["alive", "dead", "not-answering", "not-permitted", "hidden", "failed"]
    pid: int | None
    reason: str | None
    stats: dict[str, Any] | None

class FetchReport(NamedTuple):
    files: int
    bytes: int
    cached_bytes: int

def fetch(
    url: _Path,
    *,
    root: str | None = None,
    allow_partial: bool = False,
    follow_symlinks: bool = False,
    ranks: int | None = None,
    delta_base: _Path | None = None,
    progress: bool = False,
) -> FetchReport: ...
def mount(
    source: _Path,
    mountpoint: _Path | None = None,
    *,
    show_originals: bool = False,
    keep: str | Iterable[str] = (),
    root: str | None = None,
    allow_partial: bool = False,
    follow_symlinks: bool = False,
    ranks: int | None = None,
    delta_base: _Path | None = None,
    views: _Views | None = None,
    allow_other: bool = False,
    uid: int | None = None,
    gid: int | None = None,
    memory: int | str | None = None,
    threads: int | None = None,
    readahead: int | str | None = None,
    no_passthrough: bool = False,
    remember: _RememberedLoads | None = None,
    nonempty: bool = False,
    log_file: _Path | None = None,
    verbose: int = 0,
    metrics: str | None = None,
    allow_http: bool | None = None,
    anonymous: bool | None = None,
    instance_metadata: bool | None = None,
    stall_timeout: int | None = None,
    outage_timeout: int | None = None,
    poll_interval: int | None = None,
    connections: int | None = None,
    cache_dir: _Path | None = None,
    cache_size: int | str | None = None,
    cache_min_free: int | None = None,
    no_cache: bool | None = None,
    offline: bool | None = None,
) -> Mount: ...
def mounts() -> list[MountInfo]: ...
