"""What a loader has copied to its device, and how each rank gets tensors, or parts of them, from it."""

import torch

from ckptfs.dtypes import torch_dtype
from ckptfs.errors import error
from ckptfs.fastsafetensors.shard import checked_to_fit, cuts_of, joined
from ckptfs.fastsafetensors.types import DType, TorchTensor, native


class FileBuffer:
    """A file on the device: its metadata, the rank that read it, and on that rank its tensors."""

    def __init__(self, metadata, rank, frames, tensors):
        self.metadata, self.rank = metadata, rank
        # Of the tensors that are kept, with their types on the device.
        self.frames, self.tensors = frames, tensors
        self.remaining, self.cache = set(frames), {}


class FilesBufferOnDevice:
    """The tensors of several files on a device; `SafeTensorsFileLoader.copy_files_to_device` makes it.

    In a group of several ranks each has the tensors of its own files. All ranks make every call here, in the same
    order, and then get the tensor from the rank that has it. A tensor belongs to the caller: it stays when this is
    closed, also with `borrowed_tensors`.

    A group of one gets the loaded tensor itself, each time the same. Several ranks get a new one with each call. Once
    `get_tensor`, `get_sharded` or `as_dict` has handed out each tensor of a file, its memory is freed. Then asking for
    one again is an error on every rank; make other calls before. With `auto_mem_delete = False`, set on every rank, the
    memory is held until this is closed.
    `device` and `dtype` of a call move and cast what it hands out.

        buffers = loader.copy_files_to_device()
        weight = buffers.get_tensor("model.norm.weight")
        rows = buffers.get_sharded("lm_head.weight", dim=0)
        buffers.close()
    """

    def __init__(self, files, pg, device, caches=False):
        self.pg, self._device, self._caches, self._closed = pg, device, caches, False
        self.auto_mem_delete = pg.size() > 1 and not caches
        # The rank that has a tensor, and which of its files it is in.
        self.key_to_rank_lidx = {}
        self._files = {rank: [] for rank in range(pg.size())}
        for file in files:
            files_of_rank = self._files[file.rank]
            self.key_to_rank_lidx |= dict.fromkeys(file.frames, (file.rank, len(files_of_rank)))
            files_of_rank.append(file)

    def close(self):
        """Frees what is held here. Tensors that were handed out stay."""
        self._files, self._closed = {}, True
        self.pg.close()

    def get_filename(self, tensor_name):
        """The file of a tensor, as it was named to the loader."""
        return self._file(tensor_name).metadata.src

    def get_shape(self, tensor_name):
        """The whole shape of a tensor."""
        return list(self._file(tensor_name).frames[tensor_name].shape)

    def get_tensor(self, tensor_name, device=None, dtype=DType.AUTO):
        """A whole tensor of torch, on every rank."""
        return self.get_tensor_wrapped(tensor_name, device, dtype).get_raw()

    def get_tensor_wrapped(self, tensor_name, device=None, dtype=DType.AUTO):
        """The same as a `TorchTensor`."""
        return self.get_sharded_wrapped(tensor_name, -1, device, dtype)

    def get_sharded(self, tensor_name, dim, device=None, dtype=DType.AUTO):
        """This rank's part of a tensor that is cut along `dim`.

        Each rank has the size divided by the ranks, rounded up; the last ones may have less, or nothing. With `dim=-1`
        it is the whole tensor. A group of one has all of it, whatever `dim` is."""
        return self.get_sharded_wrapped(tensor_name, dim, device, dtype).get_raw()

    def get_sharded_wrapped(self, tensor_name, dim, device=None, dtype=DType.AUTO):
        """The same as a `TorchTensor`."""
        file = self._file(tensor_name)
        part = self._part(file, tensor_name, dim).to(device, dtype)
        file.remaining.discard(tensor_name)
        if not file.remaining and self.auto_mem_delete:
            file.tensors = {}
        return part

    def push_tensor(self, tensor_name, dst_rank, device=None, dtype=DType.AUTO):
        """A whole tensor of torch on rank `dst_rank`, and `None` on the others. A group of one has it for any
        `dst_rank`."""
        file = self._file(tensor_name)
        if self.pg.size() == 1:
            return file.tensors[tensor_name].to(device, dtype).get_raw()
        if not 0 <= dst_rank < self.pg.size():
            raise error(f"{tensor_name}: cannot go to rank {dst_rank} of {self.pg.size()}",
                        "name a rank of the group", ValueError)  # fmt: skip
        self._check_there(file, tensor_name)
        own_rank, result = self.pg.rank(), None
        if file.rank == dst_rank == own_rank:
            result = file.tensors[tensor_name].clone()
        elif file.rank != dst_rank and own_rank == file.rank:
            self.pg.send(tensor_name, file.tensors[tensor_name].get_raw(), dst_rank)
        elif own_rank == dst_rank:
            result = self._empty(file.frames[tensor_name])
            self.pg.receive(tensor_name, result.get_raw(), file.rank)
        return None if result is None else result.to(device, dtype).get_raw()

    def get_multi_cols(self, tensor_names, dim, device=None, dtype=DType.AUTO):
        """This rank's parts of several tensors, each cut along `dim` as by `get_sharded`, joined along `dim` to one
        `TorchTensor`.

        Where one file has all, they are in the order of the names. Else they are in the order of the ranks, and on one
        rank in the order of the paths. Only a group of one may count `dim` from the end."""
        if not tensor_names:
            raise error("get_multi_cols: no tensor is named", also=ValueError)
        groups = {}
        for name in tensor_names:
            groups.setdefault(self._rank_lidx(name), []).append(name)
        frames = {name: self._file(name).frames[name] for name in tensor_names}
        dim = checked_to_fit(frames, dim, self.pg.size())
        parts = []
        for (rank, lidx), names in sorted(groups.items(), key=lambda group: group[0]):
            parts.append(self._columns(self._files[rank][lidx], names, dim))
        whole = parts[0]
        if len(parts) > 1:
            whole = self._wrapped(whole.dtype, joined([part.get_raw() for part in parts], dim))
        return whole.to(device, dtype)

    def as_dict(self, tensor_shard_dim):
        """This rank's parts of several tensors as `TorchTensor` by name. `{"model.norm.weight": -1, "lm_head.weight":
        0}` has the `dim` of `get_sharded` for each name."""
        return {name: self.get_sharded_wrapped(name, dim) for name, dim in tensor_shard_dim.items()}

    def iter_local_tensors(self, tensor_names):
        """Names and tensors of torch, one after the other; for a group of one."""
        if self.pg.size() != 1:
            raise error("iter_local_tensors: the group has several ranks",
                        "use get_tensor, on every rank", RuntimeError)  # fmt: skip
        for name in tensor_names:
            yield name, self._file(name).tensors[name].get_raw()

    def _rank_lidx(self, name):
        if self._closed:
            raise error(f"{name}: the buffers are closed", "take what you need of them before")
        if name not in self.key_to_rank_lidx:
            raise error(f"{name}: is in none of the files that were copied, or was filtered out",
                        "see key_to_rank_lidx for those that there are", ValueError)  # fmt: skip
        return self.key_to_rank_lidx[name]

    def _file(self, name):
        rank, lidx = self._rank_lidx(name)
        return self._files[rank][lidx]

    def _check_there(self, file, name):
        """Refuses a tensor of a file that was freed: on every rank alike, so that none waits for another."""
        if not file.remaining and self.auto_mem_delete:
            raise error(f"{name}: all tensors of {file.metadata.src} were handed out, and its memory was freed",
                        "keep what you got, or load with disable_cache=False")  # fmt: skip

    def _part(self, file, name, dim):
        if self.pg.size() == 1:
            return file.tensors[name]
        frame = file.frames[name]
        if dim != -1 and not 0 <= dim < len(frame.shape):
            raise error(f"{name}: cannot be cut along {dim}: its shape is {frame.shape}",
                        "name one of its dimensions, or -1 for all of it", IndexError)  # fmt: skip
        if (name, dim) in file.cache:
            return file.cache[name, dim].clone()
        self._check_there(file, name)
        if dim == -1:
            result = file.tensors[name].clone() if name in file.tensors else self._empty(frame)
            self.pg.broadcast(name, result.get_raw(), file.rank)
        else:
            result = self._scattered(file, [name], dim)
        if self._caches:
            file.cache[name, dim] = result.clone()
        return result

    def _columns(self, file, names, dim):
        if self.pg.size() == 1:
            whole = joined([file.tensors[name].get_raw() for name in names], dim)
            # A single tensor is a copy: it is not that of get_tensor.
            return self._wrapped(file.frames[names[0]].dtype, whole.clone() if len(names) == 1 else whole)
        self._check_there(file, names[0])
        return self._scattered(file, names, dim)

    def _empty(self, frame):
        kind, shape = torch_dtype(frame.dtype.value), native(frame.dtype, frame.shape)
        return self._wrapped(frame.dtype, torch.empty(shape, dtype=kind, device=self._device.as_str()))

    def _wrapped(self, dtype, tensor):
        return TorchTensor(self._device, dtype, tensor)

    def _scattered(self, file, names, dim):
        """This rank's parts of tensors of one file, joined."""
        frames = [file.frames[name] for name in names]
        ranks, dtype = range(self.pg.size()), frames[0].dtype
        cuts = [cuts_of(name, frame, dim, len(ranks)) for name, frame in zip(names, frames, strict=True)]
        shapes = []
        for rank in ranks:
            shape = native(dtype, frames[0].shape)
            shape[dim] = sum(ends[rank][1] - ends[rank][0] for ends in cuts)
            shapes.append(shape)
        parts = None
        if self.pg.rank() == file.rank:
            raws = [file.tensors[name].get_raw() for name in names]
            parts = [
                joined([raw.narrow(dim, ends[rank][0], ends[rank][1] - ends[rank][0])
                        for raw, ends in zip(raws, cuts, strict=True)], dim) for rank in ranks
            ]  # fmt: skip
        kind, device_text = torch_dtype(dtype.value), self._device.as_str()
        text = ", ".join(names)
        return self._wrapped(dtype, self.pg.scatter(text, parts, shapes, kind, file.rank, device_text))
