from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from os import PathLike
from re import Pattern
from types import TracebackType
from typing import Any, Self

import torch
from torch.distributed import ProcessGroup

_Path = str | PathLike[str]

class DeviceType(Enum):
    CPU = "cpu"
    CUDA = "cuda"
    GPU = "gpu"

class Device:
    type: DeviceType
    index: int | None
    def __init__(self, type: DeviceType = ..., index: int | None = None) -> None: ...
    def as_str(self) -> str: ...
    @classmethod
    def from_str(cls, s: str) -> Device: ...

class DType(Enum):
    BOOL = "BOOL"
    U8 = "U8"
    I8 = "I8"
    U16 = "U16"
    I16 = "I16"
    U32 = "U32"
    I32 = "I32"
    U64 = "U64"
    I64 = "I64"
    F16 = "F16"
    BF16 = "BF16"
    F32 = "F32"
    F64 = "F64"
    C64 = "C64"
    F8_E5M2 = "F8_E5M2"
    F8_E4M3 = "F8_E4M3"
    F8_E5M2FNUZ = "F8_E5M2FNUZ"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E8M0 = "F8_E8M0"
    F4 = "F4"
    AUTO = "AUTO"

_Device = Device | torch.device | str | None
_DType = DType | torch.dtype | str

class Group:
    real_pg: ProcessGroup | None
    def __init__(self, pg: SingleGroup | ProcessGroup | None) -> None: ...
    def size(self) -> int: ...
    def rank(self) -> int: ...
    def close(self) -> None: ...

class SingleGroup:
    def size(self) -> int: ...
    def rank(self) -> int: ...

class TensorFrame:
    dtype: DType
    shape: list[int]
    data_offsets: list[int]
    strides: list[int]
    offsets: list[int]
    sliced: bool
    def __init__(
        self,
        dtype: DType,
        shape: list[int],
        data_offsets: list[int],
        strides: list[int],
        offsets: list[int],
        sliced: bool,
    ) -> None: ...
    @classmethod
    def from_buffer(cls, entry: Mapping[str, Any]) -> Self: ...
    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> TensorFrame: ...

class SafeTensorsMetadata:
    src: str
    framework: Any
    metadata: dict[str, str]
    tensors: dict[str, TensorFrame]
    header_length: int
    size_bytes: int
    aligned: bool
    ser: dict[str, Any]
    def __init__(
        self,
        string: str,
        header_length: int,
        size_bytes: int,
        framework: Any,
        src: str = "",
        keep_orig_dict: bool = False,
    ) -> None: ...
    @classmethod
    def from_file(cls, filename: _Path, framework: Any) -> Self: ...
    @classmethod
    def from_fd(cls, fd: int, filename: str, framework: Any, keep_orig_dict: bool = False) -> Self: ...
    @classmethod
    def from_buffer(cls, buf: int, buffer_len: int, filename: str, framework: Any) -> Self: ...
    def get_tensors(
        self, gbuf: Any, device: _Device, copy_start_offset: int, dtype: _DType = ..., owner: Any = None
    ) -> dict[str, TorchTensor]: ...
    def select_byte_ranges(
        self, keep_tensor: Callable[[str], bool], merge_gap: int = 4096
    ) -> list[tuple[int, int]]: ...

class TorchTensor:
    device: Device
    dtype: DType
    real_tensor: torch.Tensor
    def __init__(self, device: Device, dtype: DType, real_tensor: torch.Tensor) -> None: ...
    def get_raw(self) -> torch.Tensor: ...
    def get_shape(self) -> list[int]: ...
    def get_nbytes(self) -> int: ...
    def copy_to_buffer(self, buf: memoryview) -> None: ...
    def to(self, device: _Device = None, dtype: _DType = ...) -> TorchTensor: ...
    def view(self, dtype: _DType) -> TorchTensor: ...
    def clone(self) -> TorchTensor: ...
    def detach(self) -> TorchTensor: ...
    def contiguous(self) -> TorchTensor: ...
    def reshape(self, shape: Sequence[int]) -> TorchTensor: ...
    def data_ptr(self) -> int: ...
    def __getitem__(self, index: Any) -> TorchTensor: ...

class FilesBufferOnDevice:
    pg: Group
    auto_mem_delete: bool
    key_to_rank_lidx: dict[str, tuple[int, int]]
    def close(self) -> None: ...
    def get_filename(self, tensor_name: str) -> str: ...
    def get_shape(self, tensor_name: str) -> list[int]: ...
    def get_tensor(self, tensor_name: str, device: _Device = None, dtype: _DType = ...) -> torch.Tensor: ...
    def get_tensor_wrapped(
        self, tensor_name: str, device: _Device = None, dtype: _DType = ...
    ) -> TorchTensor: ...
    def get_sharded(
        self, tensor_name: str, dim: int, device: _Device = None, dtype: _DType = ...
    ) -> torch.Tensor: ...
    def get_sharded_wrapped(
        self, tensor_name: str, dim: int, device: _Device = None, dtype: _DType = ...
    ) -> TorchTensor: ...
    def push_tensor(
        self, tensor_name: str, dst_rank: int, device: _Device = None, dtype: _DType = ...
    ) -> torch.Tensor | None: ...
    def get_multi_cols(
        self, tensor_names: Sequence[str], dim: int, device: _Device = None, dtype: _DType = ...
    ) -> TorchTensor: ...
    def as_dict(self, tensor_shard_dim: Mapping[str, int]) -> dict[str, TorchTensor]: ...
    def iter_local_tensors(self, tensor_names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]: ...

class SafeTensorsFileLoader:
    pg: Group
    device: Device
    disable_cache: bool
    meta: dict[str, tuple[SafeTensorsMetadata, int]]
    frames: dict[str, TensorFrame]
    def __init__(
        self,
        pg: SingleGroup | ProcessGroup | None,
        device: _Device = "cpu",
        bbuf_size_kb: int = 16384,
        max_threads: int = 16,
        nogds: bool = False,
        set_numa: bool = True,
        disable_cache: bool = True,
        debug_log: bool = False,
        framework: str = "pytorch",
        use_fgds: bool = False,
        *,
        root: str | None = None,
        allow_partial: bool = False,
        follow_symlinks: bool = False,
        **kwargs: Any,
    ) -> None: ...
    @classmethod
    def process_extension_config(cls, ext_config: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]: ...
    def init_numa(self, set_numa: bool = True) -> None: ...
    def add_filenames(self, filenames: Mapping[int, Sequence[_Path]]) -> None: ...
    def get_keys(self) -> list[str]: ...
    def get_shape(self, tensor_name: str) -> list[int]: ...
    def set_tensor_filter(self, keep_tensor: Callable[[str], bool] | None) -> None: ...
    def copy_files_to_device(
        self,
        dtype: _DType = ...,
        use_buf_register: bool = True,
        max_copy_block_size: int = 17179869184,
        allow_inflight: bool = False,
        borrowed_tensors: bool = False,
    ) -> FilesBufferOnDevice: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...

class fastsafe_open:
    loader: SafeTensorsFileLoader
    fb: FilesBufferOnDevice
    def __init__(
        self,
        filenames: _Path | Sequence[_Path] | Mapping[int, Sequence[_Path]],
        framework: str = "pt",
        pg: SingleGroup | ProcessGroup | None = None,
        device: _Device = "cpu",
        nogds: bool = False,
        debug_log: bool = False,
        max_copy_block_size: int = 17179869184,
        use_fgds: bool = False,
        *,
        root: str | None = None,
        allow_partial: bool = False,
        follow_symlinks: bool = False,
    ) -> None: ...
    def metadata(self) -> dict[str, dict[str, str]]: ...
    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...
    def get_tensor_wrapped(self, name: str) -> TorchTensor: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

def owned_expert_range(num_experts: int, ep_size: int, ep_rank: int) -> tuple[int, int]: ...
def expert_parallel_filter(
    num_experts: int, ep_size: int, ep_rank: int, pattern: Pattern[str] = ...
) -> Callable[[str], bool]: ...
def expert_parallel_filter_from_env() -> Callable[[str], bool] | None: ...
