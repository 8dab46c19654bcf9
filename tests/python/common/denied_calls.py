"""Has the kernel refuse a system call, as it does on filesystems that lack it."""

import ctypes
import os
import platform
import struct
import traceback

NUMBERS = {"x86_64": {"flock": 73, "statx": 332}, "aarch64": {"flock": 32, "statx": 291}}

# Of prctl, and of the filters of seccomp.
NO_NEW_PRIVS, SET_SECCOMP, FILTER = 38, 22, 2
LOAD_NUMBER, JUMP_IF_EQUAL, RETURN, ERRNO, ALLOW = 0x20, 0x15, 0x06, 0x00050000, 0x7FFF0000


def deny(name, code):
    """From now on each call of `name` by this process fails with an errno. There is no way back."""
    number = NUMBERS[platform.machine()][name]
    filter = b"".join(struct.pack("HBBI", *statement) for statement in [
        (LOAD_NUMBER, 0, 0, 0), (JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | code), (RETURN, 0, 0, ALLOW),
    ])  # fmt: skip
    held = ctypes.create_string_buffer(filter)
    program = struct.pack("HP", len(filter) // 8, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(SET_SECCOMP, FILTER, ctypes.create_string_buffer(program)) == 0, ctypes.get_errno()


def succeeds_without(name, code, act):
    """Whether `act` succeeds in a process in which a system call fails with an errno."""
    child = os.fork()
    if child == 0:
        try:
            deny(name, code)
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0
