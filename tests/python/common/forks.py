"""Work in forked processes, also as an unprivileged user."""

import os
import traceback

# An unprivileged user without a name here.
OTHER = 4002


def in_a_fork(work):
    """Runs work in a forked process, and tells whether it succeeded: neither an exception nor `False`."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(work() is False)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def as_another(work):
    """Runs work in a forked process of an unprivileged user, and tells whether it succeeded."""

    def become_another():
        os.setgroups([])
        os.setresgid(OTHER, OTHER, OTHER)
        os.setresuid(OTHER, OTHER, OTHER)
        return work()

    return in_a_fork(become_another)


def let_others_through(folder):
    """Lets other users pass through a directory and its parents to their files."""
    for above in [folder, *folder.parents[:-2]]:
        above.chmod(above.stat().st_mode | 0o011)
