"""What an index means: in, an index and a shape; out, steps of every axis, and the shape of the result.

Pure: nothing is read. Indexes are those of safetensors: integers, slices and one ellipsis; an empty
list chooses nothing. What lies outside of the tensor is an error, where torch and numpy would cut it
off, because whoever names rows that are not there has the wrong tensor.
"""

import operator

from ckptfs._errors import error


def steps(index, shape):
    """Of each axis (first, how many, from one to the next); and the axes that stay."""
    if isinstance(index, list):
        if index:
            raise error("Non empty lists are not implemented", "use slices, one after the other")
        index = (slice(0, 0),)
    items = list(index) if isinstance(index, tuple) else [index]
    ellipses = sum(item is Ellipsis for item in items)
    if ellipses > 1:
        raise error("Only one ellipsis (...) is allowed in slice index")
    named = len(items) - ellipses
    if named > len(shape):
        raise error(f"Error during slicing {_told(items)} with shape {list(shape)}: more slicing "
                    f"indexes than dimensions in tensor")
    at = items.index(Ellipsis) if ellipses else len(items)
    items[at : at + ellipses] = [slice(None)] * (len(shape) - named)
    chosen, kept = [], []
    for axis, (item, size) in enumerate(zip(items, shape, strict=True)):
        if isinstance(item, slice):
            chosen.append(_range(item, axis, size, items, shape))
            kept.append(chosen[-1][1])
        else:
            chosen.append((_one(item, axis, size, items, shape), 1, 1))
    return chosen, kept


def _one(item, axis, size, items, shape):
    try:
        at = operator.index(item)
    except TypeError:
        told = f"Unsupported slice index at position {axis}: expected slice, int, or ellipsis"
        raise error(told) from None
    if at < -size:
        raise error(f"Invalid index {at} for dimension {axis} of size {size}")
    if at >= size:
        raise _outside(at, axis, size, items, shape)
    return at % size


def _range(item, axis, size, items, shape):
    step = 1 if item.step is None else operator.index(item.step)
    if step < 1:
        raise error(f"Slice step must be a positive integer, got {step}", "turn what was loaded")
    start, stop = (
        default if bound is None else operator.index(bound)
        for bound, default in ((item.start, 0), (item.stop, size))
    )
    for bound in (start, stop):
        if bound < -size:
            raise error(f"Invalid index {bound} for dimension {axis} of size {size}")
    start, stop = (bound + size if bound < 0 else bound for bound in (start, stop))
    if max(start, stop) > size:
        raise _outside(max(start, stop) - 1, axis, size, items, shape)
    return start, len(range(start, stop, step)), step


def _outside(at, axis, size, items, shape):
    return error(f"Error during slicing {_told(items, shape)} with shape {list(shape)}: "
                 f"index {at} out of bounds for tensor dimension #{axis} of size {size}")


def _told(items, shape=()):
    """As it was written, without the axes at the end that nobody named."""
    def one(item):
        if not isinstance(item, slice):
            return "..." if item is Ellipsis else str(item)
        start, stop, step = ("" if at is None else str(at) for at in (item.start, item.stop, item.step))
        return f"{start}:{stop}" + (f":{step}" if step else "")

    items = list(items)
    while len(items) > 1 and items[-1] == slice(None):
        items.pop()
    return f"[{', '.join(map(one, items))}]"
