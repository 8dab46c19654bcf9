"""What an index selects of a shape. Nothing is read.

Integers, slices and ellipses select what is read. Torch applies the other items that it takes (None, bools, lists,
ranges, tensors, arrays) to what was read. An axis with such an item is read whole. As in safetensors, slices are
clipped to the tensor for torch. For numpy an index has integers and slices alone, and a slice that leads out of the
tensor is an error.
"""

import operator
from typing import NamedTuple

from ckptfs.errors import error


class IndexSelection(NamedTuple):
    """What is read: of each axis the first index, the count and the step, and the shape of that. Also the index that
    torch then applies to it, or `None`."""

    steps: list
    shape: list
    rest: tuple | None


def select_index(index, shape, clips):
    """What an index selects of a shape. With `clips` (torch) slices are clipped, and items that are no integer or slice
    are left for torch. Without it both are refused."""
    items = _items(index)
    ellipses = [at for at, item in enumerate(items) if item is Ellipsis]
    if len(ellipses) > 1:
        raise error("Only one ellipsis (...) is allowed in slice index")
    axes = [_axes(item) for item in items]
    if sum(axes) > len(shape):
        raise error(f"Error during slicing {_index_text(items)} with shape {list(shape)}: more slicing "
                    f"indexes than dimensions in tensor", also=IndexError)  # fmt: skip
    at = ellipses[0] if ellipses else len(items)
    between = [slice(None)] * (len(shape) - sum(axes))
    items[at : at + len(ellipses)] = between
    axes[at : at + len(ellipses)] = [1] * len(between)
    steps, kept, rest = [], [], []
    for place, (item, count) in enumerate(zip(items, axes, strict=True)):
        axis = len(steps)
        if isinstance(item, slice):
            steps.append(_range(item, axis, shape[axis], items, shape, clips))
            kept.append(steps[-1][1])
            rest.append(slice(None))
        elif _is_integer(item):
            steps.append((_select_integer(item, axis, shape[axis], items, shape), 1, 1))
        elif not clips or not _is_for_torch(item):
            raise _unsupported(place, item)
        else:
            rest.append(item)
            for size in shape[axis : axis + count]:
                steps.append((0, size, 1))
                kept.append(size)
    left = any(not isinstance(item, slice) for item in rest)
    return IndexSelection(steps, kept, tuple(rest) if left else None)


def index_loaded(loaded, rest):
    """What torch selects by the rest of an index."""
    try:
        return loaded[rest]
    except IndexError as fault:
        raise error(str(fault), also=IndexError) from None
    except (TypeError, ValueError, RuntimeError) as fault:
        raise error(f"Unsupported slice index: {fault}") from None


def _items(index):
    if isinstance(index, list) and not index:
        return [slice(0, 0)]
    return list(index) if isinstance(index, tuple) else [index]


def _is_integer(item):
    if isinstance(item, bool) or _is_mask(item) or getattr(item, "ndim", 0):
        return False
    return hasattr(item, "__index__")


def _is_for_torch(item):
    return item is None or isinstance(item, bool | list | tuple | range) or hasattr(item, "ndim")


def _is_mask(item):
    """Whether it selects by booleans; for torch an array of bytes does too."""
    kind = str(getattr(item, "dtype", "")).removeprefix("torch.")
    return kind == "bool" or kind == "uint8" and item.ndim > 0


def _axes(item):
    """How many axes of the tensor an item of an index stands for."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if _is_mask(item):
        return item.ndim
    if isinstance(item, list | tuple):
        depth, inside = 0, item
        while isinstance(inside, list | tuple) and inside:
            depth, inside = depth + 1, inside[0]
        return depth if isinstance(inside, bool) else 1
    return 1


def _select_integer(item, axis, size, items, shape):
    try:
        at = operator.index(item)
    except TypeError:
        raise _unsupported(axis, item) from None
    if at < -size:
        raise error(f"Invalid index {at} for dimension {axis} of size {size}", also=IndexError)
    if at >= size:
        raise _index_error(at, axis, size, items, shape)
    return at % size


def _range(item, axis, size, items, shape, clips):
    try:
        start, stop, step = (
            None if bound is None else operator.index(bound) for bound in (item.start, item.stop, item.step)
        )
    except TypeError:
        message = f"Unsupported slice {_index_text([item])}: its bounds and its step must be integers"
        raise error(message, also=TypeError) from None
    step = 1 if step is None else step
    if step < 1:
        raise error(f"Slice step must be a positive integer, got {step}", "reverse what was loaded")
    for bound in (start, stop):
        if not clips and bound is not None and bound < -size:
            raise error(f"Invalid index {bound} for dimension {axis} of size {size}")
    first = start + size if start is not None and start < 0 else start or 0
    end = size if stop is None else stop + size if stop < 0 else stop
    if not clips and (first >= size and first or end > size):
        raise _index_error(max(first, end - 1), axis, size, items, shape)
    # A longer step leads out of the tensor too.
    start, stop, step = slice(start, stop, min(step, size or 1)).indices(size)
    return start, len(range(start, stop, step)), step


def _index_error(at, axis, size, items, shape):
    return error(f"Error during slicing {_index_text(items)} with shape {list(shape)}: "
                 f"index {at} out of bounds for tensor dimension #{axis} of size {size}",
                 also=IndexError)  # fmt: skip


def _unsupported(place, item):
    if isinstance(item, list):
        message = "Non empty lists are not implemented"
    else:
        message = f"Unsupported slice index at position {place}: expected slice, int, or ellipsis"
    return error(message, "use slices, one after the other, or index what was loaded")


def _index_text(items):
    """An index as it was written, without the axes at the end that it does not name."""
    def one(item):
        if not isinstance(item, slice):
            return "..." if item is Ellipsis else str(item)
        start, stop, step = ("" if at is None else str(at) for at in (item.start, item.stop, item.step))
        return f"{start}:{stop}" + (f":{step}" if step else "")

    items = list(items)
    while len(items) > 1 and isinstance(items[-1], slice) and items[-1] == slice(None):
        items.pop()
    return f"[{', '.join(map(one, items))}]"
