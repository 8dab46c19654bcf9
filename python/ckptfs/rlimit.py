"""What the system still lets this process take."""

import os
import resource
import sys

# Used where the system does not say how many files are open.
_FALLBACK_OPEN_FILES = 64


def max_open_files():
    """Half of the files that this process can still open: others in it open theirs meanwhile."""
    free = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if free == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        # The descriptor of the directory that is listed does not count.
        free -= len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        free = min(free, _FALLBACK_OPEN_FILES)
    return max(1, free // 2)
