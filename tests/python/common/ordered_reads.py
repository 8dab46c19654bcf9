"""Reads the tensors of a virtual file in an order, and no byte around them."""

import json
import os
import random
import time

MIB = 1 << 20


def shuffled(seed=3):
    """An order of names."""
    def order(names):
        random.Random(seed).shuffle(names)
        return names

    return order


def read_in_order(path, order, pause=0.01):
    """The bytes of all tensors, read in an order of their names, with the time between them that a program takes to use
    one."""
    tensors = {}
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        header = 8 + int.from_bytes(file.read(8), "little")
        places = json.loads(os.pread(file.fileno(), header - 8, 8))
        places.pop("__metadata__", None)
        for name in order(sorted(places)):
            start, end = (header + at for at in places[name]["data_offsets"])
            parts = [os.pread(file.fileno(), min(MIB, end - at), at) for at in range(start, end, MIB)]
            tensors[name] = b"".join(parts)
            time.sleep(pause)
    return tensors
