"""Computes on the CPU between two copies, for stub devices that have memory and streams but no kernels.

It sees every operation of torch in any thread. Operations that only make, view or copy memory are left to torch. For
others, operands are fetched, and the result is copied to the device.
"""

import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

# Operations that need no kernel besides views, and collectives, which copy by themselves.
_PLAIN = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "alias", "set_",
          "record_stream", "is_pinned", "_local_scalar_dense", "is_same_size"}  # fmt: skip

# Operations that need none between contiguous tensors of one type.
_COPIES = {"_to_copy", "copy_", "clone"}


class Kernels(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        there = [tensor for tensor in tensors if tensor.is_cuda]
        name = operation.overloadpacket.__name__
        if not there or operation.namespace != "aten" or operation.is_view or name in _PLAIN:
            return operation(*args, **kwargs)
        is_copy = name in _COPIES and all(tensor.is_contiguous() for tensor in tensors)
        if is_copy and {kwargs.get("dtype") or tensors[0].dtype} == {tensor.dtype for tensor in tensors}:
            return operation(*args, **kwargs)
        with _disable_current_modes():
            return _computed_here(operation, args, kwargs, there[0].device)


def _computed_here(operation, args, kwargs, device):
    here = [tree_map(_fetched, value) for value in args]
    named = {key: tree_map(_fetched, value) for key, value in kwargs.items()}
    goes = kwargs.get("device") or device
    if "device" in named:
        named["device"] = "cpu"
    out = operation(*here, **named)
    for place, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        target, made = (args[place], here[place]) if place < len(args) else (kwargs[argument.name], named[argument.name])
        if target.is_cuda:
            assert target.is_contiguous(), f"{operation} into what is not contiguous"
            target.detach().copy_(made)
        out = target if out is made else out
    return tree_map(lambda value: value.to(goes) if isinstance(value, torch.Tensor) else value, out)


def _fetched(value):
    """A tensor on the CPU with the strides that it has on the device."""
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    if value.is_contiguous():
        return value.cpu()
    storage = value.untyped_storage()
    every = torch.empty(0, dtype=value.dtype, device=value.device)
    every = every.set_(storage, 0, (storage.nbytes() // value.element_size(),), (1,)).cpu()
    return every.as_strided(value.size(), value.stride(), value.storage_offset())


def in_every_thread():
    """Applies from now on, in this thread and in those that begin later."""
    Kernels().__enter__()
    run = threading.Thread.run

    def runs(thread):
        with Kernels():
            run(thread)

    threading.Thread.run = runs
