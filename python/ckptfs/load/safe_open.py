"""`safe_open`: a checkpoint as safetensors shows a file."""

import os
from typing import NamedTuple

from ckptfs.errors import closed, error
from ckptfs.load.framework import framework_named
from ckptfs.load.handle import Handle
from ckptfs.load.indexing import index_loaded, select_index
from ckptfs.load.pipeline import load_directly, load_named, load_parts
from ckptfs.load.torch import Torch
from ckptfs.settings import LoadOptions, parse_names


class TensorMeta(NamedTuple):
    """What the header of a safetensors file says of a tensor."""

    dtype: str
    shape: list
    data_offsets: tuple


class safe_open:
    """Opens a checkpoint, and loads the tensors that are asked for.

    `filename` is any checkpoint: see `help(ckptfs)`. `framework` is "pt" or "np", or "dlpack" for arrays that
    cupy, jax and others take as they are (`ckptfs.Array`). `device` is where tensors of torch and such arrays go.

    With `backend` "mmap", as in safetensors, tensors are used where they lie in their file. Nothing is copied, and
    pages that are written become this process's own. Tensors that cannot be used so (strided ones of a pickle, say) are
    read. A file that is truncated while a mapped tensor is used ends the process.
    With "pread" every tensor has memory of its own, which keeps nothing else alive, and a file that changes is an
    error. Choose it where files may be written while you load, and to have everything in memory when the call returns.
    Nothing that is written to a tensor ever reaches a file.

    The default, where `ckptfs.configure` and the environment say nothing, is "mmap" for torch. Opening and inspecting
    then cost nothing, processes share what they load, and programs expect what safetensors promises. The default
    is "pread" for numpy: its arrays have memory of their own in safetensors, too.

    `root`, `allow_partial`, `follow_symlinks`, `ranks`, `delta_base`: as for `ckptfs inspect`. `num_threads` threads read
    at once, and hold at most `memory` bytes beside what they read into. With `leave_cache` the page cache keeps only what it had, and the
    pages of mapped tensors that are used. Without `cache` tensors of stores pass the cache on disk by.

        with ckptfs.safe_open("models/llama", framework="pt", device="cuda:0") as f:
            norm = f.get_tensor("model.norm.weight")
            rows = f.get_slice("lm_head.weight")[:1024]
    """

    def __init__(self, filename, framework, device="cpu", *, backend=None, root=None,
                 allow_partial=False, follow_symlinks=False, ranks=None, delta_base=None, views=None, num_threads=None, memory=None,
                 leave_cache=False, cache=True):
        # What a pickle has: another process may have other settings.
        self._arguments = (framework, device, backend)
        options = LoadOptions.resolve(
            framework_named(framework), device=device, backend=backend, root=root, allow_partial=allow_partial,
            follow_symlinks=follow_symlinks, ranks=ranks, delta_base=delta_base, views=views, num_threads=num_threads, memory=memory,
            leave_cache=leave_cache, cache=cache,
        )  # fmt: skip
        # `None` once this is closed. Slices keep it.
        self._open_handle = Handle(filename, options)
        self._path = self._open_handle.path

    @property
    def _handle(self):
        handle = self._open_handle
        if handle is None:
            raise closed()
        return handle

    def keys(self):
        """The names of the tensors, sorted."""
        with self._handle.use() as checkpoint:
            names = checkpoint.names
        names.sort()
        return names

    def offset_keys(self):
        """The names of the tensors, in the order of their bytes."""
        with self._handle.use() as checkpoint:
            return checkpoint.names

    def metadata(self):
        """The metadata of the checkpoint; `None` if it has none."""
        with self._handle.use() as checkpoint:
            return checkpoint.metadata

    def get_tensor(self, name):
        """A whole tensor."""
        handle = self._handle
        with handle.use() as checkpoint:
            tensor = checkpoint.tensor(name)
            [loaded] = load_parts([(tensor, tensor.shape)], handle.options)
            return loaded

    def get_tensors(self, names=None):
        """All tensors by their names, or those of a list or a glob, read together."""
        handle = self._handle
        with handle.use() as checkpoint:
            return load_named(checkpoint, handle.options._replace(names=parse_names(names)))

    def get_slice(self, name):
        """A tensor to be indexed: `f.get_slice("weight")[:, ::2]` reads only those bytes. A slice can also be read
        after this was closed."""
        handle = self._handle
        with handle.use() as checkpoint:
            return PySafeSlice(handle, checkpoint.tensor(name))

    def get_tensor_meta(self, name):
        """What the header says of a tensor: `dtype`, `shape`, `data_offsets`. Nothing is read."""
        with self._handle.use() as checkpoint:
            tensor = checkpoint.tensor(name)
            return TensorMeta(tensor.dtype, tensor.shape, checkpoint.data_offsets(name))

    def prefetch(self, plan=None, *, device=None, threads=8):
        """Loads in the background: a `PrefetchLoader`, which hands each tensor out once.

        `plan` has the names to load, each with `None` for the whole tensor or a slice of its first dimension. By
        default everything is loaded. `device` defaults to that of this handle, and may be "cpu". The loader goes on
        when the handle is closed. What it has read is held until it is taken.

            with f.prefetch({"model.norm.weight": None, "lm_head.weight": slice(0, 1024)}) as loader:
                for name, tensor in loader:
                    ...
        """
        from ckptfs.load.prefetch import PrefetchLoader, parts_of

        options = self._handle.options
        if options.framework is not Torch:
            raise error('prefetch is only compatible with framework="pt"')
        device = options.device if device is None else Torch.parse_device(device)
        if not isinstance(threads, int) or threads < 1:
            raise error(f"threads must be a positive integer, got {threads!r}")
        with self._handle.use() as checkpoint:
            parts = parts_of(checkpoint, plan)
            for part in parts.values():
                Torch.dtype(part.dtype)
            return PrefetchLoader(parts, device, threads)

    def notes(self):
        """Messages about what was chosen and what was left out."""
        with self._handle.use() as checkpoint:
            return checkpoint.notes

    def close(self):
        """Closes the files, unless slices still use them. Tensors stay, and slices can be read."""
        self._open_handle = None

    def __enter__(self):
        return self

    def __exit__(self, _exc_type, _exc_value, _traceback):
        self.close()

    def __reduce__(self):
        handle = self._handle
        options = {name: getattr(handle.options, name)
                   for name in ("root", "allow_partial", "follow_symlinks", "ranks", "delta_base", "memory", "leave_cache", "cache")}  # fmt: skip
        options["num_threads"] = handle.options.threads
        with handle.use() as checkpoint:
            return _reopened, (handle.path, self._arguments, options, checkpoint.identity)

    def __repr__(self):
        return f"<ckptfs.safe_open {self._path!r}>"


def _reopened(path, arguments, options, identity):
    """The other end of a pickle: the same checkpoint, or an error."""
    framework, device, backend = arguments
    opened = safe_open(path, framework, device, backend=backend, **options)
    with opened._handle.use() as checkpoint:
        if checkpoint.identity != identity:
            raise error(f"{path}: changed on disk since the handle was pickled", "open it again")
    return opened


class _safe_open_handle(safe_open):
    """The same for an open file, which must have a name."""

    def __init__(self, f, framework, device="cpu", *, backend=None):
        f.fileno
        super().__init__(os.fspath(f.name), framework, device, backend=backend)


class PySafeSlice:
    """A tensor to be indexed. Integers, slices and one ellipsis choose the bytes that an index reads.

    Torch itself applies other indexes to what was read. A slice keeps the files of its checkpoint open."""

    def __init__(self, handle, tensor):
        self._handle, self._tensor = handle, tensor

    def get_shape(self):
        """The shape in the header."""
        return self._tensor.shape

    def get_dtype(self):
        """The type's name in the header."""
        return self._tensor.dtype

    def __getitem__(self, index):
        options = self._handle.options
        selection = select_index(index, self._tensor.shape, clips=options.framework is Torch)
        with self._handle.use() as checkpoint:
            part = checkpoint.tensor(self._tensor.name).part(selection.steps)
            [loaded] = load_parts([(part, selection.shape)], options)
        return loaded if selection.rest is None else index_loaded(loaded, selection.rest)

    def _load_to(self, device):
        """The whole tensor on a device where the Rust part loads there itself; else `None`, and nothing is read."""
        options = self._handle.options
        with self._handle.use() as checkpoint:
            return load_directly(checkpoint.tensor(self._tensor.name), options.framework.parse_device(device), options)

    def __repr__(self):
        return f"<slice of {self._tensor!r}>"
