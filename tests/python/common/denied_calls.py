"""Makes the kernel refuse a system call, as it does on filesystems that lack it, or kill the process at the call."""

import ctypes
import errno
import os
import platform
import struct
import traceback

NUMBERS = {
    "x86_64": {"flock": 73, "fsync": 74, "open": 2, "openat": 257, "rename": 82, "renameat": 264, "renameat2": 316,
               "statx": 332},
    "aarch64": {"flock": 32, "fsync": 82, "openat": 56, "renameat": 38, "renameat2": 276, "statx": 291},
}[platform.machine()]  # fmt: skip

# Of prctl, and of the filters of seccomp.
NO_NEW_PRIVS, SET_SECCOMP, FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, JUMP_IF_BITS, RETURN = 0x20, 0x15, 0x45, 0x06
KILL, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000

# Where the number of a call is, and the lower halves of its arguments.
NUMBER, ARGUMENTS = 0, [16, 24, 32]

# What O_TMPFILE has and O_DIRECTORY lacks.
NAMELESS = os.O_TMPFILE & ~os.O_DIRECTORY


def filter_calls(name, action, place=0, flag=None):
    """Makes the kernel act on each call of `name`; with `flag`, only if the argument at `place` has it."""
    has_flag = [(LOAD, 0, 0, ARGUMENTS[place]), (JUMP_IF_BITS, 0, 1, flag)] if flag else []
    program = b"".join(struct.pack("HBBI", *statement) for statement in [
        (LOAD, 0, 0, NUMBER), (JUMP_IF_EQUAL, 0, 1 + len(has_flag), NUMBERS[name]), *has_flag,
        (RETURN, 0, 0, action), (RETURN, 0, 0, ALLOW),
    ])  # fmt: skip
    held = ctypes.create_string_buffer(program)
    described = struct.pack("HP", len(program) // 8, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(SET_SECCOMP, FILTER, ctypes.create_string_buffer(described)) == 0, ctypes.get_errno()


def deny(name, code):
    """From now on each call of `name` by this process fails with an errno; with 0, it does nothing and succeeds. There is
    no way back."""
    filter_calls(name, ERRNO | code)


def deny_nameless_files():
    """From now on this process finds no filesystem with nameless files."""
    for name, place in ("open", 1), ("openat", 2):
        if name in NUMBERS:
            filter_calls(name, ERRNO | errno.EOPNOTSUPP, place, NAMELESS)


def die_at(name):
    """The next call of `name` kills this process (SIGSYS); for a rename, of any of its kinds."""
    for known in NUMBERS:
        if known == name or (name == "rename" and known.startswith(name)):
            filter_calls(known, KILL)


def succeeds_after(prepare, act):
    """Whether `act` succeeds after `prepare` in a process of its own."""
    child = os.fork()
    if child == 0:
        try:
            prepare()
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def succeeds_without(name, code, act):
    """Whether `act` succeeds in a process in which a system call fails with an errno."""
    return succeeds_after(lambda: deny(name, code), act)
