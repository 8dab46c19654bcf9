"""The names and calls of the package fastsafetensors, for every kind of checkpoint.

A program that says `from fastsafetensors import ...` says `from ckptfs.fastsafetensors import ...` instead, and changes
nothing else. A file may then be a `.safetensors` file, a directory of shards or its index, or a `.bin`, `.pt` or
`.ckpt` of torch. It may also be a file of a ckptfs mount.

    from ckptfs.fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), "cuda:0")
    loader.add_filenames({0: ["models/llama", "lora/adapter_model.bin"]})
    buffers = loader.copy_files_to_device()
    for name in loader.get_keys():
        tensor = buffers.get_tensor(name)
    buffers.close()
    loader.close()

In: files by the rank that reads them. Out: tensors of torch, each in memory of its own, which is freed with the tensor.
Neither keeps anything else alive. With a process group of torch.distributed, tensors go from the rank that read them to
the others.

What differs: ckptfs reads the bytes, and chooses the way itself. Arguments that say how (`bbuf_size_kb`, `nogds`,
`use_fgds`, `set_numa`, `use_buf_register`, `max_copy_block_size`, `allow_inflight`) are accepted and ignored. Parts of
a size that ranks do not divide evenly reach every rank. Casting may also make elements larger. There is only torch.
"""

import dataclasses
import os

import torch

from ckptfs.distributed.process_group import Group, SingleGroup
from ckptfs.errors import closed, error
from ckptfs.fastsafetensors.buffers import FileBuffer, FilesBufferOnDevice
from ckptfs.fastsafetensors.experts import expert_parallel_filter, expert_parallel_filter_from_env, owned_expert_range
from ckptfs.fastsafetensors.files import File
from ckptfs.fastsafetensors.frames import TensorFrame
from ckptfs.fastsafetensors.metadata import SafeTensorsMetadata, check_framework
from ckptfs.fastsafetensors.types import Device, DeviceType, DType, TorchTensor, as_device, as_dtype
from ckptfs.settings import LoadOptions, limits

__all__ = [
    "DType", "Device", "DeviceType", "FilesBufferOnDevice", "SafeTensorsFileLoader", "SafeTensorsMetadata",
    "SingleGroup", "TensorFrame", "TorchTensor", "expert_parallel_filter", "expert_parallel_filter_from_env",
    "fastsafe_open", "owned_expert_range",
]  # fmt: skip


class SafeTensorsFileLoader:
    """Copies files to a device, those of each rank by that rank.

    `pg`: a process group of torch.distributed, or `None` or a `SingleGroup` for one process.
    `device`: where tensors go, as torch calls it.
    `max_threads`: threads that read at once.
    `disable_cache`: with `False`, what ranks read and got is kept until the buffers are closed. Asking for the same
    again copies it here, without the other ranks.
    `framework`: "pytorch", "pt" or "torch".
    `bbuf_size_kb`, `nogds`, `set_numa`, `debug_log`, `use_fgds` and any other name are accepted and ignored.
    `root`, `allow_partial`, `follow_symlinks`: as for `ckptfs.safe_open`.

        loader = SafeTensorsFileLoader(torch.distributed.group.WORLD, "cuda:0")
        loader.add_filenames({0: ["model-00001-of-00002.bin"], 1: ["model-00002-of-00002.bin"]})
    """

    def __init__(self, pg, device="cpu", bbuf_size_kb=16 * 1024, max_threads=16, nogds=False, set_numa=True,
                 disable_cache=True, debug_log=False, framework="pytorch", use_fgds=False, *, root=None,
                 allow_partial=False, follow_symlinks=False, **kwargs):
        check_framework(framework)
        self._options = LoadOptions(
            root=root, allow_partial=allow_partial, follow_symlinks=follow_symlinks,
            threads=limits(max_threads, None)[0],
        )  # fmt: skip
        self.pg, self.device, self.disable_cache = Group(pg), as_device(device), disable_cache
        if self.device is None:
            raise error("device None is invalid", 'name one, such as "cpu"')
        # By path, the file and the rank that reads it.
        self._files, self._closed, self._keep = {}, False, None
        self.meta, self.frames = {}, {}

    @classmethod
    def process_extension_config(cls, ext_config, **kwargs):
        """Turns a section of fastsafetensors' configuration into arguments of the loader."""
        arguments = dict(ext_config)
        kind = arguments.pop("copier_type", "gds")
        arguments["nogds"] = kind not in ("gds", "fgds")
        if kind == "fgds":
            arguments["use_fgds"] = True
        else:
            arguments.setdefault("use_fgds", False)
        return arguments

    def init_numa(self, set_numa=True):
        """Does nothing. Each load runs its readers near its device, and the calling thread stays where it is."""

    def add_filenames(self, filenames):
        """Names the files of each rank: `{0: ["a.safetensors"], 1: ["b.bin"]}`. Every rank passes the same.

        It reads the metadata of all of them, and copies only its own. A file that is named twice belongs to the last
        rank."""
        if self._closed:
            raise closed()
        for path, rank in _interleave(filenames):
            file = File(path, self._options)
            self._files[path] = file, rank
            self.meta[path] = file.metadata, rank
            self.frames |= file.metadata.tensors

    def get_keys(self):
        """The names of all tensors of all files."""
        return [name for name in self.frames if self._keep is None or self._keep(name)]

    def get_shape(self, tensor_name):
        """The shape of a tensor."""
        if self._keep is not None and not self._keep(tensor_name):
            raise error(f"{tensor_name}: is filtered out", "set another filter", ValueError)
        if tensor_name not in self.frames:
            raise error(f"{tensor_name}: is in none of the files that were named",
                        "see get_keys() for those that there are", KeyError)  # fmt: skip
        return list(self.frames[tensor_name].shape)

    def set_tensor_filter(self, keep_tensor):
        """Reads and shows only tensors for which `keep_tensor(name)` is true; `None` keeps all. Every rank passes the
        same."""
        self._keep = keep_tensor

    def copy_files_to_device(self, dtype=DType.AUTO, use_buf_register=True,
                             max_copy_block_size=16 * 1024 * 1024 * 1024, allow_inflight=False,
                             borrowed_tensors=False):  # fmt: skip
        """Reads this rank's files. Returns a `FilesBufferOnDevice` with the tensors of all ranks. A device that is not
        the CPU becomes torch's current one.

        `dtype` is what every tensor is cast to; `DType.AUTO` leaves all as they are. `borrowed_tensors`, for a group of
        one, changes nothing: tensors belong to the caller anyway. `use_buf_register`, `max_copy_block_size` and
        `allow_inflight` are ignored.

            halves = loader.copy_files_to_device(DType.F16)
        """
        if self._closed:
            raise closed()
        dtype = as_dtype(dtype)
        if max_copy_block_size <= 0:
            raise error("max_copy_block_size must be positive", also=ValueError)
        if borrowed_tensors and self.pg.size() != 1:
            raise error("borrowed_tensors wants a group of one", "leave it out", ValueError)
        chosen = self._chosen(dtype)
        if self.device.type is not DeviceType.CPU:
            # Programs then say "cuda" without a number, and mean this one.
            torch.cuda.set_device(self.device.as_str())
        buffers = []
        for path, (file, rank) in sorted(self._files.items()):
            mine = rank == self.pg.rank()
            tensors = file.read(list(chosen[path]), self.device, dtype) if mine else {}
            buffers.append(FileBuffer(file.metadata, rank, chosen[path], tensors))
        # Both have the group until they are closed.
        return FilesBufferOnDevice(buffers, Group(self.pg.real_pg), self.device, not self.disable_cache)

    def reset(self):
        """Drops the files. Others may be added."""
        self._files, self.meta, self.frames = {}, {}, {}

    def close(self):
        """Drops the files for good. Buffers and tensors stay."""
        self.reset()
        self._closed = True
        self.pg.close()

    def _chosen(self, dtype):
        """By path, the tensors to copy, as they will be on the device. It refuses everything before anything is
        read."""
        chosen, first = {}, {}
        for path, (file, rank) in sorted(self._files.items()):
            if rank not in range(self.pg.size()):
                raise error(f"{path}: is for rank {rank!r}, and there are {self.pg.size()} ranks, from 0",
                            "name files for ranks of the group", KeyError)  # fmt: skip
            frames = {name: frame for name, frame in file.metadata.tensors.items()
                      if self._keep is None or self._keep(name)}  # fmt: skip
            for name in frames:
                if name in first:
                    raise error(f"{name}: is in {first[name]} and in {path}",
                                "load them one after the other, or filter one of them out")  # fmt: skip
                first[name] = path
            if dtype is not DType.AUTO:
                frames = {name: dataclasses.replace(frame, dtype=dtype) for name, frame in frames.items()}
            chosen[path] = frames
        return chosen


class fastsafe_open:
    """Opens files, copies them to the device, and hands out tensors by their names.

    `filenames` is a path, a list of them, or a dictionary of lists by rank, of any checkpoints. `framework`, `pg`,
    `device`, `root`, `allow_partial` and `follow_symlinks` are as for `SafeTensorsFileLoader`. `nogds`, `debug_log`,
    `max_copy_block_size` and `use_fgds` are ignored.

        with fastsafe_open("models/llama", device="cuda:0") as f:
            tensors = {name: f.get_tensor(name) for name in f.keys()}
    """

    def __init__(self, filenames, framework="pt", pg=None, device="cpu", nogds=False, debug_log=False,
                 max_copy_block_size=16 * 1024 * 1024 * 1024, use_fgds=False, *, root=None,
                 allow_partial=False, follow_symlinks=False):
        if isinstance(filenames, str | os.PathLike):
            filenames = [filenames]
        if not isinstance(filenames, dict):
            filenames = {0: filenames}
        self.loader = SafeTensorsFileLoader(
            pg, device, framework=framework, root=root, allow_partial=allow_partial,
            follow_symlinks=follow_symlinks,
        )  # fmt: skip
        try:
            self.loader.add_filenames(filenames)
            self.fb = self.loader.copy_files_to_device(max_copy_block_size=max_copy_block_size)
        except BaseException:
            self.loader.close()
            raise

    def metadata(self):
        """The metadata of each file."""
        return {path: metadata.metadata for path, (metadata, _) in self.loader.meta.items()}

    def keys(self):
        """The names of all tensors."""
        return list(self.fb.key_to_rank_lidx)

    def get_tensor(self, name):
        """A whole tensor of torch."""
        return self.fb.get_tensor(name)

    def get_tensor_wrapped(self, name):
        """The same as a `TorchTensor`."""
        return self.fb.get_tensor_wrapped(name)

    def close(self):
        """Drops files and buffers. Tensors stay."""
        self.fb.close()
        self.loader.close()

    def __enter__(self):
        return self

    def __exit__(self, _exc_type, _exc_value, _traceback):
        self.close()


def _interleave(filenames):
    """Paths with their ranks: the first of each rank, then the second of each, and so on."""
    if not isinstance(filenames, dict):
        raise error(f"files must be named by rank, got {type(filenames).__name__}",
                    "give {0: [paths]}", TypeError)  # fmt: skip
    lists = {}
    for rank, paths in filenames.items():
        if isinstance(paths, str | os.PathLike):
            raise error(f"{os.fspath(paths)}: rank {rank!r} has a path instead of a list of paths",
                        "give {rank: [paths]}", TypeError)  # fmt: skip
        lists[rank] = [os.fsdecode(path) for path in paths]
    for place in range(max(map(len, lists.values()), default=0)):
        for rank, paths in lists.items():
            if place < len(paths):
                yield paths[place], rank
