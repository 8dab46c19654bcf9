"""`safe_open`: a checkpoint as safetensors shows a file."""

import os
from typing import NamedTuple

from ckptfs import settings
from ckptfs.load import pipeline
from ckptfs._errors import closed, error
from ckptfs.load.torch import Torch, framework as framework_named
from ckptfs.load.indexing import chosen, indexed
from ckptfs.load.handle import Source, options


class TensorMeta(NamedTuple):
    """What the header of a safetensors file says of a tensor."""

    dtype: str
    shape: list
    data_offsets: tuple


class safe_open:
    """Opens a checkpoint, and loads of it what is asked for.

    `filename` is any checkpoint: see `help(ckptfs)`. `framework` is "pt" or "np", or "dlpack" for arrays that
    cupy, jax and others take as they are (`ckptfs.Array`); `device` is where tensors of torch and such arrays go.

    `backend` is "mmap", as in safetensors: tensors are used where they lie in their file, nothing is
    copied, and pages that are written become this process's own. Those that do not lie so (strided ones
    of a pickle, say) are read. A file that is truncated while such a tensor is used ends the process.
    With "pread" every tensor has memory of its own, which keeps nothing else alive, and a file that
    changes is an error: choose it where files may be written while you load, and to have all of it in
    memory when the call returns. Nothing that is written to a tensor ever reaches a file.

    The default, where `ckptfs.configure` and the environment say nothing, is "mmap" for torch, because opening and looking then cost nothing, several processes share
    what they load, and what safetensors promises is what programs were written for. It is "pread" for numpy,
    whose arrays have memory of their own in safetensors, too.

    `root`, `allow_partial`, `follow_symlinks`: as for `ckptfs inspect`. `num_threads` read at once, and
    hold no more than `memory` bytes beside what they read into. With `leave_cache` the page cache keeps
    only what it had; of tensors that are mapped it has what is used.

        with ckptfs.safe_open("models/llama", framework="pt", device="cuda:0") as f:
            norm = f.get_tensor("model.norm.weight")
            rows = f.get_slice("lm_head.weight")[:1024]
    """

    def __init__(self, filename, framework, device="cpu", *, backend=None, root=None,
                 allow_partial=False, follow_symlinks=False, num_threads=None, memory=None,
                 leave_cache=False):
        self._asked = (framework, device, backend)
        self._framework = framework_named(framework)
        self._backend = settings.backend(backend, self._framework.BACKEND)
        num_threads, memory = settings.limits(num_threads, memory)
        how = options(root, allow_partial, follow_symlinks, num_threads, memory, leave_cache)
        # `None` once the handle is closed. Slices keep the source open.
        self._open_source = Source(filename, how)
        self._path = self._open_source.path
        self._device = self._framework.device(device)

    @property
    def _source(self):
        source = self._open_source
        if source is None:
            raise closed()
        return source

    def keys(self):
        """The names of the tensors, sorted."""
        with self._source.use() as opened:
            names = opened.names
        names.sort()
        return names

    def offset_keys(self):
        """The names of the tensors, in the order in which they lie."""
        with self._source.use() as opened:
            return opened.names

    def metadata(self):
        """What the checkpoint says of itself beside the tensors; `None` if it has no metadata."""
        with self._source.use() as opened:
            return opened.metadata

    def get_tensor(self, name):
        """A whole tensor."""
        with self._source.use() as opened:
            tensor = opened.tensor(name)
            [loaded] = pipeline.load_parts(
                [(tensor, tensor.shape)], self._framework, self._backend, self._device
            )
            return loaded

    def get_tensors(self, names=None):
        """All tensors by their names, or those of a list or a glob, read together."""
        with self._source.use() as opened:
            how = {"device": self._device}
            return pipeline.load_named(opened, names, self._framework, self._backend, **how)

    def get_slice(self, name):
        """A tensor to be indexed: `f.get_slice("weight")[:, ::2]` reads those bytes alone. A slice can
        also be read after the handle was closed."""
        source = self._source
        with source.use() as opened:
            return PySafeSlice(source, opened.tensor(name), self._framework, self._backend, self._device)

    def get_tensor_meta(self, name):
        """What the header says of a tensor: `dtype`, `shape`, `data_offsets`. Nothing is read."""
        with self._source.use() as opened:
            tensor = opened.tensor(name)
            return TensorMeta(tensor.dtype, tensor.shape, opened.data_offsets(name))

    def prefetch(self, plan=None, *, device=None, threads=8):
        """Loads in the background: a `PrefetchLoader`, which hands each tensor out once.

        `plan` has the names to load, each with `None` for the whole tensor or a slice of its first
        dimension; by default everything is loaded. `device` is the handle's if none is named; "cpu" is
        one too. The loader goes on when the handle is closed; what it has read is held until it is taken.

            with f.prefetch({"model.norm.weight": None, "lm_head.weight": slice(0, 1024)}) as loader:
                for name, tensor in loader:
                    ...
        """
        from ckptfs.load.prefetch import PrefetchLoader, parts_of

        if self._framework is not Torch:
            raise error('prefetch is only compatible with framework="pt"')
        device = self._device if device is None else self._framework.device(device)
        if not isinstance(threads, int) or threads < 1:
            raise error(f"threads must be a positive integer, got {threads!r}")
        with self._source.use() as opened:
            parts = parts_of(opened, plan)
            for part in parts.values():
                self._framework.type(part.dtype)
            return PrefetchLoader(parts, device, threads)

    def notes(self):
        """What was chosen and what was left out, in words."""
        with self._source.use() as opened:
            return opened.notes

    def close(self):
        """Closes the files, unless slices still use them. Tensors stay, and slices can be read."""
        self._open_source = None

    def __enter__(self):
        return self

    def __exit__(self, _exc_type, _exc_value, _traceback):
        self.close()

    def __reduce__(self):
        source = self._source
        with source.use() as opened:
            return _reopened, (source.path, self._asked, source.how, opened.identity)

    def __repr__(self):
        return f"<ckptfs.safe_open {self._path!r}>"


def _reopened(path, asked, how, identity):
    """The other end of a pickle: the same checkpoint, or an error."""
    framework, device, backend = asked
    how = dict(how)
    handle = safe_open(path, framework, device, backend=backend, num_threads=how.pop("threads"), **how)
    with handle._source.use() as opened:
        if opened.identity != identity:
            raise error(f"{path}: changed on disk since the handle was pickled", "open it again")
    return handle


class _safe_open_handle(safe_open):
    """The same for an open file, which must have a name."""

    def __init__(self, f, framework, device="cpu", *, backend=None):
        f.fileno
        super().__init__(os.fspath(f.name), framework, device, backend=backend)


class PySafeSlice:
    """A tensor to be indexed. Each index reads its own bytes: integers, slices and one ellipsis choose
    them; of torch, whatever else it takes is left to it, on what was read. A slice keeps the files of
    its checkpoint open."""

    def __init__(self, source, tensor, framework, backend, device):
        self._source, self._tensor = source, tensor
        self._framework, self._backend, self._device = framework, backend, device

    def get_shape(self):
        """As the header has it."""
        return self._tensor.shape

    def get_dtype(self):
        """As the header calls it."""
        return self._tensor.dtype

    def __getitem__(self, index):
        what = chosen(index, self._tensor.shape, cuts=self._framework is Torch)
        with self._source.use() as opened:
            part = opened.tensor(self._tensor.name).part(what.steps)
            [loaded] = pipeline.load_parts([(part, what.shape)], self._framework, self._backend, self._device)
        return loaded if what.rest is None else indexed(loaded, what.rest)

    def _taken_to(self, device):
        """All of it on a device, if it can be loaded there straight; else nothing, and nothing is read."""
        device = self._framework.device(device)
        with self._source.use() as opened:
            tensor = opened.tensor(self._tensor.name)
            return pipeline.load_straight(tensor, self._framework, self._backend, device)

    def __repr__(self):
        return f"<slice of {self._tensor!r}>"
