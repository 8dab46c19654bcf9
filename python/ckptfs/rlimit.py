"""What a process may still take of the system. In: nothing. Out: numbers."""

import os
import resource
import sys


def most_open():
    """How many files may be open at once: half of those that this process can still open, because others
    in it open theirs meanwhile."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        # Not counting the one that it takes to look.
        most -= len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        # Where nobody tells, few are left open.
        most = min(most, 64)
    return max(1, most // 2)
