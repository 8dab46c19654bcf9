"""Tensors of a model that share memory: which do, and which of them to write.

The names of these functions are those of safetensors, because programs use them although they are private there.
"""

import torch


def storage_ptr(tensor):
    """The address of the memory that a tensor is a view of; 0 without memory."""
    return tensor.untyped_storage().data_ptr()


def storage_size(tensor):
    """Bytes of that memory."""
    return tensor.untyped_storage().nbytes()


def _end_ptr(tensor):
    """Just past the last byte of a tensor."""
    if not tensor.nelement():
        return tensor.data_ptr()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _is_complete(tensor):
    """Whether a tensor is all of its memory."""
    whole = tensor.nelement() * tensor.element_size() == storage_size(tensor)
    return whole and tensor.data_ptr() == storage_ptr(tensor)


def _find_shared_tensors(tensors):
    """Sets of names of tensors with overlapping bytes; a set of one name where nothing overlaps."""
    by_storage = {}
    for name, tensor in tensors.items():
        if tensor.device.type != "meta" and storage_ptr(tensor) and storage_size(tensor):
            # Another device may use the same addresses.
            key = (str(tensor.device), storage_ptr(tensor), storage_size(tensor))
            by_storage.setdefault(key, []).append(name)
    return [names for group in by_storage.values() for names in _overlapping(tensors, group)]


def _overlapping(tensors, names):
    spans = sorted((tensors[name].data_ptr(), _end_ptr(tensors[name]), name) for name in names)
    found, reached = [], None
    for start, end, name in spans:
        if reached is None or start >= reached:
            found.append({name})
            reached = end
        else:
            found[-1].add(name)
            reached = max(reached, end)
    return found


def split_tied(tensors):
    """The tensors without those that are another under a second name, and by these names the first name of each.

    Tensors that share memory and are not the same are refused: written apart, they would no longer share it."""
    places, tied = {name: place for place, name in enumerate(tensors)}, {}
    for shared in _find_shared_tensors(tensors):
        first, *others = sorted(shared, key=places.__getitem__)
        different = [name for name in others if _view(tensors[name]) != _view(tensors[first])]
        if different:
            raise RuntimeError(
                f"{first} and {different[0]} share memory, and are not the same tensor, so that each would be written"
                f" with bytes of the other. Give one of them memory of its own, with `.clone()`."
            )
        tied.update(dict.fromkeys(others, first))
    return {name: tensor for name, tensor in tensors.items() if name not in tied}, tied


def _view(tensor):
    """What makes two tensors of one memory the same."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _remove_duplicate_names(state_dict, *, preferred_names=None, discard_names=None):
    """Of tensors that share memory, the name to keep, with those to leave out.

    The kept tensor has all of the memory. Of several it is a preferred one, else one that is not to be discarded, else
    the first."""
    preferred, discarded = set(preferred_names or ()), set(discard_names or ())
    removed = {}
    for shared in _find_shared_tensors(state_dict):
        complete = {name for name in shared if _is_complete(state_dict[name])}
        if not complete:
            raise RuntimeError(
                f"Of the tensors {sorted(shared)} none has all of the memory that it is a view of, so none"
                " can be kept for the others without writing more than is used. Clone them, or save the"
                " tensor that they are views of."
            )
        kept = min(complete & preferred or complete - discarded or complete)
        others = sorted(shared - {kept})
        if others:
            removed[kept] = others
    return removed
