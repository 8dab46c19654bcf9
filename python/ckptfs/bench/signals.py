"""Signals that end a program, where what it made must be taken away first.

In: a block that is to be heeded, and in it blocks that may end at once. Out: `Stopped`, raised in one of
those alone, so that nothing that tidies up is interrupted; the next signals are not listened to.
"""

import contextlib
import os
import signal
import sys
import threading

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal came that ends this program."""

    def die(self):
        """Ends this process as the signal would have, which is what a shell looks at."""
        sys.stdout.flush()
        signal.signal(self.args[0], signal.SIG_DFL)
        os.kill(os.getpid(), self.args[0])


class _Heeded:
    came, may_end = None, False


@contextlib.contextmanager
def heeded():
    """Signals end this block only where it says `waits`, and at its end. Elsewhere than in the main thread,
    which alone is told of signals, they do what they did."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # What is ignored, as after nohup, stays so.
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {number: was for number, was in before.items() if was not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, _heard)
        yield
        if _Heeded.came:
            raise Stopped(_Heeded.came)
    finally:
        for number, was in before.items():
            signal.signal(number, was)
        _Heeded.came = None


@contextlib.contextmanager
def waits():
    """A block that may be left half done."""
    try:
        _Heeded.may_end = True
        if _Heeded.came:
            raise Stopped(_Heeded.came)
        yield
    finally:
        _Heeded.may_end = False


def _heard(number, _frame):
    if _Heeded.came:
        return
    _Heeded.came = number
    if _Heeded.may_end:
        _Heeded.may_end = False
        raise Stopped(number)
